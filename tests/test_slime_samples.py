"""From a rollout to slime's samples, position by position."""

import copy
import dataclasses
import json
import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.slime_host import rollout_manager, slime_args
from tests.strategies import LAYERS, TOP_K, Recorded, recorded, recorded_with_replay
from turnleaf.adapters.slime import RolloutSamples
from turnleaf.adapters.slime._samples import (
    NO_REPLAYS,
    SAMPLED,
    Outcome,
    Replays,
    clean_copy,
    requeues_of,
    samples_of,
)
from turnleaf.core import (
    AgentError,
    GatewayError,
    Replay,
    Rollout,
    RolloutAborted,
    RolloutTimeout,
    RolloutTimings,
    Speculation,
    Trajectory,
    Turn,
    TurnTimings,
    WeightSpan,
)

# isort: split
from slime.utils.types import Sample

pytestmark = pytest.mark.slime

ALL_REPLAYS = Replays(top_p=True, routed_experts=(LAYERS, TOP_K))
HOOKS = {
    "custom_reward_post_process_path": "turnleaf.adapters.slime.normalize_episode_rewards",
    "n_samples_per_prompt": 2,
}


def turn(name: str, index: int, parent: str | None = None, keep: int = 0, **fields: Any) -> Turn:
    fields = {"prompt": [], "output": [], "finish_reason": "stop", **fields}
    fields.setdefault("logprobs", [-1.0] * len(fields["output"]))
    return Turn(id=name, index=index, parent=parent, keep=keep, **fields)


def incoming(**fields: Any) -> Sample:
    """A sample as slime's data source makes it."""
    own = {"payload": {"question": 1}, "source_name": "rows"}
    return Sample(
        **{"group_index": 3, "index": 7, "prompt": "a prompt", "label": "42", "metadata": own}
        | fields
    )


def outcome(trajectory: Trajectory | Sequence[Turn] = (), **fields: Any) -> Outcome:
    if not isinstance(trajectory, Trajectory):
        trajectory = Trajectory(trajectory)
    rollout: dict[str, Any] = {
        "name": "train-7",
        "trajectory": trajectory,
        "status": "completed",
        "error": None,
        "timings": RolloutTimings(session=10.0),
    }
    given = {name: fields.pop(name) for name in [*fields] if name in rollout}
    return Outcome(
        **{
            "rollout": Rollout(**rollout | given),
            "leaves": trajectory.leaves(),
            "reward": 1.0,
            "removed": None,
            "session_id": "session-7",
            "requeues": 0,
            **fields,
        }
    )


