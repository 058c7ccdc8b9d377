"""What a scripted engine is told to answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from turnleaf.core import ContractError, FinishReason, TokenIds

__all__ = ["Reply", "ReplyFunction", "Script", "parse_script"]

_optional = attrs.validators.optional
_is = attrs.validators.instance_of


def _optional_tuple(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


@attrs.frozen
class Reply:
    """One scripted answer.

    text: encoded with the tokenizer; a control token spelled in it becomes its id, as a model
        would sample it. ids: the output itself. Neither: the output is only the stop token.
    logprobs: one per id of `text` or `ids`; by default negative pseudo-random ones.
    finish: "stop" ends the output with the stop token unless it already does; "length" and
        "abort" leave it as it is.
    matched: what `finish_reason.matched` says instead of the stop token.
    delay: seconds until the answer. hang: it never comes. Both are ended by an abort, which hands
        out the first `abort_after` ids (by default half of them), and by the client's leaving.
    fail: answer with this HTTP status, and sample nothing.
    events: of a stream, how many ids each event holds, one by default; the last one holds what is
        left, at least one id.
    drop: sample, then break the connection. drop_after: the same, but behind the first events of a
        stream that hold so many ids or more.
    mismatch: claim one token more than there are log-probabilities. spoil: members of `meta_info`
        that take the place of the true ones, null to leave one out: for replies that nobody may
        trust. Of a stream, both concern the last event.
    speculation: what a draft model is said to have done: drafts accepted and drafted, and
        verifications.
    prompt_tail: let `output_ids`, and only those, begin with the last that many prompt ids.
    times: for how many calls the reply is played.
    """

    text: str | None = attrs.field(default=None, validator=_optional(_is(str)))
    ids: tuple[int, ...] | None = attrs.field(default=None, converter=_optional_tuple)
    logprobs: tuple[float, ...] | None = attrs.field(default=None, converter=_optional_tuple)
    finish: FinishReason = attrs.field(
        default="stop", validator=attrs.validators.in_(("stop", "length", "abort"))
    )
    matched: str | int | None = None
    delay: float = attrs.field(default=0.0, validator=_is((int, float)))
    hang: bool = False
    abort_after: int | None = attrs.field(default=None, validator=_optional(_is(int)))
    fail: int | None = attrs.field(default=None, validator=_optional(_is(int)))
    events: tuple[int, ...] | None = attrs.field(default=None, converter=_optional_tuple)
    drop: bool = False
    drop_after: int | None = attrs.field(default=None, validator=_optional(_is(int)))
    mismatch: bool = False
    spoil: Mapping[str, Any] | None = attrs.field(default=None, validator=_optional(_is(dict)))
    speculation: tuple[int, int, int] | None = attrs.field(default=None, converter=_optional_tuple)
    prompt_tail: int = attrs.field(default=0, validator=_is(int))
    times: int = attrs.field(default=1, validator=[_is(int), attrs.validators.ge(1)])

    def __attrs_post_init__(self) -> None:
        if self.text is not None and self.ids is not None:
            raise ValueError("a reply has a text or ids, not both")
        if self.speculation is not None and len(self.speculation) != 3:
            raise ValueError("speculation is [accepted, drafted, verifications]")


ReplyFunction = Callable[[TokenIds, int], Reply | Mapping[str, Any]]
"""(prompt ids, number of the rollout's call, from 0) → reply; for engines in this process."""

Script = Mapping[str, Sequence[Reply | Mapping[str, Any] | ReplyFunction]]
"""Replies in the order of arrival, per routing key; "*" is played to every other rollout, to each
from the start."""


def parse_reply(value: Reply | Mapping[str, Any], where: str) -> Reply:
    """Raises ContractError, naming the reply, when its fields are unknown or wrong."""
    if isinstance(value, Reply):
        return value
    if not isinstance(value, Mapping):
        raise ContractError(f"{where} is a {type(value).__name__}, not an object")
    known = [field.name for field in attrs.fields(Reply)]
    for name in value:
        if name not in known:
            raise ContractError(f"{where} has the unknown field {name!r}; there are {known}")
    try:
        return Reply(**value)
    except (TypeError, ValueError) as error:
        raise ContractError(f"{where} is not valid: {error.args[0]}") from None


def parse_script(script: Script) -> dict[str, list[Reply | ReplyFunction]]:
    """The script with `times` played out; raises ContractError, naming the reply at fault."""
    parsed: dict[str, list[Reply | ReplyFunction]] = {}
    for rollout, replies in script.items():
        if not isinstance(replies, list | tuple):
            raise ContractError(f"the script of {rollout!r} is not a list of replies")
        played = parsed.setdefault(rollout, [])
        for number, value in enumerate(replies):
            if callable(value):
                played.append(value)
            else:
                reply = parse_reply(value, f"reply {number} of {rollout!r} in the script")
                played += [reply] * reply.times
    return parsed
