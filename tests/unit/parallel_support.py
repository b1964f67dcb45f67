"""What the ranks of ``test_parallel_ranks`` do: run here, in processes of their own.

Every check returns its largest error. It may compare only after the last exchange: a rank that
stopped earlier than the others would leave them waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.parallel import dcp, dispatch, experts, moe, split_layer
from kimik3_lab.parallel.dispatch import DispatchPlan
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.model import ParallelK3
from kimik3_lab.performance.expert_placement import ExpertPlacement
from kimik3_lab.reference import checkpoint
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.moe import Routing, routed_sum
from kimik3_lab.reference.state import SequenceMixer

#: Three KDA heads, two MLA heads and six experts: with 2, 3 and 4 ranks some are uneven and some
#: ranks have none.
CONFIG = dataclasses.replace(
    K3Config.micro(),
    num_experts=6,
    linear_attn_config=dataclasses.replace(K3Config.micro().linear_attn_config, num_heads=3),
)
#: Fewer experts than ranks.
FEW = dataclasses.replace(CONFIG, num_experts=2)
#: Steps of one sequence: a single token first, so that all ranks but one have no MLA row.
STEPS = ([5], [9, 0, 33, 7, 61], [12])
LAYOUTS = ("sliced", "whole", "all_to_all")
TOLERANCE = 2e-4
SIZES = (2, 3, 4)
#: Heads and experts are uneven with three ranks: where a mistake shows best.
MUTANT_SIZE = 3
#: How the trained model runs, by number of ranks: every layout, and rows split or not.
TRAINED = {
    2: (("sliced", True), ("whole", False), ("all_to_all", False)),
    3: (("whole", True), ("sliced", False), ("all_to_all", True)),
    4: (("all_to_all", True),),
}
NUM_TOKENS = 4


class World:
    """The model, and what one rank alone makes of it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.model = random_model(CONFIG, seed=1)
        self.expected = run(self.model, SequenceMixer(self.model.new_state()))
        # Every expert in order, and the first of each rank once more on the rank behind it.
        slots = experts.in_order(CONFIG, ranks)
        firsts = [held[0] for held in slots]
        copied = [
            [*held, *([] if firsts[r - 1] in held else [firsts[r - 1]])]
            for r, held in enumerate(slots)
        ]
        self.slots = dict.fromkeys(CONFIG.moe_layer_ids, copied)

    def error(self, **settings: Any) -> float:
        parallel = ParallelK3(self.model, self.ranks, **settings)
        return worst(run(parallel, parallel.new_mixer()), self.expected)


@torch.inference_mode()
def run(k3: K3ForCausalLM | ParallelK3, mixer: SequenceMixer) -> list[Tensor]:
    return [k3(torch.tensor(step), mixer) for step in STEPS]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    errors = [(a - b).abs().max() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max().nan_to_num(nan=torch.inf))


# -- checks ------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[World], float]] = {}


def check(name: str) -> Callable[[Callable[[World], float]], Callable[[World], float]]:
    def register(function: Callable[[World], float]) -> Callable[[World], float]:
        CHECKS[name] = function
        return function

    return register


for _layout in LAYOUTS:
    for _split in (False, True):
        _name = f"{_layout}{', rows split' if _split else ''}"
        CHECKS[_name] = lambda world, e=_layout, c=_split: world.error(
            experts=e, context_parallel=c
        )
for _layout in LAYOUTS[1:]:
    CHECKS[f"{_layout}, copies"] = lambda world, e=_layout: world.error(
        experts=e, slots=world.slots
    )


