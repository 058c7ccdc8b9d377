"""Agents behind HTTP, as real processes."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def agent_process(program: Path, *arguments: str) -> Iterator[str]:
    """Run `python program … PORT` and yield its address once it answers `/ping`."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, str(program), *arguments, str(port)]
    with (
        httpx.Client(verify=False, trust_env=False) as http,
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None, "the agent ended by itself"
                assert time.monotonic() < deadline, "the agent does not answer"
                with contextlib.suppress(httpx.TransportError):
                    if http.get(f"{url}/ping").status_code == 200:
                        break
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
