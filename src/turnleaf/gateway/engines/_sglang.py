"""A client of an SGLang engine, or of the SGLang router in front of several."""

import logging
import math
import random
from functools import partial
from http import HTTPStatus
from urllib.parse import quote, urlsplit, urlunsplit

import anyio

from turnleaf.core import EngineError, SettingsError
from turnleaf.gateway._threads import in_thread
from turnleaf.gateway.engines._base import (
    EngineLost,
    EngineRefused,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    TokenListener,
    wants_top_p_ids,
)
from turnleaf.gateway.engines._connections import (
    BROKEN,
    Connections,
    Response,
    describe,
    read_whole,
)
from turnleaf.gateway.engines._fleet import Fleet
from turnleaf.gateway.engines._sglang_stream import ReplyStream, StreamError
from turnleaf.gateway.engines._sglang_wire import (
    decode_reply,
    encode_request,
    error_text,
    reply_limit,
)
from turnleaf.gateway.engines._stop import Stop

__all__ = ["SGLangEngine"]

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT = 5.0  # seconds, for a whole health check
_STOP_GRACE = 0.5  # seconds from a stop until the connection is closed
_CANCEL_GRACE = 1.0  # seconds that a cancelled call may spend on its abort
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 5.0  # seconds
_LONG = 2**20  # bytes of a reply that takes more than some milliseconds to read: replay data
_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}


class _PassingFailureError(Exception):
    """An attempt failed in a way that another one may not."""


