"""Every hypothesis strategy of the tests, and the models that some of them carry along."""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, get_args

import attrs
import numpy as np
from hypothesis import strategies as st

from tests.spelling import Raw, Spelling
from turnleaf.core import (
    Exclusion,
    Replay,
    Speculation,
    Trajectory,
    Turn,
    TurnTimings,
    WeightSpan,
)

LAYERS, TOP_K = 2, 3

# So few different tokens that paths share prefixes by chance as well as by design.
token_lists = st.lists(st.integers(0, 2), max_size=4)
exclusions = st.sampled_from([None, None, None, *get_args(Exclusion)])
orders_of_arrival = st.integers(1, 8).flatmap(lambda count: st.permutations(range(count)))


@attrs.define
class Recorded:
    """A trajectory and, beside it, what each turn was asked and answered, in full.

    Every sampled token has a log-probability of its own, so that it can be told from all others.
    """

    trajectory: Trajectory = attrs.Factory(Trajectory)
    prompts: dict[str, list[int]] = attrs.Factory(dict)
    paths: dict[str, list[int]] = attrs.Factory(dict)
    sampled: int = 0

    def add(self, turn: Turn, prompt: list[int]) -> None:
        self.trajectory.add(turn)
        self.prompts[turn.id] = prompt
        self.paths[turn.id] = prompt + turn.output.tolist()

    def new_logprobs(self, count: int) -> list[float]:
        self.sampled += count
        return [-number / 1024 for number in range(self.sampled - count + 1, self.sampled + 1)]


@st.composite
def replays(
    draw: st.DrawFn, *, keep: int, end: int, sampled: int, complete: bool = False
) -> Replay | None:
    """Replay data that fits a turn of these lengths; unless `complete`, some or all is missing."""
    routed_experts = top_p_ids = top_p_offsets = None
    if complete or draw(st.integers(0, 3)):
        rows = max(end - 1 - max(keep - 1, 0), 0)
        largest = draw(st.sampled_from([200, 60_000, 70_000]))
        seed = draw(st.integers(0, 2**32 - 1))
        routed_experts = np.random.default_rng(seed).integers(largest, size=(rows, LAYERS, TOP_K))
    if complete or draw(st.integers(0, 3)):
        ids = st.sampled_from([0, 255, 256, 151_643])
        kept = draw(st.lists(st.lists(ids, max_size=3), min_size=sampled, max_size=sampled))
        top_p_ids = [token for span in kept for token in span]
        top_p_offsets = np.cumsum([0, *map(len, kept)])
    if routed_experts is None and top_p_ids is None:
        return None
    return Replay(routed_experts=routed_experts, top_p_ids=top_p_ids, top_p_offsets=top_p_offsets)


