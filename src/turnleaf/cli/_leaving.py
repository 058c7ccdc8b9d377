"""Leaving the process, whatever the agent still does in it."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Collection
from typing import NoReturn

from turnleaf.core import Service
from turnleaf.sessions._threads import rests

__all__ = ["leave"]

GRACE = 3.0
"""Seconds for a cancelled agent's clean-up and, after ctrl-C, for children to end."""
STILL = {
    "try": "the agent still runs",
    "demo": "something still runs",
    "slime check": "the canary's agent still runs",
}
THREAD_GRACE = 0.5
"""Seconds for idle threads to end."""


def leave(
    service: Service, code: int, *, earlier: Collection[threading.Thread], command: str
) -> NoReturn:
    """Close the service and exit with `code`, even when an agent that was cut off still runs.

    Nothing can stop a thread, and the interpreter would wait for it: then the process ends at
    once, and its children do when their stdin does. earlier: threads that are not the agent's.
    """
    if code == 0:
        service.close()
        sys.exit(code)
    closing = threading.Thread(target=service.close, daemon=True)
    closing.start()
    with contextlib.suppress(KeyboardInterrupt):
        closing.join(GRACE)
        end = time.monotonic() + THREAD_GRACE
        started = [
            thread
            for thread in threading.enumerate()
            if thread not in earlier and not rests(thread)
        ]
        for thread in started:
            thread.join(max(0.0, end - time.monotonic()))
        if not any(thread.is_alive() for thread in started):
            sys.exit(code)
    sys.stderr.write(f"turnleaf {command}: {STILL[command]} in this process, which now ends\n")
    sys.stderr.flush()
    os._exit(code)
