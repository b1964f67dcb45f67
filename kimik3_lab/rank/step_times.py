"""Seconds of single steps on the device: decode and verification at any batch, prompts, products.

Needs torch and Triton, and times on a GPU. The rank ladder's cost curves and its shares of the
floor come from here.

A step's requests are made up: seats, pages and states are entered as a scheduler would have them,
their content is zeros, and the tokens are drawn. So a context of 64,000 tokens need not be computed
first. Recorded steps are replayed back to back between two events of the device, so that the host's
own time, which a cell's figures contain, is not in these.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from k3_kernels.few_rows import CONFIGS, FewRowsConfig, few_rows_linear
from torch import Tensor

from kimik3_lab.rank.acceptance import ScriptedProposer
from kimik3_lab.rank.build import Rung
from kimik3_lab.serving.executors.drafts import DraftRequest
from kimik3_lab.serving.executors.step_metadata import StepMetadata, step_numbers
from kimik3_lab.serving.executors.step_parts import Segment, StateRows
from kimik3_lab.serving.executors.triton_linear import library_linear
from kimik3_lab.serving.executors.triton_model import TritonK3
from kimik3_lab.serving.executors.triton_proposer import TritonProposer
from kimik3_lab.serving.sampling_params import SamplingParams

__all__ = ["StepTimer", "choice_size", "device_seconds", "measure_products"]


def device_seconds(
    function: Callable[[], object], device: torch.device, *, repeats: int = 5, inner: int = 1
) -> float:
    """Median seconds of ``function``, which may run ahead of the device, after one warm-up.

    ``inner`` calls are timed together.
    """
    function()
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            before = time.perf_counter()
            for _ in range(inner):
                function()
            times.append((time.perf_counter() - before) / inner)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(inner):
            function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / inner)
    return statistics.median(times)


class StepTimer:
    """Times steps of a rung in which nothing runs.

    Parameters
    ----------
    rung
        Its memory is overwritten with zeros.
    """

    @torch.inference_mode()
    def __init__(self, rung: Rung) -> None:
        self.rung, self.executor = rung, rung.executor
        self.cache, self.device = rung.executor.cache, rung.executor.model.device
        for tensor in (self.cache.latent, self.cache.recurrent, self.cache.conv):
            tensor.zero_()
        proposer = self.proposer
        if proposer is not None:
            proposer.latent.zero_()

    @property
    def proposer(self) -> TritonProposer | None:
        """What drafts, behind the script."""
        proposer = self.executor.proposer
        inner = proposer.proposer if isinstance(proposer, ScriptedProposer) else proposer
        return inner if isinstance(inner, TritonProposer) else None

    def segments(
        self, number: int, start: int, count: int, drafts: int, *, seat: int = 0
    ) -> list[Segment]:
        """Give so many requests seats from ``seat`` on, pages and states, each its own.

        Raises
        ------
        ValueError
            If the pool is too small.
        """
        cache = self.cache
        pages = -(-(start + count + drafts) // cache.page_size)
        # Layers of different groups share memory: each group has rows of its own.
        groups, width = cache.num_state_groups, 1 + cache.num_scratch
        rows, wanted = cache.recurrent.shape[1] - 1, seat + number
        if wanted * pages >= cache.latent.shape[1] or wanted * groups * width >= rows:
            raise ValueError(
                f"{wanted} requests of {start + count} tokens need {wanted * pages} pages and "
                f"{wanted * groups * width} states, there are {cache.latent.shape[1] - 1} and "
                f"{rows - 1}: give the cache more blocks"
            )
        made = []
        for i in range(seat, wanted):
            first = 1 + i * pages
            cache.set_blocks(i, 0, list(range(first, first + pages)))
            begins = [1 + (i * groups + group) * width for group in range(groups)]
            states = [StateRows(list(range(begin, begin + width))) for begin in begins]
            made.append(Segment(i, start, count, drafts, states))
        return made

    def _tokens(self, count: int, request: int = 7) -> list[int]:
        return self.rung.script.tokens(request, 0, count)

    @torch.inference_mode()
    def decode(
        self, number: int, context: int, drafts: int, *, replays: int = 10
    ) -> dict[str, float]:
        """Time a recorded step of ``number`` requests, and the drafter's pass behind it."""
        segments = self.segments(number, context, 1 + drafts, drafts)
        executor, graphs = self.executor, self.rung.graphs
        tokens = self._tokens(number * (1 + drafts))
        taps = None if executor.proposer is None else executor.proposer.new_taps()
        times = {}
        if graphs is None:
            run = self._eager(segments, tokens, list(range(len(tokens))), taps)
        else:
            recording = graphs.recording(
                segments, tokens, executor.mixer, num_logits=len(tokens), taps=taps
            )
            assert recording is not None and recording.replay is not None
            run = recording.replay
        times["target_s"] = device_seconds(run, self.device, inner=replays)
        proposer = self.proposer
        if proposer is not None and drafts:
            asked = [
                DraftRequest(str(i), 5, context + 1, (), SamplingParams(), None, i)
                for i in range(number)
            ]
            replay = proposer.recording(asked).replay
            times["drafter_s"] = device_seconds(replay, self.device, inner=replays)
        return times

    @torch.inference_mode()
    def prefill(self, count: int, start: int = 0, *, repeats: int = 3) -> float:
        """Time a chunk of a prompt, the drafter's rows of it included."""
        return device_seconds(self.prepare_prefill(count, start), self.device, repeats=repeats)

    def prepare_prefill(self, count: int, start: int = 0) -> Callable[[], object]:
        """Return what computes a chunk of a prompt."""
        segments = self.segments(1, start, count, 0)
        executor = self.executor
        taps = None if executor.proposer is None else executor.proposer.new_taps()
        return self._eager(segments, self._tokens(count), [count - 1], taps)

    def mixed(self, number: int, context: int, drafts: int, count: int) -> Callable[[], object]:
        """Return what computes a step of ``number`` verifications and a chunk of a prompt."""
        verified = self.segments(number, context, 1 + drafts, drafts)
        (chunk,) = self.segments(1, 0, count, 0, seat=number)
        rows = number * (1 + drafts) + count
        executor = self.executor
        taps = None if executor.proposer is None else executor.proposer.new_taps()
        logits_at = [*range(rows - count), rows - 1]
        return self._eager([*verified, chunk], self._tokens(rows), logits_at, taps)

    @torch.inference_mode()
    def distinct(self, rows: int) -> float:
        """Mean number of distinct experts that so many tokens of a prompt choose in a layer."""
        seen: list[int] = []
        layers = self.rung.experts()
        for layer in layers:
            layer.watch = lambda ids: seen.append(len(ids.unique()))
        try:
            segments = self.segments(1, 0, rows, 0)
            self._eager(segments, self._tokens(rows, rows), [rows - 1], None)()
        finally:
            for layer in layers:
                layer.watch = None
        return sum(seen) / max(1, len(seen))

    def _eager(
        self,
        segments: Sequence[Segment],
        tokens: list[int],
        logits_at: list[int],
        taps: dict[int, Tensor | None] | None,
    ) -> Callable[[], object]:
        """Return what computes a step, operator by operator."""
        executor = self.executor
        compute = executor.compute if self.rung.graphs is None else self.rung.graphs.compute
        numbers = torch.tensor(step_numbers(tokens, segments, logits_at), device=self.device)

        @torch.inference_mode()
        def run() -> Tensor:
            step = executor.mixer.step = StepMetadata(self.cache, segments, numbers=numbers)
            chosen = numbers[len(numbers) - len(logits_at) :]
            logits: Tensor = compute(
                numbers[: len(tokens)], executor.mixer, logits_at=chosen, taps=taps
            )
            if executor.proposer is not None and taps is not None:
                executor.proposer.write(taps, step.positions, step.cell_mapping[0])
            return logits

        return run


