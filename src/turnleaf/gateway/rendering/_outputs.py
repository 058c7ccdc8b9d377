"""Reading a finished output as a message."""

from collections.abc import Sequence

import attrs

from turnleaf.core import FinishReason, TokenIds
from turnleaf.gateway.rendering._control import ControlledTokenizer
from turnleaf.gateway.rendering._dialect import Tool
from turnleaf.gateway.rendering.parsers import (
    CallParser,
    HarmonyReader,
    MessageParser,
    MessageReader,
    ParsedCall,
    Piece,
    ReasoningParser,
    ReasoningReader,
    Segments,
    TextReader,
    call_reader,
    content_of,
)

__all__ = ["OutputFormat", "Parsed"]


@attrs.frozen
class Parsed:
    """What an agent is given of an output.

    content, reasoning: text as sampled. calls: in order. malformed: how many regions look like a
    tool call but are cut, break its format, or are more than the template can show in one reply;
    they stayed in `content`.
    """

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    malformed: int


@attrs.frozen(eq=False)
class OutputFormat:
    """How the outputs of one checkpoint are read.

    stop_ids: the tokens that end a turn; turn_ends: those of them that the template writes.
    read_messages: takes the place of parse_calls and split_reasoning. calls_can_be_read: whether
    to look for calls at all. parallel_calls: the template can show several calls in a reply.
    opened: the generation prompt's end from an open `<think>` on; None when it opens none.
    """

    tokenizer: ControlledTokenizer
    stop_ids: frozenset[int]
    turn_ends: frozenset[int]
    parse_calls: CallParser | None
    split_reasoning: ReasoningParser | None
    read_messages: MessageParser | None
    calls_can_be_read: bool
    parallel_calls: bool
    opened: str | None

    def parse(
        self,
        output: TokenIds,
        *,
        tools: Sequence[Tool] | None,
        finish_reason: FinishReason,
        matched: str | int | None,
        prompt: TokenIds | None,
    ) -> Parsed:
        """Read a finished output as a message. Never raises.

        Works on the text of the whole output. A stop token at its end, and everything from the
        matched stop string on, are not part of the message; other control tokens stay visible.
        Calls are looked for only when there are tools; where there are more than the template can
        show, they are text. Between calls, whitespace is dropped.
        """
        text = self._text_of(output, finish_reason, matched)
        wanted = bool(tools) and self.calls_can_be_read
        if self.read_messages is not None:
            pieces = self._pieces_of(output, text, matched)
            reasoning, segments = self.read_messages(pieces, calls=wanted)
            if self._too_many(segments):
                _, as_text = self.read_messages(pieces, calls=False)
                return _without_calls(content_of(as_text.parts), reasoning, segments)
            return _message(segments, reasoning)
        reasoning = ""
        if self.split_reasoning is not None:
            opened = self._opens_reasoning(prompt)
            if opened and self._newline_follows:
                text = text.removeprefix("\n")
            reasoning, text = self.split_reasoning(text, opened)
        if not tools or self.parse_calls is None:
            return Parsed(text, reasoning, (), 0)
        segments = self.parse_calls(text, tools)
        if self._too_many(segments):
            return _without_calls(text, reasoning, segments)
        return _message(segments, reasoning)

    def reader(self, tools: Sequence[Tool] | None, prompt: TokenIds | None) -> MessageReader:
        """Reads what `parse` reads, piece by piece."""
        wanted = bool(tools) and self.calls_can_be_read
        if self.read_messages is not None:
            return HarmonyReader(calls=wanted, parallel=self.parallel_calls)
        reasoning = None
        if self.split_reasoning is not None:
            opened = self._opens_reasoning(prompt)
            reasoning = ReasoningReader(opened, newline=opened and self._newline_follows)
        if not tools or self.parse_calls is None:
            return TextReader(reasoning, None)
        calls = call_reader(self.parse_calls, tools, parallel=self.parallel_calls)
        return TextReader(reasoning, calls)

    def opens_reasoning(self, prompt: TokenIds) -> bool:
        """Whether what is sampled from a prompt begins inside of reasoning."""
        return self.split_reasoning is not None and self._opens_reasoning(prompt)

    @property
    def _newline_follows(self) -> bool:
        """The newline behind the opening tag is sampled, not in the prompt."""
        return self.opened is not None and not self.opened.endswith("\n")

    def _opens_reasoning(self, prompt: TokenIds | None) -> bool:
        if self.opened is None or prompt is None:
            return self.opened is not None
        # Every token of it has one character at least.
        tail = self.tokenizer.decode(prompt[-len(self.opened) :].tolist())
        return tail.endswith(self.opened)

    def _too_many(self, segments: Segments) -> bool:
        """The conversation could not go on after calls that the template cannot show."""
        return _calls(segments) > 1 and not self.parallel_calls

    def _pieces_of(self, output: TokenIds, text: str, matched: str | int | None) -> Sequence[Piece]:
        """The pieces of an output whose text is `text`, and the stop token that ended it."""
        ids = output.tolist()
        if ids and ids[-1] in self.turn_ends and not isinstance(matched, str):
            return self.tokenizer.pieces(ids)
        pieces: list[Piece] = []
        at = 0
        for piece in self.tokenizer.pieces(ids):
            kept = piece.text[: max(len(text) - at, 0)]
            at += len(piece.text)
            pieces += [Piece(kept, piece.control and kept == piece.text)] if kept else []
        return pieces

    def _text_of(
        self, output: TokenIds, finish_reason: FinishReason, matched: str | int | None
    ) -> str:
        ids = output.tolist()
        if isinstance(matched, str) and matched:
            text = self.tokenizer.decode(ids)
            at = self._stopped_at(text, ids, matched) if finish_reason == "stop" else -1
            return text if at < 0 else text[:at]
        if ids and (ids[-1] in self.stop_ids or ids[-1] == matched):
            ids.pop()
        return self.tokenizer.decode(ids)

    def _stopped_at(self, text: str, ids: list[int], stop: str) -> int:
        """Where the stop string begins that the last token completed, or else the first; or -1."""
        before = len(self.tokenizer.decode(ids[:-1]))
        at = text.find(stop, max(before - len(stop) + 1, 0))
        return text.find(stop) if at < 0 else at


def _calls(segments: Segments) -> int:
    return sum(isinstance(part, ParsedCall) for part in segments.parts)


def _message(segments: Segments, reasoning: str) -> Parsed:
    calls = tuple(part for part in segments.parts if isinstance(part, ParsedCall))
    return Parsed(content_of(segments.parts), reasoning, calls, segments.malformed)


def _without_calls(content: str, reasoning: str, segments: Segments) -> Parsed:
    return Parsed(content, reasoning, (), segments.malformed + _calls(segments))
