"""GPUs that could serve Kimi K3: memory and bandwidth as published, with sources.

Needs the standard library only. Lesson 01 asks what fits; lesson 11 what it costs in time.

A GB is 10^9 bytes here. The makers are less strict: for an H200 of "141 GB" nvidia-smi shows
143,771 MiB, which is 150.8 of our GB, and for a B300 of "288 GB" 275,040, which is 288.4.
The smaller figure is taken at its word in both cases, so that what is said to fit does fit.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ACCELERATORS", "Accelerator"]


@dataclass(frozen=True)
class Accelerator:
    """One GPU, as its maker describes it.

    Attributes
    ----------
    memory_bytes, bandwidth
        Memory, and the bytes a second that it can be read at, at best.
    sources
        Where the two figures were published.

    Examples
    --------
    >>> ACCELERATORS["B300"].memory_bytes
    288000000000
    """

    name: str
    memory_bytes: int
    bandwidth: float
    sources: tuple[str, ...]


_MEMORY = "https://docs.nvidia.com/nim/bionemo/boltz2/1.8.0/support-matrix.html"
_MEMORY_H200 = (
    "https://docs.nvidia.com/nim/large-language-models/2.0.6/day-0/support-matrix-day-0.html"
)
_BLACKWELL = "https://github.com/datacrunch-research/blogs, blackwell-vms/blackwell_vms.md"

#: By name. Bandwidth is the "up to" figure: aiconfigurator computes with 7.75 TB/s for a B300.
ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        Accelerator("B300", 288 * 10**9, 8.0e12, (_MEMORY, _BLACKWELL)),
        Accelerator(
            "GB300",
            288 * 10**9,
            8.0e12,
            (_MEMORY, "https://glennklockwood.com/garden/processors/B300 (576 TB/s of 72 GPUs)"),
        ),
        Accelerator("B200", 180 * 10**9, 7.7e12, (_MEMORY, _BLACKWELL)),
        Accelerator(
            "H200",
            141 * 10**9,
            4.8e12,
            (_MEMORY_H200, "https://www.nvidia.com/en-us/data-center/h200/"),
        ),
    )
}
