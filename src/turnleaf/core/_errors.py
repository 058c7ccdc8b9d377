"""Every error that turnleaf raises on purpose.

TurnleafError
├── ContractError            a set-up mistake that would recur on every rollout
│   ├── SettingsError        a setting is unknown, missing or of the wrong kind
│   └── MissingExtraError    an optional dependency is not installed
├── RolloutError             one rollout went wrong; the others are unaffected
│   ├── PayloadError         the dataset row cannot be turned into a request
│   ├── AgentError           the agent raised, or returned {"error": …}
│   ├── BadResultError       the agent's result breaks the contract
│   ├── SessionError         the agent could not be reached or was cut off
│   │   └── SessionBusy      there is no room for the agent now
│   ├── RolloutTimeout       the rollout ran past max_rollout_time
│   └── RolloutAborted       the trainer gave the abort signal
├── GatewayError             the rollout gateway could not do what was asked
├── EngineError              the engine could not do what was asked
├── ServiceError             the service was closed, or ended from within
└── TrajectoryError          a turn contradicts the trajectory it is added to

Parts of the gateway raise subclasses of their own: RenderError, RequestError, EngineUnavailable, …
"""

from typing import Literal

__all__ = [
    "AgentError",
    "BadResultError",
    "Cause",
    "ContractError",
    "EngineError",
    "GatewayError",
    "MissingExtraError",
    "PayloadError",
    "RolloutAborted",
    "RolloutError",
    "RolloutTimeout",
    "ServiceError",
    "SessionBusy",
    "SessionError",
    "SettingsError",
    "TrajectoryError",
    "TurnleafError",
]

Cause = Literal["agent", "timeout", "infrastructure", "trainer"]
"""Who is answerable for a rollout that did not complete."""


class TurnleafError(Exception):
    """Base of every error that turnleaf raises on purpose."""


class ContractError(TurnleafError):
    """A set-up mistake that would recur on every rollout; raised bare, never in a group."""


class SettingsError(ContractError):
    """A setting is unknown, missing or of the wrong kind; the message names it."""


class MissingExtraError(ContractError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class RolloutError(TurnleafError):
    """One rollout went wrong. `cause` says who is answerable."""

    cause: Cause = "agent"


class PayloadError(RolloutError):
    """The dataset row has no payload dict, or its payload already has `_config`."""

    cause: Cause = "trainer"


class AgentError(RolloutError):
    """The agent raised, answered with an error status, or returned `{"error": …}`."""


class BadResultError(RolloutError):
    """The agent's result is not a dict, or its reward is not a finite number."""


class SessionError(RolloutError):
    """The agent could not be reached, or the connection to it broke."""

    cause: Cause = "infrastructure"


class SessionBusy(SessionError):
    """There is no room for the agent now: its side is throttled, or at its limit."""


class RolloutTimeout(RolloutError):
    """The rollout ran past `max_rollout_time`."""

    cause: Cause = "timeout"


class RolloutAborted(RolloutError):
    """The trainer gave the abort signal while the rollout ran."""

    cause: Cause = "trainer"


class GatewayError(TurnleafError):
    """The rollout gateway could not be started, reached, or could not do what was asked."""


class EngineError(TurnleafError):
    """The engine could not be reached, refused, or answered what cannot be trusted."""


class ServiceError(TurnleafError, RuntimeError):
    """The service was closed, or its event loop was ended by what ran in it."""


class TrajectoryError(TurnleafError, ValueError):
    """A turn contradicts the trajectory it is added to, or a serialised one is not valid."""
