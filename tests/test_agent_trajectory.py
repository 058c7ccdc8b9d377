import contextlib
import socket
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from turnleaf.agent import trajectory
from turnleaf.core import ContractError, GatewayError, Trajectory, Turn

SECRET = "tl-secret-of-this-rollout"


def a_trajectory():
    return Trajectory(
        [
            Turn("a", 0, None, 0, [1, 2], [3], [-0.5], "stop"),
            Turn("b", 1, "a", 3, [4], [5, 6], [-0.25, -1.0], "length"),
        ]
    )


@contextlib.contextmanager
def gateway(body=b"", status=200, headers=()):
    """A gateway that gives everyone the same answer, and notes who asked for what."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **dict(headers)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            config = {
                "base_url": f"http://127.0.0.1:{server.server_port}/v1",
                "model_id": "m",
                "api_key": SECRET,
            }
            yield config, asked
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def raw_gateway(reply, *, pause=None):
    """A gateway that sends bytes, then waits for `pause` before it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65_536)
                connection.sendall(reply)
                if pause is not None:
                    pause.wait(30)

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        yield {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": SECRET}
        thread.join()


def refused(config, **arguments):
    """What is said; the secret is in no printed form of it."""
    with pytest.raises(GatewayError) as caught:
        trajectory(config, **arguments)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert len(str(caught.value)) < 800
    return str(caught.value)


@pytest.mark.parametrize("ending", ["", "/"])
def test_an_agent_gets_its_own_trajectory(ending):
    with gateway(a_trajectory().to_json()) as (config, asked):
        own = trajectory({**config, "base_url": config["base_url"] + ending})
    assert own == a_trajectory()
    assert own.leaves()[0].tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert own.turns[1].logprobs.dtype == np.float32
    assert asked == [("/v1/trajectory", f"Bearer {SECRET}")]


def test_a_chunked_answer_is_read_whole():
    body = a_trajectory().to_json()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:50], body[50:]))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with raw_gateway(head + chunks + b"0\r\n\r\n") as config:
        assert trajectory(config) == a_trajectory()


def test_the_environments_proxy_is_not_used(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with gateway(a_trajectory().to_json()) as (config, _):
        assert len(trajectory(config)) == 2


def test_a_key_that_is_not_known_says_what_may_be_wrong():
    with gateway(b"{}", 401) as (config, _):
        assert "closed, expired" in refused(config)


def test_an_address_that_is_no_gateways_is_named():
    with gateway(b"", 404) as (config, _):
        said = refused(config)
    assert said.startswith(f"{config['base_url']}/trajectory is not there (404)")


def test_another_status_is_reported_without_the_secret():
    with gateway(b"overloaded: " + SECRET.encode() + b"x" * 5000, 503) as (config, _):
        assert "status 503: overloaded: [api_key]xxx" in refused(config)


def test_a_redirect_is_not_followed():
    with gateway(a_trajectory().to_json()) as (elsewhere, asked):
        location = f"{elsewhere['base_url']}/trajectory"
        with gateway(b"", 307, {"Location": location}) as (config, _):
            assert "status 307" in refused(config)
    assert asked == []


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b'{"version": 999}', b"[" * 100_000, SECRET.encode(), b"\xff\xfe\x00"],
)
def test_what_is_no_trajectory_is_refused(body):
    with gateway(body) as (config, _):
        assert "did not answer with a trajectory" in refused(config)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"SSH-2.0-" + SECRET.encode() + b"\r\n",
    ],
)
def test_a_broken_answer_is_refused(reply):
    with raw_gateway(reply) as config:
        assert f"no trajectory from {config['base_url']}/trajectory" in refused(config)


def test_an_endless_answer_is_refused(monkeypatch):
    monkeypatch.setattr("turnleaf.agent._trajectory.MAX_BYTES", 1000)
    with gateway(b" " * 1001) as (config, _):
        assert "answered with more than 1000 bytes" in refused(config)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_a_gateway_that_hangs_runs_into_the_timeout(reply):
    pause = threading.Event()
    with raw_gateway(reply, pause=pause) as config:
        try:
            assert "timed out" in refused(config, timeout=0.1)
        finally:
            pause.set()


def test_an_answer_that_trickles_runs_into_the_timeout():
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while not done.wait(0.01):
                    connection.sendall(b" ")

        thread = threading.Thread(target=answer)
        thread.start()
        config = {"base_url": f"http://127.0.0.1:{listener.getsockname()[1]}", "api_key": SECRET}
        try:
            assert "no whole answer within 0.2 s" in refused(config, timeout=0.2)
        finally:
            done.set()
            thread.join()


def test_nobody_there_is_said_with_the_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": SECRET}
    said = refused(config)
    assert said.startswith(f"no trajectory from http://127.0.0.1:{port}/v1/trajectory: Connection")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"api_key": None}, "lacks api_key"),
        ({"api_key": ""}, "lacks api_key"),
        ({"base_url": None}, "lacks base_url"),
        ({"base_url": 7}, "lacks base_url"),
        ({"base_url": "127.0.0.1:80"}, "is no http"),
        ({"base_url": "ftp://host"}, "is no http"),
        ({"base_url": "http://host:99999"}, "is no http"),
        ({"api_key": f"{SECRET}\r\nX: y"}, "no HTTP header can carry"),
        ({"api_key": f"{SECRET} x"}, "no HTTP header can carry"),
        ({"api_key": f"{SECRET}ü"}, "no HTTP header can carry"),
    ],
)
def test_a_config_that_cannot_be_used_names_the_field(change, said):
    config = {"base_url": "http://127.0.0.1:1/v1", "api_key": SECRET, **change}
    with pytest.raises(ContractError, match=said) as caught:
        trajectory(config)
    assert SECRET not in str(caught.value)


def test_what_is_no_config_is_refused():
    with pytest.raises(ContractError, match=r"takes payload\['_config'\], a mapping, not a str"):
        trajectory("http://127.0.0.1:1/v1")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/ü", "http://127.0.0.1:1/a b", "http://x" * 40])
def test_an_address_that_cannot_be_asked_is_refused(url):
    assert "no trajectory from" in refused({"base_url": url, "api_key": SECRET})
