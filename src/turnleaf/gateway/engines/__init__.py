"""Clients of what samples tokens."""

from typing import TYPE_CHECKING

from turnleaf.gateway.engines._base import (
    PROBE,
    Engine,
    EngineLost,
    EngineRefused,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    ReplayMissing,
    TokenListener,
    UntrustedReply,
    WantedExperts,
    wants_top_p_ids,
)
from turnleaf.gateway.engines._continuing import ContinuingEngine
from turnleaf.gateway.engines._stop import Stop

if TYPE_CHECKING:
    from turnleaf.gateway.engines._sglang import SGLangEngine

__all__ = [
    "PROBE",
    "ContinuingEngine",
    "Engine",
    "EngineLost",
    "EngineRefused",
    "EngineReply",
    "EngineRequest",
    "EngineUnavailable",
    "ReplayMissing",
    "SGLangEngine",
    "Stop",
    "TokenListener",
    "UntrustedReply",
    "WantedExperts",
    "wants_top_p_ids",
]


def __getattr__(name: str) -> object:
    if name != "SGLangEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Late: a program that is an engine, or asks none, need not load its HTTP client.
    from turnleaf.gateway.engines._sglang import SGLangEngine

    return SGLangEngine
