"""The processes that a demo runs beside the trainer: an engine, a gateway worker, an agent."""

import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import attrs
import httpx

from turnleaf.adapters.mock._demo_sessions import DemoSession, DemoSessions, demo_sessions
from turnleaf.adapters.mock._policy import Policy
from turnleaf.adapters.mock._recipe import Recipe
from turnleaf.adapters.mock._warm_up import Conversation
from turnleaf.gateway import GatewayClient, WorkerConfig, run_worker
from turnleaf.gateway._child import child_process

__all__ = ["MODEL_ID", "Services", "demo_services"]

MODEL_ID = "policy"
"""What the agent calls the model."""


@attrs.frozen
class Services:
    """What the demo's trainer talks to. engine: its HTTP client. sessions: with the agent."""

    engine: httpx.AsyncClient
    gateway: GatewayClient
    sessions: DemoSessions


@asynccontextmanager
async def demo_services(
    checkpoint: Path,
    conversation: Conversation,
    recipe: Recipe,
    *,
    seed: int,
    ledger: Path,
    session: DemoSession,
) -> AsyncIterator[Services]:
    """Run them until the context is left. The engine has no weights of use until it gets some.

    Raises ContractError or GatewayError when one does not start.
    """
    async with AsyncExitStack() as stack:
        untrained = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "untrained.npz"
        Policy.random(recipe.shape(conversation.vocabulary), seed).save(untrained)
        config = {
            "weights": str(untrained),
            "stop_token_id": conversation.end,
            "seed": seed,
            "ledger": str(ledger),
        }
        engine = await stack.enter_async_context(
            child_process("turnleaf.adapters.mock.policy_engine", config)
        )
        gateway = await stack.enter_async_context(
            run_worker(
                WorkerConfig(
                    engine_url=engine.ready["url"],
                    model=str(checkpoint),
                    model_id=MODEL_ID,
                    log_format="text",  # a person reads along
                    control_token=secrets.token_urlsafe(32),
                    port=0,
                    max_context_tokens=recipe.positions,
                )
            )
        )
        agent = await stack.enter_async_context(
            child_process("turnleaf.adapters.mock.demo_agent", {})
        )
        client = httpx.AsyncClient(base_url=engine.ready["url"], timeout=30.0, trust_env=False)
        await stack.enter_async_context(client)
        sessions = await stack.enter_async_context(demo_sessions(session, agent.ready["url"]))
        yield Services(client, gateway, sessions)
