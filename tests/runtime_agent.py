"""An AgentCoreRuntimeApp that does what its payload says: python runtime_agent.py FOLDER PORT

With a package's name before the port: that package's app of the same name.
"""

import importlib
import os
import signal
import sys
from pathlib import Path

import anyio
import anyio.lowlevel

folder, package, port = Path(sys.argv[1]), *(sys.argv[2:-1] or ["turnleaf.agent"]), sys.argv[-1]
app = importlib.import_module(package).AgentCoreRuntimeApp(state_dir=folder / "state")


async def streamed(payload):
    for number in range(payload["events"]):
        yield {"number": number, "padding": "x" * payload["size"]}
        await anyio.lowlevel.checkpoint()


async def until(path):
    while not await anyio.Path(path).exists():  # noqa: ASYNC110  # another process makes it
        await anyio.sleep(0.01)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@app.entrypoint
async def run(payload, context):
    with (folder / "runs").open("a") as runs:
        runs.write(f"{context.session_id} {payload['name']}\n")
    match payload["do"]:
        case "return":
            return {"session_id": context.session_id, "payload": payload}
        case "raise":
            raise ValueError("no luck")
        case "stream":
            return streamed(payload)
        case "wait":
            await until(folder / "go")
            return {"waited": True}
        case "die":
            die()
        case "die while storing":
            os.replace = die
    return None


if __name__ == "__main__":
    app.run(port=int(port))
