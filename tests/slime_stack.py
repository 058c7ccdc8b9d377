"""slime, or its stand-ins, driving the hooks: a scripted engine, a real worker, real agents."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from tests import slime_host
from tests.small_checkpoint import END, small_checkpoint, small_tokenizer
from turnleaf.adapters.mock import (
    Script,
    ScriptedEngine,
    compare,
    serve_engine,
    serve_router,
)
from turnleaf.adapters.mock._balance import _leaf_problems
from turnleaf.adapters.slime._service import RolloutService
from turnleaf.core import Trajectory
from turnleaf.gateway import GatewayClient

HOOKS = {
    "custom_generate_function_path": "turnleaf.adapters.slime.generate",
    "custom_reward_post_process_path": "turnleaf.adapters.slime.normalize_episode_rewards",
}
SETTINGS = {
    "rollout_session_backend": {
        "backend": "turnleaf.sessions.LocalSession",
        "target": "tests.slime_agents:run",
    },
    "gateway_host": "127.0.0.1",
    "gateway_port": 0,
    "tps_limit": 10_000,
    "max_rollout_time": 60,
}


@attrs.define(eq=False)
class Collected:
    """Every trajectory that the trainer got, by its key."""

    by_key: dict[str, Trajectory] = attrs.Factory(dict)
    names: dict[str, str] = attrs.Factory(dict)

    def wait(self) -> None:
        """Until every key that was opened is closed: an abort leaves that to the background."""
        until = time.monotonic() + 10
        while self.names.keys() > self.by_key.keys():
            assert time.monotonic() < until, "a key was not closed"
            time.sleep(0.01)


@attrs.frozen(eq=False)
class Stack:
    args: Any
    engine: ScriptedEngine
    collected: Collected

    def data_source(self, rows: list[dict[str, Any]], folder: Path) -> Any:
        """slime's own, over rows whose payload is given."""
        from slime.rollout.data_source import RolloutDataSourceWithBuffer

        path = folder / "rows.jsonl"
        lines = [json.dumps({"prompt": f"row {i}", **row}) for i, row in enumerate(rows)]
        path.write_text("\n".join(lines) + "\n")
        self.args.prompt_data = str(path)
        return RolloutDataSourceWithBuffer(self.args)

    def rollout(self, data_source: Any, number: int = 0) -> Any:
        """One training step's rollouts, as slime makes them."""
        from slime.rollout.sglang_rollout import generate_rollout

        return generate_rollout(self.args, number, data_source, evaluation=False)

    def check_ledger(self, train_data: dict[str, Any] | None = None) -> dict[str, int]:
        """Every sampled id is accounted for in the trajectories, and in slime's train data.

        Returns how many ids were sampled, and how many of them slime trains.
        """
        self.collected.wait()
        report = compare(self.engine.ledger, self.collected.by_key.values())
        report.raise_for_problems()
        counts = {"sampled": report.sampled, "trained": 0}
        if train_data is not None:
            counts["trained"] = self._check_train_data(train_data)
        return counts

    def _check_train_data(self, data: dict[str, Any]) -> int:
        """What slime trains are the calls of its rollouts, each once, in its own context."""
        leaves: dict[int, list[Any]] = {}
        trained = 0
        for position, tokens in enumerate(data["tokens"]):
            mask = np.array(data["loss_masks"][position], dtype=bool)
            before = len(tokens) - len(mask)
            logprobs = np.concatenate([np.zeros(before), data["rollout_log_probs"][position]])
            leaf = _Trained(
                np.array(tokens, dtype=np.int32),
                np.concatenate([np.zeros(before, dtype=bool), mask]),
                logprobs.astype(np.float32),
            )
            if "rollout_routed_experts" in data:
                leaf.routed_experts = np.asarray(data["rollout_routed_experts"][position])
            if "rollout_top_p_token_ids" in data:
                leaf.top_p_ids = np.asarray(data["rollout_top_p_token_ids"][position])
                offsets = np.asarray(data["rollout_top_p_token_offsets"][position])
                leaf.top_p_offsets = np.concatenate([np.zeros(before, dtype=int), offsets])
            trained += int(mask.sum())
            leaves.setdefault(data["rollout_ids"][position], []).append(leaf)
        for rollout_id, own in leaves.items():
            if not any(leaf.loss_mask.any() for leaf in own):
                continue
            # A rollout that was put back has run more than once; its last run is trained.
            key = [k for k, name in self.collected.names.items() if name == f"train-{rollout_id}"]
            turns = {turn.id: turn for turn in self.collected.by_key[key[-1]].turns}
            entries = [e for e in self.engine.ledger if e.turn_id in turns]
            to_train = [e for e in entries if turns[e.turn_id].excluded is None]
            left_out = [e for e in entries if turns[e.turn_id].excluded is not None]
            assert list(_leaf_problems(own, to_train, left_out)) == []
        return trained


