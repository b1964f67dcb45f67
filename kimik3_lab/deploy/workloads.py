"""What a server is to be good at: sequences at once, tokens a step, prefix caching, cache type.

Needs the standard library only. Lesson 13 uses it. The numbers are starting points to measure
from, each with its reason; none of them was measured by us on a B300.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROFILES", "Profile"]


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of traffic.

    Attributes
    ----------
    context
        Tokens of a typical sequence, prompt and answer: at least one must fit.
    max_num_seqs
        Sequences that may run at once; memory may lower it.
    max_num_batched_tokens
        Tokens of a step; None takes the default of the releases.
    prefix_caching
        Whether beginnings that sequences share are kept.
    fp8_cache
        Whether MLA rows are kept in 8 bits where the GPU has a backend for it.
    """

    name: str
    says: str
    context: int
    max_num_seqs: int
    why_seqs: str
    max_num_batched_tokens: int | None
    why_tokens: str
    prefix_caching: bool
    why_prefix: str
    fp8_cache: bool = False
    capped: bool = True


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "published",
            "the comparison of the vLLM blog: prompts of 8,000 tokens, answers of 1,000",
            9_000,
            1024,
            "what every release takes on its own on this GPU",
            None,
            "what the release takes on its own; 8,192 before 0.28.0 and 16,384 since, on GPUs of "
            "160 GiB and more",
            False,
            "random prompts share nothing, and the published runs had it off",
            capped=False,
        ),
        Profile(
            "chat",
            "many short conversations, in which every turn repeats the ones before",
            16_384,
            128,
            "people wait for each token: more at once would slow all of them",
            8_192,
            "a long prompt is cut, so that no running answer waits long for a step",
            True,
            "a turn begins with the whole conversation so far",
        ),
        Profile(
            "agents",
            "long tool loops that send the same growing prompt again and again",
            131_072,
            32,
            "few agents, each with a long context",
            16_384,
            "new tokens of a turn (tool results) should pass in one step",
            True,
            "all but the last tool result was computed the turn before",
            fp8_cache=True,
        ),
        Profile(
            "long-context",
            "single documents of hundreds of thousands of tokens",
            524_288,
            8,
            "a sequence takes gigabytes of MLA rows",
            16_384,
            "prefill is nearly all of the work: big steps use the GPUs best",
            True,
            "questions about the same document share it",
            fp8_cache=True,
        ),
        Profile(
            "batch",
            "throughput without anybody waiting: evaluations, synthetic data",
            16_384,
            512,
            "more rows a step read each expert's weights fewer times a token",
            16_384,
            "nobody waits, so steps may be as long as they like",
            False,
            "independent prompts share nothing; states kept for them would take room from running "
            "sequences",
        ),
    )
}
