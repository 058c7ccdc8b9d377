"""The gateway on the real SGLang, behind its real router: what `make test-sglang` proves."""

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import numpy as np
import pytest
from openai import BadRequestError

from tests.gateway_stack import openai_client
from tests.messages import user
from tests.sglang_agents import AGENTS, ASKED, Agent, ask
from tests.sglang_models import TOOL, qwen3_models, smollm2_model
from tests.sglang_stack import (
    PYTHON,
    TOLERANCE,
    RealEngine,
    forward,
    real_engines,
    real_routers,
)
from tests.waiting import until
from turnleaf.core import Trajectory, Turn
from turnleaf.gateway import GatewayClient, WorkerConfig, run_worker

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

SAMPLING = {"temperature": 1.0, "max_new_tokens": 40}
SCHEMA = {"type": "object", "properties": {"sum": {"enum": [1, 2]}}, "required": ["sum"]}


@attrs.frozen(eq=False)
class Stage:
    """A model: its folder, the engines that serve it, and gateways: before the first of them
    ("one"), and before all of them by the routers' policies."""

    model: Path
    engines: list[RealEngine]
    gateways: dict[str, GatewayClient]

    @property
    def one(self) -> GatewayClient:
        return self.gateways["one"]


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[RealEngine], dict[str, str]]]:
    qwen3 = request.param == "qwen3"
    model = qwen3_models(PYTHON)[0] if qwen3 else smollm2_model(PYTHON)
    folder = tmp_path_factory.mktemp(request.param)
    with real_engines(model, folder, count=1 + qwen3) as engines:
        behind = {"one": (engines[:1], ["cache_aware"])}
        if qwen3:
            behind["manual"] = (engines, ["manual", "--assignment-mode", "min_group"])
            behind["cache_aware"] = (engines, ["cache_aware"])
        with real_routers(behind, folder) as routers:
            yield model, engines, routers


@pytest.fixture(scope="module")
async def stage(served: Any, anyio_backend: str) -> AsyncIterator[Stage]:
    model, engines, routers = served
    async with AsyncExitStack() as stack:
        gateways = {}
        for name, url in {**routers, "no router": engines[0].url}.items():
            config = WorkerConfig(
                engine_url=url,
                model=str(model),
                control_token="token-of-control",
                port=0,
                constraints="enforce",
            )
            gateways[name] = await stack.enter_async_context(run_worker(config))
        yield Stage(model, engines, gateways)


only_qwen3 = pytest.mark.parametrize("served", ["qwen3"], indirect=True)


async def rolled_out(
    gateway: GatewayClient, agent: Agent, *, name: str = "r", **sampling: Any
) -> Trajectory:
    key = await gateway.open_key(
        name=name, sampling={**SAMPLING, **sampling}, purpose="train", expires_in=600
    )
    async with openai_client(key) as client:
        await agent(client)
    return await gateway.close_key(key.id)


