"""The client against the scripted engine over HTTP, and against stand-ins that misbehave."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.abc
import numpy as np
import pytest
from aiohttp import web
from hypothesis import event, example, given
from hypothesis import strategies as st

from tests.http_stand_ins import serve, silent
from tests.strategies import garbled_engine_replies, json_values
from tests.waiting import until
from turnleaf.adapters.mock import ScriptedEngine
from turnleaf.core import EngineError, Replay, SettingsError, WeightSpan
from turnleaf.gateway.engines import (
    EngineLost,
    EngineRefused,
    EngineReply,
    EngineRequest,
    EngineUnavailable,
    SGLangEngine,
    Stop,
    UntrustedReply,
    WantedExperts,
)
from turnleaf.gateway.engines._sglang_wire import decode_reply, error_text

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., Awaitable[tuple[ScriptedEngine, str]]]


def request_for(
    turn_id: str = "turn", *, prompt: Any = (1, 2, 3), key: str = "rollout", **sampling: Any
) -> EngineRequest:
    sampling = {"max_new_tokens": 100, **sampling}
    return EngineRequest(turn_id, np.array(prompt, dtype=np.int32), sampling, key)


@asynccontextmanager
async def client(url: str, *, retry_budget: float = 5.0) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(url, retry_budget=retry_budget)
    try:
        yield engine
    finally:
        await engine.aclose()


async def ask(url: str, request: EngineRequest | None = None, **options: Any) -> EngineReply:
    async with client(url, **options) as engine:
        return await engine.generate(request or request_for(), stop=Stop())


async def test_a_reply_is_ids_with_their_logprobs(scripted_engine: StartEngine) -> None:
    reply = {"ids": [5, 6], "logprobs": [-0.1, -0.2]}
    engine, url = await scripted_engine({"a rollout/é\n": [reply]}, stop_token_id=9)
    engine.weight_version = "7"
    got = await ask(url, request_for(key="a rollout/é\n"))
    assert got.output.tolist() == [5, 6, 9]
    assert got.output.dtype == np.int32
    assert got.logprobs.dtype == np.float32
    assert got.logprobs[:2].tolist() == np.float32([-0.1, -0.2]).tolist()
    assert (got.finish_reason, got.matched, got.cached_tokens) == ("stop", 9, 0)
    assert got.weight_versions == (WeightSpan("7", 3),)
    assert engine.calls[0].input_ids.tolist() == [1, 2, 3]
    assert engine.calls[0].rid == "turn.0.0"


async def test_sampling_parameters_are_sent_with_ours_and_never_edited(
    scripted_engine: StartEngine,
) -> None:
    """B18: concurrent calls that share their base parameters see none of each other's."""
    engine, url = await scripted_engine({"*": [{"ids": [5], "delay": 0.05}]}, repeat=True)
    base = {"temperature": 0.7, "stop": ["END"], "custom_params": {"deep": [1]}}
    before = json.dumps(base)
    limits = {"a": 900, "b": 10, "c": 900, "d": 10}
    requests = [
        EngineRequest(name, np.arange(1, 4), {**base, "max_new_tokens": limit}, name)
        for name, limit in limits.items()
    ]
    requests.append(EngineRequest("base", np.arange(1, 4), base, "base"))
    async with client(url) as sglang, anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(lambda r=request: sglang.generate(r, stop=Stop()))
    assert json.dumps(base) == before
    ours = {
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    for call in engine.calls:
        limit = {} if call.routing_key == "base" else {"max_new_tokens": limits[call.routing_key]}
        assert call.sampling == {**base, **limit, **ours}


async def test_ids_come_from_the_logprob_entries(scripted_engine: StartEngine) -> None:
    """B20, first stub: `output_ids` begins with the tail of the prompt."""
    script = [{"ids": [900, 901], "logprobs": [-0.4, -0.1], "prompt_tail": 2}]
    _, url = await scripted_engine({"*": script})
    got = await ask(url, request_for(prompt=[7, 301, 302]))
    assert got.output.tolist() == [900, 901]
    assert got.logprobs.tolist() == np.float32([-0.4, -0.1]).tolist()


async def test_a_count_that_does_not_fit_is_refused(scripted_engine: StartEngine) -> None:
    """B20, second stub: more tokens are claimed than have log-probabilities."""
    engine, url = await scripted_engine({"*": [{"ids": [900, 901], "mismatch": True}]})
    with pytest.raises(UntrustedReply, match="completion_tokens is 3, but there are 2"):
        await ask(url)
    assert len(engine.calls) == 1


@pytest.mark.parametrize("how", [{"drop": True, "ids": [5, 6]}, {"fail": 503}, {"fail": 429}])
async def test_a_passing_failure_is_retried_under_a_new_rid(
    scripted_engine: StartEngine, how: dict[str, Any]
) -> None:
    engine, url = await scripted_engine({"*": [{**how, "times": 2}, {"ids": [8]}]})
    got = await ask(url)
    assert got.output.tolist() == [8]
    assert [call.rid for call in engine.calls] == ["turn.0.0", "turn.0.1", "turn.0.2"]
    lost = [entry.rid for entry in engine.ledger if not entry.answered]
    assert lost == (["turn.0.0", "turn.0.1"] if "drop" in how else [])


async def test_a_refusal_is_not_retried(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({"*": [{"fail": 400}, {"ids": [8]}]})
    with pytest.raises(EngineRefused, match=r"refuses the call: it answers 400$") as caught:
        await ask(url)
    assert caught.value.said.startswith("the script")
    assert len(engine.calls) == 1


async def test_the_retry_budget_ends(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({"*": [{"fail": 500}]}, repeat=True)
    with pytest.raises(EngineUnavailable, match=rf"{url} failed \d+ times .* 500.*correct its"):
        await ask(url, retry_budget=0.3)
    assert len(engine.calls) > 1


async def test_an_engine_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    async with client(f"http://user:s3cret@127.0.0.1:{port}", retry_budget=0.0) as engine:
        for call in (engine.generate(request_for(), stop=Stop()), engine.check()):
            with pytest.raises(EngineUnavailable, match=f"{address}[: ]") as caught:
                await call
            assert "Start it, or correct its address" in str(caught.value)
            assert "s3cret" not in str(caught.value)


async def test_check(scripted_engine: StartEngine) -> None:
    _, url = await scripted_engine({})
    async with client(url + "/") as engine:
        await engine.check()
    async with serve() as other, client(other) as engine:
        with pytest.raises(EngineUnavailable, match=f"no engine is ready at {other}: .* 404"):
            await engine.check()


@pytest.mark.parametrize(
    "url", ["localhost:30000", "", "http://", "ftp://host", "http://host:port", "http://[::1"]
)
def test_an_url_that_is_none(url: str) -> None:
    with pytest.raises(SettingsError, match="http://host:port"):
        SGLangEngine(url)


def test_an_url_that_is_none_keeps_its_password_to_itself() -> None:
    with pytest.raises(SettingsError) as caught:
        SGLangEngine("user:s3cret@host:1")
    assert "s3cret" not in str(caught.value)


async def test_a_stopped_call_hands_back_its_part(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [4, 5, 6, 7], "hang": True}]})
    stop = Stop()
    replies = []

    async with client(url) as sglang:

        async def call() -> None:
            replies.append(await sglang.generate(request_for(), stop=stop))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(lambda: bool(engine.calls))
            stop.set()
            stopped = anyio.current_time()
        assert anyio.current_time() - stopped < 0.5
    assert replies[0].output.tolist() == [4, 5]
    assert replies[0].finish_reason == "abort"
    (entry,) = engine.ledger
    assert (entry.finish, entry.answered) == ("abort", True)


