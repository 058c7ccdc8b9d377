"""The agents' listener: chat completions, the agent's own trajectory, health."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import attrs
from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnleaf.core import start_task
from turnleaf.gateway._asked import Asked, identity_of
from turnleaf.gateway._http import bearer, guarded, json_response, not_served, read_body
from turnleaf.gateway._keys import Call, Keys, Record, ended
from turnleaf.gateway._threads import in_thread
from turnleaf.gateway._turns import Turns
from turnleaf.gateway.protocols import (
    ChatRequest,
    Completion,
    EventStream,
    RequestError,
    bad_request,
    completion,
    completion_events,
    error_event,
    parse_chat_request,
)

__all__ = ["agents_app"]

logger = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
KEEP_ALIVE = 15.0
"""Seconds of silence after which a streaming client is sent a comment."""


def agents_app(
    keys: Keys, turns: Turns, *, model_id: str, keep_alive: float = KEEP_ALIVE
) -> ASGIApp:
    """The ASGI app that agents talk to."""

    async def health(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def models(request: Request) -> Response:
        keys.authenticate(bearer(request))
        model = {"id": model_id, "object": "model", "created": 0, "owned_by": "turnleaf"}
        return json_response({"object": "list", "data": [model]})

    async def trajectory(request: Request) -> Response:
        record = keys.authenticate(bearer(request))
        return Response(record.trajectory.to_json(), media_type="application/json")

    not_here = not_served(f"this gateway speaks OpenAI chat completions, at POST {CHAT}")
    # Answers a mistake of the gateway itself where it is counted: the server would behind that.
    chat = ServerErrorMiddleware(ChatCompletions(keys, turns, keep_alive))
    others = Starlette(
        routes=[
            Route("/healthz", health),
            Route("/v1/models", guarded(models)),
            Route("/v1/trajectory", guarded(trajectory)),
        ],
        exception_handlers={404: not_here, 405: not_here},
    )
    others.router.redirect_slashes = False  # a redirect would name the host that the client claims

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # What every turn asks for passes nothing that only the others need.
        if scope["type"] == "http" and scope["path"] == CHAT and scope["method"] == "POST":
            await chat(scope, receive, send)
        else:
            await others(scope, receive, send)

    return app


class ChatCompletions:
    """POST CHAT, as an ASGI app: it must know when the last byte was sent."""

    def __init__(self, keys: Keys, turns: Turns, keep_alive: float) -> None:
        self._keys = keys
        self._turns = turns
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, record = Request(scope, receive), None
        try:
            record = self._keys.authenticate(bearer(request))  # before anything is read
            with record.connected():
                await self._serve(record, request, receive, send)
        except RequestError as error:
            if record is not None:
                record.refuse(error)
            await json_response(error.body(), error.status, error.headers())(scope, receive, send)
        except ClientDisconnect:
            return

    async def _serve(self, record: Record, request: Request, receive: Receive, send: Send) -> None:
        """Answer a request; raises RequestError for one that is refused before it begins."""
        body = record.bodies.read(await read_body(request, limit=self._turns.body_limit))
        chat = parse_chat_request(body.value)
        trained, marked = _is_trained(request), _is_marked(request)
        record.check_open()  # again: it may have been closed while the body arrived
        identity = identity_of(body.digest, trained=trained)
        claimed = record.asked.claim(identity, marked=marked)
        try:
            call = record.admit(turns=chat.n) if claimed is None else Call(joined=True)
        except RequestError as error:
            record.asked.refuse(identity, error)
            raise
        client, reply = _Client(receive), _Sending(send, chat)
        record.calls.add(call)
        try:
            with call.scope:
                if claimed is None:
                    call.body = body
                    asked = record.asked.ask(
                        identity, on_abandoned=partial(call.end, "undelivered")
                    )
                    client.wait_for(asked)
                    await self._host(record, chat, trained, call, asked, client, reply)
                else:
                    record.metrics.joined()
                    client.wait_for(claimed)
                    await self._attend(record, claimed, call, client, reply)
            if call.scope.cancelled_caught:
                await reply.fail(ended())
        finally:
            client.close()
            record.calls.discard(call)
            call.finished.set()

    async def _host(
        self,
        record: Record,
        chat: ChatRequest,
        trained: bool,
        call: Call,
        asked: Asked,
        client: "_Client",
        reply: "_Sending",
    ) -> None:
        """Have the turn sampled, whoever waits for it in the end, and tell the agent of it."""

        async def sample() -> None:
            asked.finish(await self._sample(record, chat, trained, call, asked))

        # No task, which would cost more than all else that a call does in waiting.
        ending = asyncio.get_running_loop().call_later(
            record.expires_at - time.monotonic(), call.end, "aborted"
        )
        try:
            if reply.streams:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(sample)
                    await self._attend(record, asked, call, client, reply)
            else:
                await sample()
                await self._attend(record, asked, call, client, reply)
        finally:
            ending.cancel()
            if not asked.done:  # as for a call that was cut
                asked.finish(ended())

    async def _attend(
        self, record: Record, asked: Asked, call: Call, client: "_Client", reply: "_Sending"
    ) -> None:
        """Wait for a turn and tell the agent of it; returns when that is done or the agent gone."""
        while not asked.done and not client.gone:
            changed = asked.changed
            if not reply.streams:
                await changed.wait()
                continue
            await reply.pass_on(asked)
            with anyio.move_on_after(self._keep_alive) as silence:
                await changed.wait()
            if silence.cancelled_caught:
                await reply.keep_alive()
        await anyio.lowlevel.checkpoint()  # a disconnect noticed meanwhile shows now
        outcome = asked.outcome
        if isinstance(outcome, Completion) and not client.gone:
            await reply.complete(outcome, asked)
            # At once: the server reports the end of a reply as a disconnect too.
            if not client.gone:
                self._turns.deliver(record, *outcome.turn_ids)
                call.answered = True
                client.leave(delivered=True)
        elif isinstance(outcome, RequestError) and not client.gone:
            await reply.fail(outcome)
            call.answered = True

    async def _sample(
        self, record: Record, chat: ChatRequest, trained: bool, call: Call, asked: Asked
    ) -> Completion | RequestError:
        try:
            prepared = await self._turns.prepare(record, chat, call, trained=trained)
            if not chat.stream:
                return await self._turns.sample(record, prepared, call)
            stream = EventStream(prepared.id, chat.model, chat.include_usage)

            def tell(index: int, message: dict[str, Any]) -> None:
                asked.tell(stream.more(index, message))

            reply = await self._turns.sample(record, prepared, call, tell)
            asked.tell(await _encoded(reply, stream.end))
            return reply
        except RequestError as error:
            refusal = attrs.evolve(error)  # whose traceback does not hold on to the request
        except Exception:
            logger.exception("%s: a turn failed", record.who)
            text = "the gateway failed; its log says why"
            refusal = RequestError(500, text, code="gateway_error")
        call.due = 0
        record.refuse(refusal)
        return refusal


class _Client:
    """Waits for a turn, and notices when it goes away."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._asked: Asked | None = None
        self._watching: asyncio.Task[None] | None = None
        self.gone = False

    def wait_for(self, asked: Asked) -> None:
        """From now on the turn has one more connection that waits for it."""
        asked.take()
        self._asked = asked
        # In no task group, whose cancelling would cost as much as all else that a reply takes.
        self._watching = start_task(self._watch(), name="client")

    def leave(self, *, delivered: bool) -> None:
        """It waits no longer; only the first time counts."""
        if self._asked is not None:
            self._asked.leave(delivered=delivered)
            self._asked = None

    def close(self) -> None:
        """The request is over."""
        self.leave(delivered=False)
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # or it would hold on to itself, by the traceback of its end

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.leave(delivered=False)