async def all_rolled_out(
    gateway: GatewayClient, *, group: int = 1, **sampling: Any
) -> dict[str, list[Trajectory]]:
    """A group of rollouts of every agent, by its name; they run side by side."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)

    async def one(name: str, agent: Agent) -> None:
        groups[name].append(await rolled_out(gateway, agent, name=name, **sampling))

    async with anyio.create_task_group() as tasks:
        for name, agent in AGENTS.items():
            for _ in range(group):
                tasks.start_soon(one, name, agent)
    return groups


def deviations(
    trajectories: Iterable[Trajectory], score: Callable[[list[list[int]]], list[Any]]
) -> Any:
    """How far each trained token's log-probability is from that of its leaf's score."""
    leaves = [leaf for trajectory in trajectories for leaf in trajectory.leaves()]
    scores = score([leaf.tokens.tolist() for leaf in leaves])
    return np.concatenate(
        [
            np.abs(leaf.logprobs - scored)[leaf.loss_mask]
            for leaf, scored in zip(leaves, scores, strict=True)
        ]
    )


async def balance(
    engine: RealEngine, before: int, trajectories: Sequence[Trajectory]
) -> Counter[str]:
    """What became of the tokens that the engine counted in its calls from that one on: "trained", a
    reason for which they are not, or "lost".

    Fails where a turn has other tokens than the engine's calls for it, or others of their
    log-probabilities.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sampled: Counter[str] = Counter()
    entries: dict[str, list[Any]] = defaultdict(list)

    def all_written_down() -> bool:
        sampled.clear()
        entries.clear()
        for call in engine.calls()[before:]:
            turn_id = call["id"].split(".")[0]
            sampled[turn_id] += call["completion_tokens"]
            entries[turn_id] += call["output_token_logprobs"]
        return all(sampled[turn.id] >= len(turn.output) for turn in turns)

    await until(all_written_down)
    became = Counter({"lost": sampled.total()})
    for turn in turns:
        if turn.excluded is None:
            assert sampled[turn.id] == len(turn.output), turn
        # Of a stream, it writes down only the last event's.
        if len(entries[turn.id]) == len(turn.output) > 0:
            logprobs, ids, _ = zip(*entries[turn.id], strict=True)
            assert list(ids) == turn.output.tolist()
            assert np.array_equal(np.float32(logprobs), turn.logprobs)
        became[turn.excluded or "to be trained"] += len(turn.output)
        became["lost"] -= len(turn.output)
    leaves = [leaf for trajectory in trajectories for leaf in trajectory.leaves()]
    became["trained"] = sum(int(leaf.loss_mask.sum()) for leaf in leaves)
    assert became.pop("to be trained", 0) == became["trained"]
    return became


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await anyio.to_thread.run_sync(function, *arguments)


async def test_trained_log_probabilities_are_the_engines_own_of_the_leaf(stage: Stage) -> None:
    (engine, *_) = stage.engines
    before = len(engine.calls())
    group = 1 if stage.model.parent.name.startswith("smollm2") else 3
    groups = await all_rolled_out(stage.one, group=group)
    trajectories = [trajectory for group in groups.values() for trajectory in group]
    became = await balance(engine, before, trajectories)
    each = await in_thread(
        deviations, trajectories, lambda sequences: list(map(engine.score, sequences))
    )
    leaves = {name: sum(len(one.leaves()) for one in group) for name, group in groups.items()}
    print(f"{described(became, trajectories)}, at most {each.max():.1e} off; leaves: {leaves}")
    assert len(each) == became["trained"]
    assert became["lost"] == became["undelivered"] == 0
    assert each.max() < TOLERANCE
    assert min(leaves["forks"], leaves["sub-agents"]) >= 3 * group
    assert became["untrained"] > 0


def described(became: Counter[str], trajectories: list[Trajectory]) -> str:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    tokens = ", ".join(f"{count} {what}" for what, count in became.items() if count)
    leaves = sum(len(trajectory.leaves()) for trajectory in trajectories)
    return f"{len(trajectories)} rollouts, {len(turns)} turns, {leaves} leaves, tokens: {tokens}"


@only_qwen3
async def test_at_another_temperature_they_are_those_of_the_scaled_logits(stage: Stage) -> None:
    groups = await all_rolled_out(stage.one, temperature=0.7)
    trajectories = [trajectory for group in groups.values() for trajectory in group]
    each = await in_thread(
        deviations, trajectories, lambda sequences: forward(stage.model, sequences, 0.7)
    )
    print(f"{len(each)} tokens at temperature 0.7, at most {each.max():.1e} off")
    assert each.max() < TOLERANCE


