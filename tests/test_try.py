"""`turnleaf try` as it really runs: with a gateway, an engine and an agent."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import anyio
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from tests.gateway_here import prepared_here
from tests.small_checkpoint import END, small_checkpoint, small_tokenizer
from turnleaf.adapters.mock import Ledger, ScriptedEngine, compare, serve_engine
from turnleaf.cli import main
from turnleaf.core import Trajectory
from turnleaf.gateway._child import child_process

ROOT = Path(__file__).parents[1]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a": 17, "operation": "*", "b": 23}}\n'
COMMAND = [sys.executable, "-P", "-c", "from turnleaf.cli import main; main()", "try"]
BACKEND = (
    "rollout_session_backend: {backend: turnleaf.sessions.LocalSession, target: 'agent.py:run'}\n"
)


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr("sys.path", list(sys.path))


@pytest.fixture
def gateway_here(monkeypatch):
    """Without processes."""
    monkeypatch.setattr("turnleaf.cli._run.prepared", prepared_here)


@pytest.fixture(scope="module")
def engine():
    """Options for an engine that is there, and for a checkpoint that loads in an instant."""
    scripted = ScriptedEngine({}, tokenizer=small_tokenizer(), stop_token_id=END)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve_engine(scripted)) as url,
    ):
        yield "--engine", url, "--model", str(small_checkpoint("chatml"))


def exit_code(*arguments):
    with pytest.raises(SystemExit) as exited:
        main(["try", *arguments])
    return exited.value.code or 0


@pytest.fixture
def agent(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text("async def run(payload):\n    raise RuntimeError('no luck')\n")
    return "agent.py:run"


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
    model = small_checkpoint("chatml")
    ledger = tmp_path / "ledger.jsonl"
    script = {
        "script": {
            "rollout": [{"text": f"Let me see é.\n{CALL}</tool_call>"}, {"text": "It is 391."}]
        },
        "tokenizer": str(model / "tokenizer.json"),
        "stop_token_id": END,
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

    trajectory = Trajectory.from_json(told["trajectory"])
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


@pytest.fixture
def readme():
    text = (ROOT / "README.md").read_text()
    source = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(source.splitlines()) == 12
    Path("agent.py").write_text(source)
    return text


QUESTION = ("agent.py:run", "--payload", '{"question": "What is 17 * 23?", "answer": "391"}')


@pytest.mark.openai_client
def test_a_call_without_a_reply_is_refused_once_and_named(readme, gateway_here, capfd):
    assert exit_code(*QUESTION, "--reply", "It is 381.") == 1
    assert "\nThe agent made 2 calls, but there is 1 --reply.\n" in capfd.readouterr().out


@pytest.mark.openai_client
def test_the_readmes_agent_gives_the_readmes_output(readme, capfd):
    pasted = re.search(r"```text\n(.*?)```", readme, re.DOTALL)[1]

    assert exit_code(*QUESTION, "--reply", "It is 381.", "--reply", "No, it is 391.") == 0
    seconds = re.compile(r"\d+\.\d s$", re.MULTILINE)
    assert seconds.sub("", capfd.readouterr().out).strip() == seconds.sub("", pasted).strip()


def test_an_agent_that_raises_is_shown_at_its_own_line(agent, gateway_here, capfd):
    assert exit_code(agent) == 1
    out, err = capfd.readouterr()
    assert re.search(r"failed · no reward · 0 turns", out)
    assert re.search(r"RuntimeError at \S+agent.py:2: no luck", out)
    assert re.search(r"  \S+agent.py:2 in run: raise RuntimeError\('no luck'\)\n", out)
    assert "Next: correct what the error names" in out
    assert "no luck" not in err


def test_ctrl_c_ends_the_children(tmp_path):
    Path("agent.py").write_text(
        "import pathlib, threading, anyio\n"
        "async def run(payload):\n"
        "    task = f'/proc/self/task/{threading.get_native_id()}'\n"
        "    children = pathlib.Path(task, 'children').read_text()\n"
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


SLEEPING = "print('started', flush=True); time.sleep(100)"
STUCK = {
    "a plain function": f"def run(payload):\n    {SLEEPING}\n",
    "asyncio's threads": (
        "async def run(payload):\n"
        "    print('started', flush=True); await asyncio.to_thread(time.sleep, 100)\n"
    ),
    "anyio's threads": (
        "async def run(payload):\n"
        "    print('started', flush=True); await anyio.to_thread.run_sync(time.sleep, 100)\n"
    ),
    "the event loop": f"async def run(payload):\n    {SLEEPING}\n",
}
CUT_OFF = [where for where in STUCK if where != "the event loop"]
INTERRUPTED = ["a plain function", "the event loop"]


@pytest.fixture(scope="module")
def stuck(tmp_path_factory, engine):
    """By what cuts them off and where they are stuck; all at once, for most of it is waiting."""
    with ExitStack() as ended:

        def start(where, *options):
            folder = tmp_path_factory.mktemp("stuck")
            (folder / "agent.py").write_text(
                f"import asyncio, time, anyio.to_thread\n{STUCK[where]}"
            )
            process = subprocess.Popen(
                [*COMMAND, "agent.py:run", *engine, *options],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ended.enter_context(process)
            ended.callback(process.kill)
            return process

        yield {
            **{("time", where): start(where, "--max-rollout-time", "0.5") for where in CUT_OFF},
            **{("ctrl-c", where): start(where) for where in INTERRUPTED},
        }


@pytest.mark.parametrize("where", CUT_OFF)
def test_an_agent_that_cannot_be_stopped_holds_nothing_up(where, stuck):
    process = stuck["time", where]
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rollout: cut off after 0.5 s" in out
    assert "Next: give the agent longer" in out
    assert "started" in err
    assert "the agent still runs in this process, which now ends" in err


@pytest.mark.parametrize("where", INTERRUPTED)
def test_ctrl_c_does_not_wait_for_an_agent_that_cannot_be_stopped(where, stuck):
    process = stuck["ctrl-c", where]
    assert any(line == "started\n" for line in process.stderr)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "the agent still runs in this process, which now ends" in err
    assert "Traceback" not in err


def test_an_output_that_is_cut_or_cannot_be_encoded_fails_nobody(engine):
    Path("agent.py").write_text("async def run(payload):\n    return {'said': '漢'}\n")
    command = [*COMMAND, "agent.py:run", *engine]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, capture_output=True, env=ascii_only, timeout=60)
    assert (run.returncode, b"{'said': '\\u6f22'}" in run.stdout) == (0, True)

    read, write = os.pipe()
    os.close(read)
    unread = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (unread.returncode, b"BrokenPipe" in unread.stderr) == (0, False)


@pytest.mark.parametrize("arguments", [["--version"], ["slime", "check", "--help"], ["try", "a:b"]])
def test_an_output_without_room_is_told_without_a_traceback(arguments, engine):
    Path("a.py").write_text("async def b(payload):\n    return {}\n")
    options = engine if arguments[0] == "try" else ()
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*COMMAND[:-1], *arguments, *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert run.returncode == 2
    assert run.stderr.endswith("stdout cannot be written: No space left on device\n")
    assert "Traceback" not in run.stderr
