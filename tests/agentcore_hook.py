"""A process with sessions in mid-run: python agentcore_hook.py ENDPOINT_URL ARN COUNT WAY FOLDER

WAY: `run` runs on until it is killed; `forked` does, too, and so does a process that it forks;
`leave` returns from its main thread once a line comes on stdin.
"""

import os
import sys
import time
from pathlib import Path

import anyio

from turnleaf.core import Service
from turnleaf.sessions import AgentCoreHttpSession

endpoint_url, arn, count, way, folder = sys.argv[1:]


async def run(number: int) -> None:
    files = {name: str(Path(folder) / f"{number}.{name}") for name in ("started", "go")}
    async with AgentCoreHttpSession(
        arn, endpoint_url=endpoint_url, envelope="never", sessions_per_minute=60_000
    ) as session:
        await session.run({"do": "wait", "number": number, **files})


async def run_all() -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(int(count)):
            tasks.start_soon(run, number)


def main() -> None:
    service = Service()
    service.keep(run_all)
    sys.stdin.readline()
    if way == "forked" and os.fork() == 0:
        (Path(folder) / "forked").touch()
        time.sleep(60)
    if way != "leave":
        time.sleep(60)


main()
