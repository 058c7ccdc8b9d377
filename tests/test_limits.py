"""What one rollout may have, and what its agent is told that wants more."""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnleaf.gateway
from tests.gateway_stack import running_gateway
from tests.waiting import until
from turnleaf.core import Key
from turnleaf.gateway import _bounded_http, _keys
from turnleaf.gateway._limits import Limits
from turnleaf.gateway.protocols import RequestError, error_event

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
RULE = 66207
"""The id of 112 dashes behind a space."""
LARGE = {"ids": [RULE] * 60_000, "events": [20_000] * 2}
"""More than kernels keep of what nobody reads, in few events where it is streamed."""
THROTTLING = re.compile(r"429|rate.?limit|too.?many.?requests|throttl", re.IGNORECASE)


async def post(
    http: httpx.AsyncClient, key: Key, *, retry: int = 0, **fields: Any
) -> httpx.Response:
    return await http.post(
        f"{key.base_url}/chat/completions",
        json={"model": "model", "messages": [QUESTION], **fields},
        headers={"x-api-key": key.secret, "x-stainless-retry-count": str(retry)},
    )


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


@pytest.mark.anyio
async def test_the_last_turn_is_answered_and_the_next_is_refused_for_good() -> None:
    limits = Limits(max_turns=2)
    async with running_gateway([{"text": "four"}] * 2, limits=limits) as stack:
        key, other = await stack.open(), await stack.open("other")
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            for _ in range(2):
                assert (await post(http, key)).status_code == 200
            for _ in range(2):
                status, code, message = refusal(await post(http, key))
                assert (status, code) == (400, "rollout_limit_exceeded")
                assert "2 turns (turnleaf.max_turns)" in message
            assert (await post(http, other)).status_code == 200
        trajectory = await stack.close(key)
        await stack.close(other)
    assert len(trajectory) == 2
    assert trajectory.refused == {"rollout_limit_exceeded": 2}


@pytest.mark.anyio
async def test_more_replies_than_turns_are_left_are_refused_as_such() -> None:
    async with running_gateway([{"text": "four"}] * 2, limits=Limits(max_turns=2)) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            status, code, message = refusal(await post(http, key, n=3))
            assert (status, code) == (400, "invalid_value")
            assert "2 of its 2 turns left (turnleaf.max_turns)" in message
            assert (await post(http, key, n=2)).status_code == 200
        await stack.close(key)


@pytest.mark.anyio
async def test_each_reply_counts_as_in_flight() -> None:
    limits = Limits(max_requests_in_flight=2)
    script = [{"text": "four", "delay": 0.3}] * 2 + [{"text": "five"}]
    async with running_gateway(script, limits=limits) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            status, code, message = refusal(await post(http, key, n=3))
            assert (status, code) == (400, "invalid_value")
            assert "turnleaf.max_requests_in_flight" in message
            asking = asyncio.ensure_future(post(http, key, n=2))
            await until(lambda: len(stack.engine.calls) == 2)
            assert (await post(http, key)).status_code == 429
            assert (await asking).status_code == 200
            assert (await post(http, key)).status_code == 200
        await stack.close(key)


@pytest.mark.anyio
async def test_turns_under_way_count_and_refused_ones_do_not() -> None:
    limits = Limits(max_turns=1)
    script = [{"mismatch": True}, {"text": "four", "delay": 0.3}]
    async with running_gateway(script, limits=limits) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            assert (await post(http, key)).status_code == 502
            asking = asyncio.ensure_future(post(http, key))
            await until(lambda: len(stack.engine.calls) == 2)
            assert (await post(http, key)).status_code == 400
            assert (await asking).status_code == 200
        trajectory = await stack.close(key)
    assert trajectory.refused == {"engine_reply": 1, "rollout_limit_exceeded": 1}


@pytest.mark.anyio
async def test_sampled_tokens_are_counted_and_the_last_turn_is_cut_where_they_end() -> None:
    limits = Limits(max_rollout_tokens=5)
    async with running_gateway([{"ids": [7, 8, 9]}, {"ids": [7] * 9}], limits=limits) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            first = (await post(http, key)).json()
            assert first["usage"]["completion_tokens"] == 4  # with the stop token
            second = (await post(http, key, max_tokens=50)).json()
            assert second["usage"]["completion_tokens"] == 1
            assert second["choices"][0]["finish_reason"] == "length"
            status, code, message = refusal(await post(http, key))
            assert (status, code) == (400, "rollout_limit_exceeded")
            assert "5 sampled tokens (turnleaf.max_rollout_tokens)" in message
        await stack.close(key)