async def test_a_stopped_call_that_gets_nothing_back_is_lost() -> None:
    asked = anyio.Event()

    stop = Stop()
    async with serve(web.post("/generate", silent(asked))) as url, client(url) as sglang:

        async def stop_when_asked() -> None:
            await asked.wait()
            stop.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_when_asked)
            with pytest.raises(EngineLost, match="turn turn: stopped"):
                await sglang.generate(request_for(), stop=stop)


async def test_one_stop_ends_every_call_that_shares_it(scripted_engine: StartEngine) -> None:
    """It is set where no task runs, as it is when a key expires."""
    script = [{"ids": [4, 5, 6, 7], "hang": True}]
    engine, url = await scripted_engine({"*": script}, repeat=True)
    stop = Stop()
    replies = {}

    async with client(url) as sglang, anyio.create_task_group() as tasks:

        async def call(turn_id: str) -> None:
            replies[turn_id] = await sglang.generate(request_for(turn_id), stop=stop)

        for turn_id in ("a", "b", "c"):
            tasks.start_soon(call, turn_id)
        await until(lambda: len(engine.calls) == 3)
        asyncio.get_running_loop().call_soon(stop.set)
    assert {turn_id: reply.output.tolist() for turn_id, reply in replies.items()} == {
        "a": [4, 5],
        "b": [4, 5],
        "c": [4, 5],
    }
    assert all(call.aborted for call in engine.calls)