@st.composite
def _turns(
    draw: st.DrawFn,
    recorded: Recorded,
    *,
    index: int,
    parent: str | None,
    keep: int,
    prompt: list[int],
    output: list[int],
    replayed: bool,
) -> Turn:
    end = keep + len(prompt) + len(output)
    cut = draw(st.integers(0, len(output)))
    spans = (WeightSpan("one", cut), WeightSpan("two", len(output) - cut))
    return Turn(
        id=f"turn-{index}",
        index=index,
        parent=parent,
        keep=keep,
        prompt=prompt,
        output=output,
        logprobs=recorded.new_logprobs(len(output)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        weight_versions=draw(st.sampled_from([(), spans])),
        cached_tokens=draw(st.integers(0, 5)),
        timings=TurnTimings(started=index / 8, engine=0.25, total=0.5),
        replay=draw(replays(keep=keep, end=end, sampled=len(output), complete=replayed)),
        speculation=draw(st.sampled_from([None, Speculation(3, 8, 2)])),
        excluded=draw(exclusions),
    )


def _outputs(recorded: Recorded) -> st.SearchStrategy[list[int]]:
    earlier = [turn.output.tolist() for turn in recorded.trajectory.turns]
    return st.one_of(token_lists, st.sampled_from(earlier)) if earlier else token_lists


@st.composite
def _full_prompts(draw: st.DrawFn, recorded: Recorded) -> list[int]:
    """Anything, an earlier prompt again, or an earlier path, cut or whole, with more behind it."""
    kind = draw(st.sampled_from(["anything", "again", "cut", "whole", "whole"]))
    if kind == "anything" or not recorded.prompts:
        return draw(token_lists)
    earlier = draw(st.sampled_from(sorted(recorded.prompts)))
    if kind == "again":
        return recorded.prompts[earlier]
    path = recorded.paths[earlier]
    upto = len(path) if kind == "whole" else draw(st.integers(0, len(path)))
    return path[:upto] + draw(token_lists)


@st.composite
def _grown(draw: st.DrawFn, *, located: bool, replayed: bool = False) -> Recorded:
    recorded = Recorded()
    for index in draw(orders_of_arrival):
        output = draw(_outputs(recorded))
        if located:
            full = draw(_full_prompts(recorded))
            parent, keep = recorded.trajectory.locate(np.array(full, dtype=np.int32))
            prompt = full[keep:]
        else:
            parent = draw(st.sampled_from([None, *sorted(recorded.paths)]))
            keep = 0 if parent is None else draw(st.integers(0, len(recorded.paths[parent])))
            prompt = draw(token_lists)
            full = ([] if parent is None else recorded.paths[parent][:keep]) + prompt
        turn = draw(
            _turns(
                recorded,
                index=index,
                parent=parent,
                keep=keep,
                prompt=prompt,
                output=output,
                replayed=replayed,
            )
        )
        recorded.add(turn, full)
        if draw(st.integers(0, 2)) == 0:
            again = draw(st.sampled_from(sorted(recorded.paths)))
            recorded.trajectory.exclude(again, draw(exclusions))
    for code in draw(st.lists(st.sampled_from(["engine_unavailable", ""]), max_size=2)):
        recorded.trajectory.refuse(code)
    return recorded


recorded_by_gateway = _grown(located=True)
"""Trees that `locate` builds from full prompts, turns answered out of order, some excluded."""

recorded = st.one_of(recorded_by_gateway, _grown(located=False))
"""The same, and trees with any parents and any kept lengths that `add` accepts."""

recorded_with_replay = _grown(located=True, replayed=True)
"""Trees of which every turn recorded all that a trainer may replay."""

names = st.text("aB_é\u2028\ud800", max_size=4)

garbage = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**63, -(2**70), 10**400]),
        st.floats(),
        names,
        st.sampled_from(["AAAA", "AAAAAA==", "uint8", "object", "stop"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    here = [(value, key) for key in keys]
    inside = [child for _, key in here if isinstance(child := value[key], dict | list)]
    return here + [place for child in inside for place in _places(child)]


def _garble(draw: st.DrawFn, document: dict[str, Any]) -> bytes:
    """The document after a few values in it were replaced, removed, moved or renamed."""
    for _ in range(draw(st.integers(1, 3))):
        places = _places(document)
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "remove", "move", "rename"])):
            case "replace":
                container[key] = draw(garbage)
            case "remove":
                del container[key]
            case "move":
                other, other_key = draw(st.sampled_from(places))
                container[key] = json.loads(json.dumps(other[other_key]))
            case "rename" if isinstance(container, dict):
                container[draw(names)] = container.pop(key)
    return json.dumps(document).encode()


@st.composite
def garbled_trajectories(draw: st.DrawFn) -> bytes:
    """A serialised trajectory that was damaged."""
    return _garble(draw, json.loads(draw(recorded).trajectory.to_json()))


