"""GPUs that could serve Kimi K3: memory, arithmetic and links as published, with sources.

Needs the standard library only. Lesson 01 asks what fits; lesson 11 what it costs in time.

A GB is 10^9 bytes here. The makers are less strict: for an H200 of "141 GB" nvidia-smi shows
143,771 MiB, which is 150.8 of our GB, and for a B300 of "288 GB" 275,040, which is 288.4.
The smaller figure is taken at its word in both cases, so that what is said to fit does fit.

Rates are the makers' peaks, without sparsity. What a kernel reaches of them is not a property of
the GPU alone and is kept apart, in :mod:`kimik3_lab.performance.constants`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ACCELERATORS", "Accelerator", "accelerator"]


#: Arithmetic and links, as NVIDIA's own estimator has them.
RATE_SOURCE = (
    "https://github.com/ai-dynamo/aiconfigurator, release 0.12.0 (Apache-2.0), "
    "systems/{b300_sxm,gb300,b200_sxm,h200_sxm}.yaml"
)


@dataclass(frozen=True)
class Accelerator:
    """One GPU, as its maker describes it.

    Attributes
    ----------
    memory_bytes, bandwidth
        Memory, and the bytes a second that it can be read at, at best.
    sources
        Where the figures were published.
    bf16_flops, fp8_flops, fp4_flops
        Operations a second on dense matrices of that type; 0 where the GPU has no such unit.
    link_bandwidth
        Bytes a second and direction to the GPUs of the same NVLink domain.
    domain_gpus
        GPUs in one NVLink domain.
    scale_out_bandwidth
        Bytes a second and direction to GPUs of other domains.
    rate_source, as_of
        Where those five were published, and when all of it was looked up.

    Examples
    --------
    >>> ACCELERATORS["B300"].memory_bytes
    288000000000
    """

    name: str
    memory_bytes: int
    bandwidth: float
    sources: tuple[str, ...]
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
    fp4_flops: float = 0.0
    link_bandwidth: float = 0.0
    domain_gpus: int = 8
    scale_out_bandwidth: float = 0.0
    rate_source: str = RATE_SOURCE
    as_of: str = "2026-11-01"


_MEMORY = "https://docs.nvidia.com/nim/bionemo/boltz2/1.8.0/support-matrix.html"
_MEMORY_H200 = (
    "https://docs.nvidia.com/nim/large-language-models/2.0.6/day-0/support-matrix-day-0.html"
)
_BLACKWELL = "https://github.com/datacrunch-research/blogs, blackwell-vms/blackwell_vms.md"

#: By name. Bandwidth is the "up to" figure: aiconfigurator computes with 7.75 TB/s for a B300.
ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        Accelerator(
            "B300",
            288 * 10**9,
            8.0e12,
            (_MEMORY, _BLACKWELL),
            bf16_flops=2.25e15,
            fp8_flops=4.5e15,
            fp4_flops=14e15,
            link_bandwidth=900e9,
            domain_gpus=8,
            scale_out_bandwidth=100e9,
        ),
        Accelerator(
            "GB300",
            288 * 10**9,
            8.0e12,
            (
                _MEMORY,
                "https://glennklockwood.com/garden/processors/B300 (576 TB/s of 72 GPUs)",
            ),
            bf16_flops=2.5e15,
            fp8_flops=5.0e15,
            fp4_flops=15e15,
            link_bandwidth=900e9,
            domain_gpus=72,
            scale_out_bandwidth=100e9,
        ),
        Accelerator(
            "B200",
            180 * 10**9,
            7.7e12,
            (_MEMORY, _BLACKWELL),
            bf16_flops=2.25e15,
            fp8_flops=4.5e15,
            fp4_flops=9e15,
            link_bandwidth=900e9,
            domain_gpus=8,
            scale_out_bandwidth=100e9,
        ),
        Accelerator(
            "H200",
            141 * 10**9,
            4.8e12,
            (_MEMORY_H200, "https://www.nvidia.com/en-us/data-center/h200/"),
            bf16_flops=0.989e15,
            fp8_flops=1.98e15,
            link_bandwidth=450e9,
            domain_gpus=8,
            scale_out_bandwidth=50e9,
        ),
    )
}


def accelerator(name: str) -> Accelerator:
    """Look up a GPU by name.

    Raises
    ------
    KeyError
        If it is not listed; the message names those that are.

    Examples
    --------
    >>> accelerator("H200").fp4_flops
    0.0
    """
    try:
        return ACCELERATORS[name]
    except KeyError:
        have = ", ".join(ACCELERATORS)
        raise KeyError(f"no accelerator {name!r}; expected one of {have}") from None
