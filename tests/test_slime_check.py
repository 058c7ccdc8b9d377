import json
import re
from pathlib import Path

import pytest
import yaml

from tests.agent_process import agent_process, free_port
from tests.gateway_stack import TOKEN, running_gateway
from turnleaf.adapters.slime._check import SHOWN, check_configuration, check_rows
from turnleaf.adapters.slime._samples import Outcome as SlimeOutcome
from turnleaf.cli import main
from turnleaf.cli._run import Outcome, Stage
from turnleaf.cli._setup import Plan
from turnleaf.cli._slime_check import _agent, _answer, _canary, _gateway
from turnleaf.core import (
    AgentError,
    ContractError,
    Key,
    Rollout,
    RolloutTimeout,
    SessionError,
    Settings,
    Trajectory,
    Turn,
)
from turnleaf.gateway import GatewayClient

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "slime.md").read_text()
ROW = {"prompt": "Hi", "metadata": {"payload": {"question": "Hi"}}}
LOCAL = {"backend": "turnleaf.sessions.LocalSession", "target": "agent.py:run"}
CLIENT = """
import httpx
async def ask(config, key):
    async with httpx.AsyncClient(trust_env=False) as client:
        reply = await client.post(
            config["base_url"] + "/chat/completions",
            headers={"authorization": "Bearer " + key},
            json={"model": config["model_id"], "messages": [{"role": "user", "content": "Hi"}]},
        )
    if reply.status_code != 200:
        raise RuntimeError(f"Error code: {reply.status_code} - {reply.text}")
    return reply.json()["choices"][0]["message"]["content"]
"""


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def write_agent(body):
    Path("agent.py").write_text(f"{CLIENT}\nasync def run(payload):\n    {body}\n")


def write_config(**settings):
    local = {"rollout_session_backend": LOCAL, "gateway_host": "127.0.0.1", "gateway_port": 0}
    Path("config.yaml").write_text(yaml.safe_dump(local | settings))


def write_rows(*rows):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [ROW]))


def check(*arguments):
    with pytest.raises(SystemExit) as exited:
        main(["slime", "check", "--config", "config.yaml", "--data", "rows.jsonl", *arguments])
    return exited.value.code or 0


def findings(**settings):
    return check_configuration({"rollout_session_backend": LOCAL} | settings).findings


# The configuration


def test_a_valid_configuration_makes_sessions():
    write_agent("return {}")
    found = check_configuration({"rollout_session_backend": LOCAL, "turnleaf": {}})
    assert [finding.verdict for finding in found.findings] == ["good"]
    assert found.session is not None


@pytest.mark.parametrize(
    ("settings", "text", "remedy"),
    [
        ({"gatway_port": 1}, "unknown setting 'gatway_port'", "is 'gateway_port' meant"),
        ({"tps_limits": 1}, "unknown setting 'tps_limits'", "is 'tps_limit' meant"),
        ({"turnleef": {}}, "unknown setting 'turnleef'", "is 'turnleaf' meant"),
        ({"public_ulr": ""}, "unknown setting 'public_ulr'", "is 'turnleaf.public_url' meant"),
        ({"on_bad_result": "raise"}, "'on_bad_result' stands at the top", "below `turnleaf:`"),
        ({"client_reasoning": "restore"}, "'client_reasoning' stands", "`turnleaf.history:`"),
        ({"url": "http://a"}, "'url' stands at the top", "below `rollout_session_backend:`"),
        ({"turnleaf": {"workres": 2}}, "unknown setting 'turnleaf.workres'", ""),
        ({"tps_limit": "1e-5"}, "tps_limit is '1e-5', but must be a number", ""),
    ],
)
def test_a_wrong_setting_is_found(settings, text, remedy):
    write_agent("return {}")
    [found] = findings(**settings)
    assert found.verdict == "bad"
    assert text in found.text
    assert remedy in found.remedy


def test_a_key_that_is_no_text_is_found():
    write_agent("return {}")
    [found] = check_configuration({"rollout_session_backend": LOCAL, 5: 1}).findings
    assert (found.verdict, "the top-level key 5" in found.text) == ("bad", True)


