"""Chat completion requests are checked field by field, and replies take the protocol's shape."""

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from turnleaf.gateway.protocols import (
    Choice,
    Completion,
    RequestError,
    TokenLogprobs,
    completion,
    completion_events,
    parse_chat_request,
)

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parsed(**fields: Any) -> Any:
    return parse_chat_request({"messages": MESSAGES, **fields})


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        parsed(**fields)
    assert refused.value.status == 400
    return refused.value


def test_a_plain_request() -> None:
    request = parsed(model="m", tools=None, stop=None, stream=None, top_logprobs=0)
    assert (request.n, request.logprobs) == (1, False)
    assert request.messages == MESSAGES
    assert request.tools is None
    assert not request.parse_calls
    assert request.max_tokens is None
    assert request.stop == ()
    assert not request.stream
    assert request.ignored == {}


def test_limits_and_stops() -> None:
    assert parsed(max_tokens=9, max_completion_tokens=5).max_tokens == 5
    assert parsed(stop="END").stop == ("END",)
    assert parsed(stop=["a", "", "b"]).stop == ("a", "b")
    assert parsed(stream=True, stream_options={"include_usage": True}).include_usage


def test_what_the_trainer_owns_and_what_is_a_hint_is_named() -> None:
    request = parsed(temperature=0, top_p=None, seed=3, user="u", store=True)
    assert request.ignored == {"seed": 3, "temperature": 0}
    assert parsed(parallel_tool_calls=False).ignored == {"parallel_tool_calls": False}
    assert parsed(parallel_tool_calls=True).ignored == {}  # it happens anyway


@pytest.mark.parametrize(
    ("choice", "parse_calls", "forced"),
    [
        (None, True, False),
        ("auto", True, False),
        ("none", False, False),
        ("required", True, True),
        ({"type": "function", "function": {"name": "f"}}, True, True),
    ],
)
def test_tool_choice(choice: Any, parse_calls: bool, forced: bool) -> None:
    request = parsed(tools=[TOOL], tool_choice=choice)
    assert request.tools == [TOOL]
    assert (request.parse_calls, request.constraints.forced) == (parse_calls, forced)
    assert request.constraints.fields == (("tool_choice",) if forced else ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": MESSAGES * 20_001}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"functions": []}, "functions"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"stop": 3}, "stop"),
        ({"stop": 0}, "stop"),
        ({"tools": 0}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": 0}}]}, "tools[0].function.parameters"),
        ({"stream_options": {"include_usage": "no"}}, "stream_options.include_usage"),
        ({"stop": [None]}, "stop"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"model": "x" * 1025}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"model": 1}, "model"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [TOOL] * 1001}, "tools"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{**TOOL, "type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": None}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.function.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert str(error).startswith(param)
    assert error.body()["error"]["type"] == "invalid_request_error"


def test_a_refusal_quotes_no_more_than_a_person_reads() -> None:
    for fields in ({"tools": [{"type": "x" * 10**6, "function": {}}]}, {"y" * 10**6: 1}):
        error = refusal(**fields)
        assert len(str(error)) < 2_000
        assert len(error.param or "") < 1_000


@given(strategies.json_values)
def test_any_json_is_parsed_or_refused(value: Any) -> None:
    for body in (value, {"messages": value}, {"messages": MESSAGES, "tools": value}):
        with contextlib.suppress(RequestError):
            parse_chat_request(body)


REPLY = Completion(
    id="chatcmpl-1",
    model="m",
    choices=(
        Choice(
            turn_id="chatcmpl-1",
            message={
                "role": "assistant",
                "content": "Both.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {
                        "id": f"c{n}",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    }
                    for n in range(2)
                ],
            },
            finish_reason="tool_calls",
            completion_tokens=3,
        ),
        Choice(
            turn_id="chatcmpl-1-1",
            message={"role": "assistant", "content": "é"},
            finish_reason="length",
            completion_tokens=2,
            logprobs=TokenLogprobs(["é", "\ufffd"], np.array([-0.5, -1.0], dtype=np.float32)),
        ),
    ),
    prompt_tokens=7,
    cached_tokens=5,
)
LOGPROBS = {
    "content": [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": []},
    ],
    "refusal": None,
}


def test_a_whole_reply() -> None:
    body = json.loads(completion(REPLY))
    assert body["object"] == "chat.completion"
    first, second = body["choices"]
    assert (first["index"], first["finish_reason"]) == (0, "tool_calls")
    assert (second["index"], second["finish_reason"]) == (1, "length")
    assert [first["message"], second["message"]] == [one.message for one in REPLY.choices]
    assert (first["logprobs"], second["logprobs"]) == (None, LOGPROBS)
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == 12
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


@given(st.lists(st.tuples(st.text(max_size=3), st.floats(-100, 0, width=32))))
def test_log_probabilities_are_those_of_the_tokens(tokens: list[tuple[str, float]]) -> None:
    texts, logprobs = [text for text, _ in tokens], [logprob for _, logprob in tokens]
    told = json.loads(TokenLogprobs(texts, np.array(logprobs, dtype=np.float32)).to_json())
    assert [(entry["token"], entry["logprob"]) for entry in told["content"]] == tokens
    for entry in told["content"]:
        whole = "\ufffd" not in entry["token"]
        assert entry["bytes"] == (list(entry["token"].encode()) if whole else None)


@pytest.mark.parametrize("include_usage", [True, False])
def test_the_events_add_up_to_the_whole_reply(include_usage: bool) -> None:
    *events, done, end = completion_events(REPLY, include_usage=include_usage).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    if include_usage:
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 12
    assert all(("usage" in chunk) == include_usage for chunk in chunks)
    for index, choice in enumerate(REPLY.choices):
        told = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        deltas = [one["delta"] for one in told]
        for name in ("content", "reasoning_content"):
            text = "".join(delta.get(name, "") for delta in deltas)
            assert text == choice.message.get(name, "")
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        assert calls == choice.message.get("tool_calls", [])
        reasons = [one["finish_reason"] for one in told]
        assert reasons == [None] * (len(reasons) - 1) + [choice.finish_reason]
        assert [one["logprobs"] for one in told if one["logprobs"]] == [LOGPROBS] * index


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_errors_take_the_protocols_shape(status: int, kind: str) -> None:
    error = RequestError(status, "why", code="code", param="field", retry_after=2)
    expected = {"message": "why", "type": kind, "param": "field", "code": "code"}
    assert error.body() == {"error": expected}
    assert error.headers() == {"retry-after": "2"}
