import io
import json
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import given
from rich.console import Console

from tests import strategies
from turnleaf.adapters.mock import Ledger, cached_checkpoint, compare
from turnleaf.cli import main
from turnleaf.cli._document import document
from turnleaf.cli._run import Outcome
from turnleaf.cli._setup import Options, Plan, make_plan
from turnleaf.cli._show import EDGE, show
from turnleaf.cli._tokens import spans
from turnleaf.core import AgentError, ContractError, PayloadError, Rollout, Trajectory, Turn
from turnleaf.gateway._child import child_process
from turnleaf.sessions import HttpSession

ROOT = Path(__file__).parents[1]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a": 17, "operation": "*", "b": 23}}\n'
COMMAND = [sys.executable, "-P", "-c", "from turnleaf.cli import main; main()", "try"]


class Letters:
    """Decodes ids as the code points that they are."""

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr("sys.path", list(sys.path))


def ids(text):
    return [ord(letter) for letter in text]


def turn(index, prompt, output, *, parent=None, keep=0, excluded=None):
    return Turn(
        id=f"turn-{index}",
        index=index,
        parent=parent,
        keep=keep,
        prompt=ids(prompt),
        output=ids(output),
        logprobs=[-0.5] * len(output),
        finish_reason="stop",
        excluded=excluded,
    )


def outcome(*turns, secret="", status="completed", **rollout):
    made = Rollout(name="try", trajectory=Trajectory(turns), status=status, **rollout)
    return Outcome(made, Letters(), secret)


def a_plan(*, engine=None, replies=()):
    return Plan(payload={}, settings=None, session=None, engine=engine, model=None, replies=replies)


def shown(result, *, plan=None, coloured=False, **console):
    file = io.StringIO()
    options = {"width": 60, "force_terminal": coloured, "_environ": {"TERM": "xterm-256color"}}
    show(Console(file=file, highlight=False, **(options | console)), plan or a_plan(), result)
    return file.getvalue()


def exit_code(*arguments):
    with pytest.raises(SystemExit) as exited:
        main(["try", *arguments])
    return exited.value.code or 0


# What is shown


def test_trained_text_is_in_brackets_without_colour():
    text = shown(
        outcome(turn(0, "Hi. ", "One\nline."), turn(1, " So? ", "Yes.", parent="turn-0", keep=13))
    )
    assert "\nHi. ⟦One↵\nline.⟧ So? ⟦Yes.⟧\n" in text
    assert "2 turns · 1 leaf · 13 trained and 9 masked tokens" in text
    assert "\x1b" not in text


def test_trained_text_is_coloured_and_masked_text_dimmed_on_a_terminal():
    text = shown(outcome(turn(0, "Hi. ", "Yes.")), coloured=True)
    assert "\x1b[2mHi. \x1b[0m\x1b[30;42mYes.\x1b[0m\n" in text
    assert "⟦" not in text


def test_no_color_keeps_the_mask_visible():
    assert "Hi. ⟦Yes.⟧" in re.sub(
        r"\x1b\[\d*m", "", shown(outcome(turn(0, "Hi. ", "Yes.")), coloured=True, no_color=True)
    )


def test_a_long_masked_text_is_shortened_and_a_trained_one_never():
    long = "".join(chr(0x4E00 + number) for number in range(3 * EDGE + 7))
    text = shown(outcome(turn(0, long, long)))
    assert f"{long[:EDGE]} ⋯ {EDGE + 7:,} masked characters ⋯ {long[-EDGE:]}⟦{long}⟧" in text


def test_the_model_cannot_steer_the_terminal():
    text = shown(outcome(turn(0, "\x1b[2J\r", "\x07\x9b\x7f\t.")), coloured=True)
    assert "\x1b[2J" not in text
    assert "␛[2J␍" in text
    assert "␇\ufffd␡" in text


def test_a_shared_turn_is_trained_in_one_leaf_and_context_in_the_other():
    text = shown(
        outcome(
            turn(0, "Q", "A"),
            turn(1, "R", "B", parent="turn-0", keep=2),
            turn(2, "S", "C", parent="turn-0", keep=2),
        )
    )
    assert "leaf 1 of 2: 2 of 4 tokens trained, turns 0 → 1\nQ⟦A⟧R⟦B⟧\n" in text
    assert "leaf 2 of 2: 1 of 4 tokens trained, turns 0 → 2\nQAS⟦C⟧\n" in text


