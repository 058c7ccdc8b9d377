"""SGLang's `/generate` in bytes: what a request looks like, and what of a reply can be trusted.

Facts about the reply, from SGLang 0.5: `output_ids` may begin with the tail of the prompt, so ids
are read beside their log-probabilities; a call aborted while it waited for the first step carries
neither counts nor log-probability entries; `weight_versions` lists half-open spans
`{version, start, end}` of output positions.
"""

from typing import Any, get_args

import numpy as np
import orjson

from turnleaf.core import EngineError, FinishReason, Logprobs, TokenIds, WeightSpan
from turnleaf.gateway.engines._base import (
    EngineReply,
    EngineRequest,
    ReplayMissing,
    WantedExperts,
)
from turnleaf.gateway.engines._sglang_fields import MAX_ID, count, member, shown, untrusted
from turnleaf.gateway.engines._sglang_replay import read_replay, read_speculation

__all__ = [
    "check_prompt",
    "decode_reply",
    "encode_request",
    "error_text",
    "one_line",
    "read_entries",
    "read_reply",
    "reply_limit",
    "weight_version",
]

_UNNAMED_WEIGHTS = "default"  # SGLang's own name for weights that nobody named
_LOWEST = float(np.finfo(np.float32).min)
_ROUNDING = 1e-3  # how far above 0 a log-softmax in float32 or bfloat16 may land
_MAX_REPLY = 256 * 2**20  # bytes; 100,000 tokens with their log-probabilities take about 5 MB
_EXPERT_BYTES = 6  # of one number: int32 in base64, rounded up
_MAX_ERROR_TEXT = 200  # characters; an engine's error may quote the request


def encode_request(request: EngineRequest, rid: str, *, stream: bool = False) -> bytes:
    """The body of `POST /generate` for one attempt.

    Raises EngineError when a sampling parameter is nothing that JSON has.
    """
    sampling = {
        **request.sampling,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": np.ascontiguousarray(request.input_ids, dtype=np.int32),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": stream,
    }
    if request.experts is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = request.experts.start
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise EngineError(f"the sampling parameters cannot be sent as JSON: {error}") from None


def decode_reply(
    body: bytes,
    *,
    prompt_length: int,
    experts: WantedExperts | None = None,
    top_p: bool = False,
) -> EngineReply:
    """Read a reply whose every count fits; raises UntrustedReply, saying what does not.

    experts, top_p: the replay data that was asked for; ReplayMissing when it is not there. A part
    that an abort left without it is dropped: nobody trains it, and its path could not be replayed.
    """
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise untrusted(f"it is not JSON ({error})") from None
    meta = member(reply, "meta_info", "the reply")
    finish = member(meta, "finish_reason", "meta_info")
    output, logprobs = _sampled(meta, aborted=finish.get("type") == "abort")
    return read_reply(
        meta,
        finish,
        output,
        logprobs,
        prompt_length=prompt_length,
        experts=experts,
        top_p=top_p,
    )


def read_reply(
    meta: dict[str, Any],
    finish: dict[str, Any],
    output: TokenIds,
    logprobs: Logprobs,
    *,
    prompt_length: int,
    experts: WantedExperts | None = None,
    top_p: bool = False,
) -> EngineReply:
    """The reply with that `meta_info`, `finish_reason` and output; see `decode_reply`."""
    finish_reason: Any = finish.get("type")
    if finish_reason not in get_args(FinishReason):
        raise untrusted(f"finish_reason.type is {shown(finish_reason)}")
    if len(output):
        check_prompt(meta, prompt_length)
    try:
        replay = read_replay(
            meta,
            prompt_length=prompt_length,
            sampled=len(output),
            aborted=finish_reason == "abort",
            experts=experts,
            top_p=top_p,
        )
    except ReplayMissing:
        if finish_reason != "abort":
            raise
        return EngineReply(
            output=output[:0],
            logprobs=logprobs[:0],
            finish_reason=finish_reason,
            matched=None,
            cached_tokens=count(meta, "cached_tokens", default=0),
            weight_versions=(),
        )
    matched = finish.get("matched")
    if matched is not None and type(matched) not in (int, str):
        raise untrusted(f"finish_reason.matched is {shown(matched)}")
    return EngineReply(
        output=output,
        logprobs=logprobs,
        finish_reason=finish_reason,
        matched=matched,
        cached_tokens=count(meta, "cached_tokens", default=0),
        weight_versions=_weight_spans(meta, len(output)),
        routed_experts=replay.routed_experts,
        top_p_ids=replay.top_p_ids,
        top_p_offsets=replay.top_p_offsets,
        speculation=read_speculation(meta),
    )


