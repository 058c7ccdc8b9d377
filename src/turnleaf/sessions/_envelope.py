"""The envelope in which an agent is told to work on after its reply, and asked for the result.

A payload carries it as `_agentcore_runtime`, version 1. Agents that were deployed with
agentcore-rl-toolkit speak it; any other agent ignores it, and replies with its result.
"""

from typing import Any, Literal, Self

import attrs

from turnleaf.core import (
    ENVELOPE,
    ENVELOPE_VERSION,
    ENVELOPE_WAIT,
    BadResultError,
    PayloadError,
)

__all__ = ["State", "get", "start"]

Status = Literal["in_progress", "completed", "interrupted", "not_found"]
STATUSES: tuple[Status, ...] = ("in_progress", "completed", "interrupted", "not_found")


def start(payload: dict[str, Any], invocation_id: str) -> dict[str, Any]:
    """`payload` with the envelope that has the agent work in the background.

    invocation_id: a letter or digit, and up to 127 more, hyphens or underscores. Raises
    PayloadError for a payload that has an envelope of its own.
    """
    if ENVELOPE in payload:
        raise PayloadError(
            f"the payload already has `{ENVELOPE}`, in which the agent is told of its invocation; "
            "rename that field of the row, or set the backend's `envelope: never`"
        )
    return {**payload, ENVELOPE: {**_operation("start", invocation_id), "background": True}}


def get(invocation_id: str, *, wait: float) -> dict[str, Any]:
    """The payload that asks how far an invocation is, and may be answered after `wait` seconds."""
    return {ENVELOPE: _operation("get", invocation_id), ENVELOPE_WAIT: wait}


def _operation(name: str, invocation_id: str) -> dict[str, Any]:
    return {"version": ENVELOPE_VERSION, "operation": name, "invocation_id": invocation_id}


@attrs.frozen
class State:
    """How far an invocation is.

    status: completed has a `result`, or the `error` that the agent raised; interrupted: the agent's
    process was restarted; not_found: it knows nothing of the invocation.
    """

    status: Status
    result: Any = attrs.field(default=None, repr=False)
    error: str | None = None

    @classmethod
    def read(cls, reply: object, invocation_id: str) -> Self | None:
        """The state that an agent replied with; None for a reply that is no envelope of this
        invocation, and so the result itself.

        Raises BadResultError for an envelope that says nothing that could be relied on.
        """
        if not isinstance(reply, dict) or reply.get("invocation_id") != invocation_id:
            return None
        version, status = reply.get("version"), reply.get("status")
        if type(version) is not int or version != ENVELOPE_VERSION or status not in STATUSES:
            return None
        outcomes = reply.keys() & {"result", "error"}
        error = reply.get("error")
        if len(outcomes) != (status == "completed") or not isinstance(error, str | None):
            raise BadResultError(
                f"the agent's reply in `{ENVELOPE}` breaks the protocol: {status} with "
                f"{' and '.join(sorted(outcomes)) or 'neither result nor error'}"
            )
        if "error" in outcomes and error is None:
            raise BadResultError(f"the agent's reply in `{ENVELOPE}` has an error that is null")
        return cls(status, reply.get("result"), error)
