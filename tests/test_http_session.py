import contextlib
import gzip
import json
import logging
import re
import socket
import struct
import traceback
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute
from hypothesis import given
from hypothesis import strategies as st

from tests.agent_process import agent_process, free_port
from turnleaf.core import (
    AgentError,
    BadResultError,
    PayloadError,
    SessionBusy,
    SessionError,
    SettingsError,
)
from turnleaf.sessions import HttpSession
from turnleaf.sessions._events import EventTooLarge, LastEvent

pytestmark = pytest.mark.anyio

SECRET = "tl-secret-of-this-rollout"
CONFIG = {"base_url": "http://127.0.0.1:1/v1", "model_id": "m", "api_key": SECRET}


@pytest.fixture(scope="module")
def agent_url():
    """The address of a real BedrockAgentCoreApp, which runs agent_app.py in its own process."""
    with agent_process(Path(__file__).with_name("agent_app.py")) as url:
        yield url


async def run(url, payload=None, **arguments):
    async with HttpSession(url, **arguments) as session:
        return await session.run({"_config": CONFIG} if payload is None else payload)


def assert_silent(error):
    """The secret is in no printed form of the error."""
    assert SECRET not in "".join(traceback.format_exception(error))


# A real agent


@pytest.mark.parametrize("ending", ["", "/", "/invocations", "/invocations/"])
async def test_an_agent_gets_the_payload_and_a_session_id(agent_url, ending):
    payload = {"do": "return", "text": "ü\u2028", "_config": CONFIG}
    async with HttpSession(agent_url + ending) as session:
        result = await session.run(payload)
    assert result == {"session_id": session.session_id, "payload": payload}
    assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_-]{32,99}", session.session_id)
    assert session.session_id != HttpSession(agent_url).session_id


async def test_a_large_payload_arrives(agent_url):
    payload = {"do": "return", "text": "x" * 3_000_000}
    assert (await run(agent_url, payload))["payload"] == payload


async def test_an_agents_exception_is_its_error_without_the_secret(agent_url):
    with pytest.raises(AgentError, match=r"status 500: .*no luck with \[api_key\]") as caught:
        await run(agent_url, {"do": "raise", "_config": CONFIG})
    assert_silent(caught.value)


async def test_the_last_event_of_a_stream_is_the_result(agent_url):
    assert await run(agent_url, {"do": "stream"}) == {"reward": 1.0, "text": "two\nlines"}


async def test_a_stream_that_ends_in_an_error_event_is_the_agents_error(agent_url):
    with pytest.raises(AgentError, match=r"raised ValueError: no luck with \[api_key\]") as caught:
        await run(agent_url, {"do": "stream and raise", "_config": CONFIG})
    assert_silent(caught.value)


async def test_a_result_that_is_not_json_is_refused(agent_url):
    with pytest.raises(BadResultError, match="not JSON: done, I think"):
        await run(agent_url, {"do": "text"})


async def exists(path):
    with anyio.fail_after(30):
        while not path.exists():  # noqa: ASYNC110  # another process makes it
            await anyio.sleep(0.01)


async def test_leaving_disconnects_from_an_agent_that_hangs(agent_url, tmp_path):
    started, stopped = tmp_path / "started", tmp_path / "stopped"
    payload = {"do": "hang", "started": str(started), "stopped": str(stopped)}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, agent_url, payload)
        await exists(started)
        tasks.cancel_scope.cancel()
    await exists(stopped)


async def test_an_address_without_an_agent_there_says_so(agent_url):
    with pytest.raises(AgentError, match=r"/nowhere/invocations answered with status 404.*POST"):
        await run(agent_url + "/nowhere")


# Servers that misbehave


