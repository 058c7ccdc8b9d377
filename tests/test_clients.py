"""The clients that people build agents with, in real conversations: docs/clients.md as it is."""

import contextlib
import gc
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, get_args
from urllib.parse import urlsplit

import anyio
import anyio.abc
import numpy as np
import pytest
from anyio.abc import SocketStream
from transformers.utils.chat_template_utils import render_jinja_template

from tests.client_agents import AGENTS, PAGE
from tests.gateway_stack import Recorder, checkpoint, running_gateway, tokenizer
from tests.waiting import until
from turnleaf.adapters.mock import ScriptedEngine, compare, serve_engine
from turnleaf.core import Background, Gateway, Key, Leaf, Rollout, Trajectory, run_rollout
from turnleaf.gateway import WorkerConfig, run_worker
from turnleaf.gateway._history import ThinkingRetention
from turnleaf.sessions import LocalSession

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.openai_client,
    # What the clients do themselves:
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*ReadOnly:UserWarning"),
]


def called(name: str, argument: str, value: str, space: str = " ") -> str:
    arguments = f'{{"{argument}":{space}"{value}"}}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def calculate(expression: str, space: str = " ") -> str:
    return called("calculate", "expression", expression, space)


ODD = "2\\u002b2"
"""2+2 with an escape that nobody would choose; two spaces go with it."""


THOUGHTS = ["Both products first.", "Now the sum.", "That was all.", "Be polite."]
CALLS = [
    f"I'll compute both.\n{calculate(ODD, '  ')}\n{calculate('3*4')}",
    calculate("4+12"),
]
QUESTIONS = ["What is 2+2 plus 3*4?", "Thank you."]
ANSWERS = ["The sum is 16.", "You are welcome."]

KNOWN_OVERFLOW = {
    "strands-agents": None,
    "langchain": "ContextOverflowError",
    "litellm": "ContextWindowExceededError",
}


def replies(agent: str) -> list[str]:
    """What the model says: three turns about the first question, one about the second."""
    answers = ANSWERS
    if agent.startswith("smolagents"):  # there an answer is a call, too
        answers = [called("final_answer", "answer", answer) for answer in ANSWERS]
    return [
        f"<think>\n{thought}\n</think>\n\n{said}"
        for thought, said in zip(THOUGHTS, [*CALLS, *answers], strict=True)
    ]


def text_of(leaf: Leaf) -> str:
    return tokenizer().decode(leaf.tokens.tolist())


def trained(leaf: Leaf) -> list[str]:
    edges = np.flatnonzero(np.diff(leaf.loss_mask.astype(int), prepend=0, append=0))
    runs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer().decode(leaf.tokens[a:b].tolist()) for a, b in runs]


def canonical(text: str) -> str:
    """The text with the calls' JSON in one spelling."""

    def respelled(call: re.Match[str]) -> str:
        return json.dumps(json.loads(call[0]), sort_keys=True)

    return re.sub(r"(?<=<tool_call>\n)\{\"name\": \".*\}(?=\n</tool_call>)", respelled, text)


def templates_text(body: dict[str, Any], thoughts: Iterator[str], template: str) -> str:
    """What a template makes of a request, with the thoughts given back to its assistant."""
    messages = []
    for sent in body["messages"]:
        content = sent.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        message = {"role": sent["role"], "content": content}
        if sent["role"] == "assistant":
            message["reasoning_content"] = next(thoughts, "")
        if sent.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                }
                for call in sent["tool_calls"]
            ]
        messages.append(message)
    (text,), _ = render_jinja_template(
        [messages], tools=body["tools"], chat_template=template, add_generation_prompt=True
    )
    return text


def template_of(retention: ThinkingRetention) -> str:
    """Qwen3's template; for `all`, without its condition for showing what was thought."""
    template = (checkpoint("qwen3") / "chat_template.jinja").read_text()
    if retention != "all":
        return template
    before, condition, after = template.partition("loop.index0 > ns.last_query_index")
    assert condition
    return f"{before}true{after}"