def text_of(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def made(of: Outcome, sample: Any = None, replays: Replays = NO_REPLAYS) -> RolloutSamples:
    clean = clean_copy(incoming() if sample is None else sample)
    return samples_of(of, clean, replays, text_of)


def replay_of(turn: Turn) -> Any:
    return turn.replay


def about(sample: Any) -> dict[str, Any]:
    told: dict[str, Any] = sample.metadata["turnleaf"]
    return told


ONE_TURN = (turn("a", 0, prompt=[1, 2], output=[3, 4]),)
FORKED = (
    turn("a", 0, prompt=[1], output=[2, 3]),
    turn("b", 1, "a", 3, prompt=[4], output=[5]),
    turn("c", 2, "a", 1, prompt=[6], output=[7, 8]),
)
"""Two leaves: [1 2 3 4 5], where all but 1 and 4 are sampled, and [1 6 7 8]."""


@given(recorded)
def test_every_sampled_token_lands_once_beside_its_own_log_probability(recorded: Recorded) -> None:
    trajectory = recorded.trajectory
    turns = {turn.id: turn for turn in trajectory.turns}
    samples = made(outcome(trajectory))
    assume(trajectory.leaves())
    trained: Counter[str] = Counter()
    for sample, leaf in zip(samples, trajectory.leaves(), strict=True):
        assert sample.tokens == leaf.tokens.tolist()
        start = len(sample.tokens) - sample.response_length
        mask = [0] * len(sample.tokens)
        logprobs = [0.0] * len(sample.tokens)
        for name in about(sample)["trained_turns"]:
            own = turns[name]
            trained[name] += 1
            for position, (token, logprob) in enumerate(
                zip(own.output.tolist(), own.logprobs.tolist(), strict=True),
                start=own.end - len(own.output),
            ):
                assert sample.tokens[position] == token
                mask[position], logprobs[position] = 1, logprob
        # The prompt ends where training begins: nothing trained is cut off, nothing is wasted.
        assert sum(mask[:start]) == 0
        assert sample.loss_mask == mask[start:]
        assert sample.loss_mask[0] == 1
        assert sample.rollout_log_probs == logprobs[start:]
        assert sample.response == text_of(sample.tokens[start:])
    # Log-probabilities tell every sampled token from all others.
    assert trained == {t.id: 1 for t in trajectory.turns if t.excluded is None and len(t.output)}


@given(recorded)
def test_samples_hold_plain_numbers_and_fit_slimes_own_lengths(recorded: Recorded) -> None:
    for sample in made(outcome(recorded.trajectory)):
        sample._validate_response_metadata_lengths()
        assert 1 <= sample.response_length <= len(sample.tokens)
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert {type(token) for token in sample.tokens} == {int}
        assert {type(trained) for trained in sample.loss_mask} == {int}
        assert {type(logprob) for logprob in sample.rollout_log_probs} == {float}
        # slime writes samples to files and sends them between processes.
        assert json.loads(json.dumps(sample.to_dict()))["index"] == 7
        assert pickle.loads(pickle.dumps(sample)) == sample


@given(recorded_with_replay)
def test_replay_data_stands_at_its_tokens(recorded: Recorded) -> None:
    trajectory = recorded.trajectory
    turns = {turn.id: turn for turn in trajectory.turns}
    samples = made(outcome(trajectory), replays=ALL_REPLAYS)
    assume(trajectory.leaves())
    for sample in samples:
        sample._validate_response_metadata_lengths()
        start = len(sample.tokens) - sample.response_length
        ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        experts = sample.rollout_routed_experts
        assert (ids.dtype, offsets.dtype, experts.dtype) == (np.int32, np.int32, np.int32)
        assert len(offsets) == sample.response_length + 1
        assert (offsets[0], offsets[-1]) == (0, len(ids))
        assert experts.shape == (len(sample.tokens) - 1, LAYERS, TOP_K)
        spans = [ids[a:b].tolist() for a, b in pairwise(offsets)]
        for span, trained in zip(spans, sample.loss_mask, strict=True):
            assert trained or span == []
        for name in about(sample)["trained_turns"]:
            own, replay = turns[name], replay_of(turns[name])
            kept, rows = replay.top_p_ids, replay.routed_experts
            ends = replay.top_p_offsets.astype(int).tolist()
            first = own.end - len(own.output)
            for number, (begin, end) in enumerate(pairwise(ends)):
                assert spans[first + number - start] == kept[begin:end].tolist()
            # Row i was routed at token i, from which token i + 1 was sampled.
            upto = own.end - 1
            count = min(len(own.output), len(rows))
            assert experts[upto - count : upto].tolist() == rows[len(rows) - count :].tolist()


@given(st.lists(st.tuples(recorded_with_replay, st.booleans()), min_size=1, max_size=3))
def test_slime_converts_a_batch_of_leaves_and_placeholders(
    rollouts: list[tuple[Recorded, bool]],
) -> None:
    args = slime_args(
        **HOOKS,
        rollout_top_p=0.9,
        use_rollout_routing_replay=True,
        num_layers=LAYERS,
        moe_router_topk=TOP_K,
    )
    group = [
        made(
            outcome(
                grown.trajectory,
                leaves=[] if aborted else grown.trajectory.leaves(),
                removed="aborted" if aborted else None,
            ),
            incoming(index=number),
            ALL_REPLAYS,
        )
        for number, (grown, aborted) in enumerate(rollouts)
    ]
    flat = [sample for member in group for sample in member]
    # A single row of nothing but zeros may be drawn, which slime refuses; not what is asked here.
    assume(all(sample.rollout_routed_experts.any(axis=(0, 2)).all() for sample in flat))
    data = rollout_manager(args)._convert_samples_to_train_data(flat)
    assert data["rollout_ids"] == [
        number for number, member in enumerate(group) for _ in range(len(member))
    ]
    assert [len(mask) for mask in data["loss_masks"]] == data["response_lengths"]
    trained = Counter(dict.fromkeys(range(len(group)), 0))
    for rollout_id, mask in zip(data["rollout_ids"], data["loss_masks"], strict=True):
        trained[rollout_id] += sum(mask)
    for number, (grown, aborted) in enumerate(rollouts):
        sampled = sum(len(t.output) for t in grown.trajectory.turns if t.excluded is None)
        assert trained[number] == (0 if aborted else sampled)


def test_what_a_client_dropped_is_context_in_the_later_leaf() -> None:
    trajectory = Trajectory([turn("a", 0, prompt=[7], output=[50, 51], logprobs=[-0.25, -0.5])])
    parent, keep = trajectory.locate(np.array([7, 51, 8], dtype=np.int32))
    trajectory.add(
        turn("b", 1, parent, keep, prompt=[7, 51, 8][keep:], output=[60], logprobs=[-0.125])
    )
    first, second = made(outcome(trajectory))
    assert (first.tokens, first.loss_mask) == ([7, 50, 51], [1, 1])
    assert first.rollout_log_probs == [-0.25, -0.5]
    # 51 was sampled after another prefix.
    assert (second.tokens, second.loss_mask) == ([7, 51, 8, 60], [1])
    assert second.rollout_log_probs == [-0.125]


def test_context_between_two_trained_turns_is_masked_with_a_log_probability_of_zero() -> None:
    (sample,) = made(outcome(FORKED[:2]))
    assert sample.tokens == [1, 2, 3, 4, 5]
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-1.0, -1.0, 0.0, -1.0]
    assert sample.response == "2 3 4 5"


