"""One turn: from a chat request to recorded tokens and the reply that they spell."""

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import attrs
import numpy as np

from turnleaf.core import EngineError, Place, Replay, TokenIds, Turn, TurnTimings
from turnleaf.gateway._history import Conversation, Match
from turnleaf.gateway._http import BODY_LIMIT
from turnleaf.gateway._keys import Call, Record
from turnleaf.gateway.engines import (
    ContinuingEngine,
    Engine,
    EngineLost,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    UntrustedReply,
    WantedExperts,
)
from turnleaf.gateway.protocols import ChatRequest, Completion, RequestError
from turnleaf.gateway.rendering import Parsed, Rendered, Renderer, RenderError

__all__ = ["Prepared", "Turns", "ended"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

BYTES_PER_TOKEN = 64
"""Bytes of a request's body for each token of context: what no sensible history needs."""
LONG_TEXT = 20_000
"""Bytes of messages from which on they are rendered in a thread, not on the event loop."""
RETRY_AFTER = 2
"""Seconds that a client is told to wait while the engine has trouble."""


@attrs.frozen(eq=False)
class Prepared:
    """A request whose prompt is built.

    started: Unix time. began: the same moment by `time.monotonic`. prompt: int32[n], the whole
    prompt. shows_reasoning: it holds reasoning of earlier messages. max_new_tokens: the least of
    the agent's, the trainer's and what the context leaves.
    """

    turn_id: str
    index: int
    started: float
    began: float
    request: ChatRequest
    trained: bool
    conversation: Conversation
    match: Match | None
    prompt: TokenIds
    shows_reasoning: bool
    max_new_tokens: int


class Turns:
    """Builds prompts from tokens already sampled, calls the engine, and records what it samples.

    max_context_tokens: the most tokens that prompt and output may have together.
    routed_experts_shape: (layers, top_k) of the experts that every turn records; None for none.
    """

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        *,
        max_context_tokens: int,
        routed_experts_shape: tuple[int, int] | None = None,
    ) -> None:
        self._renderer = renderer
        self._engine = ContinuingEngine(engine)
        self._max_context_tokens = max_context_tokens
        self._experts_shape = routed_experts_shape
        self._one_at_a_time = anyio.Lock()

    @property
    def body_limit(self) -> int:
        """The most bytes that a request's body may have: far more than the context can hold."""
        return min(max(BYTES_PER_TOKEN * self._max_context_tokens, 2**20), BODY_LIMIT)

    async def prepare(
        self, record: Record, request: ChatRequest, call: Call, *, trained: bool
    ) -> Prepared:
        """Build the prompt of a request.

        Raises RequestError: 400 for messages that cannot be rendered and for a prompt that leaves
        no room in the context, 401 when the call is ended meanwhile.
        """
        index = record.take_index()
        if request.parse_calls and not self._renderer.can_parse_calls:
            raise RequestError(
                400,
                "tools: no parser reads this model's tool calls; set turnleaf.tool_call_parser, or "
                "send tool_choice 'none'",
                code="unsupported_parameter",
                param="tools",
            )
        self._warn_of_ignored(record, request)
        started, began = time.time(), time.monotonic()
        conversation = record.history.read(request.messages, request.tools)
        match = record.history.match(
            conversation, lambda turn_id: record.trajectory.turn(turn_id).excluded != "undelivered"
        )
        if match is not None:
            self.deliver(record, match.turn_id)  # what the agent sends back, it has received
        try:
            prompt = await self._prompt(record, request, call, conversation, match)
        except RenderError as error:
            raise RequestError(
                400, f"messages: {error}", code="invalid_value", param="messages"
            ) from None
        return Prepared(
            turn_id=f"chatcmpl-{secrets.token_hex(12)}",
            index=index,
            started=started,
            began=began,
            request=request,
            trained=trained,
            conversation=conversation,
            match=match,
            prompt=prompt.ids,
            shows_reasoning=prompt.shows_reasoning,
            max_new_tokens=self._max_new_tokens(record, request, len(prompt.ids)),
        )

    async def sample(self, record: Record, prepared: Prepared, call: Call) -> Completion:
        """Sample the turn and record it, as undelivered until `deliver` says otherwise.

        Raises RequestError when there is no reply to give: 401 when the key was closed meanwhile,
        424 when the engine refuses the call, 502 for a reply of it that does not add up, 503 when
        it has trouble.
        """
        began = time.monotonic()
        experts = self._wanted_experts(record, prepared.prompt)
        reply = await self._generate(record, prepared, call, experts)
        engine_seconds = time.monotonic() - began
        turn = self._turn(record, prepared, reply, call, engine_seconds, experts)
        record.trajectory.add(turn)
        if call.stop.is_set():
            raise ended()
        completion = self._completion(prepared, reply)
        record.history.record(
            prepared.conversation,
            prepared.match,
            completion.message,
            turn.id,
            shows_reasoning=prepared.shows_reasoning,
        )
        return completion

    def deliver(self, record: Record, turn_id: str) -> None:
        """The agent has the turn's reply."""
        if record.trajectory.turn(turn_id).excluded == "undelivered":
            record.trajectory.exclude(turn_id, None)
            record.asked.deliver(turn_id)

    async def _prompt(
        self,
        record: Record,
        request: ChatRequest,
        call: Call,
        conversation: Conversation,
        match: Match | None,
    ) -> Rendered:
        if match is not None:
            added = await self._added(record, request, call, match)
            if added is not None:
                path = record.trajectory.tokens_through(match.turn_id)
                shows_reasoning = match.carries_reasoning or added.shows_reasoning
                return Rendered(np.concatenate([path, added.ids]), shows_reasoning)
        messages = conversation.messages if match is None else [*match.past(), *match.new]
        render = partial(self._renderer.render, messages, request.tools, clock=record.clock)
        return await self._off_loop(call, conversation.size, render)

    async def _added(
        self, record: Record, request: ChatRequest, call: Call, match: Match
    ) -> Rendered | None:
        """What follows the matched turn's tokens; None when its path must be rendered anew."""
        # The renderer can tell what becomes of reasoning only where a user has spoken.
        if match.carries_reasoning and not match.asked:
            return None
        extend = partial(
            self._renderer.extend,
            match.reply,
            record.trajectory.turn(match.turn_id).output,
            match.new,
            request.tools,
            reasoning=match.carries_reasoning,
            clock=record.clock,
        )
        return await self._off_loop(call, match.new_size, extend)

    async def _off_loop(self, call: Call, size: int, render: Callable[[], Result]) -> Result:
        """Render a text of about `size` bytes, apart from the event loop if it is long."""
        if size < LONG_TEXT:
            return render()
        async with self._one_at_a_time:
            if call.stop.is_set():  # nobody waits for it any more
                raise ended()
            return await anyio.to_thread.run_sync(render)

    def _max_new_tokens(self, record: Record, request: ChatRequest, prompt_tokens: int) -> int:
        room = self._max_context_tokens - prompt_tokens
        if room < 1:
            raise RequestError(
                400,
                # Clients look for these words where they cannot see the code.
                f"This model's maximum context length is {self._max_context_tokens} tokens, and "
                f"the messages take {prompt_tokens}: the prompt is too long; shorten the history.",
                code="context_length_exceeded",
                param="messages",
            )
        limits = [room, request.max_tokens, record.sampling.get("max_new_tokens")]
        return min(limit for limit in limits if limit is not None)

    def _sampling(self, record: Record, prepared: Prepared) -> dict[str, Any]:
        sampling = {**record.sampling, "max_new_tokens": prepared.max_new_tokens}
        stop = sampling.get("stop") or []
        stop = [*([stop] if isinstance(stop, str) else stop), *prepared.request.stop]
        if stop:
            sampling["stop"] = stop
        return sampling

    def _place(self, record: Record, prompt: TokenIds) -> Place:
        return record.trajectory.locate(prompt, with_experts=self._experts_shape is not None)

    def _wanted_experts(self, record: Record, prompt: TokenIds) -> WantedExperts | None:
        """The rows that the turn may have to record: others may be recorded before it, which only
        makes them fewer."""
        if self._experts_shape is None:
            return None
        return WantedExperts(self._experts_shape, _first_row(self._place(record, prompt)))

    async def _generate(
        self, record: Record, prepared: Prepared, call: Call, experts: WantedExperts | None
    ) -> EngineReply:
        request = EngineRequest(
            turn_id=prepared.turn_id,
            input_ids=prepared.prompt,
            sampling=self._sampling(record, prepared),
            routing_key=record.name,
            experts=experts,
        )
        try:
            return await self._engine.generate(request, stop=call.stop)
        except EngineLost:
            raise ended() from None
        except UntrustedReply as error:
            logger.error("key %s: %s", record.id, error)
            raise RequestError(502, str(error), code="engine_reply") from None
        except EngineUnavailable as error:
            logger.error("key %s: %s", record.id, error)
            raise RequestError(
                503,
                "the engine is not available now",  # where it is concerns no agent
                code="engine_unavailable",
                retry_after=RETRY_AFTER,
            ) from None
        except EngineError as error:
            logger.error("key %s: %s", record.id, error)
            # A lasting refusal: clients do not try a 424 again.
            raise RequestError(424, str(error), code="engine_refused") from None

    def _turn(
        self,
        record: Record,
        prepared: Prepared,
        reply: EngineReply,
        call: Call,
        engine_seconds: float,
        experts: WantedExperts | None,
    ) -> Turn:
        place = self._place(record, prepared.prompt)
        if call.stop.is_set():
            excluded = call.reason
        else:
            excluded = "undelivered" if prepared.trained else "untrained"
        return Turn(
            id=prepared.turn_id,
            index=prepared.index,
            parent=place.parent,
            keep=place.keep,
            prompt=prepared.prompt[place.keep :],
            output=reply.output,
            logprobs=reply.logprobs,
            finish_reason=reply.finish_reason,
            weight_versions=reply.weight_versions,
            cached_tokens=reply.cached_tokens,
            timings=TurnTimings(
                started=prepared.started,
                engine=engine_seconds,
                total=time.monotonic() - prepared.began,
            ),
            replay=_replay(reply, place, experts),
            speculation=reply.speculation,
            excluded=excluded,
        )

    def _completion(self, prepared: Prepared, reply: EngineReply) -> Completion:
        request = prepared.request
        parsed = self._renderer.parse(
            reply.output,
            tools=request.tools if request.parse_calls else None,
            finish_reason=reply.finish_reason,
            matched=reply.matched,
            prompt=prepared.prompt,
        )
        if parsed.malformed:
            logger.info("turn %s: %d tool calls were malformed", prepared.turn_id, parsed.malformed)
        finish_reason: str = reply.finish_reason
        if finish_reason == "stop" and parsed.calls:
            finish_reason = "tool_calls"
        return Completion(
            id=prepared.turn_id,
            model=request.model,
            message=_message(parsed),
            finish_reason=finish_reason,
            prompt_tokens=len(prepared.prompt),
            completion_tokens=len(reply.output),
            cached_tokens=reply.cached_tokens,
        )

    def _warn_of_ignored(self, record: Record, request: ChatRequest) -> None:
        asked = [
            name
            for name, value in request.ignored.items()
            if name not in record.warned and record.sampling.get(name) != value
        ]
        if asked:
            record.warned.update(asked)
            logger.info(
                "key %s: the agent asks for %s; what the trainer samples with is used instead",
                record.id,
                ", ".join(asked),
            )


def _first_row(place: Place) -> int:
    """The position of the first row of routed experts that a turn at that place records."""
    return max(place.keep - 1, 0)


def _replay(reply: EngineReply, place: Place, experts: WantedExperts | None) -> Replay | None:
    rows = reply.routed_experts
    if rows is not None and experts is not None:
        rows = rows[_first_row(place) - experts.start :]
    if rows is None and reply.top_p_ids is None:
        return None
    return Replay(routed_experts=rows, top_p_ids=reply.top_p_ids, top_p_offsets=reply.top_p_offsets)


def _message(parsed: Parsed) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
    return message


def ended() -> RequestError:
    """What a call is answered whose key was closed meanwhile."""
    return RequestError(401, "the rollout of this API key has ended", code="invalid_api_key")
