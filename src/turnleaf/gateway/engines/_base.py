"""What an engine is to the gateway: token ids in, sampled ids with log-probabilities out."""

from collections.abc import Mapping
from typing import Any, Protocol

import anyio
import attrs

from turnleaf.core import EngineError, FinishReason, Logprobs, TokenIds, WeightSpan

__all__ = [
    "Engine",
    "EngineLost",
    "EngineReply",
    "EngineRequest",
    "EngineUnavailable",
    "UntrustedReply",
]


class EngineUnavailable(EngineError):
    """The engine could not be reached, or kept failing for the whole retry budget."""


class UntrustedReply(EngineError):
    """The engine's reply does not add up (counts that do not fit): nothing of it is recorded."""


class EngineLost(EngineError):
    """The call was stopped and the engine handed nothing back: what it sampled is lost."""


@attrs.frozen(eq=False)
class EngineRequest:
    """One call.

    turn_id: names the turn; each attempt sends `<turn_id>.<attempt>` as its rid, counted from 0.
    input_ids: int32[n], the whole prompt.
    sampling: SGLang sampling parameters, `max_new_tokens` included.
    routing_key: stable and not secret; keeps a rollout on one engine (`X-SMG-Routing-Key`).
    """

    turn_id: str
    input_ids: TokenIds
    sampling: Mapping[str, Any]
    routing_key: str


@attrs.frozen(eq=False)
class EngineReply:
    """What was sampled.

    output: int32[n]; logprobs: float32[n], one per output token, both read from the
    log-probability entries. matched: the stop string, or the id of the stop token, that ended it.
    """

    output: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason
    matched: str | int | None
    cached_tokens: int
    weight_versions: tuple[WeightSpan, ...]


class Engine(Protocol):
    """A client of one engine, or of the router in front of several."""

    async def generate(self, request: EngineRequest, *, stop: anyio.Event) -> EngineReply:
        """Sample one completion.

        When `stop` is set the call is aborted at the engine: the partial reply is returned with
        finish_reason "abort" if it arrives within half a second, else EngineLost is raised.
        Cancellation does the same and drops the reply.

        Raises EngineUnavailable, UntrustedReply or EngineLost.
        """
        ...

    async def check(self) -> None:
        """Raise EngineUnavailable, naming the address and the remedy, unless the engine answers."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...
