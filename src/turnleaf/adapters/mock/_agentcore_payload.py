"""What the emulator reads of a payload: how to tell two apart, and what its envelope asks for."""

import hashlib
from typing import Any, Self

import attrs
import orjson

from turnleaf.core import ENVELOPE

__all__ = ["Payload", "speaks_envelope"]

_NO_PART_OF_IT = frozenset({ENVELOPE, "_config"})


@attrs.frozen
class Payload:
    """An invocation's payload.

    body: as it came. digest: of what the agent is asked to do: `_config` and the envelope apart, so
    that a repetition has the same. operation: "start" or "get" of the envelope, None without one.
    invocation_id: the envelope's.
    """

    body: bytes
    digest: str
    operation: str | None
    invocation_id: str | None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read any bytes."""
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            return cls(body, _digest(body), None, None)
        task = {name: field for name, field in value.items() if name not in _NO_PART_OF_IT}
        digest = _digest(orjson.dumps(task, option=orjson.OPT_SORT_KEYS))
        envelope = value.get(ENVELOPE)
        if not isinstance(envelope, dict):
            return cls(body, digest, None, None)
        return cls(body, digest, _text(envelope, "operation"), _text(envelope, "invocation_id"))

    @property
    def polls(self) -> bool:
        """Whether it asks for a result only, and so runs nothing."""
        return self.operation == "get"


def speaks_envelope(payload: Payload, reply: bytes) -> bool:
    """Whether an agent has answered in the envelope, so that a repeated start runs nothing."""
    if payload.invocation_id is None:
        return False
    try:
        value = orjson.loads(reply)
    except orjson.JSONDecodeError:
        return False
    return (
        isinstance(value, dict)
        and value.get("invocation_id") == payload.invocation_id
        and {"version", "status"} <= value.keys()
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _text(envelope: dict[str, Any], name: str) -> str | None:
    value = envelope.get(name)
    return value if isinstance(value, str) else None
