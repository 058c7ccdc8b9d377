"""`python client.py`: agents that call a calculator, many at once.

Configuration, one line of JSON on stdin: `agents` (a list of `[base_url, api_key]`) and the fields
of `loads.Load`. Where that has a `before`, it prints a line when all agents have come so far, and
goes on when it reads one. A streamed turn is a conversation of its own; the others are those of the
agent's `conversations` in turn. In the end it prints one line of JSON: `{"seconds":
[[of each turn, …] of each agent, …], "failures": [message, …]}`; an agent that fails has no turns.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

import aiohttp
import orjson
import uvloop

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression and explains the result.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "What to compute."},
                "digits": {"type": "integer", "description": "Digits behind the point."},
            },
            "required": ["expression"],
        },
    },
}
SYSTEM = "You are careful with numbers. Use the calculator for every step, and say what you found."
WORDS = (
    *("the", "a", "this", "that", "each", "every", "first", "second", "third", "next", "last"),
    *("sum", "product", "difference", "quotient", "number", "value", "digit", "result", "step"),
    *("line", "column", "row", "table", "total", "part", "whole", "half", "quarter", "answer"),
    *("is", "was", "gives", "makes", "equals", "becomes", "follows", "remains", "holds", "adds"),
    *("takes", "leaves", "divides", "rounds", "to", "of", "in", "from", "with", "by", "for"),
    *("over", "under", "between", "before", "after", "again", "once", "twice", "then", "because"),
    *("while", "until", "where", "large", "small", "exact", "known", "given", "positive", "zero"),
)


def prose(drawn: random.Random, words: int) -> str:
    """So many words in sentences."""
    chosen = drawn.choices(WORDS, k=words)
    ends = drawn.choices([" "] * 10 + [", ", ". "], k=words)
    return "".join(word + end for word, end in zip(chosen, ends, strict=True)).strip()


def user_message(drawn: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": prose(drawn, config["first_words"])}


class Pause:
    """Where all agents stop; one that failed before counts as there."""

    def __init__(self, agents: int) -> None:
        self._under_way = set(range(agents))
        self._reached = asyncio.Event()
        self.over = asyncio.Event()

    def reach(self, number: int) -> None:
        self._under_way.discard(number)
        if not self._under_way:
            self._reached.set()

    async def hold(self) -> None:
        """Tell when all are there, and let them go on when told."""
        await self._reached.wait()
        print("{}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        self.over.set()


async def agent(
    http: aiohttp.ClientSession, config: dict[str, Any], number: int, pause: Pause
) -> list[float]:
    """The seconds that each turn took."""
    drawn = random.Random(number)
    await asyncio.sleep(config["stagger"] * number / len(config["agents"]))
    conversations = [
        [{"role": "system", "content": SYSTEM}, user_message(drawn, config)]
        for _ in range(config["conversations"])
    ]
    seconds = []
    try:
        for turn in range(config["turns"]):
            if turn and turn == config["before"]:
                pause.reach(number)
                await pause.over.wait()
            messages = conversations[turn % len(conversations)]
            began = time.perf_counter()
            said = await asked(http, config, number, messages)
            seconds.append(time.perf_counter() - began)
            if config["stream"]:
                check_stream(said, config)
                messages[1] = user_message(drawn, config)
            else:
                messages += continuation(said, config, drawn)
    finally:
        pause.reach(number)
    return seconds


async def asked(
    http: aiohttp.ClientSession, config: dict[str, Any], number: int, messages: list[Any]
) -> bytes:
    """The body of the reply."""
    base_url, api_key = config["agents"][number]
    request: dict[str, Any] = {"model": "model", "messages": messages, "tools": [CALCULATOR]}
    if config["stream"]:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    async with http.post(
        f"{base_url}/chat/completions", data=orjson.dumps(request), headers=headers
    ) as response:
        said = await response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {said[:300].decode(errors='replace')}")
    return said


def continuation(said: bytes, config: dict[str, Any], drawn: random.Random) -> list[Any]:
    """The reply and the results of its tool calls, as messages."""
    reply = orjson.loads(said)
    (choice,) = reply["choices"]
    message, sampled = choice["message"], reply["usage"]["completion_tokens"]
    calls = message.get("tool_calls") or []
    if sampled != config["tokens"] or len(calls) != 1:
        raise RuntimeError(f"a reply of {sampled} tokens with {len(calls)} tool calls")
    result = prose(drawn, config["words"])
    return [message, {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}]


def check_stream(said: bytes, config: dict[str, Any]) -> None:
    events = [line[6:] for line in said.split(b"\n") if line.startswith(b"data: ")]
    sampled = orjson.loads(events[-2])["usage"]["completion_tokens"]
    if events[-1] != b"[DONE]" or sampled != config["tokens"]:
        raise RuntimeError(f"a stream of {sampled} tokens that ends with {events[-1][:100]!r}")


async def main(config: dict[str, Any]) -> None:
    numbers = range(len(config["agents"]))
    pause = Pause(len(numbers))
    async with (
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0)
        ) as http,
        asyncio.TaskGroup() as tasks,
    ):
        if config["before"]:
            tasks.create_task(pause.hold())
        outcomes = await asyncio.gather(
            *(agent(http, config, number, pause) for number in numbers), return_exceptions=True
        )
    seconds = [outcome if isinstance(outcome, list) else [] for outcome in outcomes]
    failures = [repr(outcome) for outcome in outcomes if not isinstance(outcome, list)]
    print(json.dumps({"seconds": seconds, "failures": failures}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.stdin.readline())))