@only_qwen3
async def test_a_weight_update_in_the_middle_of_a_turn(stage: Stage) -> None:
    (engine, *_) = stage.engines
    updated = qwen3_models(PYTHON)[1]
    before = len(engine.calls())
    seen = anyio.Event()
    texts: list[str] = []

    async def agent(client: Any) -> None:
        request = {"model": "m", "messages": ASKED, "stream": True, "n": 2}
        chunks = 0
        finishes = []
        async for chunk in await client.chat.completions.create(**request):
            chunks += 1
            texts.extend(choice.delta.content or "" for choice in chunk.choices)
            finishes += [each.finish_reason for each in chunk.choices if each.finish_reason]
            if chunks == 20:
                seen.set()
        assert finishes == ["length"] * 2
        await ask(client, [*ASKED, {"role": "assistant", "content": "3"}, user("?")])

    async def update() -> None:
        await seen.wait()
        for path, body in (
            ("/pause_generation", {}),
            (
                "/update_weights_from_disk",
                {"model_path": str(updated), "weight_version": "2", "flush_cache": True},
            ),
            ("/continue_generation", {}),
        ):
            await in_thread(engine.post, path, body)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(update)
            trajectory = await rolled_out(
                stage.one, agent, ignore_eos=True, max_new_tokens=150, temperature=1.0
            )
    finally:
        body = {"model_path": str(stage.model), "weight_version": "default", "flush_cache": True}
        await in_thread(engine.post, "/update_weights_from_disk", body)

    became = await balance(engine, before, [trajectory])
    first, second, after = trajectory.turns
    for turn in (first, second):
        assert [span.version for span in turn.weight_versions] == ["default", "2"]
        assert len(turn.output) == 150
    assert [span.version for span in after.weight_versions] == ["2"]
    worst = 0.0
    sequences = [trajectory.tokens_through(turn.id).tolist() for turn in trajectory.turns]
    scores = {
        version: await in_thread(forward, model, sequences, 1.0)
        for version, model in (("default", stage.model), ("2", updated))
    }
    for number, turn in enumerate(trajectory.turns):
        worst = max(worst, *(difference(turn, scores, number)))
    print(f"{described(became, [trajectory])}, at most {worst:.1e} off")
    assert worst < TOLERANCE


def difference(turn: Turn, scores: Mapping[str, list[Any]], number: int) -> Iterator[float]:
    """By how much each token differs from what the weights that sampled it say."""
    begin = turn.end - len(turn.output)
    ends = accumulate(span.count for span in turn.weight_versions)
    for span, end in zip(turn.weight_versions, ends, strict=True):
        part = slice(begin + end - span.count, begin + end)
        theirs = scores[span.version][number][part]
        yield float(np.abs(turn.logprobs[end - span.count : end] - theirs).max())


@only_qwen3
async def test_an_abort_keeps_what_was_sampled_and_trains_none_of_the_turns_it_ends(
    stage: Stage,
) -> None:
    (engine, *_) = stage.engines
    before = len(engine.calls())
    key = await stage.one.open_key(
        name="r",
        sampling={**SAMPLING, "ignore_eos": True, "max_new_tokens": 2000},
        purpose="train",
        expires_in=600,
    )
    kept = []
    async with openai_client(key) as client:
        await ask(client, ASKED, max_tokens=5)

        async def chat(stream: bool) -> None:
            with pytest.raises(Exception, match="rollout"):
                await ask(client, ASKED, max_tokens=2000, stream=stream)

        async with anyio.create_task_group() as tasks:
            for stream in (False, True):
                tasks.start_soon(chat, stream)
            await anyio.sleep(1.5)
            kept.append(await stage.one.close_key(key.id, aborted=True))
    (trajectory,) = kept
    became = await balance(engine, before, kept)
    print(described(became, kept))
    assert [turn.excluded for turn in trajectory.turns] == [None, "aborted", "aborted"]
    assert became["trained"] == 5
    assert min(len(turn.output) for turn in trajectory.turns) > 0


AS_JSON = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
}
FORCED = {"tools": [TOOL], "tool_choice": "required"}


