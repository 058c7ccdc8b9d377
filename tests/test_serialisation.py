import base64
import json

import attrs
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.strategies import Recorded, garbage, garbled_trajectories, recorded
from tests.timing import quickest
from turnleaf.core import (
    Replay,
    Speculation,
    Trajectory,
    TrajectoryError,
    Turn,
    TurnTimings,
    WeightSpan,
)

FULL = Turn(
    id="a",
    index=4,
    parent=None,
    keep=0,
    prompt=[1, 2],
    output=[3],
    logprobs=[-0.5],
    finish_reason="length",
    weight_versions=[WeightSpan("v1", 1)],
    cached_tokens=2,
    timings=TurnTimings(started=1.5, engine=0.25, total=0.5),
    replay=Replay(
        routed_experts=np.array([[[1]], [[300]]]), top_p_ids=[3, 70_000], top_p_offsets=[0, 2]
    ),
    speculation=Speculation(accepted=3, drafted=8, verifications=2),
    excluded="untrained",
)


def document(**changes: object) -> str:
    """A trajectory of one turn with some of the turn's fields replaced."""
    written = json.loads(Trajectory([FULL]).to_json())
    written["turns"][0] |= changes
    return json.dumps(written)


@given(recorded)
def test_a_round_trip_changes_nothing(recorded: Recorded) -> None:
    trajectory = recorded.trajectory
    read = Trajectory.from_json(trajectory.to_json())
    assert read == trajectory
    assert read.to_json() == trajectory.to_json()
    assert Trajectory.from_json(trajectory.to_json().decode()) == trajectory
    for theirs, mine in zip(read.turns, trajectory.turns, strict=True):
        check_arrays(theirs, mine)
        if mine.replay is not None:
            check_arrays(theirs.replay, mine.replay)
    for theirs, mine in zip(read.leaves(), trajectory.leaves(), strict=True):
        assert theirs.turns == mine.turns
        check_arrays(theirs, mine)
    for path in recorded.paths.values():
        # Ties between equal paths are decided by the order in which turns were added.
        wanted = np.array(path, dtype=np.int32)
        assert read.locate(wanted) == trajectory.locate(wanted)


def check_arrays(theirs: attrs.AttrsInstance, mine: attrs.AttrsInstance) -> None:
    for field in attrs.fields(type(mine)):
        array, other = getattr(mine, field.name), getattr(theirs, field.name)
        if isinstance(array, np.ndarray):
            assert other.dtype == array.dtype
            assert other.shape == array.shape
            assert other.tobytes() == array.tobytes()
            assert other.flags.writeable == array.flags.writeable


def test_the_wire_format() -> None:
    """What is stored today must be readable tomorrow."""

    def encoded(values: list[float], dtype: str) -> str:
        return base64.b64encode(np.array(values, dtype=dtype).tobytes()).decode()

    assert json.loads(Trajectory([FULL]).to_json()) == {
        "version": 1,
        "turns": [
            {
                "id": "a",
                "index": 4,
                "parent": None,
                "keep": 0,
                "prompt": encoded([1, 2], "<i4"),
                "output": encoded([3], "<i4"),
                "logprobs": encoded([-0.5], "<f4"),
                "finish_reason": "length",
                "weight_versions": [{"version": "v1", "count": 1}],
                "cached_tokens": 2,
                "timings": {"started": 1.5, "engine": 0.25, "total": 0.5},
                "replay": {
                    "routed_experts": {
                        "dtype": "uint16",
                        "shape": [2, 1, 1],
                        "data": encoded([1, 300], "<u2"),
                    },
                    "top_p_ids": {
                        "dtype": "uint32",
                        "shape": [2],
                        "data": encoded([3, 70_000], "<u4"),
                    },
                    "top_p_offsets": {
                        "dtype": "uint8",
                        "shape": [2],
                        "data": encoded([0, 2], "<u1"),
                    },
                },
                "speculation": {"accepted": 3, "drafted": 8, "verifications": 2},
                "excluded": "untrained",
            }
        ],
    }


