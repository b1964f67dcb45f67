"""From exchanges timed on two GPUs to those of a machine that is not here: an interval, no number.

Needs numpy. Lesson 11 holds the interval against the constant in use, lesson 13 uses its width.

Only the bandwidth of large messages is carried over. What starts a small one is a property of the
kernel: NCCL was timed here, and vLLM takes kernels of its own for small messages, whose times on
eight B300 are published (:data:`kimik3_lab.performance.collectives.CURVES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kimik3_lab.performance.collectives import scaled_bandwidth
from kimik3_lab.performance.hardware import Accelerator
from kimik3_lab.performance.measured_collectives import MeasuredCollectives

__all__ = ["BULK_BYTES", "SENT", "ScaledBandwidth", "link_shares", "scaled_all_reduce"]

#: From this size a message's time is its bytes; NCCL's smaller ones change their protocol.
BULK_BYTES = 64 << 20
#: What a rank sends of a message, by collective, as NCCL's own tests count it: times (n - 1) / n.
#: Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
SENT: Mapping[str, int] = {
    "all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScaledBandwidth:
    """Bytes of a large all-reduce a second on another machine.

    Attributes
    ----------
    low
        If its links do only as well as those here did in the slowest collective.
    value
        If they do as well as in the all-reduce here, every rank sending 2 (n - 1) / n messages.
    high
        If, besides, the switch adds up: then every rank sends a message once. The machine here
        had that turned off.
    """

    low: float
    value: float
    high: float


def link_shares(table: MeasuredCollectives, link: float) -> dict[str, float]:
    """Share of the link's published rate that each collective reaches with large messages.

    Parameters
    ----------
    link
        Bytes a second and direction.

    Examples
    --------
    >>> table = MeasuredCollectives({"all_reduce": ([1 << 26, 1 << 28], [3e-4, 12e-4])}, ranks=2)
    >>> {name: round(share, 2) for name, share in link_shares(table, 450e9).items()}
    {'all_reduce': 0.5}
    """
    ranks = table.ranks
    return {
        name: table.line(name, BULK_BYTES).bandwidth * SENT[name] * (ranks - 1) / ranks / link
        for name in table.names
    }


def scaled_all_reduce(
    table: MeasuredCollectives, measured: Accelerator, wanted: Accelerator, ranks: int
) -> ScaledBandwidth:
    """Scale the measured bandwidth by the links' published rates.

    Parameters
    ----------
    table, measured
        What was timed, and on which GPU.
    wanted, ranks
        Another GPU, and how many of them in one NVLink domain.

    Raises
    ------
    ValueError
        If so many GPUs are not in one domain: then it is not NVLink that carries the message.

    Examples
    --------
    >>> from kimik3_lab.performance.hardware import accelerator
    >>> table = MeasuredCollectives({"all_reduce": ([1 << 26, 1 << 28], [3e-4, 12e-4])}, ranks=2)
    >>> found = scaled_all_reduce(table, accelerator("H200"), accelerator("B300"), 8)
    >>> round(found.value / 1e9), round(found.high / 1e9)
    (256, 447)
    """
    if ranks > wanted.domain_gpus:
        raise ValueError(
            f"{ranks} {wanted.name} are not in one NVLink domain of {wanted.domain_gpus}: the "
            "message crosses the scale-out network, which was not measured"
        )
    line = table.line("all_reduce", BULK_BYTES).bandwidth
    links = (table.ranks, measured.link_bandwidth), (ranks, wanted.link_bandwidth)
    value = scaled_bandwidth(line, *links)
    shares = link_shares(table, measured.link_bandwidth)
    low = value * min(shares.values()) / shares["all_reduce"]
    return ScaledBandwidth(low, value, shares["all_reduce"] * wanted.link_bandwidth)