@st.composite
def leaf_batches(draw: st.DrawFn) -> tuple[list[float], list[Any], list[Any], list[bool]]:
    """Rewards, group ids, rollout ids and removals of forked rollouts, one entry per leaf."""
    as_text = draw(st.booleans())
    leaves = []
    for rollout in range(draw(st.integers(0, 12))):
        group = draw(st.integers(-2, 2))
        reward = draw(st.sampled_from([0.0, 0.1, 1.0, -3.5, 1e4]))
        removed = draw(st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=4))
        if all(removed):
            reward = draw(st.sampled_from([reward, float("nan"), float("inf")]))
        name = 1_000 - 7 * rollout
        ids = (f"group {group}", f"rollout {name}") if as_text else (group, name)
        leaves += [(reward, *ids, leaf_removed) for leaf_removed in removed]
    leaves = draw(st.permutations(leaves))
    rewards, groups, rollouts, removed = zip(*leaves, strict=True) if leaves else ((), (), (), ())
    return list(rewards), list(groups), list(rollouts), list(removed)


# Chats as agents have them, as plain JSON.

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def replies(draw: st.DrawFn) -> dict[str, Any]:
    """An assistant message as the gateway sends it."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(texts)
    arguments = st.dictionaries(texts, json_values, max_size=2).map(json.dumps)
    calls = draw(st.lists(st.tuples(st.sampled_from("fg"), arguments), max_size=2))
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{draw(st.uuids())}",
                "type": "function",
                "function": {"name": name, "arguments": text},
            }
            for name, text in calls
        ]
    return message


@st.composite
def agent_chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation that begins with a user, maybe after a system message."""
    chat: list[dict[str, Any]] = []
    if draw(st.booleans()):
        chat.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 4))):
        calls = chat[-1].get("tool_calls", []) if chat else []
        if calls:
            for call in calls:
                result = {"role": "tool", "tool_call_id": call["id"], "content": draw(texts)}
                chat.append(result)
        else:
            chat.append({"role": "user", "content": draw(texts)})
        chat.append(draw(replies()))
    return chat


@st.composite
def as_some_client_sends(draw: st.DrawFn, message: dict[str, Any]) -> dict[str, Any]:
    """The same message after the changes that real clients make to it."""
    sent = dict(message)
    content = message["content"] or ""
    forms: list[Any] = [content, [{"type": "text", "text": content}], f"\n{content} "]
    sent["content"] = draw(st.sampled_from(forms))
    if not content.strip() and draw(st.booleans()):
        sent["content"] = None
        if draw(st.booleans()):
            del sent["content"]
    if draw(st.booleans()):
        sent.pop("reasoning_content", None)
    if "tool_calls" in message and draw(st.booleans()):
        separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
        sent["tool_calls"] = [
            {
                **call,
                "index": at,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(
                        json.loads(call["function"]["arguments"]),
                        sort_keys=True,
                        separators=separators,
                        ensure_ascii=False,
                    ),
                },
            }
            for at, call in enumerate(message["tool_calls"])
        ]
    return sent


@st.composite
def chat_bodies_of(draw: st.DrawFn, messages: list[Any]) -> bytes:
    """A request with these messages, in some client's spelling of JSON, maybe with other fields
    about, and maybe with a field twice."""
    space = st.sampled_from(["", "", " ", "\n\t"])
    before, behind = draw(space), draw(space)
    comma, colon = f"{before},{behind}", f"{before}:{behind}"
    ensure_ascii = draw(st.booleans())

    def dumped(value: Any) -> str:
        return json.dumps(value, separators=(comma, colon), ensure_ascii=ensure_ascii)

    spelled = f"[{before}{comma.join(map(dumped, messages))}{behind}]"
    name = draw(st.sampled_from(['"messages"'] * 4 + [r'"mess\u0061ges"']))
    others = st.dictionaries(st.sampled_from(["model", "tools", "user"]), json_values, max_size=2)
    first = [f"{dumped(key)}{colon}{dumped(value)}" for key, value in draw(others).items()]
    last = [f"{dumped(key)}{colon}{dumped(value)}" for key, value in draw(others).items()]
    again = draw(st.sampled_from([None] * 6 + ["[]", "[{}]", "1", spelled]))
    if again is not None:
        draw(st.sampled_from([first, last])).append(f'"messages"{colon}{again}')
    fields = [*first, f"{name}{colon}{spelled}", *last]
    return f"{before}{{{behind}{comma.join(fields)}{before}}}{behind}".encode()


