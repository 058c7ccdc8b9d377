"""Streamed calls against the scripted engine over HTTP, and against streams that misbehave."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.http_stand_ins import serve, silent
from tests.strategies import garbled_engine_replies, json_values, streamed_replies
from tests.waiting import until
from turnleaf.adapters.mock import ScriptedEngine, compare, serve_router
from turnleaf.core import Trajectory, Turn, WeightSpan
from turnleaf.gateway.engines import (
    ContinuingEngine,
    EngineLost,
    EngineRefused,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    SGLangEngine,
    Stop,
    UntrustedReply,
    WantedExperts,
    _connections,
    _continuing,
    _fleet,
    _sglang_stream,
)
from turnleaf.gateway.engines._sglang_stream import ReplyStream, StreamError
from turnleaf.gateway.engines._sglang_wire import decode_reply

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., Awaitable[tuple[ScriptedEngine, str]]]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_continuing, "PAUSE", 0.0)


def request_for(turn_id: str = "turn", **fields: Any) -> EngineRequest:
    return EngineRequest(
        **{
            "turn_id": turn_id,
            "input_ids": np.array([1, 2, 3], dtype=np.int32),
            "sampling": {"max_new_tokens": 100},
            "routing_key": "rollout",
            **fields,
        }
    )


@attrs.define(eq=False)
class Caller:
    """Makes calls and keeps what their listeners are told."""

    sglang: SGLangEngine
    engine: ContinuingEngine
    told: list[list[int]] = attrs.Factory(list)

    @property
    def ids(self) -> list[int]:
        return [token_id for event in self.told for token_id in event]

    async def ask(
        self, request: EngineRequest | None = None, stop: Stop | None = None
    ) -> EngineReply:
        """One call, without the continuation of interruptions."""
        return await self._ask(self.sglang, request, stop)

    async def turn(
        self, request: EngineRequest | None = None, stop: Stop | None = None
    ) -> EngineReply:
        """A call that goes on behind interruptions."""
        return await self._ask(self.engine, request, stop)

    async def _ask(self, engine: Any, request: Any, stop: Any) -> EngineReply:
        self.told.clear()
        reply: EngineReply = await engine.generate(
            request or request_for(),
            stop=stop or Stop(),
            on_tokens=lambda ids: self.told.append(ids.tolist()),
        )
        assert self.ids == reply.output.tolist()
        return reply


@asynccontextmanager
async def caller(url: str, *, retry_budget: float = 5.0) -> AsyncIterator[Caller]:
    sglang = SGLangEngine(url, retry_budget=retry_budget)
    try:
        yield Caller(sglang, ContinuingEngine(sglang))
    finally:
        await sglang.aclose()


@asynccontextmanager
async def under_way(call: Awaitable[EngineReply]) -> AsyncIterator[list[EngineReply]]:
    """A call beside whatever happens meanwhile; leaving waits for its reply."""
    replies: list[EngineReply] = []

    async def answer() -> None:
        replies.append(await call)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer)
        yield replies


def streamed(engine: ScriptedEngine) -> list[bool]:
    return [call.tell is not None for call in engine.calls]


def balance(
    engine: ScriptedEngine, reply: EngineReply | None, request: EngineRequest | None = None
) -> dict[str, int]:
    """What is lost when the reply is recorded as its turn, and everything else adds up."""
    request = request or request_for()
    trajectory = Trajectory()
    if reply is not None:
        trajectory.add(
            Turn(
                id=request.turn_id,
                index=0,
                parent=None,
                keep=0,
                prompt=request.input_ids,
                output=reply.output,
                logprobs=reply.logprobs,
                finish_reason=reply.finish_reason,
                weight_versions=reply.weight_versions,
                excluded="aborted" if reply.finish_reason == "abort" else None,
            )
        )
    report = compare(engine.ledger, [trajectory])
    report.raise_for_problems()
    return {str(reason): tokens for reason, tokens in report.lost.items()}


def same(one: EngineReply, other: EngineReply) -> bool:
    return (
        one.output.tolist() == other.output.tolist()
        and one.logprobs.tolist() == other.logprobs.tolist()
        and (one.output.dtype, one.logprobs.dtype) == (other.output.dtype, other.logprobs.dtype)
        and attrs.asdict(one, filter=_not_an_array) == attrs.asdict(other, filter=_not_an_array)
    )


def _not_an_array(attribute: Any, _: Any) -> bool:
    return attribute.name not in ("output", "logprobs")


async def test_tokens_are_told_as_they_come(scripted_engine: StartEngine) -> None:
    script = [{"ids": [4, 5, 6, 7], "hang": True, "abort_after": 3, "events": [2, 1]}]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    async with caller(url) as client, under_way(client.ask()) as replies:
        await until(lambda: client.ids == [4, 5, 6])
        assert replies == []
        engine.abort_all()
    assert (client.ids, replies[0].finish_reason) == ([4, 5, 6], "abort")
    assert streamed(engine) == [True]


@pytest.mark.parametrize("events", [None, [3, 1], [1, 0, 2], [100], []])
async def test_a_streamed_reply_is_the_unstreamed_one(
    scripted_engine: StartEngine, events: Any
) -> None:
    reply = {
        "ids": [5, 6, 7, 8, 9, 10],
        "speculation": [1, 2, 3],
        "prompt_tail": 2,
        "matched": "END",
        "events": events,
    }
    engine, url = await scripted_engine({"a": [reply], "b": [reply]}, streaming="incremental")
    engine.weight_version = "7"
    async with caller(url) as client:
        plain = await client.sglang.generate(request_for(routing_key="a"), stop=Stop())
        engine.calls.clear()
        engine._sequences.clear()
        told = await client.ask(request_for(routing_key="b"))
    assert same(plain, told)
    assert streamed(engine) == [True]


async def test_where_it_is_not_incremental_nothing_is_streamed(
    scripted_engine: StartEngine,
) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [5, 6]}]}, repeat=True)
    async with caller(url) as client:
        await client.ask()
        assert client.told == [[5, 6]]
        engine.streaming = "incremental"  # started anew
        await client.ask()
        client.sglang._fleet._ask_at = anyio.current_time()
        await client.ask()
    assert streamed(engine) == [False, False, True]
    assert client.ids == [5, 6]


@pytest.mark.parametrize(
    "wanted",
    [
        {"experts": WantedExperts((2, 2))},
        {
            "sampling": {
                "max_new_tokens": 9,
                "top_p": 0.5,
                "custom_params": {"return_top_p_token_ids": True},
            }
        },
    ],
)
async def test_what_needs_replay_data_is_not_streamed(
    scripted_engine: StartEngine, wanted: dict[str, Any]
) -> None:
    engine, url = await scripted_engine(
        {"*": [{"ids": [5, 6]}]}, streaming="incremental", routed_experts_shape=(2, 2)
    )
    async with caller(url) as client:
        reply = await client.ask(request_for(**wanted))
    assert reply.routed_experts is not None or reply.top_p_ids is not None
    assert (streamed(engine), client.told) == ([False], [[5, 6]])


async def test_all_engines_behind_a_router_must_stream(scripted_engine: StartEngine) -> None:
    script = {"*": [{"ids": [5, 6]}]}
    one, one_url = await scripted_engine(script, repeat=True, streaming="incremental")
    two, two_url = await scripted_engine(script, repeat=True)
    async with serve_router([one_url, two_url]) as url, caller(url) as client:
        for key in "abcdef":
            await client.ask(request_for(routing_key=key))
        assert {*streamed(one), *streamed(two)} == {False}
        two.streaming = "incremental"
        client.sglang._fleet.forget_streaming()
        for key in "abcdef":
            await client.ask(request_for(routing_key=key))
            assert client.ids == [5, 6]
    assert one.calls
    assert two.calls


async def test_an_engine_that_cannot_be_asked_changes_nothing() -> None:
    status = 500

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response({"incremental_streaming_output": True}, status=status)

    async with serve(web.get("/server_info", server_info)) as url, caller(url) as client:
        assert not await client.sglang._fleet.streams_incrementally()
        status = 200
        assert not await client.sglang._fleet.streams_incrementally()  # not asked so soon
        client.sglang._fleet.forget_streaming()
        assert await client.sglang._fleet.streams_incrementally()
        status = 500
        client.sglang._fleet.forget_streaming()
        assert await client.sglang._fleet.streams_incrementally()
        status = 404
        client.sglang._fleet.forget_streaming()
        assert not await client.sglang._fleet.streams_incrementally()


async def test_an_engine_that_does_not_say_is_waited_for_a_little_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_fleet, "_ASKING_TIME", 0.05)

    async with serve(web.get("/server_info", silent(anyio.Event()))) as url, caller(url) as client:
        with anyio.fail_after(5):
            assert not await client.sglang._fleet.streams_incrementally()


async def test_while_engines_are_asked_again_what_is_known_has_to_do() -> None:
    asked = 0
    say = anyio.Event()
    say.set()

    async def server_info(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await say.wait()
        return web.json_response({"incremental_streaming_output": asked == 1})

    async with serve(web.get("/server_info", server_info)) as url, caller(url) as client:
        fleet = client.sglang._fleet
        assert await fleet.streams_incrementally()
        fleet.forget_streaming()
        say = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.streams_incrementally)
            await until(lambda: asked == 2)
            assert await fleet.streams_incrementally()
            say.set()
        assert not await fleet.streams_incrementally()


async def test_a_stream_that_is_cumulative_after_all_goes_on_unstreamed(
    scripted_engine: StartEngine,
) -> None:
    """It is aborted, its part is kept, and no token is told or recorded twice."""
    script = [
        {"ids": [1], "times": 1},
        {"ids": [4, 5, 6, 7, 8], "hang": True, "abort_after": 3},
        {"ids": [9, 10]},
        {"ids": [11]},
    ]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    async with caller(url) as client:
        await client.ask()
        engine.ledger._entries.clear()
        engine.streaming = "cumulative"
        reply = await client.turn()
        assert reply.output.tolist() == [4, 5, 6, 9, 10]
        assert balance(engine, reply) == {}
        await client.turn()
    assert streamed(engine) == [True, True, False, False]


async def test_a_cumulative_stream_that_ends_at_once_is_whole(
    scripted_engine: StartEngine,
) -> None:
    engine, url = await scripted_engine(
        {"*": [{"ids": [4, 5, 6], "events": [1]}]}, repeat=True, streaming="incremental"
    )
    async with caller(url) as client:
        await client.ask()
        engine.streaming = "cumulative"
        reply = await client.ask()
        assert (reply.finish_reason, client.ids) == ("stop", [4, 5, 6])
        await client.ask()
    assert streamed(engine) == [True, True, False]


@pytest.mark.parametrize("how", [{"drop": True}, {"fail": 503}, {"fail": 429}])
async def test_before_the_first_token_a_failure_is_tried_again(
    scripted_engine: StartEngine, how: dict[str, Any]
) -> None:
    script = [{"ids": [5, 6], **how}, {"ids": [8, 9]}]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    async with caller(url) as client:
        reply = await client.ask()
    assert [call.rid for call in engine.calls] == ["turn.0.0", "turn.0.1"]
    assert (client.ids, streamed(engine)) == ([8, 9], [True, True])
    assert balance(engine, reply) == ({"unanswered": 2} if "drop" in how else {})


async def test_behind_some_tokens_a_broken_stream_goes_on(scripted_engine: StartEngine) -> None:
    """What was told stands; what nobody was told of is lost."""
    script = [
        {"ids": [4, 5, 6, 7, 8], "drop_after": 3, "events": [1, 2]},
        {"ids": [9, 10, 11], "drop_after": 1},
        {"ids": [12]},
    ]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    async with caller(url) as client:
        reply = await client.turn()
    assert client.ids == [4, 5, 6, 9, 12]
    assert (reply.finish_reason, streamed(engine)) == ("stop", [True] * 3)
    assert [call.input_ids.tolist()[3:] for call in engine.calls] == [
        [],
        [4, 5, 6],
        [4, 5, 6, 9],
    ]
    assert reply.weight_versions == (
        WeightSpan("default", 3),
        WeightSpan("default", 1),
        WeightSpan("default", 1),
    )
    assert balance(engine, reply) == {"unanswered": 4}


async def test_a_router_hands_streams_on_as_they_come_and_as_they_break(
    scripted_engine: StartEngine,
) -> None:
    script = [
        {"ids": [4, 5, 6], "drop_after": 2},
        {"ids": [7, 8, 9, 10], "hang": True},
        {"ids": [11]},
    ]
    engine, engine_url = await scripted_engine({"*": script}, streaming="incremental")
    async with (
        serve_router([engine_url]) as url,
        caller(url) as client,
        under_way(client.turn()) as replies,
    ):
        await until(lambda: client.ids == [4, 5, 7, 8])
        engine.abort_all()
    assert client.ids == [4, 5, 7, 8, 11]
    assert balance(engine, replies[0]) == {"unanswered": 1}


async def test_a_broken_stream_that_cannot_go_on_is_an_error(scripted_engine: StartEngine) -> None:
    script = [{"ids": [4, 5, 6], "drop_after": 2}, {"fail": 500, "times": 100}]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    async with caller(url, retry_budget=0.0) as client:
        with pytest.raises(EngineUnavailable):
            await client.turn()
    assert client.ids == [4, 5]
    assert balance(engine, None) == {"unanswered": 3}


async def test_an_update_of_weights_in_mid_stream_is_one_turn(
    scripted_engine: StartEngine,
) -> None:
    script = [
        {"ids": [4, 5, 6, 7], "hang": True, "abort_after": 3},
        {"ids": [8, 9]},
    ]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    async with caller(url) as client, under_way(client.turn()) as replies:
        await until(lambda: client.ids == [4, 5, 6])
        engine.pause()
        await until(lambda: len(engine.ledger) == 1)
        engine.weight_version = "2"
        engine.resume()
    assert client.ids == [4, 5, 6, 8, 9]
    assert replies[0].weight_versions == (WeightSpan("default", 3), WeightSpan("2", 2))
    assert balance(engine, replies[0]) == {}


async def test_a_call_that_is_stopped_in_mid_stream_hands_back_its_part(
    scripted_engine: StartEngine,
) -> None:
    script = [{"ids": [4, 5, 6, 7], "hang": True}]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    stop = Stop()
    async with caller(url) as client:
        async with under_way(client.turn(stop=stop)) as replies:
            await until(lambda: client.ids == [4, 5])
            stop.set()
            stopped = anyio.current_time()
        assert anyio.current_time() - stopped < 0.5
    assert (replies[0].output.tolist(), replies[0].finish_reason) == ([4, 5], "abort")
    assert balance(engine, replies[0]) == {}
    assert engine.calls[0].aborted


async def test_a_stop_that_the_engine_does_not_heed_keeps_what_was_told(
    scripted_engine: StartEngine,
) -> None:
    script = [{"ids": [4, 5, 6, 7], "hang": True, "abort_after": 3, "events": [2]}]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    engine.abort = lambda rid: None  # type: ignore[method-assign]  # no call is ended
    stop = Stop()
    async with caller(url) as client:
        async with under_way(client.turn(stop=stop)) as replies:
            await until(lambda: client.ids == [4, 5])
            stop.set()
        await until(lambda: len(engine.ledger) == 1)
    assert (replies[0].output.tolist(), replies[0].finish_reason) == ([4, 5], "abort")
    assert balance(engine, replies[0]) == {"unanswered": 1}


async def test_a_call_that_is_stopped_before_its_first_token_is_lost(
    scripted_engine: StartEngine,
) -> None:
    engine, url = await scripted_engine(
        {"*": [{"ids": [4, 5], "hang": True, "events": []}]}, streaming="incremental"
    )
    engine.abort = lambda rid: None  # type: ignore[method-assign]  # no call is ended
    stop = Stop()
    async with caller(url) as client, anyio.create_task_group() as tasks:

        async def stop_when_asked() -> None:
            await until(lambda: bool(engine.calls))
            stop.set()

        tasks.start_soon(stop_when_asked)
        with pytest.raises(EngineLost):
            await client.ask(stop=stop)
    assert client.told == []


async def test_a_cancelled_stream_is_aborted(scripted_engine: StartEngine) -> None:
    script = [{"ids": [4, 5, 6, 7], "hang": True}]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    async with caller(url) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.turn)
        await until(lambda: client.ids == [4, 5])
        tasks.cancel_scope.cancel()
    await until(lambda: len(engine.ledger) == 1)
    assert sum(balance(engine, None).values()) == 2


@pytest.mark.parametrize(
    "spoiling",
    [{"mismatch": True}, {"spoil": {"completion_tokens": 2}}, {"spoil": {"prompt_tokens": 9}}],
)
async def test_a_last_event_that_lies_spoils_the_reply(
    scripted_engine: StartEngine, spoiling: dict[str, Any]
) -> None:
    script = [{"ids": [4, 5, 6], **spoiling}]
    engine, url = await scripted_engine({"*": script}, streaming="incremental")
    async with caller(url) as client:
        with pytest.raises(UntrustedReply):
            await client.turn()
    assert len(engine.calls) == 1
    assert balance(engine, None) == {"miscounted": 3}


async def test_a_refusal_in_a_stream_is_not_tried_again(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({"*": [{"fail": 400}]}, streaming="incremental")
    async with caller(url) as client:
        with pytest.raises(EngineRefused, match=r"refuses the call: it answers 400$") as refused:
            await client.turn()
        assert "the script has" in refused.value.said
    assert streamed(engine) == [True]


async def test_what_comes_in_small_pieces_is_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first of them, which nobody waits for."""
    monkeypatch.setattr(_connections, "_SHARE_OF_TIME", 1e9)
    monkeypatch.setattr(_sglang_stream, "_COLLECT", 0.5)
    clients: list[Caller] = []

    async def pieces() -> AsyncIterator[bytes]:
        yield event(1, [FIVE])
        await until(lambda: clients[0].told == [[5]])
        yield event(2, [SIX])
        await clients[0].sglang._fleet.engines()  # meanwhile it could have been read
        yield event(3, [FIVE], "stop") + DONE

    async with streaming(pieces()) as url, caller(url) as client:
        clients.append(client)
        reply = await client.ask()
    assert (client.told, reply.finish_reason) == ([[5], [6, 5]], "stop")


