"""Errors that a request answers with, in the OpenAI protocol's own shape."""

import re
from http import HTTPStatus
from typing import Any

import attrs

from turnleaf.core import TurnleafError

__all__ = ["RequestError", "bad_request", "not_supported"]

_LONGEST = 500  # characters
_PASSING = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
# By such words in the text of any error clients know throttling (strands sends a request 18 times
# over 133 s, smolagents waits for minutes), whatever its status.
_THROTTLING = re.compile(r"429|rate.?limit|too.?many.?requests|throttl", re.IGNORECASE)


@attrs.frozen(eq=False)
class RequestError(TurnleafError):
    """What an agent is told when its request is not served.

    status: HTTP status, chosen so that clients do the right thing with it. code: the protocol's
    machine-readable reason, the same for every agent. param: the field at fault. retry_after:
    seconds, for passing trouble.
    """

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The JSON object of the protocol."""
        kind = {
            HTTPStatus.UNAUTHORIZED: "authentication_error",
            HTTPStatus.NOT_FOUND: "not_found_error",
            HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
        }.get(HTTPStatus(self.status))
        if kind is None:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        said = str if self.status in _PASSING else _lasting
        return {
            "error": {
                "message": said(self.message),
                "type": kind,
                "param": None if self.param is None else said(self.param),
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def _lasting(text: str) -> str:
    """The text of an error that lasts, which reads the same and means no throttling to a client.

    What it quotes may be anything, and a count may hold these digits.
    """
    return _THROTTLING.sub(lambda match: f"{match[0][0]}\u200b{match[0][1:]}", text)


def bad_request(param: str, problem: str) -> RequestError:
    """A 400 for a field whose value is not what the protocol says."""
    param = _short(param)
    return RequestError(400, f"{param}: {_short(problem)}", code="invalid_value", param=param)


def not_supported(param: str, remedy: str) -> RequestError:
    """A 400 for something that the protocol has and this gateway does not do."""
    param = _short(param)
    return RequestError(
        400, f"{param} is not supported: {remedy}", code="unsupported_parameter", param=param
    )


def _short(text: str) -> str:
    """The text, cut: it may quote what an agent sent, and refusals are remembered."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
