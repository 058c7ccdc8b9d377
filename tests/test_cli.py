import io
import json
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from rich.console import Console

from tests import strategies
from turnleaf.cli import main
from turnleaf.cli._document import document
from turnleaf.cli._notes import unreachable
from turnleaf.cli._run import Outcome
from turnleaf.cli._setup import Options, Plan, make_plan
from turnleaf.cli._show import EDGE, show
from turnleaf.cli._tokens import spans
from turnleaf.core import (
    AgentError,
    ContractError,
    Key,
    PayloadError,
    Rollout,
    RolloutTimeout,
    RolloutTimings,
    SessionError,
    Settings,
    Trajectory,
    Turn,
)
from turnleaf.gateway._watched import Refusal, Requests
from turnleaf.sessions import HttpSession

NOTHING = Requests(0, Counter())
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


def outcome(*turns, secret="", status="completed", requests=NOTHING, **rollout):
    rollout = {"trajectory": Trajectory(turns)} | rollout
    made = Rollout(name="rollout", status=status, **rollout)
    key = Key(id="key", base_url="http://127.0.0.1:9090/v1", secret=secret) if secret else None
    return Outcome(made, Letters(), key, requests)


def a_plan(*, engine=None, replies=(), payload=None, backend=None, **settings):
    backend = backend or {"backend": "turnleaf.sessions.LocalSession", "target": "agent.py:run"}
    return Plan(
        payload={"prompt": "Hi"} if payload is None else payload,
        settings=Settings(rollout_session_backend=backend, **settings),
        session=None,
        engine=engine,
        model=None,
        replies=replies,
    )


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
    assert "turn 1: 1 prompt + 1 output tokens, stop\n" in text
    assert "turn 2: 2 kept + 1 prompt + 1 output tokens, stop, not trained: undelivered\n" in text


def test_a_rollout_in_which_nothing_is_trained_says_so():
    assert "None: every turn is excluded" in shown(outcome(turn(0, "Q", "A", excluded="aborted")))
    assert "it made no call" in shown(outcome())


def tree(trajectory):
    text = shown(outcome(trajectory=trajectory), width=200)
    return re.search(r"Turns ─+\n(.*?)\n\n", text, re.DOTALL)[1].splitlines()


def test_the_tree_says_in_words_why_a_turn_is_a_branch():
    trajectory = Trajectory(
        [
            turn(0, "<sys<ask<", "reply."),
            turn(1, "<more<", "fine.", parent="turn-0", keep=15),
            turn(2, "", "again.", parent="turn-0", keep=9),
            turn(3, "else<", "new.", parent="turn-0", keep=5),
            turn(4, "!<more<", "edit.", parent="turn-0", keep=14),
            turn(5, "less<", "fork.", parent="turn-1", keep=17),
            turn(6, "", "twice.", parent="turn-1", keep=21),
            turn(7, "alone", "root."),
            turn(8, "kept", "judged", excluded="untrained"),
        ]
    )
    lines = [line.replace(" output tokens, stop", "…") for line in tree(trajectory)]
    assert [re.sub(r"shares its first (\d+) tokens", r"\1", line) for line in lines] == [
        "rollout",
        "├── turn 0: 9 prompt + 6…",
        "│   ├── turn 1: 15 kept + 6 prompt + 5…",
        "│   ├── turn 4: turn 0's reply came back changed (14 with turn 0), 21 prompt + 5…",
        "│   ├── turn 5: goes on from turn 0 in another way (17 with turn 1), 22 prompt + 5…",
        "│   └── turn 6: turn 1's prompt again, 21 prompt + 6…",
        "├── turn 2: turn 0's prompt again, 9 prompt + 6…",
        "├── turn 3: new conversation (5 with turn 0), 10 prompt + 4…",
        "├── turn 7: 5 prompt + 5…",
        "└── turn 8: 4 prompt + 6…, not trained: kept as context",
    ]