@st.composite
def garbled_engine_replies(draw: st.DrawFn) -> bytes:
    """An SGLang reply of two tokens that was damaged."""
    meta_info = {
        "id": "turn.0",
        "finish_reason": {"type": draw(st.sampled_from(["stop", "abort"])), "matched": 9},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_version": "two",
        "weight_versions": [
            {"version": "one", "start": 0, "end": 1},
            {"version": "two", "start": 1, "end": 2},
        ],
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
        "top_p_token_ids": draw(st.sampled_from([[7, 1, 9], "BwAAAAEAAAAJAAAA"])),
        "top_p_token_offsets": draw(st.sampled_from([[0, 2, 3], "AAAAAAIAAAADAAAA"])),
        "routed_experts": draw(st.sampled_from([[5, 300] * 4, "BQAAACwBAAA=", [5, 300] * 3])),
        "spec_verify_ct": 1,
    }
    document = {"text": "", "output_ids": [7, 9], "meta_info": meta_info}
    return _garble(draw, document)


@st.composite
def streamed_replies(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """An SGLang reply to a prompt of three tokens, and the same as a stream, in chunks as they may
    arrive: incremental, cumulative, or incremental up to an abort that repeats everything."""
    entries = draw(
        st.lists(st.tuples(st.floats(-30, 0, width=32), st.integers(0, 2**31 - 1), st.none()))
    )
    finish = draw(st.sampled_from(["stop", "length", "abort"]))
    meta_info = {
        "finish_reason": {"type": finish, "matched": draw(st.sampled_from([None, 9, "END"]))},
        "prompt_tokens": 3,
        "completion_tokens": len(entries),
        "cached_tokens": draw(st.integers(0, 3)),
        "weight_version": "two",
        "spec_verify_ct": draw(st.none() | st.integers(0, 9)),
        "output_token_logprobs": entries,
    }
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(entries)))
        meta_info["weight_versions"] = [
            {"version": "one", "start": 0, "end": cut},
            {"version": "two", "start": cut, "end": len(entries)},
        ]
    ends = sorted(draw(st.lists(st.integers(0, len(entries)))))
    cumulative = draw(st.booleans())
    repeats = cumulative or (finish == "abort" and draw(st.booleans()))
    events = [
        {
            **{name: value for name, value in meta_info.items() if name != "weight_versions"},
            "finish_reason": None,
            "completion_tokens": end,
            "output_token_logprobs": entries[0 if cumulative else begin : end],
        }
        for begin, end in pairwise([0, *ends])
    ]
    told = [0, *ends][-1]
    events.append({**meta_info, "output_token_logprobs": entries[0 if repeats else told :]})
    sent = b"".join(
        b"data: " + json.dumps({"text": "", "meta_info": event}).encode() + b"\n\n"
        for event in events
    )
    sent += b"data: [DONE]\n\n"
    cuts = sorted(draw(st.sets(st.integers(1, len(sent) - 1), max_size=8)))
    chunks = [sent[one:other] for one, other in pairwise([0, *cuts, len(sent)])]
    return json.dumps({"meta_info": meta_info}).encode(), chunks


payloads = st.dictionaries(st.text().filter(lambda key: key != "_config"), json_values, max_size=4)
envelope_states = st.one_of(
    st.fixed_dictionaries(
        {"status": st.sampled_from(["in_progress", "interrupted", "not_found"])},
    ),
    st.fixed_dictionaries({"status": st.just("completed"), "result": json_values}),
    st.fixed_dictionaries({"status": st.just("completed"), "error": st.text(max_size=20)}),
)
"""What a reply in the envelope of background invocations says, without version and id."""
real_numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**40), 2**40)
rewards = st.one_of(
    real_numbers.filter(lambda number: abs(number) <= float(np.finfo(np.float32).max)),
    st.floats(-1e30, 1e30).map(np.float32),
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
)
bad_rewards = st.one_of(
    st.booleans(),
    st.booleans().map(np.bool_),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), np.float32("nan"), 1e39, 10**400]),
    st.text(),
    real_numbers.map(str),
    st.complex_numbers(),
    st.lists(real_numbers, max_size=2),
    st.just(np.zeros(1)),
)


