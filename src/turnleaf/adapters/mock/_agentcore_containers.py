"""Where the agents of an emulated runtime run."""

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Literal, Protocol

import aiohttp
import anyio
import attrs

from turnleaf.gateway._child import ended

__all__ = ["Container", "Process", "SharedAgent", "health"]

logger = logging.getLogger(__name__)

Health = Literal["Healthy", "HealthyBusy"]

_PING_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_LOOK = 0.02  # seconds between two looks at whether an agent has come up

# The agent in the shell's place, in a process group of its own that ends when the emulator does,
# however that was: nobody else holds the other end of the pipe.
_GUARDED = 'exec 3<&0; { read -r _ <&3; kill -9 -$$; } & exec "$@" 3<&- </dev/null'


class Container(Protocol):
    """What runs a session's agent."""

    @property
    def url(self) -> str:
        """The agent's address."""
        ...

    async def until_ready(self, http: aiohttp.ClientSession) -> None:
        """Return as soon as the agent can be invoked."""
        ...

    async def ended(self) -> None:
        """Return when it has ended by itself."""
        ...

    async def kill(self) -> None:
        """End it at once."""
        ...


@attrs.frozen
class SharedAgent:
    """An agent that serves every session, and stays when one of them ends."""

    url: str

    async def until_ready(self, http: aiohttp.ClientSession) -> None:
        """Return at once: it has been running before."""

    async def ended(self) -> None:
        """Never return: nobody watches it."""
        await anyio.sleep_forever()

    async def kill(self) -> None:
        """Do nothing."""


@attrs.frozen(eq=False)
class Process:
    """An agent's process, which ends with this one at the latest."""

    url: str
    _process: "subprocess.Popen[bytes]"

    @classmethod
    def start(cls, command: Sequence[str]) -> "Process":
        """Run `command` with a free port appended. Raises OSError when there is no shell."""
        port = _free_port()
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDED, "agent", *command, str(port)],
            stdin=subprocess.PIPE,
            stdout=2,  # the emulator's stderr: its stdout is its parent's
            start_new_session=True,
        )
        return cls(f"http://127.0.0.1:{port}", process)

    @property
    def pid(self) -> int:
        """The agent's process id, and its group's."""
        return self._process.pid

    async def until_ready(self, http: aiohttp.ClientSession) -> None:
        """Return as soon as the agent answers `/ping`."""
        while await health(http, self) is None:  # noqa: ASYNC110  # nothing tells of it
            await anyio.sleep(_LOOK)

    async def ended(self) -> None:
        """Return when it has ended by itself."""
        await ended(self._process)

    async def kill(self) -> None:
        """End it and whatever it has started in its process group."""
        assert self._process.stdin is not None  # noqa: S101  # a pipe
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("the agent's process %d was gone already", self.pid)
        self._process.stdin.close()
        await ended(self._process)


async def health(http: aiohttp.ClientSession, container: Container) -> Health | None:
    """What the agent answers to `/ping`; None when it does not."""
    try:
        async with http.get(f"{container.url}/ping", timeout=_PING_TIMEOUT) as response:
            body = await response.json(content_type=None)
            status = body["status"] if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError):
        return None
    return "HealthyBusy" if status == "HealthyBusy" else "Healthy" if status else None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