@attrs.define(eq=False)
class _Trained:
    tokens: Any
    loss_mask: Any
    logprobs: Any
    routed_experts: Any = None
    top_p_ids: Any = None
    top_p_offsets: Any = None


@attrs.frozen(eq=False)
class _Kept:
    """An engine and the hooks' service, kept from one test to the next that needs no others."""

    needs: Any
    engine: ScriptedEngine
    address: tuple[str, int]
    resources: ExitStack


_kept: _Kept | None = None


def close_kept() -> None:
    """End what the last test left running."""
    global _kept
    if _kept is not None:
        RolloutService.close_current()
        _kept.resources.close()
        _kept = None


@contextmanager
def running_slime(
    script: Script | list[Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    engine_options: dict[str, Any] | None = None,
    ledger: bool = True,
    **arguments: Any,
) -> Iterator[Stack]:
    """slime's arguments for an engine, and hooks, that may have served earlier tests of the module.

    script: of the engine, whose last reply goes on; a list is played to every rollout. arguments:
    of slime, and settings. ledger: whether every sampled id must be accounted for at the end, as it
    cannot be when a worker died.
    """
    played = script if isinstance(script, dict) else {"*": list(script)}
    slime_host.fresh_slime()
    args = slime_host.slime_args(
        **{"hf_checkpoint": str(small_checkpoint("chatml")), **HOOKS, **SETTINGS, **arguments}
    )
    needs = [engine_options, *(getattr(args, name, None) for name in _READ_AT_THE_START)]
    kept = _keep(needs, engine_options or {})
    kept.engine.play(played)
    args.sglang_router_ip, args.sglang_router_port = kept.address
    stack = Stack(args, kept.engine, _collecting(monkeypatch))
    yield stack
    if ledger:
        stack.check_ledger()


_READ_AT_THE_START = (
    *SETTINGS,
    "turnleaf",
    "rollout_top_p",
    "use_rollout_routing_replay",
    "rollout_max_context_len",
)


def _keep(needs: Any, engine_options: dict[str, Any]) -> _Kept:
    global _kept
    if _kept is not None and _kept.needs == needs:
        return _kept
    close_kept()
    engine = ScriptedEngine(
        {},
        tokenizer=small_tokenizer(),
        stop_token_id=END,
        repeat=True,
        **engine_options,
    )
    resources = ExitStack()
    portal = resources.enter_context(start_blocking_portal())
    url = resources.enter_context(portal.wrap_async_context_manager(serve_engine(engine)))
    url = resources.enter_context(portal.wrap_async_context_manager(serve_router([url], drops=())))
    host, _, port = url.removeprefix("http://").partition(":")
    _kept = _Kept(needs, engine, (host, int(port)), resources)
    return _kept


def _collecting(monkeypatch: pytest.MonkeyPatch) -> Collected:
    collected, lock = Collected(), threading.Lock()
    open_key, close_key = GatewayClient.open_key, GatewayClient.close_key

    async def opening(self: GatewayClient, *, name: str, **options: Any) -> Any:
        key = await open_key(self, name=name, **options)
        with lock:
            collected.names[key.id] = name
        return key

    async def closing(self: GatewayClient, key_id: str, **options: Any) -> Trajectory:
        trajectory = await close_key(self, key_id, **options)
        with lock:
            collected.by_key[key_id] = trajectory
        return trajectory

    monkeypatch.setattr(GatewayClient, "open_key", opening)
    monkeypatch.setattr(GatewayClient, "close_key", closing)
    return collected


def train_data(args: Any, output: Any) -> dict[str, Any]:
    """What slime hands to the trainer: checked, flattened, normalised and converted."""
    manager = slime_host.rollout_manager(args, output)
    samples, _ = manager._get_rollout_data(0)
    data: dict[str, Any] = manager._convert_samples_to_train_data(samples)
    return data


FORK = ["ask", "ask", "forget", "ask"]
"""What an agent does whose rollout has two leaves, of two turns and of one."""
TURN = {"text": "an answer"}


def row(*do: str, **payload: Any) -> dict[str, Any]:
    """A dataset row for `slime_agents`."""
    return {"metadata": {"payload": {"do": list(do), **payload}}}


def flat(output: Any) -> list[Any]:
    """The samples of a step, leaf by leaf."""
    return [sample for group in output.samples for rollout in group for sample in rollout]


def about(sample: Any) -> dict[str, Any]:
    """What the hooks say of a sample."""
    found: dict[str, Any] = sample.metadata["turnleaf"]
    return found


FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def fully_async(stack: Stack, source: Any) -> list[Any]:
    """One training step's samples, by slime's fully asynchronous rollout."""
    from slime.rollout.fully_async_rollout import generate_rollout_fully_async

    groups: list[Any] = generate_rollout_fully_async(stack.args, 0, source)
    return [sample for group in groups for rollout in group for sample in rollout]


def last_words(program: str, folder: Path, *, seconds: float) -> str:
    """The last line on stderr of a program that must end with exit code 1."""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    return [line for line in ended.stderr.splitlines() if line.strip()][-1]
