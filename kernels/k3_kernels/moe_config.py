"""Launch constants of the expert GEMMs: what they are, measured ones, a rule for the rest.

Needs PyTorch. Used by :mod:`k3_kernels.moe` and by the tuner ``benchmarks.tune_moe``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from k3_kernels import tuned
from k3_kernels.moe_weights import ExpertWeights, MXFP4Experts

__all__ = ["MoEConfig", "choose_config", "shape_key"]


@dataclass(frozen=True)
class MoEConfig:
    """Launch constants of one expert call.

    Attributes
    ----------
    direct
        No dispatch: every pair looks for the others of its expert itself.
    prefill
        The kernels for many tokens an expert. Plain weights always run through them.
    block_m
        Tokens that share a read of the weights.
    extra_m
        Prefill only: so many more, so that a program holds a number that is no power of two.
    gate_block_n, gate_split, gate_unroll, gate_stages, gate_warps
        Rows of gate and of up a program; programs that share the columns; unrolling and pipeline
        depth of the loop over columns; warps.
    down_block_n, down_split, down_unroll, down_stages, down_warps
        The same for down.
    down_row_blocks
        Row blocks that a program of down computes one after another.
    down_resident
        It keeps its activations in registers or shared memory meanwhile.
    block_k
        Columns a step of the prefill kernels with plain weights.
    fit
        Prefill only: tiles read the tokens they have and no copies to fill up, and a half-empty
        one is multiplied at half its size: worth it where loads differ.
    fit_extra
        With ``fit`` and ``extra_m``: half a tile and ``extra_m`` more are a size of their own too.
    listed
        Prefill only: programs take their tiles from a list (:mod:`k3_kernels.moe_tiles`), so that
        none is started for nothing and an expert's weights are read from memory once; they work at
        so many places of the list at the same time.
    gate_boxed, down_boxed
        Plain weights only: the copy engine brings weights, and what down reads, as whole tiles.
    gate_registers, down_registers
        Most registers a thread may use, 0 for as many as the compiler likes: fewer let more
        programs share a multiprocessor.
    """

    direct: bool = False
    prefill: bool = False
    block_m: int = 8
    extra_m: int = 0
    gate_block_n: int = 64
    gate_split: int = 1
    gate_unroll: int = 2
    gate_stages: int = 3
    gate_warps: int = 4
    down_block_n: int = 64
    down_split: int = 1
    down_unroll: int = 2
    down_stages: int = 3
    down_warps: int = 4
    down_row_blocks: int = 1
    down_resident: bool = False
    block_k: int = 128
    fit: bool = False
    fit_extra: bool = False
    listed: int = 0
    gate_boxed: bool = False
    down_boxed: bool = False
    gate_registers: int = 0
    down_registers: int = 0

    def __post_init__(self) -> None:
        for name in ("block_m", "extra_m", "gate_block_n", "down_block_n", "block_k"):
            value = getattr(self, name)
            if value < (0 if name == "extra_m" else 1) or value & (value - 1):
                raise ValueError(f"MoEConfig: {name} must be a power of two, got {value}")
        if self.extra_m and (self.extra_m > self.block_m or self.block_m // self.extra_m > 15):
            raise ValueError(
                f"MoEConfig: extra_m={self.extra_m} must go into block_m={self.block_m} "
                "once to 15 times"
            )
        if self.fit_extra and not self.fit:
            raise ValueError("MoEConfig: fit_extra needs fit")
        if self.listed < 0 or self.listed & (self.listed - 1):
            raise ValueError(f"MoEConfig: listed must be 0 or a power of two, got {self.listed}")
        if self.down_resident and self.down_split > 1:
            raise ValueError("MoEConfig: down_resident and down_split exclude each other")
        if self.down_resident and self.down_boxed:
            raise ValueError("MoEConfig: down_resident and down_boxed exclude each other")

    @property
    def granule(self) -> int:
        """Block size of dispatch."""
        return self.extra_m or self.block_m

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MoEConfig:
        """Build from a table entry; unknown names are an error."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(
                f"MoEConfig has no field {sorted(unknown)}: the table is newer or older"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, int | bool]:
        """Return the fields that differ from the defaults, for a table."""
        default = asdict(MoEConfig())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


def shape_key(experts: ExpertWeights) -> str:
    """Return the name of a shape in the tables.

    Examples
    --------
    >>> import torch
    >>> from k3_kernels import BF16Experts
    >>> shape_key(BF16Experts(torch.zeros(4, 16, 32), torch.zeros(4, 32, 8)))
    'bf16,E=4,I=8,H=32'
    """
    kind = "mxfp4" if isinstance(experts, MXFP4Experts) else "bf16"
    size = (experts.num_experts, experts.intermediate_size, experts.hidden_size)
    return "{},E={},I={},H={}".format(kind, *size)


def choose_config(experts: ExpertWeights, num_tokens: int, top_k: int) -> MoEConfig:
    """Choose the constants of a call: measured ones if the device's table has the shape.

    Parameters
    ----------
    experts
        Weights.
    num_tokens, top_k
        T and the choices of a token.
    """
    found = tuned.lookup("moe", shape_key(experts), num_tokens, experts.device)
    if found is not None:
        return MoEConfig.from_dict(found)
    pairs = num_tokens * top_k
    short = experts.intermediate_size <= 512
    load = pairs / max(1, experts.num_experts)
    mxfp4 = isinstance(experts, MXFP4Experts)
    if load > 48:
        tile = {"block_m": 128, "extra_m": 32, "listed": 1}
    else:
        tile = {"block_m": 16 if load <= 12 else 32 if load <= 24 else 64}
    if not mxfp4:
        return MoEConfig(
            prefill=True, **tile, block_k=128 if load <= 12 else 64, down_block_n=128,
            down_warps=8, down_row_blocks=4 if short else 1,
        )  # fmt: skip
    if load > 48:
        return MoEConfig(
            prefill=True, **tile, gate_block_n=128, gate_warps=8, down_block_n=128, down_warps=8,
            down_resident=short, down_row_blocks=14 if short else 1,
        )  # fmt: skip
    if load > 12:
        return MoEConfig(
            prefill=True, **tile, down_resident=short, down_row_blocks=14 if short else 1
        )
    return MoEConfig(
        direct=pairs <= 128,
        gate_split=_split(pairs * -(-experts.intermediate_size // 64), experts.hidden_size),
        down_split=1
        if short
        else _split(pairs * -(-experts.hidden_size // 64), experts.intermediate_size),
        down_resident=short,
        down_row_blocks=1 if not short or pairs <= 16 else 4 if pairs <= 64 else 14,
    )


def _split(programs: int, columns: int) -> int:
    """Return 1, 2 or 4: how many parts make some 400 programs, three for a multiprocessor.

    Fewer where a part would be left without one of the blocks of 128 columns.
    """
    wanted = 4 if programs <= 100 else 2 if programs <= 200 else 1
    blocks = -(-columns // 128)
    while -(-blocks // wanted) * (wanted - 1) >= blocks > 0:
        wanted //= 2
    return wanted
