"""What a reply of SGLang says of its sampler's choices, for a trainer that repeats them.

Facts, from SGLang 0.5.15 and slime's patches for it. Routed experts are flat int32 in base64, for
the positions from the request's `routed_experts_start_len` up to the last token, which was not
routed yet; that version does not say where they begin, others do, and a router may have dropped the
wish. The ids that top-p kept come for each output token, but only where a filter (top-p, top-k,
min-p, or greedy sampling) was on. The sampled id itself may be missing among them: the sampling
kernel and the code that lists them can disagree at the edge, and slime's trainer adds it.
"""

import binascii
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from turnleaf.core import ReplayArray, Speculation
from turnleaf.gateway.engines._base import ReplayMissing, WantedExperts
from turnleaf.gateway.engines._sglang_fields import MAX_ID, count, shown, untrusted

__all__ = ["ROUTER_REMEDY", "ReplayData", "engine_remedy", "read_replay", "read_speculation"]

ROUTER_REMEDY = (
    "install slime's build of sglang-router (release v0.3.2-9daabcd of zhuzilin/sgl-router on "
    "GitHub): the registry's drops request fields that it does not know"
)
"""What to do when a router does not pass a request's fields on."""
_TOP_P_REMEDY = "apply slime's docker/patch/latest/sglang-top_p.patch to SGLang"
_ENGINE_REMEDIES = {
    "top_p_token_ids": _TOP_P_REMEDY,
    "top_p_token_offsets": _TOP_P_REMEDY,
    "routed_experts": (
        "start SGLang with --enable-return-routed-experts, as slime does when it has "
        "--use-rollout-routing-replay"
    ),
}

_SLICE = 2**20  # characters of base64, a multiple of four; they take about 2 ms

_NAMES = {
    "top_p_token_ids": ("top_p_token_ids", "top_p_kept_token_ids"),
    "top_p_token_offsets": ("top_p_token_offsets", "top_p_kept_token_offsets"),
    "routed_experts": ("routed_experts",),
}
_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
_DRAFTED = ("spec_num_proposed_drafts", "spec_draft_token_num")
_VERIFICATIONS = ("spec_verify_ct",)


@attrs.frozen(eq=False)
class ReplayData:
    """The fields of `EngineReply` that are named alike."""

    routed_experts: ReplayArray | None = None
    top_p_ids: ReplayArray | None = None
    top_p_offsets: ReplayArray | None = None


def engine_remedy(fields: Iterable[str]) -> str:
    """What to do when an engine sends none of these fields."""
    return "; ".join(dict.fromkeys(_ENGINE_REMEDIES[name] for name in fields))


def read_replay(
    meta: dict[str, Any],
    *,
    prompt_length: int,
    sampled: int,
    aborted: bool,
    experts: WantedExperts | None,
    top_p: bool,
) -> ReplayData:
    """What was asked for, for that many output tokens.

    Without output tokens there are no kept ids, and after an abort no experts either: the engine
    may not even have seen the whole prompt.

    Raises ReplayMissing when a field is absent, UntrustedReply when one does not fit.
    """
    wanted = ["top_p_token_ids", "top_p_token_offsets"] if top_p and sampled else []
    if experts is not None and (sampled or not aborted):
        wanted.append("routed_experts")
    found = {name: _integers(meta, name) for name in wanted}
    missing = tuple(name for name in wanted if found[name] is None)
    if missing:
        raise ReplayMissing(
            f"the engine's reply has no {', '.join(missing)}, though the request asks for it: "
            f"{engine_remedy(missing)}; and {ROUTER_REMEDY}",
            missing,
        )
    ids, offsets = found.get("top_p_token_ids"), found.get("top_p_token_offsets")
    if ids is not None and offsets is not None:
        _check_spans(ids, offsets, sampled)
    rows = found.get("routed_experts")
    if rows is not None and experts is not None:
        rows = _wanted_rows(meta, rows, experts, end=prompt_length + sampled)
    return ReplayData(routed_experts=rows, top_p_ids=ids, top_p_offsets=offsets)


