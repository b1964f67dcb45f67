"""Ask two servers the same things, to see if the tokens are the same and what each took.

Needs the standard library only, so that it runs in the lab's environment and in vLLM's. Lesson 13
asks the lab's engine (``k3lab serve``) and real vLLM (``k3lab vllm-cpu serve``), both with the tiny
K3 in float32. Text is compared, and token by token the log-probability of what was chosen: the same
text from other tokens would show there.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "SideBySide", "ask", "compare_servers"]

#: Log-probabilities of two float32 programs that sum in another order. Measured: 1.2e-4 at most.
TOLERANCE = 1e-3
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Answer:
    """What one server made of one prompt.

    Attributes
    ----------
    tokens
        Text of each token.
    logprobs
        Of each token, natural logarithm.
    seconds
        From the request to the answer's end.
    first_token_s
        To its first token.
    """

    prompt: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    seconds: float
    first_token_s: float

    @property
    def token_ms(self) -> float:
        """Mean milliseconds for each token after the first."""
        return 1e3 * (self.seconds - self.first_token_s) / max(1, len(self.tokens) - 1)


@dataclass(frozen=True)
class SideBySide:
    """Answers of several servers to the same prompts, in the same order.

    Attributes
    ----------
    answers
        By the name of the server.
    counters
        What each server counted meanwhile: vLLM's names of metrics, which the lab's engine shares.
    """

    answers: Mapping[str, tuple[Answer, ...]]
    counters: Mapping[str, Mapping[str, float]]

    def differences(self) -> list[str]:
        """Say where tokens or log-probabilities differ; empty if the servers agree."""
        (first, ours), *others = self.answers.items()
        found = []
        for name, theirs in others:
            for one, two in zip(ours, theirs, strict=True):
                where = f"{first} and {name} on {one.prompt[:30]!r}"
                if one.tokens != two.tokens:
                    pairs = enumerate(zip(one.tokens, two.tokens, strict=False))
                    shorter = min(len(one.tokens), len(two.tokens))
                    at = next((number for number, (a, b) in pairs if a != b), shorter)
                    found.append(f"{where}: other tokens from number {at} on")
                elif (off := self._apart(one, two)) > TOLERANCE:
                    found.append(f"{where}: log-probabilities are up to {off:.1e} apart")
        return found

    @staticmethod
    def _apart(one: Answer, two: Answer) -> float:
        pairs = zip(one.logprobs, two.logprobs, strict=True)
        return max((abs(a - b) for a, b in pairs), default=0.0)

    def rows(self) -> list[dict[str, Any]]:
        """One row a server, for a table: means over the answers, and its own counters."""
        return [
            {
                "server": name,
                "requests": len(answers),
                "output_tokens": sum(len(a.tokens) for a in answers),
                "first_token_ms": 1e3 * _mean([a.first_token_s for a in answers]),
                "token_ms": _mean([a.token_ms for a in answers]),
                "seconds": _mean([a.seconds for a in answers]),
                "counted_prompt_tokens": self._counted(name, "vllm:prompt_tokens_total"),
                "counted_output_tokens": self._counted(name, "vllm:generation_tokens_total"),
            }
            for name, answers in self.answers.items()
        ]

    def _counted(self, name: str, metric: str) -> int | None:
        value = self.counters.get(name, {}).get(metric)
        return None if value is None else round(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def ask(base_url: str, prompt: str, *, max_tokens: int = 16, model: str = "tiny-k3") -> Answer:
    """Stream one greedy completion.

    Raises
    ------
    RuntimeError
        If the server refuses, with what it says.
    """
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "logprobs": 0, "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{base_url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    tokens: list[str] = []
    logprobs: list[float] = []
    began = time.perf_counter()
    first = last = began
    try:
        with _opener().open(request, timeout=_TIMEOUT) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                found = [
                    choice["logprobs"] for choice in chunk["choices"] if choice.get("logprobs")
                ]
                if found and not tokens:
                    first = time.perf_counter()
                for part in found:
                    tokens += part["tokens"]
                    logprobs += part["token_logprobs"]
                    last = time.perf_counter()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{base_url} refused: {error.read().decode()[:500]}") from error
    return Answer(prompt, tuple(tokens), tuple(logprobs), last - began, first - began)


def compare_servers(
    servers: Mapping[str, str],
    prompts: Sequence[str],
    *,
    max_tokens: int = 16,
    concurrency: int = 1,
    model: str = "tiny-k3",
) -> SideBySide:
    """Ask each server every prompt, one server after the other.

    Parameters
    ----------
    servers
        Address by name, at least one.
    concurrency
        Requests in flight at once. The servers batch them, and the tokens must not change.

    Raises
    ------
    RuntimeError
        If a server refuses a request.
    """
    if not servers or not prompts:
        raise ValueError("give at least one server and one prompt")
    answers: dict[str, tuple[Answer, ...]] = {}
    counted: dict[str, dict[str, float]] = {}
    for name, base_url in servers.items():
        ask(base_url, prompts[0], max_tokens=2, model=model)  # the first of all pays for set-up
        before = _counters(base_url)
        with ThreadPoolExecutor(concurrency) as pool:
            jobs = [
                pool.submit(ask, base_url, prompt, max_tokens=max_tokens, model=model)
                for prompt in prompts
            ]
            answers[name] = tuple(job.result() for job in jobs)
        after = _counters(base_url)
        counted[name] = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return SideBySide(answers, counted)


def _counters(base_url: str) -> dict[str, float]:
    """Sum vLLM's counters over their labels."""
    with _opener().open(f"{base_url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name.startswith("vllm:") and name.endswith("_total"):
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def _opener() -> urllib.request.OpenerDirector:
    # A proxy of the environment must not get what is meant for this machine.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
