"""What is measured on several GPUs: collectives by size, and K3 layers by tokens and load.

Needs torch; Triton for the layers. :mod:`kimik3_lab.parallel.measure` is the command.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kimik3_lab.config import K3Config
from kimik3_lab.parallel.groups import Ranks
from kimik3_lab.parallel.layer_shape import LayerShape, Parallel
from kimik3_lab.parallel.timing import eager_us, graph_us, graphs_us
from kimik3_lab.performance.expert_tiles import TILED, TileCount, TileShape
from kimik3_lab.performance.layer_cost import LayerCost

__all__ = ["COLLECTIVES", "Plan", "layer_cases", "measure_collectives", "measure_layers", "say"]

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
TOKENS = (1, 16, 64, 256, 4096)
#: Steps with other tokens in one graph, so that no step finds its experts in the cache.
DRAWS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run measures; ``on_gpu`` False is the dry run."""

    on_gpu: bool
    config: K3Config
    sizes: tuple[int, ...]
    tokens: tuple[int, ...]
    kinds: tuple[Parallel, ...] = ("tp", "ep")
    first: tuple[str, int] | None = None

    @classmethod
    def make(
        cls, *, on_gpu: bool, quick: bool, ranks: int, first: tuple[str, int] | None = None
    ) -> Plan:
        """Choose sizes: K3's own on GPUs, toy ones on the CPU; quick leaves most of them out.

        ``first`` is a kind and a number of tokens whose layers are timed before all others, for a
        run that may be cut short. A dry run takes its kind, and the tokens that it has.
        """
        if not on_gpu:
            micro = K3Config.micro()
            toy = dataclasses.replace(
                micro,
                num_experts=4 * ranks,
                moe_intermediate_size=32 * ranks,  # 32 columns of MXFP4 share a scale
                linear_attn_config=dataclasses.replace(micro.linear_attn_config, num_heads=ranks),
            )
            return cls(False, toy, (4096, 65536), (2,), first=first and (first[0], 2))
        step = 4 if quick else 2
        sizes = []
        size = 4096
        while size <= 256 << 20:
            sizes.append(size)
            size *= step
        tokens = (1, 64) if quick else TOKENS
        return cls(True, K3Config.released(), tuple(sizes), tokens, first=first)

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def device(self) -> torch.device:
        """Where this rank works."""
        if not self.on_gpu:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


