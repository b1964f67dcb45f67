"""A vLLM plugin: the tiny Kimi K3 in real vLLM, on a CPU.

Needs ``.venv-vllm``, but imports without vLLM. ``make test-vllm`` uses it to let vLLM judge the
reference, and a reader can serve with it::

    k3lab vllm-cpu install
    k3lab vllm-cpu serve

It is an entry point of the group ``vllm.general_plugins``, which vLLM loads by itself
(:mod:`~kimik3_lab.vllm_cpu.install` declares it, :mod:`~kimik3_lab.vllm_cpu.serve` starts vLLM).

vLLM's CPU build contains Kimi K3, but its kernels are for GPUs. The plugin takes vLLM's own generic
K3 model and replaces what has no CPU form: :mod:`~kimik3_lab.vllm_cpu.kernels` says by what,
:mod:`~kimik3_lab.vllm_cpu.patches` says where. Everything else stays vLLM's: configuration, weight
loader, scheduler, cache, router, norms, short convolution, MLA, sampler and server.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["VLLM_CPU_VERSION", "register"]

#: The plugin leans on internals of vLLM, so on exactly this release of ``vllm-cpu``.
VLLM_CPU_VERSION = "0.32.0"


def register() -> None:
    """Entry point ``vllm.general_plugins``: vLLM calls it in each of its processes.

    Does nothing in an environment with another vLLM, where K3 runs on the GPU without it.
    """
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        return
    if found != VLLM_CPU_VERSION:
        logging.getLogger("vllm.kimik3_lab").warning(
            "Kimi K3 on the CPU needs vllm-cpu %s, got %s: the plugin stays off. "
            "`k3lab vllm-cpu install` makes an environment with the right one.",
            VLLM_CPU_VERSION, found,
        )  # fmt: skip
        return
    from vllm import ModelRegistry

    # By name, so that the model and all that it imports wait until a K3 is asked for.
    ModelRegistry.register_model("KimiLinearForCausalLM", f"{__name__}:KimiLinearForCausalLM")


def __getattr__(name: str) -> Any:
    if name == "KimiLinearForCausalLM":
        from kimik3_lab.vllm_cpu.patches import model_class

        return model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