@pytest.mark.parametrize("name", ["rollout_batch_size", "model_name", "sglang_router_port"])
def test_slimes_own_arguments_are_only_mentioned(name):
    write_agent("return {}")
    assert [finding.verdict for finding in findings(**{name: 1})] == ["good", "warning"]


@pytest.mark.parametrize(
    ("arn", "fault"),
    [
        ("arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/my_agent-a1B2c3D4e5", None),
        ("arn:aws-cn:bedrock-agentcore:cn-north-1:123456789012:runtime/a-a1B2c3D4e5", None),
        ("arn:aws:bedrock-agentcore:<region>:<account-id>:runtime/<name>-<id>", "the example's"),
        ("arn:aws:bedrock-agentcore:us-west-2:123456789012:memory/a-a1B2c3D4e5", "is not the ARN"),
        ("my_agent-a1B2c3D4e5", "is not the ARN"),
        (None, "is not the ARN"),
    ],
)
def test_a_runtime_that_is_none_is_found(arn, fault):
    backend = {"backend": "turnleaf.sessions.HttpSession", "agentcore_runtime_arn": arn}
    found = [finding.text for finding in findings(rollout_session_backend=backend)]
    faults = [text for text in found if "agentcore_runtime_arn " in text]
    assert [fault in text for text in faults] == ([] if fault is None else [True])


def test_the_toolkits_session_class_is_recognised():
    path = "agentcore_rl_toolkit.rollout_session.agentcore_http_session.AgentCoreHttpSession"
    [found] = findings(rollout_session_backend={"backend": path})
    assert "there is no module 'agentcore_rl_toolkit'" in found.text
    assert "docs/from-agentcore-rl-toolkit.md" in found.remedy


# The rows


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "Hi"}', "the payload is None; a row needs metadata.payload"),
        ('{"prompt": "Hi", "metadata": null}', "the payload is None"),
        ('{"metadata": {"payload": []}}', r"the payload is \[\]"),
        ('{"metadata": {"payload": {"_config": {}}}}', "already has `_config`"),
        ('{"metadata": {"payload": {"a": NaN}}}', "not JSON"),
        ('{"metadata": {"payload": {}, "turnleaf": {}}}', "already has `turnleaf`"),
        ('{"metadata": "payload"}', "`metadata` is 'payload'"),
        ('{"payload": {}}', "`payload` stands beside `metadata`"),
        ("[1]", r"is \[1\], not a JSON object"),
        ("{", "is not JSON .* slime leaves such a row out"),
        ("[" * 100_000, "is not JSON"),
        ("\udcff", "is not UTF-8 text"),
    ],
)
def test_a_wrong_row_is_found_by_its_line(line, fault):
    lines = f"{json.dumps(ROW)}\n\n{line}\n".encode(errors="surrogateescape")
    Path("rows.jsonl").write_bytes(lines)
    rows = check_rows(Path("rows.jsonl@[0:7]"))
    assert (rows.total, rows.wrong, rows.first) == (2, 1, {"question": "Hi"})
    total, where = rows.findings()
    assert total.text == "1 of 2 rows is wrong"
    assert re.match(f"line 3: .*{fault}", where.text, re.DOTALL)


def test_of_many_wrong_rows_some_are_described():
    write_rows(*[{}] * (SHOWN + 5))
    found = check_rows(Path("rows.jsonl")).findings()
    assert found[0].text == "15 of 15 rows are wrong"
    assert len(found) == SHOWN + 2
    assert found[-1].text == "… and 5 rows more like these"


