"""Random agents, several keys at once, against random replies: not one wrong token.

TURNLEAF_LONG=N plays N hundred games of each family there is, and longer ones.
"""

import gc
import json
import logging
import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prometheus_client.parser import text_string_to_metric_families

from tests import strategies
from tests.families import family_checkpoint, family_renderer
from tests.gateway_stack import checkpoint
from tests.gateway_stack import renderer as qwen3_renderer
from tests.in_process import Exchange, Held, HeldEngine, ObservedTurns, ToldChoice, read_reply
from tests.personas import PERSONAS, as_sent
from tests.spelling import SPELLINGS, Spelling
from tests.virtual_time import VirtualLoop
from turnleaf.adapters.mock import FileTokenizer, Reply, compare
from turnleaf.core import Trajectory, Turn
from turnleaf.gateway import (
    _agents_app,
    _asked,
    _bodies,
    _branches,
    _history,
    _keys,
    _known,
    _sampler,
    _turns,
)
from turnleaf.gateway._agents_app import agents_app
from turnleaf.gateway._control_app import control_app
from turnleaf.gateway._history import ThinkingRetention
from turnleaf.gateway._keys import Keys, Record
from turnleaf.gateway._limits import Limits
from turnleaf.gateway._readiness import Readiness
from turnleaf.gateway._sampler import Prepared
from turnleaf.gateway._turns import Turns
from turnleaf.gateway._watched import Watched
from turnleaf.gateway.engines import EngineRequest
from turnleaf.gateway.protocols import (
    ChatRequest,
    Choice,
    Completion,
    ConstraintPolicy,
    RequestError,
    normalise,
)
from turnleaf.gateway.rendering import Renderer, RenderError

Chosen = TypeVar("Chosen")

LONG = int(os.environ.get("TURNLEAF_LONG", "0"))
FAMILIES = tuple(SPELLINGS) if LONG else ("qwen3", "llama-3.1", "gpt-oss")
TOKEN = "control"
CONTEXT = 2_000
TRAINERS_DEEDS = (*["look"] * 4, *["open"] * 2, "close", "abort", "close all")
TROUBLES = ("refused", "down", "lying", "spoiled", "lost first", "down first")
GRACE = 30.0
EXPERTS = (2, 3)
STOPS = ("STOP", "Observation:", "\n\n", "日本", "}}", "\U0001f99c")
WORD = re.compile(r"w\d+x")
REMEMBERED_TYPES = (
    *(_keys.Record, _keys.Call, _asked.Asked, _history.History, Trajectory, Turn, Completion),
    *(_history._Node, _history._Reply, _history.Conversation, _history.Match, _history._Latest),
    *(_known.Known, _bodies.Body, _bodies._Opening, _branches.Branches, _branches._Origin),
)
SEED = 7
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"type": "object"}}}
LIMITS = (
    *(Limits(),) * 3,
    *(Limits(max_turns=6), Limits(max_rollout_tokens=200), Limits(max_requests_in_flight=2)),
)
SYSTEMS = ("You are a helper.", "You are a critic: §")


