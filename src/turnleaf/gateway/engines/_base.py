"""What an engine is to the gateway: token ids in, sampled ids with log-probabilities out."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from turnleaf.core import (
    EngineError,
    FinishReason,
    Logprobs,
    ReplayArray,
    Speculation,
    TokenIds,
    WeightSpan,
)
from turnleaf.gateway.engines._stop import Stop

__all__ = [
    "PROBE",
    "Engine",
    "EngineLost",
    "EngineRefused",
    "EngineReply",
    "EngineRequest",
    "EngineUnavailable",
    "ReplayMissing",
    "TokenListener",
    "UntrustedReply",
    "WantedExperts",
    "wants_top_p_ids",
]

PROBE = "turnleaf-probe"
"""The routing key of probes, which begins their rids too: what they sample is no rollout's."""


class EngineUnavailable(EngineError):
    """The engine could not be reached, or kept failing for the whole retry budget."""


class EngineRefused(EngineError):
    """The engine refused the call (4xx), as it would again.

    said: its own words. They may quote the request, so that they are for who asked, not for logs.
    """

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


class UntrustedReply(EngineError):
    """The engine's reply does not add up (counts that do not fit): nothing of it is recorded."""


class ReplayMissing(UntrustedReply):
    """The reply lacks replay data that was asked for. fields: of `meta_info`, that are missing."""

    def __init__(self, message: str, fields: tuple[str, ...]) -> None:
        super().__init__(message)
        self.fields = fields


class EngineLost(EngineError):
    """The call was stopped and the engine handed nothing back: what it sampled is lost."""


@attrs.frozen
class WantedExperts:
    """Which routed experts a reply must carry.

    shape: (layers, top_k) of the model. start: the position of the first row that is needed, in
    prompt and output together; earlier ones are known.
    """

    shape: tuple[int, int]
    start: int = 0


@attrs.frozen(eq=False)
class EngineRequest:
    """One call.

    turn_id: names the turn. part: which call of the turn it is, when an engine interrupted earlier
        ones. Each attempt sends `<turn_id>.<part>.<attempt>` as its rid, counted from 0.
    input_ids: int32[n], the whole prompt.
    sampling: SGLang sampling parameters, `max_new_tokens` included. Where they ask for top-p's kept
        ids (`wants_top_p_ids`), the reply must have them.
    routing_key: stable and not secret; keeps a rollout on one engine (`X-SMG-Routing-Key`).
    experts: the routed experts that the reply must have; None asks for none.
    """

    turn_id: str
    input_ids: TokenIds
    sampling: Mapping[str, Any]
    routing_key: str
    experts: WantedExperts | None = None
    part: int = 0


def wants_top_p_ids(sampling: Mapping[str, Any]) -> bool:
    """Whether sampling parameters ask for the ids that top-p kept, as slime's SGLang reads it."""
    custom = sampling.get("custom_params")
    return isinstance(custom, Mapping) and bool(custom.get("return_top_p_token_ids"))


@attrs.frozen(eq=False)
class EngineReply:
    """What was sampled.

    output: int32[n]; logprobs: float32[n], one per output token, both read from the
    log-probability entries. matched: the stop string, or the id of the stop token, that ended it.
    routed_experts: [rows, layers, top_k] of the positions from the wanted start up to the last
    output token, which was not routed yet. top_p_ids, top_p_offsets: see `turnleaf.core.Replay`.
    All three are None where they were not asked for. Where nothing was sampled there are no kept
    ids, and after an abort no experts either.
    """

    output: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason
    matched: str | int | None
    cached_tokens: int
    weight_versions: tuple[WeightSpan, ...]
    routed_experts: ReplayArray | None = None
    top_p_ids: ReplayArray | None = None
    top_p_offsets: ReplayArray | None = None
    speculation: Speculation | None = None


TokenListener = Callable[[TokenIds], None]
"""Is told int32[n], n > 0: output ids, each once and in their order. Must not raise."""


class Engine(Protocol):
    """A client of one engine, or of the router in front of several."""

    async def generate(
        self,
        request: EngineRequest,
        *,
        stop: Stop,
        on_tokens: TokenListener | None = None,
    ) -> EngineReply:
        """Sample one completion.

        on_tokens: is told the output as it comes where the engine can stream it, else at the end.
        When a reply is returned it was told all of its output and nothing else; when an error is
        raised, what it was told is in no reply.

        When `stop` is set the call is aborted at the engine: the partial reply is returned with
        finish_reason "abort" if it arrives within half a second, else EngineLost is raised
        unless a stream had brought some of it.
        Cancellation does the same and drops the reply.

        Raises EngineRefused, EngineUnavailable, UntrustedReply or EngineLost.
        """
        ...

    async def check(self) -> None:
        """Raise EngineUnavailable, naming the address and the remedy, unless the engine answers."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...
