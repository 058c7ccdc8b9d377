import json

import pytest
from hypothesis import given

from tests import strategies
from turnleaf.agent._envelope import Envelope, completed, failed, read_envelope, unfinished
from turnleaf.core import BadResultError, PayloadError
from turnleaf.sessions._envelope import State, get, start

ID = "i1"


def reply(**fields):
    return {"version": 1, "invocation_id": ID, **fields}


@given(payload=strategies.payloads)
def test_agents_read_what_is_asked_and_get_their_payload(payload):
    request = start(payload, ID)
    assert read_envelope(request) == Envelope("start", ID, background=True)
    assert {key: value for key, value in request.items() if key in payload} == payload
    assert len(request) == len(payload) + 1
    assert read_envelope(get(ID, wait=7)) == Envelope("get", ID, wait=7.0)


def test_a_row_that_has_an_envelope_is_refused():
    with pytest.raises(PayloadError, match=r"already has `_agentcore_runtime`.*envelope: never"):
        start({"_agentcore_runtime": 1}, ID)


@given(said=strategies.envelope_states)
def test_every_state_is_read(said):
    state = State.read(reply(**said), ID)
    assert state == State(said["status"], said.get("result"), said.get("error"))


@pytest.mark.parametrize(
    ("body", "state"),
    [
        (unfinished(ID, "interrupted"), State("interrupted")),
        (completed(ID, {"reward": 1}), State("completed", {"reward": 1})),
        (failed(ID, "ValueError: x"), State("completed", error="ValueError: x")),
    ],
)
def test_replies_of_our_own_agents_are_read(body, state):
    assert State.read(json.loads(body), ID) == state


@given(result=strategies.json_values)
def test_any_other_reply_is_the_result(result):
    assert State.read(result, ID) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"version": True},
        {"version": 2},
        {"version": "1"},
        {"invocation_id": "i2"},
        {"invocation_id": None},
        {"status": "done"},
        {"status": ["in_progress"]},
        {"status": None},
    ],
)
def test_a_reply_that_only_looks_like_an_envelope_is_the_result(fields):
    assert State.read(reply(status="in_progress") | fields, ID) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "completed"},
        {"status": "completed", "result": 1, "error": "x"},
        {"status": "completed", "error": None},
        {"status": "completed", "error": 7},
        {"status": "in_progress", "result": 1},
        {"status": "not_found", "error": "x"},
    ],
)
def test_an_envelope_that_contradicts_itself_is_no_result(fields):
    with pytest.raises(BadResultError, match="_agentcore_runtime"):
        State.read(reply(**fields), ID)
