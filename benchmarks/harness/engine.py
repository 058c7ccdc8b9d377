"""`python engine.py`: an engine that speaks SGLang's protocol and has every reply ready.

Configuration, one line of JSON on stdin: `outputs` (lists of ids, played in turn), `latency`
(seconds until a reply is sent), `event_interval` (seconds between the events of a stream, each of
which holds one id) and `experts` ([layers, top_k] of the routed experts that a request may ask for,
or null). Its readiness line is `{"url": …}`. It ends with its stdin.

`GET /times` answers `{routing key: [seconds from a request's last byte to its reply, …]}`, of the
calls since it was last asked.
"""

import asyncio
import base64
import json
import math
import random
import sys
import time
from collections import defaultdict
from typing import Any

import orjson
import uvloop
from aiohttp import web

POSITIONS = 12_000
"""Tokens of the longest path whose experts are asked for."""
NUMBERED = 128
"""Experts of a layer."""


class Output:
    """One reply's ids with made-up log-probabilities, as JSON."""

    def __init__(self, ids: list[int], drawn: random.Random) -> None:
        self.ids = ids
        self.entries = [orjson.dumps([-drawn.expovariate(2.0), each, None]) for each in ids]
        self.all_ids = orjson.dumps(ids)
        self.all_entries = b"[" + b",".join(self.entries) + b"]"
        self.finish = orjson.dumps({"type": "stop", "matched": ids[-1]})


class Experts:
    """Made-up rows for every position, in base64."""

    def __init__(self, shape: list[int], drawn: random.Random) -> None:
        numbers = math.prod(shape)
        if numbers % 3:
            raise ValueError("layers × top_k is no multiple of 3: a row does not end with a digit")
        rows = bytearray(4 * numbers * POSITIONS)
        rows[::4] = drawn.randbytes(numbers * POSITIONS).translate(
            bytes(1 + value % (NUMBERED - 1) for value in range(256))
        )
        self._digits = base64.b64encode(rows)
        self._digits_of_row = 4 * numbers // 3 * 4

    def first(self, rows: int) -> bytes:
        return self._digits[: rows * self._digits_of_row]


class Engine:
    def __init__(self, config: dict[str, Any]) -> None:
        drawn = random.Random(7)
        self._outputs = [Output(ids, drawn) for ids in config["outputs"]]
        self._probed = Output(config["outputs"][0][:1], drawn)
        self._experts = None if config["experts"] is None else Experts(config["experts"], drawn)
        self._latency = config["latency"]
        self._event_interval = config["event_interval"]
        self._played = 0
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        began = time.perf_counter()
        if asked["sampling_params"].get("max_new_tokens") == 1:  # a worker's probe
            output = self._probed
        else:
            output = self._outputs[self._played % len(self._outputs)]
            self._played += 1
        if asked.get("stream"):
            return await self._stream(request, asked, output)
        if self._latency:
            await asyncio.sleep(self._latency)
        meta = _meta(asked, len(output.ids), output.finish, output.all_entries)
        if self._experts is not None and asked.get("return_routed_experts"):
            start = asked.get("routed_experts_start_len", 0)
            rows = len(asked["input_ids"]) + len(output.ids) - 1 - start
            meta += b',"routed_experts":"%b"' % self._experts.first(rows)
        body = b'{"text":"","output_ids":%b,"meta_info":{%b}}' % (output.all_ids, meta)
        name = request.headers.get("x-smg-routing-key", "")
        self._times[name].append(time.perf_counter() - began)
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self, request: web.Request, asked: dict[str, Any], output: Output
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        due = time.perf_counter()
        for count, entry in enumerate(output.entries, start=1):
            finish = output.finish if count == len(output.ids) else b"null"
            meta = _meta(asked, count, finish, b"[" + entry + b"]")
            event = b'data: {"text":"","output_ids":[%d],"meta_info":{%b}}\n\n'
            await response.write(event % (output.ids[count - 1], meta))
            due += self._event_interval
            await asyncio.sleep(due - time.perf_counter())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def tell_times(self, _: web.Request) -> web.Response:
        times, self._times = self._times, defaultdict(list)
        return web.json_response(times)


def _meta(asked: dict[str, Any], completion_tokens: int, finish: bytes, entries: bytes) -> bytes:
    """What is in `meta_info`."""
    return (
        b'"id":%b,"finish_reason":%b,"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":0,'
        b'"weight_version":"default","output_token_logprobs":%b'
    ) % (orjson.dumps(asked["rid"]), finish, len(asked["input_ids"]), completion_tokens, entries)


async def serve(config: dict[str, Any]) -> None:
    engine = Engine(config)

    async def empty(_: web.Request) -> web.Response:
        return web.Response()

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"incremental_streaming_output": True})

    app = web.Application(client_max_size=2**26)
    app.add_routes(
        [
            web.post("/generate", engine.generate),
            web.post("/abort_request", empty),
            web.get("/health", empty),
            web.get("/server_info", info),
            web.get("/times", engine.tell_times),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    print(json.dumps({"url": url}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.stdin.readline())))
