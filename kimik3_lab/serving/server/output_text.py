"""From tokens to what a client sees of one answer: text pieces, stop strings, the reason to end.

Needs the standard library only. Used by the server (lesson 10).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kimik3_lab.serving.outputs import TokenLogprobs
    from kimik3_lab.serving.server.output_stream import RequestOutput
    from kimik3_lab.serving.server.tokenizer import Detokenizer

__all__ = ["Delta", "OutputText", "PlacedLogprobs"]

#: Probabilities of a token, and where in the text its own text begins.
PlacedLogprobs: TypeAlias = "tuple[TokenLogprobs, int]"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to the answer ``index`` of a request; the text may be empty.

    ``logprobs`` has one entry if the request asked for them and there is a token.
    """

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[PlacedLogprobs, ...] = ()


class OutputText:
    """Text of one answer while its tokens arrive.

    Every token gives exactly one :class:`Delta`, also when it adds no text yet: because it ends
    inside a character, is a special token, or may be the beginning of a stop string. A client that
    times the chunks then times the tokens. Only an end without a token (an abort) adds one more.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""
        self._num_chars = 0

    def add(self, output: RequestOutput) -> Iterator[Delta]:
        """Take a step's tokens; iterating gives their pieces and stops after a stop string."""
        last = len(output.token_ids) - 1
        for place, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            reason = output.finish_reason if place == last else None
            entries = output.logprobs[place : place + 1]
            logprobs = tuple((entry, self._num_chars) for entry in entries)
            text = self._detokenizer.step(token_id)
            self._num_chars += len(text)
            yield self._piece(text, reason, output.stop_reason, logprobs)
            if self.finished:
                return
        if output.finish_reason is not None and not self.finished:
            yield self._piece("", output.finish_reason, output.stop_reason, ())

    def _piece(
        self,
        text: str,
        finish_reason: str | None,
        stop_reason: int | None,
        logprobs: tuple[PlacedLogprobs, ...],
    ) -> Delta:
        self._held += text
        if finish_reason is not None:
            self._held += self._detokenizer.flush()
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self.finished = True
            return Delta(self.index, self._held[:at], "stop", stop, logprobs)
        if finish_reason is not None:
            self.finished = True
            return Delta(self.index, self._held, finish_reason, stop_reason, logprobs)
        ready = len(self._held) - self._length_of_possible_stop()
        piece, self._held = self._held[:ready], self._held[ready:]
        return Delta(self.index, piece, logprobs=logprobs)

    def _length_of_possible_stop(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
