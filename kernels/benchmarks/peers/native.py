"""vLLM's compiled operators: load its libraries without starting vLLM.

Needs PyTorch. vLLM 0.33 builds ``_C``, ``_moe_C`` and ``_flashkda_C`` on PyTorch's stable binary
interface, so that its libraries load into other releases of PyTorch too (seen: 2.11).
"""

from __future__ import annotations

import functools
import sys
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.adapter import Absent

__all__ = ["align_pairs", "require", "situ_and_mul", "vllm_version"]

#: Where the libraries of a namespace of ``torch.ops`` lie, below an entry of ``sys.path``.
_LIBRARIES = {
    "_C": "_C_stable_libtorch.abi3.so",
    "_moe_C": "_moe_C_stable_libtorch.abi3.so",
    "_flashkda_C": "_flashkda_C.abi3.so",
}
_FOLDERS = ("vllm", "so")


@functools.cache
def require(namespace: str, operator: str) -> None:
    """Make ``torch.ops.<namespace>.<operator>`` usable.

    Raises
    ------
    Absent
        If no library with it is on the path, or it does not load.
    """
    if _has(namespace, operator):
        return
    name = _LIBRARIES[namespace]
    for entry in sys.path:
        for folder in _FOLDERS:
            path = Path(entry or ".") / folder / name
            if not path.is_file():
                continue
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                raise Absent(f"{path} does not load: {str(error)[:200]}") from error
            if _has(namespace, operator):
                return
            raise Absent(f"{path} has no operator {operator}")
    raise Absent(f"vLLM's {name} is in no folder of sys.path (vllm/ or so/)")


def _has(namespace: str, operator: str) -> bool:
    return hasattr(getattr(torch.ops, namespace), operator)


def vllm_version() -> str:
    """Return the version of an installed vLLM, or say that it is unpacked without one."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "unpacked"


def align_pairs(
    expert_ids: torch.Tensor, experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs by expert with vLLM's kernel, each expert's run padded to whole blocks.

    Returns
    -------
    sorted_token_ids, expert_ids, num_tokens_post_padded
        As vLLM's grouped kernels take them, int32.
    """
    pairs = expert_ids.numel()
    most = pairs + min(pairs, experts) * (block_size - 1)
    device = expert_ids.device
    sorted_ids = torch.empty(most, dtype=torch.int32, device=device)
    blocks = torch.empty(-(-most // block_size), dtype=torch.int32, device=device)
    padded = torch.empty(1, dtype=torch.int32, device=device)
    torch.ops._moe_C.moe_align_block_size(
        expert_ids, experts, block_size, sorted_ids, blocks, padded, None, None
    )
    return sorted_ids, blocks, padded


def situ_and_mul(gate_up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """Apply vLLM's SiTU kernel to ``[pairs, 2I]``."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    torch.ops._C.situ_and_mul(out, gate_up, beta, linear_beta)
    return out
