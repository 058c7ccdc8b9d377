"""Several replies to one request: each a turn of its own, beside its siblings."""

import json
from typing import Any

import anyio
import httpx
import pytest
from openai import APIStatusError

from tests.gateway_stack import openai_client, running_gateway, tokenizer
from tests.messages import assistant, user
from tests.waiting import until

pytestmark = pytest.mark.anyio

THREE = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
ASKED = [user("Count.")]


async def test_each_reply_is_a_turn_and_any_can_be_continued() -> None:
    async with running_gateway([*THREE, {"text": "four"}]) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            reply = await client.chat.completions.create(model="m", messages=ASKED, n=3)
            texts = [choice.message.content for choice in reply.choices]
            assert sorted(texts) == ["one", "three", "two"]
            assert [choice.index for choice in reply.choices] == [0, 1, 2]
            assert reply.usage.completion_tokens == sum(
                len(call.output_ids) for call in stack.engine.ledger
            )
            further = [*ASKED, assistant(texts[1]), user("Go on.")]
            await client.chat.completions.create(model="m", messages=further)
        trajectory = await stack.close(key)
    siblings, (last,) = trajectory.turns[:3], trajectory.turns[3:]
    assert [turn.index for turn in siblings] == [0, 1, 2]
    assert {turn.excluded for turn in trajectory.turns} == {None}
    assert [
        tokenizer().decode(turn.output.tolist()).removesuffix("<|im_end|>") for turn in siblings
    ] == texts
    assert last.parent == siblings[1].id
    assert len(trajectory.leaves()) == 3


async def test_replies_are_streamed_beside_each_other() -> None:
    async with running_gateway(THREE) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            texts = {0: "", 1: "", 2: ""}
            stream = await client.chat.completions.create(
                model="m", messages=ASKED, n=3, stream=True
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        await stack.close(key)
    assert sorted(texts.values()) == ["one", "three", "two"]


async def test_a_seed_of_the_trainer_makes_no_copies() -> None:
    """Siblings and later samples of the same prompt have seeds of their own."""
    async with running_gateway([*THREE, *THREE]) as stack:
        key = await stack.open(sampling_seed=7)
        async with openai_client(key) as client:
            for n, asked in ((3, ASKED), (1, ASKED), (2, [user("Again.")])):
                await client.chat.completions.create(model="m", messages=asked, n=n, seed=1)
        await stack.close(key)
    seeds = [call.sampling["sampling_seed"] for call in stack.engine.calls]
    assert sorted(seeds[:3]) == [7, 8, 9]
    assert seeds[3] == 10
    assert sorted(seeds[4:]) == [7, 8]


async def test_one_that_fails_ends_the_others_and_trains_none() -> None:
    script = [{"text": "one"}, {"text": "never", "hang": True}, {"text": "", "fail": 400}]
    async with running_gateway(script) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            with anyio.fail_after(10), pytest.raises(APIStatusError) as refused:
                await client.chat.completions.create(model="m", messages=ASKED, n=3)
            assert refused.value.status_code == 424
        trajectory = await stack.close(key)
    assert {turn.excluded for turn in trajectory.turns} <= {"undelivered"}
    assert trajectory.leaves() == []


async def test_a_retry_is_given_all_of_them() -> None:
    slow = [{**reply, "delay": 0.3} for reply in THREE]
    body = {"model": "m", "messages": ASKED, "n": 3}
    async with running_gateway(slow, retry_grace=20) as stack:
        key = await stack.open()
        headers = {"authorization": f"Bearer {key.secret}"}
        async with httpx.AsyncClient(verify=False, headers=headers, timeout=60) as http:
            url = f"{key.base_url}/chat/completions"
            with anyio.CancelScope() as losing:
                async with anyio.create_task_group() as tasks:

                    async def ask() -> None:
                        await http.post(url, json=body)

                    tasks.start_soon(ask)
                    await until(lambda: len(stack.engine.calls) == 3)
                    losing.cancel()
            reply = await http.post(url, json=body)
            assert len(reply.json()["choices"]) == 3
        trajectory = await stack.close(key)
    assert len(stack.engine.calls) == 3
    assert [turn.excluded for turn in trajectory.turns] == [None] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_every_sampled_token(stream: bool) -> None:
    body = {"model": "m", "messages": ASKED, "logprobs": True, "stream": stream}
    async with running_gateway([{"text": "<think>\nhm\n</think>\n\n4 é"}]) as stack:
        key = await stack.open()
        headers = {"authorization": f"Bearer {key.secret}"}
        async with httpx.AsyncClient(verify=False, headers=headers, timeout=60) as http:
            reply = await http.post(f"{key.base_url}/chat/completions", json=body)
        (turn,) = (await stack.close(key)).turns
    told = _logprobs(reply.text, stream=stream)
    assert [entry["logprob"] for entry in told] == turn.logprobs.tolist()
    assert "".join(entry["token"] for entry in told) == tokenizer().decode(turn.output.tolist())


def _logprobs(text: str, *, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        bodies = [json.loads(text)]
    else:
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        bodies = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for body in bodies for choice in body["choices"]]
    return [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
