"""What a scripted engine samples for a call, and how a stream's events divide it."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from turnleaf.adapters.mock._calls import Call
from turnleaf.adapters.mock._script import Reply
from turnleaf.core import FinishReason

__all__ = ["NOTHING", "ScriptedSample", "drop_after", "event_ends", "so_far", "stopped"]

_DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's


@attrs.frozen
class ScriptedSample:
    """ids with one log-probability each, and why they end."""

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    matched: str | int | None

    def cut(self, length: int, finish: FinishReason, matched: str | int | None) -> "ScriptedSample":
        """The first so many ids."""
        return ScriptedSample(self.ids[:length], self.logprobs[:length], finish, matched)

    def entries(self, begin: int, end: int) -> list[list[Any]]:
        """`output_token_logprobs` of those output positions."""
        return [
            [logprob, token_id, None]
            for logprob, token_id in zip(self.logprobs[begin:end], self.ids[begin:end], strict=True)
        ]


NOTHING = ScriptedSample([], [], "abort", None)


def stopped(
    sample: ScriptedSample,
    sampling: Mapping[str, Any],
    *,
    stop_token_id: int | None,
    decode: Callable[[list[int]], str] | None,
) -> ScriptedSample:
    """The sample up to where the request's own limits end it; SGLang's order of checks."""
    limit = sampling.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
    stop_ids = {*(sampling.get("stop_token_ids") or ()), stop_token_id}
    stop = sampling.get("stop") or ()
    ends: list[tuple[int, int, FinishReason, str | int | None]] = []
    if limit <= len(sample.ids):
        ends.append((limit, 0, "length", None))
    for position, token_id in enumerate(sample.ids, start=1):
        if token_id in stop_ids:
            ends.append((position, 1, "stop", token_id))
            break
    for string in [stop] if isinstance(stop, str) else stop:
        position = _tokens_until(sample.ids, string, decode)
        if position <= len(sample.ids):
            ends.append((position, 2, "stop", string))
    if not ends:
        return sample
    length, _, finish, matched = min(ends, key=lambda end: end[:2])
    if length == len(sample.ids) and finish == "stop" == sample.finish:
        matched = sample.matched
    return sample.cut(length, finish, matched)


def so_far(call: Call, reply: Reply, complete: ScriptedSample) -> ScriptedSample:
    """What there is when the call ends: of one that was interrupted, no less than was told."""
    if not (call.aborted or call.gone):
        return complete
    return complete.cut(max(call.told, _interrupted_after(reply, complete)), "abort", None)


def drop_after(reply: Reply) -> int | None:
    """How many ids a stream tells until it breaks off; None where it does not."""
    return 0 if reply.drop else reply.drop_after


def event_ends(reply: Reply, complete: ScriptedSample) -> list[int]:
    """How many ids were told after each event of a stream but the last one."""
    last = _interrupted_after(reply, complete) if reply.hang else len(complete.ids) - 1
    ends: list[int] = []
    told = 0
    for size in [1] * len(complete.ids) if reply.events is None else reply.events:
        told += size
        if told > last:
            break
        ends.append(told)
    broken_off = drop_after(reply)
    if broken_off is None:
        return ends
    enough = sum(end < broken_off for end in ends)
    return ends[: enough + 1] if broken_off else []


def _interrupted_after(reply: Reply, complete: ScriptedSample) -> int:
    half = len(complete.ids) // 2
    return half if reply.abort_after is None else reply.abort_after


def _tokens_until(ids: list[int], string: str, decode: Callable[[list[int]], str] | None) -> int:
    """How many tokens it takes until their text holds the string; more than there are if never."""
    if decode is None:
        return len(ids) + 1
    lengths = range(len(ids) + 1)
    return bisect_left(lengths, True, key=lambda length: string in decode(ids[:length]))
