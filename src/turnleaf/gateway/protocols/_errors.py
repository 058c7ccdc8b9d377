"""Errors that a request answers with, in the OpenAI protocol's own shape."""

from http import HTTPStatus
from typing import Any

import attrs

from turnleaf.core import TurnleafError

__all__ = ["RequestError", "bad_request", "not_supported"]


@attrs.frozen(eq=False)
class RequestError(TurnleafError):
    """What an agent is told when its request is not served.

    status: HTTP status, chosen so that clients do the right thing with it. code: the protocol's
    machine-readable reason. param: the field at fault. retry_after: seconds, for passing trouble.
    """

    status: int
    message: str
    code: str | None = None
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
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def bad_request(param: str, problem: str) -> RequestError:
    """A 400 for a field whose value is not what the protocol says."""
    return RequestError(400, f"{param}: {problem}", code="invalid_value", param=param)


def not_supported(param: str, remedy: str) -> RequestError:
    """A 400 for something that the protocol has and this gateway does not do."""
    return RequestError(
        400, f"{param} is not supported: {remedy}", code="unsupported_parameter", param=param
    )
