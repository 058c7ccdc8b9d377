"""The children are real processes; `MODULE` is the program they run."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import anyio
import pytest

from tests.waiting import is_running, until
from turnleaf.core import ContractError, GatewayError
from turnleaf.gateway._child import child_process

pytestmark = pytest.mark.anyio

MODULE = "child_under_test"


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that does what its configuration says."""
    (tmp_path / f"{MODULE}.py").write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time
            import anyio
            from turnleaf.core import ContractError
            from turnleaf.gateway._child import (
                announce, announce_error, read_config, until_stdin_closes
            )

            async def main():
                config = read_config()
                match config["do"]:
                    case "serve":
                        print("a greeting on stdout")
                        announce({"pid": os.getpid(), "argv": sys.argv, "echo": config})
                        print("x" * 200_000)
                        await until_stdin_closes()
                        sys.exit(config.get("code", 0))
                    case "refuse":
                        announce_error("the port 9090 is taken")
                        sys.exit(1)
                    case "die":
                        sys.exit(7)
                    case "die after a while":
                        announce({})
                        await anyio.to_thread.run_sync(sys.stdin.buffer.readline)
                    case "say nothing":
                        await until_stdin_closes()
                    case "outlive":
                        signal.signal(signal.SIGTERM, signal.SIG_IGN)
                        announce({})
                        await anyio.sleep_forever()

            anyio.run(main)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def test_a_child_is_configured_through_stdin_and_ends_with_its_context() -> None:
    config = {"do": "serve", "secret": "s3cret", "code": 3}
    async with child_process(MODULE, config) as child:
        assert child.ready["echo"] == config
        assert child.ready["pid"] == child.pid
        assert child.returncode is None
        assert "s3cret" not in " ".join(child.ready["argv"])
    assert child.returncode == 3


async def test_an_announced_error_is_a_contract_error() -> None:
    with pytest.raises(ContractError, match=r"^the port 9090 is taken$"):
        async with child_process(MODULE, {"do": "refuse"}):
            raise AssertionError("it is not ready")


async def test_a_child_that_dies_before_it_is_ready() -> None:
    with pytest.raises(GatewayError, match=r"child_under_test ended .* \(exit code 7\)"):
        async with child_process(MODULE, {"do": "die"}):
            raise AssertionError("it is not ready")


async def test_a_module_that_is_not_there() -> None:
    with pytest.raises(GatewayError, match=r"no_such_module ended .* \(exit code 1\)"):
        async with child_process("no_such_module", {"padding": "x" * 1_000_000}):
            raise AssertionError("it is not ready")


async def test_a_child_that_stays_silent() -> None:
    with pytest.raises(GatewayError, match=r"not ready within 0\.05 s"):
        async with child_process(MODULE, {"do": "say nothing"}, ready_timeout=0.05):
            raise AssertionError("it is not ready")


async def test_a_lost_child_is_noticed() -> None:
    async with child_process(MODULE, {"do": "serve"}) as child:
        os.kill(child.pid, signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        assert child.returncode == -signal.SIGKILL


async def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnleaf.gateway._child._CLOSING_GRACE", 0.05)
    monkeypatch.setattr("turnleaf.gateway._child._TERMINATION_GRACE", 0.05)
    async with child_process(MODULE, {"do": "outlive"}) as child:
        pass
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("forked", [False, True])
async def test_a_killed_parent_takes_its_child_along(tmp_path: Path, forked: bool) -> None:
    """A process that the parent forked holds the child's stdin open after the parent's death."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(
            f"""
            import os, sys, time, anyio
            from turnleaf.gateway._child import child_process

            async def main():
                async with child_process({MODULE!r}, {{"do": "serve"}}) as child:
                    fork = os.fork() if {forked} else None
                    if fork == 0:
                        time.sleep(60)
                        os._exit(0)
                    print(child.pid, fork or "", flush=True)
                    await anyio.sleep_forever()

            anyio.run(main)
            """
        )
    )
    async with await anyio.open_process([sys.executable, "-W", "ignore", str(parent)]) as process:
        assert process.stdout is not None
        child, *fork = map(int, (await process.stdout.receive()).split())
        assert is_running(child)
        process.send_signal(signal.SIGKILL)
        try:
            await until(lambda: not is_running(child))
            assert all(map(is_running, fork))
        finally:
            for pid in fork:
                os.kill(pid, signal.SIGKILL)


async def test_a_child_ends_at_once_though_a_fork_holds_its_stdin() -> None:
    async with child_process(MODULE, {"do": "serve"}) as child:
        assert child._process.stdin is not None
        held = os.dup(child._process.stdin.fileno())
        began = anyio.current_time()
    assert anyio.current_time() - began < 5
    assert child.returncode == 0
    os.close(held)


async def test_cancellation_ends_the_child() -> None:
    with anyio.CancelScope() as scope:
        async with child_process(MODULE, {"do": "serve"}) as child:
            scope.cancel()
            await anyio.sleep_forever()
    assert child.returncode == 0


async def test_an_error_in_the_context_comes_out_bare() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with child_process(MODULE, {"do": "serve"}):
            raise KeyError("mine")


async def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(
            f"""
            import anyio
            from turnleaf.gateway._child import child_process

            async def main():
                async with child_process({MODULE!r}, {{"do": "serve"}}) as child:
                    print(child.pid, flush=True)
                    await anyio.sleep_forever()

            anyio.run(main)
            """
        )
    )
    process = await anyio.open_process([sys.executable, parent], stderr=subprocess.DEVNULL)
    async with process:
        assert process.stdout is not None
        pid = json.loads(await process.stdout.receive())
        assert is_running(pid)
        process.kill()
        await process.wait()
        await until(lambda: not is_running(pid))


def test_a_child_starts_under_any_event_loop_policy(tmp_path: Path) -> None:
    """Ray's workers leave uvloop's policy behind, which knows nothing of child processes."""
    program = """
import asyncio, sys, warnings
import anyio
import uvloop
from turnleaf.core import Service
from turnleaf.gateway._child import child_process

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

async def run():
    async with child_process("child_under_test", {"do": "serve"}) as child:
        return child.ready["echo"]["do"]

with Service() as service:
    print(service.call(run))
"""
    places = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": places}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "serve\n", ended.stderr
