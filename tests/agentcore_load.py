"""A trainer's process with many rollouts at once.

One line of JSON on stdin says which, one on stdout what became of them.
"""

import json
import logging
import sys
from collections import Counter
from pathlib import Path

import anyio

from turnleaf.core import Background, run_rollout
from turnleaf.gateway import WorkerConfig, run_worker
from turnleaf.sessions import session_factory


async def run_all(said):
    session = session_factory(said["backend"])
    worker = WorkerConfig(
        engine_url=said["engine_url"],
        model=said["checkpoint"],
        model_id="model",
        control_token="token-of-the-load-test",
        port=0,
    )
    rollouts = []
    async with run_worker(worker) as gateway, Background() as background:

        async def run_one(number):
            rollout = await run_rollout(
                said["payload"] | {"number": number},
                session=session,
                gateway=gateway,
                background=background,
                model_id="model",
                sampling={"temperature": 1.0, "max_new_tokens": 64},
                name=f"rollout {number}",
                max_rollout_time=said["limit"],
            )
            rollouts.append(rollout)

        async with anyio.create_task_group() as tasks:
            for number in range(said["count"]):
                tasks.start_soon(run_one, number)
    return rollouts


def peak_bytes():
    """The process's own: getrusage would tell of the parent's before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main():
    logging.basicConfig(level=logging.WARNING)
    rollouts = anyio.run(run_all, json.loads(sys.stdin.readline()))
    report = {
        "statuses": Counter(rollout.status for rollout in rollouts),
        "turns": Counter(len(rollout.trajectory.turns) for rollout in rollouts),
        "rewards": Counter(str(rollout.reward) for rollout in rollouts),
        "errors": sorted({str(rollout.error) for rollout in rollouts if rollout.error})[:5],
        "waited": max(rollout.timings.waited for rollout in rollouts),
        "session": max(rollout.timings.session for rollout in rollouts),
        "peak": peak_bytes(),
        "modules": sorted(sys.modules),
    }
    print(json.dumps(report))  # noqa: T201  # what a program reads


main()
