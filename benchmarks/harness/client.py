"""`python client.py`: agents that call a calculator, many at once; what every gateway is measured by.

Configuration, one line of JSON on stdin: `agents` (a list of `[base_url, api_key]`), `turns` (of
each session), `words` (of each tool result), `first_words` (of the user's message), `tokens` (that
each reply must have), `calls` (tool calls of each reply), `stream`, `stagger` (seconds over which the
sessions begin) and `before`: so many turns into each session it prints a line, and goes on when it
reads one. A streamed turn is a conversation of its own; the others continue each other. All sessions
run at once. In the end it prints one line of JSON:
`{"seconds": [[of each turn, …] of each agent, …], "failures": [message, …]}`; a session that fails
has no turns.
"""

import asyncio
import json
import random
import sys
import time

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
    "the a this that each every first second third next last sum product difference quotient "
    "number value digit result step line column row table total part whole half quarter answer "
    "is was gives makes equals becomes follows remains holds adds takes leaves divides rounds to "
    "of in from with by for over under between before after again once twice then therefore "
    "because while until where large small exact known given remaining positive negative zero"
).split()


def prose(drawn, words):
    """So many words in sentences."""
    chosen = drawn.choices(WORDS, k=words)
    ends = [drawn.choice([" "] * 10 + [", ", ". "]) for _ in chosen]
    return "".join(word + end for word, end in zip(chosen, ends, strict=True)).strip()


def user_message(drawn, config):
    return {"role": "user", "content": prose(drawn, config["first_words"])}


class Pause:
    """Where all sessions stop; one that failed before counts as there."""

    def __init__(self, sessions):
        self.under_way = set(range(sessions))
        self.reached = asyncio.Event()
        self.over = asyncio.Event()

    def reach(self, number):
        self.under_way.discard(number)
        if not self.under_way:
            self.reached.set()


async def paused(pause):
    """Return when the sessions have stopped and may go on."""
    await pause.reached.wait()
    print("{}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    pause.over.set()


async def session(http, config, number, pause):
    try:
        return await turns(http, config, number, pause)
    finally:
        pause.reach(number)


async def turns(http, config, number, pause):
    """One agent; the seconds that each of its turns took."""
    drawn = random.Random(number)
    base_url, api_key = config["agents"][number]
    await asyncio.sleep(config["stagger"] * number / len(config["agents"]))
    messages = [{"role": "system", "content": SYSTEM}, user_message(drawn, config)]
    request = {"model": "model", "messages": messages, "tools": [CALCULATOR]}
    if config["stream"]:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    seconds = []
    for turn in range(config["turns"]):
        if turn and turn == config["before"]:
            pause.reach(number)
            await pause.over.wait()
        body = orjson.dumps(request)
        began = time.perf_counter()
        async with http.post(
            f"{base_url}/chat/completions",
            data=body,
            headers={"authorization": f"Bearer {api_key}", "content-type": "application/json"},
        ) as response:
            said = await response.read()
        seconds.append(time.perf_counter() - began)
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {said[:300].decode(errors='replace')}")
        if config["stream"]:
            check_stream(said, config)
            messages[1] = user_message(drawn, config)
            continue
        reply = orjson.loads(said)
        (choice,) = reply["choices"]
        message, sampled = choice["message"], reply["usage"]["completion_tokens"]
        calls = message.get("tool_calls") or []
        if sampled != config["tokens"] or len(calls) != config["calls"]:
            raise RuntimeError(f"a reply of {sampled} tokens with {len(calls)} tool calls")
        messages.append(message)
        for call in calls:
            content = prose(drawn, config["words"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return seconds


def check_stream(said, config):
    events = [line[6:] for line in said.split(b"\n") if line.startswith(b"data: ")]
    if events[-1] != b"[DONE]":
        raise RuntimeError(f"a stream that ends with {events[-1]}")
    sampled = orjson.loads(events[-2])["usage"]["completion_tokens"]
    if sampled != config["tokens"]:
        raise RuntimeError(f"a stream of {sampled} tokens")


async def main(config):
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    agents = range(len(config["agents"]))
    pause = Pause(len(agents))
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        sessions = [session(http, config, number, pause) for number in agents]
        if config["before"]:
            sessions.append(paused(pause))
        outcomes = await asyncio.gather(*sessions, return_exceptions=True)
    failures = [repr(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
    seconds = [outcomes[at] if isinstance(outcomes[at], list) else [] for at in agents]
    print(json.dumps({"seconds": seconds, "failures": failures}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.stdin.readline())))