class _Sending:
    """Sends one reply, plain or as an event stream.

    The status is held back until there is a reply or the client must be kept waiting, so that
    trouble has a status of its own for as long as possible.
    """

    def __init__(self, send: Send, chat: ChatRequest) -> None:
        self._send = send
        self._chat = chat
        self.streams = chat.stream
        self._started = False
        self._told = False
        self._passed_on = 0

    async def pass_on(self, asked: Asked) -> None:
        """Send the events that there are."""
        events = self._next_events(asked)
        if events:
            await self._start_stream()
            await self._body(events, more=True)

    async def complete(self, reply: Completion, asked: Asked) -> None:
        """Send what the client has not been sent yet."""
        if not self.streams:
            await self._whole(200, await _encoded(reply, completion), {})
            return
        if asked.events:
            events = self._next_events(asked)
        else:
            # The turn was over before this client came.
            events = await _encoded(
                reply, partial(completion_events, include_usage=self._chat.include_usage)
            )
        await self._start_stream()
        await self._last_body(events)

    def _next_events(self, asked: Asked) -> bytes:
        events = b"".join(asked.events[self._passed_on :])
        self._passed_on = len(asked.events)
        return events

    async def fail(self, error: RequestError) -> None:
        """Send the error, if there is still room for it in the reply."""
        if self._told:
            await self._body(b"", more=False)
        elif self._started:
            await self._last_body(error_event(error))
        else:
            response = json_response(error.body(), error.status, error.headers())
            await self._whole(error.status, bytes(response.body), error.headers())

    async def keep_alive(self) -> None:
        await self._start_stream()
        await self._body(b": working\n\n", more=True)

    async def _start_stream(self) -> None:
        if not self._started:
            headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
            await self._start(200, headers)

    async def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, headers | length)
        await self._last_body(body)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._started = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        message: Message = {"type": "http.response.start", "status": status, "headers": raw}
        await self._send(message)

    async def _last_body(self, body: bytes) -> None:
        await self._body(body, more=True)
        self._told = True
        # The server takes this only when the client has read what came before, or is gone.
        await self._body(b"", more=False)

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def _encoded(reply: Completion, encode: Callable[[Completion], bytes]) -> bytes:
    """The reply in bytes, which the event loop does not wait for where that takes long."""
    return await in_thread(partial(encode, reply)) if reply.long else encode(reply)


def _is_trained(request: Request) -> bool:
    values = [value.strip().lower() for value in request.headers.getlist("x-turnleaf-train")]
    for value in values:
        if value not in ("true", "false"):
            raise bad_request("x-turnleaf-train", f"is {value!r}, but must be true or false")
    return "false" not in values


def _is_marked(request: Request) -> bool:
    """Whether the client says that it retries: the SDKs' header counts from 0."""
    count = request.headers.get("x-stainless-retry-count", "0").strip()
    return count.isdecimal() and int(count[:9]) > 0