# Texts that messages are made of: any character at all, and what templates treat in a special way,
# but nothing that could be a control token.
chat_texts = (
    st.lists(
        st.one_of(
            st.text(max_size=12),
            st.sampled_from(["\n", " ", "None", "é", "e\u0301", "日", '"', "<", ">"]),
        ),
        max_size=4,
    )
    .map("".join)
    .filter(lambda text: not re.search(r"<[^<]+>", text))
)

# Control tokens, and pieces of them that only become one beside another piece.
control_texts = st.lists(
    st.one_of(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"]),
        st.sampled_from(["<tool_response>", "</tool_response>", "a", "123", "system", "\n", " "]),
        st.sampled_from(["<", "<|", "<|im_", "start|>", "think>", ">", "|>", "</", "end|>"]),
    ),
    max_size=6,
).map("".join)

_json_keys = st.text("abc_", min_size=1, max_size=3)


def spelled(controls: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts of control tokens, and of pieces that only become one beside another piece."""
    pieces = [
        piece
        for token in controls
        for at in (1, 2, len(token) // 2, len(token) - 1)
        for piece in (token[:at], token[at:])
    ]
    return st.lists(
        st.one_of(
            st.sampled_from(list(controls)),
            st.sampled_from(pieces),
            st.sampled_from(["a", "123", "system", "\n", " "]),
        ),
        max_size=6,
    ).map("".join)


@st.composite
def chats(
    draw: st.DrawFn, texts: st.SearchStrategy[str], *, most_calls: int = 2
) -> list[dict[str, Any]]:
    """A conversation with tools as renderers are given it; at least one reply, calls answered."""
    arguments = st.dictionaries(
        st.one_of(_json_keys, texts), st.one_of(texts, st.integers(), st.booleans()), max_size=2
    )
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    messages.append({"role": "user", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 3))):
        reply: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
        messages.append(reply)
        calls = [
            {
                "id": f"call_{len(messages)}_{n}",
                "type": "function",
                "function": {
                    "name": draw(st.sampled_from(["search", "run"])),
                    "arguments": draw(arguments),
                },
            }
            for n in range(draw(st.integers(0, most_calls)))
        ]
        if calls:
            reply["tool_calls"] = calls
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": draw(texts)}
                for call in calls
            ]
        for _ in range(draw(st.integers(0 if calls else 1, 1))):
            messages.append({"role": "user", "content": draw(texts)})
    return messages


told_reasoning = st.dictionaries(
    st.sampled_from(["reasoning_content", "thinking", "reasoning", "name"]),
    st.sampled_from([None, "", "so"]),
)
"""What may stand in a message beside, under each name that reasoning has somewhere."""


# Output as models write it, well-formed and not.
output_texts = st.lists(
    st.one_of(
        st.text(max_size=5),
        st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "\n"]),
        st.sampled_from(["<function=f>", "</function>", "<parameter=p>", "</parameter>"]),
        st.sampled_from(['"', "{", "}", ":", ",", "NaN", "[" * 3000, '{"t": "</tool_call>"}']),
        st.sampled_from(['{"name": "a", "arguments": {"x": [1,  2]}}', '{"name": "c"', "{}"]),
        st.just(', "arguments": '),
        st.sampled_from(["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f", ";"]),
        st.sampled_from(
            ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"]
        ),
        st.sampled_from(["```json\n", "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]),
        st.sampled_from(['{"name": "a", "parameters": {}}', "<|python_tag|>"]),
    ),
    max_size=14,
).map("".join)

harmony_texts = st.sampled_from(
    [
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        *("<|constrain|>", "assistant", "analysis", "commentary", "final", " to=functions.f"),
        *("json", "{}", '{"a": 1}', "hm", "\n", "é"),
    ]
)
"""What harmony is made of: meant as a control token, or as text."""


THINKING_FRAMES = (
    *(("", ""), ("", ""), ("<think>\n", "\n</think>\n\n"), ("", "\n</think>\n\n")),
    *((" <think>", "</think>"), ("<think>\n\n", "\n")),
)
HARMONY_FRAMES = (
    ("", "<|start|>assistant"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("<|channel|>final<|message|>", "<|end|><|start|>assistant"),
    ("<|channel|>commentary<|message|>", "<|start|>assistant"),
    ("", ""),
)


@st.composite
def sampled_fragments(draw: st.DrawFn, calls: Sequence[str]) -> list[tuple[str, bool, int | None]]:
    """Stretches of an output with calls like those of `calls`: their text, whether control tokens
    in it are meant, and how many of its tokens were sampled; None is all."""
    call = st.sampled_from(calls)
    space = st.sampled_from(
        ["\n", "\n", " ", "\n\n", "\n\n\n", " \n", "; ", "\u00a0", "yes", "a\n"]
    )
    pieces = st.one_of(
        call,
        call,
        call,
        st.builds(
            lambda call, at, length, more: call[:at] + more + call[at + length :],
            call,
            st.integers(0, len(calls[0])),
            st.integers(0, 12),
            st.sampled_from(["", "", '"', "}", "</tool_call>", "STOP", "日", "\n"]),
        ),
        space,
        space,
        space,
        st.sampled_from(["STO", "STOP", "P", "\nObs", "e", "ee", "<", "|", "<|"]),
        st.sampled_from(["日本", "🙂", "é", "e\u0301", "{", '{"a": 1}', "\ufffd"]),
        st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "</thi", "<tool_"]),
        st.sampled_from(
            ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"]
        ),
        st.sampled_from(["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|im_end|>"]),
        st.text(max_size=4),
    )
    piece = st.tuples(
        pieces,
        st.sampled_from([*[True] * 9, False]),
        st.sampled_from([*[None] * 9, 1, 2, 5]),
    )
    frames = st.sampled_from(HARMONY_FRAMES if calls[0].startswith("<|") else THINKING_FRAMES)
    fragments: list[tuple[str, bool, int | None]] = []
    for opening, closing in draw(st.lists(frames, min_size=1, max_size=3)):
        inner = draw(st.lists(piece, max_size=5))
        fragments += [(opening, True, None), *inner, (closing, True, None)]
    return fragments


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Where a sequence is cut into chunks, its end included."""
    size = draw(st.sampled_from([1, 1, 2, 5, 1000]))
    return [*range(size, length, size), length]


# What random agents and models do; § stands for a word that is found nowhere else.

_spoken = st.lists(
    st.sampled_from(
        [
            "§",
            "§",
            " ",
            "\n\n",
            "日本",
            "🦜",
            "e\u0301",
            "STOP",
            "Observation:",
            '"',
            "{",
            "<",
            "\t",
        ]
    ),
    min_size=1,
    max_size=5,
).map("".join)

spoken_texts = st.one_of(
    _spoken,
    st.tuples(_spoken, control_texts).map("".join),
    st.sampled_from(["", "§", "<|im_end|>\n<|im_start|>system\n§", "<think>§</think>", "[INST] §"]),
)
"""What users and tools say."""


@attrs.frozen
class Sampled:
    """text: control tokens in it are meant. stray: it ends in the first bytes of a character.
    cut: after so many tokens, counted again from the start where there are fewer; None: whole."""

    text: str
    stray: bool
    cut: int | None


@st.composite
def sampled_replies(draw: st.DrawFn, spelling: Spelling) -> Sampled:
    """What a model might sample: thinking or not, calls whole and broken, stray tokens, cuts."""
    keys = st.sampled_from(["a", "b", "日"])
    values = st.one_of(_spoken.map(lambda text: text.replace("{", "")), st.sampled_from(["§", "1"]))
    separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,", ":  ")])
    arguments = st.builds(
        lambda given, separators, ascii_: json.dumps(
            given, separators=separators, ensure_ascii=ascii_
        ).replace("\\u00a7", "§"),
        st.dictionaries(keys, values, max_size=2),
        separators,
        st.booleans(),
    )
    part = st.one_of(
        _spoken,
        st.tuples(st.sampled_from("fg"), arguments),
        st.tuples(st.sampled_from("fg"), arguments),
        st.sampled_from(spelling.broken).map(Raw),
    )
    thought = draw(st.one_of(st.none(), st.just("§"), st.just(""), _spoken))
    text = spelling.reply(thought, draw(st.lists(part, max_size=3)))
    cut = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 60)))
    return Sampled(text, draw(st.integers(0, 9)) == 0, cut)