async def test_a_stop_behind_a_call_asks_nothing_of_the_engine() -> None:
    aborts = []

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=reply_bytes(2), content_type="application/json")

    async def abort(request: web.Request) -> web.Response:
        aborts.append(await request.json())
        return web.Response()

    stop = Stop()
    routes = web.post("/generate", generate), web.post("/abort_request", abort)
    async with serve(*routes) as url, client(url) as sglang:
        reply = await sglang.generate(request_for(), stop=stop, on_tokens=lambda _: stop.set())
        assert (reply.finish_reason, len(reply.output)) == ("stop", 2)
        await anyio.wait_all_tasks_blocked()
        assert aborts == []


async def test_what_asks_for_an_abort_ends_with_the_call() -> None:
    """The reply comes while an engine is still asked to end the call."""
    asked = anyio.Event()
    stop = Stop()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        stop.set()
        await asked.wait()
        return web.Response(body=reply_bytes(2), content_type="application/json")

    routes = web.post("/generate", generate), web.post("/abort_request", silent(asked))
    async with serve(*routes) as url, client(url) as sglang:
        with anyio.fail_after(0.4):  # less than the engine is given for it
            reply = await sglang.generate(request_for(), stop=stop)
        assert (reply.finish_reason, len(reply.output)) == ("stop", 2)
        assert sglang._fleet._requests.borrowed_tokens == 0


async def test_a_call_that_is_stopped_before_it_begins(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [1]}]})
    stop = Stop()
    stop.set()
    async with client(url) as sglang:
        with pytest.raises(EngineLost):
            await sglang.generate(request_for(), stop=stop)
    assert engine.calls == []


async def test_a_stop_between_attempts_is_not_waited_out(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({"*": [{"fail": 500}]}, repeat=True)
    stop = Stop()

    async with client(url, retry_budget=1000) as sglang:

        async def stop_soon() -> None:
            await until(lambda: len(engine.calls) >= 3)
            stop.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_soon)
            with pytest.raises(EngineLost), anyio.fail_after(10):
                await sglang.generate(request_for(), stop=stop)


async def test_a_cancelled_call_is_aborted(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [4, 5, 6, 7], "hang": True}]})
    async with client(url) as sglang, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: sglang.generate(request_for(), stop=Stop()))
        await until(lambda: bool(engine.calls))
        tasks.cancel_scope.cancel()
    await until(lambda: len(engine.ledger) == 1)
    (entry,) = engine.ledger
    assert entry.finish == "abort"


@asynccontextmanager
async def router(engine: str, listing: Any, aborts: list[Any]) -> AsyncIterator[str]:
    """Hands `/generate` on, has no `/abort_request`, and lists `engine` and another one."""

    async def generate(request: web.Request) -> web.Response:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{engine}/generate", data=await request.read()) as response,
        ):
            return web.Response(body=await response.read(), status=response.status)

    async def abort(request: web.Request) -> web.Response:
        aborts.append(await request.json())
        return web.Response()

    async def workers(_: web.Request) -> web.Response:
        return web.json_response(listing(engine, other))

    async with (
        serve(web.post("/abort_request", abort)) as other,
        serve(web.post("/generate", generate), web.get("/workers", workers)) as url,
    ):
        yield url


