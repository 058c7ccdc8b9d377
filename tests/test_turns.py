"""Random agents against random replies: every sampled token is trained once or accounted for."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import anyio
import attrs
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.families import xinference_template
from tests.gateway_stack import checkpoint, renderer, tokenizer
from turnleaf.adapters.mock import Call as EngineCall
from turnleaf.adapters.mock import Reply, ScriptedEngine, cached_checkpoint, compare
from turnleaf.core import EngineError, TokenIds, Trajectory
from turnleaf.gateway._history import ClientReasoning, ThinkingRetention
from turnleaf.gateway._keys import Call, Keys, Record
from turnleaf.gateway._turns import Prepared, Turns
from turnleaf.gateway.engines import (
    EngineReply,
    EngineRequest,
    Stop,
    TokenListener,
    _continuing,
    wants_top_p_ids,
)
from turnleaf.gateway.engines._sglang_wire import decode_reply
from turnleaf.gateway.protocols import parse_chat_request
from turnleaf.gateway.rendering import Renderer

EXPERTS = (2, 3)
ABORTED = Reply(ids=(11, 12), finish="abort")
CUT_SHORT = Reply(ids=(11, 12), finish="abort", spoil={"routed_experts": None})  # of what waited
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]


@attrs.frozen
class DirectEngine:
    """A scripted engine without the wire."""

    scripted: ScriptedEngine

    async def generate(
        self,
        request: EngineRequest,
        *,
        stop: Stop,
        on_tokens: TokenListener | None = None,
    ) -> EngineReply:
        call = EngineCall(
            f"{request.turn_id}.{request.part}.0",
            request.routing_key,
            request.input_ids,
            request.sampling,
            experts_from=None if request.experts is None else request.experts.start,
        )
        outcome = await self.scripted.generate(call)
        body = getattr(outcome, "body", None)
        if body is None:
            raise EngineError(str(outcome))
        reply = decode_reply(
            orjson.dumps(body),
            prompt_length=len(request.input_ids),
            experts=request.experts,
            top_p=wants_top_p_ids(request.sampling),
        )
        if on_tokens is not None and len(reply.output):
            on_tokens(reply.output)
        return reply

    async def check(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


@st.composite
def sampled(draw: st.DrawFn) -> Reply:
    """What a model might sample: thinking or not, calls whole, broken and cut, stray tokens."""
    arguments = st.dictionaries(strategies.texts, strategies.json_values, max_size=2)
    separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,", ":  ")])

    def call(name: str, given: dict[str, Any], separators: tuple[str, str]) -> str:
        text = json.dumps({"name": name, "arguments": given}, separators=separators)
        return f"<tool_call>\n{text}\n</tool_call>"

    calls = st.builds(call, st.sampled_from("fg"), arguments, separators)
    broken = st.sampled_from(
        ["<tool_call>\n{'name'", "</tool_call>", "<think>", "</think>", "<|im_start|>", "\n\n"]
    )
    thought = f"<think>\nthought {draw(st.integers(10**8, 10**9))}\n</think>\n\n"
    thinking = st.sampled_from(["", "<think>\n\n</think>\n\n", thought])
    parts = draw(st.lists(strategies.texts | calls | broken, max_size=3))
    text = draw(thinking) + "\n".join(parts)
    if draw(st.integers(0, 4)) == 0:
        ids = tokenizer().encode(text)
        return Reply(ids=tuple(ids[: draw(st.integers(0, len(ids)))]), finish="length")
    return Reply(text=text)


@cache
def renderer_of(template: str) -> Renderer:
    """Of trl's template, ours, or that of QwQ, which shows no earlier thinking at all."""
    if template != "qwq":
        return renderer(template)
    source = xinference_template("QwQ-32B")()
    return Renderer.load(cached_checkpoint("qwen3", chat_template=source))


def thoughts(ids: TokenIds) -> set[str]:
    return set(re.findall(r"thought \d+", tokenizer().decode(ids.tolist())))


