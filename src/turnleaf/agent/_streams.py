"""Agents that answer with events: the last one is the result."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from turnleaf.agent._envelope import encoded
from turnleaf.agent._failures import failure_text
from turnleaf.core import is_cancelled

__all__ = ["Events", "EventsResponse", "last_event"]

AHEAD = 16
"""So many events an agent may be ahead of a client that reads slowly."""


class Events:
    """The events of an invocation, on their way to the client that waits for it.

    opened: there are events rather than a result. Once the client is gone, they go nowhere.
    """

    def __init__(self) -> None:
        self.opened = anyio.Event()
        self._send: MemoryObjectSendStream[bytes] | None = None
        self._receive: MemoryObjectReceiveStream[bytes] | None = None
        self._is_abandoned = False

    def open(self) -> None:
        if not self._is_abandoned:
            self._send, self._receive = anyio.create_memory_object_stream[bytes](AHEAD)
            self.opened.set()

    async def send(self, value: object) -> None:
        """Pass on one event, as soon as there is room; raises what `encoded` does."""
        event = b"data: " + encoded(value) + b"\n\n"
        if self._send is not None:
            with contextlib.suppress(anyio.BrokenResourceError):
                await self._send.send(event)

    def end(self) -> None:
        if self._send is not None:
            self._send.close()

    def abandon(self) -> None:
        """No client reads them any more, or ever will."""
        self._is_abandoned = True
        if self._receive is not None:
            self._receive.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._receive is not None:
            async for event in self._receive:
                yield event


class EventsResponse(StreamingResponse):
    """An event stream that is abandoned however it ends.

    over: set when the result is there; the stream does not end before.
    """

    def __init__(self, events: Events, over: anyio.Event) -> None:
        super().__init__(self._body(events, over), media_type="text/event-stream")
        self._events = events

    @staticmethod
    async def _body(events: Events, over: anyio.Event) -> AsyncIterator[bytes]:
        async for event in events:
            yield event
        await over.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._events.abandon()


async def last_event(
    generator: Generator[Any, Any, Any] | AsyncGenerator[Any, Any], events: Events, secret: str
) -> object:
    """The last value of a generator, all of which go to `events`.

    Raises what the generator raises, after an event that says so, ValueError when it has no value
    and what `encoded` does when one is not JSON. secret: is not in that event.
    """
    last = None
    is_empty = True
    events.open()
    try:
        values = generator if isinstance(generator, AsyncGenerator) else _in_threads(generator)
        async with contextlib.aclosing(values):
            async for last in values:
                is_empty = False
                await events.send(last)
        if is_empty:
            raise ValueError("the agent's stream ended without an event")
    except BaseException as error:
        if not is_cancelled():
            # The event that `BedrockAgentCoreApp` sends.
            await events.send(
                {
                    "error": failure_text(error, secret),
                    "error_type": type(error).__name__,
                    "message": "An error occurred during streaming",
                }
            )
        raise
    finally:
        events.end()
    return last


async def _in_threads(generator: Generator[Any, Any, Any]) -> AsyncGenerator[Any, None]:
    try:
        async for value in iterate_in_threadpool(generator):
            yield value
    finally:
        generator.close()
