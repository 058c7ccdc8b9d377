"""The trainer's side of a worker: the Gateway protocol over its control listener."""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx

from turnleaf.core import (
    ContractError,
    GatewayError,
    Key,
    Purpose,
    Trajectory,
    TrajectoryError,
)
from turnleaf.gateway._child import Child, child_process
from turnleaf.gateway._config import WorkerConfig
from turnleaf.gateway._watched import Requests

__all__ = ["GatewayClient", "RunningWorker", "run_worker", "running_worker"]

TIMEOUT = 30.0
"""Seconds that the control listener may take; closing a key takes at most a few."""


class WorkerSilentError(GatewayError):
    """A worker did not answer: it ended, or its reply was lost."""


class GatewayClient:
    """A `turnleaf.core.Gateway` that talks to one worker.

    base_url: what agents are told. Methods raise GatewayError when the worker cannot be reached
    or refuses.
    """

    def __init__(self, control_url: str, token: str, *, base_url: str) -> None:
        self.base_url = base_url
        self._http = httpx.AsyncClient(
            base_url=control_url,
            headers={"authorization": f"Bearer {token}"},
            # An abort closes the keys of a whole batch at once.
            limits=httpx.Limits(max_connections=None),
            timeout=TIMEOUT,
            trust_env=False,
            # The listener speaks plain HTTP: the certificates of authorities are not read, which
            # takes longer than all else here.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def open_key(
        self, *, name: str, sampling: Mapping[str, Any], purpose: Purpose, expires_in: float
    ) -> Key:
        """See `turnleaf.core.Gateway`."""
        body = {
            "name": name,
            "sampling": dict(sampling),
            "purpose": purpose,
            "expires_in": expires_in,
        }
        response = await self._request("POST", "/keys", json=body)
        try:
            return Key(**response.json())
        except (TypeError, ValueError):
            raise GatewayError("the gateway worker sent no key; is it another version?") from None

    async def close_key(self, key_id: str, *, aborted: bool = False) -> Trajectory:
        """See `turnleaf.core.Gateway`. Closing a key again returns the same trajectory."""
        params = {"aborted": "true" if aborted else "false"}
        try:
            response = await self._request("DELETE", f"/keys/{key_id}", params=params)
        except WorkerSilentError:
            # The reply may have been lost on its way; the worker still has the trajectory.
            response = await self._request("DELETE", f"/keys/{key_id}", params=params)
        try:
            return Trajectory.from_json(response.content)
        except TrajectoryError as error:
            raise GatewayError(f"the gateway worker sent no trajectory: {error}") from error

    async def close_all(self, purpose: Purpose) -> None:
        """See `turnleaf.core.Gateway`."""
        await self._request("DELETE", "/keys", params={"purpose": purpose})

    async def requests(self) -> Requests:
        """What agents, and whoever else knows their address, asked of the worker until now."""
        response = await self._request("GET", "/requests")
        return Requests.from_mapping(response.json())

    async def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise WorkerSilentError(
                f"the gateway worker at {self._http.base_url} did not answer {method} {path} "
                f"({type(error).__name__}: {error}); if it ended, its log on stderr says why"
            ) from error
        if response.is_success:
            return response
        raise GatewayError(
            f"the gateway worker refused {method} {path} with {response.status_code}: "
            f"{_message(response)}"
        )


@attrs.frozen(eq=False)
class RunningWorker:
    """A worker process that has announced itself."""

    gateway: GatewayClient
    _child: Child

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    async def ended(self) -> int:
        """Wait until the process ends, and return its exit code; negative for a signal."""
        return await self._child.wait()


@asynccontextmanager
async def run_worker(
    config: WorkerConfig, *, ready_timeout: float = 120.0
) -> AsyncIterator[GatewayClient]:
    """As `running_worker`, for whoever needs its gateway only."""
    async with running_worker(config, ready_timeout=ready_timeout) as worker:
        yield worker.gateway


@asynccontextmanager
async def running_worker(
    config: WorkerConfig, *, ready_timeout: float = 120.0
) -> AsyncIterator[RunningWorker]:
    """Run a worker process until the context is left; yields it once it is ready.

    ready_timeout: seconds; loading a tokenizer takes a few. Raises ContractError with the
    worker's own message when its configuration cannot work, GatewayError when it does not start.
    """
    async with child_process(
        "turnleaf.gateway", config.to_mapping(), ready_timeout=ready_timeout
    ) as child:
        if child.ready.get("version") != 1:
            raise ContractError(
                f"the gateway worker speaks control version {child.ready.get('version')!r}, this "
                "turnleaf 1: two versions are installed"
            )
        client = GatewayClient(
            child.ready["control_url"], config.control_token, base_url=child.ready["base_url"]
        )
        try:
            yield RunningWorker(client, child)
        finally:
            await client.aclose()


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
