"""Nobody's bytes make the gateway fail, hang or tell a secret. Over real sockets.

TURNLEAF_LONG=N tries N times as many.
"""

import json
import logging
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import attrs
import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.gateway_stack import TOKEN, Stack, running_gateway
from turnleaf.adapters.mock import Reply

SECRET = "sk-of-somebody-else"
TEXT = "MARKED-TEXT"
LIMIT = 10.0
"""Seconds in which everything is over."""
NAMED = ("invalid_value", "unsupported_parameter")

LONG = int(os.environ.get("TURNLEAF_LONG", "0"))
fuzz = settings(max_examples=100 * max(LONG, 1), suppress_health_check=list(HealthCheck))


@attrs.frozen(eq=False)
class Running:
    """The gateway in a thread of its own. log: what it has logged."""

    portal: BlockingPortal = attrs.field(repr=False)
    stack: Stack = attrs.field(repr=False)
    agents_port: int
    control_port: int
    log: list[str] = attrs.field(repr=False)

    def key(self) -> tuple[str, str]:
        """The id and the secret of a new key."""

        async def opened() -> tuple[str, str]:
            record, secret = self.stack.keys.open(
                name="r", sampling={"temperature": 1}, purpose="train", expires_in=60
            )
            return record.id, secret

        return self.portal.call(opened)

    def close(self, key_id: str) -> bytes:
        """Its trajectory; every call must have ended by itself."""

        async def closed() -> bytes:
            with anyio.fail_after(LIMIT):
                trajectory = await self.stack.keys.close(key_id, aborted=False)
            self.stack.collected.append(trajectory)
            return trajectory.to_json()

        return self.portal.call(closed)

    def ask(self, port: int, data: bytes, *, takes: int | None = None) -> bytes:
        """What is answered; only so many bytes of it are read, then the connection is broken."""
        return self.portal.call(exchanged, port, data, takes)


async def exchanged(port: int, data: bytes, takes: int | None) -> bytes:
    with anyio.fail_after(LIMIT):
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            if takes is not None:
                raw: socket.socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            received = b""
            try:
                await stream.send(data)
                while takes is None or len(received) < takes:
                    received += await stream.receive(65536 if takes is None else takes)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
    return received


