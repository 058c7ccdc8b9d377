"""`python engine.py`: an engine that speaks SGLang's protocol and has every reply ready.

Configuration, one line of JSON on stdin: `outputs` (lists of ids, played in turn), `latency` (seconds
until a reply is sent), `event_interval` (seconds between the events of a stream, each of which holds
one id) and `experts` ([layers, top_k] of the routed experts that a request may ask for, or null). Its
readiness line is `{"url": …}`. It ends with its stdin.

`GET /times` answers `{routing key: [seconds from a request's last byte to its reply, …]}` and
forgets them.
"""

import asyncio
import base64
import json
import math
import random
import sys
import time
from collections import defaultdict

import orjson
import uvloop
from aiohttp import web

POSITIONS = 12_000
EXPERTS = 128


class Output:
    """One reply's ids with made-up log-probabilities, as JSON."""

    def __init__(self, ids, drawn):
        self.entries = [orjson.dumps([-drawn.expovariate(2.0), token_id, None]) for token_id in ids]
        self.ids = ids
        self.all_entries = b"[" + b",".join(self.entries) + b"]"
        self.all_ids = orjson.dumps(ids)
        self.finish = orjson.dumps({"type": "stop", "matched": ids[-1]})


class Engine:
    def __init__(self, config):
        drawn = random.Random(7)
        self.outputs = [Output(ids, drawn) for ids in config["outputs"]]
        self.played = 0
        self.latency = config["latency"]
        self.event_interval = config["event_interval"]
        self.times = defaultdict(list)
        self.bytes_per_position = 0
        self.experts = b""
        if config["experts"] is not None:
            numbers = math.prod(config["experts"])
            # So many bytes end where a group of base64's digits does.
            if numbers % 3:
                raise ValueError("layers × top_k must be divisible by 3")
            rows = bytearray(4 * numbers * POSITIONS)
            rows[::4] = drawn.randbytes(numbers * POSITIONS).translate(
                bytes(1 + value % (EXPERTS - 1) for value in range(256))
            )
            self.experts = base64.b64encode(rows)
            self.bytes_per_position = 4 * numbers // 3 * 4

    async def generate(self, request):
        asked = orjson.loads(await request.read())
        began = time.perf_counter()
        output = self.outputs[self.played % len(self.outputs)]
        self.played += 1
        if asked["sampling_params"].get("max_new_tokens") == 1:  # a worker's probe
            output = Output(output.ids[:1], random.Random(7))
        if asked.get("stream"):
            return await self.stream(request, asked, output)
        if self.latency:
            await asyncio.sleep(self.latency)
        meta = self.meta(asked, len(output.ids), output.finish, output.all_entries)
        if asked.get("return_routed_experts"):
            start = asked.get("routed_experts_start_len", 0)
            rows = len(asked["input_ids"]) + len(output.ids) - 1 - start
            meta += b',"routed_experts":"%b"' % self.experts[: rows * self.bytes_per_position]
        body = b'{"text":"","output_ids":%b,"meta_info":{%b}}' % (output.all_ids, meta)
        self.times[request.headers.get("x-smg-routing-key", "")].append(time.perf_counter() - began)
        return web.Response(body=body, content_type="application/json")

    async def stream(self, request, asked, output):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        due = time.perf_counter()
        last = len(output.ids)
        for count, entry in enumerate(output.entries, start=1):
            finish = output.finish if count == last else b"null"
            meta = self.meta(asked, count, finish, b"[" + entry + b"]")
            event = b'data: {"text":"","output_ids":[%d],"meta_info":{%b}}\n\n'
            await response.write(event % (output.ids[count - 1], meta))
            due += self.event_interval
            await asyncio.sleep(due - time.perf_counter())
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    def meta(asked, completion_tokens, finish, entries):
        return (
            b'"id":%b,"finish_reason":%b,"prompt_tokens":%d,"completion_tokens":%d,'
            b'"cached_tokens":0,"weight_version":"default","output_token_logprobs":%b'
        ) % (
            orjson.dumps(asked["rid"]),
            finish,
            len(asked["input_ids"]),
            completion_tokens,
            entries,
        )

    async def tell_times(self, _):
        times, self.times = self.times, defaultdict(list)
        return web.json_response(times)


async def serve(config):
    engine = Engine(config)

    async def empty(_):
        return web.Response()

    async def info(_):
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
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.stdin.readline())))