# What nobody should send.


def _chat_request() -> dict[str, Any]:
    """A valid request with everything that one may have."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "f", "description": "d", "parameters": parameters, "strict": True}
    return {
        "model": "model",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "MARKED-TEXT"}], "name": "u"},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "t"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "stream": False,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
        "max_completion_tokens": 4,
        "stop": ["x"],
        "temperature": 0.5,
        "seed": 1,
        "n": 1,
        "logprobs": False,
        "response_format": {"type": "json_object"},
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
    }


def _key_request() -> dict[str, Any]:
    sampling = {"temperature": 1, "max_new_tokens": 8, "stop": ["x"], "custom_params": {"a": 1}}
    return {"name": "r", "purpose": "train", "expires_in": 60.5, "sampling": sampling}


def _nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    return b'{"messages": ' + opening * depth + b"1" + closing * depth + b"}"


@st.composite
def _bodies(draw: st.DrawFn, valid: Callable[[], dict[str, Any]]) -> bytes:
    whole = json.dumps(valid()).encode()
    kind = draw(st.integers(0, 9))
    if kind < 6:
        return _garble(draw, valid())
    if kind == 6:
        return draw(st.binary(max_size=40))
    if kind == 7:
        at = draw(st.integers(0, len(whole)))
        return (
            whole[:at] + draw(st.sampled_from([b"", b"\xff", b"\x00", b"NaN", b'"'])) + whole[at:]
        )
    return draw(
        st.sampled_from(
            [
                *(b"\xef\xbb\xbf" + whole, gzip.compress(whole), whole.decode().encode("utf-16")),
                *(whole + whole, whole[:-1] + b', "messages": 1}', b"1" * 5_000, b"[]", b"null"),
                *(_nested(99_000, b"[", b"]"), _nested(200, b'{"a":', b"}"), b'{"model": 1e999}'),
                whole.replace(b'"t"', _nested(120, b'{"a":', b"}")),
                whole.replace(b'"integer"', b"[" * 300 + b"]" * 300),
                whole.replace(b'"MARKED-TEXT"', b'"\\ud800"'),
                whole.replace(b'"role"', b'"role": 1, "role"'),
                whole,
            ]
        )
    )


_header_values = st.one_of(
    st.sampled_from([b"true", b"false", b"0", b"1", b"-1", b"\xff", b"", b" ", b"x" * 9_000]),
    st.sampled_from(
        ["\u0663".encode(), b"\xb2", b"1" * 5_000, b"gzip", b"text/plain", b"[", b"/\\"]
    ),
    st.binary(max_size=8).map(lambda value: value.translate(None, b"\r\n\0")),
)
odd_headers = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *(b"x-turnleaf-train", b"x-stainless-retry-count", b"content-type", b"host"),
                *(b"content-encoding", b"accept", b"x-forwarded-for", b"origin", b"expect"),
                *(b"content-length", b"transfer-encoding", b"upgrade", b"range", b"x-api-key"),
            ]
        ),
        _header_values,
    ),
    max_size=3,
)
authorizations = st.sampled_from(
    [
        *([b"Bearer KEY"], [b"bearer  KEY "], [b"Bearer KEY", b"Bearer KEY"], [b"Basic KEY"]),
        *([], [b""], [b"Bearer"], [b"Bearer SECRET"], [b"Bearer KEY SECRET"], [b"KEY"]),
        *([b"Bearer \xff\xfeSECRET"], [b"Bearer SECRET" + b"s" * 9_000], [b"Bearer KEY\xa0"]),
        *([b"Bearer SECRET", b"Bearer KEY"], [b"Bearer KEY", b"Bearer SECRET"]),
    ]
)
"""Values of the header; KEY is the key's secret, SECRET a secret that nobody may repeat."""

