"""Clients of what samples tokens."""

from turnleaf.gateway.engines._base import (
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
from turnleaf.gateway.engines._sglang import SGLangEngine

__all__ = [
    "ContinuingEngine",
    "Engine",
    "EngineLost",
    "EngineRefused",
    "EngineReply",
    "EngineRequest",
    "EngineUnavailable",
    "ReplayMissing",
    "SGLangEngine",
    "TokenListener",
    "UntrustedReply",
    "WantedExperts",
    "wants_top_p_ids",
]
