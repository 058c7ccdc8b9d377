"""What all rollouts of a trainer's process share: one thread, one worker, one pace."""

import logging
import os
import threading
from typing import Any, ClassVar, Self

import anyio
import attrs

from turnleaf.adapters.slime import _host
from turnleaf.adapters.slime._aborts import AbortWatch
from turnleaf.adapters.slime._failures import FailureWatch
from turnleaf.adapters.slime._plan import Plan
from turnleaf.adapters.slime._workers import KeptWorker
from turnleaf.core import (
    GatewayError,
    Purpose,
    Rollout,
    RolloutAborted,
    Service,
    StartRate,
    Trajectory,
    run_rollout,
    unwrapped,
    wait_for_first,
)

__all__ = ["RolloutService"]

logger = logging.getLogger(__name__)

ABORT_HEAD_START = 0.3
"""Seconds that the gateway gets to end all training keys before each rollout ends its own."""
ABORT_LIMIT = 0.5
"""Seconds after that in which a rollout's own end is awaited."""


@attrs.define(eq=False)
class RolloutService:
    """Runs rollouts for hooks in any thread and event loop; see `of` for the process's one."""

    plan: Plan
    failures: FailureWatch
    _service: Service = attrs.field(init=False, factory=Service)
    _worker: KeptWorker = attrs.field(init=False)
    _aborts: AbortWatch = attrs.field(init=False)
    _start_rate: StartRate = attrs.field(init=False)

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _of_process: ClassVar["tuple[int, RolloutService] | None"] = None

    @classmethod
    def of(cls, args: Any) -> Self:
        """The process's service; the first caller's arguments start it.

        Raises ContractError when they cannot work.
        """
        with cls._lock:
            if cls._of_process is None or cls._of_process[0] != os.getpid():
                plan = Plan.of(args)
                failures = FailureWatch(plan.settings.failure_window, plan.failures_before_stop)
                cls._of_process = os.getpid(), cls(plan, failures)
            service = cls._of_process[1]
        assert isinstance(service, cls)  # noqa: S101  # the type checker cannot know
        return service

    @classmethod
    def close_current(cls) -> None:
        """End the process's service, if there is one, and all that it runs; the next use starts
        another. At the interpreter's exit it ends by itself."""
        with cls._lock:
            current, cls._of_process = cls._of_process, None
        if current is not None and current[0] == os.getpid():
            current[1]._service.close()

    def __attrs_post_init__(self) -> None:
        self._worker = KeptWorker(self.plan.worker_config())
        self._aborts = AbortWatch(_host.aborted, self._close_training_keys)
        self._start_rate = StartRate(self.plan.settings.tps_limit)
        self._service.keep(self._worker.keep)
        self._service.keep(self._aborts.keep)

    async def run(
        self, payload: object, *, name: str, sampling: dict[str, Any], purpose: Purpose
    ) -> Rollout:
        """What came of one rollout; may be awaited in any event loop.

        Raises ContractError for a mistake that would recur on every rollout.
        """

        async def run() -> Rollout:
            if purpose == "eval":
                return await self._run(payload, name, sampling, purpose, anyio.Event())
            rollout = _as_aborted(Rollout(name=name, trajectory=Trajectory(), status="aborted"))
            abort = self._aborts.enter()
            try:
                async with anyio.create_task_group() as tasks:

                    async def limit() -> None:
                        await abort.wait()
                        await anyio.sleep(ABORT_LIMIT)
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(limit)
                    rollout = await self._run(payload, name, sampling, purpose, abort)
                    tasks.cancel_scope.cancel()
            except ExceptionGroup as group:
                raise unwrapped(group) from None
            finally:
                self._aborts.leave()
            # The engines are aborted a moment before the rollouts are: what ends meanwhile, even
            # with a result, may have ended for that.
            return _as_aborted(rollout) if _host.aborted() else rollout

        return await self._service.run(run)

    async def aborted(self) -> None:
        """Return when slime aborts the training rollouts."""

        async def wait() -> None:
            abort = self._aborts.enter()
            try:
                await abort.wait()
            finally:
                self._aborts.leave()

        await self._service.run(wait)

    async def _run(
        self,
        payload: object,
        name: str,
        sampling: dict[str, Any],
        purpose: Purpose,
        abort: anyio.Event,
    ) -> Rollout:
        await wait_for_first(self._worker.settled, abort.wait)
        unstarted = Rollout(name=name, trajectory=Trajectory(), status="failed")
        if abort.is_set():
            return _as_aborted(unstarted)
        try:
            gateway = self._worker.gateway()
        except GatewayError as error:
            return attrs.evolve(unstarted, error=error)
        return await run_rollout(
            payload,
            session=self.plan.session,
            gateway=gateway,
            background=self._service.background,
            model_id=self.plan.model_id,
            sampling=sampling,
            name=name,
            purpose=purpose,
            max_rollout_time=self.plan.settings.max_rollout_time,
            start_rate=self._start_rate,
            abort=abort,
        )

    async def _close_training_keys(self) -> None:
        gateway = self._worker.running
        if gateway is None:
            return
        with anyio.move_on_after(ABORT_HEAD_START):
            try:
                await gateway.close_all("train")
            except GatewayError as error:
                logger.warning("the training keys could not be closed at once: %s", error)


def _as_aborted(rollout: Rollout) -> Rollout:
    if rollout.status == "aborted" and rollout.error is not None:
        return rollout
    error = RolloutAborted(f"{rollout.name}: aborted by slime")
    return attrs.evolve(rollout, status="aborted", reward=None, error=error)