@pytest.mark.parametrize(
    "listing",
    [
        lambda *urls: {"workers": [{"url": url, "is_healthy": True} for url in urls], "total": 2},
        lambda *urls: {"urls": list(urls)},
    ],
)
@pytest.mark.parametrize("cancelled", [False, True])
async def test_every_engine_behind_a_router_is_asked_to_abort(
    scripted_engine: StartEngine, listing: Any, cancelled: bool
) -> None:
    engine, engine_url = await scripted_engine({"*": [{"ids": [4, 5], "hang": True}]})
    aborts: list[Any] = []
    stop = Stop()
    async with (
        router(engine_url, listing, aborts) as url,
        client(url) as sglang,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: sglang.generate(request_for(), stop=stop))
        await until(lambda: bool(engine.calls))
        if cancelled:
            tasks.cancel_scope.cancel()
        else:
            stop.set()
    assert engine.calls[0].aborted
    assert aborts == [{"rid": "turn.0.0"}]


async def test_no_call_queues_for_a_connection(scripted_engine: StartEngine) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [4, 5], "hang": True}]}, repeat=True)
    async with client(url) as sglang, anyio.create_task_group() as tasks:
        for number in range(150):
            request = request_for(str(number))
            tasks.start_soon(lambda r=request: sglang.generate(r, stop=Stop()))
        await until(lambda: len(engine.calls) == 150)
        engine.abort_all()


async def test_an_abort_that_nobody_asked_for_is_handed_back(
    scripted_engine: StartEngine,
) -> None:
    """B22's first reply; continuing it is the caller's."""
    script = [{"ids": [61, 62, 63], "finish": "abort"}, {"ids": [], "finish": "abort"}]
    _, url = await scripted_engine({"*": script})
    got = await ask(url)
    assert (got.output.tolist(), got.finish_reason) == ([61, 62, 63], "abort")
    got = await ask(url)
    assert (got.output.tolist(), got.finish_reason, got.weight_versions) == ([], "abort", ())


async def test_what_is_no_json_is_named(scripted_engine: StartEngine) -> None:
    _, url = await scripted_engine({})
    with pytest.raises(EngineError, match="sampling parameters cannot be sent as JSON"):
        await ask(url, request_for(custom={1, 2}))


def reply_bytes(count: int = 2, **meta: Any) -> bytes:
    entries = [[-0.5, 10 + position, None] for position in range(count)]
    meta_info = {
        "finish_reason": {"type": "stop", "matched": "END"},
        "prompt_tokens": 3,
        "completion_tokens": count,
        "output_token_logprobs": entries,
        **meta,
    }
    return json.dumps({"meta_info": meta_info}).encode()


def test_weight_versions_become_spans() -> None:
    """The shape and numbers seen when weights changed while a call ran."""
    spans = [{"version": "default", "start": 0, "end": 111}]
    spans += [{"version": "v2", "start": 111, "end": 200}]
    got = decode_reply(
        reply_bytes(200, weight_version="v2", weight_versions=spans), prompt_length=3
    )
    assert got.weight_versions == (WeightSpan("default", 111), WeightSpan("v2", 89))
    assert decode_reply(reply_bytes(2), prompt_length=3).weight_versions == (
        WeightSpan("default", 2),
    )
    empty = [{"version": "v2", "start": 0, "end": 0}]
    got = decode_reply(reply_bytes(0, weight_versions=empty), prompt_length=3)
    assert got.weight_versions == ()


def test_a_call_aborted_before_its_first_step_sampled_nothing() -> None:
    body = b'{"text": "", "meta_info": {"id": "a.0", "finish_reason": {"type": "abort"}}}'
    got = decode_reply(body, prompt_length=3)
    assert (len(got.output), got.finish_reason) == (0, "abort")


