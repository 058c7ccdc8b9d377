"""Agents built with the clients of docs/clients.md, from the code of that page."""

import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import openai

Config = Mapping[str, str]
Converse = Callable[[Config, Sequence[str]], Awaitable[list[str]]]
"""Puts questions to an agent, each in the conversation of the last one, and returns its answers."""

PAGE = Path(__file__).parents[1] / "docs" / "clients.md"

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an expression.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}

# Else the import of litellm looks for a list of prices on GitHub, for ten seconds.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def calculate(expression: str) -> str:
    """Evaluate an expression.

    Args:
        expression: a sum or a product of two numbers
    """
    left, operation, right = re.fullmatch(r"(\d+)([+*])(\d+)", expression).groups()
    return str(int(left) + int(right) if operation == "+" else int(left) * int(right))


@cache
def _page(heading: str) -> dict[str, Any]:
    """What the code under a heading of the page defines."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    defined: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE):
        exec(compile(code, f"{PAGE}: {heading}", "exec"), defined)
    return defined


def _results(message: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": calculate(**json.loads(call.function.arguments)),
        }
        for call in message.tool_calls
    ]


async def _by_hand(ask: Callable[[list[Any]], Awaitable[Any]], questions: Sequence[str]) -> Any:
    """An agent's loop around a client that is only a client."""
    messages: list[Any] = []
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            message = await ask(messages)
            messages.append(message)
            if not message.tool_calls:
                break
            messages += _results(message)
        answers.append(message.content)
    return answers


async def _openai(config: Config, questions: Sequence[str], *, stream: bool) -> list[str]:
    async with _page("openai")["openai_client"](config) as client:
        request = {"model": config["model_id"], "tools": [TOOL]}

        async def ask(messages: list[Any]) -> Any:
            if stream:
                async with client.chat.completions.stream(messages=messages, **request) as events:
                    reply = await events.get_final_completion()
            else:
                reply = await client.chat.completions.create(messages=messages, **request)
            return reply.choices[0].message

        return await _by_hand(ask, questions)


async def _litellm(config: Config, questions: Sequence[str], *, stream: bool) -> list[str]:
    import litellm

    async def ask(messages: list[Any]) -> Any:
        reply = await _page("litellm")["litellm_reply"](
            config, messages, tools=[TOOL], stream=stream
        )
        if stream:
            reply = litellm.stream_chunk_builder([chunk async for chunk in reply])
        return reply.choices[0].message

    return await _by_hand(ask, questions)


async def _strands(config: Config, questions: Sequence[str], *, stream: bool) -> list[str]:
    import strands

    agent = _page("strands-agents")["strands_agent"](config, [strands.tool(calculate)])
    if not stream:
        agent.model.update_config(stream=False)
    return [str(await agent.invoke_async(question)).strip() for question in questions]


async def _sdk(config: Config, questions: Sequence[str], *, stream: bool) -> list[str]:
    from agents import Runner, function_tool

    agent = _page("openai-agents")["sdk_agent"](config, [function_tool(calculate)])
    history: list[Any] = []
    answers = []
    async with agent.model._client:
        for question in questions:
            history.append({"role": "user", "content": question})
            if stream:
                result = Runner.run_streamed(agent, history)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, history)
            history = result.to_input_list()
            answers.append(result.final_output)
    return answers


async def _langchain(config: Config, questions: Sequence[str], *, stream: bool) -> list[str]:
    agent = _page("langchain and langgraph")["langchain_agent"](config, [calculate])
    state: dict[str, Any] = {"messages": []}
    answers = []
    for question in questions:
        state["messages"].append({"role": "user", "content": question})
        if stream:  # the messages as they are streamed make the model stream, too
            async for mode, value in agent.astream(state, stream_mode=["messages", "values"]):
                state = value if mode == "values" else state
        else:
            state = await agent.ainvoke(state)
        answers.append(state["messages"][-1].content)
    return answers


async def _pydantic_ai(config: Config, questions: Sequence[str], *, stream: bool) -> list[str]:
    agent = _page("pydantic-ai")["pydantic_agent"](config, [calculate])

    async def seen(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    history: list[Any] = []
    answers = []
    async with agent:  # which closes its connections
        for question in questions:
            result = await agent.run(
                question, message_history=history, event_stream_handler=seen if stream else None
            )
            history = result.all_messages()
            answers.append(result.output)
    return answers


async def _smolagents(config: Config, questions: Sequence[str], *, stream: bool) -> list[str]:
    import smolagents

    def run() -> list[str]:
        tools = [smolagents.tool(calculate)]
        agent = _page("smolagents")["smolagents_agent"](config, tools)
        agent.stream_outputs = stream
        return [agent.run(question, reset=False) for question in questions]

    return await anyio.to_thread.run_sync(run)


_CLIENTS: dict[str, Callable[..., Awaitable[list[str]]]] = {
    "openai": _openai,
    "strands-agents": _strands,
    "openai-agents": _sdk,
    "langchain": _langchain,
    "litellm": _litellm,
    "pydantic-ai": _pydantic_ai,
    "smolagents": _smolagents,
}

if not openai.__version__.startswith("2."):
    del _CLIENTS["strands-agents"]  # which goes with openai 2 alone

AGENTS: dict[str, Converse] = {
    f"{name}{', streaming' if stream else ''}": partial(converse, stream=stream)
    for name, converse in _CLIENTS.items()
    for stream in (False, True)
}
