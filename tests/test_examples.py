"""The examples as their readers run them, through every part of a rollout."""

import json
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent_process import agent_process
from tests.envelope import Asking, get, start, state
from tests.gateway_stack import Stack, running_gateway, tokenizer
from turnleaf.core import Background, Rollout, run_rollout
from turnleaf.sessions import session_factory

pytestmark = [pytest.mark.anyio, pytest.mark.openai_client]

EXAMPLES = Path(__file__).parent.parent / "examples"
CALL = json.dumps({"name": "calculator", "arguments": {"a": 12, "operation": "*", "b": 7}})
SUM = {"prompt": "What is 12 * 7?", "answer": 84}
REPLIES = [{"text": f"<tool_call>\n{CALL}\n</tool_call>"}, {"text": "It is 84."}]


async def rolled_out(stack: Stack, payload: dict[str, Any], **backend: Any) -> Rollout:
    async with Background() as background:
        rollout = await run_rollout(
            payload,
            session=session_factory(backend),
            gateway=stack.gateway,
            background=background,
            model_id="model",
            sampling={"temperature": 1.0},
            name="rollout",
        )
    stack.collected.append(rollout.trajectory)
    return rollout


def trained_text(rollout: Rollout) -> str:
    (leaf,) = rollout.trajectory.leaves()
    return tokenizer().decode(leaf.tokens[leaf.loss_mask].tolist())


async def test_the_calculator_in_this_process() -> None:
    async with running_gateway(REPLIES) as stack:
        target = f"{EXAMPLES / 'calculator' / 'agent.py'}:run"
        rollout = await rolled_out(
            stack, SUM, backend="turnleaf.sessions.LocalSession", target=target
        )
    assert rollout.error is None
    assert (rollout.status, rollout.reward) == ("completed", 1.0)
    texts = [reply["text"] for reply in REPLIES]
    assert trained_text(rollout) == "<|im_end|>".join([*texts, ""])


async def test_the_calculator_behind_http() -> None:
    with agent_process(EXAMPLES / "http_agent" / "agent.py") as url:
        async with running_gateway(REPLIES) as stack:
            rollout = await rolled_out(stack, SUM, backend="turnleaf.sessions.HttpSession", url=url)
            assert rollout.error is None
            assert (rollout.status, rollout.reward) == ("completed", 1.0)
            assert len(rollout.trajectory.leaves()) == 1
        async with running_gateway([{"text": "hm", "finish": "length"}]) as stack:
            rollout = await rolled_out(stack, SUM, backend="turnleaf.sessions.HttpSession", url=url)
            assert (rollout.status, rollout.reward) == ("truncated", 0.0)
            failed = await rolled_out(stack, {}, backend="turnleaf.sessions.HttpSession", url=url)
            assert (failed.status, failed.cause) == ("failed", "agent")
            assert "KeyError" in str(failed.error) or "prompt" in str(failed.error)


async def test_the_calculator_in_the_background() -> None:
    with agent_process(EXAMPLES / "runtime_agent" / "agent.py") as url:
        async with running_gateway(REPLIES) as stack:
            # Without the envelope it is an app like any other.
            rollout = await rolled_out(stack, SUM, backend="turnleaf.sessions.HttpSession", url=url)
            assert (rollout.status, rollout.reward) == ("completed", 1.0)
        async with (
            running_gateway(REPLIES) as stack,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
        ):
            ask, key = Asking(client), await stack.open()
            config = {"base_url": key.base_url, "model_id": "model", "api_key": key.secret}
            payload = start(payload={**SUM, "_config": config}, background=True)
            session_id = uuid.uuid4().hex
            assert await ask(payload, session_id) == state("in_progress")
            assert (await ask(get(wait=60), session_id))["result"]["reward"] == 1.0
            assert len((await stack.close(key)).leaves()) == 1


async def test_an_agent_that_scores_itself_by_its_trajectory() -> None:
    async with running_gateway([{"text": "Seven."}]) as stack:
        target = f"{EXAMPLES / 'self_scoring' / 'agent.py'}:run"
        rollout = await rolled_out(
            stack,
            {"prompt": "Name a prime number."},
            backend="turnleaf.sessions.LocalSession",
            target=target,
        )
    assert rollout.error is None
    assert rollout.result is not None
    sampled = sum(len(turn.output) for turn in rollout.trajectory.turns)
    assert rollout.result["sampled_tokens"] == sampled == len(tokenizer().encode("Seven.")) + 1
    assert rollout.reward == 1 - sampled / 200
