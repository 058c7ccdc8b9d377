"""OpenAI chat completions, as requests."""

from collections.abc import Mapping
from typing import Any

import attrs

from turnleaf.gateway.protocols._constraints import Constraints, read_constraints
from turnleaf.gateway.protocols._errors import bad_request, not_supported

__all__ = ["TRAINER_OWNED", "ChatRequest", "parse_chat_request"]

TRAINER_OWNED = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Fields that would change what is sampled; the trainer's values are used instead."""

HINTS = frozenset(
    {
        "parallel_tool_calls",
        "reasoning_effort",
        "seed",
        "verbosity",
    }
)
"""Fields that are read as wishes. A seed is one of them: rollouts of one group that sample with
equal seeds are copies of each other."""

_GRANTED = {"parallel_tool_calls": True}
"""Wishes for what happens anyway."""
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_READ = frozenset(
    {
        "max_completion_tokens",
        "max_tokens",
        "logprobs",
        "messages",
        "model",
        "n",
        "response_format",
        "stop",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
    }
)
_IGNORED = TRAINER_OWNED | HINTS
_KNOWN = _READ | _IGNORED | _WITHOUT_EFFECT
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
_REMEDIES = {
    "top_logprobs": "logprobs gives those of what was sampled; nothing else is recorded",
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "chat_template_kwargs": "template arguments come from the trainer",
}
_MAX_STOPS = 32
_MAX_STOP_LENGTH = 1024
_MAX_MESSAGES = 20_000
_MAX_TOOLS = 1_000
_MAX_CHOICES = 128  # OpenAI's
_MAX_MODEL_LENGTH = 1024  # characters, which every event of a stream repeats


@attrs.frozen(eq=False)
class ChatRequest:
    """A chat completion request, checked.

    messages: raw, as sent. tools: OpenAI tool objects, or None. parse_calls: whether the reply
    may be read as tool calls. n: how many replies to sample. logprobs: whether to tell those of
    every token. max_tokens: the agent's own limit on a reply, or None. ignored: fields, with their
    values, that ask for what the trainer owns or are taken as hints. constraints: what only some
    settings let a request ask for.
    """

    messages: list[Any]
    tools: list[dict[str, Any]] | None
    parse_calls: bool
    n: int
    logprobs: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    model: str
    ignored: Mapping[str, Any]
    constraints: Constraints

    @property
    def readable_tools(self) -> list[dict[str, Any]] | None:
        """The tools of which the reply may be read as calls; None where it is text."""
        return self.tools if self.parse_calls else None


def parse_chat_request(body: Any) -> ChatRequest:
    """Check a decoded request body; raises RequestError that names the field at fault."""
    if not isinstance(body, dict):
        raise bad_request("body", "the request body is a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in _NEUTRAL:
            if not any(type(value) is type(same) and value == same for same in _NEUTRAL[name]):
                raise not_supported(name, _REMEDIES.get(name, "leave it out"))
        elif name not in _KNOWN:
            raise not_supported(name, _REMEDIES.get(name, "leave it out"))
    tools = _tools(given.get("tools"))
    return ChatRequest(
        messages=_messages(given.get("messages")),
        tools=tools,
        parse_calls=tools is not None and given.get("tool_choice") != "none",
        n=_count(given.get("n", 1)),
        logprobs=_boolean(given, "logprobs"),
        max_tokens=_max_tokens(given),
        stop=_stop(given.get("stop")),
        stream=_boolean(given, "stream"),
        include_usage=_include_usage(given.get("stream_options")),
        model=_model(given.get("model", "")),
        ignored={
            name: given[name]
            for name in sorted(given.keys() & _IGNORED)
            if given[name] is not _GRANTED.get(name)
        },
        constraints=read_constraints(given, tools),
    )


def _messages(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages", "is a list with at least one message")
    if len(messages) > _MAX_MESSAGES:
        raise bad_request("messages", f"has {len(messages)} messages, more than {_MAX_MESSAGES}")
    return messages


def _model(model: Any) -> str:
    if not isinstance(model, str):
        raise bad_request("model", "is a string")
    if len(model) > _MAX_MODEL_LENGTH:
        raise bad_request("model", f"is a string of at most {_MAX_MODEL_LENGTH} characters")
    return model


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise bad_request("tools", "is a list of tools")
    if len(tools) > _MAX_TOOLS:
        raise bad_request("tools", f"has {len(tools)} tools, more than {_MAX_TOOLS}")
    for position, tool in enumerate(tools):
        where = f"tools[{position}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise bad_request(where, "a tool is an object with a function")
        if tool.get("type", "function") != "function":
            raise not_supported(f"{where}.type", "only tools of type 'function' exist here")
        if not isinstance(tool["function"].get("name"), str):
            raise bad_request(f"{where}.function.name", "is a string")
        if not isinstance(tool["function"].get("parameters", {}), dict | None):
            raise bad_request(f"{where}.function.parameters", "is a JSON schema object")
    return tools or None


def _count(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MAX_CHOICES:
        raise bad_request("n", f"is {n!r}, but must be a whole number from 1 to {_MAX_CHOICES}")
    return n


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    limits = []
    for name in ("max_completion_tokens", "max_tokens"):
        if name in given:
            limit = given[name]
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise bad_request(name, f"is {limit!r}, but must be an integer from 1 on")
            limits.append(limit)
    return min(limits, default=None)


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise bad_request("stop", "is a string or a list of strings")
    if len(stops) > _MAX_STOPS or any(len(one) > _MAX_STOP_LENGTH for one in stops):
        raise bad_request(
            "stop", f"has more than {_MAX_STOPS} strings or one over {_MAX_STOP_LENGTH} characters"
        )
    return tuple(one for one in stops if one)


def _boolean(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise bad_request(name, "is true or false")
    return value


def _include_usage(options: Any) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_request("stream_options", "is an object")
    include_usage = options.get("include_usage")
    if not isinstance(include_usage, bool | None):
        raise bad_request("stream_options.include_usage", "is true or false")
    return bool(include_usage)