def documented(agent: str, table: int) -> list[str]:
    """The cells about an agent in one of the page's tables."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), flags=re.MULTILINE)
    client = agent.partition(", ")[0]
    for row in tables[table].splitlines():
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        if name.partition(",")[0] == client:
            return cells
    raise AssertionError(f"docs/clients.md says nothing about {client} in table {table}")


def made_of_replies(body: dict[str, Any]) -> list[str]:
    """What a client made of the first two replies, in the page's words."""
    first, second = [sent for sent in body["messages"] if sent["role"] == "assistant"][:2]
    if "tool_calls" not in first:
        return ["part of a new text", "part of a new text", "dropped", "part of a new text"]
    content, arguments = first["content"], first["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"expression": "2+2"}
    return [
        "a list of parts" if isinstance(content, list) else "as it came",
        "null" if "content" in second else "left out",
        "kept" if first.get("reasoning_content") else "dropped",
        "as they came" if arguments == f'{{"expression":  "{ODD}"}}' else "written anew",
    ]


def configuration(key: Key) -> dict[str, str]:
    return {"base_url": key.base_url, "api_key": key.secret, "model_id": "Qwen3"}


def leaves_of(agent: str, retention: ThinkingRetention = "template") -> list[list[int]]:
    """The turns that the leaves of the whole conversation train."""
    if agent.startswith("smolagents"):
        return [[0], [1], [2], [3]]
    return [[0, 1, 2, 3]] if retention == "all" else [[0, 1, 2], [3]]


def trained_turns(trajectory: Trajectory) -> list[list[int]]:
    return [[turn.index for turn in leaf.trained_turns] for leaf in trajectory.leaves()]


@pytest.fixture(scope="module", autouse=True)
def connections_end_here() -> Iterator[None]:
    """Clients that close nothing leave it to the collector, which warns: where that is ignored."""
    yield
    gc.collect()


@pytest.mark.parametrize("retention", get_args(ThinkingRetention))
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_thinking_conversation(agent: str, retention: ThinkingRetention) -> None:
    said = replies(agent)
    script = {"question": [{"text": text} for text in said[:3]], "*": [{"text": t} for t in said]}
    recorder = Recorder()
    counts = []
    both = leaves_of(agent, retention)
    first = [turns for leaf in both if (turns := [turn for turn in leaf if turn < 3])]
    async with running_gateway(script, thinking_retention=retention, around=recorder) as stack:
        for name, questions, by_leaf in (
            ("question", QUESTIONS[:1], first),
            ("both", QUESTIONS, both),
        ):
            recorder.asked.clear()
            key = await stack.open(name)
            answers = await AGENTS[agent](configuration(key), questions)
            assert answers == ANSWERS[: len(questions)]
            trajectory = await stack.close(key)
            assert len(trajectory.turns) == len(recorder.asked)
            assert trained_turns(trajectory) == by_leaf
            counts.append(len(by_leaf))
            for leaf, turns in zip(trajectory.leaves(), by_leaf, strict=True):
                assert trained(leaf) == [f"{said[turn]}<|im_end|>" for turn in turns]
                thoughts = iter([] if agent.startswith("smolagents") else THOUGHTS)
                prompt = templates_text(
                    recorder.asked[turns[-1]].body, thoughts, template_of(retention)
                )
                whole = f"{prompt}{said[turns[-1]]}<|im_end|>"
                assert canonical(text_of(leaf)) == canonical(whole)
    told = [int(cell.partition(" ")[0]) for cell in documented(agent, table=0)]
    assert counts == [told[0], told[2 if retention == "all" else 1]]
    made = made_of_replies(recorder.asked[-1].body)
    for what, cell in zip(made, documented(agent, table=1), strict=True):
        assert what in cell.split(" or ")  # versions differ, and so does streaming


async def test_without_thinking_only_what_is_rewritten_has_a_leaf_of_its_own() -> None:
    script = {
        agent: [{"text": text.partition("</think>\n\n")[2]} for text in replies(agent)]
        for agent in AGENTS
    }
    async with running_gateway(script, template="qwen2_5") as stack:

        async def converse(agent: str) -> None:
            key = await stack.open(agent)
            assert await AGENTS[agent](configuration(key), QUESTIONS) == ANSWERS, agent
            rewrites = agent.startswith("smolagents")
            expected = [[0], [1], [2], [3]] if rewrites else [[0, 1, 2, 3]]
            assert trained_turns(await stack.close(key)) == expected, agent

        async with anyio.create_task_group() as tasks:
            for agent in AGENTS:
                tasks.start_soon(converse, agent)


async def test_all_at_once_against_a_worker_process() -> None:
    script = {agent: [{"text": text} for text in replies(agent)] for agent in AGENTS}
    stop_token_id = tokenizer().encode("<|im_end|>")[0]
    engine = ScriptedEngine(script, tokenizer=tokenizer(), stop_token_id=stop_token_id)
    rollouts: dict[str, Rollout] = {}

    async def roll_out(agent: str, gateway: Gateway, background: Background) -> None:
        async def run(payload: dict[str, Any]) -> dict[str, Any]:
            answers = await AGENTS[agent](payload["_config"], payload["questions"])
            return {"reward": float(answers == ANSWERS)}

        rollouts[agent] = await run_rollout(
            {"questions": QUESTIONS},
            session=lambda: LocalSession(target=run),
            gateway=gateway,
            background=background,
            model_id="Qwen3",
            sampling={"temperature": 1.0},
            name=agent,
        )

    async with serve_engine(engine) as url:
        config = WorkerConfig(
            engine_url=url, model=str(checkpoint("qwen3")), control_token="token-of-control", port=0
        )
        async with (
            run_worker(config) as gateway,
            Background() as background,
            anyio.create_task_group() as tasks,
        ):
            for agent in AGENTS:
                tasks.start_soon(roll_out, agent, gateway, background)
    for agent, rollout in rollouts.items():
        assert rollout.reward == 1, (agent, rollout.error)
        assert trained_turns(rollout.trajectory) == leaves_of(agent), agent
    compare(
        engine.ledger, [rollout.trajectory for rollout in rollouts.values()]
    ).raise_for_problems()


async def test_every_client_waits_while_the_engine_has_trouble() -> None:
    script = {agent: [{"fail": 500}, *({"text": t} for t in replies(agent))] for agent in AGENTS}
    recorder = Recorder()
    async with running_gateway(script, retry_budget=0.0, around=recorder) as stack:

        async def converse(agent: str) -> None:
            key = await stack.open(agent)
            assert await AGENTS[agent](configuration(key), QUESTIONS) == ANSWERS, agent
            trajectory = await stack.close(key)
            assert len(trajectory.turns) == 4, agent
            assert [len(turns) for turns in trained_turns(trajectory)] == [
                len(turns) for turns in leaves_of(agent)
            ], agent
            retries = [
                asked.headers["x-stainless-retry-count"]
                for asked in recorder.asked
                if asked.headers["authorization"] == f"Bearer {key.secret}"
            ]
            assert retries == ["0", "1", "0", "0", "0"], agent

        async with anyio.create_task_group() as tasks:
            for agent in AGENTS:
                tasks.start_soon(converse, agent)


@asynccontextmanager
async def first_connection_cut(
    base_url: str, when: Callable[[], Awaitable[None]] | None
) -> AsyncIterator[str]:
    """Another address for `base_url`, whose first connection ends without a word to the client:
    when `when` returns, or once there is a reply."""
    address = urlsplit(base_url)
    connections = itertools.count()

    async def forward(client: SocketStream) -> None:
        number = next(connections)
        upstream = await anyio.connect_tcp(address.hostname, address.port)
        async with client, upstream, anyio.create_task_group() as tasks:

            async def cut() -> None:
                await when()
                tasks.cancel_scope.cancel()

            async def pump(source: SocketStream, sink: SocketStream, *, lose: bool) -> None:
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    async for data in source:
                        if lose:
                            break
                        await sink.send(data)
                tasks.cancel_scope.cancel()

            if number == 0 and when is not None:
                tasks.start_soon(cut)
            tasks.start_soon(partial(pump, client, upstream, lose=False))
            tasks.start_soon(partial(pump, upstream, client, lose=number == 0))

    async def serve(*, task_status: anyio.abc.TaskStatus[int]) -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
            await listener.serve(forward)

    async with anyio.create_task_group() as tasks:
        yield f"http://127.0.0.1:{await tasks.start(serve)}{address.path}"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("lost", ["while the engine works", "with the reply"])
async def test_a_reply_lost_on_the_way_is_had_by_the_retry(lost: str) -> None:
    script = {
        agent: [{"text": text, "delay": 0 if at else 0.2} for at, text in enumerate(replies(agent))]
        for agent in AGENTS
    }
    async with running_gateway(script, retry_grace=30.0) as stack:

        async def converse(agent: str) -> None:
            key = await stack.open(agent)

            async def at_work() -> None:
                await until(lambda: agent in [call.routing_key for call in stack.engine.calls])

            when = at_work if lost == "while the engine works" else None
            async with first_connection_cut(key.base_url, when) as base_url:
                told = {**configuration(key), "base_url": base_url}
                assert await AGENTS[agent](told, QUESTIONS) == ANSWERS, agent
            assert trained_turns(await stack.close(key)) == leaves_of(agent), agent

        async with anyio.create_task_group() as tasks:
            for agent in AGENTS:
                tasks.start_soon(converse, agent)
        assert len(stack.engine.calls) == 4 * len(AGENTS)


async def test_no_client_repeats_what_is_refused_for_good() -> None:
    script = {agent: [{"text": replies(agent)[0]}, {"fail": 400}] for agent in AGENTS}
    recorder = Recorder()
    async with running_gateway(script, around=recorder) as stack:

        async def converse(agent: str) -> None:
            key = await stack.open(agent)
            with pytest.raises(Exception, match="the engine refuses the call"):
                await AGENTS[agent](configuration(key), QUESTIONS)
            assert trained_turns(await stack.close(key)) == [[0]], agent

        async with anyio.create_task_group() as tasks:
            for agent in AGENTS:
                tasks.start_soon(converse, agent)
    assert len(recorder.asked) == 2 * len(AGENTS)


async def test_streaming_clients_take_the_comments_that_keep_them_waiting() -> None:
    streaming = [agent for agent in AGENTS if agent.endswith("streaming")]
    script = {agent: [{"text": t, "delay": 0.2} for t in replies(agent)] for agent in streaming}
    async with running_gateway(script, keep_alive=0.05) as stack:

        async def converse(agent: str) -> None:
            key = await stack.open(agent)
            assert await AGENTS[agent](configuration(key), QUESTIONS) == ANSWERS, agent
            assert trained_turns(await stack.close(key)) == leaves_of(agent), agent

        async with anyio.create_task_group() as tasks:
            for agent in streaming:
                tasks.start_soon(converse, agent)


async def test_a_stream_that_ends_in_an_error_is_one_to_every_client() -> None:
    streaming = [agent for agent in AGENTS if agent.endswith("streaming")]
    untrusted = {"text": "one", "mismatch": True, "delay": 0.2}
    recorder = Recorder()
    async with running_gateway([untrusted], keep_alive=0.05, around=recorder) as stack:

        async def converse(agent: str) -> None:
            key = await stack.open(agent)
            with pytest.raises(Exception, match="the engine's reply cannot be trusted"):
                await AGENTS[agent](configuration(key), QUESTIONS)
            assert len(await stack.close(key)) == 0, agent

        async with anyio.create_task_group() as tasks:
            for agent in streaming:
                tasks.start_soon(converse, agent)
    assert len(recorder.asked) == len(streaming)


@pytest.mark.parametrize("agent", [agent for agent in KNOWN_OVERFLOW if agent in AGENTS])
async def test_a_context_overflow_is_known_to_clients_that_tell_it_apart(agent: str) -> None:
    script = [{"text": text} for text in replies(agent)]
    async with running_gateway(script) as stack:
        key = await stack.open()
        await AGENTS[agent](configuration(key), QUESTIONS[:1])
        third = (await stack.close(key)).turns[2]
    limit = third.keep + len(third.prompt) - 1
    async with running_gateway(script, max_context_tokens=limit) as stack:
        key = await stack.open()
        error = KNOWN_OVERFLOW[agent]
        if error is None:  # it cuts its history, and goes on with what is left
            assert await AGENTS[agent](configuration(key), QUESTIONS[:1]) == ANSWERS[:1]
            # What was refused, number 2, is no turn.
            assert trained_turns(await stack.close(key)) == [[0, 1], [3]]
        else:
            with pytest.raises(Exception, match="maximum context length") as overflow:
                await AGENTS[agent](configuration(key), QUESTIONS[:1])
            assert error in [kind.__name__ for kind in type(overflow.value).__mro__]
            assert trained_turns(await stack.close(key)) == [[0, 1]]
