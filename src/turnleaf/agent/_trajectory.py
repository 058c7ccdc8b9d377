"""An agent's own trajectory, from the gateway."""

import contextlib
import http.client
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from turnleaf.core import ContractError, GatewayError, Trajectory, TrajectoryError

__all__ = ["trajectory"]

MAX_BYTES = 256 * 1024 * 1024
PIECE = 256 * 1024
EXCERPT = 500


def trajectory(config: Mapping[str, Any], *, timeout: float = 30.0) -> Trajectory:
    """What the model has sampled for this rollout so far.

    config: the payload's `_config`, of which `base_url` and `api_key` are read.
    timeout: seconds for the whole answer, and for each wait on the network.

    Blocks: an async agent calls it as `await asyncio.to_thread(trajectory, config)`. Standard
    library only, no proxies, no redirects, at most 256 MiB.

    Raises ContractError when `config` cannot be used, GatewayError when the gateway cannot be
    reached, refuses, or answers with something else. No message holds the key.
    """
    base_url, secret = _field(config, "base_url"), _field(config, "api_key")
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise ContractError("_config: api_key has characters that no HTTP header can carry")
    url = f"{base_url.rstrip('/')}/trajectory"
    status, body = _get(url, secret, timeout)
    if status == 200:
        try:
            return Trajectory.from_json(body)
        except TrajectoryError as error:
            raise GatewayError(
                f"{url} did not answer with a trajectory: {_excerpt(str(error), secret)}"
            ) from None
    if status == 401:
        raise GatewayError(
            f"{url} does not know the key (401): it is closed, expired or another rollout "
            "gateway's; read the trajectory while the rollout runs, with its own payload['_config']"
        )
    if status == 404:
        raise GatewayError(f"{url} is not there (404): is base_url that of payload['_config']?")
    raise GatewayError(
        f"{url} answered with status {status}: {_excerpt(body.decode('utf-8', 'replace'), secret)}"
    )


def _field(config: object, name: str) -> str:
    if not isinstance(config, Mapping):
        raise ContractError(
            f"trajectory() takes payload['_config'], a mapping, not a {type(config).__name__}"
        )
    value = config.get(name)
    if not isinstance(value, str) or not value:
        raise ContractError(f"_config lacks {name}; pass payload['_config'] as it came")
    return value


def _get(url: str, secret: str, timeout: float) -> tuple[int, bytes]:
    deadline = time.monotonic() + timeout
    body = bytearray()
    try:
        with contextlib.closing(_connection(url, timeout)) as connection:
            headers = {"Authorization": f"Bearer {secret}", "Accept": "application/json"}
            connection.request("GET", urlsplit(url).path, headers=headers)
            with connection.getresponse() as response:
                while piece := response.read1(PIECE):
                    body += piece
                    if len(body) > MAX_BYTES:
                        raise GatewayError(f"{url} answered with more than {MAX_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"no whole answer within {timeout:g} s")
                if response.length:
                    raise http.client.IncompleteRead(b"", response.length)
                return response.status, bytes(body)
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        said = _excerpt(f"{type(error).__name__}: {error}", secret)
        raise GatewayError(f"no trajectory from {url}: {said}") from None


def _connection(url: str, timeout: float) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    else:
        if host and parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout)
        if host and parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout)
    raise ContractError(f"_config: base_url leads to {url!r}, which is no http(s) address")


def _excerpt(text: str, secret: str) -> str:
    return " ".join(text.replace(secret, "[api_key]").split())[:EXCERPT]
