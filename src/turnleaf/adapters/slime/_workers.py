"""A gateway worker that is started again whenever it ends."""

import logging
import math

import anyio
import attrs

from turnleaf.core import ContractError, GatewayError, TurnleafError, described
from turnleaf.gateway import GatewayClient, WorkerConfig, running_worker

__all__ = ["KeptWorker"]

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a worker that ended is started again; doubled each time that it ends at once."""
STEADY = 60.0
"""Seconds after which a worker counts as having run."""
PATIENCE = 120.0
"""Seconds for which rollouts wait for a worker that has run before, while it does not start."""


@attrs.define(eq=False)
class KeptWorker:
    """Keeps one worker process running for as long as the service does.

    When it ends, the rollouts whose keys it had fail, and the next ones wait for its successor, for
    PATIENCE seconds.
    """

    _config: WorkerConfig
    _current: GatewayClient | None = attrs.field(init=False, default=None)
    _failure: ContractError | GatewayError | None = attrs.field(init=False, default=None)
    _changed: anyio.Event = attrs.field(init=False, factory=anyio.Event)

    @property
    def running(self) -> GatewayClient | None:
        """The running worker's gateway, or None while there is none."""
        return self._current

    async def settled(self) -> None:
        """Wait while the worker starts; afterwards there is a gateway, or a reason why not."""
        while self._current is None and self._failure is None:
            await self._changed.wait()

    def gateway(self) -> GatewayClient:
        """The running worker's gateway; for use once `settled`.

        Raises ContractError when its configuration cannot work, GatewayError when the last try to
        start it failed.
        """
        if self._current is not None:
            return self._current
        failure = self._failure or GatewayError("the gateway worker is starting")
        raise type(failure)(str(failure))

    async def keep(self) -> None:
        """Start the worker, and start it again when it ends, until cancelled."""
        pause, has_run, away_since = FIRST_PAUSE, False, -math.inf
        while True:
            began = anyio.current_time()
            try:
                async with running_worker(self._config) as worker:
                    has_run = True
                    logger.info(
                        "the gateway worker (process %d) listens at %s",
                        worker.pid,
                        worker.gateway.base_url,
                    )
                    self._become(worker.gateway, None)
                    code = await worker.ended()
                    logger.error(
                        "the gateway worker (process %d) ended with exit code %d; rollouts under "
                        "way at it fail; starting another",
                        worker.pid,
                        code,
                    )
                    away_since = anyio.current_time()
                    self._become(None, None)
            except ContractError as error:
                if not has_run:
                    self._become(None, error)
                    return
                # What has worked before may work again: an engine that is away comes back.
                self._did_not_start(error, away_since)
            except Exception as error:  # noqa: BLE001  # nothing else would tell who waits for it
                self._did_not_start(error, away_since)
            if anyio.current_time() - began > STEADY:
                pause = FIRST_PAUSE
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self._become(None, None)

    def _did_not_start(self, error: Exception, away_since: float) -> None:
        said = str(error) if isinstance(error, TurnleafError) else described(error)
        logger.error("the gateway worker did not start: %s", said)
        # A step whose rollouts all failed at once, for want of a worker, would train nothing.
        if anyio.current_time() - away_since > PATIENCE:
            self._become(None, GatewayError(f"the gateway worker did not start: {said}"))

    def _become(
        self, current: GatewayClient | None, failure: ContractError | GatewayError | None
    ) -> None:
        self._current, self._failure = current, failure
        self._changed.set()
        self._changed = anyio.Event()
