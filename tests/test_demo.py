"""The demo with few rollouts and a hurried warm-up, but with all its processes."""

import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console

from tests.gateway_stack import running_gateway
from turnleaf.adapters.mock import (
    AgentCoreLog,
    Counts,
    DemoSession,
    Ledger,
    Policy,
    Recipe,
    Summary,
    run_demo,
    sequence_logprobs,
)
from turnleaf.adapters.mock._agentcore_payload import Payload
from turnleaf.adapters.mock._demo_sessions import session_problems
from turnleaf.adapters.mock._demo_summary import Tally
from turnleaf.adapters.mock.demo_agent import run
from turnleaf.cli import main
from turnleaf.cli._demo import demo as show_demo
from turnleaf.cli._demo_screen import HEIGHT, LiveScreen, curve
from turnleaf.core import GatewayError, Service

pytestmark = pytest.mark.openai_client

HURRIED = Recipe(
    warm_up_updates=60, warm_up_batch=32, steps=2, prompts=4, rollouts=4, held_out=6, epochs=2
)
FIELDS = {
    *("seconds", "accuracy_before", "accuracy_after", "max_logprob_difference", "rollouts"),
    *("turns", "leaves", "forks", "trained_tokens", "masked_tokens", "failures"),
}


def demo(*arguments: str, recipe: Recipe = HURRIED) -> list[str]:
    """The command line of `turnleaf demo`, in a hurry."""
    program = (
        "from turnleaf.adapters.mock import Recipe\n"
        "from turnleaf.cli import _app, main\n"
        f"_app.Recipe = lambda: Recipe(**{attrs.asdict(recipe)!r})\n"
        "main()\n"
    )
    return [sys.executable, "-P", "-c", program, "demo", *arguments]


