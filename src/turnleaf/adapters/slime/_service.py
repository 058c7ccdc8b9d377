"""What all rollouts of a trainer's process share: one thread, one worker, one pace."""

import logging
import os
import threading
from typing import Any, ClassVar

import anyio
import attrs

from turnleaf.adapters.slime import _host
from turnleaf.adapters.slime._aborts import AbortWatch
from turnleaf.adapters.slime._failures import FailureWatch
from turnleaf.adapters.slime._plan import Plan
from turnleaf.adapters.slime._workers import KeptWorker, Serving
from turnleaf.core import (
    GatewayError,
    Purpose,
    Rollout,
    RolloutAborted,
    Service,
    ServiceError,
    SessionError,
    StartRate,
    Trajectory,
    run_rollout,
    unwrapped,
    wait_for_first,
)

__all__ = ["RolloutService"]

logger = logging.getLogger(__name__)

CLOSE_ALL_LIMIT = 0.3
"""Seconds after an abort that the gateway may take to end all training keys at once."""
ABORT_LIMIT = 0.5
"""Seconds after an abort for which a rollout's own end is awaited."""
DEATH_NOTICE = 1.0
"""Seconds after a failure at the gateway in which the end of its worker would be noticed."""


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
    def of(cls, args: Any) -> "RolloutService":
        """The process's service; the first caller's arguments start it.

        Raises ContractError when they cannot work.
        """
        with cls._lock:
            if cls._of_process is None or cls._of_process[0] != os.getpid():
                plan = Plan.of(args)
                failures = FailureWatch(plan.settings.failure_window, plan.failures_before_stop)
                cls._of_process = os.getpid(), cls(plan, failures)
            return cls._of_process[1]

    @classmethod
    def close_current(cls) -> None:
        """End the process's service, if there is one, and all that it runs; the next use starts
        another. At the interpreter's exit it ends by itself."""
        with cls._lock:
            current, cls._of_process = cls._of_process, None
        if current is not None and current[0] == os.getpid():
            current[1]._service.close()

    def _replace(self, error: ServiceError) -> None:
        """Have the next caller start another service: this one was ended from within."""
        cls = type(self)
        with cls._lock:
            if cls._of_process is None or cls._of_process[1] is not self:
                return
            cls._of_process = None
        logger.error("%s; the rollouts under way fail; another service starts", error)

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
        wanted = _Wanted(payload, name, sampling, purpose)

        async def run() -> Rollout:
            if purpose == "eval":
                return await self._run(wanted, anyio.Event())
            abort = self._aborts.enter()
            rollout = _as_aborted(Rollout(name=name, trajectory=Trajectory(), status="aborted"))
            try:
                async with anyio.create_task_group() as tasks:

                    async def limit() -> None:
                        await abort.wait()
                        await anyio.sleep(ABORT_LIMIT)
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(limit)
                    rollout = await self._run(wanted, abort)
                    tasks.cancel_scope.cancel()
            except ExceptionGroup as group:
                raise unwrapped(group) from None
            finally:
                self._aborts.leave()
            # The engines are aborted a moment before the rollouts are: what ends meanwhile, even
            # with a result, may have ended for that.
            return _as_aborted(rollout) if _host.aborted() else rollout

        try:
            return await self._service.run(run)
        except ServiceError as error:
            if self._service.closed:
                raise
            self._replace(error)
            failure = SessionError(f"{name}: {error}")
            return Rollout(name=name, trajectory=Trajectory(), status="failed", error=failure)

    async def aborted(self) -> None:
        """Return when slime aborts the training rollouts."""

        async def wait() -> None:
            abort = self._aborts.enter()
            try:
                await abort.wait()
            finally:
                self._aborts.leave()

        await self._service.run(wait)

    async def _run(self, wanted: "_Wanted", abort: anyio.Event) -> Rollout:
        """One rollout, at a worker that lives; again if the worker ended before the agent ran."""
        while True:
            await wait_for_first(self._worker.settled, abort.wait)
            unstarted = Rollout(name=wanted.name, trajectory=Trajectory(), status="failed")
            if abort.is_set():
                return _as_aborted(unstarted)
            try:
                serving = self._worker.serving()
            except GatewayError as failure:
                return attrs.evolve(unstarted, error=failure)
            if serving is None:
                continue  # it has ended since
            rollout = await self._run_at(serving, wanted, abort)
            if rollout.error is None or abort.is_set() or not await _has_ended(serving, rollout):
                return rollout
            if rollout.timings.session > 0:
                error = GatewayError(f"{wanted.name}: {serving.end}, and with it went its turns")
                return attrs.evolve(rollout, status="failed", error=error)

    async def _run_at(self, serving: Serving, wanted: "_Wanted", abort: anyio.Event) -> Rollout:
        """One rollout, which ends with the worker at the latest."""
        ended = anyio.Event()

        async def end() -> None:
            await wait_for_first(abort.wait, serving.ended.wait)
            ended.set()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(end)
                rollout = await run_rollout(
                    wanted.payload,
                    session=self.plan.session,
                    gateway=serving.gateway,
                    background=self._service.background,
                    model_id=self.plan.model_id,
                    sampling=wanted.sampling,
                    name=wanted.name,
                    purpose=wanted.purpose,
                    max_rollout_time=self.plan.settings.max_rollout_time,
                    start_rate=self._start_rate,
                    abort=ended,
                )
                tasks.cancel_scope.cancel()
        except ExceptionGroup as group:
            raise unwrapped(group) from None
        return rollout

    async def _close_training_keys(self) -> None:
        gateway = self._worker.running
        if gateway is None:
            return
        with anyio.move_on_after(CLOSE_ALL_LIMIT):
            try:
                await gateway.close_all("train")
            except GatewayError as error:
                logger.warning("the training keys could not be closed at once: %s", error)


@attrs.frozen
class _Wanted:
    """A rollout that is wanted."""

    payload: object
    name: str
    sampling: dict[str, Any]
    purpose: Purpose


async def _has_ended(serving: Serving, rollout: Rollout) -> bool:
    """Whether the worker has ended, as the rollout's failure at the gateway would have it."""
    if isinstance(rollout.error, GatewayError):
        # The connection breaks a moment before the process is known to have ended.
        with anyio.move_on_after(DEATH_NOTICE):
            await serving.ended.wait()
    return serving.ended.is_set()


def _as_aborted(rollout: Rollout) -> Rollout:
    if rollout.status == "aborted" and rollout.error is not None:
        return rollout
    error = RolloutAborted(f"{rollout.name}: aborted by slime")
    return attrs.evolve(rollout, status="aborted", reward=None, error=error)