def test_the_tree_says_what_each_turn_kept_and_why_it_is_not_trained():
    text = shown(
        outcome(
            turn(1, "Q", "A"),
            turn(0, "new", "B", parent="turn-1", keep=1),
            turn(2, "S", "C", parent="turn-1", keep=2, excluded="undelivered"),
        ),
        width=120,
    )
    assert "turn 1: 0 kept + 1 prompt + 1 output tokens, stop\n" in text
    assert (
        "    ├── turn 0: 1 kept + 3 prompt + 1 output tokens, stop, branches off 1 tokens before "
        "its parent's end\n" in text
    )
    assert "    └── turn 2: 2 kept" in text
    assert "stop, not trained: undelivered\n" in text


def test_a_rollout_in_which_nothing_is_trained_says_so():
    assert "None: every turn is excluded" in shown(outcome(turn(0, "Q", "A", excluded="aborted")))
    assert "it made no call" in shown(outcome())


def test_a_script_that_ran_out_is_named():
    error = AgentError("the agent raised InternalServerError")
    result = outcome(turn(0, "Q", "A"), status="failed", error=error)
    assert "needs more --reply" in shown(result, plan=a_plan(replies=("A",)))
    assert "--reply" not in shown(result, plan=a_plan(engine="http://127.0.0.1:1"))


def test_only_scripted_replies_are_called_so():
    assert "scripted" in shown(outcome(turn(0, "Q", "A")))
    assert "scripted" not in shown(
        outcome(turn(0, "Q", "A")), plan=a_plan(engine="http://127.0.0.1:1")
    )


def test_the_key_is_never_shown():
    secret = "tl-key"
    error = AgentError("bad tl-key")
    result = outcome(
        turn(0, "My tl-key. ", "tl-key!"),
        secret=secret,
        status="failed",
        error=error,
        result={"echo": "tl-key"},
    )
    for text in (shown(result), document(a_plan(), result)):
        assert secret not in text
    assert "⟦[api_key]!⟧" in shown(result)


@given(strategies.recorded_by_gateway)
def test_spans_are_the_leaf_cut_where_the_mask_changes(recorded):
    for leaf in recorded.trajectory.leaves():
        cut = spans(leaf, Letters())
        assert "".join(span.text for span in cut) == Letters().decode(leaf.tokens.tolist())
        masks = [np.full(span.tokens, span.trained) for span in cut]
        assert np.array_equal(np.concatenate(masks), leaf.loss_mask)
        assert all(one.trained != other.trained for one, other in pairwise(cut))


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        ("completed", None, 0),
        ("truncated", None, 0),
        ("failed", AgentError("no"), 1),
        ("timed_out", None, 1),
        ("failed", PayloadError("no"), 2),
    ],
)
def test_exit_codes(status, error, code):
    assert outcome(status=status, error=error).exit_code == code


def test_a_result_that_is_no_json_is_told_as_text():
    result = json.loads(document(a_plan(), outcome(result={"loss": float("nan")})))
    assert result["result"] == "{'loss': nan}"


# What is refused


@pytest.fixture
def agent(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text("async def run(payload):\n    raise RuntimeError('no luck')\n")
    return "agent.py:run"


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "give agent.py:run, package.module:run, --url URL, or a --config"),
        (
            ["AGENT", "--url", "http://127.0.0.1:1"],
            "exactly one agent is run, but AGENT agent.py",
        ),
        (["elsewhere.py:run"], "there is no file .*elsewhere.py; correct the path"),
        (["agent.py"], "such as path/to/agent.py:run"),
        (["agent.py:walk"], "has no 'walk'.* It has run"),
        (["no_such_package.agent:run"], "Correct the name, install its package"),
        (["--url", "agent:8080"], "give an address such as http"),
        (["AGENT", "--payload", "{"], "--payload is not JSON .* or @FILE"),
        (["AGENT", "--payload", "[1]"], r"is \[1\], but an agent is given a JSON object"),
        (["AGENT", "--payload", "@row.json"], "@row.json: cannot be read: No such file"),
        (["AGENT", "--engine", "http://127.0.0.1:1"], "--engine needs --model FOLDER"),
        (["AGENT", "--model", "."], "add --engine URL"),
        (["AGENT", "--engine", "http://127.0.0.1:1", "--model", "m"], "there is no such folder"),
        (["AGENT", "--engine", "http://127.0.0.1:1", "--reply", "x"], "leave one out"),
        (["AGENT", "--max-rollout-time", "0"], "max_rollout_time is 0.0, but must be"),
        (["--config", "missing.yaml"], "missing.yaml: cannot be read: No such file"),
    ],
)
def test_wrong_use_is_refused_with_the_remedy(arguments, remedy, agent, capfd):
    assert exit_code(*(agent if argument == "AGENT" else argument for argument in arguments)) == 2
    out, err = capfd.readouterr()
    assert re.search(remedy, err)
    assert "Traceback" not in err
    assert out == ""


