"""How long GPUs take to add up or exchange what each of them has.

Needs the standard library only. Lesson 11 holds it against the published tables. A collective costs
a latency and a time for its bytes. One exchange, in which everyone reads from everyone, is quickest
for small messages; two (reduce, then gather) for large ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kimik3_lab.performance.hardware import Accelerator

__all__ = ["CURVES", "AllReduceCurve", "AllReduceStyle", "Collectives", "scaled_bandwidth"]

AllReduceStyle = Literal["custom", "low_latency"]
#: Link that the curves were measured on: NVLink 5, bytes a second and direction.
_MEASURED_LINK = 900e9
#: Messages between these sizes cross nodes slowly, see ``node_crossing_middle``.
_MIDDLE = (192 * 1024, 256 * 1024)


@dataclass(frozen=True, slots=True)
class AllReduceCurve:
    """Times of an all-reduce among 8 B300 in a captured graph.

    Attributes
    ----------
    one_latency, one_bandwidth
        Of the form with one exchange: seconds, and bytes of the message a second.
    two_latency, two_least
        Of the form with two: seconds that add to the bytes, and the least that it takes.
    switch_bytes
        Largest message that the first form is used for; None if the better one is always taken.
    source
        Where the times were published.
    """

    one_latency: float
    one_bandwidth: float
    two_latency: float
    two_least: float
    switch_bytes: int | None
    source: str


_TABLES = "https://github.com/ai-dynamo/aiconfigurator, release 0.12.0, systems/data/b300_sxm/comm"

#: By style: vLLM's own kernel, and those of SGLang and TensorRT-LLM. Lines through the rows
#: ``allreduce-vllm-graph-*`` and ``allreduce-sglang-graph-*`` of the measurements.
CURVES: Mapping[AllReduceStyle, AllReduceCurve] = {
    "custom": AllReduceCurve(7.2e-6, 29e9, 19e-6, 26e-6, 64 * 1024, _TABLES),
    "low_latency": AllReduceCurve(4.6e-6, 32e9, 9.5e-6, 0.0, None, _TABLES),
}


class Collectives:
    """Collectives among GPUs of one kind.

    Parameters
    ----------
    ranks
        GPUs that take part. Beyond an NVLink domain, messages cross the scale-out network.
    constants
        ``bulk_all_reduce`` and those called ``node_crossing`` are used.

    Examples
    --------
    >>> from kimik3_lab.performance.constants import constants_with
    >>> from kimik3_lab.performance.hardware import accelerator
    >>> eight = Collectives(accelerator("B300"), 8, "custom", constants_with())
    >>> round(eight.all_reduce(16 * 1024) * 1e6, 1)
    7.8
    """

    def __init__(
        self,
        gpu: Accelerator,
        ranks: int,
        style: AllReduceStyle,
        constants: Mapping[str, float],
    ) -> None:
        self.ranks = ranks
        self._crosses = ranks > gpu.domain_gpus
        # Kernels of one node's links cannot be used across nodes: there it is NCCL for all.
        self._curve = CURVES["low_latency" if self._crosses else style]
        self._link = gpu.link_bandwidth / _MEASURED_LINK
        self._bulk = constants["bulk_all_reduce"] * self._link
        self._crossing = constants["node_crossing"]
        self._middle = constants["node_crossing_middle"]
        self._byte = constants["node_crossing_byte"]
        self._most = constants["node_crossing_bulk"]
        # Every GPU of a node has its own adapter, and each sends its share once and gets it once.
        self._network = gpu.scale_out_bandwidth * min(ranks, gpu.domain_gpus) / 2

    def all_reduce(self, size: float) -> float:
        """Seconds to add up ``size`` bytes that every rank has."""
        if self.ranks == 1 or size <= 0:
            return 0.0
        curve = self._curve
        one = curve.one_latency + size / (curve.one_bandwidth * self._link)
        two = max(curve.two_least, curve.two_latency + size / self._bulk)
        if curve.switch_bytes is None:
            seconds = min(one, two)
        else:
            seconds = one if size <= curve.switch_bytes else two
        if self._crosses:
            seconds += self._crossing + size / self._network
            seconds += min(size * self._byte, self._most)
            if _MIDDLE[0] < size <= _MIDDLE[1]:
                seconds += self._middle
        return seconds

    def gather(self, size: float) -> float:
        """Seconds until every rank has ``size`` bytes, of which each had an equal share.

        Half of an all-reduce, which is a reduction and a gather. Scattering costs the same. That is
        right in bytes, and too little in time: between two H200s small ones took 0.8 to 1.1 of an
        all-reduce (1.0 to 1.4 in an earlier run), and large ones 0.61 to 0.66. Lesson 13 shows what
        it would change.
        """
        return 0.5 * self.all_reduce(size)


def scaled_bandwidth(
    bandwidth: float, measured: tuple[int, float], wanted: tuple[int, float]
) -> float:
    """Bytes of a large all-reduce a second on other GPUs, if their links do as well.

    Each of n ranks sends ``2 (n - 1) / n`` times the message, whatever the order: a share of the
    link's published rate that one number of ranks reaches is taken for another. That leaves out
    switches that add up on the way, which would be quicker, and more ranks to wait for;
    :mod:`kimik3_lab.performance.collective_scaling` makes an interval of it. Two H200s
    (``data/results/h200x2/collectives.json``, NCCL in a graph, a line through 64 to 256 MiB) give
    0.313e12, so 8 B300 should reach about 0.358e12. The constant ``bulk_all_reduce``, set on a
    published first token before that was measured, is 0.365e12 and stays.

    Parameters
    ----------
    bandwidth
        As measured, in bytes of the message a second.
    measured, wanted
        Ranks, and the link's bytes a second and direction.

    Examples
    --------
    >>> round(scaled_bandwidth(313e9, (2, 450e9), (8, 900e9)) / 1e9)
    358
    """
    (ranks, link), (more, other) = measured, wanted
    sent, to_send = 2 * (ranks - 1) / ranks, 2 * (more - 1) / more
    return bandwidth * other / link * sent / to_send
