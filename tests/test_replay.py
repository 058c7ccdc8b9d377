"""Replay data through the whole path: engine, gateway, trajectory, leaves, against the ledger."""

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import openai
import pytest

from tests.gateway_stack import openai_client, running_gateway, tokenizer
from tests.waiting import until
from turnleaf.core import Key, Speculation, Trajectory
from turnleaf.gateway.engines import _continuing

pytestmark = [pytest.mark.anyio, pytest.mark.openai_client]

USER = {"role": "user", "content": "What is 17 * 23?"}
MORE = {"role": "user", "content": "Thanks"}
SHAPE = (2, 3)
TOP_P: dict[str, Any] = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
THOUGHTFUL = "<think>\nEasy.\n</think>\n\nIt is 391."


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    reply = await client.chat.completions.create(model="model", messages=messages, **more)
    message: dict[str, Any] = reply.choices[0].message.model_dump()
    return message


def check_leaves(trajectory: Trajectory) -> None:
    for leaf in trajectory.leaves():
        assert leaf.routed_experts is not None
        assert leaf.routed_experts.shape == (len(leaf.tokens) - 1, *SHAPE)
        assert leaf.routed_experts.all()
        assert leaf.top_p_ids is not None
        assert leaf.top_p_offsets is not None
        kept = np.diff(leaf.top_p_offsets)
        assert (kept[leaf.loss_mask] > 0).all()
        assert not kept[~leaf.loss_mask].any()
        for position in np.flatnonzero(leaf.loss_mask):
            begin, end = leaf.top_p_offsets[position : position + 2]
            assert leaf.tokens[position] in leaf.top_p_ids[begin:end]


def rows(trajectory: Trajectory) -> list[int]:
    replays = [turn.replay for turn in trajectory.turns]
    return [
        -1 if replay is None or replay.routed_experts is None else len(replay.routed_experts)
        for replay in replays
    ]


async def test_a_conversation_stores_only_what_is_new() -> None:
    script = [{"text": text, "speculation": [n, 8, 2]} for n, text in enumerate("abc")]
    async with running_gateway(script, routed_experts_shape=SHAPE) as stack:
        key = await stack.open(**TOP_P)
        messages: list[Any] = [USER]
        async with openai_client(key) as client:
            for _ in script:
                messages += [await ask(client, messages), MORE]
        trajectory = await stack.close(key)
    ends = [0, *(turn.end for turn in trajectory.turns)]
    assert ends[1:] == sorted(ends[1:])
    assert rows(trajectory) == [end - 1 - max(before - 1, 0) for before, end in pairwise(ends)]
    assert [call.experts_from for call in stack.engine.calls] == [0, ends[1] - 1, ends[2] - 1]
    assert [turn.speculation for turn in trajectory.turns] == [
        Speculation(n, 8, 2) for n in range(3)
    ]
    assert len(trajectory.leaves()) == 1
    check_leaves(trajectory)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


