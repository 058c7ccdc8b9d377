"""Runs a program until standard input ends, which it also does when whoever started this is killed.

    python supervise.py PROGRAM [ARGUMENT …]

The program has a session of its own: what it leaves behind when it is told to end is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE = 2.0  # seconds; SGLang waits for five until it looks at GPUs that are not there


def main() -> int:
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_stdin() -> None:
        while os.read(0, 1024):
            pass
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    code = process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main())