@check("exchanges")
def _(world: World) -> float:
    ranks = world.ranks
    size, rank = ranks.size, ranks.rank
    counts = ranks.sizes(3)
    whole = torch.arange(6.0).view(3, 2)
    mine = whole[ranks.share(3).start : ranks.share(3).stop]
    parts = torch.full((2, 2 * size), rank + 1.0)
    # Nobody sends to rank 0; each sends its number as often as the receiver's number says.
    send = list(range(size))
    receive = ranks.exchange_counts(send)
    travelled = ranks.all_to_all(torch.full((sum(send), 2), float(rank)), send, receive)
    total = size * (size + 1) / 2
    found = [
        ranks.all_gather(mine, counts),
        ranks.all_gather(mine.T, counts, dim=1),
        ranks.all_reduce(torch.full((2,), rank + 1.0)),
        ranks.reduce_scatter(parts, [2] * size, dim=1),
        ranks.reduce_scatter(whole.clone(), counts),
        travelled,
    ]
    expected = [
        whole,
        whole.T,
        torch.full((2,), total),
        torch.full((2, 2), total),
        size * mine,
        torch.arange(float(size)).repeat_interleave(rank).unsqueeze(-1).expand(-1, 2),
    ]
    shapes = all(a.shape == b.shape for a, b in zip(found, expected, strict=True))
    errors = [(a - b).abs().sum() for a, b in zip(found, expected, strict=True)]
    return float(sum(errors)) if shapes else float("inf")


@check("one MoE layer, fewer tokens than ranks")
@torch.inference_mode()
def _(world: World) -> float:
    layer = world.model.model.layers[1].block_sparse_moe
    errors = []
    for tokens in (1, 5):
        hidden = torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2))
        for build in (moe.tensor_parallel, moe.expert_parallel, dispatch.all_to_all):
            found = build(layer, CONFIG, world.ranks)(hidden)
            errors.append(worst([found], [layer(hidden)]))
    return max(errors)


def same_experts(hidden: Tensor) -> Routing:
    """Every token takes the first experts, and all weight is on the first of them."""
    top_k = CONFIG.num_experts_per_token
    one = torch.eye(top_k)[:1].expand(len(hidden), -1)
    return Routing(torch.arange(top_k).expand(len(hidden), -1), one)


@check("all pairs on one rank, no tokens, more ranks than experts")
@torch.inference_mode()
def _(world: World) -> float:
    ranks, errors = world.ranks, [0.0]
    few = random_model(FEW, seed=5)
    for config, layer in (
        (CONFIG, world.model.model.layers[1].block_sparse_moe),
        (FEW, few.model.layers[1].block_sparse_moe),
    ):
        everything = list(range(config.num_experts))
        last = [*([[]] * (ranks.size - 1)), everything]
        for slots in (None, last, [everything] * ranks.size):
            for build in (moe.expert_parallel, dispatch.all_to_all):
                part = build(layer, config, ranks, slots)
                for tokens in (0, 1, 4):
                    hidden = torch.randn(
                        config.hidden_size, tokens, generator=torch.Generator().manual_seed(tokens)
                    ).T  # with gaps between its elements
                    part.route = layer.gate
                    pairs = [(part(hidden), layer(hidden))]
                    part.route = same_experts
                    z = layer.routed_expert_down_proj(hidden)
                    chosen = same_experts(hidden)
                    summed = routed_sum(z, chosen, list(layer.experts)).to(z.dtype)
                    routed = layer.routed_expert_up_proj(layer.routed_expert_norm(summed))
                    pairs.append((part(hidden), routed + layer.shared_experts(hidden)))
                    if not all(found.shape == expected.shape for found, expected in pairs):
                        errors.append(float("inf"))
                    elif tokens:
                        errors.append(worst(*map(list, zip(*pairs, strict=True))))
    return max(errors)


