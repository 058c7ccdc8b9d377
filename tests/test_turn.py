import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnleaf.core import Replay, TrajectoryError, Turn, TurnTimings, WeightSpan


def turn(**fields: object) -> Turn:
    return Turn(
        **{
            "id": "a",
            "index": 0,
            "parent": None,
            "keep": 0,
            "prompt": [1, 2],
            "output": [3],
            "logprobs": [-0.5],
            "finish_reason": "stop",
            **fields,
        }
    )


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_arrays_of_any_integer_type_become_int32(dtype: type[np.integer]) -> None:
    made = turn(prompt=np.array([1, 2], dtype=dtype), output=np.array([3], dtype=dtype))
    assert made.prompt.dtype == made.output.dtype == np.int32
    assert made == turn()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_log_probabilities_of_any_numbers_become_float32(dtype: type[np.number]) -> None:
    made = turn(logprobs=np.array([-1], dtype=dtype))
    assert made.logprobs.dtype == np.float32
    assert made.logprobs.tolist() == [-1.0]


def test_empty_lists_are_empty_arrays_of_the_right_type() -> None:
    made = turn(prompt=[], output=[], logprobs=[])
    assert (made.prompt.dtype, made.output.dtype) == (np.int32, np.int32)
    assert made.logprobs.dtype == np.float32
    assert made.end == 0


def test_arrays_are_copied_and_read_only() -> None:
    history = np.arange(100, dtype=np.int32)
    made = turn(prompt=history[10:20], replay=Replay(top_p_ids=history[:1], top_p_offsets=[0, 1]))
    history[:] = 0
    assert made.prompt.tolist() == list(range(10, 20))
    for array in (made.prompt, made.output, made.logprobs, made.replay.top_p_ids):
        assert array.base is None
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_end_counts_kept_prompt_and_output() -> None:
    assert turn(parent="p", keep=7).end == 10


def test_numbers_from_numpy_become_plain_ones() -> None:
    made = turn(index=np.int64(3), parent="p", keep=np.int32(2), cached_tokens=np.uint8(1))
    assert [type(value) for value in (made.index, made.keep, made.cached_tokens)] == [int] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index": -1}, "turn 'a': index is -1, but counts from 0"),
        ({"keep": 1}, "turn 'a': keep is 1, which its parent None cannot have"),
        ({"parent": "p", "keep": -1}, "turn 'a': keep is -1, which its parent 'p' cannot have"),
        ({"prompt": [[1, 2]]}, "turn 'a': prompt has 2 dimensions instead of one"),
        ({"prompt": 5}, "turn 'a': prompt has 0 dimensions instead of one"),
        ({"output": [[3]]}, "turn 'a': output has 2 dimensions instead of one"),
        ({"logprobs": [[-0.5]]}, "turn 'a': logprobs has 2 dimensions instead of one"),
        ({"logprobs": []}, "turn 'a': 1 output tokens but 0 log-probabilities"),
        ({"output": [3, 4]}, "turn 'a': 2 output tokens but 1 log-probabilities"),
        ({"logprobs": [float("nan")]}, "turn 'a': a log-probability is not finite"),
        ({"logprobs": [float("-inf")]}, "turn 'a': a log-probability is not finite"),
        ({"logprobs": [-1e300]}, "turn 'a': a log-probability is not finite"),
        ({"finish_reason": "tool_calls"}, "turn 'a': finish_reason 'tool_calls' is not one of"),
        ({"finish_reason": None}, "turn 'a': finish_reason None is not one of"),
        ({"excluded": "bored"}, "turn 'a': excluded 'bored' is not one of"),
        (
            {"weight_versions": [WeightSpan("v1", 2)]},
            "turn 'a': weight_versions count 2 tokens, but 1 were sampled",
        ),
        (
            {"replay": Replay(routed_experts=np.zeros((3, 1, 1), int))},
            r"turn 'a': routed_experts has shape \(3, 1, 1\), but needs \(2, layers, top_k\)",
        ),
        ({"replay": Replay(routed_experts=[1, 2])}, r"routed_experts has shape \(2,\)"),
        ({"replay": Replay(top_p_ids=[1])}, "top_p_ids and top_p_offsets come together"),
        ({"replay": Replay(top_p_offsets=[0, 1])}, "top_p_ids and top_p_offsets come together"),
        (
            {"replay": Replay(top_p_ids=[1], top_p_offsets=[0, 1, 1])},
            r"top_p_offsets has shape \(3,\), but needs \(2,\)",
        ),
        ({"replay": Replay(top_p_ids=[[1]], top_p_offsets=[0, 1])}, "top_p_ids has 2 dimensions"),
        (
            {"replay": Replay(top_p_ids=[1], top_p_offsets=[0, 2])},
            "top_p_offsets do not run from 0 to the number of top_p_ids",
        ),
        ({"replay": Replay(top_p_ids=[1], top_p_offsets=[1, 1])}, "top_p_offsets do not run"),
        (
            {
                "output": [3, 4],
                "logprobs": [-1, -1],
                "replay": Replay(top_p_ids=[1], top_p_offsets=[0, 2**62, 1]),
            },
            "top_p_offsets do not run",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(TrajectoryError, match=message):
        turn(**fields)


@pytest.mark.parametrize(
    "ids", [[-1], [2**31], np.array([2**40 + 5]), [1.5], ["1"], [None], [True], [2**70], [-(2**70)]]
)
@pytest.mark.parametrize("field", ["prompt", "output"])
def test_what_is_no_token_id_is_refused_not_wrapped(field: str, ids: object) -> None:
    with pytest.raises(TrajectoryError, match="token ids must be integers from 0 to 2147483647"):
        turn(**{field: ids})


@pytest.mark.parametrize("logprobs", [["-0.5"], [None], [True], [{}]])
def test_what_is_no_number_is_no_log_probability(logprobs: object) -> None:
    with pytest.raises(TrajectoryError, match="log-probabilities must be numbers"):
        turn(logprobs=logprobs)


@pytest.mark.parametrize("values", [[-1], [0.5], ["1"], [None], [2**63], [2**64]])
def test_what_is_no_natural_number_is_no_replay_data(values: object) -> None:
    with pytest.raises(TrajectoryError, match="replay data must be integers from 0 to"):
        Replay(top_p_ids=values)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1))
