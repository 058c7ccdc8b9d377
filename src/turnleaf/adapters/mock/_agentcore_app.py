"""The data plane of an emulated runtime, as botocore's service model (2024-02-28) has it."""

import re
import uuid
from typing import NoReturn

import aiohttp
import anyio
import anyio.abc
import attrs
from aiohttp import web

from turnleaf.adapters.mock._agentcore_errors import ServiceFault, invalid
from turnleaf.adapters.mock._agentcore_faults import AgentCoreFault, Faults
from turnleaf.adapters.mock._agentcore_log import AgentCoreLog, InvocationRecord
from turnleaf.adapters.mock._agentcore_payload import Payload, speaks_envelope
from turnleaf.adapters.mock._agentcore_quotas import Bucket
from turnleaf.adapters.mock._agentcore_sessions import Session, Sessions
from turnleaf.adapters.mock._agentcore_settings import AgentCoreSettings

__all__ = ["MAX_PAYLOAD", "DataPlane"]

MAX_PAYLOAD = 100_000_000  # bytes

_SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
_OWN_HEADERS = "x-amzn-bedrock-agentcore-runtime-"
_HANDED_ON = frozenset(
    {
        "accept",
        "accept-encoding",
        "baggage",
        "content-type",
        "mcp-protocol-version",
        "mcp-session-id",
        "traceparent",
        "tracestate",
        "x-amzn-trace-id",
    }
)
# The request's shape has the lengths, the reply's has the characters.
_SESSION_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9-_]{32,255}")