def test_a_turn_of_before_there_was_speculation_is_read() -> None:
    written = json.loads(Trajectory([FULL]).to_json())
    del written["turns"][0]["speculation"]
    read = Trajectory.from_json(json.dumps(written)).turn("a")
    assert read == attrs.evolve(FULL, speculation=None)


def test_whole_seconds_may_be_written_as_integers() -> None:
    read = Trajectory.from_json(document(timings={"started": 2}))
    assert read.turn("a").timings == TurnTimings(started=2.0)
    assert type(read.turn("a").timings.started) is float


@given(garbled_trajectories())
def test_a_garbled_trajectory_is_read_or_refused_with_our_error(garbled: bytes) -> None:
    try:
        read = Trajectory.from_json(garbled)
    except TrajectoryError:
        return
    # What is accepted is a whole trajectory: it can be trained and written again.
    assert sum(int(leaf.loss_mask.sum()) for leaf in read.leaves()) == sum(
        len(turn.output) for turn in read.turns if turn.excluded is None
    )
    assert len(Trajectory.from_json(read.to_json())) == len(read)


@given(st.one_of(garbage.map(json.dumps), st.binary(), st.text('{}[]":,0eé\ud800')))
@example('{"version": 1, "turns": [[]]}')
@example('{"version": 1, "turns": {}}')
@example('{"version": 1}')
@example('{"version": 2, "turns": []}')
@example("[" * 100_000)
@example('{"version": ' + "[" * 900 + "]" * 900 + "}")
@example('{"version": 1, "turns": [' + "[" * 900 + "]" * 900 + "]}")
@example("1" * 5_000)
@example(b"\xff\xfe\x00")
def test_anything_else_is_refused_with_our_error(data: bytes | str) -> None:
    with pytest.raises(TrajectoryError, match="serialised trajectory"):
        Trajectory.from_json(data)


@given(st.binary(min_size=1, max_size=3), st.integers(0, 10_000), st.booleans())
def test_damaged_bytes_are_read_or_refused_with_our_error(
    damage: bytes, at: int, cut: bool
) -> None:
    data = Trajectory([FULL]).to_json()
    at %= len(data)
    try:
        read = Trajectory.from_json(data[:at] + damage + (b"" if cut else data[at + len(damage) :]))
    except TrajectoryError:
        return
    read.leaves()


