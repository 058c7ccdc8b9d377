"""What was asked of the agents' listener: for whoever looks for a mistake in a set-up."""

import json
from collections import Counter
from typing import Any, Self

import attrs
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnleaf.gateway._metrics import Metrics

__all__ = ["Refusal", "Requests", "Watched"]

KINDS = 50
"""How many kinds of refusals are told apart; those of further kinds are not counted."""
_EXCERPT = 500
_STREAMED_ERROR = b'data: {"error":'


@attrs.frozen
class Refusal:
    """What requests were refused with, as agents read it. code: None where there is none."""

    status: int
    code: str | None
    message: str


@attrs.frozen
class Requests:
    """total: requests that arrived, those for health excepted. refused: how many, by what with."""

    total: int
    refused: Counter[Refusal]

    def since(self, earlier: "Requests") -> "Requests":
        """What was asked after `earlier`."""
        return Requests(self.total - earlier.total, self.refused - earlier.refused)

    def to_mapping(self) -> dict[str, Any]:
        """As a JSON object."""
        refused = [{**attrs.asdict(one), "count": count} for one, count in self.refused.items()]
        return {"total": self.total, "refused": refused}

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Self:
        """Read what `to_mapping` made."""
        refused = Counter[Refusal]()
        for one in mapping["refused"]:
            refused[Refusal(one["status"], one["code"], one["message"])] = one["count"]
        return cls(mapping["total"], refused)


@attrs.define(eq=False)
class Watched:
    """An ASGI app of which it is known what was asked; requests with unknown keys count, too."""

    _app: ASGIApp
    _metrics: Metrics
    _total: int = 0
    _refused: Counter[Refusal] = attrs.Factory(Counter)

    @property
    def requests(self) -> Requests:
        """What was asked until now."""
        return Requests(self._total, self._refused.copy())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/healthz":
            await self._app(scope, receive, send)
            return
        self._total += 1
        status: int | None = None
        code = ""

        async def watching(message: Message) -> None:
            nonlocal status, code
            body = message.get("body", b"")
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status is not None and body and not code:
                # Errors are sent whole, also at the end of a stream that began well.
                if status >= 400:
                    refusal = _refusal(status, body)
                    self._note(refusal)
                    code = refusal.code or "unknown"
                elif body.startswith(_STREAMED_ERROR):
                    code = _refusal(status, body.removeprefix(b"data: ")).code or "unknown"
            await send(message)

        try:
            await self._app(scope, receive, watching)
        finally:
            self._metrics.answered(status, code)

    def _note(self, refusal: Refusal) -> None:
        if refusal in self._refused or len(self._refused) < KINDS:
            self._refused[refusal] += 1


def _refusal(status: int, body: bytes) -> Refusal:
    try:
        error = json.loads(body)["error"]
        return Refusal(status, error["code"], error["message"][:_EXCERPT])
    except (ValueError, KeyError, TypeError):
        return Refusal(status, None, body.decode(errors="replace")[:_EXCERPT])
