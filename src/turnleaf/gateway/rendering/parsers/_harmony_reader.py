"""Harmony that is not finished; see `_harmony`."""

from collections.abc import Iterator
from typing import Literal

from turnleaf.gateway.rendering.parsers._base import Delta, Piece, ReasoningDelta
from turnleaf.gateway.rendering.parsers._content import ContentReader
from turnleaf.gateway.rendering.parsers._harmony import ENDS, MESSAGE, START, call_of, part_of

__all__ = ["HarmonyReader"]


class HarmonyReader:
    """Passes on reasoning and text as they come, and each call when its end token is there.

    What is neither, or breaks the format, is left with all that follows to the parse of the whole
    output. parallel: see `TaggedCallReader`.
    """

    def __init__(self, *, calls: bool, parallel: bool) -> None:
        self._sure_of_calls = calls and parallel
        self._content = ContentReader(calls=calls)
        self._phase: Literal["header", "reasoning", "text", "call", "halted"] = "header"
        self._pieces: list[Piece] = []
        self._reasoned = False
        self._begun = False
        self._last: Literal["text", "call"] | None = None

    def feed(self, piece: Piece) -> Iterator[Delta]:
        """See `MessageReader.feed`."""
        if self._phase == "halted":
            return
        ends = piece.control and piece.text in ENDS
        starts = piece.control and piece.text == START
        if ends or (starts and (self._phase != "header" or self._pieces)):
            yield from self._end(piece.text if ends else "")
            self._pieces = [piece] if starts else []
        elif self._phase == "reasoning":
            yield ReasoningDelta(piece.text)
        elif self._phase == "text":
            yield from self._text(piece.text)
        else:
            self._pieces.append(piece)
            if self._phase == "header" and piece == Piece(MESSAGE, True):
                yield from self._begin()

    def _begin(self) -> Iterator[Delta]:
        """A message whose header is complete."""
        part = part_of(self._pieces, "")
        if part.header is None or (part.recipient is not None and not self._sure_of_calls):
            self._phase = "halted"
        elif part.recipient is not None:
            self._phase = "call"
        elif part.header["channel"] == "analysis":
            self._phase = "reasoning"
            if self._reasoned:
                yield ReasoningDelta("\n")
            self._reasoned = True
        else:
            self._phase = "text"
            self._begun = False

    def _text(self, text: str) -> Iterator[Delta]:
        """More of a message's text: a message without any is nothing."""
        if not self._begun and self._last == "text":
            self._content.end_text()
            yield from self._content.feed("\n")
        self._begun, self._last = True, "text"
        yield from self._content.feed(text)

    def _end(self, token: str) -> Iterator[Delta]:
        """A message ends with an end token or, without one, where the next begins."""
        call = call_of(part_of(self._pieces, token)) if self._phase == "call" else None
        if call is not None:
            yield from self._content.feed(call)
            self._last = "call"
        halted = self._phase == "header" or (self._phase == "call" and call is None)
        self._phase = "halted" if halted else "header"