@attrs.define
class Agent:
    """Asks, continues, forks, edits and forgets, as drawn."""

    data: st.DataObject
    renderer: Renderer
    turns: Turns
    record: Record
    retention: ThinkingRetention
    branches: list[list[dict[str, Any]]]

    async def step(self, *, linear: bool) -> None:
        messages = self.branches[-1] if linear else self.data.draw(st.sampled_from(self.branches))
        sent = [
            self.data.draw(strategies.as_some_client_sends(message))
            if message["role"] == "assistant"
            else message
            for message in messages
        ]
        n = 1 if linear else self.data.draw(st.sampled_from([1, 1, 1, 2]))
        request = parse_chat_request({"messages": sent, "tools": TOOLS, "max_tokens": 4000, "n": n})
        prepared = await self.turns.prepare(self.record, request, Call(), trained=True)
        self.check_thoughts(prepared)
        reply = await self.turns.sample(self.record, prepared, Call())
        if linear or self.data.draw(st.integers(0, 3)):
            self.turns.deliver(self.record, *reply.turn_ids)
        for choice in reply.choices:
            self.branches.append([*messages, choice.message, *self.following(choice.message)])
        if not linear and self.data.draw(st.integers(0, 3)) == 0:
            edited = self.data.draw(st.integers(0, len(messages) - 1))
            change = {**messages[edited], "content": "edited"}
            self.branches.append([*messages[:edited], change, *messages[edited + 1 :]])
        if not linear and self.data.draw(st.integers(0, 3)) == 0:
            foreign = {"role": "assistant", "content": "x", "reasoning_content": "thought 123"}
            role = self.data.draw(st.sampled_from(["user", "system"]))
            self.branches.append([*self.branches[-1], foreign, {"role": role, "content": "y"}])

    def check_thoughts(self, prepared: Prepared) -> None:
        """The prompt shows the thoughts that the template shows for this conversation, or, where
        they are retained, those that were there and what the template shows of what is new."""
        match = prepared.match
        messages = prepared.conversation.messages
        if match is not None:
            messages = [*match.past(), *match.new]
        due = thoughts(self.renderer.render(messages, TOOLS).ids)
        if match is not None and self.retains(match.new):
            path = self.record.trajectory.tokens_through(match.turn_id)
            assert prepared.prompt.ids[: len(path)].tolist() == path.tolist()
            due = thoughts(path) | {thought for thought in due if thought in str(match.new)}
        assert thoughts(prepared.prompt.ids) == due

    def retains(self, new: list[dict[str, Any]]) -> bool:
        asked = "user" in [message["role"] for message in new]
        return self.retention == "all" or (self.retention == "tool_cycle" and not asked)

    def following(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        texts = strategies.texts
        if not reply.get("tool_calls"):
            return [{"role": "user", "content": self.data.draw(texts)}]
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": self.data.draw(texts)}
            for call in reply["tool_calls"]
        ]


