"""The sessions of an emulated runtime: from their provisioning to their end."""

import enum
import time
from collections.abc import Callable

import aiohttp
import anyio
import anyio.abc
import attrs

from turnleaf.adapters.mock._agentcore_containers import (
    Container,
    Process,
    SharedAgent,
    health,
)
from turnleaf.adapters.mock._agentcore_errors import ServiceFault
from turnleaf.adapters.mock._agentcore_log import AgentCoreLog, End, SessionRecord
from turnleaf.adapters.mock._agentcore_quotas import Bucket
from turnleaf.adapters.mock._agentcore_settings import AgentCoreSettings

__all__ = ["Session", "Sessions"]


class State(enum.Enum):
    """Of a session; one that has ended is forgotten."""

    PROVISIONING = enum.auto()
    ACTIVE = enum.auto()
    TORN_DOWN = enum.auto()


@attrs.define(eq=False)
class Session:
    """One that its id stands for now. running: the scopes of its invocations, whose cancellation
    cuts them. idle_since: on the loop's clock, when the last of them began or ended."""

    record: SessionRecord
    container: Container
    state: State = State.PROVISIONING
    running: set[anyio.CancelScope] = attrs.Factory(set)
    idle_since: float = attrs.Factory(anyio.current_time)
    watch: anyio.CancelScope = attrs.Factory(anyio.CancelScope)

    @property
    def crashed(self) -> bool:
        """Whether its container is gone against everybody's will."""
        return self.record.how in ("killed", "died", "failed")


class Sessions:
    """All of a runtime.

    http: towards agents. tasks: where sessions are watched, as long as the runtime is there.
    """

    def __init__(
        self,
        settings: AgentCoreSettings,
        log: AgentCoreLog,
        http: aiohttp.ClientSession,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._settings = settings
        self._log = log
        self._http = http
        self._tasks = tasks
        self._current: dict[str, Session] = {}
        self._new_sessions = Bucket(settings.new_sessions_per_minute, 60.0)
        self._start: Callable[[], Container]
        if settings.command is not None:
            command = settings.command
            self._start = lambda: Process.start(command)
        else:
            agent = SharedAgent((settings.agent_url or "").rstrip("/"))
            self._start = lambda: agent

    def get(self, session_id: str) -> Session | None:
        """The session that an id stands for now, None when it has ended or never began."""
        return self._current.get(session_id)

    def active(self) -> list[Session]:
        """Those that have not ended."""
        return [one for one in self._current.values() if one.state is not State.TORN_DOWN]

    def for_invocation(self, session_id: str) -> Session:
        """The active session of that id, or a new one that is yet to be provisioned.

        Raises ServiceFault in between, and where a quota leaves no room for another.
        """
        session = self._current.get(session_id)
        if session is not None:
            self._refuse_in_between(session)
            return session
        room = self._settings.active_sessions
        if room is not None and len(self._current) >= room:
            raise ServiceFault("ServiceQuotaExceededException", "maxVms limit exceeded")
        self._new_sessions.take("new sessions per minute")
        record = self._log.session_started(session_id)
        session = self._current[session_id] = Session(record, self._start())
        return session

    async def provision(self, session: Session) -> None:
        """Have the session's agent come up, unless it has. Raises ServiceFault when it does not,
        which ends the session."""
        if session.state is not State.PROVISIONING:
            return
        failure = "An error occurred when starting the runtime."
        with anyio.move_on_after(self._settings.initialization_timeout) as limit:
            async with anyio.create_task_group() as tasks:

                async def until_dead() -> None:
                    await session.container.ended()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(until_dead)
                await anyio.sleep(self._settings.provision_time)
                await session.container.until_ready(self._http)
                # Its end may have come in the same moment.
                if session.state is State.PROVISIONING:
                    session.state = State.ACTIVE
                tasks.cancel_scope.cancel()
        if session.state is State.ACTIVE:
            session.record.ready = time.time()
            self._tasks.start_soon(self._watch, session)
            return
        if limit.cancelled_caught:
            failure = "Runtime initialization time exceeded."
        await self.end(session, "failed")
        raise ServiceFault("RuntimeClientError", failure)

    async def stop(self, session_id: str) -> None:
        """End a session by request. Raises ServiceFault when there is none, or in between."""
        session = self._current.get(session_id)
        if session is None:
            raise ServiceFault("ResourceNotFoundException", f"Session {session_id} is not there")
        self._refuse_in_between(session)
        await self.end(session, "stopped")

    async def end(self, session: Session, how: End) -> None:
        """Cut the session's invocations and end its container; nothing when that has happened."""
        if session.state is State.TORN_DOWN:
            return
        session.state = State.TORN_DOWN
        session.record.how, session.record.ended = how, time.time()
        for scope in session.running:
            scope.cancel()
        session.watch.cancel()
        with anyio.CancelScope(shield=True):
            await session.container.kill()
        if self._settings.teardown_time:
            self._tasks.start_soon(self._forget_later, session)
        else:
            self._forget(session)

    async def end_all(self) -> None:
        """End every session, since the emulator does."""
        for session in self.active():
            await self.end(session, "lost")

    def _refuse_in_between(self, session: Session) -> None:
        if session.state is not State.ACTIVE:
            doing = "provisioned" if session.state is State.PROVISIONING else "torn down"
            raise ServiceFault(
                "RetryableConflictException", f"Session {session.record.id} is being {doing}"
            )

    def _forget(self, session: Session) -> None:
        if self._current.get(session.record.id) is session:
            del self._current[session.record.id]

    async def _forget_later(self, session: Session) -> None:
        await anyio.sleep(self._settings.teardown_time)
        self._forget(session)

    async def _watch(self, session: Session) -> None:
        with session.watch:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_when_dead, session)
                tasks.start_soon(self._end_when_time_is_over, session)

    async def _end_when_dead(self, session: Session) -> None:
        await session.container.ended()
        await self.end(session, "died")

    async def _end_when_time_is_over(self, session: Session) -> None:
        """End the session when it has been idle, or alive, for too long.

        A session is idle while nothing is invoked and its agent is not busy. An agent that was busy
        when last asked gets the whole idle time again, so that it is never reaped too early.
        """
        expires = anyio.current_time() + self._settings.max_lifetime
        idle_timeout = self._settings.idle_timeout
        was_busy = False
        while (now := anyio.current_time()) < expires:
            if session.running:
                session.idle_since = now
            elif now >= session.idle_since + idle_timeout:
                since = session.idle_since
                busy = await health(self._http, session.container) == "HealthyBusy"
                if not busy and not was_busy and session.idle_since == since:
                    await self.end(session, "reaped")
                    return
                was_busy = busy
                session.idle_since = anyio.current_time()
            await anyio.sleep_until(min(expires, session.idle_since + idle_timeout))
        await self.end(session, "expired")