@attrs.frozen
class Made:
    """What a run of the command left behind."""

    out: str
    err: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.out)
        return summary

    @property
    def samples(self) -> list[dict[str, Any]]:
        lines = (self.folder / "samples.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`turnleaf demo --json`."""
    folder = tmp_path_factory.mktemp("demo")
    run = subprocess.run(
        demo("--seed", "3", "--steps", "2", "--json"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    [run_folder] = (folder / "runs").iterdir()
    return Made(run.stdout, run.stderr, run_folder)


def test_the_summary_is_the_last_line_and_a_file(made: Made) -> None:
    assert made.summary.keys() >= FIELDS
    assert json.loads((made.folder / "summary.json").read_text()) == made.summary
    assert made.summary["folder"] == str(made.folder)
    assert made.summary["problems"] == []
    assert made.summary["failures"] == 0
    assert made.summary["evaluation_rollouts"] == 2 * HURRIED.held_out
    assert 0 <= made.summary["accuracy_before"] <= 1
    assert made.summary["seconds"] > sum(made.summary["phases"].values()) - 0.1 > 0


def test_progress_is_a_line_for_each_step(made: Made) -> None:
    lines = re.sub(r"\d+\.\d%|\d\.\d+", "N", made.err).splitlines()
    assert lines == [
        "warm-up",
        "accuracy before: N",
        "step 1 of 2: reward N",
        "step 2 of 2: reward N",
        "accuracy after: N",
        "check",
    ]


def test_the_summary_counts_what_the_samples_are(made: Made) -> None:
    summary, samples = made.summary, made.samples
    leaves = Counter(sample["rollout"] for sample in samples)
    trained = sum(sum(sample["loss_mask"]) for sample in samples)
    assert summary["rollouts"] == 2 * 4 * 4
    assert {*leaves} == {*range(2 * 4 * 4)}
    assert summary["leaves"] == len(samples)
    assert summary["forks"] == sum(number > 1 for number in leaves.values()) > 0
    assert summary["trained_tokens"] == trained
    assert summary["masked_tokens"] == sum(len(s["tokens"]) for s in samples) - trained
    turns = {turn for sample in samples for turn in sample["turns"]}
    assert summary["turns"] == len(turns)
    assert Counter(turn for s in samples for turn in s["trained_turns"]) == dict.fromkeys(turns, 1)


def test_masks_and_versions_are_the_engines(made: Made) -> None:
    """Every call is looked up by its turn; nothing of a trajectory is used."""
    calls = {entry.turn_id: entry for entry in Ledger.read(made.folder / "ledger.jsonl")}
    for sample in made.samples:
        mask = np.zeros(len(sample["tokens"]), dtype=int)
        versions = []
        for turn in sample["trained_turns"]:
            call = calls.pop(turn)
            start, end = len(call.input_ids), len(call.input_ids) + len(call.output_ids)
            assert sample["tokens"][:end] == [*call.input_ids, *call.output_ids]
            mask[start:end] = 1
            np.testing.assert_allclose(sample["logprobs"][start:end], call.logprobs, atol=1e-6)
            versions += [span.version for span in call.weight_versions for _ in range(span.count)]
            assert call.routing_key == f"train-{sample['step']}-{sample['rollout']}"
        assert sample["loss_mask"] == mask.tolist()
        assert sample["prompt_length"] == np.flatnonzero(mask)[0]
        assert all(value == 0 for value in np.array(sample["logprobs"])[mask == 0])
        assert versions == [f"step-{sample['step']}"] * mask.sum()
        assert sample["weight_versions"] == [[f"step-{sample['step']}", mask.sum()]]
    left = Counter(call.routing_key.rpartition("-")[0] for call in calls.values())
    assert left == {"eval-before": HURRIED.held_out, "eval-after": HURRIED.held_out}


def test_log_probabilities_are_those_of_the_weights_that_sampled(made: Made) -> None:
    difference = 0.0
    for sample in made.samples:
        policy = Policy.load(made.folder / "weights" / f"step-{sample['step']}.npz")
        [computed] = sequence_logprobs(policy, [sample["tokens"]])
        trained = np.array(sample["loss_mask"]) == 1
        apart = np.abs(computed - sample["logprobs"])[trained]
        difference = max(difference, float(apart.max()))
    assert difference < 1e-4
    assert made.summary["max_logprob_difference"] == pytest.approx(difference, abs=1e-5)


def test_advantages_compare_the_rollouts_of_a_row(made: Made) -> None:
    rewards: dict[int, dict[int, float]] = {}
    for sample in made.samples:
        rewards.setdefault(sample["group"], {})[sample["rollout"]] = sample["reward"]
    assert {group: len(group_rewards) for group, group_rewards in rewards.items()} == dict.fromkeys(
        range(8), 4
    )
    assert len({value for group in rewards.values() for value in group.values()}) > 1
    for sample in made.samples:
        mean = np.mean([*rewards[sample["group"]].values()])
        assert sample["advantage"] == pytest.approx(sample["reward"] - mean)


def test_each_step_changes_the_weights(made: Made) -> None:
    weights = sorted((made.folder / "weights").iterdir())
    assert [path.stem for path in weights] == ["step-0", "step-1", "step-2"]
    first, second, third = (Policy.load(path).vector for path in weights)
    assert (first != second).any()
    assert (second != third).any()


class Watcher:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.done: Counter[str] = Counter()
        self.numbers: list[float] = []

    def phase(self, name: str, total: int) -> None:
        self.phases.append((name, total))

    def advance(self) -> None:
        self.done[self.phases[-1][0]] += 1

    def measured(self, accuracy: float) -> None:
        self.numbers.append(accuracy)

    def stepped(self, reward: float) -> None:
        self.numbers.append(reward)


@attrs.frozen
class Control:
    """What came of a run that learns nothing, with its agent on an emulated AgentCore Runtime."""

    folder: Path
    summary: Summary
    watcher: Watcher
    log: AgentCoreLog


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Control:
    folder, watcher = tmp_path_factory.mktemp("control"), Watcher()
    logs = []

    def problems(log: AgentCoreLog, rollouts: int) -> list[str]:
        logs.append(log)
        return session_problems(log, rollouts)

    recipe = attrs.evolve(HURRIED, warm_up_updates=20, steps=1, learning_rate=0.0)
    run = functools.partial(
        run_demo, recipe, seed=1, folder=folder, watcher=watcher, session=DemoSession.AGENTCORE
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnleaf.adapters.mock._demo_sessions.session_problems", problems)
        patch.setenv("AWS_PROFILE", "of-the-user")
        patch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        summary = anyio.run(run)
        assert os.environ["AWS_PROFILE"] == "of-the-user"
        assert "AWS_ACCESS_KEY_ID" not in os.environ
    [log] = logs
    return Control(folder, summary, watcher, log)


def test_without_a_learning_rate_nothing_is_learned(control: Control) -> None:
    summary, watcher = control.summary, control.watcher
    assert summary.problems == []
    assert summary.accuracy_before == summary.accuracy_after
    assert watcher.numbers == [
        summary.accuracy_before,
        *summary.rewards,
        summary.accuracy_after,
    ]
    weights = [Policy.load(path).vector for path in (control.folder / "weights").iterdir()]
    assert len(weights) == 2
    np.testing.assert_array_equal(*weights)
    assert watcher.phases == [
        ("warm-up", 20),
        ("accuracy before", 6),
        ("step 1 of 1", 16),
        ("accuracy after", 6),
        ("check", 1),
    ]
    assert watcher.done == dict(watcher.phases)


def test_each_rollout_has_a_session_of_agentcore_that_is_stopped(control: Control) -> None:
    assert control.summary.counts.failures == 0
    assert len(control.log.sessions) == 4 * 4 + 2 * HURRIED.held_out
    assert {session.how for session in control.log.sessions} == {"stopped"}


@pytest.mark.anyio
async def test_a_part_that_breaks_down_ends_the_demo(tmp_path: Path) -> None:
    class Killer(Watcher):
        def measured(self, accuracy: float) -> None:
            [agent] = [pid for pid in children(os.getpid()) if is_agent(pid)]
            os.kill(agent, signal.SIGKILL)

    recipe = attrs.evolve(HURRIED, warm_up_updates=3)
    # The last one may have been on its way when the agent ended.
    ends = "no agent can be reached|the connection to the agent"
    with pytest.raises(GatewayError, match=f"16 rollouts in a row failed.*({ends})"):
        await run_demo(recipe, seed=1, folder=tmp_path, watcher=Killer())


def is_agent(pid: int) -> bool:
    return b"demo_agent" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_sessions_that_were_left_and_rollouts_that_did_not_run_are_problems() -> None:
    log = AgentCoreLog()
    for number in range(2):
        session = log.session_started(f"session-{number}")
        invocation = log.invoked(session.id, Payload.read(b"{}"))
        invocation.session, invocation.executed = session.number, True
    log.stop_requested("session-0", "stopped")
    assert session_problems(log, 2) == ["the session session-1 was not stopped"]
    log.stop_requested("session-1", "stopped")
    assert session_problems(log, 2) == []
    assert session_problems(log, 3) == ["3 rollouts ran the agent 2 times in 2 sessions"]
    invocation.session = 0
    assert session_problems(log, 2) == ["2 rollouts ran the agent 2 times in 1 sessions"]


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def test_ctrl_c_ends_the_children(tmp_path: Path) -> None:
    unprepared = attrs.evolve(HURRIED, warm_up_updates=3)
    with subprocess.Popen(
        demo("--steps", "1000", recipe=unprepared),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("step 1 of" in line for line in process.stdout)
        ours = children(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "turnleaf demo: interrupted\n"
    assert len(ours) == 3
    assert not any(Path(f"/proc/{child}").exists() for child in ours)


def test_ctrl_c_ends_the_warm_up(tmp_path: Path) -> None:
    with subprocess.Popen(
        demo(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "warm-up\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "turnleaf demo: interrupted\n")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("replies", "retells", "leaves", "answers", "worth"),
    [
        (["5"], False, 1, [5], 1.0),
        (["4", "5"], False, 1, [4, 5], 0.5),
        (["4", "what?", "5"], False, 1, [4, None, 5], 0.25),
        (["4", "3", "1"], False, 1, [4, 3, 1], 0.0),
        (["4", "3", "5"], True, 2, [4, 3, 5], 0.25),
        (["what?", "4", "5"], True, 1, [None, 4, 5], 0.25),
    ],
)
async def test_the_agent_asks_until_the_answer_is_right(
    replies: list[str], retells: bool, leaves: int, answers: list[int | None], worth: float
) -> None:
    async with running_gateway([{"text": reply} for reply in replies], template="chatml") as stack:
        key = await stack.open()
        async with AsyncOpenAI(
            base_url="http://unused",
            api_key="unused",
            http_client=DefaultAsyncHttpxClient(verify=False),
        ) as client:
            config = {"base_url": key.base_url, "api_key": key.secret, "model_id": "model"}
            payload = {"digits": [3, 1, 4, 1, 5], "turns": 3, "retells": retells}
            result = await run({**payload, "_config": config}, client)
        trajectory = await stack.close(key)
    assert result == {"reward": worth, "answers": answers}
    assert len(trajectory) == len(replies)
    assert len(trajectory.leaves()) == leaves


# What is shown


def test_the_curve_is_as_high_as_the_reward() -> None:
    lines = curve([0.0, 0.5, 1.0, 2.0, -1.0], 5, 80)
    assert len(lines) == HEIGHT
    assert lines[-1] == "   ██ ██ ██    "
    assert lines[0] == "      ██ ██    "
    assert curve([1 / 64, 1 / 16 + 1 / 64], 2, 80)[-1] == "▁▁ ▅▅ "


def test_a_curve_that_is_too_wide_shows_its_end() -> None:
    lines = curve([0.0] * 30 + [1.0] * 5, 200, 10)
    assert set(lines) == {"     █████"}


def screen_text(recipe: Recipe, width: int) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    screen = LiveScreen(console, recipe)
    with screen:
        screen.phase("accuracy before", 6)
        screen.advance()
        screen.measured(0.25)
        screen.phase("step 1 of 2", 16)
        screen.advance()
        screen.stepped(0.5)
    return file.getvalue()


def test_a_terminal_shows_the_curve_and_what_is_being_done() -> None:
    frame = screen_text(HURRIED, 80)[-900:]
    assert "│██ " in frame
    assert re.search(r"step 1 of 2 .* accuracy 25\.0% · 2 rollouts · 0 s", frame)


def summary(**fields: Any) -> Summary:
    given: dict[str, Any] = {
        "folder": "/runs/now",
        "seed": 0,
        "learning_rate": 0.001,
        "accuracy_before": 0.238,
        "accuracy_after": 0.92,
        "rewards": [0.5],
        "counts": Counts(rollouts=3072, forks=170),
        "seconds": 46.0,
        "phases": {},
        "problems": [],
    }
    return Summary(**given | fields)


def shown(monkeypatch: pytest.MonkeyPatch, folder: Path, made_of: Summary) -> tuple[int, str]:
    async def pretended(*_: object, **__: object) -> Summary:
        return made_of

    monkeypatch.setattr("turnleaf.cli._demo.run_demo", pretended)
    monkeypatch.chdir(folder)
    file = io.StringIO()
    with Service() as service:
        code = show_demo(HURRIED, 0, service, file, as_json=False)
    return code, file.getvalue()


def test_the_table_names_every_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, text = shown(monkeypatch, tmp_path, summary())
    assert code == 0
    assert re.search(r"rollouts +3,072", text)
    assert re.search(r"forks +170", text)
    assert re.search(r"accuracy before +23\.8%", text)
    assert re.search(r"accuracy after +92\.0%", text)
    assert "/runs/now" in text


def test_a_long_folder_is_told_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = "/runs/" + "of-a-name-that-no-terminal-has-room-for/" * 4 + "now"
    _, text = shown(monkeypatch, tmp_path, summary(folder=folder))
    assert folder in "".join(text.split())


def test_a_token_that_is_not_accounted_for_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = shown(monkeypatch, tmp_path, summary(problems=["call 7: trained again"]))
    assert code == 1
    assert capsys.readouterr().err == "turnleaf demo: call 7: trained again\n"


@pytest.mark.parametrize("session", DemoSession)
def test_the_kind_of_session_is_an_option(
    session: DemoSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[DemoSession] = []

    async def pretended(*_: object, session: DemoSession, **__: object) -> Summary:
        asked.append(session)
        return summary()

    monkeypatch.setattr("turnleaf.cli._demo.run_demo", pretended)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(["demo", "--session", session.value])
    assert exited.value.code == 0
    assert asked == [session]


@pytest.mark.parametrize("rate", ["nan", "inf"])
def test_a_rate_that_is_no_number_is_refused(
    rate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(["demo", "--learning-rate", rate])
    assert exited.value.code == 2
    assert "--learning-rate" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("not a folder")
    with pytest.raises(SystemExit) as exited:
        main(["demo"])
    assert exited.value.code == 2
    assert f"the folder {tmp_path}/runs cannot be written" in capfd.readouterr().err


def test_a_difference_that_is_no_number_is_a_problem(tmp_path: Path) -> None:
    tally = Tally(tmp_path)
    (tmp_path / "ledger.jsonl").touch()
    tally.trained(0, [], [], float("nan"))
    assert any("log-probability differs" in problem for problem in tally.problems())
    tally.trained(1, [], [], 0.0)
    assert any("log-probability differs" in problem for problem in tally.problems())
