"""Which sampled turn a request continues."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from turnleaf.gateway._history import _MOST_LATEST, History, Match, ThinkingRetention
from turnleaf.gateway._known import Known, digest_of
from turnleaf.gateway.protocols import RequestError, normalise

USER = {"role": "user", "content": "What is 2+2 and 3*3?"}
REPLY = {
    "role": "assistant",
    "content": "I'll compute both.\n",
    "reasoning_content": "\nTwo calls then.\n",
    "tool_calls": [
        {
            "id": f"call_{name}",
            "type": "function",
            "function": {"name": "calculate", "arguments": arguments},
        }
        for name, arguments in (("a", '{"expression":  "2+2"}'), ("b", '{"expression":  "3*3"}'))
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_a", "content": "4"},
    {"role": "tool", "tool_call_id": "call_b", "content": "9"},
]


def delivered(_: str) -> bool:
    return True


def recorded(history: History, messages: list[Any], reply: dict[str, Any], turn: str) -> None:
    conversation = history.read(messages, None)
    match = history.match(conversation, delivered)
    history.record(conversation, match, reply, turn, shows_reasoning=False)


def found(history: History, messages: list[Any], tools: Any = None) -> Match | None:
    return history.match(history.read(messages, tools), delivered)


@pytest.fixture
def history() -> History:
    history = History()
    recorded(history, [USER], REPLY, "turn-1")
    return history


def as_client(**changes: Any) -> dict[str, Any]:
    message = {**REPLY, **changes}
    return {name: value for name, value in message.items() if value is not ...}


def with_arguments(*arguments: Any) -> list[dict[str, Any]]:
    return [
        {**call, "function": {**call["function"], "arguments": one}}
        for call, one in zip(REPLY["tool_calls"], arguments, strict=True)
    ]


COMPACT = with_arguments('{"expression":"2+2"}', '{"expression":"3*3"}')

CLIENTS = {
    "verbatim": as_client(),
    "strands": as_client(
        content=[{"type": "text", "text": "I'll compute both.\n"}],
        reasoning_content=...,
        tool_calls=with_arguments('{"expression": "2+2"}', '{"expression": "3*3"}'),
    ),
    "openai stream": as_client(
        refusal=None,
        parsed=None,
        annotations=None,
        tool_calls=[{**call, "index": at} for at, call in enumerate(REPLY["tool_calls"])],
    ),
    "openai-agents": as_client(reasoning_content=...),
    "pydantic-ai": as_client(tool_calls=COMPACT),
    "langchain": as_client(reasoning_content=..., tool_calls=COMPACT),
    "stripped": as_client(content="I'll compute both."),
    "reasoning stripped": as_client(reasoning_content="Two calls then."),
    "named agent": as_client(name="planner"),
    "reasoning under its other name": as_client(
        reasoning_content=..., reasoning="\nTwo calls then.\n"
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send_back_is_recognised(history: History, client: str) -> None:
    match = found(history, [USER, CLIENTS[client], *RESULTS])
    assert match is not None
    assert match.turn_id == "turn-1"
    assert [message["content"] for message in match.new] == ["4", "9"]
    assert match.past()[1]["reasoning_content"].strip() == "Two calls then."
    assert match.past()[1]["tool_calls"][0]["function"]["arguments"] == {"expression": "2+2"}


CHANGES = {
    "content": as_client(content="I'll compute one."),
    "arguments": as_client(tool_calls=with_arguments('{"expression":"2+2"}', '{"expression":"3"}')),
    "argument type": as_client(
        tool_calls=with_arguments('{"expression":"2+2"}', '{"expression":true}')
    ),
    "name": as_client(
        tool_calls=[{**c, "function": {**c["function"], "name": "x"}} for c in REPLY["tool_calls"]]
    ),
    "a call fewer": as_client(tool_calls=REPLY["tool_calls"][:1]),
    "no calls": as_client(tool_calls=...),
    "reasoning": as_client(reasoning_content="Other thoughts."),
    "role": as_client(role="user", tool_calls=..., reasoning_content=...),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_edited_reply_is_a_new_branch_though_its_ids_are_known(
    history: History, change: str
) -> None:
    assert found(history, [USER, CHANGES[change], *RESULTS]) is None


def test_an_edited_prompt_or_other_tools_are_a_new_branch(history: History) -> None:
    assert found(history, [{**USER, "content": "What is 2+2?"}, REPLY, *RESULTS]) is None
    assert found(history, [{"role": "system", "content": "x"}, USER, REPLY, *RESULTS]) is None
    assert found(history, [USER, REPLY], tools=[{"type": "function"}]) is None
    assert found(history, [USER]) is None


def test_numbers_are_compared_with_their_types() -> None:
    sampled = '{"path": "b.txt", "n": 1, "opts": {"z": 0, "a": "é"}}'
    call = {"id": "c", "type": "function", "function": {"name": "edit", "arguments": sampled}}
    history = History()
    recorded(history, [USER], {"role": "assistant", "content": None, "tool_calls": [call]}, "t")

    def replayed(arguments: str) -> Match | None:
        again = {**call, "function": {"name": "edit", "arguments": arguments}}
        return found(history, [USER, {"role": "assistant", "tool_calls": [again]}])

    assert replayed('{"n":1,"opts":{"a":"\\u00e9","z":0},"path":"b.txt"}') is not None
    for other in ("true", "1.0", '"1"', "null"):
        arguments = json.loads(sampled) | {"n": json.loads(other)}
        assert replayed(json.dumps(arguments)) is None


@pytest.mark.parametrize("content", [None, "", [], ...])
def test_empty_contents_are_one(content: Any) -> None:
    history = History()
    recorded(history, [USER], as_client(content=None), "turn")
    message = as_client(content=content)
    match = found(history, [USER, message, *RESULTS])
    assert match is not None
    assert match.past()[1]["content"] == ""


def test_the_longest_match_wins(history: History) -> None:
    answer = {"role": "assistant", "content": "4 and 9"}
    recorded(history, [USER, REPLY, *RESULTS], answer, "turn-2")
    match = found(history, [USER, REPLY, *RESULTS, answer, USER])
    assert match is not None
    assert match.turn_id == "turn-2"
    edited = [{**RESULTS[0], "content": "5"}, RESULTS[1]]
    match = found(history, [USER, REPLY, *edited, answer])
    assert match is not None
    assert match.turn_id == "turn-1"
    assert [message["content"] for message in match.new] == ["5", "9", "4 and 9"]


def test_results_that_answer_other_calls_are_another_history(history: History) -> None:
    recorded(history, [USER, REPLY, *RESULTS], {"role": "assistant", "content": "x"}, "turn-2")
    swapped = [
        {**RESULTS[0], "tool_call_id": "call_b"},
        {**RESULTS[1], "tool_call_id": "call_a"},
    ]
    match = found(history, [USER, REPLY, *swapped])
    assert match is not None
    assert match.turn_id == "turn-1"


def test_equal_replies_are_told_apart_by_their_ids_then_by_delivery_then_by_age() -> None:
    def reply(call_id: str) -> dict[str, Any]:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    history = History()
    for turn in ("one", "two", "three"):
        conversation = history.read([USER], None)
        history.record(conversation, None, reply(f"call_{turn}"), turn, shows_reasoning=False)

    def chosen(call_id: str, undelivered: set[str]) -> str:
        conversation = history.read([USER, reply(call_id)], None)
        match = history.match(conversation, lambda turn: turn not in undelivered)
        assert match is not None
        assert match.past()[1]["tool_calls"][0]["id"] == call_id
        return match.turn_id

    assert chosen("call_two", {"two"}) == "two"
    assert chosen("unknown", set()) == "three"
    assert chosen("unknown", {"three"}) == "two"


def test_dropped_reasoning_matches_either_of_two_thoughts_and_sent_reasoning_its_own() -> None:
    history = History()
    for thought in ("first", "second"):
        reply = {"role": "assistant", "content": "yes", "reasoning_content": thought}
        recorded(history, [USER], reply, thought)
    for sent in ("first", "second"):
        message = {"role": "assistant", "content": "yes", "reasoning_content": sent}
        match = found(history, [USER, message])
        assert match is not None
        assert match.turn_id == sent
    match = found(history, [USER, {"role": "assistant", "content": "yes"}])
    assert match is not None
    assert match.turn_id == "second"


def test_as_sent_takes_dropped_reasoning_for_another_history() -> None:
    history = History("as_sent")
    recorded(history, [USER], REPLY, "turn-1")
    assert found(history, [USER, as_client(reasoning_content=...)]) is None
    assert found(history, [USER, REPLY]) is not None


@pytest.mark.parametrize(
    ("retention", "answered", "asked"),
    [("template", True, True), ("tool_cycle", False, True), ("all", False, False)],
)
def test_reasoning_is_the_templates_to_drop_as_long_as_it_is_not_retained(
    retention: ThinkingRetention, answered: bool, asked: bool
) -> None:
    history = History("restore", retention)
    recorded(history, [USER], REPLY, "turn-1")
    sent = as_client(reasoning_content=...)
    late = {"role": "system", "content": "Be brief."}
    for new, loses in (
        (RESULTS, answered),
        ([*RESULTS, late], answered),
        ([*RESULTS, USER], asked),
        ([USER, as_client(content="Edited."), *RESULTS], asked),
    ):
        match = found(history, [USER, sent, *new])
        assert match is not None
        assert match.carries_reasoning
        assert match.may_lose_reasoning is loses
    recorded(history, [{**USER, "content": "Hi"}], {"role": "assistant", "content": "x"}, "plain")
    match = found(history, [{**USER, "content": "Hi"}, {"role": "assistant", "content": "x"}, USER])
    assert match is not None
    assert not match.may_lose_reasoning


def test_reasoning_in_the_prompt_is_carried_by_the_reply(history: History) -> None:
    plain = {"role": "assistant", "content": "done"}
    messages = [USER, REPLY, *RESULTS]
    for shows in (True, False):
        conversation = history.read(messages, None)
        match = history.match(conversation, delivered)
        assert match is not None
        assert match.carries_reasoning
        history.record(conversation, match, plain, f"shows-{shows}", shows_reasoning=shows)
        following = found(history, [*messages, plain])
        assert following is not None
        assert following.turn_id == f"shows-{shows}"
        assert following.carries_reasoning is shows


def test_equal_branches_are_told_apart_by_any_id_on_the_way() -> None:
    history = History()
    done = {"role": "assistant", "content": "done"}
    branches = {}
    for name in "ab":
        call = {"id": f"call_{name}", "function": {"name": "f", "arguments": "{}"}}
        reply = {"role": "assistant", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": f"call_{name}", "content": "4"}
        conversation = history.read([USER], None)
        history.record(conversation, None, reply, f"{name}-1", shows_reasoning=False)
        branches[name] = [USER, reply, result]
    for name, messages in branches.items():
        recorded(history, messages, done, f"{name}-2")
    for name, messages in branches.items():
        match = found(history, [*messages, done, USER])
        assert match is not None
        assert match.turn_id == f"{name}-2"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hello", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0] of type 'image_url'",
        ),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": 1}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_a_malformed_message_is_refused_by_name(message: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        History().read([message], None)
    assert refused.value.status == 400
    assert str(refused.value).startswith(field)


def test_messages_nested_beyond_reason_are_refused() -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        History().read([{"role": "user", "content": "x", "extra": deep}], None)
    arguments = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    conversation = History().read([{"role": "assistant", "tool_calls": [call]}], None)
    assert conversation.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "arguments",
    ['{"a": NaN}', '{"a": "\\ud800"}', '{"a": [{"\\ud800": 1}]}', "[1]", "{'a': 1}"],
)
def test_arguments_that_are_no_json_object_stay_text(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    conversation = History().read([{"role": "assistant", "tool_calls": [call]}], None)
    assert conversation.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def dialogue(history: History, *, turns: int) -> Iterator[list[dict[str, Any]]]:
    """Record so many turns; yields what the client says behind each, in a spelling of its own."""
    messages: list[dict[str, Any]] = [USER]
    for turn in range(turns):
        reply = {"role": "assistant", "content": f"reply {turn}"}
        recorded(history, messages, reply, f"turn-{turn}")
        messages += [{**reply, "refusal": None}, {"role": "user", "content": f"next {turn}"}]
        yield messages


def test_a_message_is_normalised_once_however_a_client_spells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def counted(raw: Any, where: str) -> Any:
        seen.append(where)
        return normalise(raw, where)

    monkeypatch.setattr("turnleaf.gateway._known.normalise", counted)
    for _ in dialogue(History(), turns=10):
        pass
    # The first message, and of each turn the reply, the client's spelling of it, and what is new.
    assert len(seen) == 1 + 10 + 2 * 9


def test_a_message_is_normalised_once_in_conversations_that_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "turnleaf.gateway._known.normalise",
        lambda raw, where: seen.append(raw["content"]) or normalise(raw, where),
    )
    history = History()
    conversations = [[{"role": "system", "content": name}] for name in ("one", "other")]
    for turn in range(10):
        for messages in conversations:
            who = f"{messages[0]['content']} {turn}"
            messages.append({"role": "user", "content": f"ask {who}"})
            reply = {"role": "assistant", "content": f"reply {who}"}
            recorded(history, copy.deepcopy(messages), reply, who)
            messages.append(reply)
    assert len(seen) == len(set(seen))


def test_nothing_is_kept_of_a_request_that_led_to_no_turn() -> None:
    history = History()
    before = repr(vars(history))
    history.match(history.read([USER, REPLY, *RESULTS], [{"type": "function"}]), delivered)
    with pytest.raises(RequestError):
        history.read([USER, {"role": "robot"}], None)
    assert repr(vars(history)) == before


@given(strategies.agent_chats(), st.data())
def test_a_recorded_reply_is_found_again_behind_any_continuation(
    chat: list[dict[str, Any]], data: st.DataObject
) -> None:
    history = History()
    turns = [at for at, message in enumerate(chat) if message["role"] == "assistant" and at]
    for at in turns:
        recorded(history, chat[:at], chat[at], f"turn-{at}")
    upto = data.draw(st.integers(1, len(chat)))
    sent = [data.draw(strategies.as_some_client_sends(message)) for message in chat[:upto]]
    match = found(history, sent)
    expected = [at for at in turns if at < upto]
    if not expected:
        assert match is None
        return
    assert match is not None
    assert match.turn_id == f"turn-{expected[-1]}"
    assert len(match.past()) == expected[-1] + 1
    assert len(match.new) == upto - len(match.past())


NUMBERED = [
    as_client(tool_calls=with_arguments({"at": one}, "{}"), reasoning_content=...)
    for one in (1, True, 1.0)
]
SAID = [
    USER,
    *NUMBERED,
    *RESULTS,
    {"role": "user", "content": "go on"},
    {"role": "assistant", "content": "so?"},
    {"role": "assistant", "content": "so?", "reasoning_content": "hm"},
]


def test_messages_with_numbers_in_them_are_recalled_as_well() -> None:
    history = History()
    calls = [{**call, "index": at} for at, call in enumerate(REPLY["tool_calls"])]
    messages = [USER, as_client(tool_calls=calls), *RESULTS]
    recorded(history, messages, {"role": "assistant", "content": "so?"}, "turn-1")
    assert history.read([*messages, USER], None)._recalled == len(messages)


def test_a_number_of_another_type_is_not_recalled() -> None:
    history = History()
    answer = {"role": "assistant", "content": "so?"}
    recorded(history, [USER, NUMBERED[0], *RESULTS], answer, "turn-1")
    matches = [found(history, [USER, one, *RESULTS, answer]) for one in NUMBERED]
    assert [match and match.turn_id for match in matches] == ["turn-1", None, None]


def test_arguments_keep_the_order_in_which_they_are_sent() -> None:
    history = History()
    for turn, arguments in enumerate(({"a": "1", "b": "2"}, {"b": "2", "a": "1"})):
        call = as_client(tool_calls=with_arguments(arguments, "{}"))
        _, said, *_ = history.read([USER, call, *RESULTS], None).messages
        assert list(said["tool_calls"][0]["function"]["arguments"]) == list(arguments)
        recorded(history, [USER, call, *RESULTS], {"role": "assistant", "content": ""}, f"{turn}")


def one_that_recalls_and_one_that_does_not() -> list[History]:
    recalling, reference = History(), History()
    reference._recall = lambda *_: (None, 0)  # type: ignore[method-assign]  # recalls nothing
    return [recalling, reference]


def told(match: Match | None) -> Any:
    return match and (match.turn_id, match.past(), match.new)


@given(st.lists(st.lists(st.sampled_from(SAID), min_size=1, max_size=6), max_size=8))
def test_messages_that_are_recalled_are_those_that_were_sent(
    conversations: list[list[dict[str, Any]]],
) -> None:
    histories = one_that_recalls_and_one_that_does_not()
    for at, messages in enumerate(conversations):
        one, other = [found(history, copy.deepcopy(messages)) for history in histories]
        assert told(one) == told(other)
        for history in histories:
            reply = {"role": "assistant", "content": "so?"}
            recorded(history, copy.deepcopy(messages), reply, f"turn-{at}")


@given(st.data())
def test_a_conversation_is_followed_from_where_the_last_one_was_left(data: st.DataObject) -> None:
    """What is recorded meanwhile, and in which order, changes nothing."""
    histories = one_that_recalls_and_one_that_does_not()
    conversations: list[list[dict[str, Any]]] = [[]]
    begun: list[Any] = []

    def record_some() -> None:
        while begun and data.draw(st.integers(0, 3)):
            turn, before, requests = begun.pop(data.draw(st.integers(0, len(begun) - 1)))
            reply = data.draw(st.sampled_from(SAID[-2:]))
            for history, (conversation, match) in zip(histories, requests, strict=True):
                history.record(conversation, match, reply, turn, shows_reasoning=False)
            conversations.extend([[*before, reply], [*before, SAID[-2]]])

    for at in range(data.draw(st.integers(1, 8))):
        said = data.draw(st.sampled_from([USER, SAID[-3]]))
        messages = [*data.draw(st.sampled_from(conversations)), said]
        tools = [{"type": "function"}] if data.draw(st.integers(0, 5)) == 5 else None
        record_some()
        read = [history.read(copy.deepcopy(messages), tools) for history in histories]
        record_some()
        one, other = [
            history.match(conversation, delivered)
            for history, conversation in zip(histories, read, strict=True)
        ]
        assert told(one) == told(other)
        begun.append((f"turn-{at}", messages, list(zip(read, (one, other), strict=True))))


def test_only_what_follows_the_last_match_is_looked_up() -> None:
    history = History()
    for turn, messages in enumerate(dialogue(history, turns=5)):
        conversation = history.read(messages, None)
        assert history._start(conversation).depth == 2 * turn
        assert len(conversation._known) == 2 * turn + 3


def several(count: int) -> list[list[dict[str, Any]]]:
    """So many conversations that have nothing in common."""
    return [[{"role": "system", "content": f"You are number {at}."}, USER] for at in range(count)]


def goes_on(history: History, conversations: list[list[dict[str, Any]]], turn: int) -> list[int]:
    """A turn of each, all in flight at once; how many messages of each were recalled."""
    begun = []
    for messages in conversations:
        conversation = history.read(messages, None)
        assert history._start(conversation).depth == (2 * turn - 1 if turn > 1 else 0)
        begun.append((messages, conversation, history.match(conversation, delivered)))
    for at, (messages, conversation, match) in enumerate(begun):
        reply = {"role": "assistant", "content": f"reply {turn}"}
        history.record(conversation, match, reply, f"turn-{turn}.{at}", shows_reasoning=False)
        messages += [reply, {"role": "user", "content": f"next {turn}"}]
    return [conversation._recalled for _, conversation, _ in begun]


def test_conversations_in_turn_are_all_recalled_and_followed_from_where_they_were_left() -> None:
    history = History()
    conversations = several(_MOST_LATEST)
    assert goes_on(history, conversations, 0) == [0] * _MOST_LATEST
    for turn in range(1, 5):
        assert goes_on(history, conversations, turn) == [2 * turn + 1] * _MOST_LATEST


def test_of_too_many_conversations_the_latest_are_recalled() -> None:
    history = History()
    conversations = several(_MOST_LATEST + 1)
    goes_on(history, conversations, 0)
    recalled = [history.read(messages, None)._recalled for messages in conversations]
    assert recalled == [0] + [3] * _MOST_LATEST


def test_a_conversation_counts_once_however_long_it_is() -> None:
    history = History()
    others = several(_MOST_LATEST - 1)
    goes_on(history, others, 0)
    for _ in dialogue(history, turns=_MOST_LATEST + 1):
        pass
    assert goes_on(history, others, 1) == [3] * len(others)


def test_a_conversation_counts_once_however_many_replies_it_has() -> None:
    history = History()
    others = several(_MOST_LATEST - 1)
    goes_on(history, others, 0)
    conversation = history.read([USER], None)
    for at in range(_MOST_LATEST):
        reply = {"role": "assistant", "content": f"choice {at}"}
        history.record(conversation, None, reply, f"choice-{at}", shows_reasoning=False)
    assert goes_on(history, others, 1) == [3] * len(others)


def test_of_conversations_that_begin_alike_the_one_that_shares_most_is_recalled() -> None:
    history = History()
    long = [*dialogue(history, turns=4)][-1]
    recorded(history, [USER], {"role": "assistant", "content": "else"}, "other")
    assert history.read(long, None)._recalled == 7


def test_what_conversations_begin_with_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    beginning = [{"role": "user", "content": f"{at}"} for at in range(5)]
    for at in range(_MOST_LATEST + 1):
        messages = [*beginning, *[{"role": "user", "content": f"task {at}"}] * bool(at)]
        recorded(history, copy.deepcopy(messages), SAID[-2], f"turn-{at}")
    compared: list[Known] = []
    is_repeated_by = Known.is_repeated_by
    monkeypatch.setattr(
        Known,
        "is_repeated_by",
        lambda known, raw: compared.append(known) or is_repeated_by(known, raw),
    )
    assert history.read(copy.deepcopy(messages), None)._recalled == len(messages)
    assert len(compared) == len(beginning) + _MOST_LATEST


def test_what_differs_is_not_made_bytes_of_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = [{"role": "user", "content": "x", "index": at} for at in range(2)]
    history = History()
    recorded(history, [one], SAID[-2], "turn-1")
    ((known, _),) = [latest.known for latest in history._latest]
    made: list[bytes] = []
    monkeypatch.setattr(
        "turnleaf.gateway._known.digest_of", lambda data: made.append(data) or digest_of(data)
    )
    assert not known.is_repeated_by(other)
    assert made == []
    assert known.is_repeated_by({**one})
    assert not known.is_repeated_by({**one, "index": False})


def test_a_reply_recorded_during_a_call_is_found_behind_it() -> None:
    history = History()
    *_, silent, thought = SAID
    recorded(history, [USER], silent, "turn-1")
    following = history.read([USER, silent, USER], None)
    match = history.match(following, delivered)
    recorded(history, [USER], thought, "turn-2")
    history.record(following, match, silent, "turn-3", shows_reasoning=False)
    latest = found(history, [USER, silent])
    assert latest is not None
    assert latest.turn_id == "turn-2"


def test_a_reply_recorded_after_a_request_was_read_is_found_by_it() -> None:
    history = History()
    *_, silent, thought = SAID
    recorded(history, [USER], silent, "turn-1")
    recorded(history, [USER, silent, USER], silent, "turn-2")
    again = history.read([USER, silent, USER], None)
    begun = history.read([USER], None)
    history.record(begun, None, thought, "turn-3", shows_reasoning=False)
    match = history.match(again, delivered)
    assert match is not None
    assert match.turn_id == "turn-3"


def test_what_goes_on_behind_a_reply_that_nobody_gave_is_still_found_from_there() -> None:
    history = History()
    *_, silent, thought = SAID
    recorded(history, [USER], {**thought, "reasoning_content": "well"}, "turn-1")
    recorded(history, [USER, thought, USER], silent, "turn-2")
    # Without reasoning the reply may be either; to this it was turn-1's.
    recorded(history, [USER, silent, *RESULTS], silent, "turn-3")
    assert history._start(history.read([USER, silent, USER], None)).depth == 2
    match = found(history, [USER, silent, USER, silent, USER])
    assert match is not None
    assert match.turn_id == "turn-2"