@given(strategies.recorded_by_gateway)
def test_every_turn_is_in_the_tree_once(recorded):
    lines = tree(recorded.trajectory) if recorded.trajectory.turns else []
    told = [int(index) for line in lines for index in re.findall(r"[├└]── turn (\d+):", line)]
    assert sorted(told) == [turn.index for turn in recorded.trajectory.turns]


def test_a_branch_is_shown_from_the_start_of_the_message_in_which_it_begins():
    text = shown(
        outcome(
            turn(0, "<sys<ask me<", "reply."),
            turn(1, " you<", "yours.", parent="turn-0", keep=8),
            turn(2, "", "again.", parent="turn-0", keep=12),
            turn(3, "<on<", "going.", parent="turn-0", keep=18),
        )
    )
    assert "turn 0 is sent\n<sys<ask me<\nturn 0 says\nreply.\n" in text
    assert "turn 1 is sent\n(the first 4 tokens are as in turn 0)\n<ask you<\n" in text
    assert "turn 2 is sent\n(the prompt is turn 0's)\nturn 2 says\nagain.\n" in text
    assert "turn 3 is sent\n<on<\nturn 3 says" in text


def test_a_conversation_that_is_the_only_leaf_is_shown_once():
    one = (turn(0, "Hi. ", "Yes."), turn(1, "So?", "No.", parent="turn-0", keep=8))
    assert "Conversation" not in shown(outcome(*one))
    assert "Conversation" in shown(outcome(*one, turn(2, "Alone.", "Yes.")))
    lost = turn(0, "Hi.", "Yes.", excluded="undelivered")
    assert "Conversation" in shown(outcome(lost))
    assert "Conversation" in shown(outcome(lost, turn(1, "So?", "No.", parent="turn-0", keep=5)))


def test_a_leafs_turns_are_those_of_the_tree():
    text = shown(outcome(turn(0, "sys ask", "A"), turn(1, "else", "B", parent="turn-0", keep=4)))
    assert "leaf 2 of 2: 1 of 9 tokens trained, turn 1\n" in text


def test_the_leaves_of_a_rollout_that_failed_are_conditional():
    failed = outcome(turn(0, "Q", "A"), status="failed", error=AgentError("no"))
    condition = "would be trained, if the trainer keeps a rollout that failed"
    assert condition in shown(failed, width=100)
    assert condition not in shown(outcome(turn(0, "Q", "A")), width=100)


def test_too_few_replies_are_named_before_the_error():
    error = AgentError("Error code: 424 - the script has 2 replies, but this is its call 3")
    result = outcome(turn(0, "Q", "A"), status="failed", error=error)
    text = shown(result, plan=a_plan(replies=("A", "B")))
    assert text.splitlines()[1] == "The agent made 3 calls, but there are 2 --reply."
    assert "Next: give one more --reply for each further call" in text
    assert "--reply" not in shown(result, plan=a_plan(engine="http://127.0.0.1:1"))


def test_surplus_replies_are_named():
    result = outcome(turn(0, "Q", "A"))
    assert "Of 3 --reply, 2 went unused" in shown(result, plan=a_plan(replies=("A", "B", "C")))
    assert "unused" not in shown(result, plan=a_plan(replies=("A",)))


CALLING = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("reply", "malformed"),
    [
        ("Fine.", False),
        (CALLING * 2, False),
        (f"{CALLING} <tool_call>[1]</tool_call>", True),
        ("<tool_call>{'name': 'f'}</tool_call>", True),
        (CALLING.removesuffix("</tool_call>"), True),
    ],
)
def test_a_malformed_scripted_tool_call_is_named(reply, malformed):
    text = shown(outcome(turn(0, "Q", "A")), plan=a_plan(replies=(reply,)))
    assert ("--reply 1 holds a malformed tool call" in text) is malformed


@pytest.mark.parametrize(("took", "told"), [(2.1, False), (6.0, True)])
def test_an_agent_that_blocked_the_event_loop_is_named(took, told):
    result = outcome(turn(0, "Q", "A"), timings=RolloutTimings(session=took))
    text = shown(result, plan=a_plan(max_rollout_time=2))
    note = "The agent took 6.0 s although max_rollout_time is 2 s: an async agent must not block"
    assert (note in text) is told


