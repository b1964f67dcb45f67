"""Single steps of a rung beside their floors, over batch sizes and contexts.

Needs torch and Triton; measures on a GPU. ``python -m kimik3_lab.rank`` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3_kernels.few_rows import CONFIGS, FewRowsConfig

from kimik3_lab.rank.build import Rung
from kimik3_lab.rank.ladder import Bench
from kimik3_lab.rank.step_floor import Rows
from kimik3_lab.rank.step_times import StepTimer, choice_size, measure_products
from kimik3_lab.serving.presets import Preset

__all__ = ["choices_of", "choose_products", "cost_curves", "distinct_experts", "plain_decode"]


def cost_curves(bench: Bench, preset: Preset, rung: Rung) -> dict[str, Any]:
    """Time single steps on the device, beside their floors: decode, verification, prompts."""
    timer, floor = StepTimer(rung), bench.floor(preset)
    drafts = bench.plan.sizes.num_drafts
    decode, prefill = [], []
    for number, context in bench.plan.decode_grid:
        times = timer.decode(number, context, drafts)
        rows = [Rows(context, 1 + drafts, drafts)] * number
        target = sum(part.seconds for part in floor.target(rows))
        target += floor.draft(rows)[0].seconds  # the drafter's rows are kept in the same recording
        drafter = sum(part.seconds for part in floor.draft(rows)[1:])
        decode.append(
            {
                "requests": number,
                "context": context,
                "drafts": drafts,
                **{name[:-2] + "_ms": 1e3 * s for name, s in times.items()},
                "target_floor_ms": 1e3 * target,
                "drafter_floor_ms": 1e3 * drafter,
                "fraction_of_floor": target / times["target_s"],
                "fraction_of_floor_with_drafter": (target + drafter) / sum(times.values()),
            }
        )
    for count, start in bench.plan.prefill_grid:
        rows = [Rows(start, count)]
        least = sum(part.seconds for part in floor.target(rows)) + floor.draft(rows)[0].seconds
        seconds = timer.prefill(count, start)
        prefill.append(
            {
                "tokens": count,
                "start": start,
                "ms": 1e3 * seconds,
                "floor_ms": 1e3 * least,
                "fraction_of_floor": least / seconds,
            }
        )
    return {"decode": decode, "prefill": prefill}


def plain_decode(bench: Bench, preset: Preset, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Time steps of one token a request, nothing speculated, beside the byte floor."""
    rung = bench.rung(preset, speculate=False)
    timer, floor, rows = StepTimer(rung), bench.floor(preset, speculate=False), []
    context = bench.plan.sizes.prompt_tokens
    for number in batches:
        seconds = timer.decode(number, context, 0)["target_s"]
        parts = floor.target([Rows(context, 1)] * number)
        least = sum(part.seconds for part in parts)
        rows.append(
            {
                "requests": number,
                "context": context,
                "ms": 1e3 * seconds,
                "floor_ms": 1e3 * least,
                "bytes": sum(part.bytes for part in parts),
                "fraction_of_floor": least / seconds,
            }
        )
    return rows


def distinct_experts(bench: Bench, rung: Rung, rows: Sequence[int]) -> list[dict[str, float]]:
    """Experts that were chosen by so many rows, beside what the skew lets expect."""
    timer = StepTimer(rung)
    return [{"rows": n, "measured": timer.distinct(n), "expected": bench.distinct(n)} for n in rows]


def choose_products(bench: Bench) -> list[dict[str, object]]:
    """Measure products with few rows once, for all rungs that have the kernel."""
    preset = next(p for p in bench.plan.presets if "skinny_gemm" in p.execution)
    rung = bench.rung(preset)
    assert rung.model is not None
    bench.choices, measured = measure_products(rung.model)
    return measured


def choices_of(
    measured: Sequence[Mapping[str, Any]],
) -> dict[tuple[int, int, int], FewRowsConfig | None]:
    """Choices that an earlier call has written down."""
    by_name: dict[str, FewRowsConfig | None] = {str(config): config for config in CONFIGS}
    by_name["library"] = None
    return {
        (row["n"], row["k"], choice_size(row["rows"])): by_name[row["chosen"]] for row in measured
    }