async def test_forks_rerendered_turns_and_siblings_have_their_own_rows() -> None:
    script = [{"text": text} for text in (THOUGHTFUL, "<think>\n\n</think>\n\nBye", "Other", "Odd")]
    async with running_gateway(script, routed_experts_shape=SHAPE) as stack:
        key = await stack.open(**TOP_P)
        async with openai_client(key) as client:
            answer = await ask(client, [USER])
            # The template drops the thinking here, so the past is rendered again.
            await ask(client, [USER, {"role": "assistant", "content": answer["content"]}, MORE])
            await ask(client, [USER])  # a second sample of the first prompt
            await ask(client, [{"role": "user", "content": "What is 17 + 4?"}])
        trajectory = await stack.close(key)
    first, again, sibling, edited = trajectory.turns
    assert again.parent == first.id
    assert 0 < again.keep < first.end
    assert len(trajectory.leaves()) == 4
    assert all(turn.keep > 0 for turn in (sibling, edited))
    check_leaves(trajectory)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine interrupts goes on without a pause."""
    monkeypatch.setattr(_continuing, "PAUSE", 0.0)


async def test_turns_that_nobody_trains_are_context_with_their_rows() -> None:
    script: list[Any] = [
        {"text": "judged"},
        {"text": "too late", "hang": True, "abort_after": 2},
        {"text": "half", "finish": "abort"},
        {"ids": [], "finish": "abort"},
        {"text": "trained"},
    ]
    async with running_gateway(script, routed_experts_shape=SHAPE) as stack:
        key = await stack.open(**TOP_P)
        async with openai_client(key) as client:
            judged = await ask(client, [USER], extra_headers={"x-turnleaf-train": "false"})
            messages = [USER, judged, MORE]
            asking = asyncio.ensure_future(ask(client, messages))
            await until(lambda: len(stack.engine.calls) == 2)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await until(lambda: len(stack.engine.ledger) == 2)
            await ask(client, messages)
        trajectory = await stack.close(key)
    assert [turn.excluded for turn in trajectory.turns] == ["untrained", "undelivered", None]
    # An interrupted call goes on behind what it had sampled, with that much of replay data.
    (leaf,) = trajectory.leaves()
    assert tokenizer().decode(leaf.tokens[leaf.loss_mask].tolist()) == "halftrained<|im_end|>"
    check_leaves(trajectory)


async def test_the_first_call_may_be_aborted_before_its_first_token() -> None:
    script: list[Any] = [{"ids": [], "finish": "abort"}, {"text": "trained"}]
    async with running_gateway(script, routed_experts_shape=SHAPE) as stack:
        key = await stack.open(**TOP_P)
        async with openai_client(key) as client:
            await ask(client, [USER])
        trajectory = await stack.close(key)
    (turn,) = trajectory.turns
    assert tokenizer().decode(turn.output.tolist()) == "trained<|im_end|>"
    check_leaves(trajectory)


async def test_turns_at_the_same_time_store_what_is_new_when_they_end() -> None:
    """The slower of two equal requests asked for all rows, and shares its prompt by then."""
    script = [{"text": "slow", "delay": 0.3}, {"text": "quick"}]
    async with running_gateway(script, routed_experts_shape=SHAPE) as stack:
        key = await stack.open(**TOP_P)
        async with openai_client(key) as client:
            slow = asyncio.ensure_future(ask(client, [USER]))
            await until(lambda: len(stack.engine.calls) == 1)
            await ask(client, [USER])
            await slow
        trajectory = await stack.close(key)
    assert [call.experts_from for call in stack.engine.calls] == [0, 0]
    slow_turn, quick_turn = trajectory.turns
    assert (slow_turn.parent, quick_turn.parent) == (quick_turn.id, None)
    assert rows(trajectory) == [slow_turn.end - slow_turn.keep, quick_turn.end - 1]
    check_leaves(trajectory)


SPOILT: list[dict[str, Any]] = [
    {"top_p_token_ids": None},
    {"top_p_token_offsets": None},
    {"top_p_token_ids": None, "top_p_token_offsets": None},
    {"top_p_token_ids": [1]},
    {"top_p_token_offsets": [0, 1]},
    {"top_p_token_offsets": "AAAA"},
    {"routed_experts": None},
    {"routed_experts": [1, 2, 3]},
    {"routed_experts": "nonsense"},
    {"routed_experts_start_len": 1},
    {"spec_verify_ct": "two"},
]


async def asked_in_vain(key: Key) -> openai.APIStatusError:
    async with openai_client(key) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(client, [USER])
    return failed.value


async def test_replay_data_that_does_not_fit_is_a_502_and_records_nothing() -> None:
    script = [{"text": "x", "spoil": spoil} for spoil in SPOILT]
    async with running_gateway(script, routed_experts_shape=SHAPE) as stack:
        key = await stack.open(**TOP_P)
        for spoil in SPOILT:
            failed = await asked_in_vain(key)
            assert failed.status_code == 502, spoil
            assert next(iter(spoil)).split("_")[0] in failed.message
        assert len(await stack.close(key)) == 0
        assert stack.report().lost["miscounted"] == stack.report().sampled


async def test_an_engine_that_knows_nothing_of_it_is_told_with_what_to_install() -> None:
    async with running_gateway([{"text": "x"}]) as stack:
        # Without a filter the engine has no kept ids to send.
        key = await stack.open(custom_params={"return_top_p_token_ids": True})
        failed = await asked_in_vain(key)
        for word in ("top_p_token_ids", "sglang-top_p.patch", "v0.3.2-9daabcd"):
            assert word in failed.message
        assert len(await stack.close(key)) == 0
        stack.engine.ledger._entries.clear()


async def test_keys_that_ask_for_nothing_record_nothing() -> None:
    async with running_gateway([{"text": "x"}]) as stack:
        key = await stack.open(top_p=0.9, custom_params={"other": 1})
        async with openai_client(key) as client:
            await ask(client, [USER])
        (turn,) = (await stack.close(key)).turns
    assert turn.replay is None
    assert turn.speculation is None
    assert stack.engine.calls[0].experts_from is None