def test_leaves_of_a_rollout_share_what_is_the_rollouts() -> None:
    source = incoming(custom_rm_path="a.b", train_metadata={"loss": "x"}, session_id="s")
    samples = made(outcome(FORKED, reward=0.5), source)
    assert type(samples) is RolloutSamples
    assert [sample.tokens for sample in samples] == [[1, 2, 3, 4, 5], [1, 6, 7, 8]]
    for name in ("group_index", "index", "prompt", "label", "custom_rm_path", "session_id"):
        assert [getattr(sample, name) for sample in samples] == [getattr(source, name)] * 2
    assert [sample.train_metadata for sample in samples] == [{"loss": "x"}] * 2
    assert [sample.rollout_id for sample in samples] == [7, 7]
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert [sample.status for sample in samples] == [Sample.Status.COMPLETED] * 2
    assert [sample.remove_sample for sample in samples] == [False, False]
    assert [sample.non_generation_time for sample in samples] == [10.0, 10.0]


def test_leaves_share_nothing_that_one_of_them_may_change() -> None:
    one, other = made(outcome(FORKED, reward={"score": 0.5}), incoming())
    one.reward["score"] = 9.0
    one.metadata["raw_reward"] = 9.0
    about(one)["status"] = "changed"
    one.prefix_cache_info.cached_tokens += 5
    one.spec_info.spec_verify_ct += 5
    one.weight_versions.append("changed")
    one.loss_mask[0] = 0
    assert other.reward == {"score": 0.5}
    assert "raw_reward" not in other.metadata
    assert about(other)["status"] == "completed"
    assert other.prefix_cache_info.cached_tokens == other.spec_info.spec_verify_ct == 0
    assert other.weight_versions == []
    assert other.loss_mask == [1, 1]