def shaped(**changes: object) -> dict[str, object]:
    return {"top_p_ids": {"dtype": "uint8", "shape": [2], "data": "AAE=", **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": None}, "expected str, not NoneType @ turn.id"),
        ({"id": 5}, "expected str, not int @ turn.id"),
        ({"index": 3.0}, "expected int, not float @ turn.index"),
        ({"index": True}, "expected int, not bool @ turn.index"),
        ({"index": float("inf")}, "expected int, not float @ turn.index"),
        ({"index": -1}, "turn 'a': index is -1"),
        ({"keep": 10**400}, "turn 'a': keep is 1000"),
        ({"parent": []}, "expected str, not list @ turn.parent"),
        ({"parent": "b"}, "parent 'b' is unknown"),
        ({"prompt": [1, 2]}, "@ turn.prompt"),
        ({"prompt": "AAA="}, "@ turn.prompt"),
        ({"prompt": "AAAA AAAA"}, "@ turn.prompt"),
        ({"prompt": "é"}, "@ turn.prompt"),
        ({"prompt": None}, "@ turn.prompt"),
        ({"output": "/////w=="}, "token ids must be integers from 0"),
        ({"logprobs": "AADAfw=="}, "turn 'a': a log-probability is not finite"),
        ({"finish_reason": ["stop"]}, "@ turn.finish_reason"),
        ({"excluded": "bored"}, "@ turn.excluded"),
        ({"weight_versions": 3}, "@ turn.weight_versions"),
        ({"weight_versions": [{"version": "v1"}]}, r"@ turn.weight_versions\[0\].count"),
        ({"weight_versions": [{"version": "v1", "count": -1}]}, r"@ turn.weight_versions\[0\]"),
        ({"timings": []}, "@ turn.timings"),
        ({"timings": {"started": "1"}}, "expected float, not str @ turn.timings.started"),
        ({"timings": {"started": 10**400}}, "@ turn.timings.started"),
        ({"replay": []}, "@ turn.replay"),
        ({"replay": {"experts": None}}, "experts @ turn.replay"),
        ({"replay": shaped(dtype="object")}, "replay data of dtype 'object' @ turn.replay"),
        ({"replay": shaped(dtype=[])}, "@ turn.replay.top_p_ids"),
        ({"replay": shaped(shape=[3])}, "@ turn.replay.top_p_ids"),
        ({"replay": shaped(shape=[10**30])}, "@ turn.replay.top_p_ids"),
        ({"replay": shaped(shape=None)}, "top_p_ids"),
        ({"replay": shaped(data=5)}, "@ turn.replay.top_p_ids"),
        ({"replay": {"top_p_ids": 5}}, "@ turn.replay.top_p_ids"),
        ({"surprise": 1}, "surprise @ turn"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        Trajectory.from_json(document(**changes))


def test_a_missing_field_is_named() -> None:
    written = json.loads(document())
    del written["turns"][0]["keep"]
    with pytest.raises(TrajectoryError, match=r"turn 0 .* 'keep' @ turn\.keep"):
        Trajectory.from_json(json.dumps(written))


def test_a_later_version_is_refused_by_number() -> None:
    with pytest.raises(TrajectoryError, match="of version 2; this turnleaf reads version 1"):
        Trajectory.from_json('{"version": 2, "turns": []}')


@pytest.mark.parametrize("version", ["true", "1.0", '"1"', "null", "[1]"])
def test_only_the_number_is_a_version(version: str) -> None:
    with pytest.raises(TrajectoryError, match="this turnleaf reads version 1"):
        Trajectory.from_json(f'{{"version": {version}, "turns": []}}')


def test_an_unknown_key_beside_the_turns_is_named() -> None:
    with pytest.raises(TrajectoryError, match="unknown key 'leaves'"):
        Trajectory.from_json('{"version": 1, "turns": [], "leaves": []}')


def test_a_version_of_any_size_makes_a_short_message() -> None:
    with pytest.raises(TrajectoryError, match="of version") as caught:
        Trajectory.from_json(json.dumps({"version": "x" * 10_000, "turns": []}))
    assert len(str(caught.value)) < 200


def test_a_long_turn_is_small_and_quick_beside_lists_of_numbers() -> None:
    count = 100_000
    random = np.random.default_rng(0)
    long = Turn(
        id="a",
        index=0,
        parent=None,
        keep=0,
        prompt=[],
        output=random.integers(150_000, size=count),
        logprobs=-random.random(count),
        finish_reason="stop",
    )
    lists = {"output": long.output.tolist(), "logprobs": long.logprobs.tolist()}
    data = Trajectory([long]).to_json()
    assert len(data) < 0.5 * len(json.dumps(lists))

    def encode_lists() -> None:
        json.loads(json.dumps(lists))

    def encode() -> None:
        Trajectory.from_json(Trajectory([long]).to_json())

    ours, theirs = quickest(5, encode, encode_lists)
    assert ours < 0.5 * theirs


def test_what_was_refused_is_written_only_where_there_is_some() -> None:
    trajectory = Trajectory([FULL])
    assert "refused" not in json.loads(trajectory.to_json())
    trajectory.refuse("engine_reply")
    trajectory.refuse("engine_reply")
    read = Trajectory.from_json(trajectory.to_json())
    assert read.refused == {"engine_reply": 2}
    assert read == trajectory != Trajectory([FULL])


@pytest.mark.parametrize("refused", [None, [], 1, {"a": 0}, {"a": True}, {"a": 1.0}, {"a": "1"}])
def test_refused_that_is_no_count_by_code_is_not_read(refused: object) -> None:
    written = json.loads(Trajectory([FULL]).to_json()) | {"refused": refused}
    with pytest.raises(TrajectoryError, match="`refused`"):
        Trajectory.from_json(json.dumps(written))