def measure_collectives(ranks: Ranks, plan: Plan) -> list[dict[str, Any]]:
    """Time every collective at every size.

    ``bytes`` is what a rank's largest tensor holds: the input of an all-reduce, a reduce-scatter
    and an all-to-all, the output of an all-gather. ``bus_gb_per_s`` is what each link had to carry,
    as NCCL's own tests count it.
    """
    rows = []
    for name in COLLECTIVES:
        for size in plan.sizes:
            # Three ranks do not divide a power of two: the next size that they do is timed.
            each = -(-size // (2 * ranks.size))
            size = 2 * each * ranks.size
            whole = torch.ones(each * ranks.size, device=plan.device(), dtype=torch.bfloat16)
            part = whole[:each].clone()
            counts = [len(part)] * ranks.size

            def call(
                _: int, name: str = name, whole: Any = whole, part: Any = part, counts: Any = counts
            ) -> Any:
                if name == "all_reduce":
                    return ranks.all_reduce(whole)
                if name == "reduce_scatter":
                    return ranks.reduce_scatter(whole, counts)
                if name == "all_gather":
                    return ranks.all_gather(part, counts)
                return ranks.all_to_all(whole, counts, counts)

            calls = max(4, min(100, int(5e3 / (8 + size / 2e5))))
            for mode in ("eager", "graph") if plan.on_gpu else ("eager",):
                if mode == "eager":
                    us = eager_us(ranks, call, calls)
                else:
                    us = graph_us(ranks, call, 1, repeats=calls)
                travels = (2 if name == "all_reduce" else 1) * (ranks.size - 1) / ranks.size
                bus = size * travels / us / 1e3
                rows.append(
                    {"collective": name, "bytes": size, "mode": mode, "us": round(us, 2),
                     "bus_gb_per_s": round(bus, 2)}
                )  # fmt: skip
        shown = "graph" if plan.on_gpu else "eager"
        times = [
            f"{row['bytes'] >> 10} KiB {row['us']:.1f} us"
            for row in rows
            if (row["collective"], row["mode"]) == (name, shown)
        ]
        say(ranks, f"{name}: {', '.join(times)}")
    return rows


def layer_cases(plan: Plan) -> Iterator[tuple[Parallel, int, str]]:
    """Kind of parallelism, tokens and load of each case; heavy steps last, but for ``plan.first``.

    ``placed`` is the skewed load again, after the experts were moved to even ranks out: the n-th
    popular expert to rank n modulo ranks.
    """
    pairs = [(kind, tokens) for tokens in plan.tokens for kind in plan.kinds]
    for kind, tokens in sorted(pairs, key=lambda pair: pair != plan.first):
        for load in ("uniform", "skewed", *(("placed",) if kind == "ep" else ())):
            yield kind, tokens, load


def measure_layers(
    ranks: Ranks, plan: Plan, cost: LayerCost, *, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Time the MoE layer and the whole layer: with exchanges, without, and overlapped.

    Yields a row as soon as it is timed; every rank must take all of them.

    ``us_compute`` is the slowest rank with all exchanges left out; ``us_collectives`` is what the
    exchanges add to it, and ``share`` that over the whole. ``us_overlap`` runs the shared experts
    beside the exchange of the latent sum.
    """
    from kimik3_lab.parallel.gpu_experts import draw_routing
    from kimik3_lab.parallel.gpu_layer import GpuLayer

    weights: dict[str, GpuLayer] = {}
    config, device = plan.config, plan.device()
    for kind, tokens, load in layer_cases(plan):
        shape = LayerShape.of(config, kind, ranks)
        if kind not in weights:  # 8 GB of experts on each rank
            weights[kind] = GpuLayer(shape, 1, device=device, dtype=plan.dtype, compiled=compiled)
        layer = GpuLayer(
            shape, tokens, device=device, dtype=plan.dtype, weights=weights[kind],
            compiled=compiled,
        )  # fmt: skip
        order = _spread_out(config.num_experts, ranks.size, device) if load == "placed" else None
        generator = torch.Generator(device).manual_seed(tokens)
        drawn = "uniform" if load == "uniform" else "skewed"
        draws = [draw_routing(tokens, config, drawn, generator, order) for _ in range(DRAWS)]
        facts = _facts(draws, shape, ranks, layer)
        # Inner loops keep the order on all ranks.
        for name in ("moe", "whole"):
            if name == "whole" and load == "placed":
                continue
            predicted = _predict(cost, facts, name, tokens, kind, ranks.size)
            variants: dict[str, Callable[[int], Any]] = {}
            for what, group, overlap in (
                ("us", ranks, False), ("us_compute", Ranks(), False), ("us_overlap", ranks, True),
            ):  # fmt: skip
                if overlap and name == "whole":
                    continue

                def call(
                    index: int, name: str = name, group: Ranks = group, overlap: bool = overlap,
                    layer: GpuLayer = layer, draws: Any = draws,
                ) -> Any:  # fmt: skip
                    if name == "whole":
                        return layer.whole(group, draws[index])
                    return layer.moe(layer.hidden, group, draws[index], overlap=overlap)

                variants[what] = call
            if plan.on_gpu:
                repeats = max(1, min(8, 512 // max(64, tokens)))
                times = graphs_us(ranks, variants, DRAWS, repeats=repeats)
            else:
                times = {w: eager_us(ranks, c, 1, rounds=1) for w, c in variants.items()}
            row: dict[str, Any] = {
                "layer": name, "parallel": f"{kind}{ranks.size}", "routing": load, "T": tokens,
                **{what: round(us, 2) for what, us in times.items()},
                "us_collectives": round(times["us"] - times["us_compute"], 2),
                "share": round(1 - times["us_compute"] / times["us"], 4),
                **facts,
            }  # fmt: skip
            if name == "whole" and load == "uniform":
                row["parts_us"] = _parts_us(ranks, plan, layer, draws)
            row |= predicted
            row["error"] = round(row["predicted_us"] / row["us"] - 1, 4)
            row["error_tiles"] = round(row["predicted_tiles_us"] / row["us"] - 1, 4)
            say(ranks, json.dumps(row))
            yield row


def _parts_us(ranks: Ranks, plan: Plan, layer: Any, draws: Any) -> dict[str, float]:
    """Time each part of the layer alone."""
    from kimik3_lab.parallel.gpu_layer import KDA_PARTS, PARTS

    times = {}
    for name in (*PARTS, *(KDA_PARTS if layer.is_prefill else KDA_PARTS[:1])):

        def call(index: int, name: str = name) -> Any:
            return layer.part(name, draws[index])

        us = (
            graph_us(ranks, call, DRAWS, repeats=2)
            if plan.on_gpu
            else eager_us(ranks, call, 1, rounds=1)
        )
        times[name] = round(us, 2)
    return times


def _predict(
    cost: LayerCost, facts: dict[str, Any], layer: str, tokens: int, kind: str, size: int
) -> dict[str, Any]:
    """Predict a row from what was drawn for it, before it is timed.

    Twice: with experts priced by the experts read and pairs computed, as all rows were before any
    layer had been timed, and by tiles.
    """
    case = {
        "ranks": size, "whole_experts": kind == "ep",
        "distinct": facts["distinct_experts_busiest_rank"], "pairs": facts["pairs_busiest_rank"],
    }  # fmt: skip
    predicted = cost.layer_us(layer, tokens, **case)
    experts_us = TILED.us(
        TileCount(*facts["tiles_busiest_rank"]),
        latent=cost.config.routed_expert_hidden_size,
        width=cost.config.moe_intermediate_size // (1 if kind == "ep" else size),
    )
    tiles = cost.layer_us(layer, tokens, experts_us=experts_us, **case)
    return {
        "predicted_us": round(predicted.total, 2),
        "predicted_parts_us": {name: round(us, 2) for name, us in predicted.parts.items()},
        "predicted_tiles_us": round(tiles.total, 2),
    }


def _facts(draws: list[Any], shape: Any, ranks: Ranks, layer: Any = None) -> dict[str, Any]:
    """Means over the draws: experts, pairs and tiles of the busiest rank, its load over the mean.

    The tile is that of the constants which the kernel takes for ``layer``; without one, the rule's.
    """
    size = ranks.size if shape.parallel == "ep" else 1
    pairs_of_all = draws[0].expert_ids.numel()
    tile = TileShape.by_rule(pairs_of_all, shape.experts)
    if layer is not None:
        from k3_kernels.moe_config import choose_config

        chosen = choose_config(layer.experts, *draws[0].expert_ids.shape)
        tile = TileShape(chosen.block_m, chosen.extra_m, chosen.fit)
    distinct, pairs, uneven, tiles = [], [], [], []
    for draw in draws:
        counts = draw.expert_ids.flatten().long().bincount(minlength=shape.config.num_experts)
        by_rank = counts.view(size, -1)
        load = by_rank.sum(1).double()
        distinct.append(float((by_rank > 0).sum(1).max()))
        pairs.append(float(load.max()))
        uneven.append(float(load.max() / load.mean()))
        tiles.append(tile.count(by_rank[int(load.argmax())].cpu().numpy()))
    return {
        "distinct_experts_busiest_rank": sum(distinct) / len(draws),
        "pairs_busiest_rank": sum(pairs) / len(draws),
        "imbalance": round(sum(uneven) / len(draws), 4),
        "tiles_busiest_rank": [sum(values) / len(draws) for values in zip(*tiles, strict=True)],
    }


def _spread_out(experts: int, size: int, device: torch.device) -> torch.Tensor:
    """Place of each expert if the n-th goes to rank n modulo ``size``."""
    number = torch.arange(experts, device=device)
    return number % size * (experts // size) + number // size


def say(ranks: Ranks, text: str) -> None:
    """Print on the first rank."""
    if not ranks.rank:
        print(text, flush=True)
