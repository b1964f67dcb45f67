"""The executor that runs a real model: one forward pass for all tokens of a step.

Needs torch. Lesson 10 puts it behind the endpoint. It is what ``GPUModelRunner`` is in vLLM
(``vllm/v1/worker/gpu/model_runner.py``): it keeps a copy of each request, brings KDA states to
where the step wants them, lays the tokens of the step end to end, samples or verifies drafts, takes
back what was rejected, and drafts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.serving.config import CacheConfig
from kimik3_lab.serving.executors.async_steps import AsyncSteps
from kimik3_lab.serving.executors.backends import Backend, make_backend, make_proposer
from kimik3_lab.serving.executors.cuda_graphs import Ahead, DecodeGraphs
from kimik3_lab.serving.executors.drafts import Draft
from kimik3_lab.serving.executors.execution import ExecutionConfig
from kimik3_lab.serving.executors.kda_states import KdaStates
from kimik3_lab.serving.executors.model_limits import ModelLimits
from kimik3_lab.serving.executors.paged_cache import PagedCache
from kimik3_lab.serving.executors.pending_step import PendingStep
from kimik3_lab.serving.executors.proposer import DraftSampleMethod, Proposer
from kimik3_lab.serving.executors.rejection_sampler import (
    RejectionSampleMethod,
    batch_logprobs,
    verify_batch,
)
from kimik3_lab.serving.executors.request_states import RequestStates
from kimik3_lab.serving.executors.step_counters import StepCounters
from kimik3_lab.serving.executors.step_inputs import StepInputs
from kimik3_lab.serving.executors.step_layout import ScheduledRequest, lay_out, model_inputs
from kimik3_lab.serving.executors.step_parts import Segment
from kimik3_lab.serving.outputs import ModelRunnerOutput, SchedulerOutput, TokenLogprobs

__all__ = ["TorchExecutor"]


class TorchExecutor(ModelLimits):
    """Computes steps with a :class:`~kimik3_lab.reference.model.K3ForCausalLM`.

    Parameters
    ----------
    model : K3ForCausalLM
        Its type is that of the cache; KDA states are float32 or wider.
    cache_config : CacheConfig
        The same as the scheduler's.
    max_num_seqs : int
        Seats, at least the scheduler's ``max_num_seqs``.
    backend : {"reference", "triton"}
        What computes a forward pass, see :mod:`kimik3_lab.serving.executors.backends`.
    device : torch.device or str, optional
        Moves the model there; left out, the model stays where it is.
    execution : ExecutionConfig, optional
        Switches that the scheduler does not see.
    drafter : DSparkDrafter or Proposer, optional
        Drafts tokens for the scheduler to have verified. A proposer is used as it is, and so is
        anything else with its methods.
    num_speculative_tokens : int, optional
        K, the scheduler's. Left out, it is the block size that the drafter was trained with.
    draft_sample_method : {"greedy", "probabilistic"}
        How the drafter chooses, see :class:`~kimik3_lab.serving.executors.proposer.Proposer`.
    rejection_sample_method : {"standard", "block", "coupled"}
        What is kept of a draft, see :mod:`kimik3_lab.serving.executors.rejection_sampler`.

    Attributes
    ----------
    counters : StepCounters
        What the steps so far have cost.
    num_host_waits : int
        Times that the host waited for the device while nothing more was queued there: it stands
        idle then until the host has read the result and sent the next work.

    Raises
    ------
    ValueError
        If ``backend`` is unknown, ``max_num_seqs`` is not positive, or nobody drafts
        ``num_speculative_tokens``.

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
        backend: Backend = "reference",
        device: torch.device | str | None = None,
        execution: ExecutionConfig | None = None,
        drafter: DSparkDrafter | Proposer | None = None,
        num_speculative_tokens: int | None = None,
        draft_sample_method: DraftSampleMethod = "greedy",
        rejection_sample_method: RejectionSampleMethod = "standard",
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.model = (model if device is None else model.to(device)).eval()
        self.cache_config, self.max_num_seqs = cache_config, max_num_seqs
        self.counters, self.num_host_waits = StepCounters(), 0
        self.rejection_sample_method = rejection_sample_method
        #: Chooses the new tokens of a step from its logits, as :func:`verify_batch` does.
        self.verifier: Callable[..., list[list[int]]] = verify_batch
        if isinstance(drafter, DSparkDrafter):
            self.num_speculative_tokens = num_speculative_tokens or drafter.config.block_size
        else:
            self.num_speculative_tokens = drafter.num_speculative_tokens if drafter else 0
        if num_speculative_tokens not in (None, self.num_speculative_tokens):
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}, but the drafter drafts "
                f"{self.num_speculative_tokens}: give the same number, or leave it out"
            )
        self.cache = PagedCache(
            model.config,
            cache_config,
            max_num_seqs,
            num_speculative_tokens=self.num_speculative_tokens,
            counters=self.counters,
            dtype=model.dtype,
            device=model.device,
        )
        self.states = KdaStates(self.cache, cache_config)
        self.requests = RequestStates(self.cache, self.states, max_num_seqs)
        self.execution = execution or ExecutionConfig()
        self.compute, self.mixer = make_backend(backend, self.model, self.cache, self.execution)
        if isinstance(drafter, DSparkDrafter):
            drafter = make_proposer(
                backend,
                drafter.to(model.device).eval(),
                self.cache,
                self.compute,
                self.model,
                self.num_speculative_tokens,
                cache_config,
                draft_sample_method=draft_sample_method,
                shared_noise=rejection_sample_method == "coupled",
            )
        self.proposer = drafter
        self.async_steps = AsyncSteps(self, fused=backend == "triton")
        #: Rows of the last step.
        self.last_segments: list[Segment] = []
        self._drafts: dict[str, list[int]] = {}

    @property
    def graphs(self) -> DecodeGraphs | None:
        """What records steps and replays them, if anything does."""
        return self.compute if isinstance(self.compute, DecodeGraphs) else None

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
            For each request whose tokens are all computed now, the drafts that were kept and one
            token more; none for the others.
        """
        self._drafts = {}
        self._copy_blocks(scheduler_output.kv_cache_block_copies)
        starts = self.requests.update(scheduler_output)
        if not starts:
            return ModelRunnerOutput([], [])
        scheduled = lay_out(scheduler_output, starts, self.requests, self.states)
        taps = None if self.proposer is None else self.proposer.new_taps()
        logits = self._forward(scheduled, *model_inputs(scheduled), taps)

        sampling = [item for item in scheduled if item.draft is not None]
        drafts = [item.draft for item in sampling if item.draft is not None]
        new_token_ids, logprobs = self._choose(logits, drafts, sampling)
        self.num_host_waits += bool(sampling)
        sampled: dict[str, list[int]] = {item.req_id: [] for item in scheduled}
        for item, token_ids in zip(sampling, new_token_ids, strict=True):
            item.request.token_ids += token_ids
            sampled[item.req_id] = token_ids
        self._settle(scheduled, sampled)
        if self.proposer is not None and taps is not None:
            self._keep_taps(taps)
            drafts_of = self._propose(sampling)
            self._drafts = {req_id: draft.token_ids for req_id, draft in drafts_of.items()}
        result = ModelRunnerOutput(list(sampled), list(sampled.values()))
        if logprobs is not None:
            asked = dict(zip((item.req_id for item in sampling), logprobs, strict=True))
            result.logprobs = [asked.get(req_id, []) for req_id in sampled]
        return result

    @torch.inference_mode()
    def execute_model_async(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Hand a step to the device without waiting for it; ``get_output()`` of the result does.

        The plan may have been made before the last step has answered: its placeholders stand for
        tokens and drafts that this side knows. Plans come in their order, and an executor's steps
        are all executed in this way or all in the other.
        """
        return self.async_steps.submit(scheduler_output)

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Drafts of the last step, by request id: the engine hands them to the scheduler."""
        return self._drafts

    # -- its parts ---------------------------------------------------------------------------

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.cache.copy_blocks(pairs)
        if self.proposer is not None:
            pages = range(self.cache.num_attention_groups)
            self.proposer.copy_blocks([p for p in pairs if self.cache.owner[p[0]] in pages])

    def _forward(
        self,
        scheduled: Sequence[ScheduledRequest],
        token_ids: Sequence[int],
        logits_at: Sequence[int],
        taps: dict[int, Tensor | None] | None,
        ahead: Ahead | None = None,
    ) -> Tensor:
        """Run the model over all rows; return logits of those that are sampled from."""
        self.last_segments = segments = [item.segment for item in scheduled]
        self.counters.forwards += 1
        self.counters.tokens += len(token_ids)
        inputs = StepInputs(segments, token_ids, logits_at, taps, ahead)
        if self.execution.metadata == "eager":
            return inputs.run_eagerly(self.compute, self.mixer)
        return inputs.run(self.compute, self.mixer)

    def _choose(
        self, logits: Tensor, drafts: Sequence[Draft], sampling: Sequence[ScheduledRequest]
    ) -> tuple[list[list[int]], list[list[TokenLogprobs]] | None]:
        """Verify drafts and choose new tokens on the host; describe those that somebody asks of."""
        params = [item.request.sampling_params for item in sampling]
        new_token_ids = self.verifier(
            logits,
            drafts,
            params,
            [item.request.stream for item in sampling],
            [len(item.request.token_ids) for item in sampling],
            method=self.rejection_sample_method,
            best=None if self.graphs is None else self.graphs.best,
        )
        return new_token_ids, batch_logprobs(logits, drafts, new_token_ids, params)

    def _settle(self, scheduled: Sequence[ScheduledRequest], sampled: dict[str, list[int]]) -> None:
        """Make final what was computed rightly, and take back rejected drafts."""
        verified = []
        for item in scheduled:
            if item.segment.num_drafts:
                verified.append((item.chunk, len(sampled[item.req_id])))
            else:
                self.states.finish(item.req_id, item.chunk.stop)
        commits = self.states.accept(verified)
        if not self.cache.num_scratch:
            self.mixer.commit(commits)
        self.counters.checkpoint_exports += sum(item.chunk.checkpoint_at > 0 for item in scheduled)

    def _keep_taps(self, taps: dict[int, Tensor | None]) -> None:
        """Keep what the drafter reads of this step."""
        step, graphs = self.mixer.step, self.graphs
        if graphs is None or graphs.after is None or graphs.best is None:
            assert self.proposer is not None
            self.proposer.write(taps, step.positions, step.cell_mapping[0])

    def _propose(self, sampling: Sequence[ScheduledRequest]) -> dict[str, Draft]:
        """Draft for all that have a new token."""
        assert self.proposer is not None
        before = self.proposer.num_forwards
        drafts = self.proposer.propose(
            [
                item.draft_request(item.request.token_ids[-1], len(item.request.token_ids) - 1)
                for item in sampling
            ]
        )
        num_forwards = self.proposer.num_forwards - before
        self.counters.drafter_forwards += num_forwards
        self.num_host_waits += num_forwards
        for item in sampling:
            item.request.draft = drafts[item.req_id]
        return drafts
