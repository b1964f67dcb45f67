"""ShareGPT files: conversations as text, without times.

Needs the standard library; ``tokenizers`` when a tokenizer folder is given. Used by lesson 12 and
by ``k3lab trace`` and ``k3lab simulate``.

A file is a JSON array of ``{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from":
"gpt", "value": ...}, ...]}``, or one such object a line. Every answer becomes a request whose
prompt is all that came before it, so that later turns share their beginning with earlier ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from kimik3_lab.benchmark.trace_request import BadRow, Row, TraceError, TraceRequest

__all__ = ["CHARACTERS_PER_TOKEN", "sharegpt_rows", "token_counter"]

#: Rough length of a token of English text, for files read without a tokenizer. Ours, an estimate.
CHARACTERS_PER_TOKEN = 4
_CHUNK = 1 << 20
_GAP = re.compile(r"[\s,]*")
_ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


def token_counter(tokenizer: str | Path | None = None) -> Callable[[str], int]:
    """Return what counts the tokens of a text: a tokenizer, or a quarter of its characters.

    Raises
    ------
    TraceError
        If there is no such tokenizer.

    Examples
    --------
    >>> token_counter()("a text of 23 characters")
    6
    """
    if tokenizer is None:
        return lambda text: -(-len(text) // CHARACTERS_PER_TOKEN)
    from tokenizers import Tokenizer

    file = Path(tokenizer)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise TraceError(f"no tokenizer at {file}: name a folder that holds tokenizer.json")
    loaded = Tokenizer.from_file(str(file))
    loaded.no_truncation()
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def sharegpt_rows(
    file: TextIO, block_tokens: int, count_tokens: Callable[[str], int]
) -> Iterator[Row]:
    """Read conversation by conversation; a row is one answer, all at time 0.

    Memory stays at one conversation, however long the file is.
    """
    names = count()
    for number, (conversation, problem) in enumerate(_objects(file), 1):
        place = f"conversation {number}"
        if problem is not None:
            yield Row(place, problem)
            continue
        try:
            turns = _turns(conversation)
        except BadRow as wrong:
            yield Row(place, wrong)
            continue
        session = str(conversation.get("id", f"conversation-{number}"))
        known: list[int] = []  # names of the full blocks so far; they never change
        tokens = 0
        for role, text in turns:
            size = count_tokens(text)
            if role in _ASSISTANTS and tokens and size:
                full, rest = divmod(tokens, block_tokens)
                known += (next(names) for _ in range(full - len(known)))
                ids = (*known, next(names)) if rest else tuple(known)
                yield Row(place, TraceRequest(0.0, tokens, size, ids, session))
            tokens += size


def _turns(conversation: Any) -> list[tuple[str, str]]:
    if not isinstance(conversation, dict):
        raise BadRow(f"expected a JSON object, got {type(conversation).__name__}")
    turns = conversation.get("conversations")
    if not isinstance(turns, list):
        raise BadRow(
            'expected a list under "conversations", got '
            + (type(turns).__name__ if "conversations" in conversation else "no such field")
        )
    found = []
    for turn in turns:
        role = turn.get("from") if isinstance(turn, dict) else None
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(text, str):
            raise BadRow('a turn must be {"from": text, "value": text}, got ' + f"{turn!r:.60}")
        found.append((role.lower(), text))
    asked = [bool(text) and role not in _ASSISTANTS for role, text in found]
    answered = [bool(text) and role in _ASSISTANTS for role, text in found]
    if not any(any(asked[:i]) for i, answer in enumerate(answered) if answer):
        raise BadRow("no answer behind a question: nothing to ask")
    return found


def _objects(file: TextIO) -> Iterator[tuple[Any, BadRow | None]]:
    """Take apart an array that need not fit into memory, or one object a line."""
    decoder, text, place, ended, size = json.JSONDecoder(), "", 0, False, _CHUNK
    inside_array = False
    while True:
        place = _GAP.match(text, place).end()  # type: ignore[union-attr]
        if text.startswith("[", place) and not inside_array:
            inside_array, place = True, place + 1
            continue
        if inside_array and text.startswith("]", place):
            return
        if place < len(text):
            try:
                content, place = decoder.raw_decode(text, place)
            except json.JSONDecodeError as error:
                # Cut off at the end of a chunk, most likely: read on before calling it wrong.
                if ended or not _may_be_cut_off(error, text):
                    yield None, BadRow(f"no JSON from here on ({error}): is the file whole?")
                    return
            else:
                size = _CHUNK
                yield content, None
                continue
        elif ended:
            if inside_array:
                yield None, BadRow("the array has no end: is the file whole?")
            return
        # Doubling keeps a conversation longer than a chunk from being parsed over and over.
        more = file.read(size)
        text, place, ended, size = text[place:] + more, 0, not more, size * 2


def _may_be_cut_off(error: json.JSONDecodeError, text: str) -> bool:
    """Whether more text could mend it: a string without end, or trouble at the very end."""
    return error.msg.startswith("Unterminated string") or error.pos + 16 >= len(text)