@check("copies compute what the planner counts")
@torch.inference_mode()
def _(world: World) -> float:
    """How many pairs of a token and an expert a rank computes, or leaves out, against the plan.

    Whichever copy computes, the sum is the same: only this sees that the planned one did.
    """
    layer = world.model.model.layers[1].block_sparse_moe
    # Thirteen: the last two of three ranks begin with an odd number, where copies change turns.
    hidden = torch.randn(13, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3))
    ids = layer.gate(hidden).expert_ids
    slots = world.slots[1]
    planned = ExpertPlacement(tuple(map(tuple, slots)), CONFIG.num_experts).ranks_of(ids.numpy())
    own = (torch.from_numpy(planned) == world.ranks.rank).nonzero().tolist()
    wanted = {(token, int(ids[token, choice])) for token, choice in own}
    latents = layer.routed_expert_down_proj(hidden)
    computed: list[tuple[int, int]] = []
    right = experts.reference_experts

    def noting(*arguments: Any) -> experts.LocalExperts:
        run = right(*arguments)

        def local(z: Tensor, routing: Routing) -> Tensor:
            tokens = torch.cdist(z, latents).argmin(-1)
            for row, choice in routing.weights.nonzero().tolist():
                computed.append((int(tokens[row]), int(routing.expert_ids[row, choice])))
            return run(z, routing)

        return local

    wrong = 0
    for module, build in ((moe, moe.expert_parallel), (dispatch, dispatch.all_to_all)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "reference_experts", noting)
            part = build(layer, CONFIG, world.ranks, slots)
        computed.clear()
        part(hidden)
        wrong += len(computed) - len(set(computed)) + len(set(computed) ^ wanted)
    return float(wrong)


@check("what a rank holds")
def _(world: World) -> float:
    """Bytes of split matrices add up to the whole; a rank keeps states of its heads only."""
    parallel = ParallelK3(world.model, world.ranks)
    kda = parallel.layers[0].self_attn.part
    here = sum(p.numel() for p in kda.q_proj.parameters()) if hasattr(kda, "q_proj") else 0
    total = world.ranks.all_reduce(torch.tensor([float(here)]))
    heads = len(world.ranks.share(3))
    state = parallel.new_state().recurrent[0].shape[0]
    return abs(total.item() - world.model.model.layers[0].self_attn.q_proj.weight.numel()) + abs(
        state - heads
    )


def checks_of(size: int) -> list[str]:
    """All of them with three ranks; with others each layout at least once."""
    left_out = {
        "sliced", "whole, rows split", "all_to_all", "whole, copies",
        "all pairs on one rank, no tokens, more ranks than experts",
    }  # fmt: skip
    return [name for name in CHECKS if size == MUTANT_SIZE or name not in left_out]


# -- mistakes ----------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch, Ranks], None]
#: What is wrong, the check that must see it, and how it is done.
MUTANTS: dict[str, tuple[str, Patch]] = {}


