"""The books: what must balance does, and every kind of tampering is found."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.strategies import Recorded, recorded_by_gateway
from tests.waiting import until
from turnleaf.adapters.mock import Ledger, LedgerEntry, ScriptedEngine, compare
from turnleaf.adapters.mock._replay_data import kept_ids, routed_experts
from turnleaf.core import Leaf, Replay, Speculation, Trajectory, Turn, WeightSpan
from turnleaf.gateway.engines import (
    PROBE,
    EngineLost,
    EngineRequest,
    SGLangEngine,
    Stop,
    UntrustedReply,
)

StartEngine = Callable[..., Awaitable[tuple[ScriptedEngine, str]]]


def entry_of(rid: str, prompt: list[int], output: list[int], **changes: Any) -> LedgerEntry:
    fields: dict[str, Any] = {
        "rid": rid,
        "turn_id": rid.rpartition(".")[0],
        "routing_key": "rollout",
        "input_ids": prompt,
        "output_ids": output,
        "logprobs": [-0.1 * (position + 1) for position in range(len(output))],
        "weight_versions": [WeightSpan("default", len(output))],
        "finish": "stop",
        "completion_tokens": len(output),
        "answered": True,
    }
    return LedgerEntry(**{**fields, **changes})


def turn_from(entry: LedgerEntry, index: int, **changes: Any) -> Turn:
    """The turn that a faithful gateway records of a call; `changes` may place it in the tree."""
    fields: dict[str, Any] = {
        "id": entry.turn_id,
        "index": index,
        "parent": None,
        "keep": 0,
        "prompt": entry.input_ids,
        "output": entry.output_ids,
        "logprobs": entry.logprobs,
        "finish_reason": entry.finish,
        "weight_versions": entry.weight_versions,
    }
    return Turn(**{**fields, **changes})


FIRST = entry_of("first.0", [1, 2], [3, 4])
SECOND = entry_of("second.0", [1, 2, 3, 4, 5], [6], weight_versions=[WeightSpan("2", 1)])
LEFT_OUT = entry_of("left-out.0", [1, 2, 9], [7, 8])
CALLS = [FIRST, SECOND, LEFT_OUT]
SHORT = {"logprobs": [-0.1], "weight_versions": ()}
NOTHING = {"logprobs": [], "weight_versions": ()}
SPANS = (WeightSpan("1", 1),)


def three_turns(**changes: dict[str, Any]) -> Trajectory:
    """first ← second extends it; left-out is excluded. `changes`: of each turn's fields."""
    return Trajectory(
        [
            turn_from(FIRST, 0, **changes.get("first", {})),
            turn_from(
                SECOND,
                1,
                **{"parent": "first", "keep": 4, "prompt": [5]} | changes.get("second", {}),
            ),
            turn_from(LEFT_OUT, 2, **{"excluded": "undelivered"} | changes.get("left_out", {})),
        ]
    )


def test_balanced_books() -> None:
    lost = [
        entry_of("first.0", [1, 2], [3], answered=False),
        entry_of("gone.0", [1], [2, 3], answered=False),
        entry_of("cut.0", [1], [2], finish="abort"),
        entry_of("liar.0", [1], [2, 3], completion_tokens=3),
        entry_of("forger.0", [1], [2, 3], spoiled=True),
    ]
    answer = attrs.evolve(FIRST, rid="first.2")
    retried = attrs.evolve(FIRST, rid="first.1")
    entries = [*lost, retried, answer, SECOND, LEFT_OUT]
    report = compare(entries, [three_turns(), Trajectory()])
    report.raise_for_problems()
    assert (report.sampled, report.trained) == (15, 3)
    assert report.excluded == {"undelivered": 2}
    assert report.lost == {"unanswered": 3, "aborted": 1, "miscounted": 4, "retried": 2}


def test_two_samples_of_one_prompt_are_both_trained() -> None:
    """Equal ones too, and one that begins like the other."""
    entries = [
        entry_of("a.0", [1], [2]),
        entry_of("b.0", [1], [2]),
        entry_of("c.0", [1], [2, 3]),
    ]
    trajectory = Trajectory(turn_from(entry, index) for index, entry in enumerate(entries))
    report = compare(entries, [trajectory])
    report.raise_for_problems()
    assert report.trained == 4


