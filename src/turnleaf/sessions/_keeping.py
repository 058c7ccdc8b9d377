"""The parent's side of the program that ends sessions for a process that could not."""

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from turnleaf.core import described
from turnleaf.sessions import _keeper
from turnleaf.sessions._threads import resting

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

WRITE_LIMIT = 5.0
"""Seconds that the keeper may take to read."""
SETTLED = 10.0
"""Seconds after which one that ended is replaced at once; another only at the next session."""


class Keeper:
    """Tells a child which sessions are open, so that it can stop them once this process is dead.

    The child starts with the first session, in a session of the system of its own: Ctrl-C at a
    terminal does not reach it. One that ends, or that cannot be started, is reported in the log,
    and replaced. Its methods may block, and may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, bytes] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._has_complained = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def opened(
        self, session_id: str, *, client: Mapping[str, object], target: Mapping[str, str]
    ) -> None:
        """Take note of a session, before it is started.

        client, target: the arguments of boto3.client and of its stop_runtime_session.
        """
        line = _line({"open": session_id, "client": dict(client), "target": dict(target)})
        with self._lock:
            self._open[session_id] = line
            if self._process is None:
                self._start()
            else:
                self._tell(line)

    def closed(self, session_id: str) -> None:
        """Take note that a session has ended, or was never started."""
        with self._lock:
            if self._open.pop(session_id, None) is not None:
                self._tell(_line({"closed": session_id}))

    def _start(self) -> None:
        """Start a child and tell it what is open. With the lock held."""
        try:
            process = subprocess.Popen(
                # -P: the folder of the program has modules of other names in store.
                [sys.executable, "-P", str(Path(_keeper.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._complain(f"cannot be started: {described(error)}")
            return
        self._process = process
        waiting = threading.Thread(
            target=self._replace, args=(process,), name="turnleaf-keeper", daemon=True
        )
        waiting.start()
        for line in tuple(self._open.values()):
            self._tell(line)

    def _tell(self, line: bytes) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None  # noqa: S101  # it is a pipe
        descriptor = process.stdin.fileno()
        try:
            # A pipe is ready when it has room for a page, and a line is shorter. No `select`, which
            # takes no descriptor above 1023.
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            if waiting.poll(WRITE_LIMIT * 1000):
                os.write(descriptor, line)
                return
        except OSError:
            return  # it has ended, of which `_replace` hears
        process.kill()

    def _replace(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of a child, which nothing but its failure brings about."""
        began = time.monotonic()
        with resting():
            code = process.wait()
        with self._lock:
            assert process.stdin is not None  # noqa: S101  # it is a pipe
            process.stdin.close()
            self._process = None
            self._complain(f"ended (exit code {code})")
            if time.monotonic() - began > SETTLED:
                self._has_complained = False
                self._start()

    def _complain(self, what: str) -> None:
        if not self._has_complained:
            logger.warning(
                "the program that stops the sessions of this process if it is killed %s; it is "
                "started again with the next session",
                what,
            )
        self._has_complained = True


def _line(said: Mapping[str, object]) -> bytes:
    return json.dumps(said).encode() + b"\n"