HTTP = {"backend": "turnleaf.sessions.HttpSession", "url": "http://127.0.0.1:1"}


def test_an_agent_that_may_not_reach_the_gateway_is_told_where_it_is():
    note = "told base_url http://127.0.0.1:9090/v1: can that be reached"
    silent = outcome(secret="tl-key")
    assert note in shown(silent, plan=a_plan(backend=HTTP))
    assert note in shown(silent, plan=a_plan(public_url="https://trainer"))
    assert note not in shown(silent)
    assert note not in shown(outcome(turn(0, "Q", "A"), secret="k"), plan=a_plan(backend=HTTP))
    unreached = outcome(secret="tl-key", status="failed", error=SessionError("no agent"))
    assert note not in shown(unreached, plan=a_plan(backend=HTTP))
    unconnected = AgentError("the agent raised APIConnectionError: Connection error.")
    lost = outcome(secret="tl-key", status="failed", error=unconnected)
    assert note in shown(lost, plan=a_plan(backend=HTTP))


def test_an_agent_that_failed_by_itself_is_not_told_of_the_network():
    failed = outcome(secret="tl-key", status="failed", error=AgentError("KeyError: 'question'"))
    text = shown(failed, plan=a_plan(backend=HTTP))
    assert "The agent failed before a model call of it arrived: see its own log." in text
    assert "can that be reached" not in text


def test_what_the_gateway_refused_is_told():
    requests = Requests(3, Counter({Refusal(401, "invalid_api_key", "unknown key"): 3}))
    text = shown(outcome(secret="tl-key", requests=requests), plan=a_plan(backend=HTTP))
    assert "The gateway refused 3 requests with 401: unknown key" in text
    assert "can that be reached" not in text


@pytest.mark.parametrize(
    ("agent", "told", "warned"),
    [
        ("http://192.0.2.7:80", {"gateway_host": "127.0.0.1"}, True),
        ("http://192.0.2.7:80", {"gateway_host": "localhost"}, True),
        ("http://192.0.2.7:80", {"public_url": "http://[::1]:{port}"}, True),
        ("http://192.0.2.7:80", {"public_url": "https://trainer", "gateway_host": "::1"}, False),
        ("http://192.0.2.7:80", {}, False),
        ("http://localhost:80", {"gateway_host": "127.0.0.1"}, False),
    ],
)
def test_an_agent_elsewhere_that_is_told_a_loopback_address_is_warned_of(agent, told, warned):
    settings = a_plan(backend=HTTP | {"url": agent}, **told).settings
    assert (unreachable(settings) is not None) is warned


@pytest.mark.parametrize(
    ("result", "plan", "step"),
    [
        ({"status": "timed_out", "error": RolloutTimeout("cut")}, {}, "--max-rollout-time SECONDS"),
        ({"status": "failed", "error": PayloadError("_config")}, {}, "correct the payload"),
        (
            {"status": "failed", "error": AgentError("KeyError")},
            {"payload": {}},
            "no --payload was",
        ),
        ({"status": "failed", "error": AgentError("KeyError")}, {}, "correct what the error names"),
    ],
)
def test_the_next_step_fits_the_outcome(result, plan, step):
    assert re.search(f"Next: .*{step}", shown(outcome(**result), plan=a_plan(**plan)))


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
        (["AGENT", "--engine", "http://127.0.0.1:1", "--model", "Q/Q3"], "hub is not taken"),
        (["AGENT", "--engine", "127.0.0.1:30000", "--model", "."], "--engine: .*http://host:port"),
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
    assert "pip install '.[demo]'" in capfd.readouterr().err


def test_version(capfd):
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert not exited.value.code
    assert re.fullmatch(r"turnleaf \d+\.\d+\.\d+\S*\n", capfd.readouterr().out)


def test_the_example_configuration_runs_here(monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = make_plan(Options(config=Path("examples/local.yaml"))).settings
    assert settings.gateway_host == "127.0.0.1"
