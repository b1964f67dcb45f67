"""Time of the two kinds of attention, their matrix products left out.

Needs the standard library only. Lesson 11 holds both against the published tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from kimik3_lab.config import K3Config
from kimik3_lab.performance.hardware import Accelerator
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.sequence_memory import sequence_memory
from kimik3_lab.performance.step_work import StepWork

__all__ = ["KdaLayers", "MlaLayers"]


class KdaLayers:
    """Convolution and recurrence of all KDA layers on one rank.

    A request that decodes has its state read once and written once a row: with drafts vLLM keeps
    a state for each, so that it can go back. A prompt is scanned in chunks.

    Parameters
    ----------
    in_place
        Whether a prompt's output and states are written where they belong (#51311, #52458).
    """

    def __init__(
        self,
        config: K3Config,
        gpu: Accelerator,
        tp: int,
        constants: Mapping[str, float],
        *,
        in_place: bool,
    ) -> None:
        kda = config.linear_attn_config
        self.layers = len(kda.kda_layers)
        #: Bytes of a request's state on one rank, all layers; the convolution's window included.
        self.state_bytes = sequence_memory(config).state_bytes / tp
        self._latency = constants["kda_latency"]
        self._bandwidth = gpu.bandwidth * constants["kda_bandwidth"]
        self._verify = constants["kda_convolution_verify"]
        self._scan_latency = constants["kda_scan_latency"]
        self._scan_token = constants["kda_scan_head_token"] * kda.num_heads / tp
        form = "in_place" if in_place else "gathered"
        self._convolution = constants[f"kda_convolution_{form}"]

    def moved_bytes(self, work: StepWork) -> float:
        """Bytes of states that the requests that decode read and write on one rank."""
        return (work.num_decode_seqs + work.num_decode_tokens) * self.state_bytes

    def seconds(self, work: StepWork) -> float:
        """Seconds of all layers."""
        each = total = 0.0
        if work.num_decode_seqs:
            each += self._latency
            total += self.moved_bytes(work) / self._bandwidth
            if work.num_decode_tokens > work.num_decode_seqs:
                each += self._verify
        if work.num_prefill_tokens:
            each += self._scan_latency + self._convolution
            each += work.num_prefill_tokens * self._scan_token
        return self.layers * each + total


class MlaLayers:
    """Attention of all MLA layers on one rank: reading rows to decode, pairs to prefill."""

    def __init__(
        self,
        config: K3Config,
        gpu: Accelerator,
        parallel: Parallelism,
        constants: Mapping[str, float],
        *,
        cache_itemsize: int,
    ) -> None:
        self.layers = len(config.mla_layer_ids)
        rows = sequence_memory(config, cache_itemsize=cache_itemsize).mla_bytes_per_token
        #: Bytes of a token's rows that one rank reads.
        self.row_bytes = rows / parallel.dcp
        heads = config.num_attention_heads / parallel.tp
        self._pair_flops = 2.0 * self.layers * heads * (config.qk_head_dim + config.v_head_dim)
        self._latency = constants["mla_latency"]
        self._together = gpu.bandwidth * constants["mla_bandwidth"]
        self._alone = constants["mla_sequence_bandwidth"]
        self._rate = gpu.bf16_flops * constants["mla_prefill_flops"]

    def read_bytes(self, work: StepWork) -> float:
        """Bytes of rows that the requests that decode read on one rank."""
        return work.decode_context * self.row_bytes

    def pair_flops(self, work: StepWork) -> float:
        """Operations of one rank for the pairs of a step's prompts."""
        return work.prefill_pairs * self._pair_flops

    def seconds(self, work: StepWork) -> float:
        """Seconds of all layers."""
        seconds = 0.0
        if work.num_decode_seqs:
            read = self.read_bytes(work)
            seconds += self.layers * self._latency + read / self._together
            seconds += read / work.num_decode_seqs / self._alone
        if work.prefill_pairs:
            seconds += self.layers * self._latency + self.pair_flops(work) / self._rate
        return seconds
