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
from turnleaf.gateway.engines._base import EngineReply, EngineRequest, UntrustedReply

__all__ = ["decode_reply", "encode_request", "error_text"]

_UNNAMED_WEIGHTS = "default"  # SGLang's own name for weights that nobody named
_ROUNDING = 1e-3  # how far above 0 a log-softmax in float32 or bfloat16 may land
_MAX_ID = np.iinfo(np.int32).max
_MAX_ERROR_TEXT = 200  # characters; an engine's error may quote the request


def encode_request(request: EngineRequest, rid: str) -> bytes:
    """The body of `POST /generate` for one attempt.

    Raises EngineError when a sampling parameter is nothing that JSON has.
    """
    sampling = {
        **request.sampling,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    body = {
        "rid": rid,
        "input_ids": np.ascontiguousarray(request.input_ids, dtype=np.int32),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise EngineError(f"the sampling parameters cannot be sent as JSON: {error}") from None


def decode_reply(body: bytes, *, prompt_length: int) -> EngineReply:
    """Read a reply whose every count fits; raises UntrustedReply, saying what does not."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _untrusted(f"it is not JSON ({error})") from None
    meta = _member(reply, "meta_info", "the reply")
    finish = _member(meta, "finish_reason", "meta_info")
    finish_reason: Any = finish.get("type")
    if finish_reason not in get_args(FinishReason):
        raise _untrusted(f"finish_reason.type is {_show(finish_reason)}")
    output, logprobs = _sampled(meta, aborted=finish_reason == "abort")
    if len(output) and meta.get("prompt_tokens", prompt_length) != prompt_length:
        raise _untrusted(
            f"prompt_tokens is {_show(meta['prompt_tokens'])}, but {prompt_length} were sent "
            "(does the engine truncate prompts?)"
        )
    matched = finish.get("matched")
    if matched is not None and type(matched) not in (int, str):
        raise _untrusted(f"finish_reason.matched is {_show(matched)}")
    return EngineReply(
        output=output,
        logprobs=logprobs,
        finish_reason=finish_reason,
        matched=matched,
        cached_tokens=_count(meta, "cached_tokens", default=0),
        weight_versions=_weight_spans(meta, len(output)),
    )


def error_text(body: bytes) -> str:
    """What the engine says of an error, in one line of at most 200 characters."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = body[: 4 * _MAX_ERROR_TEXT].decode(errors="replace")
    for name in ("error", "detail", "message"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    text = " ".join((said if isinstance(said, str) else orjson.dumps(said).decode()).split())
    return text if len(text) <= _MAX_ERROR_TEXT else text[: _MAX_ERROR_TEXT - 1] + "…"


def _untrusted(reason: str) -> UntrustedReply:
    return UntrustedReply(f"the engine's reply cannot be trusted: {reason}")


def _show(value: Any) -> str:
    """A short form of a value: a reply may be long, and its text is not for logs."""
    if isinstance(value, bool | int | float) or value is None:
        return repr(value)
    if isinstance(value, str) and len(value) <= 20:
        return repr(value)
    return f"a {type(value).__name__}"


def _member(value: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _untrusted(f"{where} is {_show(value)}, not an object")
    member = value.get(name)
    if not isinstance(member, dict):
        raise _untrusted(f"{where} has no object {name!r}, but {_show(member)}")
    return member


def _count(meta: dict[str, Any], name: str, *, default: int) -> int:
    value = meta.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise _untrusted(f"{name} is {_show(value)}")
    return value


def _sampled(meta: dict[str, Any], *, aborted: bool) -> tuple[TokenIds, Logprobs]:
    entries = meta.get("output_token_logprobs")
    completion_tokens = meta.get("completion_tokens")
    if aborted and entries is None and completion_tokens in (None, 0):
        entries, completion_tokens = [], 0
    if not isinstance(entries, list):
        raise _untrusted(f"output_token_logprobs is {_show(entries)}, not a list")
    if type(completion_tokens) is not int or completion_tokens != len(entries):
        raise _untrusted(
            f"completion_tokens is {_show(completion_tokens)}, "
            f"but there are {len(entries)} log-probabilities"
        )
    for position, entry in enumerate(entries):
        problem = _entry_problem(entry)
        if problem is not None:
            raise _untrusted(f"output_token_logprobs[{position}] {problem}")
    ids = np.array([entry[1] for entry in entries], dtype=np.int32)
    with np.errstate(over="ignore"):
        logprobs = np.array([entry[0] for entry in entries], dtype=np.float64).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > _ROUNDING))
    if len(wrong):
        raise _untrusted(
            f"output_token_logprobs[{wrong[0]}] has the log-probability {entries[wrong[0]][0]!r}"
        )
    return ids, logprobs


def _entry_problem(entry: Any) -> str | None:
    if type(entry) is not list or len(entry) < 2:
        return f"is {_show(entry)}, not [log-probability, id, …]"
    logprob, token_id = entry[0], entry[1]
    if type(logprob) is not float and type(logprob) is not int:
        return f"has the log-probability {_show(logprob)}"
    if type(token_id) is not int or not 0 <= token_id <= _MAX_ID:
        return f"has the id {_show(token_id)}"
    return None


def _weight_spans(meta: dict[str, Any], sampled: int) -> tuple[WeightSpan, ...]:
    version = meta.get("weight_version")
    version = _UNNAMED_WEIGHTS if version is None else version
    reported = meta.get("weight_versions")
    if reported is None:
        reported = [{"version": version, "start": 0, "end": sampled}]
    if not isinstance(reported, list):
        raise _untrusted(f"weight_versions is {_show(reported)}, not a list")
    spans = []
    position = 0
    for span in reported:
        if not isinstance(span, dict) or not isinstance(span.get("version"), str):
            raise _untrusted("weight_versions has a span without a version's name")
        start, end = span.get("start"), span.get("end")
        if type(start) is not int or type(end) is not int or start != position or end < start:
            raise _untrusted(
                f"weight_versions has a span from {_show(start)} to {_show(end)}, "
                f"where one from {position} was due"
            )
        if end > position:
            spans.append(WeightSpan(span["version"], end - position))
        position = end
    if position != sampled:
        raise _untrusted(f"weight_versions cover {position} of {sampled} tokens")
    return tuple(spans)