def test_replay_data_is_held_in_the_smallest_type_that_fits(values: list[int]) -> None:
    held = Replay(top_p_ids=values).top_p_ids
    assert held.tolist() == values
    assert held.dtype.kind == "u"
    assert held.itemsize == 1 or max(values) >= 2 ** (4 * held.itemsize)


def test_empty_replay_data() -> None:
    replay = Replay(top_p_ids=[], top_p_offsets=[0])
    assert replay.top_p_ids.dtype == np.uint8
    assert turn(output=[], logprobs=[], replay=replay).replay == replay


@pytest.mark.parametrize(
    ("keep", "prompt", "rows"),
    [(0, [], 0), (0, [1], 1), (1, [1], 2), (5, [1], 2), (5, [], 1)],
)
def test_routed_experts_begin_before_the_first_new_token_and_end_before_the_last(
    keep: int, prompt: list[int], rows: int
) -> None:
    experts = np.zeros((rows, 2, 2), dtype=int)
    made = turn(
        parent="p" if keep else None,
        keep=keep,
        prompt=prompt,
        replay=Replay(routed_experts=experts),
    )
    assert len(made.replay.routed_experts) == rows == made.end - 1 - max(keep - 1, 0)


def test_a_negative_weight_span_is_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        WeightSpan("v1", -1)


full = turn(
    weight_versions=[WeightSpan("v1", 1)],
    cached_tokens=1,
    timings=TurnTimings(started=1.0, engine=2.0, total=3.0),
    replay=Replay(routed_experts=np.ones((2, 1, 1), int), top_p_ids=[1, 2], top_p_offsets=[0, 2]),
)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "b"},
        {"index": 1},
        {"parent": "p"},
        {"prompt": [1, 3]},
        {"output": [4]},
        {"logprobs": [-0.25]},
        {"finish_reason": "length"},
        {"weight_versions": ()},
        {"cached_tokens": 0},
        {"timings": TurnTimings()},
        {"replay": None},
        {"replay": attrs.evolve(full.replay, routed_experts=None)},
        {"replay": attrs.evolve(full.replay, top_p_ids=[1, 3])},
        {"replay": attrs.evolve(full.replay, top_p_ids=None, top_p_offsets=None)},
        {"excluded": "untrained"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_turns_are_equal_when_every_field_is(change: dict[str, object]) -> None:
    changed = attrs.evolve(full, **change)
    assert changed != full
    assert full != changed
    same = attrs.evolve(changed, **{name: getattr(full, name) for name in change})
    assert same == full
    assert hash(same) == hash(full)


def test_turns_and_replay_data_equal_nothing_else() -> None:
    assert full != "a"
    assert full.replay != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(full.replay)


def test_turns_cannot_be_changed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        full.keep = 3
