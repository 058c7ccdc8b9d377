"""Reading an output as a message while it is sampled."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from turnleaf.core import FinishReason, TokenIds
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
        self._format = format_
        self._tools = tools
        self._prompt = prompt
        self._ids: list[int] = []
        self._pieces = PieceReader(format_.tokenizer, stop)
        self._message = format_.reader(tools, prompt)
        self._told: list[Delta] = []

    def feed(self, ids: Sequence[int]) -> tuple[Delta, ...]:
        """What the next tokens make certain. Never raises."""
        self._ids.extend(ids)
        deltas = _joined(
            delta for piece in self._pieces.feed(ids) for delta in self._message.feed(piece)
        )
        self._told += deltas
        return deltas

    def finish(
        self, finish_reason: FinishReason, matched: str | int | None
    ) -> tuple[Parsed, tuple[Delta, ...]]:
        """The message, and what of it was not told yet.

        Raises ContradictionError where it is not what was told; so it may be when the engine stops
        at a string that the reader was not given.
        """
        parsed = self._format.parse(
            np.array(self._ids, dtype=np.int32),
            tools=self._tools,
            finish_reason=finish_reason,
            matched=matched,
            prompt=self._prompt,
        )
        reasoning = "".join(told.text for told in self._told if isinstance(told, ReasoningDelta))
        content = "".join(told.text for told in self._told if isinstance(told, ContentDelta))
        calls = tuple(told for told in self._told if isinstance(told, ParsedCall))
        if (
            not parsed.reasoning.startswith(reasoning)
            or not parsed.content.startswith(content)
            or parsed.calls[: len(calls)] != calls
        ):
            raise ContradictionError(
                f"an output of {len(self._ids)} tokens reads otherwise than what was told of it "
                "while it was sampled; tell the reader every stop string, or do not stream"
            )
        rest: tuple[Delta, ...] = (
            ReasoningDelta(parsed.reasoning[len(reasoning) :]),
            ContentDelta(parsed.content[len(content) :]),
            *parsed.calls[len(calls) :],
        )
        return parsed, _joined(rest)


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
