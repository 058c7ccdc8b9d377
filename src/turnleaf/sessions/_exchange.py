"""A payload on its way to an agent over HTTP, and the agent's result on its way back."""

import json
import math
import uuid
from collections.abc import Mapping
from typing import Any

from turnleaf.core import (
    AgentError,
    BadResultError,
    PayloadError,
    SettingsError,
    described,
    excerpt,
)
from turnleaf.sessions._events import EventTooLarge, LastEvent
from turnleaf.sessions._reporting import Redaction

__all__ = ["ACCEPT", "Result", "encoded", "new_session_id", "positive"]

EXCERPT = 200
"""Characters of a bad argument in its error."""

ACCEPT = "application/json, text/event-stream"


def new_session_id() -> str:
    """A name for one session, as AgentCore takes it: 33 to 100 letters, digits and hyphens."""
    return f"turnleaf-{uuid.uuid4().hex}"


def positive(session: str, name: str, value: Any) -> float:
    """A session's argument as a float; raises SettingsError unless it is a number above 0."""
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        said = excerpt(value, length=EXCERPT)
        raise SettingsError(f"{session}: {name} is {said}; give a number above 0")
    return number


def encoded(payload: Mapping[str, Any]) -> bytes:
    """A payload as JSON; raises PayloadError when it cannot be."""
    try:
        return json.dumps(payload, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"the payload cannot be sent as JSON: {described(error)}") from None


class Result:
    """The result of an agent, read from a body that arrives in pieces.

    content_type: with text/event-stream the result is the data of the last event. max_bytes: of
    the body, or of one event. redaction: of what errors quote.
    """

    def __init__(self, content_type: str, *, max_bytes: int, redaction: Redaction) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        is_stream = kind == "text/event-stream"
        self._events = LastEvent(max_bytes=max_bytes) if is_stream else None
        self._body = bytearray()
        self._max_bytes = max_bytes
        self._redaction = redaction

    def feed(self, piece: bytes) -> None:
        """Take the next piece; raises BadResultError beyond `max_bytes`."""
        try:
            if self._events is not None:
                self._events.feed(piece)
                return
        except EventTooLarge:
            raise self._too_large() from None
        self._body += piece
        if len(self._body) > self._max_bytes:
            raise self._too_large()

    def finish(self) -> Any:
        """The result: any JSON value, as it came.

        Raises BadResultError when it is not JSON, AgentError for a last event that reports one.
        """
        if self._events is None:
            return self._parsed(bytes(self._body))
        try:
            last = self._events.finish()
        except EventTooLarge:
            raise self._too_large() from None
        result = self._parsed(last or b"")
        if isinstance(result, dict) and {"error", "error_type", "message"} <= result.keys():
            text = self._redaction.failure(f"{result['error_type']}: {result['error']}")
            raise AgentError(f"the agent raised {text}")
        return result

    def _parsed(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            said = self._redaction.body(body) or "it is empty"
            raise BadResultError(f"the agent's result is not JSON: {said}") from None

    def _too_large(self) -> BadResultError:
        return BadResultError(
            f"the agent's result exceeds {self._max_bytes} bytes; return less, or raise the "
            "backend's max_response_bytes"
        )
