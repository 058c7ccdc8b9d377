"""One turn: from a chat request to recorded tokens and the reply that they spell."""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import attrs
import numpy as np

from turnleaf.core import EngineError, Exclusion, Place, Replay, TokenIds, Turn, TurnTimings
from turnleaf.gateway._constraints import ConstraintPolicy, constrained_sampling
from turnleaf.gateway._history import Conversation, Match
from turnleaf.gateway._http import BODY_LIMIT
from turnleaf.gateway._keys import Call, Record
from turnleaf.gateway._replies import Tell, Telling, message_of
from turnleaf.gateway.engines import (
    ContinuingEngine,
    Engine,
    EngineLost,
    EngineRefused,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    UntrustedReply,
    WantedExperts,
)
from turnleaf.gateway.protocols import (
    ChatRequest,
    Choice,
    Completion,
    RequestError,
    TokenLogprob,
    not_supported,
)
from turnleaf.gateway.rendering import Rendered, Renderer, RenderError

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

    turn_ids, indices: of the turns that are to be sampled from it. started: Unix time. began: the
    same moment by `time.monotonic`. prompt: int32[n], the whole prompt. shows_reasoning: it holds
    reasoning of earlier messages. max_new_tokens: the least of the agent's, the trainer's and what
    the context leaves. constraint: sampling parameters that mask what is sampled; None when nothing
    does.
    """

    turn_ids: tuple[str, ...]
    indices: range
    started: float
    began: float
    request: ChatRequest
    trained: bool
    conversation: Conversation
    match: Match | None
    prompt: TokenIds
    shows_reasoning: bool
    max_new_tokens: int
    constraint: Mapping[str, Any] | None

    @property
    def id(self) -> str:
        """What the agent is told of it."""
        return self.turn_ids[0]


class Turns:
    """Builds prompts from tokens already sampled, calls the engine, and records what it samples.

    max_context_tokens: the most tokens that prompt and output may have together.
    routed_experts_shape: (layers, top_k) of the experts that every turn records; None for none.
    constraints: what becomes of an agent's wish for replies of a certain form.
    """

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        *,
        max_context_tokens: int,
        routed_experts_shape: tuple[int, int] | None = None,
        constraints: ConstraintPolicy = "hint",
    ) -> None:
        self._renderer = renderer
        self._engine = ContinuingEngine(engine)
        self._max_context_tokens = max_context_tokens
        self._experts_shape = routed_experts_shape
        self._constraints = constraints
        self._one_at_a_time = anyio.Lock()

    @property
    def body_limit(self) -> int:
        """The most bytes that a request's body may have: far more than the context can hold."""
        return min(max(BYTES_PER_TOKEN * self._max_context_tokens, 2**20), BODY_LIMIT)

    async def prepare(
        self, record: Record, request: ChatRequest, call: Call, *, trained: bool
    ) -> Prepared:
        """Build the prompt of a request.

        Raises RequestError: 400 for messages that cannot be rendered, for a prompt that leaves no
        room in the context or the rollout's limits and for constraints that are refused, 401 when
        the call is ended meanwhile.
        """
        indices = record.take_indices(request.n)
        if request.parse_calls and not self._renderer.can_parse_calls:
            raise RequestError(
                400,
                "tools: no parser reads this model's tool calls; set turnleaf.tool_call_parser, or "
                "send tool_choice 'none'",
                code="unsupported_parameter",
                param="tools",
            )
        constraint = constrained_sampling(
            request.constraints, self._constraints, self._renderer.call_frame
        )
        self._warn_of_ignored(record, request, constraint)
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
        if constraint is not None and self._renderer.opens_reasoning(prompt.ids):
            raise not_supported(
                request.constraints.fields[0],
                "it cannot be enforced in a reply that begins inside of reasoning",
            )
        turn_id = f"chatcmpl-{secrets.token_hex(12)}"
        return Prepared(
            turn_ids=(turn_id, *(f"{turn_id}-{at}" for at in range(1, request.n))),
            indices=indices,
            started=started,
            began=began,
            request=request,
            trained=trained,
            conversation=conversation,
            match=match,
            prompt=prompt.ids,
            shows_reasoning=prompt.shows_reasoning,
            max_new_tokens=self._max_new_tokens(record, request, len(prompt.ids)),
            constraint=constraint,
        )

    async def sample(
        self, record: Record, prepared: Prepared, call: Call, tell: Tell | None = None
    ) -> Completion:
        """Sample the turns and record them, as undelivered until `deliver` says otherwise.

        tell: is told of each message, as soon as the engine can tell, and of all of it in the end.

        Raises RequestError when there is no reply to give: 401 when the key was closed meanwhile,
        424 when the engine refuses the call, 502 for a reply of it that does not add up, 503 when
        it has trouble. When one of the turns fails, the others are ended.
        """
        choices: dict[int, Choice] = {}
        cached_tokens: dict[int, int] = {}
        failures: list[RequestError] = []

        async def sample_one(at: int) -> None:
            try:
                choices[at], cached_tokens[at] = await self._sample_one(
                    record, prepared, at, call, tell
                )
            except RequestError as error:
                failures.append(error)
                call.end("undelivered")

        async with anyio.create_task_group() as tasks:
            for at in range(len(prepared.turn_ids)):
                tasks.start_soon(sample_one, at)
        for failure in failures:
            raise failure
        return Completion(
            id=prepared.id,
            model=prepared.request.model,
            choices=tuple(choices[at] for at in sorted(choices)),
            prompt_tokens=len(prepared.prompt),
            cached_tokens=cached_tokens[0],
        )

    def deliver(self, record: Record, *turn_ids: str) -> None:
        """The agent has the turns' replies."""
        for turn_id in turn_ids:
            record.deliver(turn_id)

    async def _sample_one(
        self, record: Record, prepared: Prepared, at: int, call: Call, tell: Tell | None
    ) -> tuple[Choice, int]:
        """Sample one of the turns: its reply, and how many tokens the engine had cached."""
        began = time.monotonic()
        experts = self._wanted_experts(record, prepared.prompt)
        sampling = self._sampling(record, prepared)
        telling = None if tell is None else self._telling(prepared, at, sampling, tell)
        reply = await self._generate(record, prepared, at, call, sampling, experts, telling)
        engine_seconds = time.monotonic() - began
        turn = self._turn(record, prepared, at, reply, call, engine_seconds, experts)
        record.add(turn, call)
        if call.stop.is_set():
            raise ended()
        choice = self._choice(record, prepared, at, reply, telling)
        repeated = record.history.record(
            prepared.conversation,
            prepared.match,
            choice.message,
            turn.id,
            shows_reasoning=prepared.shows_reasoning,
        )
        record.branches.note(turn.id, prepared.conversation, prepared.match, repeated=repeated)
        return choice, reply.cached_tokens

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
        limits = [
            room,
            request.max_tokens,
            record.sampling.get("max_new_tokens"),
            record.limits.tokens_left(record.sampled_tokens, choices=request.n),
        ]
        return min(limit for limit in limits if limit is not None)

    def _sampling(self, record: Record, prepared: Prepared) -> dict[str, Any]:
        sampling = {**record.sampling, **(prepared.constraint or {})}
        sampling["max_new_tokens"] = prepared.max_new_tokens
        seed = sampling.get("sampling_seed")
        if seed is not None:
            # Equal prompts and equal seeds would be equal replies.
            digest = hashlib.blake2b(prepared.prompt.tobytes(), digest_size=16).digest()
            sampling["sampling_seed"] = seed + record.sampled_from[digest]
            record.sampled_from[digest] += 1
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
        self,
        record: Record,
        prepared: Prepared,
        at: int,
        call: Call,
        sampling: Mapping[str, Any],
        experts: WantedExperts | None,
        telling: Telling | None,
    ) -> EngineReply:
        request = EngineRequest(
            turn_id=prepared.turn_ids[at],
            input_ids=prepared.prompt,
            sampling=sampling,
            routing_key=record.name,
            experts=experts,
        )
        try:
            return await self._engine.generate(
                request, stop=call.stop, on_tokens=None if telling is None else telling.take
            )
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
            said = f": {error.said}" if isinstance(error, EngineRefused) else ""
            # A lasting refusal: clients do not try a 424 again.
            raise RequestError(424, f"{error}{said}", code="engine_refused") from None

    def _turn(
        self,
        record: Record,
        prepared: Prepared,
        at: int,
        reply: EngineReply,
        call: Call,
        engine_seconds: float,
        experts: WantedExperts | None,
    ) -> Turn:
        place = self._place(record, prepared.prompt)
        excluded: Exclusion
        if call.stop.is_set():
            excluded = call.reason
        else:
            excluded = _excluded(prepared)
        return Turn(
            id=prepared.turn_ids[at],
            index=prepared.indices[at],
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

    def _telling(
        self, prepared: Prepared, at: int, sampling: Mapping[str, Any], tell: Tell
    ) -> Telling:
        reader = self._renderer.reader(
            tools=prepared.request.readable_tools,
            prompt=prepared.prompt,
            stop=sampling.get("stop", ()),
        )
        return Telling(tell, reader, at, prepared.turn_ids[at])

    def _choice(
        self,
        record: Record,
        prepared: Prepared,
        at: int,
        reply: EngineReply,
        telling: Telling | None,
    ) -> Choice:
        request = prepared.request
        if telling is not None:
            parsed = telling.finish(reply)
        else:
            parsed = self._renderer.parse(
                reply.output,
                tools=request.readable_tools,
                finish_reason=reply.finish_reason,
                matched=reply.matched,
                prompt=prepared.prompt,
            )
        if parsed.malformed:
            record.metrics.malformed(parsed.malformed)
            turn_id = prepared.turn_ids[at]
            logger.info("turn %s: %d tool calls were malformed", turn_id, parsed.malformed)
        finish_reason: str = reply.finish_reason
        if finish_reason == "stop" and parsed.calls:
            finish_reason = "tool_calls"
        return Choice(
            turn_id=prepared.turn_ids[at],
            message=message_of(parsed, prepared.turn_ids[at]),
            finish_reason=finish_reason,
            completion_tokens=len(reply.output),
            logprobs=self._token_logprobs(reply) if request.logprobs else None,
        )

    def _token_logprobs(self, reply: EngineReply) -> list[TokenLogprob]:
        texts = self._renderer.token_texts(reply.output)
        return [
            TokenLogprob(text, logprob)
            for text, logprob in zip(texts, reply.logprobs.tolist(), strict=True)
        ]

    def _warn_of_ignored(
        self, record: Record, request: ChatRequest, constraint: Mapping[str, Any] | None
    ) -> None:
        asked = [
            name for name, value in request.ignored.items() if record.sampling.get(name) != value
        ]
        if constraint is None:
            asked += request.constraints.fields
        record.metrics.ignored(asked)
        asked = [name for name in asked if name not in record.warned]
        if asked:
            record.warned.update(asked)
            logger.info(
                "key %s: the agent asks for %s; what the trainer samples with is used instead",
                record.id,
                ", ".join(asked),
            )


def _excluded(prepared: Prepared) -> Exclusion:
    """Why a turn is not trained whose reply has not been delivered yet."""
    if not prepared.trained:
        return "untrained"
    return "undelivered" if prepared.constraint is None else "constrained"


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


def ended() -> RequestError:
    """What a call is answered whose key was closed meanwhile."""
    return RequestError(401, "the rollout of this API key has ended", code="invalid_api_key")
