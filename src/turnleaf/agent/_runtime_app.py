"""A `BedrockAgentCoreApp` whose invocations can be started once and asked for again."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bedrock_agentcore import BedrockAgentCoreApp, RequestContext
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Lifespan

from turnleaf.agent._envelope import Envelope, EnvelopeError, encoded, read_envelope
from turnleaf.agent._failures import secret_of
from turnleaf.agent._handlers import contained, result_of
from turnleaf.agent._invocations import Invocations
from turnleaf.agent._records import RecordLimits, Records
from turnleaf.agent._streams import Events, EventsResponse
from turnleaf.core import ENVELOPE, ContractError, SettingsError, wait_for_first

__all__ = ["AgentCoreRuntimeApp"]

OF_THE_BASE = ("_build_request_context", "_handle_invocation", "_invoke_handler", "_takes_context")
"""What is used of `BedrockAgentCoreApp` beyond what it documents; the same from 1.0 to 1.25."""


class AgentCoreRuntimeApp(BedrockAgentCoreApp):
    """A `BedrockAgentCoreApp` that understands the envelope `_agentcore_runtime` as well.

    A payload with the envelope starts an invocation, once for each session and invocation id
    however often it comes, or asks what became of one; docs/agents.md has the wire format. The
    handler sees the payload without it. A payload that has no envelope goes the way it goes in
    `BedrockAgentCoreApp`.

    debug, lifespan, middleware: `BedrockAgentCoreApp`'s.
    state_dir: the folder of the results; by default one in the folder for temporary files. One
    process at a time serves a session.
    max_result_bytes: of one reply; a larger result becomes an error.
    max_records, max_record_age, max_state_bytes: how many invocations that are over are known, for
    how many seconds, and how many bytes their replies have together. The oldest go first.

    Raises SettingsError for a limit that is none, and when files cannot be made in state_dir.
    """

    def __init__(
        self,
        debug: bool = False,
        lifespan: Lifespan[Any] | None = None,
        middleware: Sequence[Middleware] | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        max_result_bytes: int = 16 * 1024 * 1024,
        max_records: int = 10_000,
        max_record_age: float = 28_800.0,
        max_state_bytes: int = 1024 * 1024 * 1024,
    ) -> None:
        if missing := [name for name in OF_THE_BASE if not hasattr(BedrockAgentCoreApp, name)]:
            raise ContractError(
                f"AgentCoreRuntimeApp does not fit the bedrock-agentcore that is installed, which "
                f"has no {' and no '.join(missing)}: install an older one"
            )
        limits = RecordLimits(
            records=_above_zero("max_records", max_records),
            seconds=_above_zero("max_record_age", max_record_age),
            total_bytes=_above_zero("max_state_bytes", max_state_bytes),
        )
        records = Records.open(None if state_dir is None else Path(state_dir), limits)
        largest = _above_zero("max_result_bytes", max_result_bytes)
        super().__init__(debug=debug, lifespan=lifespan, middleware=middleware)
        self._invocations = Invocations(records, largest, self._busy, self.logger)

    async def _handle_invocation(self, request: Request) -> Response:
        try:
            payload = await request.json()
        except (ValueError, RecursionError):
            payload = None  # what is wrong with it, the base says
        if not isinstance(payload, dict) or ENVELOPE not in payload:
            response: Response = await super()._handle_invocation(request)  # type: ignore[no-untyped-call]  # the package has no types
            return response
        try:
            envelope = read_envelope(payload)
        except EnvelopeError as error:
            return Response(encoded({"error": str(error)}), 400, media_type="application/json")
        payload = {name: value for name, value in payload.items() if name != ENVELOPE}
        context: RequestContext = self._build_request_context(request)
        if envelope.operation == "get":
            return await self._state(envelope, context)
        return await self._start(envelope, context, payload)

    async def _state(self, envelope: Envelope, context: RequestContext) -> Response:
        reply = await self._invocations.get(
            context.session_id or "", envelope.invocation_id, wait=envelope.wait
        )
        return Response(reply, media_type="application/json")

    async def _start(
        self, envelope: Envelope, context: RequestContext, payload: dict[str, Any]
    ) -> Response:
        events = Events()
        secret = secret_of(payload)

        async def work() -> object:
            handler = self.handlers.get("main")
            if handler is None:
                raise ContractError("there is no entrypoint: mark a function with @app.entrypoint")
            takes_context = self._takes_context(handler)
            result = await self._invoke_handler(contained(handler), context, takes_context, payload)
            return await result_of(result, events, secret)

        invocation = self._invocations.start(
            context.session_id or "", envelope.invocation_id, work, secret=secret
        )
        if invocation is None:
            return await self._state(envelope, context)
        response = None
        try:
            if envelope.background:
                await invocation.accepted.wait()
            else:
                await wait_for_first(invocation.over.wait, events.opened.wait)
                if events.opened.is_set():
                    response = EventsResponse(events, invocation.over)
        finally:
            if response is None:
                events.abandon()
        return response or Response(invocation.reply, media_type="application/json")

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """/ping says HealthyBusy meanwhile, without which the session could be taken for idle."""
        task = self.add_async_task("invocation")
        try:
            yield
        finally:
            self.complete_async_task(task)


def _above_zero(name: str, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:
        raise SettingsError(f"AgentCoreRuntimeApp: {name} is {value!r}; give a number above 0")
    return value