@only_qwen3
@pytest.mark.parametrize("behind", ["one", "no router"])
async def test_what_a_mask_chose_is_aligned_and_not_trained(stage: Stage, behind: str) -> None:
    (engine, *_) = stage.engines
    before = len(engine.calls())
    said: list[Any] = []

    async def agent(client: Any) -> None:
        for stream in (False, True):
            said.extend(await ask(client, ASKED, stream=stream, max_tokens=200, **AS_JSON))
        if behind == "one":
            # The registry's router drops what would have told the engine.
            with pytest.raises(BadRequestError, match="cannot be enforced"):
                await ask(client, ASKED, **FORCED)
        else:
            said.extend(await ask(client, ASKED, max_tokens=200, **FORCED))

    trajectory = await rolled_out(stage.gateways[behind], agent, max_new_tokens=200)
    became = await balance(engine, before, [trajectory])
    print(f"{described(became, [trajectory])}: {[turn.finish_reason for turn in trajectory.turns]}")
    assert {turn.excluded for turn in trajectory.turns} == {"constrained"}
    assert trajectory.leaves() == []
    for message, turn in zip(said, trajectory.turns, strict=True):
        if turn.finish_reason == "length":
            continue  # a mask allows any whitespace
        if message.get("tool_calls"):
            assert message["tool_calls"][0]["function"]["name"] == "calculate"
        else:
            assert json.loads(message["content"])["sum"] in (1, 2)
    if behind == "no router":
        assert said[-1].get("tool_calls") or trajectory.turns[-1].finish_reason == "length"


@only_qwen3
@pytest.mark.parametrize("behind", ["one", "manual", "cache_aware"])
async def test_the_past_of_a_rollout_comes_from_the_prefix_cache(stage: Stage, behind: str) -> None:
    for engine in stage.engines:
        await in_thread(engine.post, "/flush_cache", {})
    rolled: dict[str, Trajectory] = {}

    async def rollout(name: str) -> None:
        async def agent(client: Any) -> None:
            messages = [user(f"{name}: 1+2?")]
            for _ in range(10):
                (message,) = await ask(client, messages, tools=[TOOL], max_tokens=20)
                messages += [message, user("3+4?")]

        rolled[name] = await rolled_out(stage.gateways[behind], agent, name=name)

    async with anyio.create_task_group() as tasks:
        for name in ("left", "right", "this", "that"):
            tasks.start_soon(rollout, name)

    calls: dict[str, tuple[int, int]] = {}

    def all_written_down() -> bool:
        calls.update(
            (call["id"].split(".")[0], (number, call["cached_tokens"]))
            for number, engine in enumerate(stage.engines)
            for call in engine.calls()
        )
        return all(turn.id in calls for each in rolled.values() for turn in each.turns)

    await until(all_written_down)
    engines = {
        name: sorted({calls[turn.id][0] for turn in trajectory.turns})
        for name, trajectory in rolled.items()
    }
    attainable = [attainable_tokens(trajectory) for trajectory in rolled.values()]
    cached = [[calls[turn.id][1] for turn in trajectory.turns] for trajectory in rolled.values()]
    share = np.minimum(cached, attainable).sum() / np.sum(attainable)
    print(f"behind {behind}: {share:.1%} of what is attainable; engines {engines}")
    assert share >= 0.9
    if behind == "manual":
        assert [len(used) for used in engines.values()] == [1] * 4
        assert len({used[0] for used in engines.values()}) == 2


def attainable_tokens(trajectory: Trajectory) -> list[int]:
    """For each turn, how much of its prompt earlier ones have computed: of theirs, all but the
    last token, and always one less than the prompt has, since that is what is sampled from."""
    paths = [trajectory.tokens_through(turn.id) for turn in trajectory.turns]
    attainable = []
    for number, turn in enumerate(trajectory.turns):
        prompt = paths[number][: turn.end - len(turn.output)]
        shared = [0]
        for path in paths[:number]:
            both = min(len(path) - 1, len(prompt) - 1)
            same = np.append(path[:both] == prompt[:both], False)
            shared.append(int(same.argmin()))
        attainable.append(max(shared))
    return attainable
