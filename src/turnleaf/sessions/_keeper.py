"""The program that ends the sessions of AgentCore which a process could not end, being dead.

It is run by its path and imports nothing of turnleaf, which would cost tens of megabytes for each
process that waits beside a trainer. Standard input has a JSON object a line:

    {"open": session id, "client": boto3.client's arguments, "target": the operation's}
    {"closed": session id}

At its end, or when the parent is gone, what is still open is stopped, all at once, for LIMIT
seconds at most. "There is no such session" is success, though not in the first seconds.
"""

import concurrent.futures
import json
import os
import random
import select
import signal
import sys
import time
from typing import Any

LIMIT = 60.0
"""Seconds from the parent's end."""
ON_THE_WAY = 5.0
"""Seconds in which a start of the parent's may still arrive at AgentCore, and make its session."""
AT_ONCE = 64
ORPHAN_CHECK = 1.0  # seconds between two looks at whether the parent is there
PIECE = 64 * 1024


def main() -> None:
    """Wait for the end of the parent, and stop what it has left."""
    parent = os.getppid()
    # Whoever ends a whole group of processes ends the parent, too: that is when this is needed.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    left = _left_open(parent)
    if left:
        _stop_all(left, parent)


def _left_open(parent: int) -> dict[str, dict[str, Any]]:
    """What is open at the end of standard input, or of the parent: a process that it forked holds
    the pipe open, too."""
    sessions: dict[str, dict[str, Any]] = {}
    begun = b""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], ORPHAN_CHECK)
        if not readable:
            if os.getppid() != parent:
                return sessions
            continue
        piece = os.read(sys.stdin.fileno(), PIECE)
        if not piece:
            return sessions
        *lines, begun = (begun + piece).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "open" in said:
                sessions[said["open"]] = said
            else:
                sessions.pop(said["closed"], None)


def _stop_all(sessions: dict[str, dict[str, Any]], parent: int) -> None:
    began = time.monotonic()
    clients: dict[str, Any] = {}
    for said in sessions.values():
        name = json.dumps(said["client"])
        if name not in clients:
            clients[name] = _client(said["client"])
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
        stopped = {
            session_id: threads.submit(
                _stop, clients[json.dumps(said["client"])], said["target"], session_id, began
            )
            for session_id, said in sessions.items()
        }
    failures = {name: error for name, future in stopped.items() if (error := future.result())}
    count = len(stopped) - len(failures)
    _say(f"process {parent} ended with sessions open: {count} stopped, {len(failures)} not")
    for session_id, failure in failures.items():
        _say(f"session {session_id} ends by itself once it is idle: {failure}")


def _client(arguments: dict[str, Any]) -> Any:
    import boto3
    import botocore.config

    config = botocore.config.Config(
        connect_timeout=5,
        read_timeout=10,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=AT_ONCE,
    )
    return boto3.client("bedrock-agentcore", config=config, **arguments)


def _stop(client: Any, target: dict[str, str], session_id: str, began: float) -> str:
    """Stop a session; the last failure when that was not possible in time, or an empty text."""
    wait = 0.25
    while True:
        try:
            client.stop_runtime_session(**target, runtimeSessionId=session_id)
        except client.exceptions.ResourceNotFoundException:
            if time.monotonic() > began + ON_THE_WAY:
                return ""
            failure = ""
        except Exception as error:  # noqa: BLE001  # whatever it is, trying again is all there is
            failure = f"{type(error).__name__}: {error}"
        else:
            return ""
        if time.monotonic() + wait > began + LIMIT:
            return failure
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, 4.0)


def _say(text: str) -> None:
    """Write to standard error, of which the reader may be gone, too."""
    try:
        os.write(2, f"turnleaf: {text}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    main()
