"""Event streams: a reply is passed on while it is sampled, and is the same reply in the end."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from openai import APIError
from openai.types.chat import ChatCompletionChunk

from tests.gateway_stack import Stack, openai_client, renderer, running_gateway, tokenizer
from tests.messages import user
from tests.waiting import until
from turnleaf.core import Key
from turnleaf.gateway import _replies
from turnleaf.gateway.engines import _continuing

pytestmark = pytest.mark.anyio

ASKED = [user("What is 2 + 2?")]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  2}}\n</tool_call>'
REPLIES = {
    "text": "It is four. 🙂 é",
    "thought": "<think>\nLet me see: 2 + 2.\n</think>\n\nFour.",
    "calls": f"<think>\nhm\n</think>\n\nBoth.\n{CALL}\n{CALL}",
    "broken call": "I call <tool_call>\n{nothing}\n</tool_call> now",
    "unfinished thought": "<think>\nWhat if",
    "nothing": "",
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_continuing, "PAUSE", 0.0)
    monkeypatch.setattr(_replies, "PASS_ON_EVERY", 0.0)


class Streamed:
    """One streamed request, chunk by chunk."""

    def __init__(self, chunks: AsyncIterator[ChatCompletionChunk]) -> None:
        self._chunks = chunks
        self.message: dict[int, dict[str, Any]] = {}
        self.finish_reasons: dict[int, str] = {}

    async def until(self, length: int) -> None:
        """Read until the first choice's content has so many characters."""
        while len(self.message.get(0, {}).get("content", "")) < length:
            self._take(await anext(self._chunks))

    async def rest(self) -> None:
        async for chunk in self._chunks:
            self._take(chunk)

    def _take(self, chunk: ChatCompletionChunk) -> None:
        for choice in chunk.choices:
            message = self.message.setdefault(choice.index, {})
            delta = choice.delta.model_dump(exclude_none=True)
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                assert call.pop("index") == len(message.setdefault("tool_calls", []))
                message["tool_calls"].append(call)
            if choice.finish_reason:
                self.finish_reasons[choice.index] = choice.finish_reason


async def stream(client: Any, **fields: Any) -> Streamed:
    request = {"model": "m", "messages": ASKED, "stream": True, **fields}
    return Streamed(aiter(await client.chat.completions.create(**request)))


@pytest.mark.parametrize("streaming", ["incremental", "cumulative", None])
@pytest.mark.parametrize("text", REPLIES.values(), ids=REPLIES)
async def test_the_pieces_are_the_whole_reply(text: str, streaming: Any) -> None:
    """And the conversation goes on from either with the tokens that were sampled."""
    reply = {"text": text, "events": [1] * 100}
    if text.startswith("<think>\nWhat"):
        reply["finish"] = "length"
    async with running_gateway([reply, reply, {"text": "Go on."}], streaming=streaming) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            whole = await client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS)
            streamed = await stream(client, tools=TOOLS)
            await streamed.rest()
            expected = whole.choices[0].message.model_dump(exclude_none=True)
            message = {"role": "assistant", **streamed.message[0]}
            for each in (expected, message):
                for call in each.get("tool_calls", ()):
                    call["id"] = ""
                each["content"] = each.get("content") or ""
            assert message == expected
            assert streamed.finish_reasons == {0: whole.choices[0].finish_reason}
            sent = {"role": "assistant", **streamed.message[0]}
            more = [*ASKED, sent, user("Go on.")]
            await client.chat.completions.create(model="m", messages=more, tools=TOOLS)
        turns = (await stack.close(key)).turns
    assert turns[0].output.tolist() == turns[1].output.tolist()
    assert {turn.excluded for turn in turns} == {None}


async def test_text_comes_while_it_is_sampled_and_an_interruption_is_not_seen() -> None:
    script = [
        {"text": "It is four", "events": [1, 1, 1], "hang": True, "abort_after": 3},
        {"text": ", I think."},
    ]
    async with running_gateway(script) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            streamed = await stream(client)
            await streamed.until(len("It is"))  # the last token may be the one that ends it
            assert streamed.finish_reasons == {}
            stack.engine.abort_all()
            await streamed.rest()
        (turn,) = (await stack.close(key)).turns
    assert streamed.message[0]["content"] == "It is four, I think."
    assert len(turn.weight_versions) == 2
    assert turn.excluded is None


async def test_a_call_comes_before_what_follows_it() -> None:
    script = [{"text": f"{CALL}\n{CALL}", "events": [1] * 25, "hang": True, "abort_after": 25}]
    async with running_gateway([*script, {"text": ""}]) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            streamed = await stream(client, tools=TOOLS)
            while not streamed.message.get(0, {}).get("tool_calls"):
                streamed._take(await anext(streamed._chunks))
            stack.engine.abort_all()
            await streamed.rest()
        await stack.close(key)
    arguments = streamed.message[0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"a":  2}'


