"""The hooks' one service: its worker's death, its sessions' end, and who decides on sampling."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import slime_agents
from tests.slime_stack import TURN, about, close_kept, flat, last_words, row, running_slime
from turnleaf.adapters.slime import generate
from turnleaf.core import ContractError

pytestmark = pytest.mark.slime

PARAMS = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64, "stop": None}


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    close_kept()


def sample(index: int, *do: str, **payload: Any) -> Any:
    from slime.utils.types import Sample

    return Sample(index=index, group_index=0, prompt=f"row {index}", **row(*do, **payload))


def test_a_workers_end_is_its_rollouts_end_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "turnleaf.adapters.slime._workers")
    # A limit of its own, so that the service is new and says where its worker is.
    with running_slime([TURN], monkeypatch, max_rollout_time=62, ledger=False) as stack:

        async def run() -> tuple[list[Any], float]:
            begun = asyncio.create_task(generate(stack.args, sample(0, "ask", "hang"), PARAMS))
            while not stack.engine.ledger:  # noqa: ASYNC110  # in another thread
                await asyncio.sleep(0.01)
            (pid,) = {int(r.args[0]) for r in caplog.records if "listens at" in r.msg}
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            # Before anybody can know of it.
            next_one = asyncio.create_task(generate(stack.args, sample(1, "ask"), PARAMS))
            lost = await begun
            seconds = time.monotonic() - began
            return [lost, await next_one], seconds

        (lost, kept), seconds = asyncio.run(run())
    assert seconds < 5
    assert (lost.status.value, about(lost)["cause"]) == ("aborted", "infrastructure")
    assert f"ended with exit code {-signal.SIGKILL}" in about(lost)["error"]
    assert (kept.status.value, kept.reward) == ("completed", 1.0)


def sessions(log: Path) -> dict[str, Any]:
    return {
        "backend": "tests.slime_agents.LoggedSession",
        "target": "tests.slime_agents:run",
        "log": str(log),
    }


def test_an_abort_stops_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "sessions"
    rows = [row("ask", "until_ready"), row("ask", "hang"), row("ask", "hang")]
    monkeypatch.setattr(
        slime_agents, "ready", lambda: log.read_text().split().count("entered") == 3
    )
    with running_slime(
        [TURN], monkeypatch, rollout_session_backend=sessions(log), over_sampling_batch_size=3
    ) as stack:
        stack.rollout(stack.data_source(rows, tmp_path))
        close_kept()  # waits for what is left in the background
    said = log.read_text().split()
    assert said.count("entered") == said.count("left") == 3


PROGRAM = """
import logging, sys
from pathlib import Path
import pytest
from tests import slime_agents, slime_stack
from tests.slime_stack import FULLY_ASYNC, TURN, fully_async, row
from tests.test_slime_service import sessions

logging.basicConfig(level=logging.CRITICAL)
folder = Path(sys.argv[1])
log = folder / "sessions"
slime_agents.ready = lambda: log.read_text().split().count("entered") == 3
with slime_stack.running_slime(
    [TURN],
    pytest.MonkeyPatch(),
    rollout_function_path=FULLY_ASYNC,
    rollout_session_backend=sessions(log),
    rollout_batch_size=3,
    sglang_server_concurrency=3,
) as stack:
    rows = [row("ask", "hang"), row("ask", "hang"), row("ask", "until_ready", result="no dict")]
    fully_async(stack, stack.data_source(rows, folder))
"""


def test_fully_async_a_fatal_error_stops_sessions_before_the_process(tmp_path: Path) -> None:
    assert "on_bad_result" in last_words(PROGRAM, tmp_path, seconds=90)
    said = (tmp_path / "sessions").read_text().split()
    assert said.count("entered") == said.count("left") == 3


@pytest.mark.parametrize("policy", ["zero", "remove"])
def test_an_infrastructure_failure_counts_as_zero_or_not_at_all(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_slime(
        [TURN],
        monkeypatch,
        rollout_session_backend={**sessions(tmp_path / "log"), "breaks": True},
        turnleaf={"on_infrastructure_failure": policy},
    ) as stack:
        (found,) = flat(stack.rollout(stack.data_source([row("ask")], tmp_path)))
    assert (found.status.value, found.reward) == ("completed", 0.0)
    assert about(found)["cause"] == "infrastructure"
    assert about(found)["leaves"] == 1
    assert found.remove_sample is (policy == "remove")


def test_the_trainer_decides_how_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"temperature": 1.7, "top_p": 0.3, "extra_body": {"top_k": 5}, "seed": 3}
    with running_slime([TURN], monkeypatch) as stack:
        asyncio.run(generate(stack.args, sample(0, "ask", options=asked), PARAMS))
        sampling = stack.engine.calls[-1].sampling
    assert {name: sampling[name] for name in ("temperature", "top_p", "top_k")} == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
    }
    assert "sampling_seed" not in sampling


def test_a_sample_without_an_index_is_a_data_sources_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_slime([TURN], monkeypatch) as stack:
        nameless = sample(0, "ask")
        nameless.index = None
        with pytest.raises(ContractError, match="index"):
            asyncio.run(generate(stack.args, nameless, PARAMS))


@pytest.mark.parametrize("how", ["cancel_all", "stop_loop"])
def test_an_agent_that_ends_the_services_loop_fails_what_runs_and_no_more(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_slime([TURN], monkeypatch, max_rollout_time=64, ledger=False) as stack:

        async def run() -> list[Any]:
            under_way = asyncio.create_task(generate(stack.args, sample(0, "ask", "hang"), PARAMS))
            while not stack.engine.ledger:  # noqa: ASYNC110  # in another thread
                await asyncio.sleep(0.01)
            return [
                await generate(stack.args, sample(1, how), PARAMS),
                await under_way,
                await generate(stack.args, sample(2, "ask"), PARAMS),
            ]

        guilty, other, later = asyncio.run(run())
    close_kept()
    for lost in (guilty, other):
        assert (lost.status.value, about(lost)["cause"]) == ("aborted", "infrastructure")
        assert "an agent in this process" in about(lost)["error"]
    assert (later.status.value, later.reward) == ("completed", 1.0)
