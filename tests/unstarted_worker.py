"""A worker that refuses to start, in this process: starting one takes a second."""

import gc

import anyio.to_thread
import pytest

from turnleaf.gateway import WorkerConfig, _worker


async def refusal(config: WorkerConfig) -> str:
    """What it announces instead of being ready."""
    announced: list[str] = []

    def ready(_: object) -> None:
        raise AssertionError("the worker started")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_worker, "read_config", config.to_mapping)
        patch.setattr(_worker, "set_up_logs", lambda _: None)
        patch.setattr(_worker, "announce", ready)
        patch.setattr(_worker, "announce_error", announced.append)
        try:
            code = await anyio.to_thread.run_sync(_worker.main)
        finally:
            gc.unfreeze()
    assert (code, len(announced)) == (2, 1)
    return announced[0]
