"""What a step costs one rank at the least: bytes and operations of each part, and their time.

Needs the standard library only. The rank ladder divides its floors by measured times.

Each input is read once and each output written once, intermediates inside a part not at all; a
part's floor is the larger of bytes over bandwidth and operations over rate, and parts follow one
another, so a step's floor is their sum. The rates are what one H200 reached in our own copies and
products (``kernels/benchmarks/floors.py``): 4.3 TB/s and 790 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.performance.census import census
from kimik3_lab.performance.draft_cost import drafter_matrices

__all__ = ["BANDWIDTH", "FLOP_RATE", "Part", "Rows", "StepFloor", "expected_distinct"]

#: Bytes a second of a copy, and operations a second of a large bfloat16 product, on an H200.
BANDWIDTH, FLOP_RATE = 4.3e12, 790e12
#: Bytes of an MXFP4 weight with its share of a scale byte, and of a bfloat16 and a float32 number.
_MXFP4, _BF16, _F32 = 17 / 32, 2, 4


class Rows(NamedTuple):
    """Rows of one request in a step: ``count`` tokens after ``start`` cached ones.

    The last ``drafts`` of them are to be verified.
    """

    start: int
    count: int
    drafts: int = 0

    @property
    def is_prompt(self) -> bool:
        """Whether it is a chunk of a prompt."""
        return self.count > 1 + self.drafts


@dataclass(frozen=True)
class Part:
    """Bytes and operations of one part of a step."""

    name: str
    bytes: float
    flops: float = 0.0

    @property
    def seconds(self) -> float:
        """Least time."""
        return max(self.bytes / BANDWIDTH, self.flops / FLOP_RATE)


def expected_distinct(share: Sequence[float], top_k: int, rows: int) -> float:
    """Experts that ``rows`` independent tokens are expected to choose, with uneven load.

    Examples
    --------
    >>> round(expected_distinct([1 / 896] * 896, 16, 16), 1)
    224.4
    """
    return sum(1 - (1 - min(1.0, top_k * s)) ** rows for s in share)


class StepFloor:
    """Floors of the steps of one rank.

    Parameters
    ----------
    config : K3Config
        The slice.
    distinct : callable
        Rows of a step to distinct experts of a layer.
    drafter : DSparkConfig, optional
        Of the drafter's slice.
    num_drafts : int
        K.
    records : bool
        Whether verification keeps records, or a state for each draft.

    Examples
    --------
    >>> floor = StepFloor(K3Config.rank_slice(), lambda rows: 16.0)
    >>> parts = floor.target([Rows(8000, 1)])
    >>> [part.name for part in parts]
    ['dense products', 'experts', 'KDA', 'MLA', 'attention residuals', 'output head']
    >>> round(1e3 * sum(part.seconds for part in parts), 2)
    1.7
    """

    def __init__(
        self,
        config: K3Config,
        distinct: Callable[[int], float],
        *,
        drafter: DSparkConfig | None = None,
        num_drafts: int = 8,
        records: bool = False,
    ) -> None:
        self.config, self.distinct, self.drafter = config, distinct, drafter
        self.num_drafts, self.records = num_drafts, records
        apart = {"embedding", "lm_head", "routed_experts"}
        self._trunk = sum(
            n * spec.bytes for spec, n in census(config) if spec.component not in apart
        )
        self._head = float(_BF16 * config.vocab_size * config.hidden_size)
        per_expert = 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
        self._expert_weights = per_expert

    # -- the target --------------------------------------------------------------------------

    def target(self, requests: Sequence[Rows]) -> list[Part]:
        """Parts of a forward pass over these rows."""
        config = self.config
        rows = sum(r.count for r in requests)
        sampled = sum(1 + r.drafts for r in requests)
        hidden = config.hidden_size
        moe_layers, top_k = len(config.moe_layer_ids), config.num_experts_per_token
        experts = self.distinct(rows) * self._expert_weights * _MXFP4
        experts += 2 * rows * config.routed_expert_hidden_size * _BF16
        head_bytes = self._head + sampled * (hidden * _BF16 + config.vocab_size * _F32)
        return [
            Part("dense products", self._trunk, self._trunk / _BF16 * 2 * rows),
            Part(
                "experts",
                moe_layers * experts,
                moe_layers * 2.0 * rows * top_k * self._expert_weights,
            ),
            self._kda(requests),
            self._mla(requests),
            Part("attention residuals", float(rows * hidden * _BF16 * self._residual_rows())),
            Part("output head", head_bytes, self._head / _BF16 * 2 * sampled),
        ]

    def _residual_rows(self) -> int:
        """Rows read and written for each token over all reads of the residual stream."""
        total = blocks = 0
        for layer in range(self.config.num_hidden_layers):
            total += blocks + 4  # the blocks, sum and output in; sum and input out
            blocks += layer % self.config.attn_res_block_size == 0
            total += blocks + 4
        return total + blocks + 3

    def _kda(self, requests: Sequence[Rows]) -> Part:
        linear = self.config.linear_attn_config
        heads, width = linear.num_heads, linear.head_dim
        state, row = width * width * _F32, 6 * width * _BF16 + _BF16
        window = (linear.short_conv_kernel_size - 1) * 3 * width * _BF16
        moved = flops = 0.0
        for r in requests:
            moved += r.count * row + 2 * window + 2 * state
            if r.drafts and self.records:
                # Verification reads the state; its commit moves it once more, with the records.
                moved += state + 2 * r.count * width * (_F32 + 2 * _BF16)
            elif r.drafts:
                moved += r.drafts * state
            if r.is_prompt:
                flops += r.count * (6.0 * width**2 + 10.0 * 16 * width)
            else:
                flops += r.count * 7.0 * width**2
        layers = len(self.config.kda_layer_ids)
        return Part("KDA", layers * heads * moved, layers * heads * flops)

    def _mla(self, requests: Sequence[Rows]) -> Part:
        config = self.config
        heads, wide = config.num_attention_heads, config.mla_cache_dim
        narrow = config.qk_head_dim + config.v_head_dim
        rebuilt = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
        moved = flops = 0.0
        for r in requests:
            length = r.start + r.count
            pairs = r.count * r.start + r.count * (r.count + 1) / 2
            absorbed = pairs * (wide + config.kv_lora_rank) + r.count * rebuilt
            expanded = pairs * narrow + length * rebuilt
            flops += 2.0 * heads * min(absorbed, expanded)
            moved += (length + r.count) * wide * _BF16 + r.count * heads * narrow * _BF16
        layers = len(config.mla_layer_ids)
        return Part("MLA", layers * moved, layers * flops)

    # -- the drafter -------------------------------------------------------------------------

    def draft(self, requests: Sequence[Rows]) -> list[Part]:
        """Return the parts of what the drafter does in a step.

        It keeps rows of all tokens, and has a pass over all requests, as they are sampled from.
        """
        config = self.drafter
        if config is None:
            return []
        rows = sum(r.count for r in requests)
        drafted = len(requests) * self.num_drafts
        context = sum(r.start + r.count for r in requests)
        parts = [
            Part(
                f"drafter, {name}",
                size,
                size / _BF16 * 2 * (rows if name == "context" else drafted),
            )
            for name, size in drafter_matrices(config, 1)
        ]
        wide = config.kv_lora_rank + config.qk_rope_head_dim
        pairs = sum(self.num_drafts * (r.start + r.count + self.num_drafts) for r in requests)
        flops = 2.0 * config.num_attention_heads * pairs * (wide + config.kv_lora_rank)
        layers = config.num_hidden_layers
        parts.append(
            Part(
                "drafter, attention",
                layers * (context + rows + drafted) * wide * float(_BF16),
                layers * flops,
            )
        )
        table = float(_BF16 * config.vocab_size * config.markov_rank)
        head = self._head + drafted * config.vocab_size * _F32
        parts.append(Part("drafter, output head", head, self._head / _BF16 * 2 * drafted))
        parts.append(Part("drafter, Markov head", self.num_drafts * table))
        return parts
