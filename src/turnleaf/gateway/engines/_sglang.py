"""A client of an SGLang engine, or of the SGLang router in front of several."""

import logging
import math
import random
import socket
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import aiohttp
import anyio
import attrs
import orjson

from turnleaf.core import EngineError, SettingsError
from turnleaf.gateway.engines._base import (
    EngineLost,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    UntrustedReply,
    wants_top_p_ids,
)
from turnleaf.gateway.engines._sglang_wire import (
    decode_reply,
    encode_request,
    error_text,
    reply_limit,
)

__all__ = ["SGLangEngine"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT = 10.0  # seconds
_CONTROL_TIMEOUT = 5.0  # seconds, for a whole health check
_STOP_GRACE = 0.5  # seconds from a stop until the connection is closed
_CANCEL_GRACE = 1.0  # seconds that a cancelled call may spend on its abort
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 5.0  # seconds
# SGLang's server closes a connection that was idle for 5 s; a call sent into that moment is lost.
_KEEP_IDLE = 4.0
_MAX_CONTROL_REPLY = 2**20
_CONCURRENT_ABORTS = 64  # a trainer's abort ends every call at once; descriptors are finite
_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


class _PassingFailureError(Exception):
    """An attempt failed in a way that another one may not."""


@attrs.frozen
class _Response:
    status: int
    body: bytes


class SGLangEngine:
    """Calls `/generate` and hands back ids with their log-probabilities, or raises.

    url: of the engine or router, `http://host:port`. retry_budget: seconds after a call's first
    failure in which connection failures, timeouts, 408, 429 and 5xx are tried again, each time
    under a new rid; what a lost attempt may have sampled is recorded nowhere.

    address: the URL as logs and errors may show it.

    Belongs to the event loop that first uses it. Raises SettingsError when `url` is not one.
    """

    def __init__(self, url: str, *, retry_budget: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self.address = _address(self.url)
        self._retry_budget = retry_budget
        self._aborts = anyio.CapacityLimiter(_CONCURRENT_ABORTS)
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: EngineRequest, *, stop: anyio.Event) -> EngineReply:
        """Sample one completion; see `Engine.generate`.

        Raises EngineError itself when the engine refuses the request (4xx).
        """
        give_up_at = math.inf
        attempt = 0
        while True:
            if stop.is_set():
                raise EngineLost(f"turn {request.turn_id}: stopped with no call under way")
            try:
                return await self._attempt(
                    request, f"{request.turn_id}.{request.part}.{attempt}", stop
                )
            except _PassingFailureError as failure:
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
                response = await self._exchange("GET", f"{self.url}/health")
        except _BROKEN as error:
            problem = _describe(error)
        else:
            if response.status != HTTPStatus.OK:
                problem = f"its /health answers {response.status}"
        if problem is not None:
            raise EngineUnavailable(
                f"no engine is ready at {self.address}: {problem}. Start it, or correct its address"
            )

    async def engines(self) -> list[str]:
        """URLs of the engines behind the router; an engine itself lists none."""
        try:
            async with self._aborts:
                response = await self._exchange("GET", f"{self.url}/workers")
        except (EngineError, *_BROKEN):
            return [self.url]
        if response.status != HTTPStatus.OK:
            return [self.url]
        return list(_worker_urls(response.body)) or [self.url]

    async def aclose(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _attempt(self, request: EngineRequest, rid: str, stop: anyio.Event) -> EngineReply:
        response: _Response | None = None
        failure: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                call = anyio.CancelScope()

                async def end_when_stopped() -> None:
                    await stop.wait()
                    with anyio.move_on_after(_STOP_GRACE):
                        await self._abort(rid)
                        await anyio.sleep_forever()
                    call.cancel()

                tasks.start_soon(end_when_stopped)
                with call:
                    try:
                        response = await self._exchange(
                            "POST",
                            f"{self.url}/generate",
                            body=encode_request(request, rid),
                            headers={"X-SMG-Routing-Key": _header_safe(request.routing_key)},
                            limit=reply_limit(request),
                        )
                    # Kept, so that the task group does not wrap it.
                    except (EngineError, *_BROKEN) as error:
                        failure = error
                tasks.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_CANCEL_GRACE, shield=True):
                await self._abort(rid)
            raise
        if isinstance(failure, EngineError):
            raise failure
        if response is None and stop.is_set():
            raise EngineLost(f"turn {request.turn_id}: stopped, and the engine sent nothing back")
        if response is None:
            raise _PassingFailureError(_describe(failure)) from failure
        return self._read(response, request)

    def _read(self, response: _Response, request: EngineRequest) -> EngineReply:
        status = response.status
        if status == HTTPStatus.OK:
            return decode_reply(
                response.body,
                prompt_length=len(request.input_ids),
                experts=request.experts,
                top_p=wants_top_p_ids(request.sampling),
            )
        said = f"it answers {status}: {error_text(response.body)}"
        if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _PassingFailureError(said)
        raise EngineError(f"the engine refuses the call: {said}")

    async def _abort(self, rid: str) -> None:
        """Ask every engine to end the call; whoever cannot be asked is left to notice that the
        connection closes."""

        async def ask(engine: str) -> None:
            body = orjson.dumps({"rid": rid})
            try:
                async with self._aborts:
                    await self._exchange("POST", f"{engine}/abort_request", body=body)
            except (EngineError, *_BROKEN) as error:
                logger.debug("%s could not be aborted at an engine: %s", rid, _describe(error))

        async with anyio.create_task_group() as tasks:
            for engine in await self.engines():
                tasks.start_soon(ask, engine)

    async def _exchange(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        limit: int = _MAX_CONTROL_REPLY,
    ) -> _Response:
        headers = {**(headers or {}), "Accept-Encoding": "identity"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        async with self._client().request(
            method, url, data=body, headers=headers, allow_redirects=False
        ) as response:
            chunks: list[bytes] = []
            received = 0
            async for chunk in response.content.iter_any():
                received += len(chunk)
                if received > limit:
                    raise UntrustedReply(f"{self.address} sent a reply of more than {limit} bytes")
                chunks.append(chunk)
            return _Response(response.status, b"".join(chunks))

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,  # a call that queued here would hold up its rollout unseen
                    keepalive_timeout=_KEEP_IDLE,
                    socket_factory=_watched_socket,
                ),
                # Sampling takes as long as it takes; the rollout's own time limit ends it.
                timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


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


def _watched_socket(address: Any) -> socket.socket:
    """A socket that notices within a minute that the other host is gone: no limit is set on how
    long a reply may take, and a host that loses power closes nothing."""
    family, kind, protocol, _, _ = address
    watched = socket.socket(family, kind, protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS has no TCP_KEEPIDLE
            watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return watched


def _worker_urls(body: bytes) -> Iterable[str]:
    """The router's `/workers`: `{"workers": [{"url": …}]}`, in older ones `{"urls": […]}`."""
    try:
        listed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return
    if not isinstance(listed, dict):
        return
    for key in ("workers", "urls"):
        workers = listed.get(key)
        for worker in workers if isinstance(workers, list) else ():
            url = worker.get("url") if isinstance(worker, dict) else worker
            if isinstance(url, str) and url.startswith(("http://", "https://")):
                yield url.rstrip("/")


def _describe(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
