"""One rollout from start to end: engine, worker, agent."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import attrs
from rich.console import Console

from turnleaf.adapters.mock import FileTokenizer, cached_checkpoint
from turnleaf.cli._setup import SCRIPTED_REPLY, Plan
from turnleaf.core import (
    Gateway,
    Key,
    PayloadError,
    Purpose,
    Rollout,
    Service,
    Trajectory,
    excerpt,
    is_interrupt,
    run_rollout,
)
from turnleaf.gateway import GatewayClient, WorkerConfig, run_worker
from turnleaf.gateway._child import child_process
from turnleaf.gateway._watched import Requests

__all__ = ["Outcome", "Stage", "prepared", "run_once"]

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""As trainers sample by default: from the model's own distribution."""
_EXCERPT = 200


@attrs.frozen
class Outcome:
    """What came of the rollout, and what reads its tokens.

    key: the rollout's, whose secret is kept out of what is shown; None if there was none.
    requests: of the gateway, meanwhile.
    """

    rollout: Rollout
    tokenizer: FileTokenizer
    key: Key | None
    requests: Requests

    @property
    def exit_code(self) -> int:
        """0 when the agent completed, 2 for a payload that no agent can be given, else 1."""
        if self.rollout.status in ("completed", "truncated"):
            return 0
        return 2 if isinstance(self.rollout.error, PayloadError) else 1

    @property
    def printed_result(self) -> str:
        """How what the agent returned prints, without the rollout's key.

        Its outer parts alone, or its type, when it is too deep for Python, or will not be printed.
        """
        result, secret = self.rollout.result, "" if self.key is None else self.key.secret
        try:
            return self.hide(repr(result))
        except BaseException as error:
            if is_interrupt(error):
                raise
            return excerpt(result, length=_EXCERPT, secret=secret)

    def hide(self, text: str) -> str:
        """The text without the rollout's key."""
        return text if self.key is None else text.replace(self.key.secret, "[api_key]")


async def run_once(plan: Plan, service: Service) -> Outcome:
    """Start what the rollout needs, run it, and end everything again but the agent's session.

    service: the one that runs this; leaving the session is left to its background.

    Raises as `prepared` does, and ContractError for a mistake that only the rollout shows.
    """
    async with prepared(plan) as stage:
        return await stage.run(plan, service)


@attrs.frozen
class Stage:
    """What a rollout needs, up and running.

    model_id: what agents call the model.
    """

    gateway: GatewayClient
    tokenizer: FileTokenizer
    model_id: str

    async def run(self, plan: Plan, service: Service) -> Outcome:
        """Run one rollout; see `run_once`."""
        before = await self.gateway.requests()
        gateway = _NotingGateway(self.gateway)
        rollout = await run_rollout(
            plan.payload,
            session=plan.session,
            gateway=gateway,
            background=service.background,
            model_id=self.model_id,
            sampling=SAMPLING,
            name="rollout",
            max_rollout_time=plan.settings.max_rollout_time,
        )
        requests = (await self.gateway.requests()).since(before)
        return Outcome(rollout, self.tokenizer, gateway.key, requests)


@contextlib.asynccontextmanager
async def prepared(plan: Plan) -> AsyncIterator[Stage]:
    """A gateway worker and, without an engine in the plan, a scripted one.

    Raises ContractError when something is set up wrongly, GatewayError when the gateway or the
    scripted engine does not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        with Console(stderr=True).status("Preparing the tokenizer …") as status:
            model = plan.model
            if model is None:
                model = await anyio.to_thread.run_sync(cached_checkpoint, "qwen3")
            tokenizer = await anyio.to_thread.run_sync(FileTokenizer, model / "tokenizer.json")
            engine = plan.engine
            if engine is None:
                status.update("Starting the scripted engine …")
                engine = await stack.enter_async_context(_scripted_engine(plan, model))
            status.update("Starting the gateway worker …")
            config = WorkerConfig.for_settings(
                plan.settings,
                engine_url=engine,
                model=str(model),
                model_id="scripted" if plan.scripted else None,
            )
            config = attrs.evolve(config, log_format="text")  # a person reads along
            gateway = await stack.enter_async_context(run_worker(config))
        yield Stage(gateway, tokenizer, config.model_id or model.name)


@contextlib.asynccontextmanager
async def _scripted_engine(plan: Plan, model: Path) -> AsyncIterator[str]:
    replies = plan.replies or (SCRIPTED_REPLY,)
    config = {
        "script": {"*": [{"text": reply} for reply in replies]},
        "tokenizer": str(model / "tokenizer.json"),
        "stop_token_id": json.loads((model / "config.json").read_text())["eos_token_id"],
        "repeat": not plan.replies,
    }
    async with child_process("turnleaf.adapters.mock.scripted", config) as child:
        yield child.ready["url"]


@attrs.define
class _NotingGateway:
    """A Gateway that remembers the key which it handed out."""

    _gateway: Gateway
    key: Key | None = attrs.field(default=None, init=False)

    async def open_key(
        self, *, name: str, sampling: Mapping[str, Any], purpose: Purpose, expires_in: float
    ) -> Key:
        self.key = await self._gateway.open_key(
            name=name, sampling=sampling, purpose=purpose, expires_in=expires_in
        )
        return self.key

    async def close_key(self, key_id: str, *, aborted: bool = False) -> Trajectory:
        return await self._gateway.close_key(key_id, aborted=aborted)

    async def close_all(self, purpose: Purpose) -> None:
        await self._gateway.close_all(purpose)
