"""How many drafts the target accepts on held-out code, by decoding as an engine would.

Needs torch and tokenizers. Greedy, K drafts a block; a prompt is the beginning-of-sequence token
and code from the start of a line. With and without drafts the same tokens must come out, which is
checked for every prompt; in float64 again for a few, where rounding cannot be the reason.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from kimik3_lab.reference import checkpoint, drafter_checkpoint
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.evaluation import generate_with_drafts
from kimik3_lab.reference.model import K3ForCausalLM
from tools.train_tiny_k3.corpus import Document

__all__ = [
    "Measured",
    "Prompt",
    "by_quarter",
    "choose_prompts",
    "measure",
    "measure_all",
    "summarize",
]


class Prompt(NamedTuple):
    """Where a prompt was cut, and its token ids, the beginning-of-sequence token first."""

    path: str
    line: int
    token_ids: list[int]


class Measured(NamedTuple):
    """One prompt's drafts accepted and tokens gained per verification, and both ways' agreement."""

    accepted: list[int]
    yielded: list[int]
    same: bool


def choose_prompts(
    documents: Sequence[Document], tokenizer: Tokenizer, bos: int, count: int, length: int
) -> list[Prompt]:
    """Cut ``count`` prompts of ``length`` tokens, evenly spread over the text of all documents.

    A cut moves on to the next start of a line that is not empty; near the end of a document it
    moves back until ``length - 1`` tokens follow.

    Raises
    ------
    ValueError
        If a cut falls into a document that is too short for a prompt.
    """
    total = sum(len(document.text) for document in documents)
    prompts = []
    for number in range(count):
        offset = int((number + 0.5) / count * total)
        for document in documents:
            if offset < len(document.text):
                break
            offset -= len(document.text)
        prompts.append(_cut(document, offset, tokenizer, bos, length))
    return prompts


def _cut(document: Document, offset: int, tokenizer: Tokenizer, bos: int, length: int) -> Prompt:
    text = document.text
    starts = [0] + [i + 1 for i, letter in enumerate(text) if letter == "\n"]
    after = [i for i in starts if i >= offset and text[i : i + 1] not in ("", "\n")]
    before = [i for i in starts if i < offset]
    for start in (*after[:1], *reversed(before)):
        # A token is at least a byte and rarely more than 16.
        ids = tokenizer.encode(text[start : start + 16 * length], add_special_tokens=False).ids
        if len(ids) >= length - 1:
            line = text.count("\n", 0, start) + 1
            return Prompt(document.path, line, [bos, *ids[: length - 1]])
    raise ValueError(f"{document.path} is shorter than a prompt of {length} tokens: leave it out")


def measure(
    target: K3ForCausalLM, drafter: DSparkDrafter, prompt: Sequence[int], max_tokens: int
) -> Measured:
    """Decode one prompt with drafts and without."""
    made = generate_with_drafts(target, drafter, prompt, max_tokens)
    plain = target.generate(prompt, max_tokens)
    return Measured(made.accepted, made.yielded, made.token_ids == plain)


def measure_all(
    target: Path,
    drafter: Path,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    workers: int = 1,
) -> list[Measured]:
    """:func:`measure` each prompt, on the CPU, with the models of two folders."""
    tasks = [(target, drafter, prompt.token_ids, max_tokens, dtype) for prompt in prompts]
    if workers == 1:
        return [_task(task) for task in tqdm(tasks, desc=f"acceptance {dtype}", disable=None)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        results = pool.map(_task, tasks)
        return list(tqdm(results, total=len(tasks), desc=f"acceptance {dtype}", disable=None))


_loaded: dict[tuple[Path, Path, torch.dtype], tuple[K3ForCausalLM, DSparkDrafter]] = {}


def _task(task: tuple[Path, Path, list[int], int, torch.dtype]) -> Measured:
    target, drafter, token_ids, max_tokens, dtype = task
    torch.set_num_threads(1)  # as many processes as cores work side by side
    key = (target, drafter, dtype)
    if key not in _loaded:
        _loaded[key] = (
            checkpoint.load(target, dtype=dtype),
            drafter_checkpoint.load(drafter, dtype=dtype),
        )
    return measure(*_loaded[key], token_ids, max_tokens)


def by_quarter(measured: Sequence[Measured], new_tokens: int) -> list[float]:
    """Tokens per verification in each quarter of the texts.

    Greedy text of a small model soon repeats itself, and repetition is easy to draft. The first
    quarter has the least of it.

    Examples
    --------
    >>> by_quarter([Measured([1, 0, 3], [2, 1, 4], True)], new_tokens=8)
    [2.0, 1.0, 4.0, 0.0]
    """
    tokens, verifications = [0] * 4, [0] * 4
    for one in measured:
        at = 1  # the prompt's forward gave the first token
        for gained in one.yielded:
            quarter = min(4 * at // new_tokens, 3)
            tokens[quarter] += gained
            verifications[quarter] += 1
            at += gained
    pairs = zip(tokens, verifications, strict=True)
    return [round(count / max(forwards, 1), 4) for count, forwards in pairs]


def summarize(measured: Sequence[Measured], block: int) -> dict[str, Any]:
    """Put the figures together.

    Returns
    -------
    dict
        ``tokens_per_verify`` (accepted drafts and bonus; the last verification of a prompt is cut
        where its text ends), ``accepted_lengths``: how often 0, 1, ... K drafts were accepted,
        ``position_rates``: how often the draft at position 1, 2, ... K was accepted, of all
        verifications, and ``conditional_rates``: of those that accepted all drafts before it.

    Examples
    --------
    >>> found = summarize([Measured([2, 0], [3, 1], True), Measured([1], [1], True)], block=2)
    >>> found["tokens_per_verify"], found["accepted_lengths"]
    (1.6667, [1, 1, 1])
    >>> found["position_rates"], found["conditional_rates"]
    ([0.6667, 0.3333], [0.6667, 0.5])
    """
    lengths = [0] * (block + 1)
    for kept in (kept for one in measured for kept in one.accepted):
        lengths[kept] += 1
    reached = [sum(lengths[position:]) for position in range(block + 1)]
    verifications = reached[0]
    pairs = list(zip(reached[1:], reached[:-1], strict=True))
    return {
        "tokens_per_verify": round(
            sum(sum(one.yielded) for one in measured) / max(verifications, 1), 4
        ),
        "verifications": verifications,
        "accepted_lengths": lengths,
        "position_rates": [round(now / max(verifications, 1), 4) for now, _ in pairs],
        "conditional_rates": [round(now / max(earlier, 1), 4) for now, earlier in pairs],
        "prompts_same_as_without_drafts": sum(one.same for one in measured),
        "prompts": len(measured),
    }
