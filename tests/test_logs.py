"""The worker's log is JSON, and neither it nor the metrics tell a secret or a message's text."""

import io
import json
import logging
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import anyio
import attrs
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.gateway_stack import TOKEN, running_gateway
from tests.small_checkpoint import small_checkpoint, small_tokenizer
from tests.unstarted_worker import refusal
from tests.waiting import until
from turnleaf.adapters.mock import ScriptedEngine, serve_engine
from turnleaf.gateway import WorkerConfig, run_worker
from turnleaf.gateway._logs import JsonFormatter, LogFormat, TextFormatter
from turnleaf.gateway._serving import served
from turnleaf.gateway.rendering import Renderer

MARK = "xyzzy"
QUESTION = {"role": "user", "content": f"What is {MARK}?"}


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("turnleaf.x", logging.WARNING, "", 0, message, args, info)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_a_line_is_one_json_object() -> None:
    key, turn = f"key-{'0a' * 12}", f"chatcmpl-{'1b' * 12}-2"
    entry = record("key %s, turn %s:\n\ud800 “x”", key, turn)
    entry.created = 1_700_000_000.25
    text = JsonFormatter().format(entry)
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "logger": "turnleaf.x",
        "message": f"key {key}, turn {turn}:\n\ud800 “x”",
        "key": key,
        "turn": turn,
    }


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_an_exception_is_where_it_happened_without_its_text(formatter: logging.Formatter) -> None:
    inner = ExceptionGroup(MARK, [raised(KeyError(MARK)), raised(OSError(MARK))])
    error = raised(ValueError(MARK), cause=raised(inner))
    text = formatter.format(record("it failed", error=error))
    assert MARK not in text
    names = ["ExceptionGroup", "KeyError", "OSError", "which led to", "ValueError"]
    assert [text.index(name) for name in names] == sorted(text.index(name) for name in names)
    assert __file__ in text
    assert "in raised" in text


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """What is logged by anything that runs in a worker."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    loggers = [logging.getLogger(name) for name in ("turnleaf", "uvicorn", "aiohttp", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def echoing_engine() -> Starlette:
    """An engine whose replies are all wrong, and quote the text that was asked."""
    meta = {
        "completion_tokens": 1,
        "output_token_logprobs": [[-1.0, 7, MARK]],
        "finish_reason": {"type": "stop", "matched": [MARK] * 9},
    }
    replies: list[tuple[int, Any]] = [
        (400, {"error": {"message": f"cannot sample {MARK}"}}),
        (422, MARK),
        (500, {"detail": MARK}),
        (400, "Request timed out"),
        (429, MARK),
        (404, MARK),
        (200, MARK),
        (200, {"text": MARK, "meta_info": MARK}),
        (200, {"text": MARK, "output_ids": [7], "meta_info": meta}),
        (200, {"text": MARK, "meta_info": meta | {"output_token_logprobs": [MARK]}}),
        (200, {"text": MARK, "meta_info": meta | {"finish_reason": {"type": MARK}}}),
    ]

    async def generate(request: Request) -> Response:
        meta["prompt_tokens"] = len((await request.json())["input_ids"])
        status, body = replies.pop(0) if replies else (400, MARK)
        if isinstance(body, str):
            return PlainTextResponse(body, status)
        if isinstance(body.get("meta_info"), dict):
            body["meta_info"] = meta | body["meta_info"]
        return Response(json.dumps(body), status, media_type="application/json")

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])])


@pytest.mark.anyio
async def test_no_error_tells_a_secret_or_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    engine_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with (
        served(echoing_engine(), listening),
        running_gateway([], engine_url=engine_url, retry_budget=0) as stack,
        httpx.AsyncClient(verify=False, timeout=60) as http,
    ):
        key = await stack.open()
        url = f"{key.base_url}/chat/completions"
        body: dict[str, Any] = {"model": MARK, "messages": [QUESTION]}

        async def post(
            secret: str = key.secret, content: bytes | None = None, **fields: Any
        ) -> int:
            content = json.dumps(body | fields).encode() if content is None else content
            headers = {"authorization": f"Bearer {secret}"}
            response = await http.post(url, content=content, headers=headers)
            return response.status_code

        with logged() as log:
            statuses = [await post() for _ in range(12)]
            assert set(statuses) == {424, 502, 503}
            statuses = [
                await post(secret=f"tl-{MARK}"),
                await post(content=MARK.encode()),
                await post(messages=[{"role": MARK, "content": MARK}]),
                await post(messages=[{"role": "user", "content": [{"type": MARK}]}]),
                await post(messages=[{**QUESTION, "content": "\ud800"}]),
                await post(stop=[MARK] * 99),
                await post(response_format={"type": MARK}),
                await post(temperature=0.123, seed=1, response_format={"type": "json_object"}),
                await post(user=MARK, metadata={MARK: MARK}),
                await post(**{MARK: MARK}),
                await post(tools=[{"type": MARK, "function": {"name": MARK}}]),
                await post(messages=[{**QUESTION, "content": f"{MARK} " * 40_000}]),
            ]
            assert {400, 401, 424} <= set(statuses)
            assert HTTPStatus.INTERNAL_SERVER_ERROR not in statuses
            await http.get(f"{key.base_url}/{MARK}", headers={"x-api-key": key.secret})

            def broken(*_: object, **__: object) -> None:
                raise ValueError(f"{MARK} {key.secret}")

            monkeypatch.setattr(Renderer, "render", broken)
            assert await post() == HTTPStatus.INTERNAL_SERVER_ERROR
            await stack.close(key)
        control = {"authorization": f"Bearer {TOKEN}"}
        metrics = await http.get(f"{stack.gateway._http.base_url}/metrics", headers=control)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert {line["level"] for line in lines} >= {"INFO", "ERROR"}
    assert any("exception" in line for line in lines)
    assert any(line.get("key") == key.id for line in lines)
    for text in (log.getvalue(), metrics.text):
        assert len(text) > 1_000
        for secret in (MARK, key.secret, TOKEN, "0.123"):
            assert secret not in text


@pytest.mark.anyio
@pytest.mark.parametrize("log_format", ["json", "text"])
async def test_a_worker_logs_as_it_is_told_and_has_a_port_for_metrics(
    log_format: LogFormat, capfd: pytest.CaptureFixture[str]
) -> None:
    scripted = ScriptedEngine(
        {"*": [{"text": "four"}]}, tokenizer=small_tokenizer(), stop_token_id=0
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with serve_engine(scripted) as engine_url:
        config = WorkerConfig(
            engine_url,
            str(small_checkpoint()),
            "token-of-control",
            port=0,
            metrics_port=port,
            log_format=log_format,
        )
        written = ""
        async with (
            run_worker(config) as gateway,
            httpx.AsyncClient(verify=False, timeout=60) as http,
        ):
            watched = f"http://127.0.0.1:{port}"
            assert (await http.get(f"{watched}/healthz")).status_code == 200
            assert (await http.get(f"{watched}/readyz")).json() == {"status": "ready"}
            key = await gateway.open_key(name="r", sampling={}, purpose="train", expires_in=60)
            body = {"model": "m", "messages": [QUESTION], "temperature": 0.5}
            await http.post(
                f"{key.base_url}/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {key.secret}"},
            )
            assert "turnleaf_keys_open 1.0" in (await http.get(f"{watched}/metrics")).text
            with anyio.fail_after(20):  # the event loop is looked at 20 times a second
                while "lag_seconds_count 0.0" in (await http.get(f"{watched}/metrics")).text:
                    pass

            def told() -> bool:
                nonlocal written
                written += capfd.readouterr().err
                return "temperature" in written

            await until(told)
            if log_format == "json":
                assert f"turnleaf.metrics_port {port}: cannot" in await refusal(config)
                among_agents = attrs.evolve(config, port=port - 31)
                assert "is one of the ports for agents" in await refusal(among_agents)
    lines = written.splitlines()
    if log_format == "json":
        assert {json.loads(line)["logger"] for line in lines} == {"turnleaf.gateway._turns"}
        assert json.loads(lines[0])["key"] == key.id
    else:
        start = r"[\d-]+ [\d:,]+ INFO turnleaf\.gateway\._turns: rollout r, key-"
        assert re.match(start, lines[0])
    sys.stderr.write(written)