def tool(name: str, *parameters: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {each: {"type": "string"} for each in parameters}}
    function = {"name": name, "description": "Does it.", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (None, [tool("f", "a", "b")], [tool("f", "a", "b"), tool("g")])


@attrs.frozen
class Family:
    renderer: Renderer
    tokenizer: FileTokenizer
    spelling: Spelling
    ends: frozenset[int]


@cache
def family(name: str) -> Family:
    folder = checkpoint("qwen3") if name == "qwen3" else family_checkpoint(name)
    renderer = qwen3_renderer("qwen3") if name == "qwen3" else family_renderer(name)
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    spelling = SPELLINGS[name]
    ends = frozenset(id_ for end in spelling.ends for id_ in tokenizer.encode(end))
    return Family(renderer, tokenizer, spelling, ends)


@attrs.frozen
class Dialogue:
    """A conversation as the agent knows it: what it was told, in the gateway's own form."""

    messages: tuple[dict[str, Any], ...]
    tools: int


@attrs.define(eq=False)
class Asking:
    """What the machine takes for one turn: a request with its retries."""

    identity: tuple[bytes, bool]
    turn_ids: tuple[str, ...]
    exchanges: list[Exchange]


@attrs.frozen(eq=False)
class Known:
    """A turn with a reply. keys: its messages and its reply as they are compared. said: the same as
    a template is given them."""

    turn_id: str
    tools: str
    keys: list[Any]
    said: list[dict[str, Any]]


@attrs.define(eq=False, repr=False)
class Rollout:
    """One key, and all that its agent did and was told."""

    name: str
    key_id: str
    secret: str
    purpose: str
    expires_at: float
    record: "weakref.ref[Record]"
    dialogues: list[Dialogue]
    words: set[str] = attrs.Factory(set)
    sampled_words: set[str] = attrs.Factory(set)
    asked: list[tuple[Exchange, Dialogue, bool]] = attrs.Factory(list)
    checked: set[Exchange] = attrs.Factory(set)
    askings: list[Asking] = attrs.Factory(list)
    blurred: set[tuple[bytes, bool]] = attrs.Factory(set)
    prepared: dict[str, Prepared] = attrs.Factory(dict)
    attempts: int = 0
    joined: int = 0
    refused: Counter[str] = attrs.Factory(Counter)
    options: dict[str, list[list[dict[str, Any]]]] = attrs.Factory(dict)
    turns: dict[str, Known] = attrs.Factory(dict)
    shown: set[str] = attrs.Factory(set)
    troubled: bool = False
    closing: "Exchange | None" = None
    trajectory: Trajectory | None = None

    def __repr__(self) -> str:
        return self.name


class AgentsMachine(RuleBasedStateMachine):
    """Rules are what agents, engines and the trainer do; after each, what can go on has gone on."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.loop = VirtualLoop()
        self.loop.rule_clocks_of(self.patch, _keys, _asked, _turns, _sampler, _agents_app)
        self.family = family(self.name)
        self.engine = HeldEngine(self.family.tokenizer, self.when_stopped, EXPERTS)
        self.rollouts: list[Rollout] = []
        self.stopping = "partial"
        self.count = 0
        LOG.lines.clear()

    # What agents do.

    @initialize(
        limits=st.sampled_from(LIMITS),
        retention=st.sampled_from(["template", "template", "tool_cycle", "all"]),
        constraints=st.sampled_from(["hint", "enforce"]),
    )
    def begin(
        self, limits: Limits, retention: ThinkingRetention, constraints: ConstraintPolicy
    ) -> None:
        self.limits, self.retention, self.constraints = limits, retention, constraints
        self.keys = Keys("restore", thinking_retention=retention, retry_grace=GRACE, limits=limits)
        turns = Turns(
            self.family.renderer,
            self.engine,
            max_context_tokens=CONTEXT,
            routed_experts_shape=EXPERTS,
            constraints=constraints,
        )
        self.observed: Any = ObservedTurns(turns, self.on_prepared, self.on_choice, self.on_refused)
        self.agents = Watched(
            agents_app(self.keys, self.observed, model_id="model"), self.keys.metrics
        )
        self.control = control_app(
            self.keys,
            Readiness(self.engine),
            self.agents,
            base_url="http://gateway/v1",
            token=TOKEN,
        )
        gc.collect()
        self.before = remembered()
        self.open_key("train")
        self.open_key("train")

    def open_key(self, purpose: str) -> None:
        name = f"rollout-{len(self.rollouts)}"
        expires_in = 400.0
        sampling = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
        if len(self.rollouts) % 2:
            sampling["sampling_seed"] = SEED
        body = {"name": name, "purpose": purpose, "sampling": sampling, "expires_in": expires_in}
        exchange = self.exchange("/keys", TOKEN, body, app=self.control)
        assert exchange.status == 201
        key = json.loads(exchange.reply)
        record = weakref.ref(self.keys._records[key["id"]])
        self.rollouts.append(
            Rollout(name, key["id"], key["secret"], purpose, self.loop.now + expires_in, record, [])
        )
        self.rollouts[-1].dialogues.append(
            Dialogue(
                ({"role": "user", "content": self.worded("Begin § now", self.rollouts[-1])},), 1
            )
        )

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        rollout = self.some_rollout(data)
        dialogue = self.drawn_dialogue(data, rollout)
        persona = data.draw(st.sampled_from(list(PERSONAS)), "persona")
        options = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "stream": st.just(value=True),
                    "max_completion_tokens": st.integers(1, 40),
                    "stop": st.lists(st.sampled_from(STOPS), max_size=2),
                    "temperature": st.just(0.5),
                    "seed": st.just(1),
                    "tool_choice": st.sampled_from(["auto", "none", "required"]),
                    "response_format": st.just(FORM),
                    "n": st.integers(2, 3),
                    "logprobs": st.just(value=True),
                    "user": st.just("me §"),
                },
            ),
            "options",
        )
        if options.get("stream"):
            options["stream_options"] = {"include_usage": True}
        if "user" in options:
            options["user"] = self.worded(options["user"], rollout)
        body = chat_body(as_sent(persona, list(dialogue.messages)), TOOLS[dialogue.tools], options)
        trained = data.draw(st.sampled_from([True, True, True, False]), "trained")
        rollout.dialogues.append(dialogue)
        upto = data.draw(st.one_of(*[st.none()] * 6, st.integers(0, len(body))), "body upto")
        self.send(rollout, dialogue, body, trained, marked=False, upto=upto, takes=taking(data))

    def converse(self, data: st.DataObject, turns: int) -> None:
        """As agents mostly do: one turn after the other, each going on from the one before."""
        rollout = self.some_rollout(data)
        persona = data.draw(st.sampled_from(list(PERSONAS)), "persona")
        dialogue = self.drawn_dialogue(data, rollout)
        for _ in range(turns):
            several = {"n": 2} if data.draw(st.integers(0, 5), "several") == 5 else {}
            sent = as_sent(persona, list(dialogue.messages))
            body = chat_body(sent, TOOLS[dialogue.tools], several)
            rollout.dialogues.append(dialogue)
            exchange = self.send(rollout, dialogue, body, trained=True)
            for held in list(self.engine.held):
                if self.rollout_of(held) is rollout:
                    self.release(
                        held, data.draw(strategies.sampled_replies(self.family.spelling), "reply")
                    )
            if exchange.status != 200:
                break
            told = pick(data, read_reply(exchange).choices, "choice")
            following = self.following(data, rollout, told.message)
            dialogue = Dialogue((*dialogue.messages, told.message, *following), dialogue.tools)

    converse_shortly = rule(data=st.data(), turns=st.integers(1, 3))(converse)
    converse_long = rule(data=st.data(), turns=st.integers(2, 6))(converse)

    @precondition(lambda self: any(rollout.asked for rollout in self.rollouts))
    @rule(data=st.data(), marked=st.booleans())
    def ask_again(self, data: st.DataObject, marked: bool) -> None:
        """The very same bytes: a retry, marked or not, or a deliberate second sample."""
        rollout = pick(data, [r for r in self.rollouts if r.asked], "rollout")
        again, dialogue, trained = pick(data, rollout.asked, "request")
        trained ^= data.draw(st.integers(0, 5), "context only") == 5
        self.send(
            rollout, dialogue, again.body, trained, marked=marked, upto=None, takes=taking(data)
        )

    @precondition(lambda self: self.half_sent())
    @rule(data=st.data())
    def send_the_rest(self, data: st.DataObject) -> None:
        rollout, exchange, trained = pick(data, self.half_sent(), "request")
        with self.arriving(rollout, exchange, trained, marked=False):
            exchange.feed()
            self.loop.settle()

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        pick(data, self.under_way(), "exchange").leave()
        self.loop.settle()

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), marked=st.booleans())
    def lose_and_retry(self, data: st.DataObject, marked: bool) -> None:
        entries = [
            (rollout, entry)
            for rollout in self.rollouts
            for entry in rollout.asked
            if entry[0].asked and not entry[0].ended
        ]
        if not entries:
            return
        rollout, (lost, dialogue, trained) = pick(data, entries, "lost")
        lost.leave()
        self.loop.settle()
        self.send(rollout, dialogue, lost.body, trained, marked=marked, upto=None, takes=None)

    def lose_the_reply(self, data: st.DataObject, marked: bool, answered: bool, on: bool) -> None:
        """Somewhere on its way, and ask once more, before it is answered or after, or go on."""
        rollout = self.some_rollout(data)
        dialogue = self.drawn_dialogue(data, rollout)
        stream = {"stream": True} if data.draw(st.booleans(), "stream") else {}
        body = chat_body(list(dialogue.messages), TOOLS[dialogue.tools], stream)
        takes = data.draw(st.integers(0, 900), "takes")
        exchange = self.send(rollout, dialogue, body, trained=True, takes=takes)
        if not answered:
            twins = data.draw(st.integers(0, 2), "twins")
            sent = [self.send(rollout, dialogue, body, trained=True) for _ in range(twins)]
            for each in (exchange, *sent):
                each.leave()
                self.loop.settle()
        for held in list(self.engine.held):
            if answered and self.rollout_of(held) is rollout:
                self.release(held, data.draw(strategies.sampled_replies(self.family.spelling)))
        if on and has_reply(exchange) and exchange.status == 200:
            (told,) = read_reply(exchange).choices
            following = self.following(data, rollout, told.message)
            dialogue = Dialogue((*dialogue.messages, told.message, *following), dialogue.tools)
            body = chat_body(list(dialogue.messages), TOOLS[dialogue.tools], stream)
        trained = data.draw(st.integers(0, 4), "context only") < 4
        self.send(rollout, dialogue, body, trained=trained, marked=marked)

    lose_it_on_the_way = rule(
        data=st.data(), marked=st.booleans(), answered=st.just(value=True), on=st.booleans()
    )(lose_the_reply)
    lose_it_before = rule(
        data=st.data(), marked=st.booleans(), answered=st.just(value=False), on=st.just(value=False)
    )(lose_the_reply)

    def look(self, data: st.DataObject) -> None:
        """The agent reads its trajectory, and sees nothing of anyone else."""
        rollout = pick(data, self.rollouts, "rollout")
        exchange = self.exchange("/v1/trajectory", rollout.secret, None, method="GET")
        if not self.is_open(rollout):
            assert exchange.status == 401
            return
        assert exchange.status == 200
        trajectory = Trajectory.from_json(bytes(exchange.reply))
        assert {turn.id for turn in trajectory.turns} <= set(rollout.prepared)
        self.check_words(rollout, trajectory)

    # What the engine does.

    @precondition(lambda self: self.engine.held)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        held = pick(data, self.engine.held, "call")
        self.release(held, data.draw(strategies.sampled_replies(self.family.spelling), "reply"))

    @precondition(lambda self: self.engine.held)
    @rule(data=st.data())
    def answer_all(self, data: st.DataObject) -> None:
        held = list(self.engine.held)
        for at in data.draw(st.permutations(range(len(held))), "calls"):
            self.release(held[at], data.draw(strategies.sampled_replies(self.family.spelling)))

    @precondition(lambda self: self.engine.held)
    @rule(
        data=st.data(),
        trouble=st.sampled_from(
            ["refused", "down", "lying", "spoiled", "lost first", "down first"]
        ),
    )
    def have_trouble(self, data: st.DataObject, trouble: str) -> None:
        held = pick(data, self.engine.held, "call")
        good = self.reply(held, data.draw(strategies.sampled_replies(self.family.spelling)))
        attempts = {
            "refused": [Reply(fail=400)],
            "down": [Reply(fail=503), Reply(fail=500)],
            "lying": [attrs.evolve(good, mismatch=True)],
            "spoiled": [attrs.evolve(good, spoil={"prompt_tokens": 1, "completion_tokens": None})],
            "lost first": [attrs.evolve(good, drop=True), good],
            "down first": [Reply(fail=503), good],
        }[trouble]
        self.rollout_of(held).troubled = True
        held.release(*attempts)
        self.loop.settle()

    def interrupt(self, data: st.DataObject) -> None:
        """As for a weight update: calls are aborted that nobody wanted to end."""
        for held in list(self.engine.held):
            drawn = data.draw(strategies.sampled_replies(self.family.spelling))
            reply = self.reply(held, drawn, end=False)
            count = data.draw(st.integers(0, len(reply.ids or ())))
            held.release(Reply(ids=(reply.ids or ())[:count], finish="abort"))
        self.engine.scripted.weight_version += "+"
        self.loop.settle()

    # What time and the trainer do.

    @rule(
        seconds=st.sampled_from([0.7, 0.7, 0.7, 0.7, 16.0, 31.0, 61.0]),
        stopping=st.sampled_from(["partial", "nothing", "lost", "whole", "deaf"]),
    )
    def pass_time(self, seconds: float, stopping: str) -> None:
        self.stopping = stopping
        self.loop.advance(seconds)

    @rule(data=st.data(), what=st.sampled_from(TRAINERS_DEEDS))
    def see_to_the_keys(self, data: st.DataObject, what: str) -> None:
        """Seldom the end of one: rollouts are longer than these dice would have it."""
        alive = list(filter(self.is_open, self.rollouts))
        match what:
            case "open" if len(self.rollouts) < 4:
                self.open_key(data.draw(st.sampled_from(["train", "eval"]), "purpose"))
            case "close" | "abort" if alive:
                self.close(pick(data, alive, "rollout"), aborted=what == "abort")
            case "close all":
                self.close_all(data.draw(st.sampled_from(["train", "eval"]), "purpose"))
            case _:
                self.look(data)

    def close_all(self, purpose: str) -> None:
        closed = self.exchange(f"/keys?purpose={purpose}", TOKEN, None, "DELETE", self.control)
        assert closed.status == 204
        for rollout in self.rollouts:
            if rollout.purpose == purpose:
                rollout.closing = rollout.closing or closed

    # What must hold after each step.

    @invariant()
    def nothing_failed(self) -> None:
        for failure in self.observed.failures:
            raise failure
        for rollout in self.rollouts:
            for exchange, _, _ in rollout.asked:
                if exchange.ended and exchange.delivered and exchange not in rollout.checked:
                    rollout.checked.add(exchange)
                    self.check_reply(rollout, exchange)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.finish()
        finally:
            self.patch.undo()
            self.loop.close()

    def finish(self) -> None:
        self.check_all_rollouts()
        self.check_nothing_is_remembered()

    def check_all_rollouts(self) -> None:
        for rollout in self.rollouts:
            if rollout.trajectory is None:
                self.close(rollout, aborted=False)
        assert not self.engine.held
        trajectories = [r.trajectory for r in self.rollouts if r.trajectory is not None]
        compare(self.engine.scripted.ledger, trajectories).raise_for_problems()
        for rollout in self.rollouts:
            self.check_rollout(rollout)
        self.check_metrics(trajectories)
        log = "\n".join(LOG.lines)
        assert not any(rollout.secret in log for rollout in self.rollouts)
        assert not WORD.findall(log)
        assert "Traceback" not in log, log

    def check_nothing_is_remembered(self) -> None:
        records = [rollout.record for rollout in self.rollouts]
        self.rollouts.clear()
        self.loop.advance(_keys.COLLECT_GRACE + 1)
        self.open_key("train")
        self.close(self.rollouts.pop(), aborted=False)
        self.loop.advance(_keys.COLLECT_GRACE + 1)
        self.keys._forget_outlived()
        self.engine.outcomes.clear()
        self.engine.asked.clear()
        gc.collect()
        assert not any(record() for record in records)
        assert remembered() == self.before

    # How it is done.

    def exchange(
        self, path: str, secret: str, body: Any, method: str = "POST", app: Any = None
    ) -> Exchange:
        headers = {"authorization": f"Bearer {secret}"}
        data = b"" if body is None else json.dumps(body).encode()
        exchange = Exchange(path, headers, data, method)
        exchange.start(app or self.agents, self.loop)
        self.loop.settle()
        if not exchange.ended:
            self.loop.advance(_keys.CLOSE_WAIT + 0.1)  # a deaf engine's calls are cut
        assert exchange.ended
        return exchange

    def send(
        self,
        rollout: Rollout,
        dialogue: Dialogue,
        body: bytes,
        trained: bool,
        *,
        marked: bool = False,
        upto: int | None = None,
        takes: int | None = None,
    ) -> Exchange:
        connections = sum(not exchange.ended for exchange, _, _ in rollout.asked)
        headers = {
            "authorization": f"Bearer {rollout.secret}",
            "x-stainless-retry-count": str(int(marked)),
            **({} if trained else {"x-turnleaf-train": "false"}),
        }
        exchange = Exchange("/v1/chat/completions", headers, body, upto=upto, takes=takes)
        rollout.asked.append((exchange, dialogue, trained))
        with self.arriving(rollout, exchange, trained, marked=marked):
            exchange.start(self.agents, self.loop)
            self.loop.settle()
        if not self.is_open(rollout):
            assert exchange.status in (401, None)
        elif connections >= 2 * self.limits.max_requests_in_flight:
            assert exchange.status == 429
        return exchange

    def arriving(self, rollout: Rollout, exchange: Exchange, trained: bool, *, marked: bool) -> Any:
        return _Arrival(self, rollout, exchange, (exchange.body, trained), marked)

    def release(self, held: Held, sampled: strategies.Sampled) -> None:
        held.release(self.reply(held, sampled))
        self.loop.settle()

    def reply(self, held: Held, sampled: strategies.Sampled, *, end: bool = True) -> Reply:
        """The drawn text in tokens, up to the first that ends a generation."""
        encode = self.family.tokenizer.encode
        ids = encode(self.worded(sampled.text, self.rollout_of(held), sampled=True))
        if sampled.stray:
            ids += encode("🦜")[:1]
        if not end:
            return Reply(ids=tuple(id_ for id_ in ids if id_ not in self.family.ends))
        if sampled.cut is not None:
            ids = ids[: sampled.cut % (len(ids) + 1)]
        else:
            ids += encode(self.family.spelling.end)
        for at, id_ in enumerate(ids):
            if id_ in self.family.ends:
                return Reply(ids=tuple(ids[: at + 1]), finish="stop", matched=id_)
        return Reply(ids=tuple(ids), finish="length")

    def when_stopped(self, request: EngineRequest) -> list[Reply]:
        rollout = next(r for r in self.rollouts if r.name == request.routing_key)
        ids = tuple(self.family.tokenizer.encode(self.worded("§ and so on", rollout, sampled=True)))
        return {
            "partial": [Reply(ids=ids[:3], finish="abort")],
            "nothing": [Reply(ids=(), finish="abort")],
            "lost": [Reply(ids=ids, drop=True, finish="length")],
            "whole": [Reply(ids=ids, finish="length")],
            "deaf": [],
        }[self.stopping]

    def close(self, rollout: Rollout, *, aborted: bool) -> None:
        for held in self.engine.held:
            if held.request.routing_key == rollout.name:
                rollout.troubled = True
        path = f"/keys/{rollout.key_id}?aborted={str(aborted).lower()}"
        closed = self.exchange(path, TOKEN, None, "DELETE", self.control)
        assert closed.status == 200
        rollout.closing = rollout.closing or closed
        rollout.trajectory = Trajectory.from_json(bytes(closed.reply))
        for exchange, _, _ in rollout.asked:
            if exchange.asked:
                assert exchange.ended
            else:
                exchange.leave()
        self.loop.settle()

    def is_open(self, rollout: Rollout) -> bool:
        return rollout.closing is None and self.loop.now <= rollout.expires_at

    def some_rollout(self, data: st.DataObject) -> Rollout:
        """An open one, mostly."""
        alive = list(filter(self.is_open, self.rollouts))
        if not alive or data.draw(st.integers(0, 9), "any") == 9:
            return pick(data, self.rollouts, "rollout")
        return pick(data, alive, "rollout")

    def half_sent(self) -> list[tuple[Rollout, Exchange, bool]]:
        return [
            (rollout, exchange, trained)
            for rollout in self.rollouts
            for exchange, _, trained in rollout.asked
            if not exchange.asked and not exchange.ended and not exchange.left
        ]

    def under_way(self) -> list[Exchange]:
        return [
            exchange
            for rollout in self.rollouts
            for exchange, _, _ in rollout.asked
            if not exchange.ended and not exchange.left
        ]

    def sampled_tokens(self, record: Record) -> int:
        return sum(len(turn.output) for turn in record.trajectory.turns)

    def rollout_of(self, held: Held) -> Rollout:
        return next(r for r in self.rollouts if r.name == held.request.routing_key)

    def worded(self, text: str, rollout: Rollout, *, sampled: bool = False) -> str:
        """The text with a word of its own in each place for one."""
        while "§" in text:
            self.count += 1
            word = f"w{self.count}x"
            text = text.replace("§", word, 1)
            rollout.words.add(word)
            if sampled:
                rollout.sampled_words.add(word)
        return text

    def drawn_dialogue(self, data: st.DataObject, rollout: Rollout) -> Dialogue:
        """What the agent wants to say: it goes on from any dialogue, maybe changing the past."""

        def text() -> str:
            return self.said(data, rollout)

        known = [*rollout.dialogues, *self.answered(rollout)]
        # The later ones more often.
        at = data.draw(
            st.integers(0, len(known) - 1) | st.integers(max(len(known) - 3, 0), len(known) - 1)
        )
        messages, tools = list(known[at].messages), known[at].tools
        match data.draw(st.sampled_from([*["go on"] * 5, "edit", *CHANGES]), "change"):
            case "edit":
                at = data.draw(st.integers(0, len(messages) - 1))
                messages[at] = edited(messages[at], text())
            case "truncate":
                messages = messages[data.draw(st.integers(0, len(messages) - 1)) :]
            case "summarise":
                count = data.draw(st.integers(0, len(messages) - 1))
                messages = [{"role": "user", "content": text()}, *messages[count + 1 :]]
            case "roll back":
                messages = messages[: data.draw(st.integers(1, len(messages)))]
            case "other tools":
                tools = data.draw(st.integers(0, len(TOOLS) - 1))
            case "other system":
                system = self.worded(data.draw(st.sampled_from(SYSTEMS)), rollout)
                rest = [message for message in messages if message["role"] != "system"]
                messages = [{"role": "system", "content": system}, *rest]
            case "sub-agent":
                messages = [
                    {"role": "system", "content": text()},
                    {"role": "user", "content": text()},
                ]
            case "example":
                messages += [
                    {"role": "assistant", "content": text(), "reasoning_content": text()},
                    {"role": "user", "content": text()},
                ]
        if messages[-1]["role"] == "assistant":
            messages += self.following(data, rollout, messages[-1])
        return Dialogue(tuple(messages), tools)

    def following(
        self, data: st.DataObject, rollout: Rollout, reply: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """What an agent says after a reply."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.said(data, rollout)}
            for call in reply.get("tool_calls", ())
        ]
        if len(results) > 1:
            results = data.draw(st.permutations(results))
        if not results or data.draw(st.integers(0, 3)) == 0:
            results = [*results, {"role": "user", "content": self.said(data, rollout)}]
        return results

    def said(self, data: st.DataObject, rollout: Rollout) -> str:
        return self.worded(data.draw(strategies.spoken_texts), rollout)

    def answered(self, rollout: Rollout) -> list[Dialogue]:
        """Dialogues that end in a reply, also in one of which the agent missed the last bytes."""
        dialogues = []
        for exchange, dialogue, _ in rollout.asked:
            if exchange.status == 200 and has_reply(exchange):
                dialogues += [
                    Dialogue((*dialogue.messages, told.message), dialogue.tools)
                    for told in read_reply(exchange).choices
                ]
        return dialogues

    # What is checked.

    def on_prepared(
        self, record: Record, request: ChatRequest, prepared: Prepared | RequestError
    ) -> None:
        rollout = next(r for r in self.rollouts if r.key_id == record.id)
        rollout.attempts += 1
        if isinstance(prepared, RequestError):
            assert prepared.status in (400, 401), prepared
            return
        rollout.prepared.update(dict.fromkeys(prepared.turn_ids, prepared))
        assert len(prepared.turn_ids) == request.n
        if self.limits.max_rollout_tokens is not None:
            left = self.limits.max_rollout_tokens - self.sampled_tokens(record)
            assert prepared.max_new_tokens <= max(left // request.n, 1)
        self.check_prompt(rollout, record, request, prepared)

    def on_refused(self, record: Record, error: RequestError) -> None:
        rollout = next(r for r in self.rollouts if r.key_id == record.id)
        if error.status != 401:
            rollout.refused[error.code] += 1

    def on_choice(self, record: Record, prepared: Prepared, choice: Choice) -> None:
        rollout = next(r for r in self.rollouts if r.key_id == record.id)
        said = rollout.options[prepared.id]
        reply = normalise(choice.message, "reply")
        request = prepared.request
        for one in said:
            rollout.turns[f"{choice.turn_id}/{len(rollout.turns)}"] = Known(
                choice.turn_id,
                json.dumps(request.tools),
                [*keys_of([normalise(m, "") for m in request.messages]), keys_of([reply])[0]],
                [*one, reply],
            )

    def check_prompt(
        self, rollout: Rollout, record: Record, request: ChatRequest, prepared: Prepared
    ) -> None:
        """The prompt says what the template makes of the conversation, its reasoning restored, and
        nothing of another key; what it repeats of earlier turns, it repeats token by token."""
        decode = self.family.renderer.decode
        assert set(WORD.findall(decode(prepared.prompt.ids))) <= rollout.words
        spans: list[tuple[int, int]] = []
        for turn in sorted(record.trajectory.turns, key=lambda turn: turn.end):
            path = record.trajectory.tokens_through(turn.id)
            if not np.array_equal(path, prepared.prompt.ids[: turn.end]):
                continue
            # Replies to one prompt may begin alike.
            begin = turn.end - len(turn.output)
            while spans and spans[-1][1] > begin:
                begin = min(begin, spans.pop()[0])
            spans.append((begin, turn.end))
        edges = [0, *(edge for span in sorted(spans) for edge in span), len(prepared.prompt.ids)]
        unsampled = [
            decode(prepared.prompt.ids[begin:end])
            for begin, end in zip(edges[::2], edges[1::2], strict=True)
        ]
        # In any order: templates put a text that is behind a call before it.
        words = Counter(WORD.findall(decode(prepared.prompt.ids)))
        normal = [normalise(message, "") for message in request.messages]
        fitting, tried = [], []
        readings, continued, stays = self.readings(rollout, normal, json.dumps(request.tools))
        for said in readings:
            try:
                ids = self.family.renderer.render(said, request.tools, clock=record.clock).ids
            except RenderError:
                fitting.append(said)
                continue
            text = decode(ids)
            tried.append(text)
            kept = self.kept_reasoning(said)
            due = Counter(WORD.findall(text))
            # gpt-oss takes a text beside a call for reasoning: no telling what it would leave out.
            comparable = not kept or self.name != "gpt-oss"
            same = says(words, due, said, kept) and (
                not comparable or between(unsampled, text, kept)
            )
            if same or np.array_equal(ids, prepared.prompt.ids):
                fitting.append(said)
        assert fitting, (
            "the prompt is not what the template makes of any reading of the conversation:\n"
            f"{decode(prepared.prompt.ids)!r}\nof which unsampled: {unsampled!r}\n"
            + "\n".join(map(repr, tried))
        )
        rollout.options[prepared.id] = fitting
        if stays:
            paths = map(record.trajectory.tokens_through, continued)
            assert any(np.array_equal(path, prepared.prompt.ids[: len(path)]) for path in paths)

    def kept_reasoning(self, messages: Sequence[dict[str, Any]]) -> list[str]:
        """What may be in a prompt though the template leaves it out."""
        if self.retention == "template":
            return []
        return [each.get("reasoning_content", "") for each in messages]

    def readings(
        self, rollout: Rollout, messages: list[dict[str, Any]], tools: str
    ) -> tuple[list[list[dict[str, Any]]], set[str], bool]:
        """The conversation with the reasoning of the longest known one that it goes on from, and
        the turns of that; there are several where replies differ in nothing else. Whether all that
        was sampled has to stay."""
        keys = keys_of(messages)
        found: dict[str, list[dict[str, Any]]] = {}
        ids: set[str] = set()
        longest = 0
        for known in rollout.turns.values():
            count = len(known.keys)
            if known.tools != tools or count < longest or known.keys != keys[:count]:
                continue
            if not all(map(restorable, messages, known.said)):
                continue
            if count > longest:
                longest, found, ids = count, {}, set()
            ids.add(known.turn_id)
            said = [*known.said, *messages[count:]]
            found.setdefault(json.dumps(said), said)
        if len(ids) == 1:
            rollout.shown |= ids
        asks = any(message["role"] == "user" for message in messages[longest:])
        stays = self.retention == "all" or (self.retention == "tool_cycle" and not asks)
        return list(found.values()) or [messages], ids, stays and bool(ids)

    def check_reply(self, rollout: Rollout, exchange: Exchange) -> None:
        assert exchange.status != 500
        if exchange.status != 200:
            self.check_error(rollout, exchange)
            return
        if not has_reply(exchange):
            error = json.loads(bytes(exchange.reply).split(b"data: ")[-1])["error"]
            assert rollout.troubled or error["code"] == "invalid_api_key"
            return
        told = read_reply(exchange)
        prepared = rollout.prepared[told.id]
        asked = json.loads(exchange.body)
        assert prepared.request.messages == asked["messages"]
        assert tuple(choice.turn_id for choice in told.choices) == prepared.turn_ids
        assert len(told.choices) == asked.get("n", 1)
        record = rollout.record()
        if record is None:
            return
        for choice in told.choices:
            self.check_choice(rollout, record, prepared, asked, choice)
        usage = (told.usage or {}).get("prompt_tokens"), (told.usage or {}).get("completion_tokens")
        if not asked.get("stream") or asked.get("stream_options"):
            sampled = sum(len(record.trajectory.turn(id_).output) for id_ in prepared.turn_ids)
            assert usage == (len(prepared.prompt.ids), sampled)
        else:
            assert told.usage is None

    def check_choice(
        self,
        rollout: Rollout,
        record: Record,
        prepared: Prepared,
        asked: dict[str, Any],
        told: ToldChoice,
    ) -> None:
        turn = record.trajectory.turn(told.turn_id)
        engine = self.engine.outcomes[told.turn_id]
        parsed = self.family.renderer.parse(
            turn.output,
            tools=prepared.request.readable_tools,
            finish_reason=turn.finish_reason,
            matched=engine.matched,
            prompt=prepared.prompt.ids,
        )
        assert (told.message.get("content") or "") == parsed.content
        assert told.message.get("reasoning_content", "") == parsed.reasoning
        assert [
            (call["function"]["name"], call["function"]["arguments"])
            for call in told.message.get("tool_calls", ())
        ] == [(call.name, call.arguments) for call in parsed.calls]
        calls = parsed.calls and turn.finish_reason == "stop"
        assert told.finish_reason == ("tool_calls" if calls else turn.finish_reason)
        assert set(WORD.findall(json.dumps(told.message))) <= rollout.words
        assert turn.excluded == self.excluded(prepared, asked)
        if not asked.get("logprobs"):
            assert told.logprobs is None
            return
        assert told.logprobs is not None
        assert [entry["logprob"] for entry in told.logprobs] == turn.logprobs.tolist()
        texts = [
            self.family.renderer.decode(turn.output[at : at + 1]) for at in range(len(turn.output))
        ]
        assert [entry["token"] for entry in told.logprobs] == texts

    def excluded(self, prepared: Prepared, asked: dict[str, Any]) -> str | None:
        """Why a delivered turn is not trained."""
        forced = asked.get("tool_choice") == "required" and "tools" in asked
        constrained = self.constraints == "enforce" and ("response_format" in asked or forced)
        assert constrained == (prepared.constraint is not None)
        if not prepared.trained:
            return "untrained"
        return "constrained" if constrained else None

    def check_error(self, rollout: Rollout, exchange: Exchange) -> None:
        error = json.loads(exchange.reply)["error"]
        assert error["message"]
        if exchange.status == 408:
            assert not exchange.asked
        elif exchange.status == 400:
            shown = error["message"].startswith("messages: the chat template")
            code = error["code"]
            assert code == "context_length_exceeded" or shown or code in self.refusals(), error
        elif exchange.status == 429:
            assert error["code"] == "rate_limit_exceeded"
            assert self.limits.max_requests_in_flight == 2
        elif exchange.status == 401:
            assert not self.is_open(rollout), error
        else:
            assert exchange.status in (424, 502, 503), error
            assert rollout.troubled, error

    def refusals(self) -> set[str]:
        """What a request may be refused with for good, by the trainer's settings."""
        codes = {"unsupported_parameter"} if self.constraints == "enforce" else set()
        limited = self.limits.max_turns is not None or self.limits.max_rollout_tokens is not None
        return codes | ({"rollout_limit_exceeded"} if limited else set()) | {"invalid_value"}

    def check_rollout(self, rollout: Rollout) -> None:
        trajectory = rollout.trajectory
        assert trajectory is not None
        assert Trajectory.from_json(trajectory.to_json()) == trajectory
        assert {turn.id for turn in trajectory.turns} <= set(rollout.prepared)
        self.check_words(rollout, trajectory)
        self.check_limits(rollout, trajectory)
        delivered = {
            choice.turn_id: self.excluded(
                rollout.prepared[choice.turn_id], json.loads(exchange.body)
            )
            for exchange, _, _ in rollout.asked
            if exchange.delivered and exchange.status == 200 and has_reply(exchange)
            for choice in read_reply(exchange).choices
        }
        shown = [
            keys_of([normalise(message, "") for message in prepared.request.messages])
            for prepared in rollout.prepared.values()
        ]
        for turn in trajectory.turns:
            if turn.id in delivered:
                assert turn.excluded == delivered[turn.id]
            elif turn.excluded is None:
                keys = next(k.keys for k in rollout.turns.values() if k.turn_id == turn.id)
                assert any(other[: len(keys)] == keys for other in shown)
            else:
                assert turn.excluded in ("undelivered", "aborted", "untrained", "constrained")
                assert turn.excluded != "undelivered" or turn.id not in rollout.shown
        for asking in rollout.askings:
            ids = {
                read_reply(exchange).id
                for exchange in asking.exchanges
                if exchange.status == 200 and exchange.complete and has_reply(exchange)
            }
            assert ids <= set(asking.turn_ids[:1])
        for leaf in trajectory.leaves():
            # Its last turn is not among its turns where that added nothing.
            assert any(
                turn.excluded is None
                and turn.end == len(leaf.tokens)
                and np.array_equal(
                    leaf.tokens,
                    np.concatenate([rollout.prepared[turn.id].prompt.ids, turn.output]),
                )
                for turn in trajectory.turns
            )

    def check_limits(self, rollout: Rollout, trajectory: Trajectory) -> None:
        slow = sum(exchange.status == 408 for exchange, _, _ in rollout.asked)
        assert trajectory.refused == +(rollout.refused + Counter(too_slow=slow))
        if self.limits.max_turns is not None:
            assert len(trajectory) <= self.limits.max_turns
        seeds: dict[bytes, list[int]] = {}
        for request in self.engine.asked:
            seed = request.sampling.get("sampling_seed")
            if request.routing_key == rollout.name and seed is not None and not request.part:
                seeds.setdefault(request.input_ids.tobytes(), []).append(seed)
        for counted in seeds.values():
            assert counted == [SEED + at for at in range(len(counted))]

    def check_metrics(self, trajectories: Sequence[Trajectory]) -> None:
        """They count what the trajectories hold, and nothing of what anyone said is in them."""
        exchange = self.exchange("/metrics", TOKEN, None, "GET", self.control)
        text = exchange.reply.decode()
        assert not WORD.search(text)
        for rollout in self.rollouts:
            assert not any(each in text for each in (rollout.secret, rollout.key_id, rollout.name))
        samples = [
            sample
            for metric in text_string_to_metric_families(text)
            for sample in metric.samples
            if sample.value
        ]
        values = {(each.name, *each.labels.values()): each.value for each in samples}
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        due = Counter(("turnleaf_turns_total", turn.excluded or "trained") for turn in turns)
        for turn in turns:
            due["turnleaf_tokens_total", "prompt"] += turn.end - len(turn.output)
            due["turnleaf_tokens_total", "cached"] += turn.cached_tokens
            due["turnleaf_tokens_total", "sampled"] += len(turn.output)
        leaves = [len(trajectory._last_turns()) for trajectory in trajectories]
        due["turnleaf_rollout_leaves_sum",] = sum(leaves)
        due["turnleaf_rollout_leaves_count",] = sum(map(bool, leaves))
        due["turnleaf_retries_joined_total",] = sum(rollout.joined for rollout in self.rollouts)
        due["turnleaf_keys_open",] = due["turnleaf_requests_in_flight",] = 0
        names = {name for name, *_ in due}
        assert {each: value for each, value in values.items() if each[0] in names} == +due

    def check_words(self, rollout: Rollout, trajectory: Trajectory) -> None:
        decode = self.family.renderer.decode
        for turn in trajectory.turns:
            assert set(WORD.findall(decode(turn.output))) <= rollout.sampled_words
            assert set(WORD.findall(decode(turn.prompt))) <= rollout.words


@attrs.define(eq=False)
class _Arrival:
    """Whether a request is a turn of its own, or takes one that was lost."""

    machine: AgentsMachine
    rollout: Rollout
    exchange: Exchange
    identity: tuple[bytes, bool]
    marked: bool
    _attempts: int = 0
    _taken: int = 0
    _sampled: int = 0
    _hosts: int = 0
    _lost: list[Asking] = attrs.Factory(list)
    _prepared: set[str] = attrs.Factory(set)

    def __enter__(self) -> None:
        self._attempts = self.rollout.attempts
        self._prepared = set(self.rollout.prepared)
        record = self.rollout.record()
        if record is not None:
            recorded = {turn.id for turn in record.trajectory.turns}
            running = self.machine.observed.running.values()
            due = {id_ for each in running for id_ in each.turn_ids} & self._prepared
            self._taken = len(recorded | due)
            self._sampled = self.machine.sampled_tokens(record)
            self._hosts = sum(
                max(sum(id_ not in recorded for id_ in asking.turn_ids), 1)
                for asking in self.rollout.askings
                if not asking.exchanges[0].ended
            )
        self._lost = [
            asking
            for asking in self.rollout.askings
            if asking.identity == self.identity and self._is_lost(asking)
        ]

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None or not self.machine.is_open(self.rollout):
            return
        fresh = self.rollout.attempts > self._attempts
        if self.exchange.status == 429 and not fresh:
            self.rollout.refused["rate_limit_exceeded"] += 1
            return
        if not self.exchange.asked or self.exchange.status == 401:
            return
        known = self.identity not in self.rollout.blurred
        if fresh:
            assert self.rollout.attempts == self._attempts + 1
            assert not known or not self._lost, "a lost turn was there to be taken"
            assert not self._refusal()
            new = set(self.rollout.prepared) - self._prepared
            prepared = self.rollout.prepared[new.pop()] if new else None
            turn_ids = prepared.turn_ids if prepared else ()
            self.rollout.askings.append(Asking(self.identity, turn_ids, [self.exchange]))
        elif self.exchange.status == 400:
            code = self._refusal()
            assert code in ("rollout_limit_exceeded", "invalid_value")
            self.rollout.refused[code] += 1
        elif known and self._lost:
            self._lost[0].exchanges.append(self.exchange)
            self.rollout.joined += 1
        else:
            assert self.marked or not known, "an unmarked request took a turn that was not lost"
            self.rollout.blurred.add(self.identity)
            self.rollout.joined += 1

    def _refusal(self) -> str | None:
        """What a turn of its own has to be refused with."""
        limits, asked = self.machine.limits, json.loads(self.exchange.body).get("n", 1)
        if limits.max_turns is not None and self._taken + asked > limits.max_turns:
            some_left = self._taken < limits.max_turns
            return "invalid_value" if some_left else "rollout_limit_exceeded"
        if limits.max_rollout_tokens is not None and self._sampled >= limits.max_rollout_tokens:
            return "rollout_limit_exceeded"
        if asked > limits.max_requests_in_flight:
            return "invalid_value"
        full = self._hosts + asked > limits.max_requests_in_flight
        return "rate_limit_exceeded" if full else None

    def _is_lost(self, asking: Asking) -> bool:
        record = self.rollout.record()
        if record is None or not asking.turn_ids:
            return False
        if not all(exchange.left for exchange in asking.exchanges):
            return False
        lost_at = max(exchange.left_at for exchange in asking.exchanges)
        if lost_at + GRACE < self.machine.loop.now:
            return False
        running = asking.turn_ids[0] in self.machine.observed.running
        excluded = [t.excluded for t in record.trajectory.turns if t.id in asking.turn_ids]
        if {None} < set(excluded) or (running and None in excluded):
            # One of its replies is in a later request: whether that tells of it is not said.
            self.rollout.blurred.add(self.identity)
        waiting = ("undelivered", "untrained", "constrained")
        whole = len(excluded) == len(asking.turn_ids)
        return running or (whole and all(reason in waiting for reason in excluded))


CHANGES = (
    *("edit", "truncate", "summarise", "roll back", "other tools", "other system"),
    *("sub-agent", "example"),
)


def pick(data: st.DataObject, options: Sequence[Chosen], label: str) -> Chosen:
    """One of the options; a failure's report names it by its number."""
    return options[data.draw(st.integers(0, len(options) - 1), label)]


def chat_body(messages: Sequence[Any], tools: Any, options: dict[str, Any]) -> bytes:
    body = {"model": "model", "messages": list(messages), **options}
    if tools is not None:
        body["tools"] = tools
    elif body.get("tool_choice") == "required":
        del body["tool_choice"]
    return json.dumps(body).encode()


def taking(data: st.DataObject) -> int | None:
    """How many bytes of the reply a client takes before it leaves; None: all."""
    few = st.one_of(*[st.none()] * 5, st.integers(0, 1_200))
    taken: int | None = data.draw(few, "takes")
    return taken


def has_reply(exchange: Exchange) -> bool:
    """Whether what was sent is a whole reply, and no stream that broke."""
    if exchange.reply.startswith((b"data:", b":")):
        return exchange.reply.endswith(b"data: [DONE]\n\n")
    return bool(exchange.reply)


def edited(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Another content, or other arguments under the same ids."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": text}
    function = {**calls[0]["function"], "arguments": json.dumps({"a": text})}
    return {**message, "tool_calls": [{**calls[0], "function": function}, *calls[1:]]}


def keys_of(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """What messages are compared by: not ids, but which call a result answers."""
    positions: dict[str, int] = {}
    keys: list[Any] = []
    for message in messages:
        if message.get("tool_calls"):
            positions = {call["id"]: at for at, call in enumerate(message["tool_calls"])}
        answers = message.get("tool_call_id")
        calls = [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls", ())
        ]
        said = [message["role"], message.get("name"), message["content"].strip(), calls]
        # As text: 1 is neither true nor 1.0.
        text = json.dumps(said, sort_keys=True)
        keys.append([text, positions.get(answers, answers) if answers else None])
    return keys


def restorable(sent: dict[str, Any], said: dict[str, Any]) -> bool:
    reasoning = sent.get("reasoning_content", "").strip()
    return not reasoning or reasoning == said.get("reasoning_content", "").strip()


def says(
    words: Counter[str],
    due: Counter[str],
    messages: Sequence[dict[str, Any]],
    kept: Sequence[str],
) -> bool:
    """Whether these are the words that are due, but for texts beside calls, which some templates
    cannot show, and reasoning that is kept."""
    beside = " ".join([*(each["content"] for each in messages if each.get("tool_calls")), *kept])
    return not due - words and set(words - due) <= set(WORD.findall(beside))


SCAFFOLD = re.compile(r"</?think>|\s+")


def between(unsampled: list[str], text: str, kept: Sequence[str]) -> bool:
    """Whether the text is these pieces with anything between them, whitespace, empty reasoning and
    that which is kept aside."""

    def bare(piece: str) -> str:
        for reasoning in kept:
            piece = re.sub(rf"<think>\s*{re.escape(reasoning.strip())}\s*</think>", "", piece)
        return SCAFFOLD.sub("", piece)

    pattern = ".*?".join(re.escape(bare(piece)) for piece in unsampled)
    return re.fullmatch(pattern, bare(text), re.DOTALL) is not None


def remembered() -> Counter[str]:
    return Counter(
        type(one).__name__ for one in gc.get_objects() if isinstance(one, REMEMBERED_TYPES)
    )


class Log(logging.Handler):
    """What is logged, as text: whoever keeps a record would keep what it tells of, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        record.msg, record.args, record.exc_info = record.getMessage(), (), None


LOG = Log()


@pytest.fixture(autouse=True)
def _logged() -> Iterator[None]:
    logger = logging.getLogger("turnleaf")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(LOG)
    yield
    logger.removeHandler(LOG)
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """Collecting garbage looks at what a machine made alone."""
    for name in FAMILIES:
        family(name)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.timeout(0 if LONG else 120)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_agents(name: str) -> None:
    machine = type(f"AgentsOf_{name}", (AgentsMachine,), {"name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100 * LONG or 8,
            stateful_step_count=60 if LONG else 30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