def read_speculation(meta: dict[str, Any]) -> Speculation | None:
    """The counts of a reply whose tokens a draft model guessed; None when it has none.

    SGLang renamed two of them; slime's own statistics read the older names.
    """
    read = [_first(meta, names) for names in (_ACCEPTED, _DRAFTED, _VERIFICATIONS)]
    if all(name is None for name in read):
        return None
    return Speculation(*(0 if name is None else count(meta, name, default=0) for name in read))


def _first(meta: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if meta.get(name) is not None), None)


def _integers(meta: dict[str, Any], field: str) -> ReplayArray | None:
    """uint32[n], or None where the field is absent or null."""
    name = _first(meta, _NAMES[field])
    if name is None:
        return None
    value = meta[name]
    if isinstance(value, list):
        if not all(type(number) is int and 0 <= number <= MAX_ID for number in value):
            raise untrusted(f"{name} are not all integers from 0 to {MAX_ID}")
        return np.array(value, dtype=np.uint32)
    if not isinstance(value, str):
        raise untrusted(f"{name} is {shown(value)}, neither base64 nor a list")
    try:
        numbers = np.frombuffer(_bytes_of(value), dtype="<i4")
    except ValueError as error:
        raise untrusted(f"{name} is no base64 of int32 ({error})") from None
    if numbers.size and int(numbers.min()) < 0:
        raise untrusted(f"{name} holds {int(numbers.min())}, but counts from 0")
    return numbers.view("<u4")


def _bytes_of(text: str) -> bytearray:
    """The bytes that base64 says; raises ValueError. A slice at a time, so that other threads are
    not kept from running for longer than one takes."""
    read = bytearray()
    for start in range(0, len(text), _SLICE):
        part = text[start : start + _SLICE]
        found = binascii.a2b_base64(part, strict_mode=True)
        if start + _SLICE < len(text) and 4 * len(found) != 3 * _SLICE:
            raise ValueError("it is padded in its middle")
        read += found
    return read


def _check_spans(ids: ReplayArray, offsets: ReplayArray, sampled: int) -> None:
    if len(offsets) != sampled + 1:
        raise untrusted(
            f"top_p_token_offsets has {len(offsets)} entries, but {sampled} output tokens need "
            f"{sampled + 1}"
        )
    if offsets[0] != 0 or offsets[-1] != len(ids):
        raise untrusted(
            f"top_p_token_offsets run from {offsets[0]} to {offsets[-1]}, but there are "
            f"{len(ids)} ids"
        )
    empty = np.flatnonzero(np.diff(offsets.astype(np.int64)) < 1)
    if len(empty):
        # Trained, it would have a probability of one, whatever the policy.
        raise untrusted(f"top_p_token_offsets leave no id to output token {empty[0]}")


def _wanted_rows(
    meta: dict[str, Any], flat: ReplayArray, wanted: WantedExperts, *, end: int
) -> ReplayArray:
    """[end - 1 - wanted.start, layers, top_k] of what may begin earlier."""
    row = wanted.shape[0] * wanted.shape[1]
    begin = count(meta, "routed_experts_start_len", default=wanted.start)
    if meta.get("routed_experts_start_len") is None and len(flat) == (end - 1) * row:
        begin = 0
    if begin > wanted.start:
        raise untrusted(
            f"routed_experts_start_len is {begin}, but rows are needed from {wanted.start} on"
        )
    if len(flat) != (end - 1 - begin) * row:
        raise untrusted(
            f"routed_experts holds {len(flat)} numbers, but {end - 1 - begin} positions from "
            f"{begin} on with (layers, top_k) {wanted.shape} have {(end - 1 - begin) * row}"
        )
    return flat.reshape(-1, *wanted.shape)[wanted.start - begin :]
