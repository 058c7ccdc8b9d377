"""AgentCore's data plane through boto3: blocking calls, and what became of them.

Nothing is retried here, botocore's own retries are off. What may be repeated depends on whether
the agent can have run:

    throttled    429                                       it did not
    full         402, too many active sessions             it did not
    conflict     409, the session is being made or ended   it did not
    unreachable  refused, or not connected in time         it did not
    lost         5xx, a timeout, a broken connection, a    nobody knows
                 reply that boto3 cannot read
    agent        424, the agent answered with 4xx or 5xx   it ran
    missing      404                                       there is no such runtime, or session
    refused      any other 4xx, no valid credentials       it did not, and will not
"""

import logging
import ssl
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import boto3
import botocore.config
import botocore.exceptions
import urllib3.exceptions

from turnleaf.core import ContractError, TurnleafError, described
from turnleaf.sessions._exchange import ACCEPT, Result
from turnleaf.sessions._reaching import chain, is_nameless, reason
from turnleaf.sessions._reporting import Redaction

__all__ = ["THREAD_NAME", "CallFailed", "Kind", "connect", "invoke", "stop"]

PIECE = 64 * 1024  # bytes that are read of a reply at once

Kind = Literal[
    "throttled", "full", "conflict", "unreachable", "lost", "agent", "missing", "refused"
]
KINDS: Mapping[int, Kind] = {
    402: "full",
    404: "missing",
    409: "conflict",
    424: "agent",
    429: "throttled",
}
UNREACHABLE = (
    botocore.exceptions.ConnectTimeoutError,
    botocore.exceptions.EndpointConnectionError,
    botocore.exceptions.ProxyConnectionError,
)
CREDENTIALS = (
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.ParamValidationError,
    botocore.exceptions.SSOError,
    botocore.exceptions.TokenRetrievalError,
)
NO_CREDENTIALS = (
    botocore.exceptions.NoAuthTokenError,
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.ProfileNotFound,
)
"""Set-up mistakes: botocore looks for credentials once for all calls of a client."""

THREAD_NAME = "turnleaf-agentcore"
"""Of the threads in which these calls are made."""

PAYLOAD_LOGGERS = ("botocore.endpoint", "botocore.parsers")
"""What logs requests and replies, with the keys in them, when it is told to log for debugging."""

FAILURES = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    urllib3.exceptions.HTTPError,
    OSError,
)


@attrs.define(eq=False)
class CallFailed(Exception):
    """A call that brought no reply. text: what AWS or the system said, without any secret."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text


def connect(
    region: str,
    endpoint_url: str | None,
    *,
    connect_timeout: float,
    read_timeout: float,
    connections: int,
    keep_alive: bool,
) -> Any:
    """A thread-safe client for so many calls at a time; with boto3's credentials and defaults.

    read_timeout: seconds without a byte of the reply. keep_alive: whether connections are used
    again: the other side may close one that idles just when a request goes out on it, and that
    request is lost. Raises ContractError when the set-up of AWS on this machine has a mistake.
    """
    _keep_payloads_out_of_logs()
    config = botocore.config.Config(
        region_name=region,
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=connections,
        tcp_keepalive=True,
    )
    try:
        client = boto3.client("bedrock-agentcore", endpoint_url=endpoint_url, config=config)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise ContractError(f"boto3 cannot be set up for AgentCore: {described(error)}") from None
    if not keep_alive:
        client.meta.events.register("before-send", _close_afterwards)
    return client


def invoke(
    client: Any,
    target: Mapping[str, str],
    session_id: str,
    body: bytes,
    *,
    max_bytes: int,
    redaction: Redaction,
) -> Any:
    """Send `body` to the agent in a session and return its reply: any JSON value.

    Raises CallFailed, ContractError without credentials, and as `Result` does.
    """
    try:
        reply = client.invoke_agent_runtime(
            **target,
            runtimeSessionId=session_id,
            payload=body,
            contentType="application/json",
            accept=ACCEPT,
        )
        stream = reply["response"]
        try:
            result = Result(reply.get("contentType", ""), max_bytes=max_bytes, redaction=redaction)
            for piece in stream.iter_chunks(PIECE):
                result.feed(piece)
        finally:
            stream.close()
    except TurnleafError:
        raise
    except Exception as error:  # noqa: BLE001  # botocore's parsers raise anything
        raise _failure(error, redaction) from None
    return result.finish()


def stop(client: Any, target: Mapping[str, str], session_id: str) -> bool:
    """End a session, and cut what runs in it; whether it was there. Gone is a success, too.

    Raises CallFailed, and ContractError without credentials.
    """
    try:
        client.stop_runtime_session(**target, runtimeSessionId=session_id)
    except Exception as error:  # noqa: BLE001  # botocore's parsers raise anything
        failure = _failure(error, Redaction(None))
        if failure.kind != "missing":
            raise failure from None
        return False
    return True


def _failure(error: Exception, redaction: Redaction) -> CallFailed:
    """What became of a call; raises ContractError when it is for want of credentials."""
    if isinstance(error, botocore.exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = error.response.get("Error", {})
        text = redaction.text(f"{said.get('Code')} ({status}): {said.get('Message')}")
        unsure: Kind = "refused" if 400 <= status < 500 else "lost"
        return CallFailed(KINDS.get(status, unsure), text)
    if isinstance(error, NO_CREDENTIALS):
        raise ContractError(
            f"AgentCoreHttpSession: {error}; give this process credentials of AWS: a role, a "
            "profile (AWS_PROFILE), or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, CREDENTIALS):
        return CallFailed("refused", redaction.text(described(error)))
    if not isinstance(error, FAILURES):
        text = f"boto3 cannot read the reply: {described(error)}"
        return CallFailed("lost", redaction.text(text))
    text = redaction.text(f"{type(error).__name__}: {reason(error)}")
    distrusted = any(isinstance(one, ssl.SSLCertVerificationError) for one in chain(error))
    if isinstance(error, UNREACHABLE) or is_nameless(error) or distrusted:
        return CallFailed("unreachable", text)
    return CallFailed("lost", text)


def _close_afterwards(request: Any, **_: object) -> None:
    request.headers["Connection"] = "close"


def _keep_payloads_out_of_logs() -> None:
    for name in PAYLOAD_LOGGERS:
        # The same function each time, which is added once.
        logging.getLogger(name).addFilter(_is_no_debugging)


def _is_no_debugging(record: logging.LogRecord) -> bool:
    return record.levelno > logging.DEBUG or record.threadName != THREAD_NAME
