"""What the benchmark asks for: prompts of a known length, and how many tokens to generate.

Needs the standard library; ``tokenizers`` when a tokenizer folder is given. Used by lessons 00, 10
and 12. Nothing is downloaded.
"""

from __future__ import annotations

import random
import re
import secrets
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = [
    "PUBLISHED_OUTPUT_TOKENS",
    "PUBLISHED_PROMPT_TOKENS",
    "PromptRequest",
    "Workload",
    "WorkloadError",
]

#: Published: vLLM blog 2026-09-13, "Kimi K3 Performance Optimizations in vLLM" (8K in, 1K out).
PUBLISHED_PROMPT_TOKENS = 8000
PUBLISHED_OUTPUT_TOKENS = 1000

#: Words for prompts when there is no tokenizer: short and common, so about one token each.
_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye
job word business issue side kind head house service friend father power hour game line end
member law car city community name president team minute idea kid body information back parent
face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education green red old new small large long short
early late high low open close begin write read build carry move stand
"""


class WorkloadError(ValueError):
    """A workload that cannot be made; the message says what to change."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One request of a workload.

    Attributes
    ----------
    prompt
        The text to send.
    prompt_tokens
        Tokens of ``prompt`` alone; the server adds its chat template and special tokens.
        Exact with a tokenizer, otherwise the number of words.
    output_tokens
        Tokens to generate.
    """

    prompt: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Random prompts of set lengths, the same for the same seed.

    Build one with :meth:`synthetic` or :meth:`published`.

    Examples
    --------
    >>> workload = Workload.synthetic(8, 4, seed=1)
    >>> first = next(workload.requests())
    >>> len(first.prompt.split()), first.output_tokens
    (8, 4)
    >>> first == next(workload.requests()), first == next(workload.requests("another cell"))
    (True, False)
    """

    prompt_tokens: int
    output_tokens: int
    seed: int
    tokenizer: str | None = None
    prompt_spread: float = 0.0
    output_spread: float = 0.0
    prefix_share: float = 0.0
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WorkloadError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("prompt_spread", "output_spread", "prefix_share"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise WorkloadError(f"{name} must be in [0, 1), got {value!r}")
        if self.tokenizer is not None:
            _tokenizer_file(self.tokenizer)

    @classmethod
    def synthetic(
        cls,
        prompt_tokens: int,
        output_tokens: int,
        tokenizer_path: str | Path | None = None,
        seed: int | None = None,
        *,
        prompt_spread: float = 0.0,
        output_spread: float = 0.0,
        prefix_share: float = 0.0,
    ) -> Workload:
        """Prompts of random words.

        Parameters
        ----------
        prompt_tokens, output_tokens
            Length of prompt and answer.
        tokenizer_path
            Folder with a ``tokenizer.json`` (or that file): prompts then have exactly that many
            tokens. Without it a prompt has that many words, and the server's usage tells the truth.
        seed
            Same seed, same prompts. None draws a fresh one: a seed used twice on one server with
            prefix caching measures its cache (vLLM issue 54227).
        prompt_spread, output_spread
            Lengths are uniform in ``n * (1 - spread) ... n * (1 + spread)``; 0 keeps them fixed.
        prefix_share
            Part of a prompt, from its start, that all requests of a cell share; 0 shares nothing.

        Raises
        ------
        WorkloadError
            If a value is out of range or there is no such tokenizer.
        """
        return cls(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            seed=secrets.randbits(32) if seed is None else seed,
            tokenizer=None if tokenizer_path is None else str(tokenizer_path),
            prompt_spread=prompt_spread,
            output_spread=output_spread,
            prefix_share=prefix_share,
        )

    @classmethod
    def published(
        cls,
        scale: float = 1,
        tokenizer_path: str | Path | None = None,
        seed: int | None = None,
    ) -> Workload:
        """Return the published 8000/1000 workload, both lengths divided by ``scale``.

        Examples
        --------
        >>> small = Workload.published(scale=125, seed=0)
        >>> small.prompt_tokens, small.output_tokens
        (64, 8)
        """
        if not 1 <= scale <= PUBLISHED_OUTPUT_TOKENS:
            raise WorkloadError(
                f"scale must be between 1 and {PUBLISHED_OUTPUT_TOKENS}, got {scale!r}: it divides "
                f"{PUBLISHED_PROMPT_TOKENS} prompt and {PUBLISHED_OUTPUT_TOKENS} output tokens"
            )
        return cls(
            prompt_tokens=round(PUBLISHED_PROMPT_TOKENS / scale),
            output_tokens=round(PUBLISHED_OUTPUT_TOKENS / scale),
            seed=secrets.randbits(32) if seed is None else seed,
            tokenizer=None if tokenizer_path is None else str(tokenizer_path),
            scale=scale,
        )

    def requests(self, stream: int | str = 0) -> Iterator[PromptRequest]:
        """Yield requests without end; each stream (one a benchmark cell) has prompts of its own."""
        rng = random.Random(f"{self.seed}/{stream}")
        fit = _word_fitter() if self.tokenizer is None else _token_fitter(self.tokenizer)
        prefix = ""
        if shared := round(self.prefix_share * self.prompt_tokens):
            prefix = fit(rng, shared, "")
        while True:
            prompt_tokens = _spread(rng, self.prompt_tokens, self.prompt_spread)
            output_tokens = _spread(rng, self.output_tokens, self.output_spread)
            # A drawn length can be shorter than the shared prefix: such a prompt starts afresh.
            start = prefix if prompt_tokens > shared else ""
            yield PromptRequest(fit(rng, prompt_tokens, start), prompt_tokens, output_tokens)


#: Makes a text of exactly ``n`` tokens that starts with ``prefix``.
_Fitter = Callable[[random.Random, int, str], str]


def _spread(rng: random.Random, mean: int, spread: float) -> int:
    if not spread:
        return mean
    return max(1, rng.randint(round(mean * (1 - spread)), round(mean * (1 + spread))))


def _word_fitter() -> _Fitter:
    words = _WORDS.split()

    def fit(rng: random.Random, n: int, prefix: str) -> str:
        start = prefix.split()
        return " ".join([*start, *rng.choices(words, k=n - len(start))])

    return fit


@lru_cache(maxsize=2)
def _token_fitter(path: str) -> _Fitter:
    from tokenizers import Tokenizer

    file = _tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        words = _one_token_words(tokenizer)
    except Exception as error:  # tokenizers raises a bare Exception for whatever it dislikes
        raise WorkloadError(f"{file} is not a tokenizer for English text: {error}") from error

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    def fit(rng: random.Random, n: int, prefix: str) -> str:
        start = f"{prefix} " if prefix else ""
        tail = " ".join(rng.choices(words, k=max(1, n - count(prefix))))
        # One-token words make nearly every first try right; seams (the first word has no space
        # before it) may cost a token more or less. Whole words mend that, at last single letters.
        for attempt in range(200):
            excess = count(start + tail) - n
            if not excess:
                return start + tail
            coarse = attempt < 20
            if excess > 0:
                tail = " ".join(tail.split(" ")[:-excess]) if coarse else tail[:-1]
            elif coarse:
                tail += " " + " ".join(rng.choices(words, k=-excess))
            else:
                tail += rng.choice(string.ascii_lowercase)
        raise WorkloadError(
            f"no text of exactly {n} tokens found with {file}; try another prompt length"
        )

    return fit


def _tokenizer_file(path: str) -> Path:
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise WorkloadError(
            f"no tokenizer at {file}: name a folder that holds tokenizer.json, or leave the "
            "tokenizer out (prompts are then counted in words)"
        )
    return file


def _one_token_words(tokenizer: object, limit: int = 4096) -> list[str]:
    """Words that cost one token after a space; letters when the vocabulary has hardly any."""
    size = tokenizer.get_vocab_size()  # type: ignore[attr-defined]
    decoded = (tokenizer.decode([i]).strip() for i in range(size))  # type: ignore[attr-defined]
    plain = re.compile(r"[a-z]{2,12}")
    candidates = list(dict.fromkeys(w for w in decoded if plain.fullmatch(w)))[: 4 * limit]
    encode = tokenizer.encode_batch  # type: ignore[attr-defined]
    base = len(encode(["a"], add_special_tokens=False)[0].ids)
    encoded = encode([f"a {word}" for word in candidates], add_special_tokens=False)
    words = [w for w, e in zip(candidates, encoded, strict=True) if len(e.ids) == base + 1]
    return words[:limit] if len(words) >= 8 else list(string.ascii_lowercase)
