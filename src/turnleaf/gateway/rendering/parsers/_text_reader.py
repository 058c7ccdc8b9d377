"""Reading, while it is sampled, an output whose reasoning and calls stand in one text."""

from collections.abc import Iterator

from turnleaf.gateway.rendering.parsers._base import CallReader, Delta, Piece, ReasoningDelta
from turnleaf.gateway.rendering.parsers._content import ContentReader
from turnleaf.gateway.rendering.parsers._reasoning import ReasoningReader

__all__ = ["TextReader"]


class TextReader:
    """reasoning: None where the text has none apart. calls: None where none are looked for."""

    def __init__(self, reasoning: ReasoningReader | None, calls: CallReader | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._content = ContentReader(calls=calls is not None)

    def feed(self, piece: Piece) -> Iterator[Delta]:
        """See `MessageReader.feed`."""
        reasoning, answer = "", piece.text
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.feed(answer)
        if reasoning:
            yield ReasoningDelta(reasoning)
        for part in self._calls.feed(answer) if self._calls is not None else [answer]:
            yield from self._content.feed(part)