@pytest.mark.parametrize(("given", "expected"), [(None, 7), (0, 0), (40, 40)])
def test_the_data_sources_rollout_id_is_kept(given: int | None, expected: int) -> None:
    for of in (outcome(FORKED), outcome()):
        samples = made(of, incoming(rollout_id=given))
        assert {sample.rollout_id for sample in samples} == {expected}


def test_metadata_says_what_became_of_the_rollout() -> None:
    source = incoming()
    error = RolloutTimeout("train-7: cut off after 5 s")
    first, second = made(outcome(FORKED, status="timed_out", error=error, requeues=1), source)
    common = {
        "session_id": "session-7",
        "status": "timed_out",
        "error": "train-7: cut off after 5 s",
        "cause": "timeout",
        "refused": {},
        "removed": None,
        "requeues": 1,
        "leaves": 2,
    }
    assert about(first) == common | {"leaf": 0, "turns": ["a", "b"], "trained_turns": ["a", "b"]}
    assert about(second) == common | {"leaf": 1, "turns": ["a", "c"], "trained_turns": ["c"]}
    assert first.metadata == {**source.metadata, "turnleaf": about(first)}
    assert "turnleaf" not in source.metadata
    assert json.loads(json.dumps(about(second))) == about(second)


@pytest.mark.parametrize("metadata", [None, {}, [], ["turnleaf"], "text", 5])
def test_rows_without_metadata_get_some(metadata: Any) -> None:
    (sample,) = made(outcome(ONE_TURN), incoming(metadata=metadata))
    assert [*sample.metadata] == ["turnleaf"]


@pytest.mark.parametrize(
    ("status", "error", "finish_reason", "expected"),
    [
        ("completed", None, "stop", "COMPLETED"),
        ("truncated", None, "length", "TRUNCATED"),
        ("failed", AgentError("x"), "stop", "COMPLETED"),
        ("failed", AgentError("x"), "length", "TRUNCATED"),
        ("failed", GatewayError("x"), "abort", "COMPLETED"),
        ("timed_out", RolloutTimeout("x"), "stop", "COMPLETED"),
        ("timed_out", RolloutTimeout("x"), "length", "TRUNCATED"),
        ("aborted", RolloutAborted("x"), "length", "ABORTED"),
    ],
)
def test_the_status_of_a_rollout_with_turns(
    status: str, error: Exception | None, finish_reason: Any, expected: str
) -> None:
    earlier = turn("a", 0, prompt=[1], output=[2], finish_reason="length")
    last = turn("b", 1, "a", 2, prompt=[3], output=[4], finish_reason=finish_reason)
    excluded = turn("x", 2, "b", 4, output=[5], finish_reason="length", excluded="undelivered")
    of = outcome([earlier, last, excluded], status=status, error=error)
    assert [sample.status for sample in made(of)] == [Sample.Status[expected]]


def test_a_truncated_rollout_is_so_in_every_leaf() -> None:
    cut = attrs.evolve(FORKED[2], finish_reason="length")
    samples = made(outcome([*FORKED[:2], cut], status="truncated"))
    assert {sample.status for sample in samples} == {Sample.Status.TRUNCATED}