class _HungUp(Exception):
    """The connection closes without an answer, or in the middle of one. outcome: of the log."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@attrs.frozen(eq=False)
class _Invocation:
    """A request, what it asks for, and what happens to it."""

    request: web.Request
    session_id: str
    payload: Payload
    fault: AgentCoreFault
    record: InvocationRecord
    stream: web.StreamResponse = attrs.field(init=False, factory=web.StreamResponse)

    def answer(self, reply: aiohttp.ClientResponse, content: bytes) -> web.StreamResponse:
        """The agent's whole reply."""
        response = web.Response(status=reply.status, body=content, headers=self._headers(reply))
        self.record.end("unread" if _has_left(self.request) else "answered")
        return response

    async def pass_on(self, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        """The agent's reply as it comes. It is read to its end, whether its caller stays or not."""
        self.stream.set_status(reply.status)
        self.stream.headers.update(self._headers(reply))
        outcome = "answered"
        try:
            await self.stream.prepare(self.request)
        except ConnectionError:
            outcome = "unread"
        async for chunk in reply.content.iter_any():
            try:
                await self.stream.write(chunk)
            except ConnectionError:
                outcome = "unread"
        self.record.end(outcome)
        return self.stream

    def _headers(self, reply: aiohttp.ClientResponse) -> dict[str, str]:
        return {
            "Content-Type": reply.headers.get("Content-Type", "application/octet-stream"),
            _SESSION_HEADER: self.session_id,
        }


@attrs.frozen(eq=False)
class DataPlane:
    """The two operations on sessions. tasks: for what outlives a request."""

    settings: AgentCoreSettings
    sessions: Sessions
    faults: Faults
    log: AgentCoreLog
    http: aiohttp.ClientSession
    tasks: anyio.abc.TaskGroup
    _invocations: Bucket = attrs.field(init=False)
    _stops: Bucket = attrs.field(init=False)
    _stopped: dict[str, anyio.Event] = attrs.field(init=False, factory=dict)
    """For each session whose stop an invocation waits for."""

    @_invocations.default
    def _bucket_of_invocations(self) -> Bucket:
        return Bucket(self.settings.invocations_per_second, 1.0)

    @_stops.default
    def _bucket_of_stops(self) -> Bucket:
        return Bucket(self.settings.stops_per_second, 1.0)

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """InvokeAgentRuntime."""
        try:
            self._check_target(request)
            session_id = _session_id(request) or str(uuid.uuid4())
            payload = Payload.read(await _body(request))
        except ServiceFault as error:
            return error.response()
        record = self.log.invoked(session_id, payload)
        fault = self.faults.of("invoke", session_id, payload)
        invocation = _Invocation(request, session_id, payload, fault, record)
        try:
            await anyio.sleep(fault.delay)
            if fault.after_stop:
                await self._stopped.setdefault(session_id, anyio.Event()).wait()
            _raise_injected(fault.error)
            self._invocations.take("invocations per second")
            return await self._run(invocation)
        except ServiceFault as error:
            record.end(error.code)
            return error.response()
        except _HungUp as end:
            record.end(end.outcome)
            return _hang_up(request, invocation.stream)
        finally:
            if record.outcome is None:
                record.end("cut")

    async def _run(self, invocation: _Invocation) -> web.StreamResponse:
        session = self.sessions.for_invocation(invocation.session_id)
        invocation.record.session = session.record.number
        session.idle_since = anyio.current_time()
        cut = anyio.CancelScope()
        session.running.add(cut)
        try:
            with cut:
                await self.sessions.provision(session)
                return await self._forward(invocation, session)
        finally:
            session.running.discard(cut)
            session.idle_since = anyio.current_time()
        if session.crashed:
            _break_off(invocation)
        raise _HungUp("cut")

    async def _forward(self, invocation: _Invocation, session: Session) -> web.StreamResponse:
        fault = invocation.fault
        invocation.record.executed = True
        if fault.kill_after is not None:
            self.tasks.start_soon(self._kill, session, fault.kill_after)
        try:
            async with self.http.post(
                f"{session.container.url}/invocations",
                data=invocation.payload.body,
                headers=_handed_on(invocation),
            ) as reply:
                if reply.status >= 400:
                    raise ServiceFault(
                        "RuntimeClientError", f"Received error ({reply.status}) from runtime."
                    )
                whole = fault.lose_answer or fault.answer_error or fault.answer_delay
                if reply.content_length is None and not whole:
                    return await invocation.pass_on(reply)
                content = await reply.read()
                if speaks_envelope(invocation.payload, content):
                    session.record.speaks = True
                await anyio.sleep(fault.answer_delay)
                if fault.lose_answer:
                    raise _HungUp("lost")
                _raise_injected(fault.answer_error)
                return invocation.answer(reply, content)
        except aiohttp.ClientConnectorError:
            invocation.record.executed = False
            _break_off(invocation)
        except aiohttp.ClientError:
            _break_off(invocation)

    async def _kill(self, session: Session, after: float) -> None:
        await anyio.sleep(after)
        await self.sessions.end(session, "killed")

    async def stop(self, request: web.Request) -> web.StreamResponse:
        """StopRuntimeSession."""
        try:
            self._check_target(request)
            session_id = _session_id(request)
            if session_id is None:
                raise invalid("runtimeSessionId", "it is missing")
        except ServiceFault as error:
            return error.response()
        fault = self.faults.of("stop", session_id)
        await anyio.sleep(fault.delay)
        try:
            _raise_injected(fault.error)
            self._stops.take("stops per second")
            await self.sessions.stop(session_id)
        except ServiceFault as error:
            self._note_stop(session_id, error.code)
            return error.response()
        self._note_stop(session_id, "stopped")
        await anyio.sleep(fault.answer_delay)
        response = web.json_response({}, headers={_SESSION_HEADER: session_id})
        if fault.lose_answer:
            return _hang_up(request, response)
        try:
            _raise_injected(fault.answer_error)
        except ServiceFault as error:
            return error.response()
        return response

    def _note_stop(self, session_id: str, outcome: str) -> None:
        self.log.stop_requested(session_id, outcome)
        if session_id in self._stopped:
            self._stopped.pop(session_id).set()

    def _check_target(self, request: web.Request) -> None:
        arn, qualifier = request.match_info["arn"], request.query.get("qualifier", "DEFAULT")
        if arn != self.settings.arn:
            raise ServiceFault("ResourceNotFoundException", f"No runtime {arn} is there")
        if qualifier not in self.settings.qualifiers:
            raise ServiceFault("ResourceNotFoundException", f"No endpoint {qualifier} is there")


def _session_id(request: web.Request) -> str | None:
    session_id = request.headers.get(_SESSION_HEADER)
    if session_id is not None and not _SESSION_ID.fullmatch(session_id):
        raise invalid(
            "runtimeSessionId", "it must be 33 to 256 letters, digits, hyphens and underscores"
        )
    return session_id


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise invalid("payload", f"it must not exceed {MAX_PAYLOAD} bytes") from None


def _handed_on(invocation: _Invocation) -> dict[str, str]:
    """The request's headers that the agent gets to see."""
    headers = {
        name: value
        for name, value in invocation.request.headers.items()
        if name.lower() in _HANDED_ON or name.lower().startswith(_OWN_HEADERS)
    }
    return {"Content-Type": "application/json", **headers, _SESSION_HEADER: invocation.session_id}


def _raise_injected(code: str | None) -> None:
    if code is not None:
        raise ServiceFault(code, "injected by a test")


def _break_off(invocation: _Invocation) -> NoReturn:
    """What its caller sees of an agent that is suddenly gone."""
    if invocation.stream.prepared:
        raise _HungUp("broken")
    raise ServiceFault("RuntimeClientError", "Received error from runtime: it broke off.")


def _has_left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _hang_up(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Close the connection; the response, which aiohttp wants anyway, finds it closed."""
    if request.transport is not None:
        request.transport.abort()
    return response
