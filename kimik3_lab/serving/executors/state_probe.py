"""Where a served KDA state went wrong: hold every state to the reference after every step.

Needs torch. Used by the recipe ``find_a_wrong_kda_state``. Tokens are a weak witness, since a model
that forgets quickly says the right thing from a wrong state. The state itself has a known value:
what the plain recurrence makes of the same tokens.

Look at the lowest wrong layer only: what comes above it got wrong inputs. Its own were right, so if
it holds a right state at a wrong *place*, or has begun from one, that place can be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kimik3_lab.reference.state import SequenceMixer, SequenceState
from kimik3_lab.serving.executors.pending_step import PendingStep
from kimik3_lab.serving.executors.request_states import RequestState
from kimik3_lab.serving.executors.state_copies import LayerState, StateCopy, scheduled_rows
from kimik3_lab.serving.executors.torch_executor import TorchExecutor
from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput

__all__ = ["StateProbe", "WrongState"]


@dataclass(frozen=True)
class WrongState:
    """The lowest layer of a request whose state is not that of its tokens.

    Attributes
    ----------
    step
        Number of the step, from 0.
    req_id, start, stop
        Which request, and its tokens that this step was to read; the state should be the one after
        ``stop`` tokens.
    layer_id
        The lowest wrong layer.
    part
        ``"state"``, ``"window"`` (of the convolution) or both.
    heads
        Heads with a wrong state.
    error
        Largest deviation over the largest value of the right one; infinity for NaN.
    looks_like
        What is there instead, if it can be told: another place of a text at which it would be
        right, or a place from which the step must have begun.
    """

    step: int
    req_id: str
    start: int
    stop: int
    layer_id: int
    part: Literal["state", "window", "state and window"]
    heads: tuple[int, ...]
    error: float
    looks_like: str


class _EnoughError(Exception):
    """The last layer that anybody asked for has been computed."""


class _UpTo(SequenceMixer):
    """Stops the model behind the KDA of one layer: what comes above it is not looked at."""

    def __init__(self, state: SequenceState, last_layer: int | None) -> None:
        super().__init__(state, form="decode")
        self._last_layer = last_layer

    def kda(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        out = super().kda(layer_id, q, k, v, g, beta)
        if layer_id == self._last_layer:
            raise _EnoughError
        return out


class StateProbe:
    """Compares the states of all scheduled requests with the reference, after every step.

    It keeps the reference's states at every place of every text, so it is for small models and
    short texts. It looks until it has found something: what is wrong later only follows.

    Parameters
    ----------
    executor : TorchExecutor
        With a model in float64, if rounding is not to be mistaken for a fault. Its
        ``execute_model`` and ``execute_model_async`` are wrapped. States of a step in flight are
        copied when it is handed over, and compared when it is answered: only then are all its
        tokens known.
    tolerance : float
        Largest relative deviation that is none.
    known : dict, optional
        Reference states behind each beginning of a text, kept between probes: give the same one to
        all probes of a model, and no text is read twice.

    Attributes
    ----------
    first : WrongState or None
        What was found first.
    num_steps : int
        Steps that were answered so far.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> from kimik3_lab.serving import CacheConfig, Engine, Scheduler, SchedulerConfig
    >>> model, cache = random_model(K3Config.micro(), dtype=torch.float64), CacheConfig(9)
    >>> executor = TorchExecutor(model, cache, max_num_seqs=1)
    >>> probe = StateProbe(executor)
    >>> engine = Engine(Scheduler(SchedulerConfig(1, 64, 128), cache), executor)
    >>> [result] = engine.generate([[0, 5, 9]], progress=False)
    >>> probe.first is None, probe.num_steps
    (True, 16)
    """

    def __init__(
        self,
        executor: TorchExecutor,
        *,
        tolerance: float = 1e-9,
        known: dict[tuple[int, ...], SequenceState] | None = None,
    ) -> None:
        self.executor, self.tolerance = executor, tolerance
        self._known = {} if known is None else known
        self.first: WrongState | None = None
        self.num_steps = 0
        #: Of each request: token ids that the reference has read, and its states behind each.
        self._read: dict[str, list[int]] = {}
        self._states: dict[str, list[SequenceState]] = {}
        execute, submit = executor.execute_model, executor.execute_model_async

        def execute_and_look(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            rows = scheduled_rows(executor, scheduler_output)
            result = execute(scheduler_output)
            self._look([] if self.first else [StateCopy.of(executor, own) for own in rows])
            return result

        def submit_and_copy(scheduler_output: SchedulerOutput) -> PendingStep:
            rows = scheduled_rows(executor, scheduler_output)
            pending = submit(scheduler_output)
            copies = [] if self.first else [StateCopy.of(executor, own) for own in rows]
            answer = pending.get_output

            def answer_and_look() -> ModelRunnerOutput:
                result = answer()
                pending.get_output = answer  # type: ignore[method-assign]
                self._look(copies)
                return result

            pending.get_output = answer_and_look  # type: ignore[method-assign]
            return pending

        executor.execute_model = execute_and_look  # type: ignore[method-assign]
        executor.execute_model_async = submit_and_copy  # type: ignore[method-assign]

    @torch.inference_mode()
    def _look(self, copies: Sequence[StateCopy]) -> None:
        """Compare the states of a step."""
        for copy in copies:
            if self.first is None:
                self._compare(copy)
        self.num_steps += 1

    def _compare(self, copy: StateCopy) -> None:
        (req_id, start, drafts), stop = copy.rows, copy.stop
        right = self._reference(req_id, copy.request, stop)
        for layer_id, found in copy.layers.items():
            state = _deviation(found.recurrent, right.recurrent[layer_id]).amax((-1, -2))
            window = float(_deviation(found.conv, right.conv[layer_id]).max())
            heads = tuple(torch.nonzero(state > self.tolerance).flatten().tolist())
            parts = ["state"] * bool(heads) + ["window"] * (window > self.tolerance)
            if parts:
                self.first = WrongState(
                    self.num_steps,
                    req_id,
                    start,
                    stop,
                    layer_id,
                    " and ".join(parts),  # type: ignore[arg-type]
                    heads,
                    max(float(state.max()), window),
                    self._find(req_id, start, stop, layer_id, found, drafts),
                )
                return

    def _reference(self, req_id: str, request: RequestState, num_tokens: int) -> SequenceState:
        """States of the plain recurrence after the first tokens of a request, one by one."""
        token_ids = request.token_ids
        read = self._read.setdefault(req_id, [])
        if read != token_ids[: len(read)]:  # another request of the same id
            read.clear()
            del self._states[req_id]
        states = self._states.setdefault(req_id, [self.executor.model.new_state()])
        for token_id in token_ids[len(read) : num_tokens]:
            read.append(token_id)
            state = self._known.get(tuple(read))
            if state is None:
                state = self._known[tuple(read)] = self._advance(states[-1], [token_id])
            states.append(state)
        return states[num_tokens]

    def _advance(
        self, state: SequenceState, token_ids: Sequence[int], last_layer: int | None = None
    ) -> SequenceState:
        """Read on from a copy; layers above ``last_layer`` are left as they are."""
        mixer = _UpTo(state.clone(), last_layer)
        with suppress(_EnoughError):
            self.executor.model(torch.tensor(token_ids), mixer)
        return mixer.state

    # -- what is it then? ----------------------------------------------------------------------

    def _find(
        self,
        req_id: str,
        start: int,
        stop: int,
        layer_id: int,
        found: LayerState,
        drafts: Sequence[int],
    ) -> str:
        """Say where what was found would be right, or from where the step must have begun."""
        if found.recurrent.isnan().any() or found.conv.isnan().any():
            return "never written (NaN)"
        token_ids, before = self._read[req_id], self._states[req_id][start]
        places = [("zero", self.executor.model.new_state())]
        if drafts:
            rows = [token_ids[start], *(max(token_id, 0) for token_id in drafts)]
            all_rows = self._advance(before, rows, layer_id)
            places.append((f"{req_id} with all {len(drafts)} drafts", all_rows))
        for name, states in self._states.items():
            places += [(f"{name} after {n} tokens", state) for n, state in enumerate(states) if n]
        for place, state in places:
            if self._is(found, state, layer_id):
                return place
        for place, state in places:
            for parts in (("recurrent", "conv"), ("recurrent",), ("conv",)):
                begun = before.clone()
                for part in parts:
                    getattr(begun, part)[layer_id] = getattr(state, part)[layer_id]
                after = self._advance(begun, token_ids[start:stop], layer_id)
                if self._is(found, after, layer_id):
                    alone = "" if len(parts) == 2 else f", its {parts[0]} part alone"
                    return f"begun from {place}{alone}"
        return "no state of these texts"

    def _is(self, found: LayerState, state: SequenceState, layer_id: int) -> bool:
        pairs = ((found.recurrent, state.recurrent), (found.conv, state.conv))
        return all(
            bool((_deviation(content, right[layer_id]) <= self.tolerance).all())
            for content, right in pairs
        )


def _deviation(found: Tensor, right: Tensor) -> Tensor:
    """Deviation over the largest value; infinity where there is no number."""
    scale = right.abs().max().clamp(min=1e-300)
    return ((found - right).abs() / scale).nan_to_num(nan=float("inf"), posinf=float("inf"))
