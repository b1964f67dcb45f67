"""Climb the ladder: every rung at every concurrency, on weights that are drawn once.

Needs torch and Triton; measures on a GPU. ``python -m kimik3_lab.rank`` calls it.
"""

from __future__ import annotations

import datetime
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.rank.acceptance import Script
from kimik3_lab.rank.build import Rung, Sizes, make_rung, rank_presets
from kimik3_lab.rank.routing_skew import load_profile, stretch
from kimik3_lab.rank.step_floor import Part, Rows, StepFloor, expected_distinct
from kimik3_lab.rank.weights import rank_drafter, rank_model
from kimik3_lab.rank.workload import Step, decode_seconds, run_cell
from kimik3_lab.serving.presets import Preset

__all__ = [
    "Bench",
    "Plan",
    "climb",
    "order",
]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes
    ----------
    requests : mapping of int to int
        Requests of a cell for each concurrency: one wave.
    presets : tuple of Preset
        The rungs.
    decode_grid : tuple of (int, int)
        Requests and context of the cost curves of decoding.
    prefill_grid : tuple of (int, int)
        Tokens of a chunk, and tokens cached before it.
    """

    sizes: Sizes = field(default_factory=Sizes)
    requests: Mapping[int, int] = field(default_factory=lambda: {1: 1, 4: 4, 16: 16})
    presets: tuple[Preset, ...] = field(default_factory=rank_presets)
    tokens_per_verify: float = 3.4
    seed: int = 0
    decode_grid: tuple[tuple[int, int], ...] = (
        (1, 1000), (1, 8000), (1, 16000), (1, 64000),
        (4, 1000), (4, 8000), (4, 64000),
        (16, 1000), (16, 8000), (16, 16000), (16, 64000),
        (64, 1000), (64, 8000),
    )  # fmt: skip
    prefill_grid: tuple[tuple[int, int], ...] = (
        (1024, 0), (2048, 0), (4096, 0), (8000, 0), (16000, 0), (1024, 7000), (1024, 63000),
    )  # fmt: skip


class Bench:
    """Model, drafter and script that all rungs share.

    Parameters
    ----------
    plan
        What is measured.
    config, drafter
        Shapes.
    device, dtype, backend
        Where and how it runs.
    profile
        Load of the experts; the trained tiny K3's if left out.
    share_experts
        Whether all layers have the same ones, which is enough for compiling.
    """

    def __init__(
        self,
        plan: Plan,
        config: K3Config,
        drafter: DSparkConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "triton",
        profile: list[float] | None = None,
        share_experts: bool = False,
    ) -> None:
        self.plan, self.config, self.drafter_config = plan, config, drafter
        self.device, self.backend = torch.device(device), backend
        self.profile = load_profile() if profile is None else profile
        on_cpu = self.device.type == "cpu"
        self.model = rank_model(
            config, self.profile, device=device, dtype=dtype, seed=plan.seed,
            keep_codes=on_cpu and not share_experts, share_experts=share_experts,
        )  # fmt: skip
        self.drafter = rank_drafter(drafter, device=device, dtype=dtype, seed=plan.seed + 1)
        self.choices: dict[Any, Any] = {}
        self.distinct_measured: dict[int, float] = {}
        self._share = stretch(self.profile, config.num_experts).tolist()
        self._expected: dict[int, float] = {}
        self._script = Script(
            config.vocab_size, plan.sizes.num_drafts, plan.tokens_per_verify, plan.seed
        )
        #: Whether attention has seen all shapes, see :mod:`kimik3_lab.rank.rehearsal`.
        self.attention_planned = False

    def script(self) -> Script:
        """Return the same script for every rung."""
        return self._script.again()

    def rung(self, preset: Preset, *, speculate: bool = True) -> Rung:
        """Build a rung; whoever builds the next one lets go of it first."""
        collect(self.device)
        return make_rung(
            preset,
            self.model,
            self.drafter if speculate else None,
            self.plan.sizes,
            self.script(),
            backend=self.backend,
            choices=self.choices,
        )

    def distinct(self, rows: int) -> float:
        """Distinct experts of a layer for so many rows, by the skew that the router was given."""
        if rows not in self._expected:
            top_k = self.config.num_experts_per_token
            self._expected[rows] = expected_distinct(self._share, top_k, rows)
        return self._expected[rows]

    def floor(self, preset: Preset, *, speculate: bool = True) -> StepFloor:
        """Return the floors of a rung's steps."""
        return StepFloor(
            self.config,
            self.distinct,
            drafter=self.drafter_config if speculate else None,
            num_drafts=self.plan.sizes.num_drafts,
            records=preset.cache.get("speculative_states") == "records",
        )


