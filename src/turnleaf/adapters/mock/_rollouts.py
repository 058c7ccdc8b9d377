"""Rollouts by the dozen: what a trainer has done between two updates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import attrs

from turnleaf.core import (
    Background,
    Gateway,
    Purpose,
    Rollout,
    RolloutSession,
    StartRate,
    run_rollout,
    unwrapped,
)

__all__ = ["Request", "Rollouts"]


@attrs.frozen
class Request:
    """One rollout that is wanted.

    group, rollout: numbers; that of the rollout is unique among those run together. payload: of
    the dataset row, which a group's requests share. sampling: in SGLang's names.
    """

    name: str
    group: int
    rollout: int
    payload: dict[str, Any]
    sampling: Mapping[str, Any]


@attrs.frozen
class Rollouts:
    """Runs requests side by side.

    session: makes a session for each. background: takes their clean-up. at_once: how many run at
    the same time. max_rollout_time: seconds.
    """

    gateway: Gateway
    session: Callable[[], RolloutSession]
    background: Background
    model_id: str
    start_rate: StartRate
    at_once: int = 16
    max_rollout_time: float = 60.0

    async def run(
        self,
        requests: Sequence[Request],
        *,
        purpose: Purpose,
        done: Callable[[Rollout], None] = lambda rollout: None,
    ) -> list[Rollout]:
        """What came of each request, in their order; `done` is told as they finish.

        Raises ContractError, bare, for a mistake that would recur on every rollout.
        """
        finished: dict[int, Rollout] = {}
        places = anyio.Semaphore(self.at_once)

        async def run_one(request: Request) -> None:
            async with places:
                rollout = await run_rollout(
                    request.payload,
                    session=self.session,
                    gateway=self.gateway,
                    background=self.background,
                    model_id=self.model_id,
                    sampling=request.sampling,
                    name=request.name,
                    purpose=purpose,
                    max_rollout_time=self.max_rollout_time,
                    start_rate=self.start_rate,
                )
            finished[request.rollout] = rollout
            done(rollout)

        try:
            async with anyio.create_task_group() as tasks:
                for request in requests:
                    tasks.start_soon(run_one, request)
        except ExceptionGroup as group:
            raise unwrapped(group) from None
        return [finished[request.rollout] for request in requests]
