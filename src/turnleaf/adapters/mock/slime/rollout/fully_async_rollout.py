"""`slime.rollout.fully_async_rollout`: generation never stops, and steps take what is done."""

import asyncio
import atexit
import logging
import queue
import threading
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from turnleaf.adapters.mock.slime._require import require
from turnleaf.adapters.mock.slime.rollout.base_types import Group
from turnleaf.adapters.mock.slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from turnleaf.adapters.mock.slime.utils.async_utils import run
from turnleaf.adapters.mock.slime.utils.http_utils import get_rollout_num_engines
from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async"]

logger = logging.getLogger(__name__)

_TOP_UP_INTERVAL = 0.05  # seconds; slime looks every second
_DRAIN_TIMEOUT = 30.0  # seconds

_worker_lock = threading.Lock()
_global_worker: "AsyncRolloutWorker | None" = None


class AsyncRolloutWorker:
    """A thread with an event loop of its own, which keeps `concurrency` groups under way.

    A group that raises is logged and lost. One with an ABORTED member is put back; a plain list has
    no `status`, so that its ABORTED samples go unseen.
    """

    def __init__(self, args: Namespace, data_buffer: Any, concurrency: int = 10) -> None:
        self.args = args
        self.data_buffer = data_buffer
        self.concurrency = concurrency
        self.running = True
        self.output_queue: queue.Queue[tuple[int, Group]] = queue.Queue(maxsize=1000)
        self.worker_thread = threading.Thread(
            target=lambda: asyncio.run(self._loop()), name="fully-async-rollout", daemon=True
        )
        self.state = GenerateState(args)

    def start(self) -> None:
        """Start the thread."""
        self.worker_thread.start()

    def stop(self) -> None:
        """Start no more groups; wait for the thread for a while."""
        self.running = False
        self.worker_thread.join(timeout=5)

    def get_completed_groups(self) -> list[tuple[int, Group]]:
        """What has been generated since the last time, numbered."""
        completed = []
        while not self.output_queue.empty():
            completed.append(self.output_queue.get())
        return completed

    async def _loop(self) -> None:
        active: set[asyncio.Task[Group]] = set()
        begun = 0
        while self.running:
            try:
                active = {task for task in active if not task.done()}
                while len(active) < self.concurrency and self.running:
                    groups = self.data_buffer.get_samples(1)
                    if not groups:
                        break
                    for group in groups:
                        sampling_params = self.state.sampling_params.copy()
                        task = asyncio.create_task(
                            generate_and_rm_group(self.args, group, sampling_params)
                        )
                        task.add_done_callback(self._when_done(begun))
                        begun += 1
                        active.add(task)
            except Exception:
                logger.exception("fully-async: the loop failed")
            await asyncio.sleep(_TOP_UP_INTERVAL)
        if active:
            await asyncio.wait(active, timeout=_DRAIN_TIMEOUT)

    def _when_done(self, number: int) -> Callable[[asyncio.Task[Group]], None]:
        def take(task: asyncio.Task[Group]) -> None:
            try:
                group = task.result()
            except Exception:
                logger.exception("fully-async: process task raised")
                return
            if any(getattr(sample, "status", None) == Sample.Status.ABORTED for sample in group):
                try:
                    self.data_buffer.add_samples([group])
                except Exception:
                    logger.exception("fully-async: an aborted group cannot be put back")
                return
            self.output_queue.put((number, group))

        return take


def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> list[Group]:
    """`--rollout-function-path`: the first `rollout_batch_size` groups that are done.

    Waits for ever when too few are. Raises ValueError in evaluation.
    """
    if evaluation:
        raise ValueError("fully-async rollout doesn't support evaluation mode")
    return run(_collected(args, data_buffer))


async def _collected(args: Namespace, data_buffer: Any) -> list[Group]:
    require(args.rollout_global_dataset, "rollout_global_dataset is off")
    worker = _get_global_worker(args, data_buffer)
    collected: list[Group] = []
    while len(collected) < args.rollout_batch_size:
        completed = worker.get_completed_groups()
        collected += [group for _, group in completed]
        if not completed:
            await asyncio.sleep(0.05)
    return sorted(collected, key=_index)[: args.rollout_batch_size]


def _index(group: Group) -> int:
    """Of the first member that has one; a plain list has one, too, and it is a method."""
    for sample in group:
        index = getattr(sample, "index", None)
        if index is not None:
            return int(index)
    return 0


def _get_global_worker(args: Namespace, data_buffer: Any) -> AsyncRolloutWorker:
    global _global_worker
    with _worker_lock:
        if _global_worker is None or not _global_worker.worker_thread.is_alive():
            concurrency = args.sglang_server_concurrency * get_rollout_num_engines(args)
            _global_worker = AsyncRolloutWorker(args, data_buffer, concurrency)
            _global_worker.start()
        return _global_worker


@atexit.register
def _stop_global_worker() -> None:
    global _global_worker
    with _worker_lock:
        if _global_worker is not None:
            _global_worker.stop()
            _global_worker = None