@asynccontextmanager
async def streaming(
    *streams: Iterable[bytes] | AsyncIterator[bytes],
    ends: bool = True,
    routes: Iterable[web.RouteDef] = (),
) -> AsyncIterator[str]:
    """A server that answers calls with these chunks, one call after the other."""
    left = list(streams)

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response({"incremental_streaming_output": True})

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        stream = left.pop(0)
        if isinstance(stream, Iterable):
            for chunk in stream:
                await response.write(chunk)
        else:
            async for chunk in stream:
                await response.write(chunk)
        if not ends:
            await anyio.sleep_forever()
        return response

    own = web.get("/server_info", server_info), web.post("/generate", generate)
    async with serve(*own, *routes) as url:
        yield url


def event(total: int, entries: list[Any], finish: str | None = None, **meta: Any) -> bytes:
    meta_info = {
        "finish_reason": None if finish is None else {"type": finish},
        "prompt_tokens": 3,
        "completion_tokens": total,
        "output_token_logprobs": entries,
        **meta,
    }
    return b"data: " + json.dumps({"meta_info": meta_info}).encode() + b"\n\n"


FIVE, SIX = [-0.5, 5, None], [-0.25, 6, None]
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("ends", [True, False])
async def test_events_may_be_cut_anywhere_and_the_last_one_ends_it(ends: bool) -> None:
    sent = b": a comment\n" + event(1, [FIVE]) + event(2, [SIX], "stop") + DONE + b"nonsense\n"
    chunks = [sent[start : start + 7] for start in range(0, len(sent), 7)]
    async with streaming(chunks, ends=ends) as url, caller(url) as client:
        with anyio.fail_after(5):
            reply = await client.ask()
    assert (reply.output.tolist(), reply.finish_reason) == ([5, 6], "stop")


