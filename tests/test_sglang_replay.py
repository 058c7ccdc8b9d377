"""What of a reply's replay data can be trusted, byte by byte."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from turnleaf.core import Speculation
from turnleaf.gateway.engines import (
    EngineReply,
    EngineRequest,
    ReplayMissing,
    UntrustedReply,
    WantedExperts,
    _sglang_replay,
)
from turnleaf.gateway.engines._sglang_wire import decode_reply, encode_request, reply_limit

SHAPE = (2, 2)
ROWS = np.arange(1, 17).reshape(4, *SHAPE)  # of 3 prompt and 2 output tokens, but for the last
KEPT = {"top_p_token_ids": [7, 300, 9], "top_p_token_offsets": [0, 2, 3]}
EXPERTS = {"routed_experts": ROWS.reshape(-1).tolist()}


def encoded(values: Any) -> str:
    return base64.b64encode(np.asarray(values, dtype="<i4").tobytes()).decode()


def body_with(finish: str = "stop", **meta: Any) -> bytes:
    meta_info = {
        "finish_reason": {"type": finish},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
        **meta,
    }
    return json.dumps({"meta_info": meta_info}).encode()


def read(body: bytes, *, start: int | None = None, top_p: bool = False) -> EngineReply:
    experts = None if start is None else WantedExperts(SHAPE, start)
    return decode_reply(body, prompt_length=3, experts=experts, top_p=top_p)


def sent(**more: Any) -> Any:
    request = EngineRequest("t", np.array([1, 2, 3], dtype=np.int32), {}, "r", **more)
    return json.loads(encode_request(request, "t.0"))


def test_experts_are_asked_for_from_where_they_are_new() -> None:
    assert not sent().keys() & {"return_routed_experts", "routed_experts_start_len"}
    body = sent(experts=WantedExperts(SHAPE, 2))
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)


def test_base64_is_read_slice_by_slice_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"routed_experts": encoded(ROWS.reshape(-1))}
    whole = read(body_with(**rows), start=0)
    monkeypatch.setattr(_sglang_replay, "_SLICE", 8)
    assert np.array_equal(read(body_with(**rows), start=0).routed_experts, whole.routed_experts)
    two_ends = encoded([1]) + encoded([1])  # each of which is padded
    with pytest.raises(UntrustedReply, match="padded in its middle"):
        read(body_with(routed_experts=two_ends), start=0)


@pytest.mark.parametrize("form", [list, encoded])
@pytest.mark.parametrize("names", [("top_p_token_ids", "top_p_token_offsets"), None])
def test_kept_ids_and_their_offsets(form: Any, names: tuple[str, str] | None) -> None:
    ids, offsets = names or ("top_p_kept_token_ids", "top_p_kept_token_offsets")
    fields = {ids: form([7, 300, 9]), offsets: form([0, 2, 3])}
    reply = read(body_with(**fields), top_p=True)
    assert reply.top_p_ids is not None
    assert reply.top_p_offsets is not None
    assert reply.top_p_ids.tolist() == [7, 300, 9]
    assert reply.top_p_offsets.tolist() == [0, 2, 3]
    assert reply.routed_experts is None


def test_the_sampled_id_need_not_be_among_those_kept() -> None:
    """The sampling kernel may take an id at the edge, which the trainer then keeps too."""
    kept = {"top_p_token_ids": [8, 8], "top_p_token_offsets": [0, 1, 2]}
    assert read(body_with(**kept), top_p=True).output.tolist() == [7, 9]


@pytest.mark.parametrize("form", [list, encoded])
@pytest.mark.parametrize(
    ("start", "sent", "told"),
    [
        (0, 0, None),
        (2, 2, None),
        (2, 2, 2),
        (2, 0, None),  # the wish was dropped on its way
        (2, 0, 0),
        (2, 1, 1),
    ],
)
def test_experts_from_the_first_needed_position_on(
    form: Any, start: int, sent: int, told: int | None
) -> None:
    fields = {"routed_experts": form(ROWS[sent:].reshape(-1).tolist())}
    reply = read(body_with(routed_experts_start_len=told, **fields), start=start)
    assert np.array_equal(reply.routed_experts, ROWS[start:])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"top_p_token_offsets": [0, 3]}, "offsets has 2 entries, but 2 output tokens need 3"),
        ({"top_p_token_offsets": [0, 1, 2, 3]}, "offsets has 4 entries"),
        ({"top_p_token_offsets": []}, "offsets has 0 entries"),
        ({"top_p_token_offsets": [1, 2, 3]}, "run from 1 to 3, but there are 3 ids"),
        ({"top_p_token_offsets": [0, 2, 2]}, "run from 0 to 2, but there are 3 ids"),
        ({"top_p_token_offsets": [0, 3, 3]}, "leave no id to output token 1"),
        ({"top_p_token_offsets": [0, 4, 3]}, "leave no id to output token 1"),
        ({"top_p_token_ids": [7, 9]}, "run from 0 to 3, but there are 2 ids"),
        ({"top_p_token_ids": [7, -1, 9]}, "top_p_token_ids are not all integers"),
        ({"top_p_token_ids": [7, 1.0, 9]}, "top_p_token_ids are not all integers"),
        ({"top_p_token_ids": [7, True, 9]}, "top_p_token_ids are not all integers"),
        ({"top_p_token_ids": [7, 2**31, 9]}, "top_p_token_ids are not all integers"),
        ({"top_p_token_ids": [[7, 1, 9]]}, "top_p_token_ids are not all integers"),
        ({"top_p_token_ids": encoded([7, -1, 9])}, "top_p_token_ids holds -1"),
        ({"top_p_token_ids": "AAA"}, "top_p_token_ids is no base64 of int32"),
        ({"top_p_token_ids": "AAAA"}, "top_p_token_ids is no base64 of int32"),
        ({"top_p_token_ids": "é"}, "top_p_token_ids is no base64 of int32"),
        ({"top_p_token_ids": 5}, "top_p_token_ids is 5, neither base64 nor a list"),
        ({"routed_experts": []}, "routed_experts holds 0 numbers, but 3 positions from 1 on"),
        ({"routed_experts": [1] * 13}, r"holds 13 numbers, .* \(2, 2\) have 12"),
        ({"routed_experts": [1] * 20}, "holds 20 numbers"),
        ({"routed_experts": encoded([-1] * 12)}, "routed_experts holds -1"),
        ({"routed_experts": {}}, "routed_experts is a dict, neither"),
        ({"routed_experts_start_len": 2}, "start_len is 2, but rows are needed from 1 on"),
        ({"routed_experts_start_len": 1}, "holds 16 numbers, but 3 positions from 1 on"),
        ({"routed_experts_start_len": -1}, "routed_experts_start_len is -1"),
        ({"routed_experts_start_len": "1"}, "routed_experts_start_len is a str"),
        ({"spec_verify_ct": -1}, "spec_verify_ct is -1"),
        ({"spec_accept_token_num": 1.5}, r"spec_accept_token_num is 1\.5"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], complaint: str) -> None:
    fields = KEPT | EXPERTS
    read(body_with(**fields), start=1, top_p=True)
    for finish in ("stop", "abort"):
        with pytest.raises(UntrustedReply, match=complaint):
            read(body_with(finish, **(fields | change)), start=1, top_p=True)


@pytest.mark.parametrize("absent", ["top_p_token_ids", "top_p_token_offsets", "routed_experts"])
def test_what_is_missing_is_named_with_what_to_install(absent: str) -> None:
    for fields in (
        {name: value for name, value in (KEPT | EXPERTS).items() if name != absent},
        KEPT | EXPERTS | {absent: None},
    ):
        with pytest.raises(ReplayMissing, match=f"has no {absent}") as caught:
            read(body_with(**fields), start=0, top_p=True)
        assert caught.value.fields == (absent,)
        patch = "--enable-return" if absent == "routed_experts" else "sglang-top_p.patch"
        assert patch in str(caught.value)
        assert "v0.3.2-9daabcd of zhuzilin/sgl-router" in str(caught.value)
    with pytest.raises(ReplayMissing) as caught:
        read(body_with(), start=0, top_p=True)
    assert len(caught.value.fields) == 3
    for remedy in ("sglang-top_p.patch", "--enable-return-routed-experts"):
        assert remedy in str(caught.value)
    assert read(body_with()).output.tolist() == [7, 9]


def test_replay_data_that_nobody_asked_for_is_left_out() -> None:
    reply = read(body_with(**KEPT, **EXPERTS))
    assert reply.routed_experts is reply.top_p_ids is reply.top_p_offsets is None


def test_an_abort_before_the_first_token_needs_none() -> None:
    meta = {"completion_tokens": 0, "output_token_logprobs": []}
    reply = read(body_with("abort", **meta), start=0, top_p=True)
    assert (len(reply.output), reply.finish_reason) == (0, "abort")
    # Of a prompt that the engine saw in part, it can only tell nonsense.
    reply = read(body_with("abort", routed_experts=[0] * 8, **meta), start=0)
    assert reply.routed_experts is None


def test_a_reply_of_no_tokens_has_the_experts_of_its_prompt() -> None:
    meta = {"completion_tokens": 0, "output_token_logprobs": []}
    reply = read(body_with(**meta, routed_experts=[1] * 4), start=1, top_p=True)
    assert np.array_equal(reply.routed_experts, np.ones((1, *SHAPE)))  # type: ignore[arg-type]
    assert reply.top_p_ids is None
    with pytest.raises(ReplayMissing):
        read(body_with(**meta), start=1)


def test_what_an_abort_left_without_replay_data_is_dropped() -> None:
    """An engine that aborts a call while it waits to go on sends tokens without their experts."""
    reply = read(body_with("abort", **KEPT), start=0, top_p=True)
    assert (len(reply.output), len(reply.logprobs), reply.weight_versions) == (0, 0, ())
    assert reply.finish_reason == "abort"
    reply = read(body_with("abort", **KEPT, **EXPERTS), start=0, top_p=True)
    assert len(reply.output) == 2


@pytest.mark.parametrize(
    ("fields", "speculation"),
    [
        ({}, None),
        ({"spec_accept_rate": 0.5}, None),
        (
            {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 8, "spec_verify_ct": 2},
            Speculation(3, 8, 2),
        ),
        (
            {"spec_accept_token_num": 3, "spec_draft_token_num": 8, "spec_verify_ct": 2},
            Speculation(3, 8, 2),
        ),
        ({"spec_verify_ct": 2}, Speculation(0, 0, 2)),
        ({"spec_verify_ct": 0}, Speculation(0, 0, 0)),
    ],
)
def test_speculation_by_either_name(
    fields: dict[str, Any], speculation: Speculation | None
) -> None:
    assert read(body_with(**fields)).speculation == speculation


def test_a_reply_may_be_longer_by_the_experts_it_must_carry() -> None:
    prompt = np.zeros(1000, dtype=np.int32)
    plain = EngineRequest("t", prompt, {"max_new_tokens": 24}, "r")
    full = EngineRequest("t", prompt, {"max_new_tokens": 24}, "r", WantedExperts((61, 8)))
    experts = len(encoded(np.zeros(1024 * 61 * 8)))
    assert experts < reply_limit(full) - reply_limit(plain) < 2 * experts
