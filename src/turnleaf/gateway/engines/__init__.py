"""Clients of what samples tokens."""

from turnleaf.gateway.engines._base import (
    Engine,
    EngineLost,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    UntrustedReply,
)
from turnleaf.gateway.engines._sglang import SGLangEngine

__all__ = [
    "Engine",
    "EngineLost",
    "EngineReply",
    "EngineRequest",
    "EngineUnavailable",
    "SGLangEngine",
    "UntrustedReply",
]
