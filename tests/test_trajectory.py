from collections import Counter
from itertools import takewhile
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import Recorded, recorded, recorded_by_gateway, token_lists
from turnleaf.core import Leaf, Place, Replay, Trajectory, TrajectoryError, Turn
from turnleaf.core._trajectory import _MOST_PATHS

Position = tuple[str, int]
"""A token by where it came from: the turn that contributed it, and its place on the path."""


def turn(name: str, index: int, parent: str | None = None, keep: int = 0, **fields: object) -> Turn:
    fields = {"prompt": [], "output": [], "finish_reason": "stop", **fields}
    fields.setdefault("logprobs", [-1.0] * len(fields["output"]))
    return Turn(id=name, index=index, parent=parent, keep=keep, **fields)


def prompt(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def shared_prefix(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def origins(trajectory: Trajectory) -> dict[str, list[Position]]:
    """For every turn, where each token of its path came from."""
    found: dict[str | None, list[Position]] = {None: []}
    pending = list(trajectory.turns)
    while pending:
        turn = pending.pop(0)
        if turn.parent not in found:
            pending.append(turn)
            continue
        own = [(turn.id, position) for position in range(turn.keep, turn.end)]
        found[turn.id] = found[turn.parent][: turn.keep] + own
    return {turn.id: found[turn.id] for turn in trajectory.turns}


def is_last(trajectory: Trajectory, turn: Turn) -> bool:
    """Not excluded, and on the path of nothing below it that is not excluded as a whole."""

    def is_kept_whole_below(above: Turn) -> bool:
        return any(
            child.excluded is None or is_kept_whole_below(child)
            for child in trajectory.turns
            if child.parent == above.id and child.keep >= turn.end
        )

    return turn.excluded is None and not is_kept_whole_below(turn)


def expected_leaves(trajectory: Trajectory) -> list[tuple[str, dict[int, Position], list[str]]]:
    """Last turn, trained positions, and turns trained, of each leaf: token by token."""
    came_from = origins(trajectory)
    turns = {turn.id: turn for turn in trajectory.turns}
    trained: set[str] = set()
    leaves = []
    for last in trajectory.turns:
        if not is_last(trajectory, last):
            continue
        path = came_from[last.id]
        own = Counter(name for name, _ in path)
        here = {
            position: origin
            for position, origin in enumerate(path)
            if turns[origin[0]].excluded is None
            and origin[0] not in trained
            and own[origin[0]] == turns[origin[0]].end - turns[origin[0]].keep
            and position >= turns[origin[0]].end - len(turns[origin[0]].output)
        }
        trained |= {name for name, _ in here.values()}
        if here:
            leaves.append((last.id, here, list(dict.fromkeys(name for name, _ in here.values()))))
    return leaves


@given(recorded)
def test_every_token_sampled_in_a_trained_turn_is_trained_once_with_its_own_logprob(
    recorded: Recorded,
) -> None:
    sampled = Counter(
        (token, logprob)
        for turn in recorded.trajectory.turns
        if turn.excluded is None
        for token, logprob in zip(turn.output.tolist(), turn.logprobs.tolist(), strict=True)
    )
    trained = Counter(
        (token, logprob)
        for leaf in recorded.trajectory.leaves()
        for token, logprob in zip(
            leaf.tokens[leaf.loss_mask].tolist(),
            leaf.logprobs[leaf.loss_mask].tolist(),
            strict=True,
        )
    )
    # Every sampled token has a log-probability of its own, so both count each one once; what was
    # not sampled, or was excluded, is in neither.
    assert trained == sampled
    assert set(sampled.values()) <= {1}


@given(recorded)
def test_leaves_equal_a_model_that_follows_every_token(recorded: Recorded) -> None:
    trajectory = recorded.trajectory
    turns = {turn.id: turn for turn in trajectory.turns}
    came_from = origins(trajectory)
    leaves = trajectory.leaves()
    expected = expected_leaves(trajectory)
    assert len(leaves) == len(expected)
    for leaf, (last, positions, trained) in zip(leaves, expected, strict=True):
        length = turns[last].end
        logprobs = np.zeros(length, dtype=np.float32)
        for position, (name, _) in positions.items():
            sampled_from = turns[name].end - len(turns[name].output)
            logprobs[position] = turns[name].logprobs[position - sampled_from]
        assert leaf.tokens.tolist() == recorded.paths[last]
        assert leaf.loss_mask.nonzero()[0].tolist() == sorted(positions)
        assert leaf.logprobs.tolist() == logprobs.tolist()
        assert leaf.prompt_length == min(positions)
        assert [turn.id for turn in leaf.trained_turns] == trained
        contributing = dict.fromkeys(name for name, _ in came_from[last])
        assert [turn.id for turn in leaf.turns] == list(contributing)
        assert (leaf.tokens.dtype, leaf.loss_mask.dtype, leaf.logprobs.dtype) == (
            np.int32,
            np.bool_,
            np.float32,
        )
    last_indices = [turns[last].index for last, _, _ in expected]
    assert last_indices == sorted(last_indices)


@given(recorded)
def test_a_turn_is_trained_in_the_first_leaf_that_holds_it_whole(recorded: Recorded) -> None:
    trajectory = recorded.trajectory
    leaves = trajectory.leaves()
    for turn in trajectory.turns:
        if turn.excluded is not None or not len(turn.output):
            continue
        holding = [leaf for leaf in leaves if holds_whole(leaf, turn)]
        assert [turn in leaf.trained_turns for leaf in holding] == [
            leaf is holding[0] for leaf in holding
        ]
        assert [leaf for leaf in leaves if turn in leaf.trained_turns] == holding[:1]


def holds_whole(leaf: Leaf, turn: Turn) -> bool:
    """Whether the leaf's next turn, or its end, follows the turn's last token."""
    if turn not in leaf.turns:
        return False
    follows = [*(later.keep for later in leaf.turns[1:]), len(leaf.tokens)]
    return follows[leaf.turns.index(turn)] == turn.end


@given(recorded, st.data())
def test_tokens_through_a_turn_are_its_full_prompt_and_output(
    recorded: Recorded, data: st.DataObject
) -> None:
    """Whichever were asked for before, and whatever was added since."""
    trajectory = Trajectory()

    def ask(turn: Turn) -> None:
        tokens = trajectory.tokens_through(turn.id)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == recorded.prompts[turn.id] + turn.output.tolist()

    for turn in recorded.trajectory._turns.values():
        trajectory.add(turn)
        for asked in data.draw(st.lists(st.sampled_from(trajectory.turns), max_size=3)):
            ask(asked)
    for turn in trajectory.turns:
        ask(turn)


@given(recorded, st.data())
def test_locate_finds_the_longest_shared_prefix_of_all_paths(
    recorded: Recorded, data: st.DataObject
) -> None:
    earlier = data.draw(st.sampled_from([[], *recorded.paths.values()]))
    wanted = earlier[: data.draw(st.integers(0, len(earlier)))] + data.draw(token_lists)
    with_experts = data.draw(st.booleans())
    candidates = [
        (shared, shared == turn.end, turn.excluded != "undelivered", order, turn.id)
        for order, turn in enumerate(map(recorded.trajectory.turn, recorded.paths))
        if (shared := shared_prefix(recorded.paths[turn.id], wanted)) > turn.keep
        if not with_experts or (turn.replay and turn.replay.routed_experts is not None)
    ]
    place = recorded.trajectory.locate(prompt(*wanted), with_experts=with_experts)
    *_, best = [(0, None), *sorted(candidates)]
    assert place == Place(best[-1], best[0])
    assert place.parent is None or type(place.keep) is int


@given(recorded, st.data())
def test_what_a_prompt_is_known_to_continue_changes_nothing(
    recorded: Recorded, data: st.DataObject
) -> None:
    along = data.draw(st.sampled_from([*recorded.paths]))
    wanted = prompt(*recorded.paths[along], *data.draw(token_lists))
    with_experts = data.draw(st.booleans())
    place = recorded.trajectory.locate(wanted, along=along, with_experts=with_experts)
    assert place == recorded.trajectory.locate(wanted, with_experts=with_experts)


@given(recorded_by_gateway)
def test_what_is_stored_is_what_is_new_or_rendered_anew(recorded: Recorded) -> None:
    stored = new = 0
    paths: list[list[int]] = []
    for name, path in recorded.paths.items():
        turn = recorded.trajectory.turn(name)
        shared = max((shared_prefix(p, recorded.prompts[name]) for p in paths), default=0)
        stored += len(turn.prompt) + len(turn.output)
        new += len(path) - shared
        paths.append(path)
        # A view would keep the whole history that it was cut from alive.
        assert turn.prompt.base is turn.output.base is turn.logprobs.base is None
    assert stored == new


@given(recorded)
def test_replay_data_follows_the_tokens(recorded: Recorded) -> None:
    trajectory = recorded.trajectory
    turns = {turn.id: turn for turn in trajectory.turns}
    came_from = origins(trajectory)
    for leaf, (last, positions, trained) in zip(
        trajectory.leaves(), expected_leaves(trajectory), strict=True
    ):
        _check_experts(leaf, [name for name, _ in came_from[last]], turns, last)
        replays = [turns[name].replay for name in trained]
        if any(replay is None or replay.top_p_ids is None for replay in replays):
            assert leaf.top_p_ids is leaf.top_p_offsets is None
            continue
        ids, offsets = [], [0]
        for position in range(len(leaf.tokens)):
            if position in positions:
                owner = turns[positions[position][0]]
                start = position - (owner.end - len(owner.output))
                begin, end = owner.replay.top_p_offsets[start : start + 2]
                ids += owner.replay.top_p_ids[begin:end].tolist()
            offsets.append(len(ids))
        assert leaf.top_p_ids.tolist() == ids
        assert leaf.top_p_offsets.tolist() == offsets
        assert leaf.top_p_offsets.dtype == np.int64


def _check_experts(leaf: Leaf, owners: list[str], turns: dict[str, Turn], last: str) -> None:
    """A position's experts come from the turn that its *next* token came from."""
    replays = {name: turns[name].replay for name in owners}
    if any(replay is None or replay.routed_experts is None for replay in replays.values()):
        assert leaf.routed_experts is None
        return
    rows = [
        replays[owner].routed_experts[position - max(turns[owner].keep - 1, 0)].tolist()
        for position, owner in enumerate(owners[1:])
    ]
    assert leaf.routed_experts.shape[0] == len(leaf.tokens) - 1 == len(rows)
    assert leaf.routed_experts.tolist() == rows
    assert leaf.routed_experts.dtype.kind == "u"


@given(recorded)
def test_exclusions_can_be_changed_at_any_time(recorded: Recorded) -> None:
    trajectory = recorded.trajectory
    reasons = {turn.id: turn.excluded for turn in trajectory.turns}
    before = contents(trajectory)
    for name in reasons:
        trajectory.exclude(name, "aborted")
    assert trajectory.leaves() == []
    for name in reasons:
        trajectory.exclude(name, None)
    assert sum(int(leaf.loss_mask.sum()) for leaf in trajectory.leaves()) == recorded.sampled
    for name, reason in reasons.items():
        trajectory.exclude(name, reason)
    assert contents(trajectory) == before


def contents(trajectory: Trajectory) -> list[object]:
    return [
        (leaf.tokens.tolist(), leaf.loss_mask.tolist(), leaf.logprobs.tolist(), leaf.turns)
        for leaf in trajectory.leaves()
    ]


def test_a_kept_tail_of_sampled_tokens_is_not_trained_again() -> None:
    """Case B07: a client drops the reasoning before a token that was sampled after it."""
    trajectory = Trajectory([turn("one", 0, prompt=[7], output=[50, 51], logprobs=[-0.2, -0.3])])
    place = trajectory.locate(prompt(7, 51, 8))
    assert place == Place("one", 1)
    trajectory.add(turn("two", 1, *place, prompt=[51, 8], output=[60], logprobs=[-0.1]))

    first, second = trajectory.leaves()
    assert first.tokens.tolist() == [7, 50, 51]
    assert first.loss_mask.tolist() == [False, True, True]
    assert first.logprobs.tolist() == float32s(0, -0.2, -0.3)
    assert first.prompt_length == 1
    assert second.tokens.tolist() == [7, 51, 8, 60]
    assert second.loss_mask.tolist() == [False, False, False, True]
    assert second.logprobs.tolist() == float32s(0, 0, 0, -0.1)
    assert second.prompt_length == 3


def float32s(*values: float) -> list[float]:
    return np.array(values, dtype=np.float32).tolist()


def test_a_growing_conversation_is_one_leaf() -> None:
    trajectory = Trajectory()
    full: list[int] = []
    for index in range(3):
        full += [10 + index]
        place = trajectory.locate(prompt(*full))
        trajectory.add(turn(f"t{index}", index, *place, prompt=full[place.keep :], output=[20]))
        full += [20]
    (leaf,) = trajectory.leaves()
    assert leaf.tokens.tolist() == [10, 20, 11, 20, 12, 20]
    assert leaf.loss_mask.tolist() == [False, True] * 3
    assert leaf.turns == leaf.trained_turns == trajectory.turns


def test_an_unsampled_turn_close_is_prompt() -> None:
    """A length-truncated parent: the close that the template adds was never sampled."""
    trajectory = Trajectory(
        [
            turn("cut", 0, prompt=[1], output=[2], finish_reason="length"),
            turn("next", 1, "cut", 2, prompt=[99, 3], output=[4]),
        ]
    )
    (leaf,) = trajectory.leaves()
    assert leaf.tokens.tolist() == [1, 2, 99, 3, 4]
    assert leaf.loss_mask.tolist() == [False, True, False, False, True]


def test_siblings_with_equal_outputs_are_both_trained() -> None:
    trajectory = Trajectory([turn("a", 0, prompt=[1], output=[2], logprobs=[-0.5])])
    place = trajectory.locate(prompt(1))
    trajectory.add(turn("b", 1, *place, output=[2], logprobs=[-0.25]))
    assert place == Place("a", 1)
    assert [leaf.tokens.tolist() for leaf in trajectory.leaves()] == [[1, 2], [1, 2]]
    assert [leaf.logprobs.tolist() for leaf in trajectory.leaves()] == [[0, -0.5], [0, -0.25]]
    # The continuation hangs on the latest of the two.
    assert trajectory.locate(prompt(1, 2, 3)) == Place("b", 2)


def test_a_continuation_prefers_what_was_delivered_over_what_came_later() -> None:
    trajectory = Trajectory(
        [
            turn("seen", 0, prompt=[1], output=[2]),
            turn("lost", 1, "seen", 1, output=[2], excluded="undelivered"),
        ]
    )
    assert trajectory.locate(prompt(1, 2, 3)) == Place("seen", 2)
    trajectory.exclude("lost", None)
    assert trajectory.locate(prompt(1, 2, 3)) == Place("lost", 2)


def test_a_path_that_ends_there_is_preferred_over_one_that_goes_on() -> None:
    trajectory = Trajectory(
        [
            turn("whole", 0, prompt=[1], output=[2], excluded="undelivered"),
            turn("longer", 1, "whole", 1, output=[2, 3]),
        ]
    )
    assert trajectory.locate(prompt(1, 2, 9)) == Place("whole", 2)


def test_a_trained_turn_below_an_excluded_one_takes_its_context_along() -> None:
    trajectory = Trajectory(
        [
            turn("a", 0, prompt=[1], output=[2]),
            turn("judge", 1, "a", 2, prompt=[3], output=[4], excluded="untrained"),
            turn("b", 2, "judge", 4, prompt=[5], output=[6]),
        ]
    )
    (leaf,) = trajectory.leaves()
    assert leaf.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert leaf.loss_mask.tolist() == [False, True, False, False, False, True]
    assert [t.id for t in leaf.turns] == ["a", "judge", "b"]
    assert [t.id for t in leaf.trained_turns] == ["a", "b"]


def test_excluded_turns_below_leave_the_turn_above_a_leaf() -> None:
    trajectory = Trajectory(
        [
            turn("a", 0, prompt=[1], output=[2]),
            turn("b", 1, "a", 2, prompt=[3], output=[4], excluded="aborted"),
        ]
    )
    (leaf,) = trajectory.leaves()
    assert leaf.tokens.tolist() == [1, 2]


def test_a_turn_shared_by_two_leaves_is_trained_in_the_one_whose_last_turn_started_first() -> None:
    trajectory = Trajectory(
        [
            turn("root", 0, prompt=[1], output=[2]),
            turn("late", 2, "root", 2, prompt=[3], output=[4]),
            turn("early", 1, "root", 2, prompt=[5], output=[6]),
        ]
    )
    early, late = trajectory.leaves()
    assert early.tokens.tolist() == [1, 2, 5, 6]
    assert early.loss_mask.tolist() == [False, True, False, True]
    assert late.tokens.tolist() == [1, 2, 3, 4]
    assert late.loss_mask.tolist() == [False, False, False, True]


def test_a_leaf_with_nothing_to_train_is_not_emitted() -> None:
    trajectory = Trajectory(
        [
            turn("a", 0, prompt=[1], output=[2]),
            turn("b", 1, "a", 2, prompt=[3], output=[4]),
            turn("empty", 2, "a", 2, prompt=[5], finish_reason="abort"),
        ]
    )
    (leaf,) = trajectory.leaves()
    assert leaf.tokens.tolist() == [1, 2, 3, 4]
    assert Trajectory().leaves() == []
    assert Trajectory([turn("nothing", 0)]).leaves() == []


def test_paths_that_go_on_in_turn_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[str] = []
    walk = Trajectory._path
    monkeypatch.setattr(
        Trajectory, "_path", lambda self, turn_id: walked.append(turn_id) or walk(self, turn_id)
    )
    trajectory = Trajectory([turn(f"{at}.0", at, prompt=[at]) for at in range(_MOST_PATHS + 1)])
    for length in range(1, 6):
        for at in range(_MOST_PATHS):
            parent = f"{at}.{length - 1}"
            assert trajectory.tokens_through(parent).tolist() == [at] * length
            trajectory.add(turn(f"{at}.{length}", length * 100 + at, parent, length, prompt=[at]))
    expected = [f"{at}.0" for at in range(_MOST_PATHS + 1)]
    assert walked == expected[:-1]
    # One more is one too many.
    for name in ("0.5", expected[-1], "0.5", "1.5"):
        trajectory.tokens_through(name)
    assert walked == [*expected, "1.5"]


def test_locate_goes_through_no_other_branch_that_is_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trajectory = Trajectory([turn("start", 0, prompt=[0])])
    for at in range(1, 101):
        for branch in (1, 2):
            parent = f"{branch}.{at - 1}" if at > 1 else "start"
            trajectory.add(turn(f"{branch}.{at}", 2 * at + branch, parent, at, prompt=[branch]))
    looked_at: list[str] = []

    class Turns(dict[str, Turn]):
        def __getitem__(self, name: str) -> Turn:
            looked_at.append(name)
            return super().__getitem__(name)

    monkeypatch.setattr(trajectory, "_turns", Turns(trajectory._turns))
    for branch in (1, 2):
        path = prompt(0, *[branch] * 100, 9)
        assert trajectory.locate(path, along=f"{branch}.100") == Place(f"{branch}.100", 101)
    assert len(looked_at) < 20
    # Nor from each of its turns anew.
    looked_at.clear()
    path = prompt(0, *[1] * 20, 9)
    assert trajectory.locate(path, along="1.20") == Place("1.20", 21)
    assert len(looked_at) < 500


def test_locate_finds_a_sibling_of_what_is_continued_that_goes_on_with_the_same_tokens() -> None:
    trajectory = Trajectory(
        [
            turn("other", 0, prompt=[1, 2], output=[9]),
            turn("short", 1, "other", 2, output=[3]),
            turn("long", 2, "other", 2, output=[3, 4]),
        ]
    )
    assert trajectory.locate(prompt(1, 2, 3, 4), along="short") == Place("long", 4)


def test_locate_looks_below_turns_that_the_prompt_does_not_reach() -> None:
    """`add` takes a turn that keeps less than its parent kept."""
    trajectory = Trajectory(
        [
            turn("a", 0, prompt=[1, 2, 3, 4]),
            turn("b", 1, "a", 4, prompt=[5]),
            turn("c", 2, "b", 2, prompt=[9]),
        ]
    )
    assert trajectory.tokens_through("c").tolist() == [1, 2, 9]
    assert trajectory.locate(prompt(1, 2, 9, 9)) == Place("c", 3)


def test_a_chain_of_ten_thousand_turns_is_one_leaf() -> None:
    count = 10_000
    trajectory = Trajectory(
        turn(f"t{i}", i, f"t{i - 1}" if i else None, 2 * i, prompt=[1], output=[2])
        for i in range(count)
    )
    (leaf,) = trajectory.leaves()
    assert len(leaf.tokens) == 2 * count
    assert int(leaf.loss_mask.sum()) == count
    assert trajectory.locate(leaf.tokens) == Place(f"t{count - 1}", 2 * count)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (turn("a", 1), "turn 'a' is already in the trajectory"),
        (turn("b", 0), "turn 'b': index 0 is already taken"),
        (turn("b", 1, "x"), "turn 'b': parent 'x' is unknown"),
        (turn("b", 1, "b"), "turn 'b': parent 'b' is unknown"),
        (turn("b", 1, "a", 3), "turn 'b': keeps 3 tokens of 2 of its parent's"),
        (
            turn(
                "b", 1, "a", 2, prompt=[1], replay=Replay(routed_experts=np.zeros((1, 2, 4), int))
            ),
            r"turn 'b': routed_experts has \(layers, top_k\) \(2, 4\)",
        ),
    ],
)
def test_a_turn_that_contradicts_the_trajectory_is_refused_and_leaves_no_trace(
    wrong: Turn, message: str
) -> None:
    experts = Replay(routed_experts=np.zeros((1, 2, 3), int))
    trajectory = Trajectory([turn("a", 0, prompt=[1], output=[2], replay=experts)])
    before = trajectory.to_json()
    with pytest.raises(TrajectoryError, match=message):
        trajectory.add(wrong)
    assert trajectory.to_json() == before
    trajectory.add(turn("b", 1, "a", 2, prompt=[1], output=[2]))
    assert len(trajectory) == 2


