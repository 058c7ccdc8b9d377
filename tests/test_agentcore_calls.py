import contextlib
import http.server
import socket
import ssl
import threading
from typing import get_args

import boto3
import botocore.exceptions
import pytest

from turnleaf.core import ContractError
from turnleaf.sessions._agentcore_calls import CallFailed, Kind, _failure, connect, invoke, stop
from turnleaf.sessions._invocation import ADVICE, DID_NOT_RUN
from turnleaf.sessions._reporting import Redaction

SECRET = "tl-secret-of-this-rollout"


def failure(error):
    failed = _failure(error, Redaction(SECRET))
    assert SECRET not in str(failed)
    return failed


def answered(status, code="SomeException"):
    response = {
        "Error": {"Code": code, "Message": f"said with {SECRET}"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return botocore.exceptions.ClientError(response, "InvokeAgentRuntime")


@pytest.fixture(scope="module")
def client():
    return boto3.client(
        "bedrock-agentcore",
        region_name="us-west-2",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )


# What the service model says an invocation can be answered with, and a proxy on the way.
STATUSES = {
    400: "refused",
    401: "refused",
    402: "full",
    403: "refused",
    404: "missing",
    409: "conflict",
    413: "refused",
    424: "agent",
    429: "throttled",
    500: "lost",
    502: "lost",
    503: "lost",
    504: "lost",
}


@pytest.mark.parametrize(("status", "kind"), STATUSES.items())
def test_an_answer_with_a_status_says_whether_the_agent_ran(status, kind):
    failed = failure(answered(status, "SomeException"))
    assert failed.kind == kind
    assert str(failed) == f"SomeException ({status}): said with [api_key]"


def test_every_error_of_the_service_model_is_in_the_table(client):
    model = client.meta.service_model
    for name in ("InvokeAgentRuntime", "StopRuntimeSession"):
        for shape in model.operation_model(name).error_shapes:
            assert shape.metadata["error"]["httpStatusCode"] in STATUSES


ADDRESS = {"endpoint_url": "http://127.0.0.1:1"}


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (botocore.exceptions.EndpointConnectionError(**ADDRESS, error="x"), "unreachable"),
        (botocore.exceptions.ConnectTimeoutError(**ADDRESS), "unreachable"),
        (botocore.exceptions.ProxyConnectionError(proxy_url="http://p"), "unreachable"),
        (
            caused(
                botocore.exceptions.SSLError(**ADDRESS, error="x"),
                ssl.SSLCertVerificationError(1, "certificate verify failed"),
            ),
            "unreachable",
        ),
        (botocore.exceptions.SSLError(**ADDRESS, error=ssl.SSLError(1, "bad mac")), "lost"),
        (
            caused(botocore.exceptions.HTTPClientError(error="x"), socket.gaierror(-2, "unknown")),
            "unreachable",
        ),
        (botocore.exceptions.ReadTimeoutError(**ADDRESS), "lost"),
        (botocore.exceptions.ConnectionClosedError(**ADDRESS), "lost"),
        (botocore.exceptions.ResponseStreamingError(error="x"), "lost"),
        (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), "lost"),
        (botocore.exceptions.HTTPClientError(error=f"x {SECRET}"), "lost"),
        (ConnectionResetError(104, "reset"), "lost"),
        (botocore.exceptions.CredentialRetrievalError(provider="p", error_msg="x"), "refused"),
        (botocore.exceptions.UnauthorizedSSOTokenError(), "refused"),
        (botocore.exceptions.ParamValidationError(report="x"), "refused"),
    ],
)
def test_an_exception_says_whether_the_agent_can_have_run(error, kind):
    assert failure(error).kind == kind


@pytest.mark.parametrize(
    "error",
    [
        botocore.exceptions.NoCredentialsError(),
        botocore.exceptions.PartialCredentialsError(provider="env", cred_var="x"),
    ],
)
def test_without_credentials_no_rollout_can_start(error):
    with pytest.raises(ContractError, match="give this process credentials of AWS"):
        failure(error)


@contextlib.contextmanager
def answering(status, body):
    """The address of an endpoint that answers everything so."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Tests print nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


TARGET = {"agentRuntimeArn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/a-1"}
UNREADABLE = [b"\xff", b"[]", b"[" * 100_000, b'{"code": []}']


@pytest.mark.parametrize("status", [429, 500])
@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: repr(body[:4]))
def test_a_reply_that_boto3_cannot_read_tells_nothing(monkeypatch, status, body):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with answering(status, body) as url:
        client = connect(
            "us-west-2", url, connect_timeout=3, read_timeout=3, connections=1, keep_alive=False
        )
        with pytest.raises(CallFailed, match="boto3 cannot read the reply") as invoked:
            invoke(client, TARGET, "s" * 40, b"{}", max_bytes=9, redaction=Redaction(SECRET))
        with pytest.raises(CallFailed, match="boto3 cannot read the reply") as stopped:
            stop(client, TARGET, "s" * 40)
        client.close()
    assert [invoked.value.kind, stopped.value.kind] == ["lost", "lost"]


def test_only_what_provably_did_not_run_is_repeated_and_every_failure_has_advice():
    assert sorted(DID_NOT_RUN) == ["conflict", "full", "throttled", "unreachable"]
    assert ADVICE.keys() == set(get_args(Kind))


def test_a_client_retries_nothing_by_itself(monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "5")
    monkeypatch.setenv("AWS_RETRY_MODE", "adaptive")
    client = connect(
        "us-west-2",
        "http://127.0.0.1:1",
        connect_timeout=3,
        read_timeout=4000,
        connections=1234,
        keep_alive=False,
    )
    config = client.meta.config
    assert config.retries == {"total_max_attempts": 1, "mode": "standard"}
    assert (config.connect_timeout, config.read_timeout) == (3, 4000)
    assert config.max_pool_connections == 1234
    assert client.meta.region_name == "us-west-2"


def test_a_profile_that_is_not_there_is_a_mistake_of_the_set_up(monkeypatch):
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(ContractError, match="no-such-profile"):
        connect(
            "us-west-2", None, connect_timeout=1, read_timeout=1, connections=1, keep_alive=True
        )


def test_a_call_that_failed_is_an_exception_with_a_text():
    with pytest.raises(CallFailed, match="because"):
        raise CallFailed("lost", "because")
