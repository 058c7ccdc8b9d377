"""What a worker counts, where it is told, and whether it is ready."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway_stack import TOKEN, Stack, running_gateway
from tests.waiting import until
from turnleaf.core import EngineError, Key
from turnleaf.gateway import _readiness
from turnleaf.gateway._branches import ForkReason
from turnleaf.gateway._metrics import Metrics
from turnleaf.gateway._metrics_app import metrics_app
from turnleaf.gateway._readiness import Readiness

DOCUMENT = Path(__file__).parents[1] / "docs" / "gateway.md"
QUESTION = {"role": "user", "content": "What is 2 + 2?"}


class Values(dict[str, float]):
    """The samples of a scrape: `name{label="value"}` to its value, 0 where there is none."""

    def __missing__(self, key: str) -> float:
        return 0.0


def values(text: str) -> Values:
    found = Values()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def scrape(stack: Stack) -> str:
    control = stack.gateway._http.base_url
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        assert (await http.get(f"{control}/metrics")).status_code == 401
        response = await http.get(f"{control}/metrics", headers=headers)
    assert response.headers["content-type"].startswith("text/plain; version=")
    return response.text


async def post(
    http: httpx.AsyncClient, key: Key, *, headers: Mapping[str, str] | None = None, **fields: Any
) -> httpx.Response:
    return await http.post(
        f"{key.base_url}/chat/completions",
        json={"model": "model", "messages": [QUESTION], **fields},
        headers={"x-api-key": key.secret, **(headers or {})},
    )


def test_the_documentation_lists_what_there_is() -> None:
    told = bytes(Metrics().response().body).decode()
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", told, re.MULTILINE))
    there = {name for name in types if not name.endswith("_created")}
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(turnleaf_\w+)` \|([^|]*)\| ([^|]*) \|$", text, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(there)
    for name, labels, meaning in rows:
        assert (types[name] == "histogram") == meaning.startswith("histogram:")
        used = set(re.findall(rf"^{name}{{(\w+)=", told, re.MULTILINE))
        assert used <= set(re.findall(r"`(\w+)`", labels))
    forks = re.search(r"## Forks\n(.*?)\n## ", text, re.DOTALL)
    assert forks is not None
    assert set(re.findall(r"^\| `(\w+)`", forks[1], re.MULTILINE)) == set(ForkReason.__args__)


@pytest.mark.anyio
async def test_requests_turns_and_tokens_are_counted() -> None:
    script = [{"text": "four"}, {"text": "IV"}, {"mismatch": True}, {"fail": 400}]
    async with (
        running_gateway(script) as stack,
        httpx.AsyncClient(verify=False, timeout=60) as http,
    ):
        key = await stack.open(temperature=1.0)
        first = (await post(http, key, temperature=0.5, seed=1)).json()["usage"]
        await post(http, key, headers={"x-turnleaf-train": "false"}, temperature=1.0)
        assert (await post(http, key)).status_code == 502
        assert (await post(http, key, stream=True)).status_code == 424
        assert (await post(http, key, tooth=1)).status_code == 400
        await http.get(key.base_url + "/429")
        during = values(await scrape(stack))
        assert during["turnleaf_keys_open"] == 1
        assert during["turnleaf_requests_in_flight"] == 0
        assert during['turnleaf_turns_total{outcome="trained"}'] == 0
        await stack.close(key)
        await stack.gateway.close_key(key.id)
        after = values(await scrape(stack))
    requests = {name: n for name, n in after.items() if name.startswith("turnleaf_requests_total{")}
    assert requests == {
        'turnleaf_requests_total{code="",status="200"}': 2,
        'turnleaf_requests_total{code="engine_reply",status="502"}': 1,
        'turnleaf_requests_total{code="engine_refused",status="424"}': 1,
        'turnleaf_requests_total{code="unsupported_parameter",status="400"}': 1,
        'turnleaf_requests_total{code="not_found",status="404"}': 1,
    }
    assert after["turnleaf_keys_open"] == 0
    assert after['turnleaf_turns_total{outcome="trained"}'] == 1
    assert after['turnleaf_turns_total{outcome="untrained"}'] == 1
    assert after['turnleaf_tokens_total{kind="prompt"}'] == 2 * first["prompt_tokens"]
    assert after['turnleaf_tokens_total{kind="sampled"}'] > first["completion_tokens"]
    assert after['turnleaf_ignored_fields_total{field="temperature"}'] == 1
    assert after['turnleaf_ignored_fields_total{field="seed"}'] == 1
    assert after["turnleaf_engine_seconds_count"] == after["turnleaf_queue_seconds_count"] == 2
    assert after["turnleaf_rollout_leaves_sum"] == 1


@pytest.mark.anyio
async def test_forks_retries_broken_calls_and_streams_are_counted() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {]}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    script = [{"text": call}, {"text": "four", "delay": 0.3}, {"mismatch": True, "delay": 0.2}]
    async with (
        running_gateway(script, retry_grace=20, keep_alive=0.05) as stack,
        httpx.AsyncClient(verify=False, timeout=60) as http,
    ):
        key = await stack.open()
        await post(http, key, tools=[tool])
        asking = asyncio.ensure_future(post(http, key))
        await until(lambda: len(stack.engine.calls) == 2)
        assert values(await scrape(stack))["turnleaf_requests_in_flight"] == 1
        await post(http, key, headers={"x-stainless-retry-count": "1"})
        await asking
        broken = await post(http, key, stream=True)
        assert broken.status_code == 200
        await stack.close(key)
        after = values(await scrape(stack))
    assert after["turnleaf_malformed_tool_calls_total"] == 1
    assert after["turnleaf_retries_joined_total"] == 1
    assert after['turnleaf_forks_total{reason="new"}'] == 1
    assert after['turnleaf_requests_total{code="engine_reply",status="200"}'] == 1
    assert after["turnleaf_rollout_leaves_sum"] == 2


@pytest.mark.anyio
async def test_a_client_that_left_had_no_answer() -> None:
    script = [{"text": "four", "hang": True}]
    async with (
        running_gateway(script) as stack,
        httpx.AsyncClient(verify=False, timeout=60) as http,
    ):
        key = await stack.open()
        asking = asyncio.ensure_future(post(http, key))
        await until(lambda: len(stack.engine.calls) == 1)
        asking.cancel()
        (record,) = stack.keys._records.values()
        await until(lambda: not record.connections)
        await stack.close(key)
        assert values(await scrape(stack))['turnleaf_requests_total{code="",status="none"}'] == 1


class Health:
    """An engine that is asked for its health only."""

    def __init__(self) -> None:
        self.asked = 0
        self.ready = True

    async def check(self) -> None:
        self.asked += 1
        await anyio.sleep(0.01)
        if not self.ready:
            raise EngineError("no engine is ready at http://10.0.0.7")


@pytest.mark.anyio
async def test_the_engine_is_asked_once_for_many_and_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    health = Health()
    readiness = Readiness(health)  # type: ignore[arg-type]  # one part of an engine
    transport = httpx.ASGITransport(metrics_app(Metrics(), readiness))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
        answers = await asyncio.gather(*(http.get("/readyz") for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert health.asked == 1
        health.ready = False
        assert (await http.get("/readyz")).status_code == 200
        monkeypatch.setattr(_readiness, "REMEMBERED", 0.0)
        answer = await http.get("/readyz")
        assert (answer.status_code, health.asked) == (503, 2)
        assert "10.0.0.7" not in answer.text
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        assert "turnleaf_keys_open" in (await http.get("/metrics")).text
        assert (await http.get("/keys")).status_code == 404
