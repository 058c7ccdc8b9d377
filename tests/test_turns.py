"""Random agents against random replies: every sampled token is trained once or accounted for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import anyio
import attrs
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.gateway_stack import renderer, tokenizer
from turnleaf.adapters.mock import Call as EngineCall
from turnleaf.adapters.mock import Reply, ScriptedEngine, compare
from turnleaf.core import EngineError, Trajectory
from turnleaf.gateway._keys import Call, Keys, Record
from turnleaf.gateway._turns import Prepared, Turns
from turnleaf.gateway.engines import EngineReply, EngineRequest, _continuing, wants_top_p_ids
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

    async def generate(self, request: EngineRequest, *, stop: anyio.Event) -> EngineReply:
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
        return decode_reply(
            orjson.dumps(body),
            prompt_length=len(request.input_ids),
            experts=request.experts,
            top_p=wants_top_p_ids(request.sampling),
        )

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


@attrs.define
class Agent:
    """Asks, continues, forks, edits and forgets, as drawn."""

    data: st.DataObject
    renderer: Renderer
    turns: Turns
    record: Record
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
        """The prompt shows the thoughts that the template shows for this conversation."""
        match = prepared.match
        messages = prepared.conversation.messages
        if match is not None:
            messages = [*match.past(), *match.new]
        full = self.renderer.render(messages, TOOLS).ids
        shown, due = (
            set(re.findall(r"thought \d+", tokenizer().decode(ids.tolist())))
            for ids in (prepared.prompt, full)
        )
        assert shown == due

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


def played(data: st.DataObject, template: str, *, linear: bool) -> tuple[Trajectory, Agent]:
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
        renderer(template),
        DirectEngine(scripted),
        max_context_tokens=32_768,
        routed_experts_shape=EXPERTS,
    )
    sampling = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    record, _ = Keys("restore").open(name="r", sampling=sampling, purpose="train", expires_in=60)
    agent = Agent(data, renderer(template), turns, record, [[{"role": "user", "content": "Begin"}]])

    async def play() -> None:
        for _ in range(data.draw(st.integers(1, 6))):
            await agent.step(linear=linear)

    anyio.run(play)
    compare(scripted.ledger, [record.trajectory]).raise_for_problems()
    return record.trajectory, agent


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "chatml"])
@settings(max_examples=40)
@given(st.data())
def test_whatever_an_agent_does_the_ledger_balances(template: str, data: st.DataObject) -> None:
    trajectory, _ = played(data, template, linear=False)
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


@settings(max_examples=40)
@given(st.data())
def test_thinking_forks_at_a_new_question_and_nowhere_else(data: st.DataObject) -> None:
    trajectory, agent = played(data, "qwen3", linear=True)
    forks, thought = 0, False
    for message in agent.branches[-1][: len(agent.branches[-1]) - 1]:
        if message["role"] == "user":
            forks += thought
            thought = False
        thought = thought or bool(message.get("reasoning_content", "").strip())
    leaves = len(trajectory.leaves())
    if all(len(turn.output) for turn in trajectory.turns):
        assert leaves == forks + 1
    else:
        assert leaves <= forks + 1
