"""Having one turn sampled: from a prompt to the turn that is recorded."""

import hashlib
import logging
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from turnleaf.core import EngineError, Exclusion, Place, Replay, Turn, TurnTimings
from turnleaf.gateway._history import Conversation, Match
from turnleaf.gateway._keys import Call, Record, ended
from turnleaf.gateway._prompts import Prompt
from turnleaf.gateway.engines import (
    ContinuingEngine,
    Engine,
    EngineLost,
    EngineRefused,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    TokenListener,
    UntrustedReply,
    WantedExperts,
)
from turnleaf.gateway.protocols import ChatRequest, RequestError

__all__ = ["Prepared", "Sampler"]

logger = logging.getLogger(__name__)

RETRY_AFTER = 2
"""Seconds that a client is told to wait while the engine has trouble."""


@attrs.frozen(eq=False)
class Prepared:
    """A request whose prompt is built.

    turn_ids, indices: of the turns that are to be sampled from it. started: Unix time. began: the
    same moment by `time.monotonic`. max_new_tokens: the least of the agent's, the trainer's and
    what the context leaves. constraint: sampling parameters that mask what is sampled; None when
    nothing does.
    """

    turn_ids: tuple[str, ...]
    indices: range
    started: float
    began: float
    request: ChatRequest
    trained: bool
    conversation: Conversation
    match: Match | None
    prompt: Prompt
    max_new_tokens: int
    constraint: Mapping[str, Any] | None

    @property
    def id(self) -> str:
        """What the agent is told of it."""
        return self.turn_ids[0]

    @cached_property
    def digest(self) -> bytes:
        """Of the prompt's ids."""
        return hashlib.blake2b(self.prompt.ids.tobytes(), digest_size=16).digest()


class Sampler:
    """Calls the engine and makes a turn of its reply.

    experts_shape: (layers, top_k) of the experts that every turn records; None for none.
    """

    def __init__(self, engine: Engine, experts_shape: tuple[int, int] | None) -> None:
        self._engine = ContinuingEngine(engine)
        self._experts_shape = experts_shape

    def parameters(self, record: Record, prepared: Prepared) -> dict[str, Any]:
        """The sampling parameters of one more turn."""
        sampling = {**record.sampling, **(prepared.constraint or {})}
        sampling["max_new_tokens"] = prepared.max_new_tokens
        seed = sampling.get("sampling_seed")
        if seed is not None:
            # Equal prompts and equal seeds would be equal replies.
            sampling["sampling_seed"] = seed + record.sampled_from[prepared.digest]
            record.sampled_from[prepared.digest] += 1
        stop = sampling.pop("stop", None) or []  # None, as absent, is none
        stop = [*([stop] if isinstance(stop, str) else stop), *prepared.request.stop]
        if stop:
            sampling["stop"] = stop
        return sampling

    def _place(self, record: Record, prompt: Prompt) -> Place:
        return record.trajectory.locate(
            prompt.ids, along=prompt.continues, with_experts=self._experts_shape is not None
        )

    def _wanted_experts(self, record: Record, prompt: Prompt) -> WantedExperts | None:
        """The rows that the turn may have to record: others may be recorded before it, which only
        makes them fewer."""
        if self._experts_shape is None:
            return None
        return WantedExperts(self._experts_shape, _first_row(self._place(record, prompt)))

    async def sample(
        self,
        record: Record,
        prepared: Prepared,
        at: int,
        call: Call,
        *,
        sampling: Mapping[str, Any],
        on_tokens: TokenListener | None,
    ) -> tuple[Turn, EngineReply]:
        """Sample the turn at that place among those of the request; it is not recorded yet.

        Raises RequestError as `Turns.sample` does.
        """
        began = time.monotonic()
        experts = self._wanted_experts(record, prepared.prompt)
        reply = await self._generate(
            record, prepared, at, call, sampling=sampling, experts=experts, on_tokens=on_tokens
        )
        engine_seconds = time.monotonic() - began
        return self._turn(record, prepared, at, reply, call, engine_seconds, experts), reply

    async def _generate(
        self,
        record: Record,
        prepared: Prepared,
        at: int,
        call: Call,
        *,
        sampling: Mapping[str, Any],
        experts: WantedExperts | None,
        on_tokens: TokenListener | None,
    ) -> EngineReply:
        request = EngineRequest(
            turn_id=prepared.turn_ids[at],
            input_ids=prepared.prompt.ids,
            sampling=sampling,
            routing_key=record.name,
            experts=experts,
        )
        try:
            return await self._engine.generate(request, stop=call.stop, on_tokens=on_tokens)
        except EngineLost:
            raise ended() from None
        except UntrustedReply as error:
            logger.error("%s: %s", record.who, error)
            raise RequestError(502, str(error), code="engine_reply") from None
        except EngineUnavailable as error:
            logger.error("%s: %s", record.who, error)
            raise RequestError(
                503,
                "the engine is not available now",  # where it is concerns no agent
                code="engine_unavailable",
                retry_after=RETRY_AFTER,
            ) from None
        except EngineError as error:
            logger.error("%s: %s", record.who, error)
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
            prompt=prepared.prompt.ids[place.keep :],
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