def test_weights_that_changed_during_a_call_are_compared_span_by_span() -> None:
    spans = [WeightSpan("1", 2), WeightSpan("2", 1)]
    entry = entry_of("a.0", [1], [2, 3, 4], weight_versions=spans)
    compare([entry], [Trajectory([turn_from(entry, 0)])]).raise_for_problems()
    moved = turn_from(entry, 0, weight_versions=[WeightSpan("1", 1), WeightSpan("2", 2)])
    with pytest.raises(AssertionError, match="turn a: not the weight_versions of call"):
        compare([entry], [Trajectory([moved])]).raise_for_problems()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"first": {"output": [3, 9]}}, "turn first: not the output of call first.0"),
        ({"left_out": {"output": [7], **SHORT}}, "turn left-out: not the output of call"),
        ({"second": {"output": [], **NOTHING}}, "turn second: not the output of call"),
        ({"first": {"logprobs": [-0.1, -0.20001]}}, "turn first: not the logprobs of call"),
        ({"first": {"prompt": [2, 1]}}, "turn second: not the prompt of call second.0"),
        ({"second": {"keep": 3}}, "turn second: not the prompt of call"),
        ({"second": {"finish_reason": "length"}}, "turn second: not the finish_reason of call"),
        ({"second": {"weight_versions": SPANS}}, "turn second: not the weight_versions of call"),
        ({"second": {"id": "renamed"}}, "call second.0: answered, but turn second was not recor"),
        ({"second": {"id": "renamed"}}, "turn renamed: no answered engine call"),
    ],
)
def test_a_tampered_turn_is_found(changes: dict[str, Any], complaint: str) -> None:
    compare(CALLS, [three_turns()]).raise_for_problems()
    report = compare(CALLS, [three_turns(**changes)])
    with pytest.raises(AssertionError, match=complaint):
        report.raise_for_problems()


@attrs.frozen
class Tampered:
    """A trajectory whose leaves a trainer, or a bug, has changed."""

    original: Trajectory
    tamper: Callable[[list[Leaf]], list[Leaf]]

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.original.turns

    def tokens_through(self, turn_id: str) -> Any:
        return self.original.tokens_through(turn_id)

    def leaves(self) -> list[Leaf]:
        return self.tamper(self.original.leaves())


def with_mask(leaf: Leaf, position: int, value: bool) -> Leaf:
    mask = leaf.loss_mask.copy()
    mask[position] = value
    return attrs.evolve(leaf, loss_mask=mask)


def with_token(leaf: Leaf, position: int) -> Leaf:
    tokens = leaf.tokens.copy()
    tokens[position] += 1
    return attrs.evolve(leaf, tokens=tokens)


def with_logprob(leaf: Leaf, position: int) -> Leaf:
    logprobs = leaf.logprobs.copy()
    logprobs[position] -= 0.5
    return attrs.evolve(leaf, logprobs=logprobs)


def excluded_trained() -> Leaf:
    (leaf,) = Trajectory([turn_from(LEFT_OUT, 0)]).leaves()
    return leaf


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (lambda leaves: [], "call first.0: no leaf trains its output"),
        (lambda leaves: leaves * 2, "leaf 1: .*call first.0 is trained again"),
        (lambda leaves: [*leaves, excluded_trained()], "leaf 1: .*call left-out.0 is excluded"),
        (lambda leaves: [with_mask(leaves[0], 0, True)], "leaf 0: 1 trained positions, the first"),
        (lambda leaves: [with_mask(leaves[0], 4, True)], r"the first at 4, .*\(\?\)"),
        (lambda leaves: [with_mask(leaves[0], 3, False)], "call first.0: no leaf trains"),
        (lambda leaves: [with_token(leaves[0], 0)], "call second.0: no leaf trains"),
        (lambda leaves: [with_token(leaves[0], 3)], "call first.0: no leaf trains"),
        (lambda leaves: [with_logprob(leaves[0], 5)], "call second.0: no leaf trains"),
    ],
)
def test_a_tampered_leaf_is_found(
    tamper: Callable[[list[Leaf]], list[Leaf]], complaint: str
) -> None:
    tampered: Any = Tampered(three_turns(), tamper)
    with pytest.raises(AssertionError, match=complaint):
        compare(CALLS, [tampered]).raise_for_problems()


def test_an_answer_that_is_nowhere_is_found() -> None:
    with pytest.raises(AssertionError, match=r"call stray\.3: answered, but turn stray was not"):
        compare([entry_of("stray.3", [1], [2])], []).raise_for_problems()


def replay_data_of(path: list[int], sampled: int) -> dict[str, Any]:
    ids = np.array(path, dtype=np.int32)
    return {
        "routed_experts": routed_experts(ids[:-1], (2, 3)),
        "top_p_ids": kept_ids(ids, since=len(path) - sampled),
    }