async def test_a_cumulative_stream_does_not_wait_for_its_abort() -> None:
    asked = anyio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield event(1, [FIVE])
        yield event(2, [FIVE, SIX])
        await asked.wait()
        yield event(2, [FIVE, SIX], "stop") + DONE

    routes = [web.post("/abort_request", silent(asked))]
    async with streaming(chunks(), routes=routes) as url, caller(url) as client:
        with anyio.fail_after(5):
            reply = await client.ask()
        assert client.sglang._fleet._requests.borrowed_tokens == 0
    assert (reply.output.tolist(), reply.finish_reason) == ([5, 6], "stop")


async def test_a_call_aborted_while_it_waits_again_repeats_what_was_told() -> None:
    """As SGLang does with one that it had taken off the batch, whatever its setting."""
    chunks = [event(1, [FIVE]), event(2, [FIVE, SIX], "abort"), DONE]
    async with streaming(chunks) as url, caller(url) as client:
        reply = await client.ask()
        assert await client.sglang._fleet.streams_incrementally()
    assert (reply.output.tolist(), reply.finish_reason) == ([5, 6], "abort")


async def test_a_call_aborted_before_its_first_step_sampled_nothing() -> None:
    waiting = {"completion_tokens": None, "output_token_logprobs": None}
    async with streaming([event(0, [], "abort", **waiting), DONE]) as url, caller(url) as client:
        reply = await client.ask()
    assert (len(reply.output), reply.finish_reason, client.told) == (0, "abort", [])


