"""A gateway worker that is started again whenever it ends."""

import logging

import anyio
import attrs

from turnleaf.core import ContractError, GatewayError, TurnleafError, described
from turnleaf.gateway import GatewayClient, WorkerConfig, running_worker

__all__ = ["KeptWorker", "Serving"]

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a worker that ended is started again; doubled each time that it ends at once."""
STEADY = 60.0
"""Seconds after which a worker counts as having run."""
PATIENCE = 120.0
"""Seconds for which rollouts wait for a worker that does not start, or not again."""


@attrs.define(eq=False)
class Serving:
    """A worker that serves rollouts. ended: set when its process has; `end` says how."""

    gateway: GatewayClient
    ended: anyio.Event = attrs.field(init=False, factory=anyio.Event)
    end: str = attrs.field(init=False, default="")


@attrs.define(eq=False)
class KeptWorker:
    """Keeps one worker process running for as long as the service does.

    When it ends, the rollouts whose keys it had fail, and the next ones wait for its successor, for
    PATIENCE seconds.
    """

    _config: WorkerConfig
    _current: Serving | None = attrs.field(init=False, default=None)
    _failure: ContractError | GatewayError | None = attrs.field(init=False, default=None)
    _changed: anyio.Event = attrs.field(init=False, factory=anyio.Event)

    @property
    def running(self) -> GatewayClient | None:
        """The running worker's gateway, or None while there is none."""
        return None if self._current is None else self._current.gateway

    async def settled(self) -> None:
        """Wait while the worker starts; afterwards there is a gateway, or a reason why not."""
        while self._current is None and self._failure is None:
            await self._changed.wait()

    def serving(self) -> Serving | None:
        """The running worker; None while it starts.

        Raises ContractError when its configuration cannot work, GatewayError when the last try to
        start it failed.
        """
        if self._failure is not None:
            # Raised in several threads at once, one exception would gather all their tracebacks.
            raise type(self._failure)(str(self._failure))
        return self._current

    async def keep(self) -> None:
        """Start the worker, and start it again when it ends, until cancelled."""
        pause, has_run, away_since = FIRST_PAUSE, False, anyio.current_time()
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
                    serving = Serving(worker.gateway)
                    self._become(serving, None)
                    code = await worker.ended()
                    serving.end = (
                        f"the gateway worker (process {worker.pid}) ended with exit code {code}"
                    )
                    logger.error("%s; rollouts under way at it fail; another starts", serving.end)
                    away_since = anyio.current_time()
                    self._become(None, None)
                    serving.ended.set()
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
        self, current: Serving | None, failure: ContractError | GatewayError | None
    ) -> None:
        self._current, self._failure = current, failure
        self._changed.set()
        self._changed = anyio.Event()