@torch.inference_mode()
def measure_products(
    model: TritonK3, *, rows: Sequence[int] = (9, 18, 36), total: float = 130e6
) -> tuple[dict[tuple[int, int, int], FewRowsConfig | None], list[dict[str, object]]]:
    """Time every product with few rows on the library and on the kernel, and keep the quicker.

    Parameters
    ----------
    model
        On a GPU. Its weights are used, as many of a shape as the L2 cache does not hold.
    rows
        Numbers of rows; each speaks for those up to the next power of two.
    total
        Bytes of weights to go through in turn.

    Returns
    -------
    choices, measured
        For :attr:`~kimik3_lab.serving.executors.triton_linear.Skinny.choices`; and a row for each
        shape with both times in microseconds and the floor.
    """
    choices: dict[tuple[int, int, int], FewRowsConfig | None] = {}
    measured: list[dict[str, object]] = []
    head = model.model.lm_head.weight
    for (n, k), weights in model.weights().items():
        used = weights[: max(1, round(total / weights[0].nbytes))]
        wide = n in (len(head), model.config.num_experts)
        for count in rows:
            x = torch.randn(count, k, device=head.device).to(head.dtype)

            def time_it(call: Callable[[Tensor], Tensor], used: list[Tensor] = used) -> float:
                return _captured_seconds([lambda w=w: call(w) for w in used]) / len(used)

            times: dict[FewRowsConfig | None, float] = {
                None: time_it(lambda w: library_linear(x, w, wide=wide))  # noqa: B023
            }
            dtype = torch.float32 if wide else x.dtype
            for config in CONFIGS:
                out = torch.empty(count, n, dtype=dtype, device=head.device)
                times[config] = time_it(
                    lambda w: few_rows_linear(x, w, out=out, config=config)  # noqa: B023
                )
            # A few per cent are noise: then the library stays.
            best = min(times, key=lambda c: times[c] * (0.97 if c is None else 1.0))
            choices[n, k, choice_size(count)] = best
            ours = min(t for c, t in times.items() if c is not None)
            measured.append(
                {
                    "n": n,
                    "k": k,
                    "rows": count,
                    "library_us": round(times[None] * 1e6, 2),
                    "few_rows_us": round(ours * 1e6, 2),
                    "floor_us": round(n * k * 2 / 4.3e12 * 1e6, 2),
                    "chosen": "library" if best is None else str(best),
                }
            )
    return choices, measured


def choice_size(rows: int) -> int:
    """Rows that a choice made for ``rows`` of them is good for.

    >>> [choice_size(n) for n in (1, 18, 36)]
    [16, 32, 64]
    """
    return max(16, 1 << (rows - 1).bit_length())


def _captured_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of calls in one graph: their own time, without the host's."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
        stream.synchronize()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return device_seconds(graph.replay, torch.device("cuda"), repeats=3, inner=3)