@pytest.mark.anyio
async def test_what_is_in_flight_passes_and_a_retry_counts_once() -> None:
    limits = Limits(max_requests_in_flight=1)
    script = [{"text": "four", "delay": 0.5}, {"text": "IV"}]
    async with running_gateway(script, limits=limits, retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            asking = asyncio.ensure_future(post(http, key))
            await until(lambda: len(stack.engine.calls) == 1)
            response = await post(http, key, max_tokens=9)
            status, code, message = refusal(response)
            assert (status, code) == (429, "rate_limit_exceeded")
            assert response.headers["retry-after"] == "5"
            assert "turnleaf.max_requests_in_flight" in message
            # A retry of the first one waits for the same turn.
            again = asyncio.ensure_future(post(http, key, retry=1))
            (record,) = stack.keys._records.values()
            await until(lambda: len(record.calls) == 2)
            # Even a retry is one connection too many now.
            assert (await post(http, key, retry=1)).status_code == 429
            ids = {(await one).json()["id"] for one in (asking, again)}
            assert len(ids) == 1
            # The one that was refused got nothing, so that its retry gets a turn of its own.
            reply = (await post(http, key, max_tokens=9, retry=1)).json()
            assert reply["id"] not in ids
            await until(lambda: (record.connections, record.calls) == (0, set()))
        trajectory = await stack.close(key)
    assert trajectory.refused == {"rate_limit_exceeded": 2}


@pytest.mark.anyio
async def test_the_retry_of_one_that_had_to_wait_claims_no_equal_turn() -> None:
    limits = Limits(max_requests_in_flight=1)
    script = [{"text": "four", "delay": 0.3}, {"text": "IV"}]
    async with running_gateway(script, limits=limits, retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            asking = asyncio.ensure_future(post(http, key))
            await until(lambda: len(stack.engine.calls) == 1)
            assert (await post(http, key)).status_code == 429
            first = (await asking).json()
            second = (await post(http, key, retry=1)).json()
            assert first["id"] != second["id"]
        await stack.close(key)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_nobody_reads_is_undelivered(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bounded_http, "READ_TIMEOUT", 0.3)
    async with running_gateway([LARGE], max_context_tokens=80_000, streaming=None) as stack:
        key = await stack.open()
        (record,) = stack.keys._records.values()
        host, port = key.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        body = json.dumps({"model": "model", "messages": [QUESTION], "stream": stream}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
            f"x-api-key: {key.secret}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await anyio.to_thread.run_sync(unread.connect, (host, int(port)))
            unread.sendall(head.encode() + body)
            await until(lambda: record.connections == 1)
            await until(lambda: record.connections == 0)
        trajectory = await stack.close(key)
    assert [turn.excluded for turn in trajectory.turns] == ["undelivered"]


@pytest.mark.anyio
async def test_a_reply_that_is_read_slowly_is_delivered() -> None:
    async with running_gateway([LARGE], max_context_tokens=80_000, streaming=None) as stack:
        key = await stack.open()
        async with (
            httpx.AsyncClient(verify=False, timeout=60) as http,
            http.stream(
                "POST",
                f"{key.base_url}/chat/completions",
                json={"model": "model", "messages": [QUESTION]},
                headers={"x-api-key": key.secret},
            ) as response,
        ):
            (record,) = stack.keys._records.values()
            await until(lambda: len(record.trajectory) == 1)
            assert record.trajectory.turns[0].excluded == "undelivered"
            message = json.loads(await response.aread())["choices"][0]["message"]
            assert len(message["content"]) > 6_000_000
            await until(lambda: record.trajectory.turns[0].excluded is None)
        await stack.close(key)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_added_to_a_reply_whose_key_is_closed_while_it_is_read(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_keys, "CLOSE_WAIT", 0.1)
    async with (
        running_gateway([LARGE], max_context_tokens=80_000, streaming=None) as stack,
        httpx.AsyncClient(verify=False, timeout=60) as http,
    ):
        key = await stack.open()
        (record,) = stack.keys._records.values()
        async with http.stream(
            "POST",
            f"{key.base_url}/chat/completions",
            json={"model": "model", "messages": [QUESTION], "stream": stream},
            headers={"x-api-key": key.secret},
        ) as response:
            await until(lambda: len(record.trajectory) == 1)
            trajectory = await stack.close(key)
            assert [turn.excluded for turn in trajectory.turns] == ["undelivered"]
            body = await response.aread()
        await until(lambda: not record.calls)
    if stream:
        *_, last, end = body.split(b"\n\n")
        whole = last == b"data: [DONE]"
        assert (whole or b'"error"' in last, end) == (True, b"")
        assert whole + body.count(b'"error"') == 1
    else:
        assert body.endswith(b"}}")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@given(
    status=st.sampled_from([400, 401, 404, 408, 413, 424, 500, 502]),
    quoted=st.lists(
        st.sampled_from(
            ["429", "Rate limit", "rate_limit", "RATE-LIMIT", "too many requests", "throttled", "4"]
        )
    ),
    joint=st.sampled_from(["", " ", ", "]),
)
def test_no_lasting_error_looks_like_throttling(status: int, quoted: list[str], joint: str) -> None:
    text = joint.join(quoted)
    error = RequestError(status, f"messages: {text}", code="invalid_value", param=text)
    for told in (str(error.body()), error_event(error).decode()):
        assert not THROTTLING.search(json.loads(json.dumps(told)))
    message = error.body()["error"]["message"]
    assert message.replace("\u200b", "") == error.message


def test_no_code_looks_like_throttling_but_that_of_what_passes() -> None:
    sources = [path.read_text() for path in Path(turnleaf.gateway.__path__[0]).rglob("*.py")]
    codes = {code for source in sources for code in re.findall(r'code="([^"]+)"', source)}
    assert {"context_length_exceeded", "rollout_limit_exceeded"} < codes
    assert {code for code in codes if THROTTLING.search(code)} == {"rate_limit_exceeded"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": [{"role": "rate limit", "content": "429"}]}, "invalid_value"),
        ({"messages": [QUESTION] * 430 + [{}]}, "invalid_value"),
        ({"429 too many requests": 1}, "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "42"}], "max_tokens": -429}, "invalid_value"),
    ],
)
async def test_what_an_agent_sent_is_not_echoed_as_throttling(
    fields: dict[str, Any], code: str
) -> None:
    async with running_gateway([]) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            response = await post(http, key, **fields)
            assert refusal(response)[:2] == (400, code)
            assert not THROTTLING.search(str(response.json()))
        assert (await stack.close(key)).refused == {code: 1}
