"""What was sampled, as the assistant messages that an agent is given: whole, and in pieces."""

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from turnleaf.core import TokenIds
from turnleaf.gateway.rendering import ContentDelta, Delta, OutputReader, Parsed, ReasoningDelta

__all__ = ["Tell", "Telling", "message_of"]

Tell = Callable[[int, dict[str, Any]], None]
"""Is given a choice's index and what comes next in its message, as a message of that alone."""

PASS_ON_EVERY = 0.1
"""Seconds between two times that tokens are read and passed on: nobody reads faster."""

READ_AT_ONCE = 1_000
"""Tokens that are read at once, at most: more are there only when they come at the end, where all
of the output is parsed anyway, and reading them would hold up the event loop."""


def message_of(parsed: Parsed, turn_id: str) -> dict[str, Any]:
    """The assistant message of a turn."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            _call(turn_id, position, call.name, call.arguments)
            for position, call in enumerate(parsed.calls)
        ]
    return message


@attrs.define(eq=False)
class Telling:
    """Reads one turn's output while it is sampled, and tells of it what is certain."""

    _tell: Tell
    _reader: OutputReader
    _index: int
    _turn_id: str
    _unread: list[int] = attrs.field(init=False, factory=list)
    _read_at: float = attrs.field(init=False, default=0.0)
    _calls: int = attrs.field(init=False, default=0)

    def take(self, ids: TokenIds) -> None:
        """The next tokens; see `turnleaf.gateway.engines.TokenListener`."""
        self._unread += ids.tolist()
        now = time.monotonic()
        if now >= self._read_at + PASS_ON_EVERY and len(self._unread) <= READ_AT_ONCE:
            self._read_at = now
            unread, self._unread = self._unread, []
            self._pass_on(self._reader.feed(unread))

    def finish(self, parsed: Parsed) -> None:
        """Tell what is left of the message, as it was read from the recorded tokens.

        Raises ContradictionError as `OutputReader.finish` does.
        """
        self._unread = []
        self._pass_on(self._reader.finish(parsed))

    def _pass_on(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self._tell(self._index, self._message(delta))

    def _message(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, ReasoningDelta):
            return {"reasoning_content": delta.text}
        if isinstance(delta, ContentDelta):
            return {"content": delta.text}
        position = self._calls
        self._calls += 1
        return {"tool_calls": [_call(self._turn_id, position, delta.name, delta.arguments)]}


def _call(turn_id: str, position: int, name: str, arguments: str) -> dict[str, Any]:
    """A call; its id follows from where it stands, so that pieces and the whole have the same."""
    digest = hashlib.blake2b(f"{turn_id} {position}".encode(), digest_size=12)
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{digest.hexdigest()}", "type": "function", "function": function}
