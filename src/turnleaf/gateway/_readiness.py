"""Whether the engine answers, found out once for all who ask at about the same time."""

import math
import time

import anyio
import attrs

from turnleaf.core import EngineError
from turnleaf.gateway.engines import Engine

__all__ = ["Readiness"]

REMEMBERED = 2.0
"""Seconds for which an answer of the engine's health check stands."""


@attrs.define(eq=False)
class Readiness:
    """Asks the engine as rarely as it may, however many ask."""

    _engine: Engine
    _problem: str | None = attrs.field(init=False, default=None)
    _asked_at: float = attrs.field(init=False, default=-math.inf)
    _one_at_a_time: anyio.Lock = attrs.field(init=False, factory=anyio.Lock)

    async def problem(self) -> str | None:
        """Why no turn can be sampled now, with the engine's address; None when it can."""
        async with self._one_at_a_time:
            if time.monotonic() - self._asked_at > REMEMBERED:
                try:
                    await self._engine.check()
                    self._problem = None
                except EngineError as error:
                    self._problem = str(error)
                self._asked_at = time.monotonic()
        return self._problem
