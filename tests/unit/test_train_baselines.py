"""The baselines: Kneser-Ney worked by hand, its probabilities sum to one, gzip is gzip."""

from __future__ import annotations

import gzip
import shutil
import subprocess

import numpy as np
import pytest

from tools.train_tiny_k3.baselines import compressors, gzip_bits, kneser_ney_bits
from tools.train_tiny_k3.kneser_ney import KneserNey

TEXT = b"def spam(eggs):\n    return eggs + spam(eggs)\n\n\nfor egg in eggs:\n    print(egg)\n" * 3


@pytest.mark.parametrize("order", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("context", [b"", b"e", b"eggs", b"return eg", b"\xff\x00 never"])
def test_probabilities_of_all_bytes_sum_to_one(order: int, context: bytes) -> None:
    p = KneserNey([TEXT, b"another text"], order).distribution(context)
    assert p.shape == (256,)
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    assert (p > 0).all()


def test_a_text_is_scored_byte_by_byte_from_the_bytes_before() -> None:
    model, text = KneserNey([TEXT], 4), b"eggs and ham"
    want = [model.distribution(text[:i])[text[i]] for i in range(len(text))]
    np.testing.assert_allclose(model.probabilities(text), want, rtol=1e-12)
    assert model.bits(text) == pytest.approx(-np.log2(want).sum())


def test_two_letters_by_hand() -> None:
    r"""Bigrams of "aab" and "ab" (each after one newline): \na 2, aa 1, ab 2.

    One bigram occurred once and two occurred twice, none three times: one discount for all,
    D = n1 / (n1 + 2 n2) = 1 / 5. Single bytes count the different bytes before them: a follows
    newline and a (2), b follows a (1); one count of 1, one of 2: D = 1 / 3.
    """
    model = KneserNey([b"aab", b"ab"], order=2)
    a = (2 - 1 / 3) / 3 + (2 / 3) / 3 / 256
    b = (1 - 1 / 3) / 3 + (2 / 3) / 3 / 256
    rest = (2 / 3) / 3 / 256
    after_a, after_newline = model.distribution(b"a"), model.distribution(b"")
    leftover = 2 * (1 / 5) / 3  # two kinds of bigram begin with a, three in all
    assert after_a[ord("a")] == pytest.approx((1 - 1 / 5) / 3 + leftover * a)
    assert after_a[ord("b")] == pytest.approx((2 - 1 / 5) / 3 + leftover * b)
    assert after_a[ord("c")] == pytest.approx(leftover * rest)
    assert after_newline[ord("a")] == pytest.approx((2 - 1 / 5) / 2 + (1 / 5) / 2 * a)
    # Nothing was seen after b: the shorter context decides alone.
    assert model.distribution(b"b")[ord("a")] == pytest.approx(a)


def test_three_discounts_from_counts_of_counts() -> None:
    """Four bytes once, three twice, two three times, one four times: Y = 4 / (4 + 6) = 0.4."""
    once, twice, thrice, often = b"abcd", b"efg", b"hi", b"j"
    model = KneserNey([once + twice * 2 + thrice * 3 + often * 4], order=1)
    d1, d2, d3 = 1 - 0.8 * 3 / 4, 2 - 1.2 * 2 / 3, 3 - 1.6 * 1 / 2
    np.testing.assert_allclose(model.levels[0].discounts, [0, d1, d2, d3])
    total = 4 + 6 + 6 + 4
    freed = (4 * d1 + 3 * d2 + 3 * d3) / total
    assert model.distribution(b"")[ord("j")] == pytest.approx((4 - d3) / total + freed / 256)


def test_no_ngram_spans_two_texts() -> None:
    apart = KneserNey([b"xy", b"zx"], order=2).levels[1].ngrams
    assert int.from_bytes(b"yz", "big") not in apart.tolist()


def test_counting_beats_a_compressor_and_order_helps() -> None:
    held_out = [b"def eggs(spam):\n    return spam + eggs(spam)\n"]
    size = len(held_out[0])
    bits = [kneser_ney_bits([TEXT], held_out, order)[0] / size for order in (1, 2, 4)]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < gzip_bits(held_out[0]) / size


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="order must be"):
        KneserNey([b"a"], 9)
    with pytest.raises(ValueError, match="nothing to count"):
        KneserNey([b"", b""])


def test_gzip_is_the_program(tmp_path) -> None:
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    assert gzip.decompress(gzip.compress(TEXT, 9, mtime=0)) == TEXT
    if shutil.which("gzip"):
        out = subprocess.run(["gzip", "-9nc", path], capture_output=True, check=True).stdout
        # zlib inside Python may be another implementation: sizes differ by a little at most.
        assert 8 * len(out) == pytest.approx(gzip_bits(TEXT), rel=0.03)


def test_having_seen_the_training_text_helps_xz() -> None:
    other = bytes(range(256)) * 4
    found = compressors([TEXT + other], [other, TEXT])
    assert found["xz_after_training"] < found["xz_together"]
    assert found["gzip_together"] <= found["gzip_per_file"]
