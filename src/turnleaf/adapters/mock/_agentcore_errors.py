"""The errors of AgentCore's data plane, as botocore's service model (2024-02-28) has them."""

from typing import Any

import attrs
import orjson
from aiohttp import web

__all__ = ["STATUS", "ServiceFault", "invalid"]

STATUS = {
    "AccessDeniedException": 403,
    "InternalServerException": 500,
    "ResourceNotFoundException": 404,
    "RetryableConflictException": 409,
    "RuntimeClientError": 424,
    "ServiceQuotaExceededException": 402,
    "ThrottlingException": 429,
    "ValidationException": 400,
}
"""HTTP status by error code."""


@attrs.frozen
class ServiceFault(Exception):
    """A request is answered with an error. fields: of its body, beside the message."""

    code: str = attrs.field(validator=attrs.validators.in_(STATUS))
    message: str
    fields: dict[str, Any] = attrs.field(factory=dict)

    def response(self) -> web.Response:
        """As botocore reads it: the code is in a header."""
        return web.Response(
            status=STATUS[self.code],
            headers={"x-amzn-ErrorType": self.code},
            body=orjson.dumps({"message": self.message, **self.fields}),
            content_type="application/json",
        )


def invalid(field: str, message: str) -> ServiceFault:
    """The fault of a request whose field breaks a rule."""
    return ServiceFault(
        "ValidationException",
        f"{field}: {message}",
        {
            "reason": "FieldValidationFailed",
            "fieldList": [{"name": field, "message": message}],
        },
    )
