from collections import Counter

import httpx
import pytest

from tests.gateway_stack import running_gateway
from turnleaf.gateway._agents_app import agents_app
from turnleaf.gateway._keys import Keys
from turnleaf.gateway._watched import KINDS, Refusal, Requests, Watched

BODY = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.anyio
async def test_what_was_asked_is_counted_with_what_was_refused():
    async with (
        running_gateway([]) as stack,
        httpx.AsyncClient(verify=False, trust_env=False) as client,
    ):
        url = stack.gateway.base_url
        key = await stack.open()
        before = await stack.gateway.requests()
        for secret, path, changes in (
            ("EMPTY", "chat/completions", {}),
            ("EMPTY", "chat/completions", {}),
            (key.secret, "chat/completions", {"top_logprobs": 2}),
            (key.secret, "completions", {}),
        ):
            headers = {"authorization": f"Bearer {secret}"}
            await client.post(f"{url}/{path}", headers=headers, json=BODY | changes)
        await client.get(f"{url}/models", headers={"x-api-key": key.secret})
        await client.get(f"{url.removesuffix('/v1')}/healthz")
        requests = (await stack.gateway.requests()).since(before)
        assert requests.total == 5
        counts = [(one.status, one.code, count) for one, count in requests.refused.items()]
        assert counts == [
            (401, "invalid_api_key", 2),
            (400, "unsupported_parameter", 1),
            (404, "not_found", 1),
        ]
        assert all(one.message for one in requests.refused)
        assert key.secret not in str(requests)
        assert (await stack.gateway.requests()).since(requests).total == 0
        await stack.close(key)


@pytest.mark.anyio
async def test_kinds_of_refusals_have_a_limit():
    async with (
        running_gateway([]) as stack,
        httpx.AsyncClient(verify=False, trust_env=False) as client,
    ):
        for number in range(KINDS + 5):
            await client.get(f"{stack.gateway.base_url}/{number}")
        requests = await stack.gateway.requests()
        assert (requests.total, len(requests.refused)) == (KINDS + 5, KINDS)


@pytest.mark.anyio
async def test_a_mistake_of_the_gateway_is_counted_as_one(monkeypatch):
    keys = Keys("restore")
    monkeypatch.delattr(Keys, "authenticate")
    watched = Watched(agents_app(keys, None, model_id="model"), keys.metrics)
    transport = httpx.ASGITransport(watched, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        await client.post("/v1/chat/completions", json=BODY)
    assert [one.status for one in watched.requests.refused] == [500]


def test_it_comes_back_from_a_mapping():
    requests = Requests(3, Counter({Refusal(500, None, "no"): 2}))
    assert Requests.from_mapping(requests.to_mapping()) == requests
