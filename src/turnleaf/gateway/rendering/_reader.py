"""Reading an output as a message while it is sampled."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from turnleaf.core import TokenIds
from turnleaf.gateway.rendering._dialect import Tool
from turnleaf.gateway.rendering._errors import ContradictionError
from turnleaf.gateway.rendering._outputs import OutputFormat, Parsed
from turnleaf.gateway.rendering._pieces import PieceReader
from turnleaf.gateway.rendering.parsers import ContentDelta, Delta, ParsedCall, ReasoningDelta

__all__ = ["OutputReader"]


class OutputReader:
    """Tells of one output's message what is certain, whatever is sampled next.

    All deltas together are the message, which is what `OutputFormat.parse` makes of the whole
    output. What `feed` costs follows the new tokens.
    """

    def __init__(
        self,
        format_: OutputFormat,
        *,
        tools: Sequence[Tool] | None,
        prompt: TokenIds | None,
        stop: Sequence[str],
    ) -> None:
        self._pieces = PieceReader(format_.tokenizer, stop)
        self._message = format_.reader(tools, prompt)
        self._told: list[Delta] = []

    def feed(self, ids: Sequence[int]) -> tuple[Delta, ...]:
        """What the next tokens make certain. Never raises."""
        deltas = _joined(
            delta for piece in self._pieces.feed(ids) for delta in self._message.feed(piece)
        )
        self._told += deltas
        return deltas

    def finish(self, parsed: Parsed) -> tuple[Delta, ...]:
        """What of the whole message was not told yet. parsed: the output's, as `parse` reads it.

        Raises ContradictionError where it is not what was told; so it may be when the engine stops
        at a string that the reader was not given.
        """
        reasoning = "".join(told.text for told in self._told if isinstance(told, ReasoningDelta))
        content = "".join(told.text for told in self._told if isinstance(told, ContentDelta))
        calls = tuple(told for told in self._told if isinstance(told, ParsedCall))
        if (
            not parsed.reasoning.startswith(reasoning)
            or not parsed.content.startswith(content)
            or parsed.calls[: len(calls)] != calls
        ):
            raise ContradictionError(
                "an output reads otherwise than what was told of it while it was sampled; tell the "
                "reader every stop string, or do not stream"
            )
        return _joined(
            [
                ReasoningDelta(parsed.reasoning[len(reasoning) :]),
                ContentDelta(parsed.content[len(content) :]),
                *parsed.calls[len(calls) :],
            ]
        )


def _joined(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    """The deltas with texts of a kind in one, and none without text."""
    joined: list[Delta] = []
    for kind, group in groupby(deltas, type):
        if kind is ParsedCall:
            joined += group
            continue
        text = "".join(delta.text for delta in group if not isinstance(delta, ParsedCall))
        if text:
            joined.append(ReasoningDelta(text) if kind is ReasoningDelta else ContentDelta(text))
    return tuple(joined)