def entries_and_trajectory(recorded: Recorded) -> tuple[list[LedgerEntry], Trajectory]:
    trajectory = Trajectory()
    entries = []
    for turn in recorded.trajectory._turns.values():
        entry = entry_of(
            f"{turn.id}.0",
            recorded.prompts[turn.id],
            turn.output.tolist(),
            logprobs=turn.logprobs,
            finish=turn.finish_reason,
            speculation=turn.speculation,
            **replay_data_of(recorded.paths[turn.id], len(turn.output)),
        )
        spans = (WeightSpan("default", len(turn.output)),) if len(turn.output) else ()
        replay = Replay(
            entry.routed_experts[max(turn.keep - 1, 0) :],
            [kept for ids in entry.top_p_ids or () for kept in ids],
            np.cumsum([0, *map(len, entry.top_p_ids or ())]),
        )
        trajectory.add(attrs.evolve(turn, weight_versions=spans, replay=replay))
        if len(turn.output):
            entries.append(entry)
    return entries, trajectory


@given(recorded_by_gateway)
def test_any_faithful_trajectory_balances(recorded: Recorded) -> None:
    entries, trajectory = entries_and_trajectory(recorded)
    report = compare(entries, [trajectory])
    report.raise_for_problems()
    assert report.sampled == report.trained + sum(report.excluded.values())
    assert report.lost == {}


@given(recorded_by_gateway, st.data())
def test_any_flipped_mask_is_found(recorded: Recorded, data: st.DataObject) -> None:
    entries, trajectory = entries_and_trajectory(recorded)
    leaves = trajectory.leaves()
    assume(leaves)
    number = data.draw(st.integers(0, len(leaves) - 1))
    position = data.draw(st.integers(0, len(leaves[number].tokens) - 1))
    value = not leaves[number].loss_mask[position]
    leaves[number] = with_mask(leaves[number], position, value)
    tampered: Any = Tampered(trajectory, lambda _: leaves)
    assert compare(entries, [tampered]).problems


@given(recorded_by_gateway, st.data())
def test_any_false_replay_data_of_a_leaf_is_found(recorded: Recorded, data: st.DataObject) -> None:
    entries, trajectory = entries_and_trajectory(recorded)
    leaves = trajectory.leaves()
    assume(leaves)
    number = data.draw(st.integers(0, len(leaves) - 1))
    field = data.draw(st.sampled_from(["routed_experts", "top_p_ids"]))
    values = getattr(leaves[number], field).astype(np.int64)
    # Behind the last token that is trained there is nothing that a call answers for.
    end = np.flatnonzero(leaves[number].loss_mask)[-1]
    size = values[:end].size if field == "routed_experts" else values.size
    assume(size)
    values.reshape(-1)[data.draw(st.integers(0, size - 1))] += 1
    leaves[number] = attrs.evolve(leaves[number], **{field: values})
    tampered: Any = Tampered(trajectory, lambda _: leaves)
    assert compare(entries, [tampered]).problems


@pytest.mark.parametrize("change", [{"replay": None}, {"speculation": Speculation(1, 2, 3)}])
def test_replay_data_and_speculation_of_a_turn_are_the_calls_own(change: dict[str, Any]) -> None:
    entry = entry_of("a.0", [1, 2], [3], **replay_data_of([1, 2, 3], 1))
    trajectory = Trajectory([turn_from(entry, 0, **change)])
    with pytest.raises(AssertionError, match=r"turn a: not the (replay data|speculation) of"):
        compare([entry], [trajectory]).raise_for_problems()


def test_kept_ids_at_a_token_that_is_not_trained_are_found() -> None:
    entry = entry_of("a.0", [1, 2], [3, 4])
    kept = {"top_p_ids": np.arange(3), "top_p_offsets": np.array([0, 1, 1, 2, 3])}

    def tamper(leaves: list[Leaf]) -> list[Leaf]:
        return [attrs.evolve(leaves[0], **kept)]

    tampered: Any = Tampered(Trajectory([turn_from(entry, 0)]), tamper)
    with pytest.raises(AssertionError, match="kept ids at tokens that are not trained"):
        compare([entry], [tampered]).raise_for_problems()


def test_what_a_worker_probed_with_is_no_rollouts() -> None:
    probe = entry_of(f"{PROBE}-1.0", [0, 0], [7], routing_key=PROBE)
    report = compare([*CALLS, probe], [three_turns()])
    report.raise_for_problems()
    assert report.lost == {"probe": 1}


def test_a_ledger_in_a_file_is_what_it_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    counts = Speculation(1, 2, 3)
    whole = entry_of("w.0", [1, 2], [3], speculation=counts, **replay_data_of([1, 2, 3], 1))
    for entry in [FIRST, SECOND, whole]:
        ledger.append(entry)
    for read, kept in zip(Ledger.read(path), ledger, strict=True):
        for field in attrs.fields(LedgerEntry):
            assert np.array_equal(getattr(read, field.name), getattr(kept, field.name))
            assert type(getattr(read, field.name)) is type(getattr(kept, field.name))
    assert len(path.read_text().splitlines()) == len(ledger) == 3


