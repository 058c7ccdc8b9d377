"""The benchmark of the gateway, in small."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = ROOT / "benchmarks" / "gateway.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the benchmark's modules importable."""
    monkeypatch.syspath_prepend(COMMAND.parent)


@pytest.mark.anyio
async def test_loads_run_and_are_paid_for(benchmark: None) -> None:
    from harness import gateways, loads
    from harness.environments import tool_calls

    outputs = tool_calls(loads.TOKENS, count=3)
    assert [len(ids) for ids in outputs] == [loads.TOKENS] * 3
    async with (
        gateways.engine(outputs) as engine_url,
        gateways.turnleaf()(engine_url) as gateway,
    ):
        dialogues = loads.Load(sessions=3, turns=4, words=5, before=1)
        cost = await loads.run(gateway, dialogues)
        assert [len(seconds) for seconds in cost.seconds] == [4, 4, 4]
        assert len(set(cost.names)) == 3
        assert cost.turns == 9
        assert cost.cpu_ms > 0

        streams = loads.Load(sessions=2, turns=2, stream=True)
        cost = await loads.run(gateway, streams)
        assert [len(seconds) for seconds in cost.seconds] == [2, 2]

        # The engine's replies are not what this load expects.
        with pytest.raises(RuntimeError, match=r"turnleaf: 3 failed: .*a reply of 128 tokens"):
            await loads.run(gateway, loads.Load(sessions=3, turns=1, tokens=127))


def test_a_bar_that_is_not_met_fails_the_command(
    benchmark: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gateway
    from harness.report import Bar, Report, table

    found = [Bar("cost", 2.5, 3)]

    async def flatness() -> Report:
        return Report([*table(["load", "turnleaf"], [["4 turns", "1 ms"]])], found)

    monkeypatch.setattr(gateway, "flatness", flatness)
    monkeypatch.setattr(sys, "argv", ["gateway.py", "--short"])
    assert gateway.main() == 0
    printed = capsys.readouterr().out
    assert "| load    | turnleaf |\n| ------- | -------- |\n| 4 turns | 1 ms     |\n\n" in printed
    assert "cost: 2.5 (at most 3): met\n" in printed
    found.append(Bar("memory", 0.2, 0.125))
    assert gateway.main() == 1
    assert "memory: 0.2 (at most 0.125): NOT MET\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["speed"], "there is no part 'speed'; there are dialogues, streams,"),
        (["rewards", "--rounds", "0"], "--rounds must be at least 1, but is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], why: str) -> None:
    run = subprocess.run([sys.executable, COMMAND, *arguments], capture_output=True, text=True)
    assert run.returncode == 2
    assert why in run.stderr