def collect(device: torch.device) -> None:
    """Give memory of the last rung back."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def order(presets: Sequence[Preset]) -> list[Preset]:
    """Put the rungs that matter most first: both published ends, what lies between, the rest.

    Examples
    --------
    >>> [preset.name for preset in order(rank_presets())][:3]
    ['v0.27.1', 'main 2026-09-13', 'batch of 16,384']
    """
    ends = ("v0.27.1", "main 2026-09-13")
    return sorted(presets, key=lambda p: (p.name not in ends, p.beyond_published))


def climb(
    bench: Bench,
    tell: Callable[[str], object] = print,
    *,
    prepare: Callable[[Rung], object] = lambda rung: None,
    presets: Sequence[Preset] | None = None,
    cells: Mapping[str, Sequence[int]] | None = None,
    stop: float = math.inf,
    failed: dict[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure rungs at every concurrency; yield a row for each as soon as it is there.

    Parameters
    ----------
    bench
        Model and plan.
    tell
        Shown a line for each rung.
    prepare
        Called with a rung before its cells are measured.
    presets
        Rungs, in the order of measuring; the plan's if left out.
    cells
        Concurrencies of each rung, by its name; all of the plan's if left out.
    stop
        Moment of :func:`time.monotonic` after which no further cell is begun.
    failed
        Told the reason of every rung that was not measured whole.
    """
    failed = {} if failed is None else failed
    for preset in bench.plan.presets if presets is None else presets:
        if time.monotonic() > stop:
            failed[preset.name] = "no time left"
            continue
        began = time.perf_counter()
        rung: Rung | None = None
        try:
            rung = bench.rung(preset)
            prepare(rung)
            tell(f"{preset.name}: built and recorded in {time.perf_counter() - began:.1f} s")
            for concurrency, number in bench.plan.requests.items():
                if cells is not None and concurrency not in cells[preset.name]:
                    continue
                if time.monotonic() > stop:
                    failed[preset.name] = f"no time left at concurrency {concurrency}"
                    break
                yield measure_cell(bench, rung, concurrency, number)
        except (RuntimeError, ValueError) as error:
            failed[preset.name] = f"{type(error).__name__}: {error}"[:500]
            tell(f"{preset.name}: {failed[preset.name]}")
        finally:
            del rung


def measure_cell(bench: Bench, rung: Rung, concurrency: int, number: int) -> dict[str, Any]:
    """Run a cell of ``number`` requests and describe it in a row."""
    sizes, preset, executor = bench.plan.sizes, rung.preset, rung.executor
    before, verifications = executor.counters.snapshot(), rung.script.num_verifications
    tokens = rung.script.num_tokens
    rung.observed.steps.clear()
    times, elapsed = run_cell(
        rung.engine, rung.script, prompt_tokens=sizes.prompt_tokens,
        output_tokens=sizes.output_tokens, concurrency=concurrency, num_requests=number,
        # Every cell has texts of its own: rungs that cache prompts have nothing to find.
        first_request=100 * concurrency,
    )  # fmt: skip
    counters = executor.counters - before
    steps = list(rung.observed.steps)
    floor = bench.floor(preset)
    generated = sum(t.tokens for t in times)
    yields = rung.script.num_tokens - tokens
    row = {
        "concurrency": concurrency,
        "rung": preset.name,
        "change": preset.change,
        "prs": list(preset.prs),
        "beyond_published": preset.beyond_published,
        "requests": number,
        "latency_s": statistics.mean(t.e2e for t in times),
        "ttft_ms": 1e3 * statistics.mean(t.ttft for t in times),
        "tpot_ms": 1e3 * statistics.mean(t.tpot for t in times if t.tokens > 1),
        "output_tokens_per_s": generated / elapsed,
        "elapsed_s": elapsed,
        "output_tokens": generated,
        "tokens_per_verify": yields / max(1, rung.script.num_verifications - verifications),
        "forwards": counters.forwards,
        "drafter_forwards": counters.drafter_forwards,
        "launches": counters.launches,
        "gather_bytes": counters.gather_bytes,
        "kda_state_bytes_copied": counters.kda_state_bytes_copied,
        "kda_state_writes": counters.kda_state_writes,
        **floors_of_cell(steps, floor, elapsed),
    }
    prompts = [step.seconds for step in steps if not step.decodes]
    row["prompt_step_ms"] = 1e3 * statistics.median(prompts)
    row["longest_step_ms"] = 1e3 * max(step.seconds for step in steps)
    #: Each of them in order: two runs differ in single steps, and a median does not say which.
    row["prompt_steps_ms"] = [round(1e3 * seconds, 2) for seconds in prompts]
    row["date_utc"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    full = decode_seconds(steps, concurrency)
    if full:
        row["decode_step_ms"] = 1e3 * statistics.median(full)
    return row


def floors_of_cell(steps: Sequence[Step], floor: StepFloor, elapsed: float) -> dict[str, Any]:
    """Bytes and least seconds of the steps that were done, and the share of the time they are."""
    moved = seconds = 0.0
    for step in steps:
        sampled = [r for r in step.rows if not r.is_prompt]
        for part in [*floor.target(step.rows), *draft_parts(floor, step.rows, sampled)]:
            moved += part.bytes
            seconds += part.seconds
    return {
        "bytes": moved,
        "floor_s": seconds,
        "executor_s": sum(step.seconds for step in steps),
        "fraction_of_floor": seconds / elapsed,
    }


def draft_parts(floor: StepFloor, rows: Sequence[Rows], sampled: Sequence[Rows]) -> list[Part]:
    """Return the drafter's parts: it keeps rows of all, and drafts for who is sampled from."""
    if sampled:
        drafted = floor.draft(sampled)
        extra = sum(r.count for r in rows) - sum(r.count for r in sampled)
    else:
        drafted, extra = floor.draft(rows)[:1], 0
    if extra and drafted:
        context = drafted[0]
        each = context.flops / max(1, sum(r.count for r in sampled))
        drafted[0] = Part(context.name, context.bytes, context.flops + each * extra)
    return drafted
