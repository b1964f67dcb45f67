"""What a speculative KDA step keeps so that any number of its tokens can be committed afterwards.

Needs PyTorch. :func:`k3_kernels.kda_decode` writes the records, :func:`k3_kernels.kda_recover`
reads them; lesson 06 counts their bytes.

A verify step runs over ``1 + K`` tokens before anybody knows how many of them will be accepted. It
can keep the state after each of them, 64 kB a head and token at K = V = 128, or the state before
the first and the three vectors that lead on from it, 1 kB a head and token::

    u     the value that the token wrote, beta (v - S'^T k): it holds all that came before
    key   the key after convolution and SiLU, not normalised yet
    gate  the raw gate of the decay

They follow vLLM's RecoverSSM (https://github.com/vllm-project/vllm/pull/51855).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3_kernels._compat import check_tensor, shape_of

__all__ = ["KDARecords"]


@dataclass(frozen=True)
class KDARecords:
    """Records of the requests of a step; row b belongs to the step's request b.

    Attributes
    ----------
    u
        ``[R, T, H, V]`` float32, or with a dimension of layers in front.
    key, gate
        ``[R, T, H, K]`` in the type of the activations, likewise.

    Examples
    --------
    Eight drafts and the token before them, 12 heads, for one request: 56 times less than 8 more
    states.

    >>> records = KDARecords.empty(1, 9, 12, 128, dtype=torch.bfloat16)
    >>> records.nbytes, 8 * 12 * 128 * 128 * 4 / records.nbytes
    (110592, 56.888888888888886)
    """

    u: torch.Tensor
    key: torch.Tensor
    gate: torch.Tensor

    @classmethod
    def empty(
        cls,
        rows: int,
        max_tokens: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        layers: int | None = None,
    ) -> KDARecords:
        """Allocate records for ``rows`` requests of at most ``max_tokens`` tokens."""
        shape = (rows, max_tokens, num_heads, head_dim)
        if layers is not None:
            shape = (layers, *shape)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.u.nbytes + self.key.nbytes + self.gate.nbytes

    @property
    def max_tokens(self) -> int:
        """Tokens of a request that there is room for."""
        return int(self.u.shape[-3])

    def layer(self, index: int) -> KDARecords:
        """Return the records of one layer, as views."""
        return KDARecords(self.u[index], self.key[index], self.gate[index])

    def check(
        self, operator: str, shape: tuple[int | None, ...], *, like: torch.Tensor, output: bool
    ) -> None:
        """Refuse tensors that do not fit each other or the call; None in ``shape`` is free."""
        if not isinstance(self.u, torch.Tensor) or self.u.ndim != len(shape):
            raise ValueError(
                f"k3_kernels.{operator}: records.u must have {len(shape)} dimensions "
                f"([layers,] rows, tokens, heads, head dim), got {shape_of(self.u)}: "
                "KDARecords.empty makes them"
            )
        expected = tuple(
            have if want is None else want for have, want in zip(self.u.shape, shape, strict=True)
        )
        check_tensor(
            operator, "records.u", self.u, expected, like=like, same_dtype=False, output=output
        )
        if self.u.dtype != torch.float32:
            raise TypeError(
                f"k3_kernels.{operator}: records.u is {self.u.dtype}, expected torch.float32"
            )
        for name, tensor in (("records.key", self.key), ("records.gate", self.gate)):
            check_tensor(
                operator, name, tensor, expected, like=like, same_dtype=False, output=output
            )
        if self.key.dtype != self.gate.dtype:
            raise TypeError(
                f"k3_kernels.{operator}: records.key is {self.key.dtype} and records.gate is "
                f"{self.gate.dtype}, expected one type"
            )
        for name, tensor in vars(self).items():
            if tensor.numel() and tensor.stride(-2) != tensor.shape[-1]:
                raise ValueError(
                    f"k3_kernels.{operator}: the heads of records.{name} are not next to each other"
                )
