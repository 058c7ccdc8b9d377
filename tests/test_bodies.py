"""Request bodies are read as far as they are new, and say what they say as a whole."""

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from turnleaf.gateway import _bodies
from turnleaf.gateway._bodies import _MOST_OPENINGS, Bodies, Body
from turnleaf.gateway.protocols import RequestError

MESSAGES: list[Any] = [
    {"role": "system", "content": 'é, "quoted" ]},{ and ☂'},
    {"role": "user", "content": [{"type": "text", "text": "[1, 2]"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"index": 0}]},
    {"role": "tool", "content": "4 ☂"},
    {"role": "user", "content": ""},
]


def spelled(messages: list[Any], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def read_and_kept(bodies: Bodies, data: bytes) -> Body:
    body = bodies.read(data)
    bodies.keep(body, body.value["messages"])
    return body


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The bodies that are decoded as a whole."""
    seen: list[bytes] = []

    def decoded(data: bytes) -> Any:
        seen.append(data)
        return orjson.loads(data)

    monkeypatch.setattr(_bodies, "decoded", decoded)
    return seen


@given(st.data())
def test_a_body_says_what_it_says_as_a_whole(data: st.DataObject) -> None:
    bodies = Bodies()
    messages: list[Any] = []
    objects = st.dictionaries(strategies.texts, strategies.json_values, max_size=2)
    for _ in range(data.draw(st.integers(1, 5))):
        messages = messages[: data.draw(st.sampled_from([-1, 100, 100, 100]))]
        messages = messages + data.draw(st.lists(objects, max_size=2))
        sent = data.draw(strategies.chat_bodies_of(messages))
        check(bodies, sent)


TWICE = b'{"messages":[{"a":1}],"messages":[{"b":2}]}'
FOLLOWING = [
    (b'{"messages":[{}]}', b'{"messages":[{}],"messages":[{"a":1}]}'),
    (b'{"messages":[{}]}', rb'{"messages":[{}],"mess\u0061ges":[{"a":1}]}'),
    (b'{"messages":[{}]}', b'{"messages":[{},{}],"messages":5}'),
    (b'{"messages":[{}]}', b'{"messages":[{}],"n":1,"n":2}'),
    (b'{"n":0,"messages":[{}]}', b'{"n":0,"messages":[{},{}],"m":1,"n":2}'),
    (b'{"messages":[{}]}', b'{"messages":[{} ]  } '),
    (b'{"messages":[{}]}', b'{"messages":[{}'),
    (b'{"messages":[{}]}', b'{"messages":[{}.5]}'),
    (b'{"messages":[{}]}', b'{"messages":[{}{}]}'),
    (b'{"messages":[{}]}', b'{"messages":[{},]}'),
    (b'{"messages":[{}]}', b'{"messages":[{}],"a"}'),
    (b'{"messages":[{}]}', b'{"messages":[{}]}]}'),
    (b'{"messages":[{}]}', b'{"messages":[{},"\xff"]}'),
    (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":2},{}]}'),
    (b'{"messages":[1]}', b'{"messages":[12]}'),
    (b'{"messages":[1]}', b'{"messages":[1.5,{}]}'),
    (TWICE, TWICE.replace(b"]}", b",{}]}")),
    (TWICE, TWICE.replace(b"}]", b"},{}]", 1)),
    (b'{"messages":5,"messages":[{}]}', b'{"messages":5,"messages":[{},{}]}'),
    (b'{"messages":[{"messages":[{}]}]}', b'{"messages":[{"messages":[{}]},{}]}'),
    (b'{"a":{"messages":[{}]},"messages":[{}]}', b'{"a":{"messages":[{},{}]},"messages":[{}]}'),
    (b'{"a":"\\"messages\\":[{}","messages":[{}]}', b'{"a":"\\"messages\\":[{}","messages":[]}'),
    (b'{"messages":[]}', b'{"messages":[{}]}'),
    (b"[{}]", b'{"messages":[{}]}'),
]


@pytest.mark.parametrize(("kept", "sent"), FOLLOWING)
def test_a_body_that_begins_like_another_says_what_it_says_as_a_whole(
    kept: bytes, sent: bytes
) -> None:
    bodies = Bodies()
    for data in (kept, sent, sent, kept):
        check(bodies, data)


def check(bodies: Bodies, data: bytes) -> None:
    """Read a body, in part or as a whole, and keep it."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        with pytest.raises(RequestError, match=re.escape(str(error))):
            bodies.read(data)
        return
    body = bodies.read(data)
    assert orjson.dumps(body.value) == orjson.dumps(value)
    assert body.digest == hashlib.sha256(data).digest()
    if isinstance(value, dict) and isinstance(value["messages"], list):
        bodies.keep(body, value["messages"])


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\r\n", "\t: ")])
@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("first", ["model", "messages"])
def test_only_what_is_new_is_decoded(
    whole: list[bytes], separators: tuple[str, str], ensure_ascii: bool, first: str
) -> None:
    bodies = Bodies()
    before: list[Any] = []
    for count in range(1, len(MESSAGES) + 1):
        fields = {"model": "m", "messages": MESSAGES[:count], "tools": [{"a": [1]}]}
        fields = {first: fields[first], **fields}
        text = json.dumps(fields, separators=separators, ensure_ascii=ensure_ascii)
        body = read_and_kept(bodies, text.encode())
        assert body.value == fields
        # What was kept comes back as the same objects.
        assert [*map(id, body.value["messages"][:-1])] == [*map(id, before)]
        before = body.value["messages"]
    assert len(whole) == 1


def test_nothing_is_expected_of_a_body_that_was_not_kept(whole: list[bytes]) -> None:
    bodies = Bodies()
    bodies.read(spelled(MESSAGES[:1]))
    bodies.read(spelled(MESSAGES[:2]))
    assert len(whole) == 2


def test_the_same_body_again_is_not_decoded_again(whole: list[bytes]) -> None:
    bodies = Bodies()
    data = spelled(MESSAGES, tools=[])
    digests = {read_and_kept(bodies, data).digest for _ in range(3)}
    assert digests == {hashlib.sha256(data).digest()}
    assert len(whole) == 1


def begun(bodies: Bodies, names: Iterable[object]) -> dict[object, list[Any]]:
    """Conversations that have begun, of two requests each."""
    conversations: dict[object, list[Any]] = {}
    for name in names:
        conversations[name] = [{"role": "system", "content": f"{name}"}]
        go_on(bodies, conversations[name])
        go_on(bodies, conversations[name])
    return conversations


def go_on(bodies: Bodies, messages: list[Any]) -> None:
    """A message more."""
    messages.append(MESSAGES[len(messages) % len(MESSAGES)])
    assert read_and_kept(bodies, spelled(messages)).value["messages"] == messages


def test_conversations_in_turn_are_all_read_in_part(whole: list[bytes]) -> None:
    bodies = Bodies()
    conversations = begun(bodies, range(_MOST_OPENINGS))
    for _ in range(5):
        for messages in conversations.values():
            go_on(bodies, messages)
    assert len(whole) == _MOST_OPENINGS


def test_of_too_many_conversations_the_one_kept_first_is_read_as_a_whole(
    whole: list[bytes],
) -> None:
    bodies = Bodies()
    first, *others = begun(bodies, range(_MOST_OPENINGS + 1)).values()
    for messages in others:
        go_on(bodies, messages)
    assert len(whole) == _MOST_OPENINGS + 1
    go_on(bodies, first)
    assert whole[_MOST_OPENINGS + 1 :] == [spelled(first)]


def test_a_conversation_counts_once_however_long_it_is(whole: list[bytes]) -> None:
    bodies = Bodies()
    long, *others = begun(bodies, range(_MOST_OPENINGS)).values()
    for _ in range(2 * _MOST_OPENINGS):
        go_on(bodies, long)
        again = [bodies.read(spelled(long)) for _ in range(2)]
        for body in again:
            bodies.keep(body, body.value["messages"])
    for messages in others:
        go_on(bodies, messages)
    assert len(whole) == _MOST_OPENINGS


@pytest.mark.parametrize("forks", [1, 3])
def test_a_conversation_that_forks_is_read_in_part(whole: list[bytes], forks: int) -> None:
    """As of an agent that asks for a judgement of all that was said, and goes on without it."""
    bodies = Bodies()
    messages = [{"role": "system", "content": "main"}]
    for _ in range(2 * _MOST_OPENINGS):
        go_on(bodies, messages)
        for fork in range(forks):
            go_on(bodies, [*messages, {"role": "user", "content": f"Judge, number {fork}."}])
    assert len(whole) == 1


def test_of_two_that_a_body_begins_with_the_longer_one_counts(whole: list[bytes]) -> None:
    bodies = Bodies()
    short, long = [bodies.read(spelled(MESSAGES[:count])) for count in (1, 4)]
    bodies.keep(long, long.value["messages"])
    bodies.keep(short, short.value["messages"])
    body = bodies.read(spelled(MESSAGES))
    assert [*map(id, body.value["messages"][:4])] == [*map(id, long.value["messages"])]
    assert len(whole) == 2


@given(st.data())
def test_bodies_of_conversations_in_any_order_say_what_they_say_as_a_whole(
    data: st.DataObject,
) -> None:
    """Clients keep to their spelling; some requests are answered after others were read."""
    sent: list[list[Any]] = [[]]
    under_way: list[tuple[Body, list[Any]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_bodies, "_MOST_OPENINGS", data.draw(st.integers(1, 4)))
        bodies = Bodies()
        for _ in range(data.draw(st.integers(1, 20))):
            before = data.draw(st.sampled_from(sent[-6:]))
            messages = [*before, *data.draw(st.lists(st.sampled_from(MESSAGES), max_size=2))]
            sent.append(messages)
            text = spelled(messages, **data.draw(st.sampled_from([{}, {}, {"tools": []}])))
            body = bodies.read(text)
            assert body.value == orjson.loads(text)
            assert body.digest == hashlib.sha256(text).digest()
            under_way.append((body, copy.deepcopy(messages)))
            while under_way and data.draw(st.booleans()):
                bodies.keep(*under_way.pop(data.draw(st.integers(0, len(under_way) - 1))))


def test_the_end_of_messages_is_looked_for_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _bodies._found
    looked: list[int] = []
    monkeypatch.setattr(_bodies, "_found", lambda *read: looked.append(at) or found(*read))
    bodies = Bodies()
    for at in range(1, 40):
        body = bodies.read(json.dumps({"user": at, "messages": MESSAGES}).encode())
        assert body.value == {"user": at, "messages": MESSAGES}
        bodies.keep(body, MESSAGES)
    assert looked == [1, 2, 4, 8, 16, 32]


def test_after_a_body_that_is_known_the_end_of_messages_is_looked_for_at_once(
    whole: list[bytes],
) -> None:
    bodies = Bodies()
    for name in ("one", "other", "third"):
        for count in range(1, 4):
            read_and_kept(bodies, spelled([{"content": name}, *MESSAGES[:count]]))
    assert len(whole) == 3


def test_messages_that_a_body_repeats_are_those_that_were_kept_for_its_own() -> None:
    bodies = Bodies()
    mine = json.loads(json.dumps(MESSAGES))
    bodies.keep(bodies.read(spelled(MESSAGES)), mine)
    assert [*map(id, bodies.read(spelled(MESSAGES)).value["messages"])] == [*map(id, mine)]


DEEP = b'{"a":%b}' % (b"[" * 990 + b"]" * 990)
MANY = b",".join([b"{}"] * 10_001)
LONG = b'{"content":"%b"}' % (b"x" * 1_000_000)
FIELDS = b",".join(b'"%d":0' % at for at in range(200))


@pytest.mark.parametrize(
    "sent",
    [
        [b'{"messages":[%b]}' % MANY],
        [b'{%b,"messages":[{}]}' % FIELDS],
        [b'{"a":%b,"messages":[{}]}' % LONG],
        [b'{"messages":[{}]}', b'{"messages":[{},%b]}' % MANY],
        [b'{"messages":[%b]}' % LONG],
        [b'{"messages":[{}]}', b'{"messages":[{},%b]}' % LONG],
    ],
    ids=["messages", "fields", "field", "new messages", "characters", "new characters"],
)
def test_the_end_of_messages_is_not_looked_for_behind_too_much(sent: list[bytes]) -> None:
    bodies = Bodies()
    for data in sent:
        body = read_and_kept(bodies, data)
        assert body.value == orjson.loads(data)
        assert body.digest == hashlib.sha256(data).digest()
    assert body._opening is None


@pytest.mark.parametrize("first", [b"", b"{},"])
def test_messages_that_are_nested_too_deeply_to_look_for_their_end_are_read(first: bytes) -> None:
    bodies = Bodies()
    read_and_kept(bodies, b'{"messages":[{}]}')
    data = b'{"messages":[%b%b]}' % (first, DEEP)
    body = bodies.read(data)
    assert body.digest == hashlib.sha256(data).digest()
    assert "a" in body.value["messages"][-1]
