"""The two seams of a rollout: where the agent runs, and what records its model calls."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import attrs

from turnleaf.core._trajectory import Trajectory

__all__ = ["Gateway", "Key", "Purpose", "RolloutSession"]

Purpose = Literal["train", "eval"]
"""What a rollout is for: training samples, or a measurement."""


@attrs.frozen
class Key:
    """What names one rollout at the gateway.

    id: not secret; goes into logs. base_url: what the agent's client is pointed at.
    secret: travels in the API-key slot; never printed.
    """

    id: str
    base_url: str
    secret: str = attrs.field(repr=False)


class RolloutSession(Protocol):
    """Where one rollout's agent executes: an async context manager around `run`.

    Leaving it stops the remote side, always: after success, failure and cancellation. A session
    that has a name of its own, by which its remote side can be found, has it as `session_id`. One
    whose remote side takes a limited number has `room()`: an async context manager that waits for
    room when it is entered, before the rollout's time begins, and gives it back when it is left,
    after the session is. Waiting for room may be cancelled.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool | None: ...

    async def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Invoke the agent with `payload` and return its result, as it came.

        Raises AgentError when the agent failed, SessionError when it could not be reached.
        """
        ...


class Gateway(Protocol):
    """Issues keys, records what is sampled under them, and hands back trajectories."""

    async def open_key(
        self, *, name: str, sampling: Mapping[str, Any], purpose: Purpose, expires_in: float
    ) -> Key:
        """Issue a key for one rollout.

        name: becomes the engine's routing key; not secret. sampling: the trainer's sampling
        parameters, in SGLang's names. expires_in: seconds after which the key answers 401.
        """
        ...

    async def close_key(self, key_id: str, *, aborted: bool = False) -> Trajectory:
        """End the key, and its calls in flight, and return what was recorded.

        aborted: the rollout was cut off; its running turns are excluded as aborted.
        """
        ...

    async def close_all(self, purpose: Purpose) -> None:
        """End every key of that purpose and its calls in flight; their trajectories stay to be
        collected by `close_key`."""
        ...