@contextlib.asynccontextmanager
async def server(answer):
    """A server that reads a request and lets `answer(stream, request)` do the rest."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)

    async def handle(stream):
        async with stream:
            request = b""
            while b"\r\n\r\n" not in request:
                request += await stream.receive()
            head, _, body = request.partition(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", head).group(1))
            while len(body) < length:
                body += await stream.receive()
            with contextlib.suppress(anyio.BrokenResourceError):
                await answer(stream, (head, body))

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


def replying(body, status="200 OK", kind="application/json", framing=None):
    framing = f"Content-Length: {len(body)}" if framing is None else framing
    reply = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode() + body

    async def answer(stream, request):
        await stream.send(reply)

    return server(answer)


def sending(data):
    async def answer(stream, request):
        await stream.send(data)

    return server(answer)


@pytest.mark.parametrize("result", [None, 3, "text", [1], {"reward": 1e400}])
async def test_any_json_value_comes_as_it_is(result):
    async with replying(json.dumps(result).encode()) as url:
        assert await run(url) == result


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 10_000])
async def test_what_is_not_json_is_refused(body):
    async with replying(body) as url:
        with pytest.raises(BadResultError, match="not JSON") as caught:
            await run(url)
    assert len(str(caught.value)) < 600


async def test_a_result_that_echoes_the_secret_and_is_not_json_hides_it():
    async with replying(f"<p>{SECRET}".encode()) as url:
        with pytest.raises(BadResultError, match=r"<p>\[api_key\]") as caught:
            await run(url)
    assert_silent(caught.value)


@pytest.mark.parametrize("status", ["200 OK", "500 No"])
async def test_a_secret_that_the_excerpt_of_a_long_body_cuts_shows_no_piece(status):
    for kept in range(len(SECRET) + 1):
        body = b" " * (64 * 1024 - kept) + SECRET.encode() + b" " * 100
        async with replying(body, status) as url:
            with pytest.raises((BadResultError, AgentError)) as caught:
                await run(url)
        assert SECRET[:3] not in str(caught.value)


async def test_a_compressed_result_cannot_swell():
    body = gzip.compress(b" " * 50_000_000 + b"{}")
    framing = f"Content-Encoding: gzip\r\nContent-Length: {len(body)}"
    async with replying(body, framing=framing) as url:
        with pytest.raises(BadResultError, match="not JSON"):
            await run(url)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_a_huge_result_is_refused_by_the_limit(kind):
    async def answer(stream, request):
        await stream.send(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\ndata: ".encode())
        while True:  # until the client has had enough
            await stream.send(b"x" * 65_536)

    async with server(answer) as url:
        with pytest.raises(BadResultError, match=r"exceeds 1000000 bytes.*max_response_bytes"):
            await run(url, max_response_bytes=1_000_000)


async def test_a_long_stream_of_small_events_is_no_huge_result():
    body = b": still here\n\n" * 1000 + b"data: 1\r\n\r\n" * 1000 + b"data: 2\n\n"
    async with replying(body, kind="text/event-stream; charset=utf-8") as url:
        assert await run(url, max_response_bytes=100) == 2


async def test_a_stream_without_events_has_no_result():
    async with replying(b": nothing\n\n", kind="text/event-stream") as url:
        with pytest.raises(BadResultError, match="it is empty"):
            await run(url)


@pytest.mark.parametrize("status", ["400 No", "401 No", "413 No", "424 No", "500 No", "501 No"])
async def test_an_error_status_is_the_agents_error(status):
    body = b"why " * 1000 + b"x" * 1_000_000
    async with replying(body, status=status) as url:
        with pytest.raises(AgentError, match=f"{url}/invocations .*status {status[:3]}: why") as e:
            await run(url)
    assert len(str(e.value)) < 600


@pytest.mark.parametrize("status", ["429 No", "502 No", "503 No", "504 No"])
async def test_a_status_of_the_way_there_is_infrastructure(status):
    async with replying(b"upstream", status=status) as url:
        with pytest.raises(SessionError, match=f"status {status[:3]}: upstream") as caught:
            await run(url)
    assert isinstance(caught.value, SessionBusy) is (status[:3] in ("429", "503"))


async def test_an_error_body_that_echoes_the_secret_hides_it_before_it_is_cut():
    body = b"x" * 490 + SECRET.encode()
    async with replying(body, status="500 No") as url:
        with pytest.raises(AgentError) as caught:
            await run(url)
    assert SECRET[:5] not in str(caught.value)


async def test_a_redirect_is_not_followed():
    asked = []

    async def elsewhere(stream, request):
        asked.append(request)

    async with server(elsewhere) as other:
        framing = f"Content-Length: 0\r\nLocation: {other}/invocations"
        async with replying(b"", status="307 No", framing=framing) as url:
            with pytest.raises(AgentError, match="status 307"):
                await run(url)
    assert asked == []


async def test_the_environments_proxy_is_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with replying(b"{}") as url:
        assert await run(url) == {}


async def test_no_agent_there_says_how_to_start_one():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        SessionError, match=f"{url}/invocations: start one there .python agent.py.*n refused.$"
    ):
        await run(url)


async def test_an_unknown_host_is_infrastructure():
    with pytest.raises(SessionError, match=r"at http://agent\.invalid/.*: its name is not known"):
        await run("http://agent.invalid")


async def test_an_agent_without_tls_behind_https_is_told_so():
    async def handle(stream):
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    url = f"https://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        with pytest.raises(SessionError, match=r"\(TLS failed: [a-z ]+\)$"):
            await run(url)
        tasks.cancel_scope.cancel()


async def test_a_connection_that_is_reset_is_told_in_words():
    async def reset(stream, request):
        stream.extra(SocketAttribute.raw_socket).setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )

    async with server(reset) as url:
        with pytest.raises(SessionError, match="broke before its result: connection reset by peer"):
            await run(url)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n",
        b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\nbecause",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00\x01\x02\x03" * 1000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Echo\x00: " + SECRET.encode() + b"\r\n\r\n",
        SECRET.encode() + b" 200 OK\r\n\r\n",
    ],
)
async def test_a_connection_that_breaks_or_talks_nonsense_is_infrastructure(reply):
    async with sending(reply) as url:
        with pytest.raises(SessionError, match=f"{url}/invocations broke") as caught:
            await run(url)
    assert_silent(caught.value)


async def test_headers_that_never_end_run_into_the_timeout():
    async def answer(stream, request):
        await stream.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await stream.send(b"X: y\r\n")
            await anyio.sleep(0.02)

    async with server(answer) as url:
        with pytest.raises(SessionError, match=r"not finish within 0\.2 s.*timeout"):
            await run(url, timeout=0.2)


async def test_an_address_that_does_not_accept_runs_into_the_connect_timeout():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # A full backlog leaves further connections unanswered.
        with contextlib.ExitStack() as fillers:
            for _ in range(4):
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            with pytest.raises(SessionError, match=r"no connection .* within 0\.2 s"):
                await run(url, connect_timeout=0.2)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
async def test_leaving_closes_the_connection(said):
    running, closed = anyio.Event(), anyio.Event()

    async def answer(stream, request):
        if said:
            await stream.send(said)
        running.set()
        with contextlib.suppress(anyio.EndOfStream):
            await stream.receive()
        closed.set()

    async with server(answer) as url:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, url)
                await running.wait()
                tasks.cancel_scope.cancel()
            await closed.wait()


async def test_nothing_is_sent_twice_and_nothing_of_the_payload_is_logged(caplog):
    caplog.set_level(logging.DEBUG)
    requests = []

    async def answer(stream, request):
        requests.append(request)

    async with server(answer) as url:
        with pytest.raises(SessionError):
            await run(url)
    assert len(requests) == 1
    assert SECRET not in caplog.text


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), b"bytes"])
async def test_a_payload_that_is_no_json_is_the_rows_error(value):
    async with replying(b"{}") as url:
        with pytest.raises(PayloadError, match="cannot be sent as JSON"):
            await run(url, {"value": value})


async def test_running_outside_of_the_session_is_refused():
    with pytest.raises(RuntimeError, match="async with"):
        await HttpSession("http://127.0.0.1:1").run({})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"url": None}, "url is a NoneType; give an address such as"),
        ({"url": ""}, "not the address of an agent"),
        ({"url": "127.0.0.1:8080"}, "not the address of an agent"),
        ({"url": "localhost"}, "not the address of an agent"),
        ({"url": "ftp://host"}, "not the address of an agent"),
        ({"url": "http://"}, "not the address of an agent"),
        ({"url": "http://host:99999"}, "not the address of an agent"),
        ({"url": "http://é..x:80/"}, "not the address of an agent"),
        ({"url": f"http://{'é' * 63}"}, "not the address of an agent"),
        ({"url": "http://[::1"}, "not the address of an agent"),
        ({"url": "http://host /x"}, "not the address of an agent"),
        ({"url": "http://user:word@host"}, "no user name, query or fragment"),
        ({"url": "http://host/?key=1"}, "no user name, query or fragment"),
        ({"url": "http://host", "timeout": 0}, "timeout is 0"),
        ({"url": "http://host", "timeout": "900"}, "timeout is '900'"),
        ({"url": "http://host", "connect_timeout": float("nan")}, "connect_timeout is nan"),
        ({"url": "http://host", "max_response_bytes": True}, "max_response_bytes is True"),
    ],
)
async def test_a_bad_argument_is_named(arguments, said):
    with pytest.raises(SettingsError, match=f"HttpSession: .*{said}"):
        HttpSession(**arguments)


# The events of a stream


def last_event(pieces, max_bytes=1_000_000):
    event = LastEvent(max_bytes=max_bytes)
    for piece in pieces:
        event.feed(piece)
    return event.finish()


@pytest.mark.parametrize(
    ("stream", "last"),
    [
        (b"", None),
        (b"\n\n: comment\n\nevent: x\n\n", None),
        (b"data: 1\n\ndata:2\n\n", b"2"),
        (b"data: 1\n\ndata: 2\n\n: bye\n\nid: 3\n\n", b"2"),
        (b"data: [1,\ndata:  2]\n\n", b"[1,\n 2]"),
        (b"data\n\n", b""),
        (b"database: 1\n\n", None),
        (b"\xef\xbb\xbfdata: 1\n\n", b"1"),
        (b"\xef\xbb\xbf\ndata: 1\n\n", b"1"),
        (b"\xef\xbb\xbfdata: 1", b"1"),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\n", None),
        (b"\n\xef\xbb\xbfdata: 1\n\n", None),
        # A stream that was cut must not pass its last but one event for the result.
        (b"data: 1\n\ndata: {", b"{"),
    ],
)
@given(data=st.data())
def test_the_last_event_does_not_depend_on_pieces_or_line_ends(stream, last, data):
    stream = stream.replace(b"\n", data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert last_event(pieces) == last


def test_an_event_of_many_lines_counts_as_a_whole():
    pieces = [b"data\n"] * 100
    assert last_event(pieces, max_bytes=400) is not None
    with pytest.raises(EventTooLarge):
        last_event(pieces, max_bytes=399)
