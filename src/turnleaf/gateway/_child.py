"""Programs that run as children of a trainer or a test, and end with it.

A child is `python -m module`. Its configuration is one line of JSON on stdin, so that no secret is
in an argument or the environment. It answers with one line of JSON on stdout: what the parent
needs to know once it is ready, or `{"error": message}`. From then on its stdout is its stderr,
which is the parent's. It ends when its stdin does, which also happens when the parent is killed.

The parent's side is `child_process` and `ended`; the other functions are the child's.
"""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from subprocess import PIPE
from typing import Any

import anyio
import anyio.to_thread
import attrs

from turnleaf.core import ContractError, GatewayError

__all__ = [
    "Child",
    "announce",
    "announce_error",
    "child_process",
    "ended",
    "read_config",
    "until_stdin_closes",
]

logger = logging.getLogger(__name__)

_parent = os.getppid()

_MAX_LINE = 16 * 2**20  # bytes
_CLOSING_GRACE = 10.0  # seconds for a child to end after its stdin closed
_TERMINATION_GRACE = 3.0  # seconds more after SIGTERM
_ORPHAN_CHECK = 1.0  # seconds between two looks at whether the parent is there
_LOOK = 0.05  # seconds between two looks at whether a child has ended
_DEATH_GRACE = 2.0  # seconds from the end of a child's stdout until its exit code is there


@attrs.frozen(eq=False)
class Child:
    """A running child. ready: what it announced."""

    ready: Mapping[str, Any]
    _process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait until it ends, and return its exit code."""
        return await ended(self._process)


@asynccontextmanager
async def child_process(
    module: str, config: Mapping[str, Any], *, ready_timeout: float = 60.0
) -> AsyncIterator[Child]:
    """Run `python -m module` until the context is left; yields it once it is ready.

    ready_timeout: seconds until the readiness line. Leaving closes its stdin, waits for it to
    end, and after 10 s terminates and then kills it.

    Raises ContractError with the child's own message when it announced an error, GatewayError
    when it ended, or stayed silent, before it was ready.
    """
    # -P: the working directory may hold the user's own modules of any name. A session of its
    # own: ctrl-C at a terminal is for the parent, which then ends its children in order. No
    # asyncio process: its loop asks the process-wide policy, where Ray leaves uvloop's, which has
    # no child watcher.
    command = [sys.executable, "-P", "-m", module]
    process = subprocess.Popen(  # noqa: ASYNC220  # starting one takes a few milliseconds
        command,
        stdin=PIPE,
        stdout=PIPE,
        start_new_session=True,
        # Unbuffered, so that closing a pipe waits for no thread that reads it.
        bufsize=0,
    )
    try:
        ready = await _start(process, module, config, ready_timeout)
        yield Child(ready, process)
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process, module)


async def _start(
    process: "subprocess.Popen[bytes]", module: str, config: Mapping[str, Any], ready_timeout: float
) -> dict[str, Any]:
    line = json.dumps(config, allow_nan=False).encode() + b"\n"
    try:
        with anyio.fail_after(ready_timeout):
            # What blocks here ends with the child, which is ended when this is cancelled.
            ready = await anyio.to_thread.run_sync(
                _greeted, process, module, line, abandon_on_cancel=True
            )
    except TimeoutError:
        raise GatewayError(f"{module} was not ready within {ready_timeout:g} s") from None
    if ready is None:
        with anyio.move_on_after(_DEATH_GRACE):
            await ended(process)
        raise GatewayError(
            f"{module} ended before it was ready (exit code {process.poll()}); "
            "its log on stderr says why"
        )
    if "error" in ready:
        raise ContractError(str(ready["error"]))
    return ready


def _greeted(process: "subprocess.Popen[bytes]", module: str, line: bytes) -> dict[str, Any] | None:
    """Tell the child its configuration and read its readiness line; None when it ends before."""
    assert process.stdin is not None  # noqa: S101  # both are pipes
    assert process.stdout is not None  # noqa: S101  # as above
    try:
        while line:
            line = line[process.stdin.write(line) or 0 :]
    except OSError:
        return None
    while True:
        said = process.stdout.readline(_MAX_LINE)
        if len(said) == _MAX_LINE:
            raise GatewayError(f"{module} sent no readiness line, but {_MAX_LINE} bytes")
        if not said.endswith(b"\n"):
            return None
        try:
            ready = json.loads(said)
        except ValueError:
            ready = None
        if isinstance(ready, dict):
            return ready
        # A library that greets on stdout must not keep a worker from starting.
        logger.info("%s wrote: %s", module, said.decode(errors="replace").strip())


async def ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait until the process ends, and return its exit code."""
    try:
        descriptor = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:  # it has ended, and its exit code is taken
        return process.wait()
    except OSError:  # a kernel, or a sandbox, that has none
        descriptor = None
    if descriptor is None:
        while process.poll() is None:  # noqa: ASYNC110  # nothing tells of it there
            await anyio.sleep(_LOOK)
        return process.wait()
    try:
        await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)
    return process.wait()


async def _end(process: "subprocess.Popen[bytes]", module: str) -> None:
    assert process.stdin is not None  # noqa: S101  # both are pipes
    assert process.stdout is not None  # noqa: S101  # as above
    try:
        process.stdin.write(b"\n")
    except OSError:
        logger.debug("%s had closed its stdin", module)
    process.stdin.close()
    for grace, end in (
        (_CLOSING_GRACE, process.terminate),
        (_TERMINATION_GRACE, process.kill),
        (math.inf, process.kill),
    ):
        with anyio.move_on_after(grace):
            await ended(process)
            break
        logger.warning("%s (process %d) does not end: %s", module, process.pid, end.__name__)
        end()
    process.stdout.close()


def read_config() -> dict[str, Any]:
    """In a child: the configuration. Raises ContractError when stdin holds none."""
    line = sys.stdin.buffer.readline(_MAX_LINE)
    try:
        config = json.loads(line)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ContractError("the first line of stdin is not the configuration, a JSON object")
    return config


def announce(ready: Mapping[str, Any]) -> None:
    """In a child: tell the parent that it is ready. What is printed later goes to stderr."""
    sys.stdout.flush()
    line = json.dumps(ready, allow_nan=False).encode() + b"\n"
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]
    # Nobody reads this pipe any more, and a full one would block the child.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def announce_error(message: str) -> None:
    """In a child: tell the parent why it cannot be ready. The child ends itself."""
    announce({"error": message})


async def until_stdin_closes() -> None:
    """In a child: return at the end of stdin, at the parent's word, or when the parent is gone.

    A process that the parent forked holds the pipe open too, so its end alone may never come.
    """
    with anyio.CancelScope() as waiting:
        async with anyio.create_task_group() as tasks:

            async def until_orphaned() -> None:
                while os.getppid() == _parent:  # noqa: ASYNC110  # nothing tells of it
                    await anyio.sleep(_ORPHAN_CHECK)
                waiting.cancel()

            tasks.start_soon(until_orphaned)
            await anyio.wait_readable(sys.stdin.fileno())
            waiting.cancel()
