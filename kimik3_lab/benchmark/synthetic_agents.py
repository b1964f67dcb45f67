"""Agents at work: long sessions whose prompts grow turn by turn, with tools and subagents.

Needs numpy. Used by the generators of :mod:`kimik3_lab.benchmark.synthetic_traces`.

An agent sends all that happened so far, gets a short answer that calls a tool, and comes back with
what the tool said. So a prompt is nearly all known, and the next one follows within seconds. In
truth the next turn waits for the answer (a closed loop). A trace must name a time beforehand, so
times here take an assumed speed of the server for granted: read results of a server that is much
slower with care.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kimik3_lab.benchmark.length_curve import LengthCurve
from kimik3_lab.benchmark.trace_request import BLOCK_TOKENS, TraceRequest

__all__ = ["AgentSessions"]


@dataclass(frozen=True)
class AgentSessions:
    """Sessions of an agent, each a chain of turns, some with subagents.

    Attributes
    ----------
    rate
        Requests a second.
    turns
        Turns of a session.
    output_tokens
        Length of an answer.
    template_tokens
        System prompt and tools, the same for all sessions.
    task_tokens
        What a session begins with besides.
    tool_tokens
        What a turn adds besides the last answer.
    context_limit, compacted_tokens
        A prompt that would be longer than the limit is replaced by template and a summary of that
        many tokens.
    subagent_share
        Share of the sessions that start subagents: one, or more with chance a half each.
    subagent_turns
        Turns of a subagent. It begins with the template and a task of its own.
    think_median_s, think_spread
        Seconds from an answer to the next turn: median, and standard deviation of the logarithm.
    assumed_ttft_s, assumed_tpot_s
        Speed of the server that the times rest on.
    """

    rate: float
    turns: LengthCurve
    output_tokens: LengthCurve
    template_tokens: int
    task_tokens: LengthCurve
    tool_tokens: LengthCurve
    context_limit: int
    compacted_tokens: int
    subagent_share: float
    subagent_turns: LengthCurve
    think_median_s: float
    think_spread: float
    assumed_ttft_s: float = 1.0
    assumed_tpot_s: float = 0.02

    @property
    def requests_per_session(self) -> float:
        """Mean requests of a session with its subagents."""
        return self.turns.mean + self.subagent_share * 2 * self.subagent_turns.mean

    def requests(
        self, duration_s: float, rate_scale: float, rng: np.random.Generator
    ) -> list[TraceRequest]:
        """Generate ``duration_s`` seconds; sessions begin ``rate_scale`` times as often.

        Four hours are generated before, so that sessions are under way at time 0; hardly one of
        them lasts longer.
        """
        before = 4 * 3_600.0
        session_rate = self.rate * rate_scale / self.requests_per_session
        sessions = int(rng.poisson(session_rate * (before + duration_s)))
        drafts: list[tuple[float, int, int, str, int]] = []
        for number in range(sessions):
            start = float(rng.uniform(-before, duration_s))
            self._session(f"a{number}", start, drafts, rng)
        drafts = sorted(draft for draft in drafts if 0 <= draft[0] < duration_s)
        return _named(drafts, self.template_tokens)

    def _session(
        self,
        name: str,
        start: float,
        drafts: list[tuple[float, int, int, str, int]],
        rng: np.random.Generator,
    ) -> None:
        turns = int(self.turns.tokens(rng.standard_normal(1))[0])
        moments = self._chain(name, start, turns, drafts, rng)
        if rng.random() < self.subagent_share:
            for number in range(int(rng.geometric(0.5))):
                length = int(self.subagent_turns.tokens(rng.standard_normal(1))[0])
                begins = float(rng.choice(moments) + rng.exponential(self.think_median_s))
                self._chain(f"{name}/{number}", begins, length, drafts, rng)

    def _chain(
        self,
        name: str,
        start: float,
        turns: int,
        drafts: list[tuple[float, int, int, str, int]],
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Add the turns of one agent; a draft is (time, prompt, answer, session, generation)."""
        scores = rng.standard_normal((3, turns))
        answers = self.output_tokens.tokens(scores[0])
        tools = self.tool_tokens.tokens(scores[1])
        pauses = self.think_median_s * np.exp(self.think_spread * scores[2])
        task = int(self.task_tokens.tokens(rng.standard_normal(1))[0])
        busy = self.assumed_ttft_s + answers * self.assumed_tpot_s + pauses
        moments = start + np.concatenate(([0.0], np.cumsum(busy)[:-1]))
        prompt, generation = self.template_tokens + task, 0
        for moment, answer, tool in zip(moments, answers, tools, strict=True):
            drafts.append((float(moment), prompt, int(answer), name, generation))
            prompt += int(answer) + int(tool)
            if prompt > self.context_limit:
                prompt, generation = self.template_tokens + self.compacted_tokens, generation + 1
        return moments


def _named(
    drafts: list[tuple[float, int, int, str, int]], template_tokens: int
) -> list[TraceRequest]:
    """Name the blocks in the order of arrival; a session that was compacted has new ones."""
    template = list(range(template_tokens // BLOCK_TOKENS))
    fresh = len(template)
    chains: dict[tuple[str, int], list[int]] = {}
    requests = []
    for moment, prompt, answer, session, generation in drafts:
        chain = chains.setdefault((session, generation), list(template))
        full, rest = divmod(prompt, BLOCK_TOKENS)
        if (missing := full - len(chain)) > 0:
            chain += range(fresh, fresh + missing)
            fresh += missing
        names = chain[:full]
        if rest:
            names.append(fresh)
            fresh += 1
        requests.append(TraceRequest(moment, prompt, answer, tuple(names), session))
    return requests