def broken_off(told: int) -> LedgerEntry:
    return entry_of("first.0.0", [1, 2], [3, 4, 5, 6], answered=False, told=told)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("recorded", [1, 2])
def test_of_a_stream_that_broke_off_a_beginning_may_be_recorded(
    recorded: int, answered: bool
) -> None:
    """And a later call behind it, which an engine interrupted, and one that ended."""
    before = [1, 2, 3, 4, 5, 6][: 2 + recorded]
    parts = [
        attrs.evolve(broken_off(told=2), answered=answered),
        entry_of("first.1.0", before, [8, 8], answered=False),
        entry_of("first.1.1", before, [7], finish="abort"),
        entry_of("first.2.0", [*before, 7], [9]),
    ]
    parts = [attrs.evolve(part, turn_id="first") for part in parts]
    turn = turn_from(
        attrs.evolve(
            FIRST,
            output_ids=[*before[2:], 7, 9],
            logprobs=[*(-0.1, -0.2)[:recorded], -0.1, -0.1],
            weight_versions=[WeightSpan("default", count) for count in (recorded, 1, 1)],
        ),
        0,
    )
    report = compare(parts, [Trajectory([turn])])
    report.raise_for_problems()
    assert report.trained == recorded + 2
    rest = 4 - recorded
    assert report.lost == (
        {"retried": rest, "unanswered": 2} if answered else {"unanswered": rest + 2}
    )


@pytest.mark.parametrize(
    ("told", "changes", "problem"),
    [
        (1, {}, "no answered engine call sampled its output"),
        (2, {"output": [3, 9]}, "no answered engine call sampled its output"),
        (2, {"logprobs": [-0.1, -0.3]}, "not the logprobs of call first.0.0"),
        (2, {"finish_reason": "stop"}, "not the finish_reason of call first.0.0"),
    ],
)
def test_of_a_stream_that_broke_off_nothing_else_may_be_recorded(
    told: int, changes: dict[str, Any], problem: str
) -> None:
    entry = attrs.evolve(broken_off(told), turn_id="first")
    fields = {"finish_reason": "abort", "excluded": "aborted"} | changes
    report = compare([entry], [Trajectory([turn_from(FIRST, 0, **fields)])])
    assert any(problem in found for found in report.problems)


def test_of_a_stream_that_was_answered_no_beginning_is_the_end_of_a_turn() -> None:
    entry = attrs.evolve(broken_off(told=2), turn_id="first", answered=True)
    turn = turn_from(FIRST, 0, finish_reason="abort", excluded="aborted")
    assert compare([entry], [Trajectory([turn])]).problems


@pytest.mark.anyio
async def test_the_books_of_an_engine_and_its_client(scripted_engine: StartEngine) -> None:
    """Retries, an abort, a bad count and a plain turn, over HTTP."""
    engine, url = await scripted_engine(
        {
            "*": [
                {"ids": [5, 6], "drop": True},
                {"fail": 503},
                {"ids": [5, 6]},
                {"ids": [7], "mismatch": True},
                {"ids": [8, 8, 8, 8], "hang": True},
                {"ids": [9, 9], "hang": True},
            ]
        }
    )
    sglang = SGLangEngine(url)
    trajectory = Trajectory()
    calls = iter(range(10))
    never = Stop()

    async def turn(stop: Stop, **changes: Any) -> None:
        index = next(calls)
        prompt = np.arange(index + 1, dtype=np.int32)
        request = EngineRequest(f"turn-{index}", prompt, {"max_new_tokens": 9}, "rollout")
        reply = await sglang.generate(request, stop=stop)
        trajectory.add(
            Turn(
                id=request.turn_id,
                index=index,
                parent=None,
                keep=0,
                prompt=prompt,
                output=reply.output,
                logprobs=reply.logprobs,
                finish_reason=reply.finish_reason,
                weight_versions=reply.weight_versions,
                **changes,
            )
        )

    try:
        await turn(never)
        with pytest.raises(UntrustedReply):
            await turn(never)
        stop = Stop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: turn(stop, excluded="aborted"))
            await until(lambda: len(engine.calls) == 5)
            stop.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn, never)
            await until(lambda: len(engine.calls) == 6)
            tasks.cancel_scope.cancel()
        await until(lambda: len(engine.ledger) == 5)
        with pytest.raises(EngineLost):
            await turn(stop)
    finally:
        await sglang.aclose()
    report = compare(engine.ledger, [trajectory])
    report.raise_for_problems()
    assert (report.sampled, report.trained, report.excluded) == (8, 2, {"aborted": 2})
    assert sum(report.lost.values()) == 4
    assert report.lost["miscounted"] == 1
