"""The envelope by which a client starts an invocation and asks for it again: its wire format."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import attrs

from turnleaf.core import ENVELOPE, ENVELOPE_VERSION, ENVELOPE_WAIT, excerpt

__all__ = [
    "MAX_WAIT",
    "Envelope",
    "EnvelopeError",
    "completed",
    "encoded",
    "failed",
    "read_envelope",
    "unfinished",
]

MAX_WAIT = 60.0
"""Seconds that an answer is held back at most, whatever is asked for."""

INVOCATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
QUOTED = 60
"""So many characters of a bad value go into the error."""


class EnvelopeError(ValueError):
    """A field of the envelope has a value that it cannot have; the message names it."""


@attrs.frozen
class Envelope:
    """What a request asks for.

    background: of a start, whether it is answered before the agent is done.
    wait: of a get, for how many seconds the answer is held back while the agent works.
    """

    operation: Literal["start", "get"]
    invocation_id: str
    background: bool = False
    wait: float = 0.0


def read_envelope(payload: Mapping[str, Any]) -> Envelope:
    """The envelope of a payload that has one; raises EnvelopeError when it breaks the format."""
    envelope = payload[ENVELOPE]
    if not isinstance(envelope, dict):
        raise EnvelopeError(f"{ENVELOPE} is {_quoted(envelope)}; it must be an object")
    if unknown := envelope.keys() - {"version", "operation", "invocation_id", "background"}:
        raise EnvelopeError(f"{ENVELOPE} has the unknown field {_quoted(min(unknown))}")
    version = envelope.get("version")
    if type(version) is not int or version != ENVELOPE_VERSION:
        raise _bad(envelope, "version", f"the integer {ENVELOPE_VERSION}")
    operation = envelope.get("operation")
    if operation not in ("start", "get"):
        raise _bad(envelope, "operation", '"start" or "get"')
    invocation_id = envelope.get("invocation_id")
    if not isinstance(invocation_id, str) or not INVOCATION_ID.fullmatch(invocation_id):
        raise _bad(
            envelope,
            "invocation_id",
            "1 to 128 letters, digits, underscores and hyphens, of which the first is a letter or "
            "a digit",
        )
    if operation == "start":
        background = envelope.get("background", False)
        if not isinstance(background, bool):
            raise _bad(envelope, "background", "true or false")
        return Envelope("start", invocation_id, background=background)
    if "background" in envelope:
        raise EnvelopeError(f"{ENVELOPE}.background is for start only")
    wait = payload.get(ENVELOPE_WAIT, 0)
    if type(wait) not in (int, float) or not 0 <= wait < float("inf"):
        raise EnvelopeError(
            f"{ENVELOPE_WAIT} is {_quoted(wait)}; it must be a number of seconds, 0 or more"
        )
    return Envelope("get", invocation_id, wait=float(min(wait, MAX_WAIT)))


def _bad(envelope: Mapping[str, Any], name: str, needed: str) -> EnvelopeError:
    said = _quoted(envelope[name]) if name in envelope else "missing"
    return EnvelopeError(f"{ENVELOPE}.{name} is {said}; it must be {needed}")


def _quoted(value: object) -> str:
    return excerpt(value, length=QUOTED)


def unfinished(
    invocation_id: str, status: Literal["in_progress", "interrupted", "not_found"]
) -> bytes:
    """The reply that has neither a result nor an error."""
    return encoded(_reply(invocation_id, status))


def completed(invocation_id: str, result: object) -> bytes:
    """The reply with the agent's result; raises what `encoded` does."""
    return encoded({**_reply(invocation_id, "completed"), "result": result})


def failed(invocation_id: str, error: str) -> bytes:
    """The reply with an error, which is never empty."""
    return encoded({**_reply(invocation_id, "completed"), "error": error})


def _reply(invocation_id: str, status: str) -> dict[str, Any]:
    return {"version": ENVELOPE_VERSION, "invocation_id": invocation_id, "status": status}


def encoded(value: object) -> bytes:
    """`value` as JSON in ASCII, which a surrogate that stands alone cannot break.

    Dataclasses, pydantic models and sets are written as `BedrockAgentCoreApp` writes them. Raises
    TypeError, ValueError, RecursionError or what a model of the agent's raises.
    """
    return json.dumps(value, allow_nan=False, default=_as_json).encode()


def _as_json(value: Any) -> object:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")