def mutant(name: str, found_by: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS[name] = found_by, patch
        return patch

    return register


@mutant("the norm sees a part of the sum", "sliced")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    patch.setattr(moe.SplitMoE, "complete", lambda self, z: self.ranks.all_reduce(self.norm(z)))


@mutant("shared experts are whole on every rank and added up", "whole")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    patch.setattr(moe, "split_mlp", lambda mlp, ranks: mlp)


@mutant("a token gets lost on its way", "all_to_all")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = dispatch.plan_dispatch

    def lossy(pair_ranks: Tensor, size: int) -> DispatchPlan:
        plan = right(pair_ranks, size)
        last = max((r for r in range(size) if plan.send[r]), default=None)
        if last is None:
            return plan
        return DispatchPlan(plan.tokens[:-1], [n - (r == last) for r, n in enumerate(plan.send)])

    patch.setattr(dispatch, "plan_dispatch", lossy)


@mutant("tokens go to the next rank", "all_to_all")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = dispatch.plan_dispatch
    patch.setattr(dispatch, "plan_dispatch", lambda pairs, n: right((pairs + 1) % n, n))


@mutant("ranks disagree on which copy computes", "whole, copies")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = moe.token_numbers
    patch.setattr(moe, "token_numbers", lambda routing: right(routing) + ranks.rank)


@mutant("each rank counts its tokens from 0", "copies compute what the planner counts")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = dispatch.AllToAllMoE.own
    patch.setattr(dispatch.AllToAllMoE, "own", lambda self, hidden, first=0: right(self, hidden))


@mutant("always the first copy", "copies compute what the planner counts")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = experts.Copies.ranks_of
    patch.setattr(
        experts.Copies, "ranks_of", lambda self, ids, tokens: right(self, ids, 0 * tokens)
    )


@mutant("every copy of an expert computes", "all_to_all, copies")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    # A token is sent to all ranks, with all of its weights.
    def everywhere(pair_ranks: Tensor, size: int) -> DispatchPlan:
        count = len(pair_ranks)
        return DispatchPlan(torch.arange(count).repeat(size), [count] * size)

    patch.setattr(dispatch, "plan_dispatch", everywhere)
    patch.setattr(dispatch, "masked", lambda weights, pair_ranks, to: weights)


@mutant("ranks' answers are averaged", "sliced, rows split")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    patch.setattr(dcp, "merge_weights", lambda lse: torch.ones_like(lse) / len(lse))


@mutant("answers are weighed and not normalised", "whole, rows split")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    patch.setattr(dcp, "merge_weights", lambda lse: (lse - lse.amax(0)).exp())


@mutant("a rank without rows counts as one that saw zeros", "sliced, rows split")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = dcp.attend

    def attend(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = right(*arguments)
        return out, lse.nan_to_num(neginf=0.0)

    patch.setattr(dcp, "attend", attend)


@mutant("rows are masked by their place on the rank", "sliced, rows split")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = dcp.attend
    patch.setattr(dcp, "attend", lambda *a: right(*a[:5], a[5] // ranks.size))


@mutant("every rank takes the first heads' decay", "sliced")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = split_layer._kept
    patch.setattr(split_layer, "_kept", lambda weight, chosen: right(weight, range(len(chosen))))


@mutant("every rank takes the first columns of o_proj", "sliced")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    right = split_layer.columns
    patch.setattr(split_layer, "columns", lambda linear, chosen: right(linear, range(len(chosen))))


@mutant("attention is not added up", "sliced")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    patch.setattr(split_layer._Added, "forward", lambda self, *inputs: self.part(*inputs))


@mutant("every rank looks up every token", "sliced")
def _(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    def embed(self: ParallelK3, token_ids: Tensor) -> Tensor:
        local = (token_ids - self._vocabulary.start).clamp(0, len(self._vocabulary) - 1)
        return self.ranks.all_reduce(self._embedding[local])

    patch.setattr(ParallelK3, "_embed", embed)


# -- a rank ------------------------------------------------------------------------------------


def work(ranks: Ranks, folder: str, prompts: list[list[int]]) -> dict[int, dict[str, Any]]:
    """Do everything with 2, 3 and 4 of these ranks; what comes out on this one, by their number."""
    trained = checkpoint.load(folder)
    results = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if ranks.rank < size:
            results[size] = _work(Ranks(ranks.rank, size, group), trained, prompts)
        ranks.barrier()
    return results


def _work(
    ranks: Ranks, trained: K3ForCausalLM, prompts: list[list[int]]
) -> dict[str, dict[str, Any]]:
    world = World(ranks)
    return {
        "errors": {name: CHECKS[name](world) for name in checks_of(ranks.size)},
        "mutants": dict(mutated(world)) if ranks.size == MUTANT_SIZE else {},
        "tokens": {
            (layout, split): continued(
                ParallelK3(trained, ranks, experts=layout, context_parallel=split), prompts
            )
            for layout, split in TRAINED[ranks.size]
        },
    }


def continued(k3: ParallelK3, prompts: list[list[int]]) -> list[list[int]]:
    return [k3.generate(prompt, NUM_TOKENS) for prompt in prompts]


def mutated(world: World) -> Iterator[tuple[str, float]]:
    for name, (found_by, change) in MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            change(patch, world.ranks)
            yield name, CHECKS[found_by](world)
