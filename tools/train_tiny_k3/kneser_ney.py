"""A byte n-gram model with interpolated modified Kneser-Ney smoothing: what counting alone can do.

Needs numpy.

How likely is byte ``w`` after the four bytes ``h``? Counting says ``c(hw) / c(h)``, which gives
nothing to what was never seen. So every count is lowered by a discount, and what that frees goes to
the same question asked with one byte less of context::

    p(w | h) = max(c(hw) - D(c(hw)), 0) / c(h)  +  gamma(h) p(w | h without its oldest byte)

Two refinements make it Kneser-Ney. For a shorter context it is not asked how *often* ``hw``
occurred, but after how many *different* bytes: "Francisco" is frequent but follows "San" only. And
the discount has three values, for counts of one, two, and more, estimated from how many n-grams
occurred once to four times (Chen and Goodman 1999, section 3). The shortest distribution, over
single bytes, is mixed with the uniform one, so that every byte has a probability.

Every text is preceded by ``order - 1`` newlines, in training and in scoring, so that its first
bytes have contexts too; these newlines are not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["KneserNey"]

_BYTES = 256
_PAD = b"\n"


class _Level(NamedTuple):
    """N-grams of one length n, packed into integers with the last byte lowest, sorted."""

    ngrams: NDArray[np.uint64]
    counts: NDArray[np.int64]
    #: The contexts (first n - 1 bytes), sorted, the sum of their counts, and gamma.
    contexts: NDArray[np.uint64]
    totals: NDArray[np.int64]
    leftover: NDArray[np.float64]
    #: Taken off a count of 0, 1, 2, and 3 or more.
    discounts: NDArray[np.float64]


class KneserNey:
    """The model.

    Parameters
    ----------
    texts
        What to count, each on its own: no n-gram spans two texts.
    order
        Bytes in an n-gram, 1 to 8: a byte is predicted from the ``order - 1`` before it.

    Examples
    --------
    >>> model = KneserNey([b"abracadabra"], order=3)
    >>> p = model.distribution(b"ab")
    >>> bool(abs(p.sum() - 1) < 1e-12), chr(p.argmax())
    (True, 'r')
    """

    def __init__(self, texts: Sequence[bytes], order: int = 5) -> None:
        if not 1 <= order <= 8:
            raise ValueError(f"order must be from 1 to 8 (bytes packed in 64 bits), got {order}")
        if not any(texts):
            raise ValueError("there is nothing to count: all texts are empty")
        self.order = order
        packed = np.concatenate([_pack(text, order) for text in texts])
        ngrams, counts = np.unique(packed, return_counts=True)
        self.levels = [_level(ngrams, counts.astype(np.int64), order)]
        for length in range(order - 1, 0, -1):
            # Each distinct longer n-gram counts once: how many bytes come before the shorter one.
            shorter = ngrams & np.uint64(_mask(length))
            ngrams, counts = np.unique(shorter, return_counts=True)
            self.levels.append(_level(ngrams, counts.astype(np.int64), length))
        self.levels.reverse()  # shortest first

    def probabilities(self, text: bytes) -> NDArray[np.float64]:
        """Probability of each byte of ``text`` given the ones before it, ``[len(text)]``."""
        return self._probabilities(_pack(text, self.order))

    def distribution(self, context: bytes) -> NDArray[np.float64]:
        """Probability of each of the 256 bytes after ``context``, ``[256]``."""
        before = (_PAD * self.order + context)[len(context) + 1 :]
        stem = np.uint64(int.from_bytes(before, "big") << 8)
        return self._probabilities(stem | np.arange(_BYTES, dtype=np.uint64))

    def bits(self, text: bytes) -> float:
        """Bits that an ideal coder driven by this model needs for ``text``."""
        return float(-np.log2(self.probabilities(text)).sum())

    def _probabilities(self, packed: NDArray[np.uint64]) -> NDArray[np.float64]:
        p = np.full(len(packed), 1 / _BYTES)
        for length, level in enumerate(self.levels, 1):
            ngrams = packed & np.uint64(_mask(length))
            counts = _look_up(level.ngrams, level.counts, ngrams, 0)
            contexts = ngrams >> np.uint64(8)
            totals = _look_up(level.contexts, level.totals, contexts, 0)
            # A context never seen leaves everything to the shorter one.
            leftover = _look_up(level.contexts, level.leftover, contexts, 1.0)
            kept = counts - level.discounts[np.minimum(counts, 3)]
            p = kept / np.maximum(totals, 1) + leftover * p
        return p


def _mask(length: int) -> int:
    return (1 << 8 * length) - 1


def _pack(text: bytes, order: int) -> NDArray[np.uint64]:
    """Pack the n-gram that ends at each byte of ``text``, ``[len(text)]``."""
    data = np.frombuffer(_PAD * (order - 1) + text, np.uint8).astype(np.uint64)
    packed = np.zeros(len(text), np.uint64)
    for place in range(order):
        packed = packed << np.uint64(8) | data[place : place + len(text)]
    return packed


def _level(ngrams: NDArray[np.uint64], counts: NDArray[np.int64], length: int) -> _Level:
    discounts = _discounts(counts)
    # Sorted n-grams have sorted contexts.
    contexts, first = np.unique(ngrams >> np.uint64(8), return_index=True)
    totals = np.add.reduceat(counts, first)
    freed = np.add.reduceat(discounts[np.minimum(counts, 3)], first)
    return _Level(ngrams, counts, contexts, totals, freed / totals, discounts)


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Choose what to take off a count of 0, 1, 2, 3+ by how many n-grams were seen 1 to 4 times."""
    n1, n2, n3, n4 = (int((counts == c).sum()) for c in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) == 0:
        # Too little text to tell: one discount for all, as in the unmodified method.
        single = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
        return np.array([0.0, single, single, single])
    y = n1 / (n1 + 2 * n2)
    values = [0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
    # An odd sample can ask for more than the count or for less than nothing.
    return np.clip(values, 0.0, [0.0, 1.0, 2.0, 3.0])


def _look_up(
    keys: NDArray[np.uint64], values: NDArray, wanted: NDArray[np.uint64], missing: float
) -> NDArray:
    """``values`` at the places of ``wanted`` in the sorted ``keys``, or ``missing``."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], missing)