def test_an_unknown_turn_is_named() -> None:
    trajectory = Trajectory()
    for ask in (trajectory.turn, trajectory.tokens_through, lambda t: trajectory.exclude(t, None)):
        with pytest.raises(TrajectoryError, match="no turn 'x'"):
            ask("x")


def test_an_unknown_reason_for_exclusion_is_refused() -> None:
    trajectory = Trajectory([turn("a", 0)])
    with pytest.raises(TrajectoryError, match="excluded 'bored' is not one of"):
        trajectory.exclude("a", "bored")
    assert trajectory.turn("a").excluded is None


def test_turns_come_in_the_order_of_their_indices_and_compare_so() -> None:
    one, two = turn("a", 0), turn("b", 1)
    assert Trajectory([two, one]).turns == (one, two)
    assert Trajectory([two, one]) == Trajectory([one, two])
    assert Trajectory([one]) != Trajectory([one, two])
    assert Trajectory([one]) != Trajectory([attrs.evolve(one, excluded="aborted")])
    assert Trajectory() != []
    assert repr(Trajectory([one])) == "<Trajectory of 1 turns>"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Trajectory())


def test_a_turn_is_extended_through_a_path_that_turns_off_at_an_excluded_one() -> None:
    """A reply that was lost, and its retry, below the same turn: one leaf goes on."""

    def turn(name: str, index: int, parent: str | None, keep: int, **fields: Any) -> Turn:
        values = {"prompt": [], "output": [index], "logprobs": [-1.0], "finish_reason": "stop"}
        return Turn(id=name, index=index, parent=parent, keep=keep, **(values | fields))

    trajectory = Trajectory(
        [
            turn("first", 0, None, 0, prompt=[7]),
            turn("lost", 1, "first", 2, prompt=[8], excluded="undelivered"),
            turn("retry", 2, "lost", 3),
        ]
    )
    (leaf,) = trajectory.leaves()
    assert leaf.tokens.tolist() == [7, 0, 8, 2]
    assert leaf.loss_mask.tolist() == [False, True, False, True]
