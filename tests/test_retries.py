"""A retry is the same turn: what a lost connection leaves behind, and who may claim it."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.gateway_stack import Stack, running_gateway
from tests.waiting import until
from turnleaf.core import Key

pytestmark = pytest.mark.anyio

BODY = {"model": "model", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
SLOW = {"text": "four", "delay": 0.3}


async def post(
    http: httpx.AsyncClient,
    key: Key,
    body: dict[str, Any] = BODY,
    *,
    retry: int = 0,
    train: bool = True,
) -> httpx.Response:
    return await http.post(
        f"{key.base_url}/chat/completions",
        json=body,
        headers={
            "authorization": f"Bearer {key.secret}",
            "x-stainless-retry-count": str(retry),
            "x-turnleaf-train": str(train),
        },
    )


async def lose(stack: Stack, http: httpx.AsyncClient, key: Key, **request: Any) -> None:
    """Ask, and go away once the engine has been asked."""
    calls = len(stack.engine.calls)
    asking = asyncio.ensure_future(post(http, key, **request))
    await until(lambda: len(stack.engine.calls) > calls)
    await gone(stack, asking)


async def gone(stack: Stack, asking: "asyncio.Future[Any]") -> None:
    """Go away, and wait until the gateway knows."""
    record = next(iter(stack.keys._records.values()))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: any(asked.lost_at is not None for asked in record.asked._asked))


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("marked", [0, 1])
@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_retry_joins_the_turn_under_way(marked: int, goes_on: bool) -> None:
    async with running_gateway([SLOW, {"text": "sure"}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            await lose(stack, http, key)
            reply = await post(http, key, retry=marked)
            assert said(reply) == "four"
            assert len(stack.engine.calls) == 1
            if goes_on:
                message = reply.json()["choices"][0]["message"]
                more = [*BODY["messages"], message, {"role": "user", "content": "Sure?"}]
                assert said(await post(http, key, {**BODY, "messages": more})) == "sure"
        trajectory = await stack.close(key)
    assert {turn.excluded for turn in trajectory.turns} == {None}
    assert trajectory.turns[0].id == reply.json()["id"]
    assert len(trajectory.leaves()) == 1


async def test_a_retry_takes_the_turn_that_ended_meanwhile() -> None:
    async with running_gateway([SLOW], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            await lose(stack, http, key)
            await until(lambda: len(stack.engine.ledger) == 1)
            assert said(await post(http, key, retry=1)) == "four"
        trajectory = await stack.close(key)
    assert [turn.excluded for turn in trajectory.turns] == [None]


async def test_a_retry_that_is_lost_too_leaves_the_turn_to_the_next() -> None:
    async with running_gateway([{"text": "four", "delay": 1.0}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            await lose(stack, http, key)
            record = next(iter(stack.keys._records.values()))
            (asked,) = record.asked._asked
            again = asyncio.ensure_future(post(http, key, retry=1))
            await until(lambda: asked.waiting == 1)
            await gone(stack, again)
            assert said(await post(http, key, retry=2)) == "four"
            assert len(stack.engine.calls) == 1
        trajectory = await stack.close(key)
    assert [turn.excluded for turn in trajectory.turns] == [None]


async def test_when_the_grace_is_over_the_call_is_ended_and_a_retry_is_a_new_turn() -> None:
    script = [{"text": "too late", "hang": True, "abort_after": 2}, {"text": "four"}]
    async with running_gateway(script, retry_grace=0.1) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            await lose(stack, http, key)
            await until(lambda: len(stack.engine.ledger) == 1)
            assert said(await post(http, key, retry=1)) == "four"
        trajectory = await stack.close(key)
    assert [turn.excluded for turn in trajectory.turns] == ["undelivered", None]
    assert len(trajectory.leaves()) == 1


async def test_a_deliberate_second_sample_is_a_sibling() -> None:
    async with running_gateway([{"text": "four"}, {"text": "IV"}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            assert said(await post(http, key)) == "four"
            assert said(await post(http, key)) == "IV"
        trajectory = await stack.close(key)
    assert [turn.excluded for turn in trajectory.turns] == [None, None]
    assert len(trajectory.leaves()) == 2


async def test_a_second_sample_of_what_is_context_only_is_a_sibling() -> None:
    async with running_gateway([{"text": "four"}, {"text": "IV"}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            assert said(await post(http, key, train=False)) == "four"
            assert said(await post(http, key, train=False)) == "IV"
        trajectory = await stack.close(key)
    assert [turn.excluded for turn in trajectory.turns] == ["untrained", "untrained"]


@pytest.mark.parametrize("stream", [False, True])
async def test_who_joined_a_request_that_is_cut_is_told(stream: bool) -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    def noting_tasks(app: ASGIApp) -> ASGIApp:
        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            tasks.append(asyncio.current_task())
            await app(scope, receive, send)

        return noted

    script = [{"text": "too late", "hang": True, "abort_after": 2}]
    async with running_gateway(script, retry_grace=20, around=noting_tasks) as stack:
        key = await stack.open()
        body = {**BODY, "stream": stream}
        async with httpx.AsyncClient(verify=False) as http:
            first = asyncio.ensure_future(post(http, key, body))
            await until(lambda: len(stack.engine.calls) == 1)
            again = asyncio.ensure_future(post(http, key, body, retry=1))
            (record,) = stack.keys._records.values()
            await until(lambda: record.asked._asked[0].waiting == 2)
            assert tasks[0] is not None
            tasks[0].cancel()
            assert (await again).status_code == 401
            assert (await first).status_code == 500
            await until(lambda: not record.calls)
        await stack.close(key)


async def test_a_retry_that_is_lost_is_no_connection_any_more() -> None:
    async with running_gateway([{"text": "too late", "hang": True}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            first = asyncio.ensure_future(post(http, key))
            await until(lambda: len(stack.engine.calls) == 1)
            again = asyncio.ensure_future(post(http, key, retry=1))
            (record,) = stack.keys._records.values()
            await until(lambda: record.connections == 2)
            again.cancel()
            await until(lambda: record.connections == 1)
            await stack.close(key)
            assert (await first).status_code == 401


async def test_siblings_under_way_are_not_each_others_retries() -> None:
    async with running_gateway([SLOW, {"text": "IV", "delay": 0.3}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            both = await asyncio.gather(post(http, key), post(http, key))
        assert {said(reply) for reply in both} == {"four", "IV"}
        await stack.close(key)


async def test_a_lost_turn_is_claimed_once() -> None:
    async with running_gateway([SLOW, {"text": "IV"}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            await lose(stack, http, key)
            assert said(await post(http, key)) == "four"
            assert said(await post(http, key)) == "IV"
        await stack.close(key)


async def test_a_marked_retry_gets_a_delivered_reply_again() -> None:
    """As when a reply was lost behind the gateway, which could not see it."""
    async with running_gateway([{"text": "four"}, {"text": "IV"}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            first, second = await post(http, key), await post(http, key)
            again = await post(http, key, retry=1)
        assert again.json()["id"] == second.json()["id"] != first.json()["id"]
        assert len(stack.engine.calls) == 2
        await stack.close(key)


async def test_a_marked_retry_joins_what_nobody_knows_to_be_lost() -> None:
    async with running_gateway([SLOW], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            first = asyncio.ensure_future(post(http, key))
            await until(lambda: len(stack.engine.calls) == 1)
            again = await post(http, key, retry=1)
            assert again.json()["id"] == (await first).json()["id"]
        trajectory = await stack.close(key)
    assert len(trajectory) == 1


async def test_a_retry_of_what_was_refused_claims_nothing() -> None:
    script = [{"text": "x", "mismatch": True}, {"text": "four"}]
    async with running_gateway(script, retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            assert (await post(http, key)).status_code == 502
            assert said(await post(http, key, retry=1)) == "four"
        (record,) = stack.keys._records.values()
        assert {asked.waiting for asked in record.asked._asked} == {0}
        await stack.close(key)


@pytest.mark.parametrize(
    ("other", "excluded"),
    [({"body": {**BODY, "max_tokens": 5}}, None), ({"train": False}, "untrained")],
)
async def test_other_requests_claim_nothing(other: dict[str, Any], excluded: str | None) -> None:
    async with running_gateway([SLOW, {"text": "IV"}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            await lose(stack, http, key)
            assert said(await post(http, key, retry=1, **other)) == "IV"
        trajectory = await stack.close(key)
    assert {turn.excluded for turn in trajectory.turns} == {excluded, "undelivered"}


async def test_a_key_that_closes_ends_what_waits_for_a_retry() -> None:
    script = [{"text": "too late", "hang": True, "abort_after": 2}]
    async with running_gateway(script, retry_grace=60) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            await lose(stack, http, key)
            again = asyncio.ensure_future(post(http, key, retry=1))
            record = next(iter(stack.keys._records.values()))
            await until(lambda: record.asked._asked[0].waiting == 1)
            trajectory = await stack.close(key, aborted=True)
            assert (await again).status_code == 401
    assert [turn.excluded for turn in trajectory.turns] == ["aborted"]


async def test_a_retry_of_what_was_refused_takes_no_siblings_turn() -> None:
    script = [{"text": "four"}, {"text": "x", "mismatch": True}, {"text": "IV"}]
    async with running_gateway(script, retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            assert said(await post(http, key)) == "four"
            assert (await post(http, key)).status_code == 502
            assert said(await post(http, key, retry=1)) == "IV"
        await stack.close(key)


@pytest.mark.parametrize("delay", [0.0, 0.5])
async def test_two_retries_take_two_turns(delay: float) -> None:
    script = [{"text": "four", "delay": delay}, {"text": "IV", "delay": delay}]
    async with running_gateway(script, retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            first = [asyncio.ensure_future(post(http, key)) for _ in range(2)]
            await until(lambda: len(stack.engine.calls) == 2)
            if not delay:
                await asyncio.gather(*first)
            again = await asyncio.gather(*(post(http, key, retry=1) for _ in range(2)))
            asked = await asyncio.gather(*first)
        assert (
            {said(reply) for reply in again} == {said(reply) for reply in asked} == {"four", "IV"}
        )
        assert len(stack.engine.calls) == 2
        await stack.close(key)


async def test_a_lost_turn_that_the_history_shows_is_no_retrys() -> None:
    script = [SLOW, {"text": "sure"}, {"text": "IV"}]
    async with running_gateway(script, retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False) as http:
            await lose(stack, http, key)
            await until(lambda: len(stack.engine.ledger) == 1)
            shown = {"role": "assistant", "content": "four"}
            more = [*BODY["messages"], shown, {"role": "user", "content": "Sure?"}]
            assert said(await post(http, key, {**BODY, "messages": more})) == "sure"
            assert said(await post(http, key)) == "IV"
        trajectory = await stack.close(key)
    assert [turn.excluded for turn in trajectory.turns] == [None, None, None]