async def test_choices_are_streamed_beside_each_other() -> None:
    script = [{"text": "one", "events": [1], "hang": True}, {"text": "two two", "events": [1]}]
    async with running_gateway([*script, {"text": "!"}]) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            streamed = await stream(client, n=2)
            while not any(message["content"] == "two two" for message in streamed.message.values()):
                streamed._take(await anext(streamed._chunks))
            stack.engine.abort_all()
            await streamed.rest()
        turns = (await stack.close(key)).turns
    assert streamed.finish_reasons == {0: "stop", 1: "stop"}
    assert len(turns) == 2
    assert {turn.excluded for turn in turns} == {None}


async def test_a_stop_string_is_not_passed_on() -> None:
    script = [{"text": "one two END three", "events": [1] * 20}]
    async with running_gateway(script) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            streamed = await stream(client, stop=["two END"])
            await streamed.rest()
        await stack.close(key)
    assert streamed.message[0]["content"] == "one "


async def test_a_trainer_may_say_that_it_has_no_stop_strings() -> None:
    async with running_gateway([{"text": "It is four."}] * 2) as stack:
        key = await stack.open(stop=None)
        async with openai_client(key) as client:
            for stop in (None, ["."]):
                streamed = await stream(client, stop=stop)
                await streamed.rest()
                assert streamed.message[0]["content"] == ("It is four" if stop else "It is four.")
        await stack.close(key)


async def test_what_comes_in_one_long_piece_is_told_at_its_end() -> None:
    """Reading it would hold up every other rollout of the worker, and hold nothing back."""
    ids = np.array(tokenizer().encode(" word" * 2000), dtype=np.int32)
    told: list[dict[str, Any]] = []
    reader = renderer("qwen3").reader(tools=None, prompt=None, stop=())
    telling = _replies.Telling(lambda _, fields: told.append(fields), reader, 0, "chatcmpl-1")
    telling.take(ids[:10])
    assert told == [{"content": " word" * 9}]  # the last token may be the one that ends it
    telling.take(ids[10:])
    assert len(told) == 1
    whole = renderer("qwen3").parse(ids, tools=None, finish_reason="length", matched=None)
    telling.finish(whole)
    assert [*map(str, told[1:])] == [str({"content": " word" * 1991})]


async def test_a_stream_that_breaks_ends_in_an_error_event() -> None:
    script = [{"text": "It is four", "events": [1, 1], "drop_after": 2}, {"fail": 500, "times": 20}]
    async with running_gateway(script, retry_budget=0.2) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            streamed = await stream(client)
            with pytest.raises(APIError, match="not available"):
                await streamed.rest()
        trajectory = await stack.close(key)
    assert streamed.message[0]["content"] == "It"
    assert trajectory.leaves() == []


async def test_a_key_that_is_closed_ends_the_stream_and_keeps_the_turn() -> None:
    script = [{"text": "It is four", "events": [1, 1], "hang": True}]
    async with running_gateway(script) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            streamed = await stream(client)
            await streamed.until(2)
            trajectory = await stack.close(key, aborted=True)
            with pytest.raises(APIError, match="has ended"):
                await streamed.rest()
    (turn,) = trajectory.turns
    assert turn.excluded == "aborted"


async def test_a_retry_is_sent_the_stream_from_its_start() -> None:
    script = [{"text": "It is four", "events": [1, 1], "hang": True, "abort_after": 2}]
    async with running_gateway([*script, {"text": " four"}], retry_grace=20) as stack:
        key = await stack.open()
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            async with asking(http, key) as response:
                lines = response.aiter_lines()
                while '"It"' not in await anext(lines):
                    pass
            (record,) = stack.keys._records.values()
            await until(lambda: any(asked.lost_at for asked in record.asked._asked))
            async with asking(http, key) as response:
                lines = response.aiter_lines()
                while '"It"' not in await anext(lines):
                    pass
                stack.engine.abort_all()
                rest = [line async for line in lines if line]
        (turn,) = (await stack.close(key)).turns
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in rest
        if line != "data: [DONE]"
    )
    assert text == " is four"
    assert turn.excluded is None


async def test_what_was_streamed_is_forgotten_with_its_last_reader() -> None:
    async with running_gateway([{"text": "four", "events": [1]}]) as stack:
        key = await stack.open()
        async with openai_client(key) as client:
            await (await stream(client)).rest()
        await _idle(stack)
        (record,) = stack.keys._records.values()
        assert [asked.events for asked in record.asked._asked] == [[]]
        await stack.close(key)


async def _idle(stack: Stack) -> None:
    (record,) = stack.keys._records.values()
    with anyio.fail_after(5):
        await until(lambda: not record.calls)


def asking(http: httpx.AsyncClient, key: Key) -> Any:
    return http.stream(
        "POST",
        f"{key.base_url}/chat/completions",
        json={"model": "m", "messages": ASKED, "stream": True},
        headers={"authorization": f"Bearer {key.secret}"},
    )
