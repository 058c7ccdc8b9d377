"""Building the prompt of a request: from tokens that were sampled, where it continues a turn."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import attrs
import numpy as np

from turnleaf.core import TokenIds
from turnleaf.gateway._history import Conversation, Match
from turnleaf.gateway._keys import Call, Record, ended
from turnleaf.gateway._threads import in_thread
from turnleaf.gateway.protocols import ChatRequest
from turnleaf.gateway.rendering import Rendered, Renderer

__all__ = ["Prompt", "Prompts"]

Result = TypeVar("Result")

LONG_TEXT = 20_000
"""Bytes of messages from which on they are rendered in a thread, not on the event loop."""
LONG_BODY = 100_000
"""Bytes that a body adds to an earlier one from which on its messages are taken in in a thread: of
the shortest ones, a thousand take 10 ms."""
LONG_AT_ONCE = 4
"""So many long texts are taken in or rendered at once; further ones wait for one of them."""


@attrs.frozen(eq=False)
class Prompt:
    """What a turn is sampled from.

    ids: int32[n]. shows_reasoning: they hold reasoning of earlier messages. continues: the turn
    with all of whose tokens they begin; None where they were rendered anew.
    """

    ids: TokenIds
    shows_reasoning: bool
    continues: str | None


class Prompts:
    """Takes in what a request says, and renders what is new behind the tokens of the turn that it
    continues."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._threads = anyio.CapacityLimiter(LONG_AT_ONCE)

    async def read(self, record: Record, request: ChatRequest, call: Call) -> Conversation:
        """The request's messages.

        Raises RequestError as `History.read` does, and a 401 when the call is ended meanwhile.
        """
        read = partial(record.history.read, request.messages, request.tools)
        long = call.body is not None and call.body.new_size >= LONG_BODY
        return await self._off_loop(call, read) if long else read()

    async def build(
        self,
        record: Record,
        request: ChatRequest,
        call: Call,
        conversation: Conversation,
        match: Match | None,
    ) -> Prompt:
        """The whole prompt. match: the turn that the conversation continues, if any.

        Raises RenderError, and a 401 RequestError when the call is ended meanwhile.
        """
        if match is not None:
            added = await self._added(record, request, call, match)
            if added is not None:
                path = record.trajectory.tokens_through(match.turn_id)
                shows_reasoning = match.carries_reasoning or added.shows_reasoning
                return Prompt(np.concatenate([path, added.ids]), shows_reasoning, match.turn_id)
        messages = conversation.messages if match is None else [*match.past(), *match.new]
        render = partial(self._renderer.render, messages, request.tools, clock=record.clock)
        rendered = await self._rendered(call, conversation.size, render)
        return Prompt(rendered.ids, rendered.shows_reasoning, continues=None)

    async def _added(
        self, record: Record, request: ChatRequest, call: Call, match: Match
    ) -> Rendered | None:
        """What follows the matched turn's tokens; None when its path must be rendered anew."""
        # The renderer can tell what becomes of reasoning only where a user has spoken.
        if match.may_lose_reasoning and not match.asked:
            return None
        extend = partial(
            self._renderer.extend,
            match.reply,
            record.trajectory.turn(match.turn_id).output,
            match.new,
            request.tools,
            reasoning=match.may_lose_reasoning,
            clock=record.clock,
        )
        return await self._rendered(call, match.new_size, extend)

    async def _rendered(self, call: Call, size: int, render: Callable[[], Result]) -> Result:
        """Render a text of about `size` bytes, apart from the event loop if it is long."""
        return render() if size < LONG_TEXT else await self._off_loop(call, render)

    async def _off_loop(self, call: Call, work: Callable[[], Result]) -> Result:
        """Do it in a thread, so that nobody else waits for it."""

        def work_if_wanted() -> Result:
            if call.stop.is_set():  # nobody waits for it any more
                raise ended()
            return work()

        return await in_thread(work_if_wanted, limiter=self._threads)