@pytest.mark.parametrize("replays", [NO_REPLAYS, ALL_REPLAYS, Replays(True, (1, 1))])
def test_without_a_leaf_a_placeholder_keeps_the_batchs_size(replays: Replays) -> None:
    of = outcome(status="failed", error=AgentError("train-7: no turn"), removed="no turn")
    (sample,) = made(attrs.evolve(of, reward=0.0), replays=replays)
    assert (sample.tokens, sample.response_length, sample.response) == ([0, 0], 1, "")
    assert (sample.loss_mask, sample.rollout_log_probs) == ([0], [0.0])
    assert (sample.reward, sample.remove_sample) == (0.0, True)
    assert sample.status is Sample.Status.ABORTED
    assert (sample.rollout_id, sample.index, sample.group_index) == (7, 7, 3)
    assert about(sample) == {
        "session_id": "session-7",
        "status": "failed",
        "error": "train-7: no turn",
        "cause": "agent",
        "refused": {},
        "removed": "no turn",
        "requeues": 0,
        "leaf": 0,
        "leaves": 0,
        "turns": [],
        "trained_turns": [],
    }
    sample._validate_response_metadata_lengths()
    if replays.top_p:
        assert sample.rollout_top_p_token_ids.tolist() == []
        assert sample.rollout_top_p_token_offsets.tolist() == [0, 0]
    else:
        assert sample.rollout_top_p_token_ids is sample.rollout_top_p_token_offsets is None
    if replays.routed_experts is None:
        assert sample.rollout_routed_experts is None
    else:
        assert sample.rollout_routed_experts.shape == (1, *replays.routed_experts)
        assert sample.rollout_routed_experts.dtype == np.int32


@pytest.mark.parametrize(("layers", "top_k"), [(1, 1), (1, 2), (48, 8)])
def test_slime_takes_placeholders_beside_whole_rollouts(layers: int, top_k: int) -> None:
    replay = Replay(
        routed_experts=np.ones((3, layers, top_k), dtype=int),
        top_p_ids=[3, 9, 4],
        top_p_offsets=[0, 2, 3],
    )
    whole = outcome([attrs.evolve(ONE_TURN[0], replay=replay)])
    args = slime_args(
        **HOOKS,
        rollout_top_p=0.9,
        use_rollout_routing_replay=True,
        num_layers=layers,
        moe_router_topk=top_k,
    )
    replays = Replays(top_p=True, routed_experts=(layers, top_k))
    placeholder = outcome(removed="aborted", reward=0.0)
    for outcomes in ([placeholder, whole], [whole, placeholder]):
        flat = [
            sample
            for number, of in enumerate(outcomes)
            for sample in made(of, incoming(index=number), replays)
        ]
        data = rollout_manager(args)._convert_samples_to_train_data(flat)
        assert sorted(map(sum, data["loss_masks"])) == [0, 2]
        assert data["rewards"] == [0.0, 0.0]
        assert data["rollout_ids"] == [0, 1]


@pytest.mark.parametrize(
    ("replays", "missing"),
    [
        (Replays(top_p=True, routed_experts=None), "top-p"),
        (Replays(top_p=False, routed_experts=(LAYERS, TOP_K)), "routed experts"),
    ],
)
def test_replay_data_that_was_not_recorded_is_an_error_and_not_a_guess(
    replays: Replays, missing: str
) -> None:
    with pytest.raises(RuntimeError, match=rf"rollout 7: .*\['a'\].*{missing}"):
        made(outcome(ONE_TURN), replays=replays)


def test_replay_data_that_nobody_asked_for_stays_out() -> None:
    replay = Replay(
        routed_experts=np.ones((3, LAYERS, TOP_K), dtype=int),
        top_p_ids=[3, 9, 4],
        top_p_offsets=[0, 2, 3],
    )
    (sample,) = made(outcome([attrs.evolve(ONE_TURN[0], replay=replay)]))
    # The first sample of a batch decides what all must have.
    assert sample.rollout_top_p_token_ids is sample.rollout_top_p_token_offsets is None
    assert sample.rollout_routed_experts is None


