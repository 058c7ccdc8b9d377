"""The policy's engine, through the client that talks to SGLang."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
import httpx
import numpy as np
import pytest

from tests.waiting import until
from turnleaf.adapters.mock import Ledger, compare, serve_engine
from turnleaf.adapters.mock._policy import Policy, Shape
from turnleaf.adapters.mock._policy_engine import PolicyEngine
from turnleaf.adapters.mock._policy_training import sequence_logprobs
from turnleaf.core import ContractError, Trajectory, Turn, WeightSpan
from turnleaf.gateway._child import child_process
from turnleaf.gateway.engines import (
    EngineReply,
    EngineRequest,
    SGLangEngine,
    Stop,
)

pytestmark = pytest.mark.anyio

END = 111
LONG = Shape(range(100, 112), width=8, heads=2, hidden=12, positions=2048)
"""Long enough that a call without an end is still running when something happens to it."""
ENDLESS = {"max_new_tokens": 2000, "ignore_eos": True}


def policy_of(seed: int) -> Policy:
    policy = Policy.random(LONG, seed)
    policy.vector *= 4
    return policy


@attrs.frozen(eq=False)
class Served:
    """An engine, its client, and a plain one."""

    engine: PolicyEngine
    url: str
    client: SGLangEngine
    http: httpx.AsyncClient

    async def generate(
        self, turn: str, prompt: list[int], stop: Stop | None = None, **sampling: Any
    ) -> EngineReply:
        ids = np.array(prompt, dtype=np.int32)
        request = EngineRequest(turn, ids, {"max_new_tokens": 20, **sampling}, "rollout")
        return await self.client.generate(request, stop=stop or Stop())

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"{self.url}/{path}", json=body)

    async def running(self, tokens: int = 1, version: str = "default") -> None:
        """Wait until the only call has so many tokens of those weights."""
        await until(
            lambda: (
                len(self.engine._running) == 1
                and self.engine._running[0].versions.count(version) >= tokens
            )
        )


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Served]:
    engine = PolicyEngine(policy_of(0), stop_token_id=END, **options)
    async with engine.sampling(), serve_engine(engine) as url:
        client = SGLangEngine(url)
        async with httpx.AsyncClient(verify=False, timeout=10, trust_env=False) as http:
            try:
                yield Served(engine, url, client, http)
            finally:
                await client.aclose()


def turn_of(index: int, name: str, prompt: list[int], reply: EngineReply, **changes: Any) -> Turn:
    return Turn(
        id=name,
        index=index,
        parent=None,
        keep=0,
        prompt=np.array(prompt, dtype=np.int32),
        output=reply.output,
        logprobs=reply.logprobs,
        finish_reason=reply.finish_reason,
        weight_versions=reply.weight_versions,
        **changes,
    )


def expected(policy: Policy, prompt: list[int], reply: EngineReply, temperature: float) -> Any:
    (scores,) = sequence_logprobs(policy, [[*prompt, *reply.output.tolist()]], temperature)
    return scores[len(prompt) :]


async def test_calls_at_once_are_what_the_policy_says_and_the_books_balance() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(99, 112, length).tolist() for length in rng.integers(1, 30, 24)]
    replies: dict[int, EngineReply] = {}
    async with serving() as served:

        async def call(number: int) -> None:
            replies[number] = await served.generate(
                f"turn-{number}", prompts[number], temperature=0.8
            )

        async with anyio.create_task_group() as tasks:
            for number in range(len(prompts)):
                tasks.start_soon(call, number)
    for number, reply in replies.items():
        wanted = expected(policy_of(0), prompts[number], reply, 0.8)
        np.testing.assert_allclose(reply.logprobs, wanted, atol=1e-5)
        assert reply.weight_versions == (WeightSpan("default", len(reply.output)),)
        ended = END in reply.output[:19]
        assert (reply.finish_reason, reply.matched) == (
            ("stop", END) if ended else ("length", None)
        )
        assert len(reply.output) == (reply.output.tolist().index(END) + 1 if ended else 20)
    assert {reply.finish_reason for reply in replies.values()} == {"stop", "length"}
    turns = [
        turn_of(number, f"turn-{number}", prompts[number], replies[number]) for number in replies
    ]
    report = compare(served.engine.ledger, [Trajectory([turn]) for turn in turns])
    report.raise_for_problems()
    assert report.trained == report.sampled > 24


async def test_an_abort_hands_out_what_there_is() -> None:
    async with serving() as served:
        stop = Stop()
        replies = []

        async def call() -> None:
            replies.append(await served.generate("a", [100], stop, **ENDLESS))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await served.running(3)
            stop.set()
    (reply,) = replies
    assert reply.finish_reason == "abort"
    assert 3 <= len(reply.output) < 2000
    turn = turn_of(0, "a", [100], reply, excluded="aborted")
    report = compare(served.engine.ledger, [Trajectory([turn])])
    report.raise_for_problems()
    assert report.excluded == {"aborted": len(reply.output)}


async def test_a_client_that_leaves_ends_its_call() -> None:
    async with serving() as served:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: served.generate("a", [100], **ENDLESS))
            await served.running()
            tasks.cancel_scope.cancel()
        await until(lambda: len(served.engine.ledger) == 1)
        assert served.engine._running == []
    compare(served.engine.ledger, [Trajectory()]).raise_for_problems()


async def test_a_pause_aborts_what_runs_and_holds_up_the_rest() -> None:
    replies: dict[str, EngineReply] = {}
    async with serving() as served:

        async def call(name: str, **sampling: Any) -> None:
            replies[name] = await served.generate(name, [100], **sampling)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: call("a", **ENDLESS))
            await served.running()
            await served.post("pause_generation")
            await until(lambda: "a" in replies)
            tasks.start_soon(call, "b")
            tasks.start_soon(call, "c")
            await until(lambda: len(served.engine._waiting) == 2)
            await served.post("abort_request", rid="c.0.0")
            await until(lambda: "c" in replies)
            assert "b" not in replies
            await served.post("continue_generation")
    assert [replies[name].finish_reason for name in "ac"] == ["abort", "abort"]
    assert len(replies["a"].output) > 0
    assert len(replies["c"].output) == 0
    assert len(replies["b"].output) > 0


@pytest.mark.parametrize("paused", [True, False])
async def test_weights_that_change_during_a_call(tmp_path: Path, paused: bool) -> None:
    policy_of(1).save(tmp_path / "2.npz")
    stop = Stop()
    replies = []
    async with serving() as served:

        async def call() -> None:
            replies.append(await served.generate("a", [100], stop, temperature=0.7, **ENDLESS))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await served.running(3)
            if paused:
                await served.post("pause_generation", mode="retract")
            update = {"model_path": str(tmp_path / "2.npz"), "weight_version": "two"}
            assert (await served.post("update_weights_from_disk", **update)).json()["success"]
            assert (await served.http.get(f"{served.url}/get_model_info")).json() == update
            if paused:
                await served.post("continue_generation")
            await served.running(3, "two")
            stop.set()
    (reply,) = replies
    before, after = reply.weight_versions
    assert (before.version, after.version) == ("default", "two")
    for policy, span in (
        (policy_of(0), slice(0, before.count)),
        (policy_of(1), slice(before.count, None)),
    ):
        wanted = expected(policy, [100], reply, 0.7)[span]
        np.testing.assert_allclose(reply.logprobs[span], wanted, atol=1e-4)
    turn = turn_of(0, "a", [100], reply)
    compare(served.engine.ledger, [Trajectory([turn])]).raise_for_problems()


async def test_weights_that_cannot_be_used_change_nothing(tmp_path: Path) -> None:
    Policy.random(attrs.evolve(LONG, positions=9), 0).save(tmp_path / "other.npz")
    async with serving() as served:
        for body, complaint in (
            ({"model_path": str(tmp_path / "absent.npz")}, "absent.npz cannot be read"),
            ({"model_path": str(tmp_path / "other.npz")}, "another shape"),
            ({}, "model_path"),
            ({"model_path": "a", "weight_version": 3}, "weight_version"),
        ):
            response = await served.post("update_weights_from_disk", **body)
            assert response.status_code == 400
            assert complaint in response.text
        reply = await served.generate("a", [100])
        assert reply.weight_versions[0].version == "default"
        np.testing.assert_allclose(
            reply.logprobs, expected(policy_of(0), [100], reply, 1.0), atol=1e-5
        )


async def test_a_whole_sequence_is_scored_again() -> None:
    prompt = [100, 7, 101]
    async with serving() as served:
        reply = await served.generate("a", prompt)
        sequence = [*prompt, *reply.output.tolist()]
        response = await served.post(
            "generate",
            rid="score",
            input_ids=sequence,
            sampling_params={"max_new_tokens": 0, "temperature": 0.5},
            return_logprob=True,
            logprob_start_len=0,
        )
    meta = response.json()["meta_info"]
    assert meta["output_token_logprobs"] == []
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    scores, ids, _ = zip(*meta["input_token_logprobs"], strict=True)
    assert list(ids) == sequence
    assert scores[:2] == (None, None)  # the first, and one that the policy does not know
    np.testing.assert_allclose(scores[3:], reply.logprobs, atol=1e-4)
    assert len(served.engine.ledger) == 1


async def test_seeds_and_stop_tokens() -> None:
    async with serving() as served:
        one = await served.generate("a", [100], sampling_seed=3, ignore_eos=True)
        same = await served.generate("b", [100], sampling_seed=3, ignore_eos=True)
        other = await served.generate("c", [100], sampling_seed=4, ignore_eos=True)
        assert one.output.tolist() == same.output.tolist() != other.output.tolist()
        early = int(one.output[2])
        cut = await served.generate("d", [100], sampling_seed=3, stop_token_ids=[early, 5])
        assert cut.output[-1] == early or END in cut.output
        assert cut.output.tolist() == one.output[: len(cut.output)].tolist()
        assert cut.finish_reason == "stop"
        filled = await served.generate("e", [100] * 2040, **ENDLESS)
        assert (len(filled.output), filled.finish_reason) == (8, "length")


async def test_what_it_cannot_do_is_refused_by_name() -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": [], "regex": None}
    body = {"rid": "a", "input_ids": [100], "return_logprob": True, "sampling_params": neutral}
    async with serving() as served:
        assert (await served.post("generate", **body)).status_code == 200
        sampling: tuple[tuple[str, Any], ...] = (
            ("top_p", 0.9),
            ("top_k", 5),
            ("stop", ["x"]),
            ("json_schema", "{}"),
            ("repetition_penalty", 1.1),
            ("temperature", -1),
            ("temperature", "hot"),
            ("sampling_seed", 1.5),
            ("sampling_seed", -1),
            ("stop_token_ids", 7),
        )
        for name, value in sampling:
            changed = {**body, "sampling_params": {**neutral, name: value}}
            await refused(served, "generate", changed, name)
        await refused(served, "generate", {**body, "input_ids": [100] * 2048}, "input_ids")
        await refused(served, "generate", {**body, "logprob_start_len": 3}, "logprob_start_len")
        await refused(served, "pause_generation", {"mode": "in_place"}, "mode")


async def refused(served: Served, path: str, body: dict[str, Any], complaint: str) -> None:
    response = await served.post(path, **body)
    assert response.status_code == 400
    assert complaint in response.json()["error"]["message"]


async def test_the_program(tmp_path: Path) -> None:
    policy_of(0).save(tmp_path / "1.npz")
    ledger = tmp_path / "ledger.jsonl"
    config = {
        "weights": str(tmp_path / "1.npz"),
        "stop_token_id": END,
        "weight_version": "one",
        "ledger": str(ledger),
    }
    module = "turnleaf.adapters.mock.policy_engine"
    async with child_process(module, config) as child:
        client = SGLangEngine(child.ready["url"])
        try:
            await client.check()
            request = EngineRequest("a", np.array([100], dtype=np.int32), {}, "rollout")
            reply = await client.generate(request, stop=Stop())
        finally:
            await client.aclose()
    turn = turn_of(0, "a", [100], reply)
    compare(Ledger.read(ledger), [Trajectory([turn])]).raise_for_problems()
    assert reply.weight_versions[0].version == "one"
    for wrong, complaint in (
        ({**config, "weights": "absent.npz"}, r"absent\.npz cannot be read"),
        ({**config, "colour": "red"}, "colour"),
    ):
        with pytest.raises(ContractError, match=complaint):
            async with child_process(module, wrong):
                pass


async def test_a_taken_port_is_announced(tmp_path: Path) -> None:
    weights = tmp_path / "weights.npz"
    Policy.random(Shape(vocabulary=(5, 6, 7)), 0).save(weights)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = {"weights": str(weights), "stop_token_id": 7, "port": taken.getsockname()[1]}
        with pytest.raises(ContractError, match="in use"):
            async with child_process("turnleaf.adapters.mock.policy_engine", config):
                pass
