"""What the trained model has to beat: compressors, and counting.

Needs numpy. A compressor's size in bits over the size of the text is a bits per byte too.

``gzip_per_file`` compresses each held-out file alone, ``gzip_together`` all of them as one stream,
which is smaller, as later files repeat earlier ones. The model reads each file alone, so comparing
it with the second is the stricter test, and that is what is compared.

None of these compressors has seen the training text, which the model has. ``xz_after_training``
has: it is what the held-out files add to the compressed size of the training text when both are
one stream and the window spans all of it.
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Sequence

from tools.train_tiny_k3.kneser_ney import KneserNey

__all__ = ["compressors", "gzip_bits", "kneser_ney_bits"]


def gzip_bits(data: bytes) -> int:
    """Size of ``gzip -9`` output in bits, header and checksum included."""
    return 8 * len(gzip.compress(data, compresslevel=9, mtime=0))


def compressors(train: Sequence[bytes], held_out: Sequence[bytes]) -> dict[str, float]:
    """Bits per byte of the held-out texts by each compressor.

    Examples
    --------
    >>> found = compressors([b"spam and eggs " * 50], [b"eggs and spam " * 50])
    >>> found["gzip_together"] < 1
    True
    """
    size = sum(map(len, held_out))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 64 << 20}]

    def xz(data: bytes) -> int:
        return 8 * len(lzma.compress(data, lzma.FORMAT_XZ, filters=filters))

    seen = b"".join(train)
    return {
        "gzip_per_file": sum(map(gzip_bits, held_out)) / size,
        "gzip_together": gzip_bits(b"".join(held_out)) / size,
        "xz_together": xz(b"".join(held_out)) / size,
        "xz_after_training": (xz(seen + b"".join(held_out)) - xz(seen)) / size,
    }


def kneser_ney_bits(
    train: Sequence[bytes], held_out: Sequence[bytes], order: int = 5
) -> list[float]:
    """Bits of each held-out text by a byte n-gram model of the training texts."""
    model = KneserNey(train, order)
    return [model.bits(text) for text in held_out]
