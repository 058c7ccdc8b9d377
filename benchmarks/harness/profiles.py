"""Where the CPU of a turn goes, by py-spy: functions of the worker's process."""

import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream
from harness import gateways, loads
from harness.environments import profiler, tool_calls
from harness.loads import Load
from harness.report import Report, table

TURNS = {
    "1k tokens": Load(sessions=128, turns=20, words=10, first_words=200, before=4),
    "31k tokens": Load(sessions=8, turns=64, before=48),
}
"""What comes before is not recorded."""
RATE = 400
"""Samples a second."""
SHOWN = 25
"""Functions of a table."""


async def profiles(keep: Path | None) -> Report:
    """A table for each length. keep: the folder for what https://www.speedscope.app shows."""
    lines: list[str] = []
    async with gateways.engine(tool_calls(loads.TOKENS)) as engine_url:
        for name, load in TURNS.items():
            with TemporaryDirectory() as temporary:
                path = (keep or Path(temporary)) / f"{name.replace(' ', '-')}.speedscope.json"
                async with gateways.turnleaf()(engine_url) as gateway:
                    await loads.run(gateway, loads.WARM_UP)
                    cost = await loads.run(gateway, load, partial(_recorded, gateway.pid, path))
                profile = json.loads(path.read_text())
            lines += [
                f"A turn at {name}: {cost.cpu_ms:.2f} ms, the profiler's stops included.",
                _packages(profile),
                *table(["self", "with callees", "function"], [*_rows(profile)]),
                "",
            ]
    return Report(lines)


@asynccontextmanager
async def _recorded(pid: int, path: Path) -> AsyncIterator[None]:
    """Record a process until the context is left; raises RuntimeError when that does not work."""
    command = [profiler(), "record", "--pid", str(pid), "--output", str(path)]
    command += ["--format", "speedscope", "--rate", str(RATE), "--function"]
    async with await anyio.open_process(command, stdout=PIPE, stderr=STDOUT) as process:
        assert process.stdout is not None
        said = BufferedByteReceiveStream(process.stdout)
        try:
            while b"Sampling process" not in await said.receive_until(b"\n", 2**16):
                pass
        except anyio.IncompleteRead:
            raise RuntimeError(
                f"py-spy cannot record process {pid}: may it trace others?"
            ) from None
        yield
        process.send_signal(signal.SIGINT)
        async for _ in said:
            pass
        await process.wait()


def _rows(profile: Mapping[str, Any]) -> Iterator[list[str]]:
    """Functions by the time spent in themselves, C code that they call included."""
    own: Counter[int] = Counter()
    all_in: Counter[int] = Counter()
    for thread in profile["profiles"]:
        for stack in thread["samples"]:
            own[stack[-1]] += 1
            all_in.update(set(stack))
    samples = own.total()
    for frame, count in own.most_common(SHOWN):
        share, inclusive = 100 * count / samples, 100 * all_in[frame] / samples
        yield [
            f"{share:.1f} %",
            f"{inclusive:.1f} %",
            _function(profile["shared"]["frames"][frame]),
        ]


def _packages(profile: Mapping[str, Any]) -> str:
    """The time spent in the code of each package itself, and in C code that it calls."""
    own: Counter[str] = Counter()
    for thread in profile["profiles"]:
        for stack in thread["samples"]:
            file = _file(profile["shared"]["frames"][stack[-1]])
            own[file.removesuffix(".py").split("/")[0]] += 1
    shares = (f"{name} {100 * count / own.total():.0f} %" for name, count in own.most_common(10))
    return f"By package: {', '.join(shares)}"


def _function(frame: Mapping[str, Any]) -> str:
    return f"{frame['name']} ({_file(frame)}:{frame.get('line')})"


def _file(frame: Mapping[str, Any]) -> str:
    """Without the folder of its package."""
    file = str(frame.get("file") or "?")
    for folder in ("/src/", "/site-packages/", f"{Path(os.__file__).parent}/"):
        file = file.rpartition(folder)[2] or file
    return file
