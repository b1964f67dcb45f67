"""What public figures cannot settle, as named choices: a cost model is built under one of them.

Needs the standard library only. Lesson 11 shows which choices the published points can tell apart,
and which they cannot. :meth:`Scenario.default` stands behind a single number; an interval spans
what :meth:`Scenario.corners` gives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kimik3_lab.performance.collectives import AllReduceStyle

__all__ = ["MoeBackend", "Scenario", "TtftStatistic"]

MoeBackend = Literal["trtllm_gen", "marlin"]
TtftStatistic = Literal["mean", "median"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way that the unknowns could lie.

    Attributes
    ----------
    acceptance_length, acceptance_num_drafts
        Mean tokens that a verification yields, the target's own included, with so many drafts. Each
        draft survives with the same probability, so that other numbers of drafts follow.
    acceptance_spread
        Requests differ: sigma of the lognormal factor between their acceptance lengths.
    moe_backend
        Kernel of the routed experts.
    moe_backend_0_27_1
        The same without the switch ``other_step_changes``, as in v0.27.1: no log of it is public.
    routing_skew
        Load of the experts: 0 is even, 1 gives the expert of rank r a share of 1 / r.
    token_reuse
        Share of a token's experts that the token before it in the same request used too.
    expert_load
        Probability that a token picks each expert; replaces ``routing_skew`` if given.
    all_reduce, all_reduce_0_27_1
        ``"custom"`` is vLLM's own kernel; ``"low_latency"`` stands for those of TensorRT-LLM and
        SGLang, and of vLLM's fused latent tail (#50088). The second holds as above: vLLM 0.27.1
        did not take FlashInfer's kernel by default, later versions do.
    cache_itemsize
        Bytes of a cached MLA value: 2 for bf16, 1 for fp8.
    ttft_statistic
        Which statistic of time to first token the published table shows.
    turnaround_s
        From a client's request until the scheduler sees it.
    cold_start_s
        What the very first step of a sweep takes longer. Three seconds would explain both published
        counts of a single stream, 10 and 22, where latencies alone give 9 and 23.
    constants
        Constants that go with the choice, by name: only acceptance length times step time is
        measured, so another acceptance length means other steps.

    Examples
    --------
    >>> Scenario.default().ttft_statistic
    'median'
    """

    name: str = "default"
    acceptance_length: float = 3.45
    acceptance_num_drafts: int = 8
    acceptance_spread: float = 0.15
    moe_backend: MoeBackend = "trtllm_gen"
    moe_backend_0_27_1: MoeBackend = "trtllm_gen"
    routing_skew: float = 0.55
    token_reuse: float = 0.295
    expert_load: tuple[float, ...] | None = None
    all_reduce: AllReduceStyle = "low_latency"
    all_reduce_0_27_1: AllReduceStyle = "custom"
    cache_itemsize: int = 2
    ttft_statistic: TtftStatistic = "median"
    turnaround_s: float = 0.01
    cold_start_s: float = 3.0
    constants: tuple[tuple[str, float], ...] = ()

    @classmethod
    def default(cls) -> Scenario:
        """Return the choice that a single number is given for."""
        return cls()

    @classmethod
    def corners(cls) -> tuple[Scenario, ...]:
        """Return the choices that an interval spans, the default first.

        Each gives one request of the published runs the same time per token as the default does:
        what it makes longer or shorter in a step is made up for by the acceptance length, or by
        what else is unknown of the step. Two let v0.27.1 be 5 % off there: its figure is a mean of
        ten requests, which differ by ``acceptance_spread``.
        """
        base = cls()
        residual, draft = "decode_step_residual", "markov_draft"
        return (
            base,
            replace(
                base,
                name="Marlin in 0.27.1",
                moe_backend_0_27_1="marlin",
                constants=((residual, 8.7e-3),),
            ),
            replace(base, name="even routing", routing_skew=0.0, acceptance_length=3.5),
            replace(
                base,
                name="skewed routing",
                routing_skew=1.0,
                acceptance_length=3.2,
                constants=((residual, 12.7e-3),),
            ),
            replace(
                base,
                name="fewer accepted drafts",
                acceptance_length=3.1,
                constants=((residual, 12.2e-3), (draft, 0.045e-3)),
            ),
            replace(
                base,
                name="more accepted drafts",
                acceptance_length=4.0,
                constants=((residual, 16.9e-3), (draft, 0.57e-3)),
            ),
            replace(
                base,
                name="vLLM's own all-reduce",
                all_reduce="custom",
                acceptance_length=3.9,
                constants=((residual, 18.4e-3),),
            ),
            replace(
                base,
                name="first tokens are means",
                ttft_statistic="mean",
                constants=(("mixed_batch_token", 7e-6),),
            ),
            replace(base, name="no cold start", cold_start_s=0.0),
            replace(base, name="0.27.1 measured slow", constants=((residual, 12.3e-3),)),
            replace(base, name="0.27.1 measured quick", constants=((residual, 15.7e-3),)),
        )
