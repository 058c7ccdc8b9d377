"""Calls that an engine interrupts for reasons of its own are continued, and are still one call."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import numpy as np

from turnleaf.core import Speculation
from turnleaf.gateway.engines._base import (
    Engine,
    EngineLost,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    TokenListener,
)
from turnleaf.gateway.engines._stop import Stop

__all__ = ["ContinuingEngine"]

logger = logging.getLogger(__name__)

PAUSE = 0.5
"""Seconds until an interrupted call goes on. A trainer that aborts its engines' calls because it
wants the rollouts to end closes their keys within that time; for a weight update it is nothing."""
_MASKS = ("ebnf", "json_schema", "regex", "structural_tag")
PATIENCE = 60.0
"""Seconds of interruptions without one new token after which a call is given up."""


@attrs.define(eq=False)
class ContinuingEngine:
    """An engine whose interruptions nobody sees.

    slime updates weights by aborting every running call. What was sampled until then stands: the
    call goes on behind it, with what is left of its limit, and the reply names the weights that
    each token was sampled with. A call that comes within PAUSE seconds after an interruption waits
    until then: a trainer that empties its engines would have to abort that one, too. A stream that
    broke is an interruption as well: tokens that somebody has seen are not sampled anew.

    A call whose tokens are masked by a grammar begins anew, since the engine would begin with the
    grammar again; it is told of at its end.
    """

    _engine: Engine
    _quiet_until: float = attrs.field(init=False, default=-math.inf)

    async def generate(
        self,
        request: EngineRequest,
        *,
        stop: Stop,
        on_tokens: TokenListener | None = None,
    ) -> EngineReply:
        """See `Engine.generate`; "abort" only when `stop` is set.

        Raises EngineUnavailable, too, when the engine goes on interrupting the call.
        """
        masked = any(request.sampling.get(mask) for mask in _MASKS)
        if masked and on_tokens is not None:
            whole = await self.generate(request, stop=stop)
            if len(whole.output):
                on_tokens(whole.output)
            return whole
        parts: list[EngineReply] = []
        calls = 0
        await self._quiet(stop)
        stalled_since: float | None = None
        while True:
            try:
                reply = await self._engine.generate(
                    _rest(request, parts, calls), stop=stop, on_tokens=on_tokens
                )
            except EngineLost:
                if not parts:
                    raise
                return _joined(parts)
            if len(reply.output):
                stalled_since = None
            elif stalled_since is None:
                stalled_since = anyio.current_time()
            if len(reply.output) or not parts:
                parts.append(reply)
            joined = _joined(parts, ending=reply)
            if reply.finish_reason != "abort" or stop.is_set():
                return joined
            if len(joined.output) >= request.sampling["max_new_tokens"]:
                return attrs.evolve(joined, finish_reason="length")
            if stalled_since is not None and anyio.current_time() - stalled_since > PATIENCE:
                raise EngineUnavailable(
                    f"turn {request.turn_id}: the engine has interrupted the call again and again "
                    f"for {PATIENCE:g} s without sampling anything"
                )
            logger.info(
                "turn %s: the engine interrupted the call after %d tokens; it goes on",
                request.turn_id,
                len(joined.output),
            )
            self._quiet_until = anyio.current_time() + PAUSE
            await self._quiet(stop)
            if stop.is_set():
                return joined
            calls += 1
            if masked:
                parts.clear()

    async def _quiet(self, stop: Stop) -> None:
        if math.isinf(self._quiet_until):
            return  # there was no interruption yet
        left = self._quiet_until - anyio.current_time()
        if left > 0:
            with anyio.move_on_after(left):
                await stop.wait()

    async def check(self) -> None:
        """See `Engine.check`."""
        await self._engine.check()

    async def aclose(self) -> None:
        """See `Engine.aclose`."""
        await self._engine.aclose()


def _rest(request: EngineRequest, parts: Sequence[EngineReply], calls: int) -> EngineRequest:
    """The request for what is still to be sampled behind the parts, after so many calls."""
    if not calls:
        return request
    request = attrs.evolve(request, part=request.part + calls)
    if not parts:
        return request
    sampled = sum(len(part.output) for part in parts)
    sampling: dict[str, Any] = {**request.sampling}
    sampling["max_new_tokens"] -= sampled
    if sampling.get("min_new_tokens"):
        sampling["min_new_tokens"] = max(sampling["min_new_tokens"] - sampled, 0)
    input_ids = np.concatenate([request.input_ids, *(part.output for part in parts)])
    experts = request.experts
    if experts is not None and sampled:
        experts = attrs.evolve(experts, start=len(input_ids) - 1)
    return attrs.evolve(
        request,
        input_ids=input_ids,
        sampling=sampling,
        experts=experts,
    )


def _joined(parts: Sequence[EngineReply], *, ending: EngineReply | None = None) -> EngineReply:
    """The parts as one reply that ends as the last one did.

    ending: the last one, where it added nothing and is none of the parts.
    """
    ending = parts[-1] if ending is None else ending
    told = [part for part in parts if len(part.output)]
    if len(told) < 2:
        only = told[0] if told else ending
        if only is ending:
            return only
        return attrs.evolve(only, finish_reason=ending.finish_reason, matched=ending.matched)
    return EngineReply(
        output=np.concatenate([part.output for part in told]),
        logprobs=np.concatenate([part.logprobs for part in told]),
        finish_reason=ending.finish_reason,
        matched=ending.matched,
        # What was sampled before it was interrupted is no part of the prompt.
        cached_tokens=told[0].cached_tokens,
        weight_versions=tuple(span for part in told for span in part.weight_versions),
        routed_experts=_rows([part.routed_experts for part in told]),
        top_p_ids=_rows([part.top_p_ids for part in told]),
        top_p_offsets=_offsets([part.top_p_offsets for part in told]),
        speculation=_speculation([part.speculation for part in told]),
    )


def _rows(arrays: Sequence[Any]) -> Any:
    return None if any(array is None for array in arrays) else np.concatenate(arrays)


def _offsets(arrays: Sequence[Any]) -> Any:
    if any(array is None for array in arrays):
        return None
    counts = [np.diff(array.astype(np.int64)) for array in arrays]
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(counts))])


def _speculation(counts: Sequence[Speculation | None]) -> Speculation | None:
    known = [count for count in counts if count is not None]
    if not known:
        return None
    return Speculation(
        accepted=sum(count.accepted for count in known),
        drafted=sum(count.drafted for count in known),
        verifications=sum(count.verifications for count in known),
    )
