"""A step that was handed to the device, and its output when somebody asks for it.

Needs torch. Part of :mod:`~kimik3_lab.serving.executors.async_steps`. In vLLM this is
``AsyncOutput`` in ``vllm/v1/worker/gpu/async_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kimik3_lab.serving.executors.logprobs import LogprobTensors
from kimik3_lab.serving.executors.pinned import OnItsWay
from kimik3_lab.serving.executors.step_layout import ScheduledRequest
from kimik3_lab.serving.outputs import ModelRunnerOutput, TokenLogprobs

__all__ = ["PendingStep"]


class PendingStep:
    """Output that may not be there yet (``AsyncModelRunnerOutput`` protocol of the engine).

    Parameters
    ----------
    req_ids
        All requests of the step.
    sampling
        Those of them that get tokens.
    rows
        Where these are among the copied tokens; left out, in their order.

    Attributes
    ----------
    copies : OnItsWay or None
        :attr:`~kimik3_lab.serving.executors.async_sampler.Sampled.packed`, then the fields of
        :class:`~kimik3_lab.serving.executors.logprobs.LogprobTensors` if somebody asked.
    asking : list of int
        Places in ``sampling`` of those who asked for logprobs.
    is_answered : bool
        Whether the output was asked for: it is known, or it was raised that there is none.
    on_wait : callable
        Told just before the host waits for the device.
    """

    def __init__(
        self,
        req_ids: Sequence[str],
        sampling: Sequence[ScheduledRequest],
        rows: Sequence[int] | None = None,
    ) -> None:
        self.req_ids, self.sampling = list(req_ids), list(sampling)
        self._rows = range(len(self.sampling)) if rows is None else rows
        self.copies: OnItsWay | None = None
        self.is_answered = False
        self.on_wait: Callable[[], None] = lambda: None
        params = [item.request.sampling_params for item in sampling]
        self.asking = [i for i, p in enumerate(params) if p.logprobs is not None]
        self._num_top = [p.logprobs or 0 for p in params]
        self._output: ModelRunnerOutput | None = None

    @property
    def most_logprobs(self) -> int:
        """The largest number of most probable tokens that is asked for."""
        return max((self._num_top[i] for i in self.asking), default=0)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step.

        Raises
        ------
        ValueError
            If a row that matters has no probabilities.
        """
        self.is_answered = True
        if self._output is None:
            if self.copies is None:
                self.resolve([], None)
            else:
                self._read(self.copies)
        assert self._output is not None
        return self._output

    def _read(self, copies: OnItsWay) -> None:
        self.on_wait()
        packed, *fields = copies.wait()
        said = packed.tolist()
        new_token_ids, broken = [], []
        for item, row in zip(self.sampling, self._rows, strict=True):
            *ids, count, is_broken = said[row]
            new_token_ids.append(ids[:count])
            if is_broken:
                broken.append(item.req_id)
        if broken:
            raise ValueError(
                f"the logits of requests {broken} are not finite, so no token can be chosen"
            )
        logprobs = None
        if fields:
            logprobs = self._describe(new_token_ids, LogprobTensors(*fields))
        self.resolve(new_token_ids, logprobs)

    def _describe(
        self, new_token_ids: Sequence[list[int]], tensors: LogprobTensors
    ) -> list[list[TokenLogprobs]]:
        """List what was said about the tokens that were kept."""
        entries: list[list[TokenLogprobs]] = [[] for _ in self.sampling]
        width = len(tensors.chosen) // len(self.asking)
        for place, i in enumerate(self.asking):
            ids = new_token_ids[i]
            kept = slice(place * width, place * width + len(ids))
            own = LogprobTensors(*(field[kept] for field in tensors))
            entries[i] = own.describe(ids, [self._num_top[i]] * len(ids))
        return entries

    def resolve(
        self,
        new_token_ids: Sequence[list[int]],
        logprobs: Sequence[list[TokenLogprobs]] | None,
    ) -> None:
        """Note the tokens of those that were sampled from, in their order."""
        sampled: dict[str, list[int]] = {req_id: [] for req_id in self.req_ids}
        for item, token_ids in zip(self.sampling, new_token_ids, strict=True):
            item.request.token_ids += token_ids
            sampled[item.req_id] = token_ids
        self._output = ModelRunnerOutput(list(sampled), list(sampled.values()))
        if logprobs is not None:
            asked = dict(zip((item.req_id for item in self.sampling), logprobs, strict=True))
            self._output.logprobs = [asked.get(req_id, []) for req_id in sampled]