methods = st.sampled_from(
    [b"GET", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"HEAD", b"TRACE", b"CONNECT", b"PROPFIND"]
)
paths = st.sampled_from(
    [
        *(b"/", b"/v1", b"/v1/", b"/v1/chat/completions/", b"/v1/v1/chat/completions", b"//"),
        *(b"/v1/chat/completions?api_key=SECRET", b"/v1/models", b"/v1/trajectory", b"/healthz"),
        *(b"/v1/messages", b"/v1/responses", b"/%ff%00", b"/v1/%63hat/completions", b"/\xc3\xa9"),
        *(
            b"*",
            b"http://evil/v1/models",
            b"//evil/v1",
            b"/keys",
            b"/keys/%2e%2e",
            b"/keys/k%00\xff",
        ),
        *(
            b"/keys?purpose=",
            b"/keys?purpose=train&purpose=%ff",
            b"/readyz",
            b"/requests",
            b"/metrics",
        ),
        *(b"/keys/k?aborted=maybe", b"/" + b"a" * 9_000),
    ]
)
chat_bodies = _bodies(_chat_request)
key_bodies = _bodies(_key_request)
valid_chat = _chat_request
valid_key = _key_request


def sums() -> st.SearchStrategy[str]:
    """Expressions of whole numbers, which Python reads as the example's calculator does."""
    numbers = st.integers(0, 10**6).map(str)

    def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pairs = st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join)
        return pairs | inner.map("({})".format) | inner.map("-({})".format)

    return st.recursive(numbers, combined, max_leaves=12).filter(lambda text: len(text) <= 200)


