"""What the commands run a rollout with, in this process: starting a worker takes a second."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs

from tests.gateway_stack import Stack, running_gateway, tokenizer
from turnleaf.cli._run import Stage
from turnleaf.cli._setup import SCRIPTED_REPLY, Plan
from turnleaf.core import Trajectory

MANY = 10


@asynccontextmanager
async def prepared_here(plan: Plan) -> AsyncIterator[Stage]:
    """As `turnleaf.cli._run.prepared` without an engine in the plan; every token is accounted for
    at the end."""
    assert plan.scripted
    replies = plan.replies or [SCRIPTED_REPLY] * MANY
    async with running_gateway([{"text": reply} for reply in replies], template="chatml") as stack:
        yield Stage(_Collecting(stack), tokenizer(), "scripted")


@attrs.frozen
class _Collecting:
    """A stack's gateway, whose trajectories it gets to see."""

    _stack: Stack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stack.gateway, name)

    async def close_key(self, key_id: str, *, aborted: bool = False) -> Trajectory:
        trajectory = await self._stack.gateway.close_key(key_id, aborted=aborted)
        self._stack.collected.append(trajectory)
        return trajectory
