"""Plain PyTorch for kernels that look at one token at a time, which have tests of their own.

The interpreter takes seconds for a step of thirty tokens, nine tenths of them for these. With them
out of the way it runs what looks back: convolution, delta rule and attention over pages.
"""

from __future__ import annotations

import pytest
import torch
from k3_kernels import Routing
from torch import Tensor

from kimik3_lab.reference import mxfp4
from kimik3_lab.reference.moe import situ
from kimik3_lab.reference.norms import rms_norm
from kimik3_lab.reference.residuals import mix
from kimik3_lab.serving.executors import triton_model, triton_moe, triton_proposer

__all__ = ["use_plain_rest"]


def _into(value: Tensor, out: Tensor | None) -> Tensor:
    return value if out is None else out.copy_(value)


def _row_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    width = len(weight)
    return _into(torch.cat((rms_norm(x[:, :width], weight, eps), x[:, width:]), -1), out)


def _attn_res(
    blocks, prefix, delta, query, key_norm, norm, *, key_eps, norm_eps, prefix_out=None
) -> tuple[Tensor, Tensor]:
    total = prefix if delta is None else prefix + delta
    sources = [total] if blocks is None else [*blocks, total]
    read = total if len(sources) == 1 else mix(sources, query, key_norm, key_eps)
    return rms_norm(read, norm, norm_eps), _into(total, prefix_out)


def _situ_and_mul(gate, up, *, beta, linear_beta, out=None) -> Tensor:
    return _into(situ(gate, up, beta, linear_beta), out)


def _route(logits, bias, top_k, *, renormalize, scale) -> Routing:
    score = torch.sigmoid(logits)
    chosen = (score + bias).topk(top_k).indices
    weights = score.gather(-1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(chosen.int(), weights * scale)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].clone(), x[..., 1::2].clone()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x[..., 0::2], x[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return x


def use_plain_rest(patch: pytest.MonkeyPatch, codes: tuple[Tensor, ...]) -> None:
    """Put them in place; ``codes`` are those of the experts, the same in all layers."""
    gate_up = mxfp4.dequantize(codes[0], codes[1])
    down = mxfp4.dequantize(codes[2], codes[3])

    def moe_experts(
        x, experts, ids, weights, *, beta, linear_beta, norm_weight=None, eps=1e-5, out=None
    ) -> Tensor:
        gate, up = torch.einsum("th,eoh->teo", x, gate_up).chunk(2, -1)
        said = torch.einsum("tei,ehi->teh", situ(gate, up, beta, linear_beta), down)
        share = torch.zeros(len(x), len(down)).scatter_(1, ids.long(), weights)
        total = torch.einsum("te,teh->th", share, said)
        return _into(total if norm_weight is None else rms_norm(total, norm_weight, eps), out)

    for module, name, function in (
        (triton_model, "attn_res", _attn_res),
        (triton_model, "row_norm", _row_norm),
        (triton_model, "sigmoid_mul", lambda x, gate: x * torch.sigmoid(gate)),
        (triton_moe, "route", _route),
        (triton_moe, "moe_experts", moe_experts),
        (triton_moe, "row_norm", _row_norm),
        (triton_moe, "situ_and_mul", _situ_and_mul),
        (triton_proposer, "row_norm", _row_norm),
        (triton_proposer, "rotate_pairs", _rotate_pairs),
        (triton_proposer, "silu_and_mul", lambda a, b: torch.nn.functional.silu(a) * b),
    ):
        patch.setattr(module, name, function)