def test_rows_without_a_prompt_and_files_without_rows_are_found():
    write_rows({"metadata": {"payload": {}}})
    good, warning = check_rows(Path("rows.jsonl")).findings()
    assert (good.verdict, warning.verdict) == ("good", "warning")
    assert "--input-key" in warning.text
    Path("rows.jsonl").write_text("\n")
    [empty] = check_rows(Path("rows.jsonl")).findings()
    assert (empty.verdict, empty.text) == ("bad", "the file holds no row")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rows.parquet", "slime reads parquet, this check only JSONL"),
        ("rows.json", "slime takes .jsonl and .parquet files only"),
        ("none.jsonl", "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_not_read_is_named(name, reason):
    with pytest.raises(ContractError, match=f"{name}: {reason}"):
        check_rows(Path(name))


# The addresses


@pytest.mark.anyio
async def test_the_agents_address_is_tried():
    closed = f"http://127.0.0.1:{free_port()}"
    async with running_gateway([]) as stack:
        for url, verdict in ((stack.gateway.base_url, "good"), (closed, "bad")):
            backend = {"backend": "turnleaf.sessions.HttpSession", "url": url}
            [found] = await _agent(Settings(rollout_session_backend=backend))
            assert (found.verdict, url in found.text) == (verdict, True)


@pytest.mark.anyio
async def test_the_address_that_agents_are_told_must_lead_to_this_gateway():
    async with running_gateway([]) as stack, running_gateway([]) as other:
        control = str(stack.gateway._http.base_url)
        own, closed = stack.gateway.base_url, f"http://127.0.0.1:{free_port()}/v1"
        for told, public, verdict, text in (
            (own, False, "good", "this gateway answers"),
            (other.gateway.base_url, True, "bad", "another run's gateway answers"),
            (own + "/elsewhere", True, "bad", r"something else answers \(status 404\)"),
            (closed, False, "bad", "does not answer this machine"),
            (closed, True, "warning", "does not answer this machine"),
        ):
            gateway = GatewayClient(control, TOKEN, base_url=told)
            found = await _answer(Stage(gateway, None, "m"), told, public=public)
            await gateway.aclose()
            assert (found.verdict, told in found.text) == (verdict, True)
            assert re.search(text, found.text)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("backend", "warned"),
    [
        ({"url": "http://192.0.2.7:8080"}, True),
        ({"agentcore_runtime_arn": "arn:…"}, True),
        ({"url": "http://127.0.0.1:8080"}, False),
        ({"target": "agent.py:run"}, False),
    ],
)
async def test_a_loopback_address_is_no_use_to_an_agent_elsewhere(backend, warned):
    settings = Settings(rollout_session_backend={"backend": "a.B"} | backend)
    async with running_gateway([]) as stack:
        found = await _gateway(Stage(stack.gateway, None, "m"), settings)
    assert [finding.verdict for finding in found] == ["good", "warning"][: 1 + warned]


# The page


def test_the_page_lists_what_metadata_holds_and_a_valid_configuration():
    rollout = Rollout(name="r", trajectory=Trajectory(), status="failed")
    outcome = SlimeOutcome(
        rollout=rollout, leaves=[], reward=0.0, removed="no turn", session_id="s", requeues=0
    )
    table = re.search(r'\| In `metadata\["turnleaf"\]`.*?\n\n', PAGE, re.DOTALL)[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))
    assert set(listed) == set(outcome.about(None, 0))
    [example] = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)
    [good] = check_configuration(yaml.safe_load(example)).findings
    assert good.verdict == "good"


def test_every_link_of_both_pages_leads_somewhere():
    for page in ("slime.md", "from-agentcore-rl-toolkit.md"):
        for path, anchor in re.findall(r"\]\(([^)#:]*)#?([^)]*)\)", (DOCS / page).read_text()):
            target = DOCS / (path or page)
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in anchors, (page, path, anchor)


# The whole command


def test_a_canary_that_returns_a_reward(capfd):
    write_agent(
        "config = payload['_config']\n"
        "    said = await ask(config, config['api_key'])\n"
        "    return {'reward': 0.5, 'said': said + config['api_key']}"
    )
    write_config()
    write_rows()
    assert check("--canary") == 0
    out, _ = capfd.readouterr()
    assert re.findall(r"^✓ (\w+)", out, re.MULTILINE) == [
        *("config", "rows", "agent", "gateway", "canary")
    ]
    assert "✓ canary  the agent reached the gateway: 1 call of its model, 1 leaf to train\n" in out
    assert re.search(r"it returned \{'reward': 0.5, 'said': .*\[api_key\]", out)
    assert "no model was asked" in out
    assert "Next: start slime with\n  --custom-generate-function-path" in out


