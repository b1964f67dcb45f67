"""What PyTorch alone offers: grouped products for bfloat16 experts, plain operators for the rest.

Needs PyTorch 2.8 or newer for the grouped products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.adapter import Absent, Adapter, Call
from benchmarks.floors import LATENT_RANK
from benchmarks.inputs.attn_res import EPS, AttnResProblem
from benchmarks.inputs.mla_decode import SCALE, MlaDecodeProblem
from benchmarks.inputs.moe import MoeProblem, situ
from benchmarks.inputs.router import TOP_K, RouterProblem
from benchmarks.peers import native

__all__ = ["ADAPTERS"]


def _find() -> str:
    return torch.__version__


def _find_grouped() -> str:
    if not hasattr(torch, "_grouped_mm"):
        raise Absent(f"PyTorch {torch.__version__} has no torch._grouped_mm")
    return torch.__version__


def _prepare_grouped(problem: MoeProblem) -> Call:
    shared = problem.shared
    w13, w2 = shared.w13.transpose(1, 2), shared.w2.transpose(1, 2)
    experts = torch.arange(shared.rank.experts, dtype=torch.int32, device=w13.device)
    positions = torch.arange(problem.tokens * shared.rank.top_k, device=w13.device)
    top_k = shared.rank.top_k
    try:
        native.require("_C", "situ_and_mul")
        fused = True
    except Absent:
        fused = False

    def call(index: int) -> Tensor:
        x, weights = problem.x[index], problem.weights[index].to(torch.bfloat16)
        ids, order = problem.expert_ids[index].view(-1).sort()
        ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
        place = torch.empty_like(order)
        place[order] = positions
        gate_up = torch._grouped_mm(x[order // top_k], w13, offs=ends)
        if fused:
            middle = native.situ_and_mul(gate_up, 4.0, 25.0)
        else:
            middle = situ(gate_up.float()).to(torch.bfloat16)
        down = torch._grouped_mm(middle, w2, offs=ends)
        pairs = down[place].view(problem.tokens, top_k, -1)
        return torch.bmm(weights[:, None], pairs).squeeze(1)

    return call


def _prepare_attn_res(problem: AttnResProblem) -> Call:
    probe = problem.key_norm.float() * problem.query.float()
    norm = problem.norm.float()

    def call(index: int) -> tuple[Tensor, Tensor]:
        prefix = problem.prefix[index].add_(problem.delta[index])
        sources = torch.cat([problem.blocks[index], prefix[None]]).float()
        logits = (sources * probe).sum(-1) * (sources.square().mean(-1) + EPS).rsqrt()
        mix = (logits.softmax(0)[..., None] * sources).sum(0)
        out = mix * (mix.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm
        return out.to(torch.bfloat16), prefix

    return call


def _prepare_router(problem: RouterProblem) -> Call:
    def call(index: int) -> tuple[Tensor, Tensor]:
        scores = problem.logits[index].sigmoid()
        ids = (scores + problem.bias).topk(TOP_K, -1, sorted=False).indices
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True), ids

    return call


def _prepare_mla_decode(problem: MlaDecodeProblem) -> Call:
    """Gather the rows; then two products, all tokens and heads of a request together."""
    tables = [table.long() for table in problem.tables]
    queries = [
        torch.cat(both, -1).view(problem.batch, problem.tokens * problem.heads, -1)
        for both in zip(problem.q_latent, problem.q_pe, strict=True)
    ]
    hidden = None
    if problem.tokens > 1:
        hidden = problem.hidden().repeat_interleave(problem.heads, 0)

    def call(index: int) -> Tensor:
        rows = problem.pool[tables[index]].flatten(1, 2)[:, : problem.length]
        scores = torch.bmm(queries[index], rows.mT) * SCALE
        if hidden is not None:
            scores = scores.masked_fill_(hidden, -torch.inf)
        shares = scores.softmax(-1)
        return torch.bmm(shares, rows[..., :LATENT_RANK]).view(-1, problem.heads, LATENT_RANK)

    return call


ADAPTERS = (
    Adapter("torch_grouped_mm", ("moe_bf16_tp8", "moe_bf16_ep8"), _find_grouped, _prepare_grouped),
    Adapter("torch", ("attnres8",), _find, _prepare_attn_res),
    Adapter("torch", ("router",), _find, _prepare_router),
    Adapter("torch", ("mla_decode",), _find, _prepare_mla_decode),
)
