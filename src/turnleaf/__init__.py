"""Rollouts of agents that run anywhere, with every sampled token trained exactly once."""

from typing import TYPE_CHECKING

from turnleaf.core import (
    AgentError,
    BadResultError,
    Cause,
    ContractError,
    EngineError,
    GatewayError,
    Leaf,
    MissingExtraError,
    PayloadError,
    Rollout,
    RolloutAborted,
    RolloutError,
    RolloutSession,
    RolloutTimeout,
    ServiceError,
    SessionBusy,
    SessionError,
    SettingsError,
    Trajectory,
    TrajectoryError,
    Turn,
    TurnleafError,
    group_advantages,
    run_rollout,
)

if TYPE_CHECKING:
    __version__: str

__all__ = [
    "AgentError",
    "BadResultError",
    "Cause",
    "ContractError",
    "EngineError",
    "GatewayError",
    "Leaf",
    "MissingExtraError",
    "PayloadError",
    "Rollout",
    "RolloutAborted",
    "RolloutError",
    "RolloutSession",
    "RolloutTimeout",
    "ServiceError",
    "SessionBusy",
    "SessionError",
    "SettingsError",
    "Trajectory",
    "TrajectoryError",
    "Turn",
    "TurnleafError",
    "__version__",
    "group_advantages",
    "run_rollout",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Late: reading the installed distribution's metadata costs more than the rest of the import.
    from importlib.metadata import version

    return version("turnleaf")