BACKEND = (
    "rollout_session_backend: {backend: turnleaf.sessions.LocalSession, target: 'agent.py:run'}\n"
)


@pytest.mark.parametrize(
    ("config", "agents", "remedy"),
    [
        (BACKEND + "gateway_prot: 0\n", [], "'gateway_prot'; the nearest .* 'gateway_port'"),
        (BACKEND, ["agent.py:run"], "AGENT agent.py:run and the rollout_session_backend of c.yaml"),
        ("a: 1\nb: [1,\n", [], "c.yaml, line 3: not YAML"),
        ("a: \x00\n", [], "c.yaml: not YAML"),
        ("just text\n", [], "holds no mapping of settings"),
        (BACKEND.replace("LocalSession", "LokalSession"), [], "did you mean 'LocalSession'"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_remedy(config, agents, remedy, agent, capfd):
    Path("c.yaml").write_text(config)
    assert exit_code("--config", "c.yaml", *agents) == 2
    assert re.search(remedy, capfd.readouterr().err)


def test_without_a_configuration_the_gateway_is_local_and_on_any_port(agent):
    settings = make_plan(Options(agent=agent)).settings
    assert (settings.gateway_host, settings.gateway_port) == ("127.0.0.1", 0)
    assert settings.max_rollout_time == 900


def test_options_complete_a_configuration(agent):
    Path("c.yaml").write_text("gateway_port: 9190\nmax_rollout_time: 5\n")
    Path("row.json").write_text('{"prompt": "é"}', encoding="utf-8")
    plan = make_plan(
        Options(agent=agent, payload="@row.json", config=Path("c.yaml"), max_rollout_time=7)
    )
    assert plan.payload == {"prompt": "é"}
    assert (plan.settings.gateway_port, plan.settings.max_rollout_time) == (9190, 7)


def test_an_address_is_an_agent_behind_http():
    assert isinstance(make_plan(Options(url="http://127.0.0.1:8080")).session(), HttpSession)


def test_a_module_is_found_in_the_working_directory(tmp_path):
    package = tmp_path / "my_own_package"
    package.mkdir()
    (package / "agent.py").write_text("def run(payload):\n    return {}\n")
    make_plan(Options(agent="my_own_package.agent:run"))
    with pytest.raises(ContractError, match="no_such_agent"):
        make_plan(Options(agent="my_own_package.no_such_agent:run"))


def test_a_missing_extra_is_named(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "turnleaf.cli._app", raising=False)
    assert exit_code() == 2
    assert "pip install 'turnleaf[demo]'" in capfd.readouterr().err


def test_version(capfd):
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert not exited.value.code
    assert re.fullmatch(r"turnleaf \d+\.\d+\.\d+\S*\n", capfd.readouterr().out)


# Real rollouts


@pytest.mark.openai_client
@pytest.mark.anyio
async def test_json_for_machines_and_the_engines_ledger_agree(tmp_path):
    """An agent that writes to stdout, tools, a configuration, and an engine that we can ask."""
    (tmp_path / "agent.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT / 'examples' / 'calculator')!r})\n"
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('calculator', sys.path[0] + '/agent.py')\n"
        "calculator = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(calculator)\n"
        "async def run(payload):\n"
        "    print('noise'); os.system('echo more noise')\n"
        "    return await calculator.run(payload) | payload\n"
    )
    (tmp_path / "c.yaml").write_text(
        BACKEND + "gateway_port: 0\ngateway_host: 127.0.0.1\nmodel_id: m-1\n"
    )
    model = cached_checkpoint("qwen3")
    ledger = tmp_path / "ledger.jsonl"
    script = {
        "script": {"try": [{"text": f"Let me see é.\n{CALL}</tool_call>"}, {"text": "It is 391."}]},
        "tokenizer": str(model / "tokenizer.json"),
        "stop_token_id": 151645,
        "ledger": str(ledger),
    }
    async with child_process("turnleaf.adapters.mock.scripted", script) as engine:
        run = await anyio.run_process(
            [
                *(*COMMAND, "--config", "c.yaml", "--json", "--model", str(model)),
                *("--engine", engine.ready["url"]),
                *("--payload", '{"prompt": "What is 17 * 23?", "answer": 391}'),
            ],
            check=False,
        )
    assert run.returncode == 0, run.stderr.decode()
    told = json.loads(run.stdout)
    assert b"noise\nmore noise" in run.stderr
    assert (told["status"], told["reward"], told["scripted"]) == ("completed", 1.0, False)
    assert told["result"]["answer"] == 391
    assert told["result"]["_config"] | {"base_url": ""} == {
        "base_url": "",
        "model_id": "m-1",
        "api_key": "[api_key]",
    }

    trajectory = Trajectory.from_json(json.dumps(told["trajectory"]))
    report = compare(Ledger.read(ledger), [trajectory])
    report.raise_for_problems()
    assert report.sampled == report.trained > 0
    [leaf] = trajectory.leaves()
    [shown_leaf] = told["leaves"]
    assert shown_leaf["tokens"] == leaf.tokens.tolist()
    assert shown_leaf["loss_mask"] == leaf.loss_mask.astype(int).tolist()
    assert np.array_equal(np.float32(shown_leaf["logprobs"]), leaf.logprobs)
    assert [span["trained"] for span in shown_leaf["spans"]] == [False, True, False, True]
    assert [span["text"] for span in shown_leaf["spans"] if span["trained"]] == [
        f"Let me see é.\n{CALL}</tool_call><|im_end|>",
        "It is 391.<|im_end|>",
    ]


@pytest.mark.openai_client
def test_the_readmes_agent_gives_the_readmes_output(capfd):
    readme = (ROOT / "README.md").read_text()
    source = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    assert len(source.splitlines()) == 12
    Path("agent.py").write_text(source)
    pasted = re.search(r"```text\n(.*?)```", readme, re.DOTALL)[1]

    assert (
        exit_code(
            *("agent.py:run", "--payload", '{"question": "What is 17 * 23?", "answer": "391"}'),
            *("--reply", "It is 381.", "--reply", "No, it is 391."),
        )
        == 0
    )
    seconds = re.compile(r"\d+\.\d s$", re.MULTILINE)
    assert seconds.sub("", capfd.readouterr().out).strip() == seconds.sub("", pasted).strip()


def test_an_agent_that_raises_is_shown_at_its_own_line(agent, capfd):
    assert exit_code(agent) == 1
    out, err = capfd.readouterr()
    assert re.search(r"failed · no reward · 0 turns", out)
    assert re.search(r"RuntimeError at \S+agent.py:2: no luck", out)
    assert re.search(r"  \S+agent.py:2 in run: raise RuntimeError\('no luck'\)\n", out)
    assert "Next: correct what the error names" in out
    assert "no luck" not in err


def test_ctrl_c_ends_the_children(tmp_path):
    Path("agent.py").write_text(
        "import pathlib, subprocess, os, anyio\n"
        "async def run(payload):\n"
        "    children = pathlib.Path(f'/proc/self/task/{os.getpid()}/children').read_text()\n"
        "    print('children:', children, flush=True)\n"
        "    await anyio.sleep(100)\n"
    )
    with subprocess.Popen(
        [*COMMAND, "agent.py:run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        children = next(line for line in process.stderr if line.startswith("children:")).split()[1:]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    assert len(children) == 2
    assert not any(Path(f"/proc/{child}").exists() for child in children)