class SGLangEngine:
    """Calls `/generate` and hands back ids with their log-probabilities, or raises.

    url: of the engine or router, `http://host:port`. retry_budget: seconds after a call's first
    failure in which connection failures, timeouts, 408, 429 and 5xx are tried again, each time
    under a new rid; what a lost attempt may have sampled is recorded nowhere.

    A call with a listener is streamed where every engine says that it streams incrementally and the
    reply needs no replay data, which comes with a stream's last event only. A stream that breaks
    behind some tokens is not sampled anew: what was received is returned with finish_reason
    "abort", as after an interruption by the engine. So is the part of a stream that turns out not
    to be incremental; the next calls are not streamed.

    address: the URL as logs and errors may show it.

    Belongs to the event loop that first uses it. Raises SettingsError when `url` is not one.
    """

    def __init__(self, url: str, *, retry_budget: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.address = _address(self.url)
        self._retry_budget = retry_budget
        self._connections = Connections()
        self._fleet = Fleet(self.url, self._connections)

    async def generate(
        self,
        request: EngineRequest,
        *,
        stop: Stop,
        on_tokens: TokenListener | None = None,
    ) -> EngineReply:
        """Sample one completion; see `Engine.generate`.

        Raises EngineRefused for a 4xx.
        """
        give_up_at = math.inf
        attempt = 0
        while True:
            if stop.is_set():
                raise EngineLost(f"turn {request.turn_id}: stopped with no call under way")
            try:
                return await self._attempt(
                    request, f"{request.turn_id}.{request.part}.{attempt}", stop, on_tokens
                )
            except _PassingFailureError as failure:
                self._fleet.forget_streaming()
                now = anyio.current_time()
                give_up_at = min(give_up_at, now + self._retry_budget)
                pause = min(_FIRST_BACKOFF * 2**attempt, _LONGEST_BACKOFF)
                pause *= random.uniform(0.5, 1.0)
                attempt += 1
                if now + pause > give_up_at:
                    raise EngineUnavailable(
                        f"the engine at {self.address} failed {attempt} times in a row (retry "
                        f"budget {self._retry_budget:g} s): {failure}. Start it, or correct its "
                        "address"
                    ) from failure
                logger.warning(
                    "turn %s: %s; trying again in %.1f s", request.turn_id, failure, pause
                )
            with anyio.move_on_after(pause):
                await stop.wait()

    async def check(self) -> None:
        """Raise EngineUnavailable, naming the address and the remedy, unless the engine answers."""
        problem = None
        try:
            with anyio.fail_after(_CONTROL_TIMEOUT):
                response = await self._connections.exchange("GET", f"{self.url}/health")
        except BROKEN as error:
            problem = describe(error)
        else:
            if response.status != HTTPStatus.OK:
                problem = f"its /health answers {response.status}"
        if problem is not None:
            raise EngineUnavailable(
                f"no engine is ready at {self.address}: {problem}. Start it, or correct its address"
            )

    async def engines(self) -> list[str]:
        """URLs of the engines behind the router; an engine itself lists none."""
        return await self._fleet.engines()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._connections.aclose()

    async def _attempt(
        self,
        request: EngineRequest,
        rid: str,
        stop: Stop,
        on_tokens: TokenListener | None,
    ) -> EngineReply:
        stream: ReplyStream | None = None
        response: Response | None = None
        failure: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:

                def end() -> None:
                    tasks.start_soon(self._end, rid, tasks.cancel_scope)

                def end_cumulative_stream() -> None:
                    self._fleet.refute_streaming()
                    tasks.start_soon(self._fleet.abort, rid)

                stop.notify(end)
                # Errors are kept, so that the task group does not wrap them; without tracebacks,
                # which would hold on to the request where aiohttp keeps its errors, too.
                try:
                    if on_tokens is not None and await self._streams(request):
                        stream = ReplyStream(request, on_tokens, end_cumulative_stream)
                    response = await self._exchange(request, rid, stream)
                except (EngineError, StreamError, *BROKEN) as error:
                    failure = error.with_traceback(None)
                finally:
                    stop.forget(end)
                if stop.is_set() or (stream is not None and stream.cumulative):
                    tasks.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_CANCEL_GRACE, shield=True):
                await self._fleet.abort(rid)
            raise
        try:
            reply = await self._outcome(request, stop, stream, response, failure)
        finally:
            failure = None  # or it would hold on to itself, by its traceback
        if stream is None and on_tokens is not None and len(reply.output):
            on_tokens(reply.output)
        return reply

    async def _end(self, rid: str, call: anyio.CancelScope) -> None:
        """Have the engine end a call, and cut it when that takes long."""
        with anyio.move_on_after(_STOP_GRACE):
            await self._fleet.abort(rid)
            await anyio.sleep_forever()
        call.cancel()

    async def _streams(self, request: EngineRequest) -> bool:
        if request.experts is not None or wants_top_p_ids(request.sampling):
            return False
        return await self._fleet.streams_incrementally()

    async def _exchange(
        self, request: EngineRequest, rid: str, stream: ReplyStream | None
    ) -> Response | None:
        """The response, or None where `stream` read it."""
        async with self._connections.opened(
            "POST",
            f"{self.url}/generate",
            body=encode_request(request, rid, stream=stream is not None),
            headers={"X-SMG-Routing-Key": _header_safe(request.routing_key)},
        ) as response:
            if stream is None or response.status != HTTPStatus.OK:
                return await read_whole(response, limit=reply_limit(request))
            await stream.read(response)
            return None

    async def _outcome(
        self,
        request: EngineRequest,
        stop: Stop,
        stream: ReplyStream | None,
        response: Response | None,
        failure: Exception | None,
    ) -> EngineReply:
        """What an attempt comes to: a reply, or what is to be raised."""
        if stream is not None and stream.finished:
            return stream.reply()
        if isinstance(failure, EngineError):
            try:
                raise failure
            finally:
                failure = None  # as in _attempt
        why = "its stream ended before the reply" if failure is None else describe(failure)
        if stream is not None and stream.sampled:
            if not stop.is_set():
                logger.warning(
                    "turn %s: interrupted after %d tokens: %s", request.turn_id, stream.sampled, why
                )
                self._fleet.forget_streaming()
            return stream.reply()
        if isinstance(failure, StreamError):
            raise self._failure(failure.status, failure.said)
        if response is None and stop.is_set():
            raise EngineLost(f"turn {request.turn_id}: stopped, and the engine sent nothing back")
        if response is None:
            raise _PassingFailureError(why) from failure
        if response.status != HTTPStatus.OK:
            raise self._failure(response.status, error_text(response.body))
        decode = partial(
            decode_reply,
            response.body,
            prompt_length=len(request.input_ids),
            experts=request.experts,
            top_p=wants_top_p_ids(request.sampling),
        )
        return await in_thread(decode) if len(response.body) > _LONG else decode()

    def _failure(self, status: int, said: str) -> Exception:
        if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            # Its words may quote the request, which no log may hold; its own log has them.
            return _PassingFailureError(f"it answers {status}")
        return EngineRefused(f"the engine refuses the call: it answers {status}", said)


def _address(url: str) -> str:
    """The URL as logs and errors may show it: without a user or password."""
    shown = url.rpartition("@")[2]
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    except ValueError:
        pass  # not an address, or not a port
    raise SettingsError(f"the engine's URL is not of the form http://host:port: {shown!r}")


def _header_safe(routing_key: str) -> str:
    """The routing key percent-encoded, so that any name fits into a header."""
    return quote(routing_key, safe="!#$&'()*+,/:;=?@[]^`{|}")
