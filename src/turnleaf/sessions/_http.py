"""An agent behind an address that takes `POST /invocations`."""

import io
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import anyio

from turnleaf.core import AgentError, SessionBusy, SessionError, SettingsError
from turnleaf.sessions._exchange import ACCEPT, Result, encoded, new_session_id, positive
from turnleaf.sessions._reaching import is_nameless, reason
from turnleaf.sessions._reporting import BODY_BYTES, Redaction, kind_of

__all__ = ["HttpSession"]

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
BUSY = frozenset({429, 503})
UNAVAILABLE = frozenset({502, 504})
"""Statuses that speak of the way to the agent, not of the agent."""

CLOSE_SECONDS = 5.0


class HttpSession:
    """Runs an agent over HTTP, such as a `BedrockAgentCoreApp`; a RolloutSession.

    url: the agent's address, with or without `/invocations`.
    timeout: seconds for the whole invocation. connect_timeout: seconds to connect.
    max_response_bytes: of the result, or of one event when the agent streams.

    Leaving the session closes the connection, which is how the agent learns of it. Nothing is
    retried, redirected or sent through a proxy. Raises SettingsError for a bad argument.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 900.0,
        connect_timeout: float = 10.0,
        max_response_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self._url = _invocations_url(url)
        self._timeout = positive("HttpSession", "timeout", timeout)
        self._connect_timeout = positive("HttpSession", "connect_timeout", connect_timeout)
        self._max_response_bytes = int(
            positive("HttpSession", "max_response_bytes", max_response_bytes)
        )
        self._client: aiohttp.ClientSession | None = None
        self.session_id = new_session_id()
        """Names the session to the agent; not secret."""

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, resolver=aiohttp.ThreadedResolver()),
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=self._connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            # What is not decompressed cannot grow beyond the limit before it is counted.
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        client, self._client = self._client, None
        if client is not None:
            # Shielded: the connection is closed after cancellation, too.
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                await client.close()

    async def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Send `payload` to the agent and return its result: any JSON value, as it came.

        The result of an agent that streams is the data of its last event.

        Raises AgentError when the agent failed (a status that is not 2xx, or a last event that
        reports an error), SessionBusy when it has no room now, SessionError when it could not be
        reached, took too long or was cut off, BadResultError when its result is not JSON or too
        large, PayloadError when the payload cannot be written as JSON. No text holds the payload's
        API key.
        """
        if self._client is None:
            raise RuntimeError("an HttpSession runs agents inside `async with` only")
        redaction = Redaction.of(payload)
        headers = {
            "Accept": ACCEPT,
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            SESSION_HEADER: self.session_id,
        }
        try:
            async with self._client.post(
                self._url, data=io.BytesIO(encoded(payload)), headers=headers, allow_redirects=False
            ) as response:
                result: dict[str, Any] = await self._result(response, redaction)
                return result
        except (aiohttp.ClientError, OSError) as error:
            text = redaction.text(self._trouble(error))
            raise SessionError(text) from redaction.cause(error)

    async def _result(self, response: aiohttp.ClientResponse, redaction: Redaction) -> Any:
        if not 200 <= response.status < 300:
            raise await self._refusal(response, redaction)
        result = Result(
            response.content_type, max_bytes=self._max_response_bytes, redaction=redaction
        )
        async for piece in response.content.iter_any():
            result.feed(piece)
        return result.finish()

    async def _refusal(
        self, response: aiohttp.ClientResponse, redaction: Redaction
    ) -> AgentError | SessionError:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > BODY_BYTES:
                break
        said = redaction.body(bytes(body))
        text = f"the agent at {self._url} answered with status {response.status}: {said}"
        if response.status in (404, 405):
            text += " (is that the address of an agent that takes POST /invocations?)"
        if response.status in BUSY:
            return SessionBusy(text)
        return SessionError(text) if response.status in UNAVAILABLE else AgentError(text)

    def _trouble(self, error: aiohttp.ClientError | OSError) -> str:
        said = reason(error)
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return (
                f"no connection to the agent at {self._url} within {self._connect_timeout:g} s "
                "(connect_timeout); is the address right, and reachable from here?"
            )
        if is_nameless(error):
            return (
                f"no agent can be reached at {self._url}: its name is not known here; correct the "
                "backend's url, or this machine's name resolution"
            )
        if isinstance(error, aiohttp.ClientConnectorError):
            return (
                f"no agent can be reached at {self._url}: start one there (python agent.py PORT "
                f"for a BedrockAgentCoreApp), or correct the backend's url ({said})"
            )
        if isinstance(error, TimeoutError):
            return (
                f"the agent at {self._url} did not finish within {self._timeout:g} s; make it "
                "faster, or raise the backend's timeout"
            )
        return f"the connection to the agent at {self._url} broke before its result: {said}"


def _invocations_url(url: object) -> str:
    example = "give an address such as http://127.0.0.1:8080"
    if not isinstance(url, str):
        raise SettingsError(f"HttpSession: url is {kind_of(url)}; {example}")
    try:
        parts = urlsplit(url)
        # Reading and encoding it checks it.
        (parts.hostname or "").encode("idna")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    else:
        # A password would be printed with the settings, and a query has no place in an agent's.
        if parts.username is not None or parts.query or parts.fragment:
            raise SettingsError(
                f"HttpSession: url must have no user name, query or fragment; {example}"
            )
    if not valid or url.split() != [url]:
        raise SettingsError(f"HttpSession: url {url!r} is not the address of an agent; {example}")
    return url.rstrip("/").removesuffix("/invocations") + "/invocations"