def test_counts_are_of_the_turns_that_a_leaf_trains() -> None:
    first, second = made(
        outcome(
            [
                attrs.evolve(
                    FORKED[0],
                    cached_tokens=1,
                    speculation=Speculation(accepted=1, drafted=4, verifications=1),
                    weight_versions=[WeightSpan("one", 1), WeightSpan("two", 1)],
                ),
                attrs.evolve(
                    FORKED[1],
                    cached_tokens=3,
                    speculation=Speculation(accepted=0, drafted=2, verifications=1),
                    weight_versions=[WeightSpan("two", 1)],
                ),
                attrs.evolve(FORKED[2], weight_versions=[WeightSpan("three", 2)]),
            ]
        )
    )
    # Full prompts of 1 and 4 tokens.
    assert first.prefix_cache_info == Sample.PrefixCacheInfo(4, 5)
    assert first.spec_info == Sample.SpecInfo(
        spec_accept_token_num=1,
        spec_draft_token_num=6,
        spec_verify_ct=2,
        completion_token_num=3,
    )
    assert first.weight_versions == ["one", "two", "two"]
    # The turn that both leaves hold is counted once.
    assert second.prefix_cache_info == Sample.PrefixCacheInfo(0, 2)
    assert second.spec_info == Sample.SpecInfo()
    assert second.weight_versions == ["three"]


@pytest.mark.parametrize(
    ("session", "spans", "expected"),
    [
        (10.0, [], 10.0),
        (10.0, [(0, 2), (3, 2)], 6.0),
        (10.0, [(0, 5), (1, 1), (4, 3)], 3.0),
        (10.0, [(4, 3), (0, 5), (1, 1)], 3.0),
        (10.0, [(0, 2), (2, 2)], 6.0),
        (10.0, [(1, 2), (1, 2)], 8.0),
        # A call that is still under way when the rollout is cut off.
        (10.0, [(0, 15)], 0.0),
        (0.0, [(0, 1)], 0.0),
    ],
)
def test_the_time_outside_generation_is_that_without_a_turn_under_way(
    session: float, spans: list[tuple[float, float]], expected: float
) -> None:
    turns = [
        turn(f"t{i}", i, prompt=[1], output=[i + 2], timings=TurnTimings(1e9 + start, 0.0, total))
        for i, (start, total) in enumerate(spans)
    ]
    of = outcome(turns, timings=RolloutTimings(waited=99.0, session=session, closing=99.0))
    samples = made(of)
    assert len(samples) == max(len(spans), 1)
    assert {sample.non_generation_time for sample in samples} == {expected}


def test_excluded_turns_take_time_too() -> None:
    turns = [attrs.evolve(FORKED[0], excluded="undelivered", timings=TurnTimings(5.0, 1.0, 4.0))]
    assert made(outcome(turns))[0].non_generation_time == 6.0


def test_only_the_final_leaf_keeps_slimes_trace() -> None:
    source = incoming()
    source.trace = {"events": []}
    first, final = made(outcome(FORKED), source)
    # slime writes the end of its span into the sample that it handed in.
    assert final.trace is source.trace
    assert not hasattr(first, "trace")


FROM_DATA_SOURCE = {
    "group_index",
    "index",
    "rollout_id",
    "prompt",
    "multimodal_inputs",
    "multimodal_train_inputs",
    "multimodal_train_input_id",
    "apply_chat_template_kwargs",
    "label",
    "metadata",
    "generate_function_path",
    "custom_rm_path",
    "train_metadata",
    "session_id",
}


def test_every_field_of_slimes_sample_is_the_data_sources_or_the_rollouts() -> None:
    names = {field.name for field in dataclasses.fields(Sample)}
    assert names == FROM_DATA_SOURCE | set(SAMPLED)
    assert not FROM_DATA_SOURCE & set(SAMPLED)