def test_a_canary_whose_agent_uses_another_key_is_told_so(capfd, tmp_path):
    Path("served.py").write_text(
        f"import sys\nfrom bedrock_agentcore.runtime import BedrockAgentCoreApp\n{CLIENT}\n"
        "app = BedrockAgentCoreApp()\n"
        "@app.entrypoint\n"
        "async def run(payload):\n"
        "    return {'reward': 1.0, 'said': await ask(payload['_config'], 'EMPTY')}\n"
        "app.run(port=int(sys.argv[1]))\n"
    )
    write_rows({"prompt": "no payload"}, ROW)
    with agent_process(tmp_path / "served.py") as url:
        backend = {"backend": "turnleaf.sessions.HttpSession", "url": url}
        write_config(rollout_session_backend=backend)
        assert check("--canary", "--json") == 1
    told = json.loads(capfd.readouterr().out)
    assert told["ok"] is False
    assert told["rows"] == {"total": 2, "wrong": 1}
    assert [(found["check"], found["verdict"]) for found in told["findings"]] == [
        ("config", "good"),
        ("rows", "bad"),
        ("rows", "bad"),
        ("agent", "good"),
        ("gateway", "good"),
        ("canary", "bad"),
        ("canary", "bad"),
    ]
    assert "with another key than its own" in told["findings"][-2]["text"]
    assert (told["canary"]["model_calls"], told["canary"]["cause"]) == (0, "agent")


def canary(*, turns=(), **rollout):
    made = Rollout(**{"name": "r", "trajectory": Trajectory(turns), "status": "failed"} | rollout)
    plan = Plan(payload={}, settings=None, session=None, engine=None, model=None, replies=())
    key = Key(id="key", base_url="http://10.0.0.1:9090/v1", secret="tl-key")
    return [
        (found.verdict, found.text, found.remedy)
        for found in _canary(plan, Outcome(made, None, key))
    ]


def test_a_canary_without_a_model_call_or_a_reward_is_told_what_is_missing():
    unheard, unrewarded = canary(status="completed", result={"said": "tl-key"})
    assert unheard[0] == "bad"
    assert "told base_url http://10.0.0.1:9090/v1" in unheard[1]
    assert unrewarded[:2] == (
        "warning",
        "it returned {'said': '[api_key]'} after 0.0 s, without a reward",
    )
    assert "--rm-type" in unrewarded[2]


@pytest.mark.parametrize(
    ("error", "verdicts", "remedy"),
    [
        (SessionError("rollout: no agent"), ["bad"], ""),
        (AgentError("rollout: no answer found in it"), ["good", "bad"], "--engine URL"),
        (RolloutTimeout("rollout: cut off"), ["good", "bad"], "raise max_rollout_time"),
    ],
)
def test_a_canary_that_failed_says_why_and_what_to_do(error, verdicts, remedy):
    made = Turn(
        id="0",
        index=0,
        parent=None,
        keep=0,
        prompt=[1],
        output=[2],
        logprobs=[-1.0],
        finish_reason="stop",
    )
    found = canary(error=error, turns=[] if verdicts == ["bad"] else [made])
    assert [verdict for verdict, _, _ in found] == verdicts
    assert found[-1][1] == str(error).removeprefix("rollout: ")
    assert remedy in found[-1][2]


def test_a_gateway_that_does_not_start_is_a_finding(capfd):
    write_agent("return {}")
    write_config()
    write_rows()
    Path("checkpoint").mkdir()
    assert check("--canary", "--engine", "http://127.0.0.1:1", "--model", "checkpoint") == 1
    out, _ = capfd.readouterr()
    assert "✗ gateway tokenizer checkpoint/tokenizer.json cannot be read" in out
    assert "Next: correct what ✗ names" in out


def test_what_depends_on_a_wrong_configuration_is_not_tried(capfd):
    Path("config.yaml").write_text("gateway_port: 0\n")
    write_rows()
    assert check("--canary") == 1
    out, _ = capfd.readouterr()
    assert "✗ config  rollout_session_backend is missing" in out
    assert "! gateway not tried, nor the canary run: the config comes first" in out


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--engine", "http://127.0.0.1:1"], "add --canary"),
        (["--canary", "--engine", "http://127.0.0.1:1"], "--engine needs --model FOLDER"),
    ],
)
def test_wrong_use_is_refused(arguments, remedy, capfd):
    write_config()
    write_rows()
    assert check(*arguments) == 2
    out, err = capfd.readouterr()
    assert (out, remedy in err) == ("", True)
