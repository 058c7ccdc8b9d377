"""An agent that does what its payload says: python agent_app.py [FOLDER] PORT

With a folder for its results it speaks the envelope of background invocations.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path

import aiohttp
import anyio
from bedrock_agentcore.runtime import BedrockAgentCoreApp
from starlette.responses import PlainTextResponse, Response

from turnleaf.agent import AgentCoreRuntimeApp

app = AgentCoreRuntimeApp(state_dir=sys.argv[1]) if len(sys.argv) > 2 else BedrockAgentCoreApp()


met = defaultdict(lambda: [0, anyio.Event()])


async def meet(name, others):
    """Return once so many invocations are here."""
    meeting = met[name]
    meeting[0] += 1
    if meeting[0] == others:
        meeting[1].set()
    await meeting[1].wait()


async def conversation(payload):
    """Two model calls, with all other rollouts between them."""
    config = payload["_config"]
    messages = [{"role": "user", "content": payload["prompt"]}]
    headers = {"authorization": f"Bearer {config['api_key']}"}
    async with aiohttp.ClientSession(config["base_url"] + "/", headers=headers) as client:
        for turn in range(2):
            body = {"model": config["model_id"], "messages": messages}
            async with client.post("chat/completions", json=body) as response:
                reply = (await response.json())["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": "And then?"}]
            await meet((payload["meeting"], turn), payload["others"])
    return {"reward": 1.0}


async def streamed(payload):
    yield {"progress": 0.5}
    if payload["do"] == "stream and raise":
        raise ValueError("no luck with " + payload["_config"]["api_key"])
    yield {"reward": 1.0, "text": "two\nlines"}


async def ticking():
    while True:
        yield {"tick": True}
        await anyio.sleep(0.02)


def deep_inside(depth):
    if depth:
        return deep_inside(depth - 1) if depth % 2 else between(depth)
    raise ValueError("no luck " + "at all " * 100)


def between(depth):
    return deep_inside(depth - 1)


class Silent(Response):
    """Answers nothing until the client is gone; the app itself would not tell a handler."""

    def __init__(self, started, stopped):
        super().__init__()
        self.started, self.stopped = started, stopped

    async def __call__(self, scope, receive, send):
        self.started.touch()
        message = await receive()
        assert message["type"] == "http.disconnect"
        self.stopped.touch()


@app.entrypoint
async def run(payload, context):  # noqa: C901  # one case after another
    match payload.get("do", "nothing"):
        case "return":
            return {"session_id": context.session_id, "payload": payload}
        case "raise":
            raise ValueError("no luck with " + payload["_config"]["api_key"])
        case "raise deep inside":
            return deep_inside(8)
        case "stream" | "stream and raise":
            return streamed(payload)
        case "converse":
            return await conversation(payload)
        case "pretend":
            invocation_id = payload["_agentcore_runtime"]["invocation_id"]
            return {"version": 1, "invocation_id": invocation_id, "status": "in_progress"}
        case "hang":
            return Silent(Path(payload["started"]), Path(payload["stopped"]))
        case "where":
            return {"pid": os.getpid(), "session_id": context.session_id}
        case "tick":
            return ticking()
        case "wait":
            await anyio.Path(payload["started"]).touch()
            while not await anyio.Path(payload["go"]).exists():  # noqa: ASYNC110
                await anyio.sleep(0.01)
            return {"reward": 1.0}
        case "work":
            return {"task": app.add_async_task("work")}
        case "rest":
            return {"done": app.complete_async_task(payload["task"])}
        case "start a child":
            child = await anyio.open_process(["sleep", "600"])
            return {"pid": child.pid}
        case "text":
            return PlainTextResponse("done, I think")
        case "nothing":
            return {"asked": sorted(payload)}
        case unknown:
            raise NotImplementedError(unknown)


if __name__ == "__main__":
    app.run(port=int(sys.argv[-1]))
