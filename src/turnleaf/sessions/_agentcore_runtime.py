"""What all sessions of a process share: clients, room, pace and the keeper."""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from turnleaf.sessions import _agentcore_calls as calls
from turnleaf.sessions._agentcore_settings import RuntimeSettings
from turnleaf.sessions._keeping import Keeper
from turnleaf.sessions._reporting import Redaction
from turnleaf.sessions._room import Pace, Place, Room
from turnleaf.sessions._threads import DaemonThreads, call_in_daemon_thread

__all__ = ["Runtime", "call_in_thread", "runtime_of"]

POLL_READ_TIMEOUT = 90.0
"""Seconds without a byte of the reply to a poll, which an agent may hold for a while."""
STOP_READ_TIMEOUT = 10.0
"""The same of a stop. It is short enough for a stop that was lost to be repeated in time."""
STOPS_AT_ONCE = 64
"""What the 500 sessions of an abort, stopped twice each, take to be stopped within STOP_LIMIT."""

Returned = TypeVar("Returned")


@attrs.define(eq=False)
class Runtime:
    """A runtime of AgentCore, as the sessions of this process share it; of `runtime_of`.

    room: for as many sessions as may be active. poll_rate: of all polls together.
    speaks_envelope: whether an agent of this runtime has replied in the envelope.
    """

    settings: RuntimeSettings
    room: Room = attrs.field(init=False)
    poll_rate: Pace = attrs.field(init=False)
    speaks_envelope: bool = attrs.field(init=False, default=False)
    _new_rate: Pace = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.room = Room(self.settings.max_sessions)
        self.poll_rate = Pace(self.settings.polls_per_second)
        self._new_rate = Pace(self.settings.sessions_per_minute / 60)

    async def admit(self) -> Place:
        """Wait until another session may be made, and take its place."""
        place = await self.room.take()
        try:
            await self._new_rate.wait()
        except BaseException:
            place.let_go()
            raise
        return place

    def prepare(self) -> None:
        """Be ready to stop a session, before it is started. Raises RuntimeError when the system
        has no threads for it."""
        _shared.stopping.start()

    def start(self, session_id: str, body: bytes, redaction: Redaction) -> Any:
        """Invoke the agent in a new session; the process's keeper knows of it first. Blocks.

        Raises as `invoke` of `_agentcore_calls` does.
        """
        _shared.keeper.opened(session_id, client=self._address, target=self.settings.target)
        return self._invoke(self._starting_client, session_id, body, redaction)

    def ask(self, session_id: str, body: bytes, redaction: Redaction) -> Any:
        """Invoke the agent in a session again, for a short reply. Blocks; raises as `start`."""
        return self._invoke(self._polling_client, session_id, body, redaction)

    async def stop(self, session_id: str) -> bool:
        """End a session that was started; returns and raises as `stop` of `_agentcore_calls`."""

        def stop() -> bool:
            return calls.stop(self._stopping_client, self.settings.target, session_id)

        return await _shared.stopping.call(stop)

    async def forget(self, session_id: str) -> None:
        """Take note that a session that was to be started has ended, or was never made."""
        await _shared.stopping.call(lambda: _shared.keeper.closed(session_id))

    def _invoke(self, client: Any, session_id: str, body: bytes, redaction: Redaction) -> Any:
        return calls.invoke(
            client,
            self.settings.target,
            session_id,
            body,
            max_bytes=self.settings.max_response_bytes,
            redaction=redaction,
        )

    @property
    def _address(self) -> dict[str, str | None]:
        return {"region_name": self.settings.region, "endpoint_url": self.settings.endpoint_url}

    @property
    def _starting_client(self) -> Any:
        # A start that is lost is a rollout that is lost, hence its connection of its own.
        return self._client(
            self.settings.timeout, connections=self.settings.max_sessions, keep_alive=False
        )

    @property
    def _polling_client(self) -> Any:
        return self._client(POLL_READ_TIMEOUT, connections=self.settings.max_sessions)

    @property
    def _stopping_client(self) -> Any:
        return self._client(STOP_READ_TIMEOUT, connections=STOPS_AT_ONCE)

    def _client(self, read_timeout: float, *, connections: int, keep_alive: bool = True) -> Any:
        """botocore has timeouts for a whole client, hence one for each kind of call."""
        return _shared.client(
            region=self.settings.region,
            endpoint_url=self.settings.endpoint_url,
            connect_timeout=self.settings.connect_timeout,
            read_timeout=read_timeout,
            connections=connections,
            keep_alive=keep_alive,
        )


@attrs.define(eq=False)
class _Shared:
    """What there is once in a process."""

    keeper: Keeper = attrs.field(factory=Keeper)
    stopping: DaemonThreads = attrs.field(
        factory=lambda: DaemonThreads(STOPS_AT_ONCE, name=calls.THREAD_NAME)
    )
    _runtimes: dict[RuntimeSettings, Runtime] = attrs.field(init=False, factory=dict)
    _clients: dict[tuple[object, ...], Any] = attrs.field(init=False, factory=dict)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    _connecting: threading.Lock = attrs.field(init=False, factory=threading.Lock)

    def runtime(self, settings: RuntimeSettings) -> Runtime:
        with self._lock:
            if settings not in self._runtimes:
                self._runtimes[settings] = Runtime(settings)
            return self._runtimes[settings]

    def client(self, **arguments: Any) -> Any:
        key = tuple(arguments.values())
        # Not the lock that event loops take: AWS credentials may be long in coming.
        with self._connecting:
            if key not in self._clients:
                self._clients[key] = calls.connect(**arguments)
            return self._clients[key]


_shared = _Shared()


def runtime_of(settings: RuntimeSettings) -> Runtime:
    """The process's one runtime of these settings.

    Clients are shared by the runtimes of a region and endpoint whose timeouts and `max_sessions`
    are the same; there is one keeper.
    """
    return _shared.runtime(settings)


def _start_anew() -> None:
    """In a process that was forked: connections, places and the keeper are the parent's."""
    global _shared
    _shared = _Shared()


os.register_at_fork(after_in_child=_start_anew)


def call_in_thread(function: Callable[[], Returned], *, place: Place) -> "asyncio.Task[Returned]":
    """Call a function that blocks in a daemon thread, which holds `place` until it ends.

    Nothing can cut such a call short: cancel whoever waits for the task, not the task, which is
    done when the thread is.
    """
    place.hold()
    has_begun = False

    def work(_: None) -> Returned:
        nonlocal has_begun
        has_begun = True
        try:
            return function()
        finally:
            place.let_go()

    async def call() -> Returned:
        try:
            return await call_in_daemon_thread(work, None, name=calls.THREAD_NAME)
        except RuntimeError:
            if not has_begun:  # there are no more threads to be had
                place.let_go()
            raise

    task = asyncio.create_task(call(), name=calls.THREAD_NAME)
    task.add_done_callback(_heard)
    return task


def _heard(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        # Asking is what keeps asyncio from reporting it: who waited may be gone.
        task.exception()
