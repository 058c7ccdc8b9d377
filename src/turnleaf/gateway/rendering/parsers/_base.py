"""What a parser of model output returns, and what it is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

__all__ = [
    "CallFrame",
    "CallParser",
    "CallReader",
    "ContentDelta",
    "Delta",
    "MessageParser",
    "MessageReader",
    "ParsedCall",
    "Piece",
    "ReasoningDelta",
    "Segments",
    "Tools",
]

Tools = Sequence[Mapping[str, Any]]
"""OpenAI tool definitions: `{"type": "function", "function": {"name", "parameters", …}}`."""


@attrs.frozen
class ParsedCall:
    """A tool call as sampled. arguments: the JSON text of an object."""

    name: str
    arguments: str


@attrs.frozen
class CallFrame:
    """How a call is written around its arguments. trigger: what every call begins with."""

    begin: str
    end: str
    trigger: str


@attrs.frozen
class Segments:
    """A text cut into what is text and what is a call, in order.

    Text and calls together are the whole text: nothing is dropped. malformed: how many regions
    that look like a call stayed text because they are cut or break the format.
    """

    parts: tuple[str | ParsedCall, ...]
    malformed: int


@attrs.frozen
class Piece:
    """A stretch of an output. control: it is one control token, not text that spells one out."""

    text: str
    control: bool


@attrs.frozen
class ReasoningDelta:
    """More of a message's reasoning."""

    text: str


@attrs.frozen
class ContentDelta:
    """More of a message's content."""

    text: str


Delta = ReasoningDelta | ContentDelta | ParsedCall
"""What a message has beside what is known of it already; a call is always whole."""


class CallParser(Protocol):
    """Finds the tool calls in a finished text. Never raises, and never repairs a call.

    Its reader relies on this: where a text is one call and nothing else, every text that begins
    with it begins with that call.
    """

    def __call__(self, text: str, tools: Tools) -> Segments: ...


class CallReader(Protocol):
    """Reads a text that is not finished. Never raises."""

    def feed(self, text: str) -> Iterator[str | ParsedCall]:
        """What has become certain: more of the text that stands here, or the next call."""
        ...


class MessageParser(Protocol):
    """Reads a whole output whose format has reasoning, text and calls in messages of their own.

    Never raises, and never repairs a call. Returns the reasoning, and the rest.
    """

    def __call__(self, pieces: Sequence[Piece], *, calls: bool) -> tuple[str, Segments]: ...


class MessageReader(Protocol):
    """Reads an output that is not finished. Never raises."""

    def feed(self, piece: Piece) -> Iterator[Delta]:
        """What has become certain of the message."""
        ...
