"""The scripted engine over HTTP, in SGLang's words."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import numpy as np
import pytest

from tests.waiting import until
from turnleaf.adapters.mock import (
    FileTokenizer,
    Ledger,
    Reply,
    ScriptedEngine,
    serve_engine,
)
from turnleaf.core import ContractError, Speculation
from turnleaf.gateway._child import child_process

pytestmark = pytest.mark.anyio

StartEngine = Callable[..., Awaitable[tuple[ScriptedEngine, str]]]
IM_END = 256


@pytest.fixture
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(verify=False, timeout=10, trust_env=False) as client:
        yield client


def body_for(rid: str = "turn.0.0", ids: Any = (1, 2, 3), **sampling: Any) -> dict[str, Any]:
    return {
        "rid": rid,
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 100, **sampling},
        "return_logprob": True,
        "stream": False,
    }


async def generate(
    http: httpx.AsyncClient, url: str, body: dict[str, Any] | None = None, *, key: str = "rollout"
) -> httpx.Response:
    return await http.post(
        f"{url}/generate", json=body or body_for(), headers={"X-SMG-Routing-Key": key}
    )


def sampled(response: httpx.Response) -> list[int]:
    return [entry[1] for entry in response.json()["meta_info"]["output_token_logprobs"]]


async def test_a_reply_has_sglangs_shape(
    scripted_engine: StartEngine, http: httpx.AsyncClient, byte_tokenizer: FileTokenizer
) -> None:
    script = {"*": [{"text": "ok", "logprobs": [-0.25, -0.5]}]}
    engine, url = await scripted_engine(script, tokenizer=byte_tokenizer, stop_token_id=IM_END)
    reply = (await generate(http, url)).json()
    ids = [*byte_tokenizer.encode("ok"), IM_END]
    (entry,) = engine.ledger
    stop_logprob = entry.logprobs[-1]
    assert stop_logprob < 0
    assert reply == {
        "text": "ok<|im_end|>",
        "output_ids": ids,
        "meta_info": {
            "id": "turn.0.0",
            "finish_reason": {"type": "stop", "matched": IM_END},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "e2e_latency": 0.0,
            "weight_version": "default",
            "output_token_logprobs": [
                [-0.25, ids[0], None],
                [-0.5, ids[1], None],
                [stop_logprob, IM_END, None],
            ],
            "input_token_logprobs": [],
        },
    }


async def test_rollouts_have_their_own_scripts_and_places_in_them(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    _, url = await scripted_engine(
        {"a b": [{"ids": [1]}, {"ids": [2]}], "*": [{"ids": [8], "times": 2}, {"ids": [9]}]}
    )
    keys = ["a%20b", "x", "y", "a%20b", "x", "x"]
    got = [sampled(await generate(http, url, key=key)) for key in keys]
    assert got == [[1], [8], [8], [2], [8], [9]]


async def test_a_script_that_is_over_names_the_rollout(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    _, url = await scripted_engine({"*": [{"ids": [1]}]})
    await generate(http, url, key="row-7")
    response = await generate(http, url, key="row-7")
    assert response.status_code == 400
    assert "1 replies for rollout 'row-7', but this is its call 2" in response.text


async def test_the_last_reply_repeats_when_told(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    _, url = await scripted_engine({"*": [{"ids": [1]}, {"ids": [2]}]}, repeat=True)
    assert [sampled(await generate(http, url)) for _ in range(4)] == [[1], [2], [2], [2]]


async def test_a_function_answers_what_it_is_asked(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    def double(input_ids: Any, number: int) -> Reply | dict[str, Any]:
        if number == 1:
            return {"text": "there is no tokenizer"}
        return Reply(ids=tuple(2 * int(token) for token in input_ids))

    _, url = await scripted_engine({"*": [double]}, repeat=True)
    assert sampled(await generate(http, url)) == [2, 4, 6]
    assert "has no tokenizer" in (await generate(http, url)).text


async def test_control_tokens_in_a_text_are_sampled_as_such(
    scripted_engine: StartEngine, http: httpx.AsyncClient, byte_tokenizer: FileTokenizer
) -> None:
    script = {"*": [{"text": "a<|im_end|>never said"}, {"text": "a<|im_end|>", "finish": "length"}]}
    _, url = await scripted_engine(script, tokenizer=byte_tokenizer, stop_token_id=IM_END)
    for _ in range(2):
        response = await generate(http, url)
        assert sampled(response) == [*byte_tokenizer.encode("a"), IM_END]
        assert response.json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": IM_END}


@pytest.mark.parametrize(
    ("sampling", "text", "finish"),
    [
        ({"max_new_tokens": 4}, "one ", {"type": "length", "length": 4}),
        ({"max_new_tokens": 0}, "", {"type": "length", "length": 0}),
        ({"stop": "two"}, "one two", {"type": "stop", "matched": "two"}),
        ({"stop": ["three", "e t"]}, "one t", {"type": "stop", "matched": "e t"}),
        ({"stop": ["two"], "max_new_tokens": 7}, "one two", {"type": "length", "length": 7}),
        ({"stop": ["four"]}, "one two three<|im_end|>", {"type": "stop", "matched": IM_END}),
    ],
)
async def test_the_requests_limits_cut_the_script(
    scripted_engine: StartEngine,
    http: httpx.AsyncClient,
    byte_tokenizer: FileTokenizer,
    sampling: dict[str, Any],
    text: str,
    finish: dict[str, Any],
) -> None:
    engine, url = await scripted_engine(
        {"*": [{"text": "one two three"}]}, tokenizer=byte_tokenizer, stop_token_id=IM_END
    )
    response = await generate(http, url, body_for(**sampling))
    assert response.json()["text"] == text
    assert response.json()["meta_info"]["finish_reason"] == finish
    assert [entry.output_ids.tolist() for entry in engine.ledger] == (
        [byte_tokenizer.encode(text)] if text else []
    )


async def test_stop_token_ids_cut_the_script(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    _, url = await scripted_engine({"*": [{"ids": [1, 2, 3]}]}, stop_token_id=9, repeat=True)
    response = await generate(http, url, body_for(stop_token_ids=[2]))
    assert sampled(response) == [1, 2]
    assert response.json()["meta_info"]["finish_reason"]["matched"] == 2
    assert sampled(await generate(http, url)) == [1, 2, 3, 9]


async def test_a_scripted_stop_string_needs_no_stop_token(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    _, url = await scripted_engine({"*": [{"ids": [1], "matched": "END"}]}, stop_token_id=9)
    response = await generate(http, url)
    assert sampled(response) == [1]
    assert response.json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}


async def test_made_up_logprobs_are_the_calls_own(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [1, 2]}]}, repeat=True)
    await generate(http, url)
    await generate(http, url)
    other, other_url = await scripted_engine({"*": [{"ids": [1, 2]}]}, repeat=True)
    await generate(http, other_url)
    first, second = (entry.logprobs.tolist() for entry in engine.ledger)
    assert [entry.logprobs.tolist() for entry in other.ledger] == [first]
    assert first != second
    assert max(first + second) < 0


async def test_an_abort_hands_out_what_there_is(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    script = {
        "*": [{"ids": [1, 2, 3, 4], "delay": 60, "abort_after": 3}, {"ids": [5], "hang": True}]
    }
    engine, url = await scripted_engine(script)
    responses = []

    async def call(rid: str) -> None:
        responses.append(await generate(http, url, body_for(rid)))

    for rid, output in (("a.0", [1, 2, 3]), ("b.0", [])):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, rid)
            await until(lambda: len(engine.calls) > len(responses))
            await http.post(f"{url}/abort_request", json={"rid": "another"})
            assert not engine.calls[-1].aborted
            await http.post(f"{url}/abort_request", json={"rid": rid})
        assert sampled(responses[-1]) == output
        assert responses[-1].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert [entry.rid for entry in engine.ledger] == ["a.0"]


async def test_a_client_that_leaves_is_noticed(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [1, 2], "hang": True}]})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate, http, url)
        await until(lambda: bool(engine.calls))
        tasks.cancel_scope.cancel()
    await until(lambda: len(engine.ledger) == 1)
    (entry,) = engine.ledger
    assert (entry.output_ids.tolist(), entry.finish, entry.answered) == ([1], "abort", False)


async def test_a_pause_aborts_what_runs_and_holds_up_the_rest(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [1, 2], "hang": True}, {"ids": [3]}]})
    responses: dict[str, httpx.Response] = {}

    async def call(rid: str) -> None:
        responses[rid] = await generate(http, url, body_for(rid))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, "a.0")
        await until(lambda: len(engine.calls) == 1)
        await http.post(f"{url}/pause_generation")
        await until(lambda: "a.0" in responses)
        tasks.start_soon(call, "b.0")
        await until(lambda: len(engine.calls) == 2)
        assert "b.0" not in responses
        engine.weight_version = "2"
        await http.post(f"{url}/continue_generation")
    assert sampled(responses["a.0"]) == [1]
    assert sampled(responses["b.0"]) == [3]
    versions = [response.json()["meta_info"]["weight_version"] for response in responses.values()]
    assert versions == ["default", "2"]


async def test_a_pause_that_retracts_aborts_nothing(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [1, 2], "hang": True}, {"ids": [3]}]})
    responses: dict[str, httpx.Response] = {}

    async def call(rid: str) -> None:
        responses[rid] = await generate(http, url, body_for(rid))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, "a.0")
        await until(lambda: len(engine.calls) == 1)
        await http.post(f"{url}/pause_generation", json={"mode": "retract"})
        tasks.start_soon(call, "b.0")
        await until(lambda: len(engine.calls) == 2)
        assert not engine.calls[0].aborted
        update = {"model_path": "none", "weight_version": "2"}
        assert (await http.post(f"{url}/update_weights_from_disk", json=update)).is_success
        await http.post(f"{url}/continue_generation")
        await until(lambda: "b.0" in responses)
        await http.post(f"{url}/abort_request", json={"rid": "a.0"})
    assert sampled(responses["b.0"]) == [3]
    assert responses["b.0"].json()["meta_info"]["weight_version"] == "2"


async def test_a_call_aborted_during_a_pause_sampled_nothing(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [1, 2]}]})
    engine.pause()
    responses = []

    async def call() -> None:
        responses.append(await generate(http, url))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await until(lambda: bool(engine.calls))
        await http.post(f"{url}/abort_request", json={"abort_all": True})
    assert sampled(responses[0]) == []
    assert len(engine.ledger) == 0


async def test_a_dropped_connection_has_sampled(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [1, 2], "drop": True}]})
    with pytest.raises(httpx.RemoteProtocolError):
        await generate(http, url)
    assert [(e.output_ids.tolist(), e.answered) for e in engine.ledger] == [([1, 2], False)]


async def test_cached_tokens_are_a_prefix_of_what_was_seen(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    _, url = await scripted_engine({"*": [{"ids": [4]}]}, repeat=True)
    cached = []
    for ids in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3], [1, 9], [7]):
        response = await generate(http, url, body_for(ids=ids))
        cached.append(response.json()["meta_info"]["cached_tokens"])
    assert cached == [0, 4, 2, 1, 0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"stream": True}, "stream"),
        ({"return_logprob": False}, "return_logprob"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, -1]}, "input_ids"),
        ({"input_ids": [[1]]}, "input_ids"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": -3}}, "max_new_tokens"),
        ({"routed_experts_start_len": 4}, "routed_experts_start_len"),
    ],
)
async def test_a_request_that_is_wrong_is_refused_by_name(
    scripted_engine: StartEngine, http: httpx.AsyncClient, change: dict[str, Any], complaint: str
) -> None:
    engine, url = await scripted_engine({"*": [{"ids": [1]}]}, streaming=None)
    response = await generate(http, url, {**body_for(), **change})
    assert response.status_code == 400
    assert complaint in response.json()["error"]["message"]
    assert engine.calls == []


async def test_replay_data_is_what_the_tokens_say(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    engine, url = await scripted_engine(
        {"*": [{"ids": [5, 6], "finish": "length", "speculation": [3, 8, 2]}]},
        repeat=True,
        routed_experts_shape=(2, 3),
    )
    sampling = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    whole = body_for(**sampling) | {"return_routed_experts": True}
    part = whole | {"routed_experts_start_len": 2}
    metas = [(await generate(http, url, body)).json()["meta_info"] for body in (whole, part)]
    rows, tail = (decoded(meta["routed_experts"]).reshape(-1, 2, 3) for meta in metas)
    assert rows.shape == (4, 2, 3)
    assert rows.all()
    assert np.array_equal(rows[2:], tail)
    assert not np.array_equal(rows[:2], rows[2:])
    assert not np.array_equal(rows[:, 0], rows[:, 1])
    for meta, entry in zip(metas, engine.ledger, strict=True):
        ids, offsets = decoded(meta["top_p_token_ids"]), decoded(meta["top_p_token_offsets"])
        kept = [ids[begin:end].tolist() for begin, end in pairwise(offsets.tolist())]
        assert [sampled in ids for sampled, ids in zip([5, 6], kept, strict=True)] == [True] * 2
        assert entry.top_p_ids == kept
        assert np.array_equal(entry.routed_experts, rows)
        assert entry.speculation == Speculation(3, 8, 2)
        assert meta["spec_verify_ct"] == 2
    other = body_for(ids=[1, 9, 3]) | {"return_routed_experts": True}
    meta = (await generate(http, url, other)).json()["meta_info"]
    branch = decoded(meta["routed_experts"]).reshape(-1, 2, 3)
    assert np.array_equal(branch[0], rows[0])
    assert (branch[1:] != rows[1:]).any(axis=(1, 2)).all()


def decoded(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype="<i4")


async def test_replay_data_comes_only_where_an_engine_would_send_it(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    asked = {"custom_params": {"return_top_p_token_ids": True}}
    fields = {"top_p_token_ids", "top_p_token_offsets", "routed_experts"}
    _, knows = await scripted_engine({"*": [{"ids": [5]}]}, repeat=True)
    _, unpatched = await scripted_engine({"*": [{"ids": [5]}]}, repeat=True, knows_top_p_ids=False)
    for url, sampling, sends in (
        (knows, {"top_p": 0.9, **asked}, True),
        (knows, {"top_k": 5, **asked}, True),
        (knows, {"min_p": 0.1, **asked}, True),
        (knows, {"temperature": 0, **asked}, True),
        (knows, asked, False),
        (knows, {"top_p": 0.9}, False),
        (unpatched, {"top_p": 0.9, **asked}, False),
    ):
        body = body_for(**sampling) | {"return_routed_experts": True}
        meta = (await generate(http, url, body)).json()["meta_info"]
        assert len(meta.keys() & fields) == (2 if sends else 0), sampling


async def test_a_spoiled_reply_says_what_the_script_wants(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    spoil = {"prompt_tokens": 7, "cached_tokens": None}
    engine, url = await scripted_engine({"*": [{"ids": [5], "spoil": spoil}]})
    meta = (await generate(http, url)).json()["meta_info"]
    assert meta["prompt_tokens"] == 7
    assert "cached_tokens" not in meta
    (entry,) = engine.ledger
    assert entry.spoiled


async def test_it_tells_how_many_calls_run(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    _, url = await scripted_engine({"*": [{"ids": [1], "hang": True, "times": 2}]})

    async def running() -> int:
        load = (await http.get(f"{url}/v1/loads?include=core")).json()["loads"]
        assert len(load) == 1
        number: int = load[0]["num_running_reqs"] + load[0]["num_waiting_reqs"]
        return number

    assert await running() == 0
    async with anyio.create_task_group() as tasks:
        for rid in ("one", "two"):
            tasks.start_soon(generate, http, url, body_for(rid))
        with anyio.fail_after(10):
            while await running() < 2:
                pass
        await http.post(f"{url}/abort_request", json={"rid": "one"})
        assert await running() == 1
        await http.post(f"{url}/abort_request", json={"abort_all": True})
        assert await running() == 0


async def test_it_is_an_engine_and_no_router(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    _, url = await scripted_engine({})
    assert (await http.get(f"{url}/health")).status_code == 200
    assert (await http.get(f"{url}/get_model_info")).json()["weight_version"] == "default"
    assert (await http.get(f"{url}/workers")).status_code == 404
    for body in (b"[]", b"nonsense"):
        assert (await http.post(f"{url}/abort_request", content=body)).status_code == 400


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ({"idz": [1]}, "reply 0 of 'r' in the script has the unknown field 'idz'"),
        ({"ids": [1], "text": "a"}, "a text or ids, not both"),
        ({"text": "a"}, "the engine has no tokenizer"),
        ({"ids": [1], "logprobs": [-1.0, -2.0]}, "2 log-probabilities for 1 ids"),
        ({"finish": "tired"}, "'finish' must be in"),
        ({"times": 0}, "'times' must be >= 1"),
        ({"spoil": ["a"]}, "'spoil' must be"),
        ({"speculation": [1, 2]}, "speculation is"),
        ("text", "reply 0 of 'r' in the script is a str"),
    ],
)
def test_a_script_that_is_wrong_is_refused_by_name(reply: Any, complaint: str) -> None:
    with pytest.raises(ContractError, match=complaint):
        ScriptedEngine({"r": [reply]})


def test_a_script_is_lists() -> None:
    with pytest.raises(ContractError, match="the script of 'r' is not a list"):
        ScriptedEngine({"r": {"ids": [1]}})  # type: ignore[dict-item]  # what is no script


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"tokenizer .*missing\.json cannot be read"):
        FileTokenizer(tmp_path / "missing.json")


async def test_leaving_ends_every_call_and_keeps_errors_bare(http: httpx.AsyncClient) -> None:
    engine = ScriptedEngine({"*": [{"ids": [1, 2], "hang": True}]})

    async def leave_with_an_error(tasks: anyio.abc.TaskGroup) -> None:
        async with serve_engine(engine) as url:
            tasks.start_soon(generate, http, url)
            await until(lambda: bool(engine.calls))
            raise KeyError("mine")

    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(10), pytest.raises(KeyError, match="mine"):
            await leave_with_an_error(tasks)
    assert [entry.finish for entry in engine.ledger] == ["abort"]


async def test_it_runs_as_a_child(
    http: httpx.AsyncClient,
    byte_tokenizer_file: Path,
    byte_tokenizer: FileTokenizer,
    tmp_path: Path,
) -> None:
    config = {
        "script": {"*": [{"text": "hi"}]},
        "tokenizer": str(byte_tokenizer_file),
        "stop_token_id": IM_END,
        "ledger": str(tmp_path / "ledger.jsonl"),
    }
    async with child_process("turnleaf.adapters.mock.scripted", config) as child:
        response = await generate(http, child.ready["url"])
    assert child.returncode == 0
    assert sampled(response) == [*byte_tokenizer.encode("hi"), IM_END]
    (entry,) = Ledger.read(tmp_path / "ledger.jsonl")
    assert (entry.turn_id, entry.output_ids.tolist()) == ("turn", sampled(response))
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line)["input_ids"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokeniser": "x"}, "unexpected keyword argument 'tokeniser'"),
        ({"script": {"*": [{"idz": [1]}]}}, "unknown field 'idz'"),
        ({"host": "256.0.0.1"}, "256|not known|resolution|address"),
    ],
)
async def test_a_child_that_is_configured_wrongly_says_so(
    change: dict[str, Any], complaint: str
) -> None:
    config = {"script": {}, **change}
    with pytest.raises(ContractError, match=complaint):
        async with child_process("turnleaf.adapters.mock.scripted", config):
            raise AssertionError("it is not ready")


def events_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("streaming", ["incremental", "cumulative", None])
async def test_a_stream_has_sglangs_shape(
    scripted_engine: StartEngine, http: httpx.AsyncClient, streaming: Any
) -> None:
    reply = {"ids": [4, 5, 6], "logprobs": [-0.5, -0.25, -0.125], "prompt_tail": 1}
    engine, url = await scripted_engine(
        {"*": [{**reply, "events": [2]}, reply]}, streaming=streaming
    )
    said = (await http.get(f"{url}/server_info")).json()
    assert said == {"incremental_streaming_output": streaming == "incremental"}
    if streaming is None:
        return
    first, last = events_of(await generate(http, url, {**body_for(), "stream": True}))
    assert first == {
        "text": "",
        "output_ids": [3, 4, 5],
        "meta_info": {
            "id": "turn.0.0",
            "finish_reason": None,
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "weight_version": "default",
            "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None]],
            "input_token_logprobs": [],
        },
    }
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    assert last["meta_info"]["completion_tokens"] == 3
    repeated = [[-0.5, 4, None], [-0.25, 5, None]] if streaming == "cumulative" else []
    assert last["meta_info"]["output_token_logprobs"] == [*repeated, [-0.125, 6, None]]
    assert last["output_ids"] == [6] if streaming == "incremental" else [3, 4, 5, 6]
    one_by_one = events_of(await generate(http, url, {**body_for(), "stream": True}))
    counts = [event["meta_info"]["completion_tokens"] for event in one_by_one]
    assert counts == [1, 2, 3]
    assert [(entry.answered, entry.told) for entry in engine.ledger] == [(True, 2)] * 2


async def test_a_stream_that_breaks_off_was_told_so_many_tokens(
    scripted_engine: StartEngine, http: httpx.AsyncClient
) -> None:
    script = [{"ids": [4, 5, 6, 7], "drop_after": 2, "events": events} for events in ([1], [1, 2])]
    engine, url = await scripted_engine({"*": [*script, {"ids": [8], "drop": True}]})
    for _ in range(3):
        with pytest.raises(httpx.RemoteProtocolError):
            await generate(http, url, {**body_for(), "stream": True})
    await generate(http, url, {**body_for(), "stream": True})
    assert [(e.answered, e.told, len(e.output_ids)) for e in engine.ledger] == [
        (False, 1, 4),
        (False, 3, 4),
        (False, 0, 1),
    ]
    (refused,) = events_of(await generate(http, url, {**body_for(), "stream": True}))
    assert refused["error"]["code"] == 400