def test_a_clean_copy_has_the_data_sources_fields_and_nothing_of_an_earlier_run() -> None:
    used, fresh = Sample(), Sample()
    for field in dataclasses.fields(Sample):
        setattr(used, field.name, f"used {field.name}")
    used.metadata = {"payload": 1, "turnleaf": {"leaf": 0}}
    used.trace = {"events": [1]}
    before = copy.deepcopy(vars(used))
    clean = clean_copy(used)
    for name in FROM_DATA_SOURCE - {"metadata"}:
        assert getattr(clean, name) == f"used {name}"
    for name in SAMPLED:
        assert getattr(clean, name) == getattr(fresh, name), name
    assert clean.metadata == {"payload": 1}
    assert clean.trace is used.trace
    assert vars(used) == before
    again = clean_copy(used)
    assert again.tokens is not clean.tokens
    assert again.prefix_cache_info is not clean.prefix_cache_info


def test_samples_are_of_the_incoming_samples_own_type() -> None:
    @dataclasses.dataclass
    class OwnSample(Sample):
        own: str = "default"

    source = OwnSample(index=7, own="mine")
    source.attached = "too"
    for of in (outcome(FORKED), outcome()):
        for sample in made(of, source):
            assert type(sample) is OwnSample
            assert (sample.own, sample.attached) == ("mine", "too")


def test_a_rollout_that_was_put_back_starts_clean() -> None:
    source = incoming(session_id="s")
    before = made(outcome(FORKED, status="aborted", error=RolloutAborted("x")), source)
    for put_back in (before, copy.deepcopy(before), pickle.loads(pickle.dumps(before))):
        # As slime marks what an older policy sampled, and what it puts back.
        put_back.loss_mask = [0] * put_back.response_length
        put_back.metadata["start_rollout_id"] = 3
        put_back.status = Sample.Status.ABORTED
        clean = clean_copy(put_back)
        assert type(clean) is Sample
        assert clean.metadata == {**source.metadata, "start_rollout_id": 3}
        # The rollout has its id since; it is the index's.
        assert clean == dataclasses.replace(source, metadata=clean.metadata, rollout_id=7)


def test_a_rollout_without_a_turn_is_put_back_twice_and_then_failed() -> None:
    sample: Any = incoming()
    seen = []
    for _ in range(4):
        requeues = requeues_of(sample)
        of = outcome(status="failed", error=AgentError("x"), removed="no turn", requeues=requeues)
        sample = made(of, sample)
        seen.append((requeues, sample.status.name, about(sample)["requeues"]))
    assert seen == [(0, "ABORTED", 0), (1, "ABORTED", 1), (2, "FAILED", 2), (3, "FAILED", 3)]


def test_slimes_own_aborts_do_not_count_as_failures() -> None:
    sample: Any = incoming()
    assert requeues_of(sample) == requeues_of(incoming(metadata=None)) == 0
    aborted: dict[str, Any] = {
        "status": "aborted",
        "error": RolloutAborted("x"),
        "removed": "aborted",
    }
    failed: dict[str, Any] = {"status": "failed", "error": AgentError("x"), "removed": "no turn"}
    counted = []
    for ending in (aborted, aborted, aborted, failed, aborted, aborted, failed, aborted):
        sample = made(outcome(leaves=[], requeues=requeues_of(sample), **ending), sample)
        counted.append(requeues_of(sample))
        assert sample.status is Sample.Status.ABORTED
        # Looking twice changes nothing; nor does slime, which may hand it out without running it.
        assert requeues_of(copy.deepcopy(sample)) == counted[-1]
    assert counted == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_rollout_with_turns_was_not_put_back_for_want_of_them() -> None:
    samples = made(outcome(FORKED, status="failed", error=AgentError("x"), requeues=1))
    assert requeues_of(samples) == 1


def test_what_a_row_says_under_our_name_is_not_ours() -> None:
    row = incoming(metadata={"payload": 1, "turnleaf": {"requeues": 9, "leaves": 0}})
    assert requeues_of(row) == 0
    assert clean_copy(row).metadata == {"payload": 1}
    assert about(made(outcome(ONE_TURN), row)[0])["requeues"] == 0