FAILED = {"finish_reason": {"type": "abort", "message": "out of memory", "status_code": 500}}
ERROR = b'data: {"error": {"message": "too long", "code": %d}}\n\n'


@pytest.mark.parametrize(
    "failed", [[event(0, [], **FAILED), DONE], [ERROR % 503, DONE], [ERROR % 408], [DONE], [b""]]
)
async def test_a_stream_that_fails_before_its_first_token_is_tried_again(
    failed: list[bytes],
) -> None:
    whole = [event(1, [FIVE], "stop"), DONE]
    async with streaming(failed, whole) as url, caller(url) as client:
        assert (await client.ask()).output.tolist() == [5]


@pytest.mark.parametrize(
    "failed", [[event(1, [], **FAILED), DONE], [ERROR % 400, DONE], [DONE], []]
)
async def test_a_stream_that_fails_behind_some_tokens_is_an_interruption(
    failed: list[bytes],
) -> None:
    whole = [event(1, [SIX], "stop", prompt_tokens=4), DONE]
    async with streaming([event(1, [FIVE]), *failed], whole) as url, caller(url) as client:
        reply = await client.turn()
    assert (reply.output.tolist(), reply.finish_reason) == ([5, 6], "stop")


async def test_a_refusal_in_an_event_says_why() -> None:
    refused = {"type": "abort", "message": "bad  grammar", "status_code": 400}
    for chunks in ([event(0, [], finish_reason=refused)], [ERROR % 400]):
        async with streaming(chunks) as url, caller(url) as client:
            with pytest.raises(EngineRefused, match=r"answers 400$") as refusal:
                await client.turn()
            assert refusal.value.said in ("bad grammar", "too long")


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([event(2, [FIVE])], "completion_tokens is 2, but there are 1 log-probabilities behind 0"),
        ([event(1, [FIVE]), event(1, [SIX])], "contradicts the ones before"),
        ([event(1, [FIVE]), event(3, [SIX])], "completion_tokens is 3, but there are 1 .* behind"),
        ([event(1, [FIVE]), event(0, [])], "completion_tokens is 0, but there are 0 .* behind 1"),
        ([event(True, [FIVE])], "completion_tokens is True"),
        ([event(1, [FIVE]), event(2, [["a", 6]])], r"output_token_logprobs\[1\] has the log-prob"),
        ([event(1, [FIVE]), event(2, [SIX, FIVE])], "contradicts the ones before"),
        ([event(1, None)], "output_token_logprobs is None, not a list"),  # type: ignore[arg-type]  # what is no list
        ([event(1, [FIVE], prompt_tokens=2)], "prompt_tokens is 2, but 3 were sent"),
        ([event(1, [FIVE], "tired")], "finish_reason.type is a str"),
        ([event(1, [FIVE], finish_reason=[])], "finish_reason is a list"),
        ([b"data: {\n"], "is not JSON"),
        ([b"data: []\n"], "an event of its stream is a list, not an object"),
        ([b'{"text": ""}\n'], "a line that is no event"),
        ([b"data: " + b"x" * 2000], "an event of its stream has more than 1000 bytes"),
        ([b": nothing\n" * 2000], "sent a reply of more than 10000 bytes"),
    ],
)
async def test_what_does_not_fit_ends_the_call(
    events: list[bytes], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sglang_stream, "_MAX_EVENT", 1000)
    monkeypatch.setattr(_sglang_stream, "reply_limit", lambda request: 10_000)
    async with streaming(events, ends=False) as url, caller(url) as client:
        with pytest.raises(UntrustedReply, match=complaint), anyio.fail_after(5):
            await client.turn()


