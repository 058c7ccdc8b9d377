"""Invocations that are run once, however often they are started."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
import attrs

from turnleaf.agent._envelope import completed, failed, unfinished
from turnleaf.agent._failures import failure_text
from turnleaf.agent._records import Records, record_name
from turnleaf.core import described, hidden, is_cancelled, is_interrupt, start_task

__all__ = ["Invocation", "Invocations"]

Value = TypeVar("Value")

Work = Callable[[], Awaitable[object]]
"""Runs the agent and returns its result."""

DISK_THREADS = 4


@attrs.define(eq=False)
class Invocation:
    """One that runs, or did until a moment ago.

    accepted: it has left its marker, or is over. over: it has a reply. task: runs it; nothing else
    holds on to it.
    """

    id: str
    name: str
    accepted: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    over: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    task: "asyncio.Task[None] | None" = attrs.field(default=None, init=False)
    _reply: bytes | None = attrs.field(default=None, init=False)

    @property
    def reply(self) -> bytes:
        """What a client is told now."""
        if self._reply is not None:
            return self._reply
        # Over without a reply: what the next process will say of it.
        return unfinished(self.id, "interrupted" if self.over.is_set() else "in_progress")

    def end(self, reply: bytes | None) -> None:
        self._reply = reply
        self.accepted.set()
        self.over.set()


@attrs.define(eq=False)
class Invocations:
    """Starts invocations and knows what became of them, by session id and invocation id.

    busy: entered while an invocation runs, until its reply is on disk; a reply is given to nobody
    before it is. max_result_bytes: of a reply; a larger one becomes an error.

    Belongs to one event loop. An invocation runs on when those who wait for it are gone.
    """

    records: Records
    max_result_bytes: int
    busy: Callable[[], AbstractContextManager[object]]
    logger: logging.Logger
    _running: dict[str, Invocation] = attrs.field(factory=dict, init=False)
    _disk: anyio.CapacityLimiter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # Not the threads of all others, which agents may have taken.
        self._disk = anyio.CapacityLimiter(DISK_THREADS)

    def start(
        self, session_id: str, invocation_id: str, work: Work, *, secret: str
    ) -> Invocation | None:
        """The invocation that runs, started unless it had been; None when it is over.

        secret: is in no error.
        """
        name = record_name(session_id, invocation_id)
        # Nothing here may wait: two starts at once would both find it unknown.
        if name not in self._running and name not in self.records:
            invocation = self._running[name] = Invocation(invocation_id, name)
            invocation.task = start_task(
                self._run(invocation, work, secret), name=f"invocation {invocation_id}"
            )
        return self._running.get(name)

    async def get(self, session_id: str, invocation_id: str, *, wait: float = 0.0) -> bytes:
        """The reply about an invocation, held back while it runs, for `wait` seconds at most."""
        name = record_name(session_id, invocation_id)
        if (invocation := self._running.get(name)) is not None:
            with anyio.move_on_after(wait):
                await invocation.over.wait()
            return invocation.reply
        if name not in self.records:
            return unfinished(invocation_id, "not_found")
        try:
            reply = await self._on_disk(self.records.read, name)
        except OSError as error:
            self.logger.error("Invocation %s: no reply to read: %s", invocation_id, error)
            return failed(
                invocation_id,
                f"{described(error)}\nThe invocation is over, but its result is no longer there.",
            )
        return unfinished(invocation_id, "interrupted") if reply is None else reply

    async def _run(self, invocation: Invocation, work: Work, secret: str) -> None:
        reply = None
        try:
            with self.busy():
                reply = await self._reply(invocation, work, secret)
        except Exception:
            self.logger.exception("Invocation %s ended without a reply", invocation.id)
        finally:
            if reply is None:
                self.records.interrupt(invocation.name)
            del self._running[invocation.name]
            invocation.end(reply)

    async def _reply(self, invocation: Invocation, work: Work, secret: str) -> bytes:
        try:
            await self._on_disk(self.records.begin, invocation.name)
        except OSError as error:
            self.logger.error("Invocation %s cannot be recorded: %s", invocation.id, error)
            # Unknown afterwards, so that another start may try it.
            return failed(
                invocation.id,
                f"{described(error)}\nThe invocation could not be recorded, and was not run.",
            )
        invocation.accepted.set()
        try:
            result = await work()
        except BaseException as error:
            if is_cancelled() or is_interrupt(error):
                raise
            text = failure_text(error, secret)
            self.logger.error("Invocation %s failed: %s", invocation.id, text)
            reply = failed(invocation.id, text)
        else:
            reply = await self._on_disk(self._encoded, invocation.id, result, secret)
        try:
            await self._on_disk(self.records.finish, invocation.name, reply)
        except OSError as error:
            self.logger.error("Invocation %s: no result is stored: %s", invocation.id, error)
            reply = failed(
                invocation.id, f"{described(error)}\nThe agent's result could not be stored."
            )
            await self._on_disk(self.records.remember, invocation.name, reply)
        return reply

    def _encoded(self, invocation_id: str, result: object, secret: str) -> bytes:
        try:
            reply = completed(invocation_id, result)
        except Exception as error:  # noqa: BLE001  # of foreign classes, too
            said = hidden(described(error), secret)
            text = f"{said}\nThe agent's result cannot be written as JSON."
            self.logger.error("Invocation %s: %s", invocation_id, text)
            return failed(invocation_id, text)
        if len(reply) > self.max_result_bytes:
            text = (
                f"ValueError: the agent's result has {len(reply)} bytes as JSON, more than "
                f"max_result_bytes ({self.max_result_bytes})"
            )
            self.logger.error("Invocation %s: %s", invocation_id, text)
            return failed(invocation_id, text)
        return reply

    async def _on_disk(self, function: Callable[..., Value], *arguments: object) -> Value:
        return await anyio.to_thread.run_sync(partial(function, *arguments), limiter=self._disk)
