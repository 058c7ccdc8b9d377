"""Child processes that are told and asked things in lines of JSON, and what a process costs."""

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import anyio.abc
import attrs
from anyio.streams.buffered import BufferedByteReceiveStream

HERE = Path(__file__).parent
_MAX_LINE = 2**26  # bytes
_END = 60.0  # seconds that a program has to end behind its stdin
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen(eq=False)
class Program:
    """A running child, which speaks and is spoken to in lines of JSON."""

    process: anyio.abc.Process
    _said: BufferedByteReceiveStream

    @property
    def pid(self) -> int:
        return self.process.pid

    async def tell(self, line: Any) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send(json.dumps(line).encode() + b"\n")

    async def hear(self) -> Any:
        """The next line that it prints."""
        try:
            return json.loads(await self._said.receive_until(b"\n", _MAX_LINE))
        except anyio.IncompleteRead:
            raise RuntimeError(f"a program of the benchmark ended: {self.process}") from None


@asynccontextmanager
async def running(name: str, configuration: Any, *, python: str) -> AsyncIterator[Program]:
    """Run `NAME.py` of this folder until the context is left, when its stdin is closed.

    configuration: the first line that it is told.
    """
    command: Sequence[str] = (python, str(HERE / f"{name}.py"))
    async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=None) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        program = Program(process, BufferedByteReceiveStream(process.stdout))
        try:
            await program.tell(configuration)
            yield program
            await process.stdin.aclose()
            with anyio.fail_after(_END):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process until now, its threads included; whole hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