@pytest.fixture(scope="module", autouse=True)
def _at_once() -> Iterator[None]:
    """What an engine interrupts goes on without a pause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_continuing, "PAUSE", 0.0)
        yield


def played(
    data: st.DataObject,
    template: str,
    *,
    linear: bool,
    client_reasoning: ClientReasoning = "restore",
    retention: ThinkingRetention = "template",
) -> tuple[Trajectory, Agent]:
    def reply(_: Any, number: int) -> Reply:
        drawn = data.draw(sampled())
        if linear or data.draw(st.integers(0, 4)) < 4:
            return drawn
        return data.draw(st.sampled_from([Reply(ids=(), finish="abort"), ABORTED, CUT_SHORT]))

    scripted = ScriptedEngine(
        {"*": [reply]},
        tokenizer=tokenizer(),
        stop_token_id=tokenizer().encode("<|im_end|>")[0],
        repeat=True,
        routed_experts_shape=EXPERTS,
    )
    turns = Turns(
        renderer_of(template),
        DirectEngine(scripted),
        max_context_tokens=32_768,
        routed_experts_shape=EXPERTS,
    )
    sampling = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    keys = Keys(client_reasoning, thinking_retention=retention)
    record, _ = keys.open(name="r", sampling=sampling, purpose="train", expires_in=60)
    begun = [[{"role": "user", "content": "Begin"}]]
    agent = Agent(data, renderer_of(template), turns, record, retention, begun)

    async def play() -> None:
        for _ in range(data.draw(st.integers(1, 6))):
            await agent.step(linear=linear)

    anyio.run(play)
    compare(scripted.ledger, [record.trajectory]).raise_for_problems()
    return record.trajectory, agent


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "chatml", "qwq"])
@settings(max_examples=40)
@given(st.data())
def test_whatever_an_agent_does_the_ledger_balances(template: str, data: st.DataObject) -> None:
    trajectory, _ = played(
        data,
        template,
        linear=False,
        client_reasoning=data.draw(st.sampled_from(get_args(ClientReasoning))),
        retention=data.draw(st.sampled_from(get_args(ThinkingRetention))),
    )
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    for leaf in trajectory.leaves():
        assert leaf.routed_experts is not None
        assert leaf.routed_experts.shape == (len(leaf.tokens) - 1, *EXPERTS)
        assert leaf.top_p_ids is not None


@settings(max_examples=40)
@given(st.data())
def test_an_agent_that_only_goes_on_has_one_leaf(data: st.DataObject) -> None:
    trajectory, _ = played(data, "qwen2_5", linear=True)
    assert len(trajectory.leaves()) == 1 or not any(len(t.output) for t in trajectory.turns)


@pytest.mark.parametrize(
    ("template", "retention", "dropped_at"),
    [
        ("qwen3", "template", ["user"]),
        ("qwen3", "tool_cycle", ["user"]),
        ("qwen3", "all", []),
        ("qwq", "template", ["user", "tool"]),
        ("qwq", "tool_cycle", ["user"]),
        ("qwq", "all", []),
    ],
)
@settings(max_examples=20)
@given(data=st.data())
def test_thinking_forks_where_it_is_dropped_and_nowhere_else(
    template: str, retention: ThinkingRetention, dropped_at: list[str], data: st.DataObject
) -> None:
    trajectory, agent = played(data, template, linear=True, retention=retention)
    forks, thought = 0, False
    said = agent.branches[-1]
    last = max(at for at, message in enumerate(said) if message["role"] == "assistant")
    for message in said[:last]:
        if message["role"] in dropped_at:
            forks += thought
            thought = False
        thought = thought or bool(message.get("reasoning_content", "").strip())
    leaves = len(trajectory.leaves())
    if all(len(turn.output) for turn in trajectory.turns):
        assert leaves == forks + 1
    else:
        assert leaves <= forks + 1


@pytest.mark.anyio
@pytest.mark.parametrize("retention", get_args(ThinkingRetention))
async def test_a_path_that_cannot_go_on_is_rendered_as_the_template_does(
    retention: ThinkingRetention,
) -> None:
    scripted = ScriptedEngine(
        {"*": [Reply(text="<think>\nhm\n</think>\n\nyes"), Reply(text="bye")]},
        tokenizer=tokenizer(),
        stop_token_id=tokenizer().encode("<|im_end|>")[0],
    )
    source = (checkpoint("qwen3") / "chat_template.jinja").read_text()
    counting = Renderer.load(
        cached_checkpoint("qwen3", chat_template="{{- messages | length }}" + source)
    )
    turns = Turns(counting, DirectEngine(scripted), max_context_tokens=32_768)
    keys = Keys("restore", thinking_retention=retention)
    record, _ = keys.open(name="r", sampling={}, purpose="train", expires_in=60)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    for _ in range(2):
        request = parse_chat_request({"messages": messages})
        prepared = await turns.prepare(record, request, Call(), trained=True)
        assert prepared.prompt.ids.tolist() == counting.render(messages).ids.tolist()
        reply = await turns.sample(record, prepared, Call())
        turns.deliver(record, reply.id)
        messages += [reply.choices[0].message, {"role": "user", "content": "and?"}]
    first, second = record.trajectory.leaves()
    assert "hm" in tokenizer().decode(first.tokens.tolist())
    assert "hm" not in tokenizer().decode(second.tokens.tolist())