def check_prompt(meta: dict[str, Any], prompt_length: int) -> None:
    """Raise UntrustedReply unless the engine saw the whole prompt."""
    if meta.get("prompt_tokens", prompt_length) != prompt_length:
        raise untrusted(
            f"prompt_tokens is {shown(meta['prompt_tokens'])}, but {prompt_length} were sent "
            "(does the engine truncate prompts?)"
        )


def weight_version(meta: dict[str, Any]) -> Any:
    """The version of the weights that sample while the engine says so."""
    version = meta.get("weight_version")
    return _UNNAMED_WEIGHTS if version is None else version


def reply_limit(request: EngineRequest) -> int:
    """The most bytes that a reply may have."""
    if request.experts is None:
        return _MAX_REPLY
    layers, top_k = request.experts.shape
    positions = len(request.input_ids) + int(request.sampling.get("max_new_tokens") or 0)
    return _MAX_REPLY + positions * layers * top_k * _EXPERT_BYTES


def error_text(body: bytes) -> str:
    """What the engine says of an error, in one line of at most 200 characters."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = body[: 4 * _MAX_ERROR_TEXT].decode(errors="replace")
    return one_line(said)


def one_line(said: Any) -> str:
    """An error's JSON in one line of at most 200 characters; where there is a message, that."""
    for name in ("error", "detail", "message"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    text = " ".join((said if isinstance(said, str) else orjson.dumps(said).decode()).split())
    return text if len(text) <= _MAX_ERROR_TEXT else text[: _MAX_ERROR_TEXT - 1] + "…"


def _sampled(meta: dict[str, Any], *, aborted: bool) -> tuple[TokenIds, Logprobs]:
    entries = meta.get("output_token_logprobs")
    completion_tokens = meta.get("completion_tokens")
    if aborted and entries is None and completion_tokens in (None, 0):
        entries, completion_tokens = [], 0
    if not isinstance(entries, list):
        raise untrusted(f"output_token_logprobs is {shown(entries)}, not a list")
    if type(completion_tokens) is not int or completion_tokens != len(entries):
        raise untrusted(
            f"completion_tokens is {shown(completion_tokens)}, "
            f"but there are {len(entries)} log-probabilities"
        )
    return read_entries(entries)


def read_entries(entries: list[Any], *, first: int = 0) -> tuple[TokenIds, Logprobs]:
    """Ids and log-probabilities of `output_token_logprobs`.

    first: the output position of the first of them. Raises UntrustedReply for one that is none.
    """
    # Column by column: a reply has thousands of them. What is decoded JSON and no list of two has
    # no items of these numbers, or is a text, whose items are no numbers.
    try:
        ids = [entry[1] for entry in entries]
        logprobs = [entry[0] for entry in entries]
    except (TypeError, LookupError):
        ids = logprobs = [None]
    if not (
        set(map(type, ids)) <= {int}
        and set(map(type, logprobs)) <= {float, int}
        and 0 <= min(ids, default=0) <= max(ids, default=0) <= MAX_ID
        and _LOWEST <= min(logprobs, default=0) <= max(logprobs, default=0) <= _ROUNDING
    ):
        raise untrusted(
            next(
                f"output_token_logprobs[{position}] {problem}"
                for position, entry in enumerate(entries, start=first)
                if (problem := _entry_problem(entry)) is not None
            )
        )
    return np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32)


def _entry_problem(entry: Any) -> str | None:
    if type(entry) is not list or len(entry) < 2:
        return f"is {shown(entry)}, not [log-probability, id, …]"
    logprob, token_id = entry[0], entry[1]
    if type(logprob) is not float and type(logprob) is not int:
        return f"has the log-probability {shown(logprob)}"
    if type(token_id) is not int or not 0 <= token_id <= MAX_ID:
        return f"has the id {shown(token_id)}"
    if not _LOWEST <= logprob <= _ROUNDING:
        return f"has the log-probability {logprob!r}"
    return None


def _weight_spans(meta: dict[str, Any], sampled: int) -> tuple[WeightSpan, ...]:
    reported = meta.get("weight_versions")
    if reported is None:
        reported = [{"version": weight_version(meta), "start": 0, "end": sampled}]
    if not isinstance(reported, list):
        raise untrusted(f"weight_versions is {shown(reported)}, not a list")
    spans = []
    position = 0
    for span in reported:
        if not isinstance(span, dict) or not isinstance(span.get("version"), str):
            raise untrusted("weight_versions has a span without a version's name")
        start, end = span.get("start"), span.get("end")
        if type(start) is not int or type(end) is not int or start != position or end < start:
            raise untrusted(
                f"weight_versions has a span from {shown(start)} to {shown(end)}, "
                f"where one from {position} was due"
            )
        if end > position:
            spans.append(WeightSpan(span["version"], end - position))
        position = end
    if position != sampled:
        raise untrusted(f"weight_versions cover {position} of {sampled} tokens")
    return tuple(spans)
