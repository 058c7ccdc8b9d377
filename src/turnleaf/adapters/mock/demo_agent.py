"""`python -m turnleaf.adapters.mock.demo_agent`: the demo's agent behind HTTP, as a child process.

It takes `POST /invocations` and `GET /ping`, as an agent on AgentCore Runtime does. Configuration,
one line of JSON on stdin: optionally `host` and `port`. Its readiness line is `{"url": …}`.
"""

import socket
import sys
from contextlib import AsyncExitStack
from typing import Any

import anyio
import openai
import orjson
from openai.types.chat import ChatCompletionMessageParam
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnleaf.adapters.mock._task import FEEDBACK, answer_of, question, question_again, reward
from turnleaf.core import ContractError
from turnleaf.gateway._child import announce, announce_error, read_config, until_stdin_closes
from turnleaf.gateway._serving import BACKLOG, served

__all__ = ["agent_app", "run"]

TIMEOUT = 60.0
"""Seconds of a model call: as long as the demo's rollouts may take."""


async def run(payload: dict[str, Any], client: openai.AsyncOpenAI) -> dict[str, Any]:
    """Ask for the largest digit until the answer is right, and return the reward.

    payload: `digits`; `turns`, how often it asks at most; `retells`, whether it forgets its first
    try and asks anew what it learned from it, instead of going on from there.
    """
    digits, config = payload["digits"], payload["_config"]
    model = client.with_options(base_url=config["base_url"], api_key=config["api_key"])
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question(digits)}]
    answers: list[int | None] = []
    while len(answers) < payload["turns"]:
        reply = await model.chat.completions.create(model=config["model_id"], messages=messages)
        said = reply.choices[0].message.content or ""
        answer = answer_of(said)
        answers.append(answer)
        if answer == max(digits):
            break
        if payload["retells"] and len(answers) == 1 and answer is not None:
            messages = [{"role": "user", "content": question_again(digits, answer)}]
        else:
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": FEEDBACK},
            ]
    return {"reward": reward(answers, digits), "answers": answers}


def agent_app(client: openai.AsyncOpenAI) -> Starlette:
    """The ASGI app. client: lends its connections to all rollouts, each of which has a key of its
    own: a client for each would cost more than everything else that the agent does."""

    async def invocations(request: Request) -> Response:
        try:
            result = await run(orjson.loads(await request.body()), client)
        except openai.OpenAIError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        return Response(orjson.dumps(result), media_type="application/json")

    async def ping(_: Request) -> Response:
        return Response(orjson.dumps({"status": "Healthy"}), media_type="application/json")

    return Starlette(
        routes=[
            Route("/invocations", invocations, methods=["POST"]),
            Route("/ping", ping),
        ]
    )


async def _serve(config: dict[str, Any]) -> None:
    host, port = config.get("host", "127.0.0.1"), config.get("port", 0)
    async with AsyncExitStack() as stack:
        client = openai.AsyncOpenAI(
            api_key="each rollout has its own",
            base_url="http://unused",
            # The gateway is on this machine, whatever proxies the environment names.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
            timeout=TIMEOUT,
        )
        stack.push_async_callback(client.close)
        listening = socket.create_server((host, port), backlog=BACKLOG)
        await stack.enter_async_context(served(agent_app(client), listening))
        announce({"url": f"http://{host}:{listening.getsockname()[1]}"})
        await until_stdin_closes()


def main() -> None:
    """Serve until stdin closes."""
    try:
        anyio.run(_serve, read_config(), backend_options={"use_uvloop": True})
    except (ContractError, OSError) as error:
        announce_error(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
