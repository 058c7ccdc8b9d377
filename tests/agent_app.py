"""An agent that does what its payload says: python agent_app.py PORT"""

import sys
from pathlib import Path

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from starlette.responses import PlainTextResponse, Response

app = BedrockAgentCoreApp()


async def streamed(payload):
    yield {"progress": 0.5}
    if payload["do"] == "stream and raise":
        raise ValueError("no luck with " + payload["_config"]["api_key"])
    yield {"reward": 1.0, "text": "two\nlines"}


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
async def run(payload, context):
    match payload["do"]:
        case "return":
            return {"session_id": context.session_id, "payload": payload}
        case "raise":
            raise ValueError("no luck with " + payload["_config"]["api_key"])
        case "stream" | "stream and raise":
            return streamed(payload)
        case "hang":
            return Silent(Path(payload["started"]), Path(payload["stopped"]))
        case "text":
            return PlainTextResponse("done, I think")
        case unknown:
            raise NotImplementedError(unknown)


if __name__ == "__main__":
    app.run(port=int(sys.argv[1]))
