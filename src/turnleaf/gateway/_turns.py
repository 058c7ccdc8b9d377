"""One turn: from a chat request to recorded tokens and the reply that they spell."""

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import anyio
import attrs

from turnleaf.gateway._constraints import constrained_sampling
from turnleaf.gateway._http import BODY_LIMIT
from turnleaf.gateway._keys import Call, Record, ended
from turnleaf.gateway._prompts import Prompts
from turnleaf.gateway._replies import Tell, Telling, message_of
from turnleaf.gateway._sampler import Prepared, Sampler
from turnleaf.gateway.engines import Engine, EngineReply
from turnleaf.gateway.protocols import (
    TRAINER_OWNED,
    ChatRequest,
    Choice,
    Completion,
    ConstraintPolicy,
    RequestError,
    TokenLogprobs,
    not_supported,
)
from turnleaf.gateway.rendering import Renderer, RenderError

__all__ = ["Turns"]

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 64
"""Bytes of a request's body for each token of context: what no sensible history needs."""


class Turns:
    """Builds prompts from tokens already sampled, calls the engine, and records what it samples.

    max_context_tokens: the most tokens that prompt and output may have together.
    routed_experts_shape: (layers, top_k) of the experts that every turn records; None for none.
    constraints: what becomes of an agent's wish for replies of a certain form. enforces_calls:
    whether the engine is told of structural tags.
    """

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        *,
        max_context_tokens: int,
        routed_experts_shape: tuple[int, int] | None = None,
        constraints: ConstraintPolicy = "hint",
        enforces_calls: bool = True,
    ) -> None:
        self._renderer = renderer
        self._prompts = Prompts(renderer)
        self._sampler = Sampler(engine, routed_experts_shape)
        self._max_context_tokens = max_context_tokens
        self._constraints = constraints
        self._call_frame = renderer.call_frame if enforces_calls else None

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
            request.constraints,
            self._constraints,
            call_frame=self._call_frame,
            may_call=request.readable_tools is not None,
        )
        self._warn_of_ignored(record, request, constraint)
        started, began = time.time(), time.monotonic()
        conversation = await self._prompts.read(record, request, call)
        match = record.history.match(
            conversation, lambda turn_id: record.trajectory.turn(turn_id).excluded != "undelivered"
        )
        if match is not None:
            self.deliver(record, match.turn_id)  # what the agent sends back, it has received
        try:
            prompt = await self._prompts.build(record, request, call, conversation, match)
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
            prompt=prompt,
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
                failures.append(attrs.evolve(error))  # a traceback would hold on to the list
                call.end("undelivered")

        if len(prepared.turn_ids) == 1:
            await sample_one(0)
        else:
            async with anyio.create_task_group() as tasks:
                for at in range(len(prepared.turn_ids)):
                    tasks.start_soon(sample_one, at)
        if failures:
            raise failures.pop(0)
        return Completion(
            id=prepared.id,
            model=prepared.request.model,
            choices=tuple(choices[at] for at in sorted(choices)),
            prompt_tokens=len(prepared.prompt.ids),
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
        sampling = self._sampler.parameters(record, prepared)
        telling = None if tell is None else self._telling(prepared, at, sampling, tell)
        turn, reply = await self._sampler.sample(
            record,
            prepared,
            at,
            call,
            sampling=sampling,
            on_tokens=None if telling is None else telling.take,
        )
        record.add(turn, call)
        if call.stop.is_set():
            raise ended()
        choice = self._choice(record, prepared, at, reply, telling)
        repeated = record.history.record(
            prepared.conversation,
            prepared.match,
            choice.message,
            turn.id,
            shows_reasoning=prepared.prompt.shows_reasoning
            or self._renderer.holds_reasoning(choice.message),
        )
        if call.body is not None:
            record.bodies.keep(call.body, prepared.conversation.raw_messages)
        record.branches.note(turn.id, prepared.conversation, prepared.match, repeated=repeated)
        return choice, reply.cached_tokens

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

    def _telling(
        self, prepared: Prepared, at: int, sampling: Mapping[str, Any], tell: Tell
    ) -> Telling:
        reader = self._renderer.reader(
            tools=prepared.request.readable_tools,
            prompt=prepared.prompt.ids,
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
        parsed = self._renderer.parse(
            reply.output,
            tools=request.readable_tools,
            finish_reason=reply.finish_reason,
            matched=reply.matched,
            prompt=prepared.prompt.ids,
        )
        if telling is not None:
            telling.finish(parsed)
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
            logprobs=TokenLogprobs(self._renderer.token_texts(reply.output), reply.logprobs)
            if request.logprobs
            else None,
        )

    def _warn_of_ignored(
        self, record: Record, request: ChatRequest, constraint: Mapping[str, Any] | None
    ) -> None:
        if not request.ignored and not request.constraints.kinds:
            return
        asked = [
            name for name, value in request.ignored.items() if record.sampling.get(name) != value
        ]
        wished = {
            "what the trainer samples with is used instead": [
                name for name in asked if name in TRAINER_OWNED
            ],
            "it changes nothing": [name for name in asked if name not in TRAINER_OWNED],
            "it is a hint, and nothing is masked (turnleaf.constraints)": (
                request.constraints.kinds if constraint is None else ()
            ),
        }
        for effect, names in wished.items():
            record.metrics.ignored(names)
            new = [name for name in names if name not in record.warned]
            if new:
                record.warned.update(new)
                logger.info("%s: the agent asks for %s; %s", record.who, ", ".join(new), effect)
