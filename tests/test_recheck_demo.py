"""The demo's recheck passes on what a policy's engine sampled, and sees every kind of tampering."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from turnleaf.adapters.mock import Ledger, Policy, PolicyEngine, Shape
from turnleaf.adapters.mock._calls import Answer, Call
from turnleaf.core import Trajectory, Turn, WeightSpan, group_advantages

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "recheck_demo.py"
SHAPE = Shape(range(100, 112), width=16, heads=2, hidden=24, positions=64)
END = 111
STRANGER = 7  # an id that the policy does not know


def policy(version: str) -> Policy:
    made = Policy.random(SHAPE, seed=int(version))
    made.vector *= 3  # far from uniform, so that another weight gives another probability
    return made


class Sampled:
    """A rollout whose turns an engine samples."""

    def __init__(self, engine: PolicyEngine, name: str) -> None:
        self.trajectory = Trajectory()
        self._engine = engine
        self._name = name

    def lose_a_copy(self) -> None:
        """A call like the last one, whose client was gone before the answer."""
        *_, last = self._engine.ledger
        turn_id = f"{self._name}-lost"
        copy = attrs.evolve(last, rid=f"{turn_id}.0.0", turn_id=turn_id, answered=False)
        self._engine.ledger.append(copy)

    async def turn(self, prompt: list[int], **fields: Any) -> list[int]:
        """Sample behind the prompt; prompt and output."""
        index = len(self.trajectory)
        turn_id = f"{self._name}-turn-{index}"
        ids = np.array(prompt, dtype=np.int32)
        call = Call(f"{turn_id}.0.0", self._name, ids, {"max_new_tokens": 5})
        answer = await self._engine.generate(call)
        assert isinstance(answer, Answer)
        scored = answer.body["meta_info"]["output_token_logprobs"]
        output = [token for _, token, _ in scored]
        parent, keep = self.trajectory.locate(ids)
        self.trajectory.add(
            Turn(
                id=turn_id,
                index=index,
                parent=parent,
                keep=keep,
                prompt=prompt[keep:],
                output=output,
                logprobs=[logprob for logprob, _, _ in scored],
                finish_reason=answer.body["meta_info"]["finish_reason"]["type"],
                weight_versions=[WeightSpan(self._engine.weight_version, len(output))],
                **fields,
            )
        )
        return [*prompt, *output]


async def write_run(folder: Path) -> None:
    """Two steps of two groups of three rollouts: plain ones, forks, and second samples."""
    (folder / "weights").mkdir()
    for version in ("0", "1"):
        policy(version).save(folder / "weights" / f"{version}.npz")
    engine = PolicyEngine(
        policy("0"),
        stop_token_id=END,
        ledger=Ledger(folder / "ledger.jsonl"),
        weight_version="0",
    )
    samples: list[dict[str, Any]] = []
    async with engine.sampling():
        await Sampled(engine, "eval-0").turn([100, 101])
        for step in range(2):
            await engine.update_weights(folder / "weights" / f"{step}.npz", str(step))
            for group in range(2):
                samples += await rolled_out(engine, step, group)
    write(folder / "samples.jsonl", samples)
    trained = sum(sum(sample["loss_mask"]) for sample in samples)
    summary = {
        "rollouts": 12,
        "failures": 0,
        "leaves": len(samples),
        "forks": 8,
        "trained_tokens": trained,
        "masked_tokens": sum(len(sample["tokens"]) for sample in samples) - trained,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


async def rolled_out(engine: PolicyEngine, step: int, group: int) -> list[dict[str, Any]]:
    samples = []
    for number in range(3):
        name = f"{step}-{group}-{number}"
        rollout = Sampled(engine, name)
        prompt = [100, STRANGER, 101 + group]
        path = await rollout.turn(prompt)
        path = await rollout.turn([*path, 105, 106])
        if number == 1:
            await rollout.turn([*prompt[:2], 104])
        if number == 2:
            await rollout.turn(prompt)
            await rollout.turn([*path, 105])
            await rollout.turn([*path, 106])
            rollout.lose_a_copy()
        for index, leaf in enumerate(rollout.trajectory.leaves()):
            versions = [span for turn in leaf.trained_turns for span in turn.weight_versions]
            samples.append(
                {
                    "step": step,
                    "group": f"{step}-{group}",
                    "rollout": name,
                    "leaf": index,
                    "reward": number / 2,
                    "turns": [turn.id for turn in leaf.turns],
                    "trained_turns": [turn.id for turn in leaf.trained_turns],
                    "tokens": leaf.tokens.tolist(),
                    "loss_mask": leaf.loss_mask.astype(int).tolist(),
                    "logprobs": leaf.logprobs.tolist(),
                    "prompt_length": leaf.prompt_length,
                    "weight_versions": [[span.version, span.count] for span in versions],
                }
            )
    advantages = group_advantages(
        [sample["reward"] for sample in samples],
        [sample["group"] for sample in samples],
        [sample["rollout"] for sample in samples],
        estimator="grpo",
        normalize_std=False,
    )
    return [
        {**sample, "advantage": advantage}
        for sample, advantage in zip(samples, advantages.tolist(), strict=True)
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, values: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def recheck(folder: Path, *options: str) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, SCRIPT, folder, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stderr == ""
    return run.returncode, run.stdout


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    anyio.run(write_run, folder)
    return folder


@pytest.fixture
def run(untouched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "run"))


def test_it_imports_nothing_of_turnleaf() -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"argparse", "collections", "json", "numpy", "pathlib", "typing"}


def test_an_untouched_run_holds(untouched: Path) -> None:
    code, output = recheck(untouched)
    assert output.endswith("everything holds\n")
    assert code == 0
    samples = read(untouched / "samples.jsonl")
    trained = sum(sum(sample["loss_mask"]) for sample in samples)
    ledger = read(untouched / "ledger.jsonl")
    sampled = sum(len(call["output_ids"]) for call in ledger if call["routing_key"] != "eval-0")
    lost = sum(len(call["output_ids"]) for call in ledger if not call["answered"])
    assert lost
    assert f"of {sampled} sampled ids {trained} are trained once, {lost} were lost" in output
    assert f"{len(samples)} leaves of 12 rollouts" in output
    assert len(samples) > 12
    assert "4 groups" in output
    assert "by 2 weights" in output


def unsampled_token_trained(samples: list[dict[str, Any]]) -> str:
    """What the user said between two turns."""
    number, sample = next((i, s) for i, s in enumerate(samples) if len(s["trained_turns"]) > 1)
    mask = sample["loss_mask"]
    position = mask.index(0, sample["prompt_length"])
    mask[position] = 1
    sample["weight_versions"][0][1] += 1
    return (
        f"samples.jsonl line {number + 1}, rollout {sample['rollout']!r}, leaf {sample['leaf']}, "
        f"position {position}: loss_mask is 1, but by the ledger it is 0"
    )


def context_trained_again(samples: list[dict[str, Any]]) -> str:
    """What was sampled in the turn before, and is trained in the leaf before."""
    first = next(s for s in samples if len(s["trained_turns"]) > 2)
    position = first["prompt_length"]
    shared = first["tokens"][: position + 1]
    (fork,) = (
        s
        for s in samples
        if s["rollout"] == first["rollout"]
        and s["prompt_length"] > position
        and s["tokens"][: position + 1] == shared
    )
    fork["loss_mask"][position] = 1
    fork["prompt_length"] = position
    fork["weight_versions"][0][1] += 1
    return f"position {position}: loss_mask is 1, but by the ledger it is 0"


def last_trained_token_masked(samples: list[dict[str, Any]]) -> str:
    position = len(samples[2]["loss_mask"]) - 1
    samples[2]["loss_mask"][position] = 0
    samples[2]["weight_versions"][-1][1] -= 1
    return f"position {position}: loss_mask is 0, but by the ledger it is 1"


def trained_token_changed(samples: list[dict[str, Any]]) -> str:
    tokens, position = samples[1]["tokens"], samples[1]["prompt_length"]
    tokens[position] = 100 if tokens[position] != 100 else 101
    return "samples.jsonl line 2"


def prompt_token_changed(samples: list[dict[str, Any]]) -> str:
    samples[1]["tokens"][0] = 102
    return "samples.jsonl line 2"


def logprob_shifted(samples: list[dict[str, Any]]) -> str:
    position = samples[4]["prompt_length"]
    samples[4]["logprobs"][position] += 1e-3
    return (
        f"samples.jsonl line 5, rollout {samples[4]['rollout']!r}, leaf {samples[4]['leaf']}, "
        f"position {position}: log-probability"
    )


def logprob_where_nothing_was_sampled(samples: list[dict[str, Any]]) -> str:
    samples[4]["logprobs"][1] = -0.5
    return "position 1: a log-probability that nobody sampled"


def only_leaf_missing(samples: list[dict[str, Any]]) -> str:
    lone = next(
        i for i, s in enumerate(samples) if sum(o["rollout"] == s["rollout"] for o in samples) == 1
    )
    return f"of rollout {samples.pop(lone)['rollout']!r}: "


def last_leaf_missing(samples: list[dict[str, Any]]) -> str:
    return f"of rollout {samples.pop()['rollout']!r}"


def first_leaf_missing(samples: list[dict[str, Any]]) -> str:
    first = next(i for i, s in enumerate(samples[1:]) if samples[i + 1]["leaf"] == 1)
    name = samples.pop(first)["rollout"]
    return f"rollout {name!r}, leaf 1: leaf 0 of this rollout is missing or doubled"


def sample_doubled(samples: list[dict[str, Any]]) -> str:
    samples.append(samples[0])
    return "is missing or doubled"


def sample_doubled_as_another_leaf(samples: list[dict[str, Any]]) -> str:
    samples.append({**samples[0], "leaf": 1})
    return f"samples.jsonl line {len(samples)}"


def sample_doubled_as_another_rollout(samples: list[dict[str, Any]]) -> str:
    samples.append({**samples[0], "rollout": "another"})
    return f"samples.jsonl line {len(samples)}, rollout 'another'"


def turn_left_out(samples: list[dict[str, Any]]) -> str:
    """Consistently, as if its turn had been excluded."""
    turn, sample = samples[0]["trained_turns"].pop(), samples[0]
    last = np.flatnonzero(sample["loss_mask"])[-1]
    first = last
    while sample["loss_mask"][first - 1]:
        first -= 1
    for position in range(first, last + 1):
        sample["loss_mask"][position], sample["logprobs"][position] = 0, 0.0
    sample["weight_versions"].pop()
    return f"call {turn}.0.0 of rollout {sample['rollout']!r}: "


def advantage_changed(samples: list[dict[str, Any]]) -> str:
    samples[5]["advantage"] += 1e-3
    return "samples.jsonl line 6"


def a_vote_for_each_leaf(samples: list[dict[str, Any]]) -> str:
    group = [s for s in samples if s["group"] == "0-0"]
    mean = sum(s["reward"] for s in group) / len(group)
    for sample in group:
        sample["advantage"] = sample["reward"] - mean
    return "its group's 3 rewards"


def other_weights_named(samples: list[dict[str, Any]]) -> str:
    samples[0]["weight_versions"][0][0] = "1"
    return "sampled by weights 0, not 1"


@pytest.mark.parametrize(
    "tamper",
    [
        unsampled_token_trained,
        context_trained_again,
        last_trained_token_masked,
        trained_token_changed,
        prompt_token_changed,
        logprob_shifted,
        logprob_where_nothing_was_sampled,
        only_leaf_missing,
        last_leaf_missing,
        first_leaf_missing,
        sample_doubled,
        sample_doubled_as_another_leaf,
        sample_doubled_as_another_rollout,
        turn_left_out,
        advantage_changed,
        a_vote_for_each_leaf,
        other_weights_named,
    ],
)
def test_tampered_samples_are_found(
    run: Path, tamper: Callable[[list[dict[str, Any]]], str]
) -> None:
    samples = read(run / "samples.jsonl")
    place = tamper(samples)
    write(run / "samples.jsonl", samples)
    code, output = recheck(run)
    assert place in output
    assert code == 1


def test_a_logprob_that_sample_and_ledger_agree_on_is_still_recomputed(run: Path) -> None:
    samples, ledger = read(run / "samples.jsonl"), read(run / "ledger.jsonl")
    position = samples[0]["prompt_length"]
    samples[0]["logprobs"][position] += 1e-3
    (call,) = [c for c in ledger if c["turn_id"] == samples[0]["trained_turns"][0]]
    call["logprobs"][0] = samples[0]["logprobs"][position]
    write(run / "samples.jsonl", samples)
    write(run / "ledger.jsonl", ledger)
    code, output = recheck(run)
    assert f"line 1, rollout '0-0-0', leaf 0, position {position}: log-probability" in output
    assert "but weights 0 give" in output
    assert code == 1


def test_swapped_weights_are_found(run: Path) -> None:
    one, other = run / "weights" / "0.npz", run / "weights" / "1.npz"
    one.rename(run / "aside")
    other.rename(one)
    (run / "aside").rename(other)
    code, output = recheck(run)
    assert "log-probability" in output
    assert "but weights 0 give" in output
    assert code == 1


def test_missing_weights_are_named(run: Path) -> None:
    (run / "weights" / "1.npz").unlink()
    code, output = recheck(run)
    assert "there is no weights/1.npz" in output
    assert code == 1


def test_a_summary_that_counts_otherwise_is_found(run: Path) -> None:
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "masked_tokens": summary["masked_tokens"] + 1}))
    code, output = recheck(run)
    assert f"masked_tokens is {summary['masked_tokens'] + 1}, but" in output
    assert code == 1


def test_a_line_cut_short_is_named(run: Path) -> None:
    path = run / "samples.jsonl"
    path.write_text(path.read_text()[:-20])
    code, output = recheck(run)
    assert f"samples.jsonl line {len(path.read_text().splitlines())} is not JSON" in output
    assert code == 1
