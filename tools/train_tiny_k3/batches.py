"""Rows of tokens to train on: random cuts of the shuffled text, a stateless function of the step.

Needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Batches", "TokenStream"]


class TokenStream:
    """Documents as token ids, each between bos and eos.

    Examples
    --------
    >>> stream = TokenStream.from_documents([[7, 8], [9]], bos=0, eos=1)
    >>> stream.num_tokens
    7
    """

    def __init__(self, documents: Sequence[Tensor], bos: int) -> None:
        self.documents = list(documents)
        self.bos = bos
        self.num_tokens = sum(map(len, self.documents))

    @classmethod
    def from_documents(cls, encoded: Sequence[Sequence[int]], bos: int, eos: int) -> TokenStream:
        """Put bos before and eos after each document."""
        return cls([torch.tensor([bos, *ids, eos], dtype=torch.int64) for ids in encoded], bos)

    def shuffled(self, seed: int) -> Tensor:
        """All documents in a random order, as one row of ids."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.documents), generator=generator).tolist()
        return torch.cat([self.documents[i] for i in order])


class Batches:
    """Batches by number; the same number always gives the same batch.

    An epoch shuffles the documents, joins them, drops a random number of tokens at the front so
    that cuts fall elsewhere than last time, and cuts rows of ``length``. Each row gets a bos in
    front: a prompt, too, is a bos and then text from anywhere in a file.

    Parameters
    ----------
    stream
        The text.
    batch_size, length
        Rows and tokens a row.
    seed
        Of order and cuts.

    Examples
    --------
    >>> stream = TokenStream.from_documents([list(range(10, 60))], bos=0, eos=1)
    >>> batches = Batches(stream, batch_size=2, length=8, seed=0)
    >>> batches.at(3).shape, bool((batches.at(3) == batches.at(3)).all())
    (torch.Size([2, 9]), True)
    """

    def __init__(self, stream: TokenStream, batch_size: int, length: int, seed: int) -> None:
        # A row is bos and `length` tokens; the random front takes less than one row.
        rows = stream.num_tokens // length - 1
        if rows < batch_size:
            raise ValueError(
                f"{stream.num_tokens} tokens give {max(rows, 0)} rows of {length}, fewer than a "
                f"batch of {batch_size}: take a smaller batch or shorter rows"
            )
        self.stream, self.batch_size, self.length, self.seed = stream, batch_size, length, seed
        self.steps_per_epoch = rows // batch_size
        self._epoch, self._rows = -1, torch.empty(0)

    def at(self, step: int) -> Tensor:
        """Batch of ``step``: int64 ``[batch_size, length + 1]``; inputs are all but the last."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._rows = self._cut(epoch)
            self._epoch = epoch
        rows = self._rows[index * self.batch_size : (index + 1) * self.batch_size]
        front = rows.new_full((len(rows), 1), self.stream.bos)
        return torch.cat((front, rows), 1)

    def _cut(self, epoch: int) -> Tensor:
        seed = (self.seed * 1_000_003 + epoch) % 2**63
        generator = torch.Generator().manual_seed(seed)
        skip = int(torch.randint(self.length, (), generator=generator))
        rows = self.stream.shuffled(seed)[skip:]
        rows = rows[: len(rows) // self.length * self.length].view(-1, self.length)
        return rows[torch.randperm(len(rows), generator=generator)]
