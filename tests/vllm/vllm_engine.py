"""vLLM's engine in this process, one step at a time, and what it answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform

#: Tokens that every request generates.
OUTPUT_TOKENS = 24
#: Enough for the largest batch here, so that requests get blocks that others have used.
CACHE_BLOCKS = 48


@dataclass(frozen=True)
class Answer:
    """A finished request: log-probabilities are those of the tokens beside them."""

    prompt: list[int]
    tokens: list[int]
    prompt_logprobs: list[float]  # of all prompt tokens but the first, if they were asked for
    logprobs: list[float]


class VllmEngine:
    """A checkpoint in vLLM, in float32 and greedy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            attention_backend="CPU_MLA",
            max_model_len=512,
            max_num_seqs=8,
            num_gpu_blocks_override=CACHE_BLOCKS,
        )
        # vLLM expects one engine a process: it would replace its Triton kernels a second time, and
        # stumble over its own replacements.
        current_platform.register_triton_kernel_overrides = lambda: None
        self._engine = self._llm.llm_engine
        self._count = 0

    def prompts(self, lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
        """Random prompts without special tokens."""
        draw = random.Random(seed)
        return [[draw.randrange(3, self.vocab_size) for _ in range(n)] for n in lengths]

    def add(self, prompt: list[int], *, prompt_logprobs: bool = False) -> str:
        """Queue a request; it joins at the next step."""
        self._count += 1
        request_id = str(self._count)
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=1 if prompt_logprobs else None,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        return request_id

    def step(self) -> dict[str, Answer]:
        """Run one step of the scheduler and the model; return the requests that it finished."""
        return {o.request_id: _answer(o) for o in self._engine.step() if o.finished}

    def finish(self) -> dict[str, Answer]:
        """Step until nothing is left."""
        finished = {}
        while self._engine.has_unfinished_requests():
            finished |= self.step()
        return finished

    def generate(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """Answer all prompts together."""
        ids = [self.add(prompt, prompt_logprobs=True) for prompt in prompts]
        finished = self.finish()
        return [finished[request_id] for request_id in ids]

    def epsilons(self) -> dict[str, float]:
        """Epsilon of each norm in vLLM's model, by the name of the module."""
        (found,) = self._llm.apply_model(_epsilons)
        return found

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()


def _epsilons(model: nn.Module) -> dict[str, float]:
    names = ("variance_epsilon", "eps")
    return {
        path: next(getattr(module, name) for name in names if hasattr(module, name))
        for path, module in model.named_modules()
        if any(hasattr(module, name) for name in names)
    }


def _answer(output: RequestOutput) -> Answer:
    prompt, completion = list(output.prompt_token_ids), output.outputs[0]
    tokens = list(completion.token_ids)
    before = zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=False)
    after = zip(tokens, completion.logprobs, strict=True)
    return Answer(
        prompt,
        tokens,
        [candidates[token].logprob for token, candidates in before],
        [candidates[token].logprob for token, candidates in after],
    )
