"""An emulated AgentCore Runtime, for the unmodified boto3."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.abc
import orjson
from aiohttp import web

from turnleaf.adapters.mock._agentcore_app import MAX_PAYLOAD, DataPlane
from turnleaf.adapters.mock._agentcore_faults import AgentCoreFault, Faults
from turnleaf.adapters.mock._agentcore_log import AgentCoreLog
from turnleaf.adapters.mock._agentcore_sessions import Sessions
from turnleaf.adapters.mock._agentcore_settings import AgentCoreSettings
from turnleaf.gateway._serving import BACKLOG, KEEP_ALIVE

__all__ = ["AgentCoreEmulator", "serve_agentcore"]

_AGENT_KEEP_ALIVE = 2.0  # seconds; agents on uvicorn close connections after 5
_CLOSING_GRACE = 1.0  # seconds for handlers whose connections are closed


class AgentCoreEmulator:
    """One runtime; made by `serve_agentcore`. log: what has happened, before restarts too."""

    def __init__(
        self,
        settings: AgentCoreSettings,
        http: aiohttp.ClientSession,
        tasks: anyio.abc.TaskGroup,
        address: tuple[str, int],
    ) -> None:
        self.log = AgentCoreLog()
        self.arn = settings.arn
        self._tasks = tasks
        self._faults = Faults()
        self._sessions = Sessions(settings, self.log, http, tasks)
        data = DataPlane(settings, self._sessions, self._faults, self.log, http, tasks)
        app = web.Application(client_max_size=MAX_PAYLOAD)
        app.add_routes(
            [
                web.post("/runtimes/{arn}/invocations", data.invoke),
                web.post("/runtimes/{arn}/stopruntimesession", data.stop),
                web.get("/_emulator/log", self._get_log),
                web.post("/_emulator/faults", self._post_fault),
                web.delete("/_emulator/faults", self._delete_faults),
                web.post("/_emulator/sessions/{id}/kill", self._post_kill),
                web.post("/_emulator/restart", self._post_restart),
            ]
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE,
            shutdown_timeout=_CLOSING_GRACE,
        )
        self._address = address
        self._site: web.SockSite | None = None

    @property
    def endpoint_url(self) -> str:
        """What boto3 is given as `endpoint_url`."""
        host, port = self._address
        return f"http://{host}:{port}"

    @property
    def active_sessions(self) -> list[str]:
        """The ids of the sessions that have not ended."""
        return [session.record.id for session in self._sessions.active()]

    def inject(self, fault: AgentCoreFault) -> None:
        """Have something go wrong from now on."""
        self._faults.inject(fault)

    def clear_faults(self) -> None:
        """Have nothing go wrong any more."""
        self._faults.clear()

    async def kill(self, session_id: str) -> None:
        """Have the session's container die now. Raises KeyError when there is no such session."""
        session = self._sessions.get(session_id)
        if session is None:
            raise KeyError(session_id)
        await self._sessions.end(session, "killed")

    async def restart(self, *, keep_sessions: bool = False, down: float = 0.0) -> None:
        """Close all connections, and listen again after `down` seconds, at the same address.

        keep_sessions: whether the sessions are still there then. Those that are run on meanwhile,
        but what their agents answer to invocations of before is lost.
        """
        await self._close_connections()
        if not keep_sessions:
            await self._sessions.end_all()
        await anyio.sleep(down)
        await self._listen()

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        await self._runner.setup()
        try:
            await self._listen()
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._close_connections()
                await self._sessions.end_all()
                await self._runner.cleanup()
                # A request that was late may have begun another meanwhile.
                await self._sessions.end_all()

    async def _listen(self) -> None:
        listening = socket.create_server(self._address, backlog=BACKLOG)
        self._address = listening.getsockname()[:2]
        self._site = web.SockSite(self._runner, listening, backlog=BACKLOG)
        await self._site.start()

    async def _close_connections(self) -> None:
        if self._site is not None:
            await self._site.stop()
            self._site = None
        server = self._runner.server
        for connection in server.connections if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()

    async def _get_log(self, _: web.Request) -> web.Response:
        body = orjson.dumps(self.log.to_mapping())
        return web.Response(body=body, content_type="application/json")

    async def _post_fault(self, request: web.Request) -> web.Response:
        try:
            self.inject(AgentCoreFault(**await _object(request)))
        except (TypeError, ValueError) as error:
            return web.Response(status=400, text=str(error.args[0]))
        return web.Response(status=204)

    async def _delete_faults(self, _: web.Request) -> web.Response:
        self.clear_faults()
        return web.Response(status=204)

    async def _post_kill(self, request: web.Request) -> web.Response:
        try:
            await self.kill(request.match_info["id"])
        except KeyError:
            return web.Response(status=404)
        return web.Response(status=204)

    async def _post_restart(self, request: web.Request) -> web.StreamResponse:
        said = await _object(request)
        response = web.Response(status=202)
        # Before its connection is closed with all the others.
        await response.prepare(request)
        await response.write_eof()

        async def restart() -> None:
            await self.restart(**said)

        self._tasks.start_soon(restart)
        return response


@asynccontextmanager
async def serve_agentcore(
    settings: AgentCoreSettings, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[AgentCoreEmulator]:
    """Emulate a runtime in this event loop until the context is left, which ends its sessions.

    Raises OSError when the port is taken.
    """
    failure: BaseException | None = None
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_AGENT_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as http,
        anyio.create_task_group() as tasks,
    ):
        emulator = AgentCoreEmulator(settings, http, tasks, (host, port))
        try:
            async with emulator._serving():
                yield emulator
        except Exception as error:  # noqa: BLE001  # kept, so that no group wraps it
            failure = error
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _object(request: web.Request) -> dict[str, Any]:
    value: dict[str, Any] = orjson.loads(await request.read() or b"{}")
    return value
