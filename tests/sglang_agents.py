"""Agents for rollouts on the real SGLang: what they do depends on what a small model samples."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from openai import AsyncOpenAI

from tests.messages import result, user
from tests.sglang_models import SUMS, TOOL, question

Agent = Callable[[AsyncOpenAI], Awaitable[None]]

ASKED = [user(question(*SUMS[0]))]
LIMIT = 40  # tokens


async def ask(
    client: AsyncOpenAI, messages: list[Any], *, stream: bool = False, **request: Any
) -> list[dict[str, Any]]:
    """The replies' messages."""
    request = {"model": "m", "messages": messages, "max_tokens": LIMIT, **request}
    if stream:
        replies: dict[int, dict[str, Any]] = {}
        async for chunk in await client.chat.completions.create(stream=True, **request):
            for choice in chunk.choices:
                reply = replies.setdefault(choice.index, {"role": "assistant", "content": ""})
                _add(reply, choice.delta.model_dump(exclude_none=True))
        return [replies[index] for index in sorted(replies)]
    reply = await client.chat.completions.create(**request)
    return [choice.message.model_dump(exclude_none=True) for choice in reply.choices]


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    for part in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": "function", "function": part["function"]})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [result("3", call["id"]) for call in message.get("tool_calls", ())]


def respelled(message: dict[str, Any]) -> dict[str, Any]:
    """As a client sends it back that parses arguments, writes them anew and drops reasoning."""
    message = {name: value for name, value in message.items() if name != "reasoning_content"}
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
    return message


async def use_tools(client: AsyncOpenAI, *, stream: bool = False, rounds: int = 3) -> None:
    messages = list(ASKED)
    for sum_ in SUMS:
        for _ in range(rounds):
            (message,) = await ask(client, messages, tools=[TOOL], stream=stream)
            messages += [respelled(message), *results(message)]
            if not results(message):
                break
        messages.append(user(question(*sum_)))


async def stream_tools(client: AsyncOpenAI) -> None:
    await use_tools(client, stream=True)


async def fork(client: AsyncOpenAI) -> None:
    """Rewrites what was said, and asks the same thing again."""
    (message,) = await ask(client, ASKED)
    await ask(client, [*ASKED, message, user("2+5?")])
    await ask(client, [*ASKED, {"role": "assistant", "content": "It is 3."}, user("2+5?")])
    await ask(client, [*ASKED, message, user("2+5?")])


async def delegate(client: AsyncOpenAI) -> None:
    """Has two sub-agents, at the same time, with conversations of their own."""

    async def sub_agent(name: str) -> None:
        messages = [{"role": "system", "content": name}, *ASKED]
        (message,) = await ask(client, messages)
        await ask(client, [*messages, message, user("Sure?")], stream=True)

    (message,) = await ask(client, ASKED, tools=[TOOL])
    async with anyio.create_task_group() as tasks:
        for name in ("one", "two"):
            tasks.start_soon(sub_agent, name)
    await ask(client, [*ASKED, message, *results(message), user("And?")], tools=[TOOL])


async def lose_connections(client: AsyncOpenAI) -> None:
    """Goes away while a reply is sampled, and asks again."""
    for request in ({}, {"stream": True, "n": 2}):
        with anyio.move_on_after(0.15):
            await ask(client, ASKED, **request)
        await ask(client, ASKED, extra_headers={"x-stainless-retry-count": "1"}, **request)


async def be_cut(client: AsyncOpenAI) -> None:
    """Goes on after replies that a limit or a stop string ended."""
    messages = list(ASKED)
    for limits in ({"max_tokens": 2}, {"max_tokens": 5}, {"stop": ["a"]}, {"stop": ["is", "ll"]}):
        (message,) = await ask(client, messages, **limits)
        messages += [message, user("Go on.")]


async def choose(client: AsyncOpenAI) -> None:
    """Takes one of several replies, and looks at log-probabilities."""
    first, _ = await ask(client, ASKED, n=2, logprobs=True, tools=[TOOL], stream=True)
    messages = [*ASKED, first, *results(first), user("Sure?")]
    await ask(client, messages, n=2, logprobs=True, tools=[TOOL])
    hidden = {"extra_headers": {"x-turnleaf-train": "false"}}
    await ask(client, [*ASKED, first, user("Which?")], **hidden)


AGENTS: dict[str, Agent] = {
    "tools": use_tools,
    "tools, streaming": stream_tools,
    "forks": fork,
    "sub-agents": delegate,
    "retries": lose_connections,
    "cut turns": be_cut,
    "choices": choose,
}
