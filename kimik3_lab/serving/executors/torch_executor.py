"""The executor that runs a real model: one forward pass for all tokens of a step.

Needs torch. Lesson 10 puts it behind the endpoint. It is what ``GPUModelRunner`` is in vLLM
(``vllm/v1/worker/gpu_model_runner.py``): it keeps a copy of each request, gives each running one a
slot for its KDA state, lays the tokens of a step end to end, and samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving.config import CacheConfig, SchedulerConfig
from kimik3_lab.serving.executors.paged_cache import PagedCache, Segment, StepMetadata
from kimik3_lab.serving.executors.paged_mixer import PagedMixer
from kimik3_lab.serving.executors.sampler import make_generator, sample
from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput
from kimik3_lab.serving.request import SamplingParams

__all__ = ["TorchExecutor"]


@dataclass(slots=True)
class _RequestState:
    """The executor's copy of a request (vLLM: ``CachedRequestState``)."""

    token_ids: list[int]
    sampling_params: SamplingParams
    generator: torch.Generator | None
    slot: int | None = None
    num_blocks: int = field(default=0)


class TorchExecutor:
    """Computes steps with a :class:`~kimik3_lab.reference.model.K3ForCausalLM`.

    Parameters
    ----------
    model : K3ForCausalLM
        Its type is that of the cache; KDA states are float32 or wider.
    cache_config : CacheConfig
        The same as the scheduler's.
    max_num_seqs : int
        Slots for KDA states, at least the scheduler's ``max_num_seqs``.
    backend : {"reference"}
        Whose operations run inside the mixer.
    device : torch.device or str, optional
        Moves the model there; left out, the model stays where it is.

    Raises
    ------
    ValueError
        If ``backend`` is unknown or ``max_num_seqs`` is not positive.

    Examples
    --------
    >>> from kimik3_lab.config import K3Config
    >>> from kimik3_lab.reference.initialization import random_model
    >>> from kimik3_lab.serving import Engine, SamplingParams, Scheduler, SchedulerConfig
    >>> model, cache = random_model(K3Config.micro()), CacheConfig(num_blocks=9)
    >>> scheduler = Scheduler(SchedulerConfig(2, 64, 128), cache)
    >>> engine = Engine(scheduler, TorchExecutor(model, cache, max_num_seqs=2))
    >>> (result,) = engine.generate([[0, 5, 9]], SamplingParams(max_tokens=4), progress=False)
    >>> result.token_ids == model.generate([0, 5, 9], 4)
    True
    """

    def __init__(
        self,
        model: K3ForCausalLM,
        cache_config: CacheConfig,
        max_num_seqs: int,
        *,
        backend: Literal["reference"] = "reference",
        device: torch.device | str | None = None,
    ) -> None:
        if backend != "reference":
            raise ValueError(f"backend must be 'reference', got {backend!r}")
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.model = (model if device is None else model.to(device)).eval()
        self.cache_config = cache_config
        self.max_num_seqs = max_num_seqs
        self.cache = PagedCache(
            model.config, cache_config, max_num_seqs, dtype=model.dtype, device=model.device
        )
        self._mixer = PagedMixer(model.config, self.cache)
        self._requests: dict[str, _RequestState] = {}
        self._free_slots = list(reversed(range(max_num_seqs)))

    @property
    def vocab_size(self) -> int:
        """Token ids must be below this."""
        return self.model.config.vocab_size

    @property
    def eos_token_id(self) -> int:
        """The model's end-of-sequence token."""
        return self.model.config.eos_token_id

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the model was made for."""
        return self.model.config.max_position_embeddings

    def check_configs(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        """Refuse plans that this executor cannot compute, naming the knob."""
        for knob, value in (
            ("enable_prefix_caching", cache_config.enable_prefix_caching),
            ("num_kda_groups", cache_config.num_kda_groups),
            ("speculative_method", scheduler_config.speculative_method),
            ("async_scheduling", scheduler_config.async_scheduling),
        ):
            if value:
                raise ValueError(
                    f"{knob}={value!r}: this executor keeps one KDA state for each request, in a "
                    "slot, and computes only tokens that are known; leave the knob at its default"
                )

    # -- a step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens of all requests in one forward pass, and sample.

        Parameters
        ----------
        scheduler_output : SchedulerOutput
            The plan of the step.

        Returns
        -------
        ModelRunnerOutput
            One token for each request whose tokens are all computed now, none for the others.
        """
        starts = self._update_states(scheduler_output)
        req_ids = list(scheduler_output.num_scheduled_tokens)
        if not req_ids:
            return ModelRunnerOutput([], [])
        counts = scheduler_output.num_scheduled_tokens
        # Rows of the step: requests with one token first, the shortest context at the front.
        req_ids.sort(key=lambda req_id: (counts[req_id] > 1, starts[req_id]))
        segments, token_ids, complete, last_rows = [], [], [], []
        for req_id in req_ids:
            state = self._requests[req_id]
            assert state.slot is not None
            segment = Segment(state.slot, starts[req_id], counts[req_id])
            segments.append(segment)
            token_ids += state.token_ids[segment.start : segment.stop]
            if segment.stop == len(state.token_ids):
                complete.append(req_id)
                last_rows.append(len(token_ids) - 1)

        self._mixer.step = StepMetadata(self.cache, segments)
        logits = self.model(
            torch.tensor(token_ids, device=self.model.device),
            self._mixer,
            logits_at=torch.tensor(last_rows, dtype=torch.int64, device=self.model.device),
        )
        states = [self._requests[req_id] for req_id in complete]
        new_token_ids = sample(
            logits, [s.sampling_params for s in states], [s.generator for s in states]
        )
        for state, token_id in zip(states, new_token_ids, strict=True):
            state.token_ids.append(token_id)
        sampled = dict(zip(complete, new_token_ids, strict=True))
        return ModelRunnerOutput(
            req_ids, [[sampled[req_id]] if req_id in sampled else [] for req_id in req_ids]
        )

    # -- the copies of the requests ----------------------------------------------------------

    def _update_states(self, output: SchedulerOutput) -> dict[str, int]:
        """Follow the scheduler's news. Returns each scheduled request's first token of the step."""
        self._release_slots(output.preempted_req_ids)
        self._release_slots(output.finished_req_ids)
        for req_id in output.finished_req_ids:
            self._requests.pop(req_id, None)

        started: list[int] = []
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            state = _RequestState(list(new.prompt_token_ids), params, make_generator(params))
            self._requests[new.req_id] = state
            started.append(self._start(new.req_id, new.num_computed_tokens))
            self._add_blocks(state, new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        for cached in output.scheduled_cached_reqs:
            state = self._requests[cached.req_id]
            if cached.resumed_from_preemption:
                assert cached.all_token_ids is not None
                state.token_ids = list(cached.all_token_ids)
                started.append(self._start(cached.req_id, cached.num_computed_tokens))
            self._add_blocks(state, cached.new_block_ids[0])
            starts[cached.req_id] = cached.num_computed_tokens
        self.cache.reset_slots(started)
        return starts

    def _start(self, req_id: str, num_computed_tokens: int) -> int:
        """Give a request a slot and an empty block table."""
        if num_computed_tokens:
            raise ValueError(
                f"request {req_id} is to start at token {num_computed_tokens}, but this executor "
                "holds no KDA state for it: requests start at 0"
            )
        if not self._free_slots:
            raise RuntimeError(
                f"no free slot for request {req_id}: all max_num_seqs={self.max_num_seqs} are "
                "taken; make the executor with the scheduler's max_num_seqs"
            )
        state = self._requests[req_id]
        state.slot, state.num_blocks = self._free_slots.pop(), 0
        return state.slot

    def _add_blocks(self, state: _RequestState, block_ids: list[int]) -> None:
        assert state.slot is not None
        self.cache.set_blocks(state.slot, state.num_blocks, block_ids)
        state.num_blocks += len(block_ids)

    def _release_slots(self, req_ids: Iterable[str]) -> None:
        """Take slots back. A request that failed before it was heard of has none."""
        for req_id in req_ids:
            state = self._requests.get(req_id)
            if state is not None and state.slot is not None:
                self._free_slots.append(state.slot)
                state.slot = None
