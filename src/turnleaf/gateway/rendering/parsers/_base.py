"""What a parser of model output returns, and what it is."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

__all__ = ["CallParser", "ParsedCall", "Segments", "Tools"]

Tools = Sequence[Mapping[str, Any]]
"""OpenAI tool definitions: `{"type": "function", "function": {"name", "parameters", …}}`."""


@attrs.frozen
class ParsedCall:
    """A tool call as sampled. arguments: the JSON text of an object."""

    name: str
    arguments: str


@attrs.frozen
class Segments:
    """A text cut into what is text and what is a call, in order.

    Text and calls together are the whole text: nothing is dropped. malformed: how many regions
    that look like a call stayed text because they are cut or break the format.
    """

    parts: tuple[str | ParsedCall, ...]
    malformed: int


class CallParser(Protocol):
    """Finds the tool calls in a finished text. Never raises, and never repairs a call."""

    def __call__(self, text: str, tools: Tools) -> Segments: ...