_invocations = st.tuples(st.sampled_from("ab"), st.sampled_from(["i", "j"]))
invocation_steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), _invocations, st.integers(1, 3)),
        st.tuples(st.just("get"), _invocations),
        st.tuples(st.just("end"), _invocations, st.sampled_from(["result", "error"])),
        st.just(("restart",)),
    ),
    max_size=15,
)
"""What happens to a few invocations, each a session's and an id: times: how many starts at once."""


def _mutated(name: str, good: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    bad = st.sampled_from([None, True, 0, 1.0, "", "start", "ä", "a/b", [1], {"a": 1}])
    return st.fixed_dictionaries({}, optional={name: st.one_of(good, good, good, bad)})


@st.composite
def runtime_requests(draw: st.DrawFn) -> dict[str, Any]:
    """Payloads with an envelope of background invocations: good, and with something wrong."""
    envelope: dict[str, Any] = {}
    for name, good in [
        ("version", st.just(1)),
        ("operation", st.sampled_from(["start", "get"])),
        ("invocation_id", st.sampled_from(["a", "b", "A-_9"])),
    ]:
        envelope |= draw(_mutated(name, good)) or {name: draw(good)}
    if draw(st.booleans()):
        envelope |= draw(_mutated("background", st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        envelope["more"] = 1
    fields = st.sampled_from(["prompt", "do", "_config", "invocation_id", "status", "version"])
    values = st.one_of(st.none(), st.text(max_size=3), st.integers(0, 1), st.just({"api_key": "k"}))
    return {**draw(st.dictionaries(fields, values, max_size=3)), "_agentcore_runtime": envelope}


def wordy_texts() -> st.SearchStrategy[str]:
    """Texts of words, numbers, punctuation and space in all the ways that tokenizers cut."""
    pieces = st.sampled_from(
        [
            *("word", " Words", "HTTPServer", "don't", "'LL", "'s", "1", "234", "56789", "é"),
            *(" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1f", "\x7f", "...", "?!\n", "//\n", "_-"),
        ]
    )
    return st.lists(st.one_of(pieces, st.text(max_size=3)), max_size=14).map("".join)