@pytest.mark.parametrize(
    ("meta", "complaint"),
    [
        ({"completion_tokens": 1}, "completion_tokens is 1, but there are 2"),
        ({"completion_tokens": None}, "completion_tokens is None"),
        ({"completion_tokens": True, "output_token_logprobs": [[-1, 2]]}, "tokens is True"),
        ({"output_token_logprobs": None}, "output_token_logprobs is None, not a list"),
        ({"output_token_logprobs": [[-0.5, 1], [None, 2]]}, r"\[1\] has the log-probability None"),
        ({"output_token_logprobs": [[-0.5, 1], [-1e300, 2]]}, r"\[1\] has the log.* -1e\+300"),
        ({"output_token_logprobs": [[-0.5, 1], [0.5, 2]]}, r"\[1\] has the log-probability 0\.5"),
        ({"output_token_logprobs": [[-0.5, -1], [-0.5, 2]]}, r"\[0\] has the id -1"),
        ({"output_token_logprobs": [[-0.5, 1.0], [-0.5, 2]]}, r"\[0\] has the id 1\.0"),
        ({"output_token_logprobs": [[-0.5, 2**31], [-0.5, 2]]}, r"\[0\] has the id 2147483648"),
        ({"output_token_logprobs": [[-0.5], [-0.5, 2]]}, r"\[0\] is a list, not"),
        ({"output_token_logprobs": [[-0.5, 1], "ab"]}, r"\[1\] is a str, not"),
        ({"output_token_logprobs": [[-0.5, 1], {"0": -0.5, "1": 2}]}, r"\[1\] is a dict, not"),
        ({"output_token_logprobs": [[-0.5, 1], 2]}, r"\[1\] is 2, not"),
        ({"finish_reason": None}, "no object 'finish_reason', but None"),
        ({"finish_reason": {"type": "tired"}}, "finish_reason.type is a str"),
        ({"finish_reason": {"type": "stop", "matched": [1]}}, "matched is a list"),
        ({"prompt_tokens": 2}, "prompt_tokens is 2, but 3 were sent"),
        ({"cached_tokens": -1}, "cached_tokens is -1"),
        ({"weight_version": 7}, "without a version's name"),
        ({"weight_versions": []}, "cover 0 of 2 tokens"),
        (
            {"weight_versions": [{"version": "a", "start": 1, "end": 2}]},
            "from 1 to 2, where one from 0 was due",
        ),
    ],
)
def test_what_does_not_fit_is_named(meta: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UntrustedReply, match=complaint):
        decode_reply(reply_bytes(**meta), prompt_length=3)


def test_a_positive_rounding_error_is_none() -> None:
    entries = [[3e-7, 1, None]]
    body = reply_bytes(completion_tokens=1, output_token_logprobs=entries)
    assert decode_reply(body, prompt_length=3).logprobs.tolist() == np.float32([3e-7]).tolist()


@given(st.one_of(garbled_engine_replies(), st.binary(), json_values.map(json.dumps)))
@example(b"[" * 100_000)
@example(b'{"meta_info": {"finish_reason": {"type": []}}}')
def test_any_reply_is_trusted_whole_or_refused(body: bytes | str) -> None:
    body = body.encode() if isinstance(body, str) else body
    try:
        reply = decode_reply(body, prompt_length=3, experts=WantedExperts((1, 2), 1), top_p=True)
    except UntrustedReply as refusal:
        event(f"refused: {str(refusal)[:60]}")
        return
    assert len(reply.output) == len(reply.logprobs)
    assert sum(span.count for span in reply.weight_versions) == len(reply.output)
    assert np.isfinite(reply.logprobs).all()
    assert (reply.output >= 0).all()
    if not len(reply.output):
        assert reply.top_p_ids is None
        return
    assert reply.routed_experts is not None
    replay = Replay(reply.routed_experts, reply.top_p_ids, reply.top_p_offsets)
    assert replay.problem(keep=2, end=3 + len(reply.output), sampled=len(reply.output)) is None
    assert replay.top_p_offsets is not None
    assert (np.diff(replay.top_p_offsets.astype(int)) > 0).all()


@given(st.one_of(st.binary(), json_values.map(lambda value: json.dumps(value).encode())))
@example(b'{"error": {"message": "' + b"x" * 1000 + b'"}}')
def test_an_error_text_is_one_short_line(body: bytes) -> None:
    text = error_text(body)
    assert len(text) <= 200
    assert len(text.splitlines()) <= 1


@pytest.mark.parametrize("name", ["error", "detail", "message"])
def test_an_error_text_is_the_engines_message(name: str) -> None:
    assert error_text(json.dumps({name: "too  long\nby far"}).encode()) == "too long by far"
    nested = {"error": {"message": "too long"}}
    assert error_text(json.dumps(nested).encode()) == "too long"