@given(streamed_replies())
def test_joined_events_are_the_unstreamed_reply(streamed: tuple[bytes, list[bytes]]) -> None:
    """Whatever the events hold, and wherever the network cuts them."""
    unstreamed, chunks = streamed
    told: list[int] = []
    repeated: list[bool] = []
    stream = ReplyStream(
        request_for(), lambda ids: told.extend(ids.tolist()), lambda: repeated.append(True)
    )
    for chunk in chunks:
        stream.feed(chunk)
    assert stream.finished
    reply = decode_reply(unstreamed, prompt_length=3)
    assert same(reply, stream.reply())
    assert told == reply.output.tolist()
    assert len(repeated) <= 1


@given(
    st.lists(
        st.one_of(
            garbled_engine_replies().map(lambda reply: b"data: " + reply + b"\n"),
            json_values.map(lambda value: b"data: " + json.dumps(value).encode() + b"\n"),
            st.binary(),
        )
    )
)
def test_any_stream_is_trusted_or_refused(chunks: list[bytes]) -> None:
    told: list[int] = []
    stream = ReplyStream(request_for(), lambda ids: told.extend(ids.tolist()), lambda: None)
    try:
        for chunk in chunks:
            stream.feed(chunk)
        reply = stream.reply()
    except (UntrustedReply, StreamError):
        return
    assert told == reply.output.tolist()
    assert len(reply.output) == len(reply.logprobs) == stream.sampled
    assert sum(span.count for span in reply.weight_versions) == stream.sampled


def test_what_broke_off_has_the_weights_that_each_event_names() -> None:
    stream = ReplyStream(request_for(), lambda _: None, lambda: None)
    for total, ids, version in ((2, [4, 5], "1"), (3, [6], "1"), (4, [7], "2")):
        entries = [[-0.5, token_id, None] for token_id in ids]
        stream.feed(event(total, entries, weight_version=version))
    assert stream.reply().weight_versions == (WeightSpan("1", 3), WeightSpan("2", 1))
