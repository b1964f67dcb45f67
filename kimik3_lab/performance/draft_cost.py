"""Time to choose tokens and to draft the next ones: output head, sampling, DSpark.

Needs the standard library only. Lessons 09 and 11 use it. The drafter is the released one
(:class:`~kimik3_lab.drafter_config.DSparkConfig`): five dense layers over a block of rows in one
pass, the target's output head, then one small step for each draft.
"""

from __future__ import annotations

from collections.abc import Mapping

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.performance.collectives import Collectives
from kimik3_lab.performance.dense_cost import DenseProducts
from kimik3_lab.performance.hardware import Accelerator
from kimik3_lab.performance.step_work import StepWork

__all__ = ["Drafting", "drafter_matrices"]


def drafter_matrices(config: DSparkConfig, tp: int) -> tuple[tuple[str, float], ...]:
    """Bytes of the drafter's matrices on one rank, BF16: name and size, of all layers.

    As for the target, what leads into a latent space is whole on every rank.

    Examples
    --------
    >>> whole = drafter_matrices(DSparkConfig(), 1)
    >>> round(sum(size for _, size in whole) / 2e9, 2)      # 2.39 B with the Markov tables
    2.3
    """
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    cached = config.kv_lora_rank + config.qk_rope_head_dim
    values = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    taps = len(config.target_layer_ids) * hidden * hidden
    return (
        ("context", 2.0 * taps),
        ("down", 2.0 * layers * hidden * (config.q_lora_rank + cached)),
        ("query up", 2.0 * layers * config.q_lora_rank * query / tp),
        ("values up", 2.0 * layers * values / tp),
        ("attention out", 2.0 * layers * heads * config.v_head_dim * hidden / tp),
        ("gate_up", 4.0 * layers * hidden * config.intermediate_size / tp),
        ("feed-forward down", 2.0 * layers * config.intermediate_size * hidden / tp),
    )


class Drafting:
    """Everything behind the last layer of the target."""

    def __init__(
        self,
        config: K3Config,
        gpu: Accelerator,
        tp: int,
        dense: DenseProducts,
        collectives: Collectives,
        constants: Mapping[str, float],
        drafter: DSparkConfig | None = None,
    ) -> None:
        self._drafter = drafter or DSparkConfig()
        self._matrices = drafter_matrices(self._drafter, tp)
        self._dense, self._collectives = dense, collectives
        self._row_bytes = 4.0 * config.vocab_size  # logits in float32
        self._hidden_bytes = 2.0 * config.hidden_size
        self._sample = constants["sampling_row"]
        table = 2.0 * self._drafter.vocab_size * self._drafter.markov_rank / tp
        self._markov = constants["markov_draft"] + table / gpu.bandwidth
        self._attention = constants["mla_latency"]

    def head(self, rows: int) -> float:
        """Seconds to turn ``rows`` rows into tokens."""
        if not rows:
            return 0.0
        gathered = self._collectives.gather(rows * self._row_bytes)
        return self._dense.head(rows) + gathered + rows * self._sample

    def drafts(self, work: StepWork) -> float:
        """Seconds to draft for the requests of a step."""
        if not work.num_draft_seqs or not work.num_speculative_tokens:
            return 0.0
        seqs, steps = work.num_draft_seqs, work.num_speculative_tokens
        rows = seqs * steps
        seconds = 0.0
        for name, size in self._matrices:
            # The taps of every row of the step go into the drafter's own cache.
            calls = 1 if name == "context" else self._drafter.num_hidden_layers
            each = work.num_tokens if name == "context" else rows
            seconds += calls * self._dense.call(size / calls, each)
        reduce = self._collectives.all_reduce(rows * self._hidden_bytes)
        seconds += self._drafter.num_hidden_layers * (2 * reduce + self._attention)
        seconds += self.head(rows)
        return seconds + steps * (self._markov + seqs * self._sample)