class Log(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    lines: list[str] = []
    handler = Log(lines)
    loggers = [logging.getLogger(name) for name in ("turnleaf", "uvicorn", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    with start_blocking_portal() as portal:
        gateway = running_gateway([Reply(text="Fine.", times=100_000)], max_context_tokens=4_096)
        with portal.wrap_async_context_manager(gateway) as stack:
            agents = httpx.URL(stack.gateway.base_url).port
            control = stack.gateway._http.base_url.port
            assert agents is not None
            assert control is not None
            yield Running(portal, stack, agents, control, lines)
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def head(
    authorization: list[bytes],
    key: str,
    body: bytes = b"",
    *,
    method: bytes = b"POST",
    path: bytes = b"/v1/chat/completions",
    more: Sequence[tuple[bytes, bytes]] = (),
) -> bytes:
    """A request's head, as bytes, its body's length included; more headers may contradict it."""
    given = [
        (b"host", b"gateway"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    overruled = {name for name, _ in more} & {b"host", b"content-type"}
    headers = [(name, value) for name, value in given if name not in overruled]
    headers += [(b"authorization", value) for value in authorization]
    lines = [method + b" " + path + b" HTTP/1.1", *(n + b": " + v for n, v in [*headers, *more])]
    text = b"\r\n".join(lines) + b"\r\n\r\n"
    return text.replace(b"KEY", key.encode()).replace(b"SECRET", SECRET.encode())


def is_framed(more: list[tuple[bytes, bytes]]) -> bool:
    """Whether nothing contradicts the body's true length, so that an answer is sure to come."""
    return not {name for name, _ in more} & {b"content-length", b"transfer-encoding"}


def check(running: Running, key: str, answer: bytes, *, whole: bool = True) -> int | None:
    """An answer tells no secret, and an error is the protocol's. Returns the status."""
    for secret in (key, SECRET, TOKEN):
        assert secret.encode() not in answer
    check_log(running, key)
    if not answer or not whole:
        return None
    top, _, body = answer.partition(b"\r\n\r\n")
    status = int(top.split(b" ", 2)[1])
    assert status not in range(500, 600), answer
    if status >= 400 and body and body != b"Invalid HTTP request received.":
        check_error(json.loads(body))
    return status


def check_error(body: Any) -> None:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"].endswith("_error")
    if error["code"] in NAMED:
        assert error["param"] in error["message"]


def check_log(running: Running, key: str) -> None:
    for line in running.log:
        assert key not in line
        assert SECRET not in line
        assert TEXT not in line
        assert "Traceback" not in line, line
        assert "did not end in time" not in line
    running.log.clear()


def check_state(running: Running, key_id: str, key: str) -> None:
    exported = running.close(key_id)
    assert key.encode() not in exported
    assert SECRET.encode() not in exported
    check_log(running, key)
    healthy = head([], "", method=b"GET", path=b"/healthz")
    assert running.ask(running.agents_port, healthy).startswith(b"HTTP/1.1 200")


@fuzz
@given(body=strategies.chat_bodies)
def test_no_body_makes_it_fail(running: Running, body: bytes) -> None:
    key_id, key = running.key()
    request = head([b"Bearer KEY"], key, body) + body
    status = check(running, key, running.ask(running.agents_port, request))
    assert status in (200, 400, 413)
    check_state(running, key_id, key)


@fuzz
@given(
    authorization=strategies.authorizations,
    more=strategies.odd_headers,
    body=st.one_of(st.just(json.dumps(strategies.valid_chat()).encode()), strategies.chat_bodies),
)
def test_no_header_makes_it_fail(
    running: Running, authorization: list[bytes], more: list[tuple[bytes, bytes]], body: bytes
) -> None:
    key_id, key = running.key()
    request = head(authorization, key, body, more=more) + body
    framed = is_framed(more)
    answer = running.ask(running.agents_port, request, takes=None if framed else 1)
    status = check(running, key, answer, whole=framed)
    if framed:
        assert status in (200, 400, 401, 413)
    if status == 200:
        assert any(b"KEY" in value for value in authorization)
    check_state(running, key_id, key)


@fuzz
@given(
    method=st.one_of(st.just(b"POST"), strategies.methods),
    path=strategies.paths,
    control=st.booleans(),
    allowed=st.booleans(),
    more=st.one_of(st.just([]), strategies.odd_headers),
    body=st.sampled_from([b"", b"{}", b"x"]),
)
def test_no_path_makes_it_fail(
    running: Running,
    method: bytes,
    path: bytes,
    control: bool,
    allowed: bool,
    more: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    key_id, key = running.key()
    secret = TOKEN if control else key
    request = head(
        [b"Bearer KEY"] if allowed else [], secret, body, method=method, path=path, more=more
    )
    port = running.control_port if control else running.agents_port
    framed = is_framed(more)
    answer = running.ask(port, request + body, takes=None if framed else 1)
    check(running, key, answer, whole=framed)
    check_state(running, key_id, key)


@fuzz
@given(
    body=st.one_of(st.just(json.dumps(strategies.valid_key()).encode()), strategies.key_bodies),
    authorization=strategies.authorizations,
    more=strategies.odd_headers,
)
def test_nothing_makes_the_control_listener_fail(
    running: Running, body: bytes, authorization: list[bytes], more: list[tuple[bytes, bytes]]
) -> None:
    request = head(authorization, TOKEN, body, path=b"/keys", more=more) + body
    framed = is_framed(more)
    answer = running.ask(running.control_port, request, takes=None if framed else 1)
    status = check(running, "no key", answer, whole=framed)
    if framed:
        assert status in (201, 400, 401, 413)
    if status == 201:
        opened = json.loads(answer.partition(b"\r\n\r\n")[2])
        ask = json.dumps(strategies.valid_chat()).encode()
        chat = head([b"Bearer KEY"], opened["secret"], ask) + ask
        told = check(running, opened["secret"], running.ask(running.agents_port, chat))
        assert told in (200, 401, 424)  # the engine may refuse such sampling, or the key be over
        check_state(running, opened["id"], opened["secret"])


@fuzz
@given(data=st.data(), stream=st.booleans())
def test_a_client_may_leave_at_any_byte(
    running: Running, data: st.DataObject, stream: bool
) -> None:
    key_id, key = running.key()
    body = json.dumps({**strategies.valid_chat(), "stream": stream}).encode()
    request = head([b"Bearer KEY"], key, body) + body
    if data.draw(st.booleans(), "in the reply"):
        takes = data.draw(st.integers(0, 2_500), "takes")
        answer = running.ask(running.agents_port, request, takes=takes)
        check(running, key, answer, whole=False)
    else:
        upto = data.draw(st.integers(0, len(request) - 1), "upto")
        assert running.ask(running.agents_port, request[:upto], takes=0) == b""
    check_state(running, key_id, key)
