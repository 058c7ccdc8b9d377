import datetime as dt
import json
import os
import re
import socket
from collections import Counter
from pathlib import Path

import attrs
import pytest
import yaml

from tests.agent_process import agent_process, free_port
from tests.gateway_here import prepared_here
from tests.gateway_stack import TOKEN, running_gateway
from turnleaf.adapters.slime._check import check_configuration
from turnleaf.adapters.slime._check_rows import SHOWN, check_rows
from turnleaf.adapters.slime._samples import Outcome as SlimeOutcome
from turnleaf.cli import main
from turnleaf.cli._app import check_for_slime
from turnleaf.cli._document import json_result
from turnleaf.cli._notes import is_this_machine, unreachable
from turnleaf.cli._run import Outcome, Stage
from turnleaf.cli._setup import MAX_CONFIG, Plan
from turnleaf.cli._slime_canary import canary_findings
from turnleaf.cli._slime_check import _agent, _answer, _gateway
from turnleaf.cli._slime_report import flags
from turnleaf.core import (
    AgentError,
    BadResultError,
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
from turnleaf.gateway._watched import Refusal, Requests

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "slime.md").read_text()
REFERENCE = (DOCS / "slime-reference.md").read_text()
ROW = {"prompt": "Hi", "metadata": {"payload": {"question": "Hi"}}}
LOCAL = {"backend": "turnleaf.sessions.LocalSession", "target": "agent.py:run"}
CLIENT = """
import httpx
async def ask(config, key):
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
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


@pytest.fixture
def gateway_here(monkeypatch):
    """Without processes."""
    monkeypatch.setattr("turnleaf.cli._slime_check.prepared", prepared_here)


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
        ({"TPS_LIMIT": 1}, "unknown setting 'TPS_LIMIT'", "is 'tps_limit' meant"),
        ({"tps-limit": 1}, "unknown setting 'tps-limit'", "is 'tps_limit' meant"),
        ({"acr_timeout": 900}, "'acr_timeout' is of agentcore-rl-toolkit", "max_rollout_time"),
        (
            {"agent_runtime_arn": "arn:"},
            "'agent_runtime_arn' is of",
            "write agentcore_runtime_arn below",
        ),
        ({"s3_bucket": "b"}, "'s3_bucket' is of agentcore-rl-toolkit", "leave it out"),
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


def test_all_that_is_wrong_is_found_at_once():
    write_agent("return {}")
    wrong = {"gateway_port": -1, "tps_limit": "fast", "turnleaf": {"failure_window": 0, "a": 1}}
    found = findings(**wrong)
    assert [finding.text.split(" ")[0] for finding in found] == [
        *("gateway_port", "tps_limit", "turnleaf.failure_window", "unknown")
    ]


@pytest.mark.parametrize("text", ["1e-6", "5", "-.5", "1E5"])
def test_a_number_that_is_text_is_warned_of_where_slime_would_take_it(text):
    write_agent("return {}")
    good, warning = findings(lr=text)
    assert (good.verdict, warning.verdict) == ("good", "warning")
    assert f"'lr' is the text {text!r}" in warning.text
    assert "1.0e-6" in warning.remedy
    assert "none of turnleaf's" in findings(model_name=f"{text}B")[1].text


def test_a_key_that_is_no_text_is_found():
    write_agent("return {}")
    [found] = check_configuration({"rollout_session_backend": LOCAL, 5: 1}).findings
    assert (found.verdict, "the top-level key 5" in found.text) == ("bad", True)


@pytest.mark.parametrize("name", ["rollout_batch_size", "model_name", "sglang_router_port"])
def test_slimes_own_arguments_are_only_mentioned(name):
    write_agent("return {}")
    assert [finding.verdict for finding in findings(**{name: 1})] == ["good", "warning"]


@pytest.mark.parametrize(
    ("arn", "is_one"),
    [
        ("arn:aws-cn:bedrock-agentcore:cn-north-1:123456789012:runtime/a-a1B2c3D4e5", True),
        ("arn:aws:bedrock-agentcore:<region>:<account-id>:runtime/<name>-<id>", False),
        (None, False),
    ],
)
def test_a_runtime_that_is_none_is_found(arn, is_one):
    path = "turnleaf.sessions.AgentCoreHttpSession"
    [found] = findings(rollout_session_backend={"backend": path, "agentcore_runtime_arn": arn})
    assert found.verdict == ("good" if is_one else "bad")
    assert ("give the ARN of an AgentCore runtime" in found.text) is not is_one


def test_the_toolkits_session_class_is_recognised():
    path = "agentcore_rl_toolkit.rollout_session.agentcore_http_session.AgentCoreHttpSession"
    [found] = findings(rollout_session_backend={"backend": path})
    assert "there is no module 'agentcore_rl_toolkit'" in found.text
    assert "turnleaf.sessions.AgentCoreHttpSession" in found.remedy
    assert "docs/from-agentcore-rl-toolkit.md" in found.remedy


def nested(wrap, depth):
    value = wrap(())
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(16**6000, id="more digits than Python prints"),
        pytest.param(nested(lambda inner: [inner], 960), id="deep lists"),
        pytest.param(nested(lambda inner: {"a": inner}, 960), id="deep mappings"),
        pytest.param("9" * 10_000, id="long"),
        *("\ud800", "http://é..x", "http://[::1", float("nan"), 10**400, {1: 2}, {"a.b": 1}, b"a"),
        *(dt.date(2020, 1, 1), "..:a", "os.path", {"backend": 5}),
    ],
)
def test_no_value_breaks_the_check(value):
    write_agent("return {}")
    http = {"backend": "turnleaf.sessions.HttpSession", "url": "http://127.0.0.1:1"}
    names = [
        (field.metadata.get("section", "") + field.name).split(".")
        for field in attrs.fields(Settings)
    ]
    for path in [*names, ["turnleaf"], ["lr"], ["acr_timeout"]]:
        setting = value
        for name in reversed(path):
            setting = {name: setting}
        assert_finds({"rollout_session_backend": LOCAL} | setting)
    for name in ("backend", "target", "agentcore_runtime_arn"):
        assert_finds({"rollout_session_backend": LOCAL | {name: value}})
    for name in ("url", "timeout", "connect_timeout", "max_response_bytes"):
        assert_finds({"rollout_session_backend": http | {name: value}})
    if not isinstance(value, list | dict):
        assert_finds({"rollout_session_backend": LOCAL, value: 1})
        assert_finds({"rollout_session_backend": LOCAL, "turnleaf": {value: 1}})
        assert_finds({"rollout_session_backend": LOCAL | {value: 1}})


def assert_finds(mapping):
    found = check_configuration(mapping).findings
    assert found
    assert all(len(finding.text) < 2100 for finding in found)


# The rows


@pytest.mark.parametrize("start", ['{"a":', "["])
def test_no_depth_of_a_row_breaks_the_check(start):
    end = {"{": "}", "[": "]"}[start[0]]
    for depth in range(800, 1000, 5):
        deep = start * depth + "1" + end * depth
        lines = (deep, f'{{"metadata": {deep}}}', f'{{"metadata": {{"payload": {deep}}}}}')
        Path("rows.jsonl").write_text("\n".join(lines))
        rows = check_rows(Path("rows.jsonl"))
        assert (rows.total, rows.wrong) == (3, 3)
        assert all(len(finding.text) < 300 for finding in rows.findings())


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "Hi"}', "the payload is None; a row needs metadata.payload"),
        ('{"prompt": "Hi", "metadata": null}', "the payload is None"),
        (
            '{"metadata": {"question": "q", "answer": "a"}}',
            r"`metadata` has no `payload` \(it has question, answer\)",
        ),
        ('{"metadata": {"payload": []}}', r"the payload is \[\]"),
        ('{"metadata": {"payload": {"_config": {}}}}', "already has `_config`"),
        ('{"metadata": {"payload": {"a": NaN}}}', "not JSON"),
        ('{"metadata": {"payload": {}, "turnleaf": {}}}', "already has `turnleaf`"),
        ('{"metadata": "payload"}', "`metadata` is 'payload'"),
        ('{"payload": {}}', "`payload` stands beside `metadata`"),
        ("[1]", r"is \[1\], not a JSON object"),
        ("{", r"is not JSON \(Expecting .*, column 2\); slime prints an error and goes on"),
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


def test_equal_faults_are_told_once_with_their_lines():
    wrong = {"prompt": "Hi"}
    write_rows(*[wrong] * 200, ROW, wrong, ROW, {"payload": {}})
    total, missing, beside = check_rows(Path("rows.jsonl")).findings()
    assert total.text == "202 of 204 rows are wrong"
    assert missing.text.startswith("lines 1–200, 202: the payload is None")
    assert beside.text.startswith("line 204: `payload` stands beside")


def test_of_many_faults_and_many_lines_some_are_described():
    write_rows(*({"metadata": {f"field {n}": 1}} for n in range(SHOWN + 5)))
    found = check_rows(Path("rows.jsonl")).findings()
    assert found[0].text == "15 of 15 rows are wrong"
    assert len(found) == SHOWN + 2
    assert found[-1].text == "… and 5 rows with other faults"
    write_rows(*[{}, ROW] * 8)
    _, scattered = check_rows(Path("rows.jsonl")).findings()
    assert scattered.text.startswith("lines 1, 3, 5, 7, 9 and 3 more: ")


@pytest.mark.parametrize(
    ("cut", "wrong"),
    [("[:]", "lines 3, 7"), ("[1:]", "lines 3, 7"), ("[:2]", "line 3"), ("[2:4]", "line 7")],
)
def test_a_slice_counts_the_rows_that_slime_reads(cut, wrong):
    """Those that are not JSON do not count."""
    told = [json.dumps({"metadata": {"payload": {"n": n}}}) for n in (0, 2, 4, 5)]
    lines = [told[0], "{", told[1], "{", told[2], told[3]]
    Path("rows.jsonl").write_text("\n\n".join(lines))
    rows = check_rows(Path(f"rows.jsonl@{cut}"))
    start, stop = (int(part) if part else None for part in cut[1:-1].split(":"))
    assert rows.total - rows.wrong == len(told[start:stop])
    assert rows.first == json.loads(told[start or 0])["metadata"]["payload"]
    assert [str(lines) for lines in rows.faults.values()] == [wrong]


def test_a_slice_behind_the_end_holds_no_row():
    write_rows()
    [empty] = check_rows(Path("rows.jsonl@[9:]")).findings()
    assert empty.verdict == "bad"


@pytest.mark.parametrize("cut", ["[-5:]", "[:-1]", "[-:3]"])
def test_a_slice_that_slime_does_not_take_is_refused(cut):
    write_rows()
    with pytest.raises(ContractError, match=r"no negative numbers .* rows\.jsonl@\[0:100\]"):
        check_rows(Path(f"rows.jsonl@{cut}"))


def test_rows_without_a_prompt_and_files_without_rows_are_found():
    write_rows({"metadata": {"payload": {}}})
    good, warning = check_rows(Path("rows.jsonl")).findings()
    assert (good.verdict, warning.verdict) == ("good", "warning")
    assert warning.text.startswith("line 1: no `prompt`, as slime's --input-key")
    Path("rows.jsonl").write_text("\n")
    [empty] = check_rows(Path("rows.jsonl")).findings()
    assert (empty.verdict, empty.text) == ("bad", "the file holds no row, or its slice none")


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


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
def test_lines_end_where_slime_ends_them(end):
    wrong = '{"prompt": "Hi", "metadata": {"payload": "\u2028\x85"}}'
    Path("rows.jsonl").write_bytes(end.join([json.dumps(ROW), wrong]).encode())
    rows = check_rows(Path("rows.jsonl"))
    assert (rows.total, rows.wrong) == (2, 1)
    assert rows.findings()[1].text.startswith("line 2: the payload is")


def test_rows_whose_reward_model_is_no_text_are_found():
    payload = ROW["metadata"]
    write_rows(*(ROW | {"metadata": payload | {"rm_type": t}} for t in ("math", None, 5, ["math"])))
    good, warning = check_rows(Path("rows.jsonl")).findings()
    assert (good.verdict, warning.verdict) == ("good", "warning")
    assert warning.text.startswith("lines 3–4: `rm_type` of `metadata` is no text")


def test_a_line_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr("turnleaf.adapters.slime._check_rows.MAX_LINE", 100)
    Path("rows.jsonl").write_text(f"{json.dumps(ROW)}\n{'0' * 101}\n")
    with pytest.raises(ContractError, match=r"rows\.jsonl, line 2: has more than 100 characters"):
        check_rows(Path("rows.jsonl"))


# What is no file


def place(name, kind):
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "device":
        Path(name).symlink_to("/dev/zero")
    elif kind == "folder":
        Path(name).mkdir()
    elif kind == "loop":
        Path(name).symlink_to(name)


@pytest.mark.parametrize("name", ["config.yaml", "rows.jsonl"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pipe", "is a pipe or a device; write what it gives to a file"),
        ("device", "is a pipe or a device; write what it gives to a file"),
        ("folder", "cannot be read: Is a directory"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("nothing", "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_file_is_not_waited_for(name, kind, reason, capfd):
    write_config()
    write_rows()
    Path(name).unlink()
    place(name, kind)
    assert check() == 2
    out, err = capfd.readouterr()
    assert (out, f"{name}: {reason}" in err) == ("", True)


@pytest.mark.parametrize(
    "name", ["\0.jsonl", "~nobody-of-that-name/rows.jsonl", "a" * 300 + ".jsonl"]
)
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(ContractError, match="cannot be read: "):
        check_rows(Path(name))


def test_what_is_too_large_for_a_configuration_is_not_parsed(capfd):
    write_rows()
    Path("config.yaml").write_text(f"a: {'0' * MAX_CONFIG}")
    assert check() == 2
    assert "--config config.yaml: has more than 1,048,576 bytes; is that" in capfd.readouterr().err


@pytest.mark.parametrize(
    "value",
    [
        *("2020-13-45", "2020-01-01T00:00:00+99:99", "9" * 5000, "!!int ''", "!!int a"),
        *("!!bool a", "!!timestamp a", "!!float a"),
    ],
)
def test_a_value_that_yaml_cannot_convert_is_told_with_its_line(value, capfd):
    write_rows()
    Path("config.yaml").write_text(f"gateway_port: 0\na: {value}\n")
    assert check() == 2
    _, err = capfd.readouterr()
    assert "--config config.yaml, line 2: not YAML: '" in err
    assert "if it is text, put it in quotes" in err
    assert len(err) < 300


def test_a_configuration_that_nests_too_deeply_is_refused(capfd):
    write_rows()
    Path("config.yaml").write_text("a: " + "[" * 3000 + "]" * 3000)
    assert check() == 2
    assert "--config config.yaml: nests too deeply to be read" in capfd.readouterr().err


def test_a_configuration_with_a_control_character_is_refused_in_one_line(capfd):
    write_rows()
    Path("config.yaml").write_text("a: \0\n")
    assert check() == 2
    assert re.fullmatch(r"[^\n]*not YAML: unacceptable character[^\n]*\n", capfd.readouterr().err)


# The addresses


@pytest.mark.anyio
async def test_the_agents_address_is_tried():
    closed = f"http://127.0.0.1:{free_port()}"
    async with running_gateway([]) as stack:
        for url, verdict in ((stack.gateway.base_url, "good"), (closed, "bad")):
            backend = {"backend": "turnleaf.sessions.HttpSession", "url": url}
            [found] = await _agent(Settings(rollout_session_backend=backend))
            assert (found.verdict, url in found.text) == (verdict, True)
    assert f"{closed} (connection refused)" in found.text


@pytest.mark.anyio
async def test_a_name_that_is_not_known_has_a_remedy_of_its_own(monkeypatch):
    async def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("anyio.connect_tcp", unknown)
    backend = {"backend": "turnleaf.sessions.HttpSession", "url": "http://agent.internal"}
    [found] = await _agent(Settings(rollout_session_backend=backend))
    assert found.text == "the name agent.internal of http://agent.internal is not known here"
    assert "name resolution" in found.remedy


@pytest.mark.anyio
async def test_an_address_that_can_be_none_is_no_address():
    for url, told in (
        ("http://é..x:80", "the name é..x of http://é..x:80 is not known here"),
        ("http://[::1", None),
        ("http://host:99999", None),
        (5, None),
    ):
        settings = Settings(rollout_session_backend={"backend": "a.B", "url": url})
        assert [found.text for found in await _agent(settings)] == [told][: told is not None]
        assert unreachable(attrs.evolve(settings, gateway_host="10.0.0.1")) is None
    assert not is_this_machine("é..x")


@pytest.mark.anyio
async def test_a_port_that_was_taken_is_named():
    async with running_gateway([]) as stack:
        port = int(stack.gateway.base_url.split(":")[2].removesuffix("/v1"))
        for wanted, note in ((port - 1, f" ({port - 1} is taken)"), (port, ""), (0, "")):
            settings = Settings(rollout_session_backend=LOCAL, gateway_port=wanted)
            [found] = await _gateway(Stage(stack.gateway, None, "m"), settings)
            assert found.text == (
                f"agents are told {stack.gateway.base_url}{note}, and this gateway answers"
            )


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


@pytest.mark.parametrize("page", [DOCS / "slime.md", DOCS.parent / "README.md"])
def test_the_pages_show_the_arguments_that_the_command_prints(page):
    block = "\n".join(flags("config.yaml", "rows.jsonl"))
    assert f"```text\n{block}\n```" in page.read_text()


def test_the_page_and_the_help_say_the_same_of_exit_codes():
    told = re.search(r"Exit codes: .+", " ".join((check_for_slime.__doc__ or "").split()))
    assert told is not None
    assert told[0] in " ".join(PAGE.split())


def test_the_page_lists_what_metadata_holds_and_a_valid_configuration():
    rollout = Rollout(name="r", trajectory=Trajectory(), status="failed")
    outcome = SlimeOutcome(
        rollout=rollout, leaves=[], reward=0.0, removed="no turn", session_id="s", requeues=0
    )
    table = re.search(r'\| In `metadata\["turnleaf"\]`.*?\n\n', REFERENCE, re.DOTALL)[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))
    assert set(listed) == set(outcome.about(None, 0))
    [example] = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)
    [good] = check_configuration(yaml.safe_load(example)).findings
    assert good.verdict == "good"


def test_every_link_of_the_pages_leads_somewhere():
    for page in ("slime.md", "slime-reference.md", "from-agentcore-rl-toolkit.md"):
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
    assert "✓ canary  on line 1 the agent reached the gateway: 1 call of its model, 1 leaf " in out
    assert re.search(r"it returned \{'reward': 0.5, 'said': .*\[api_key\]", out)
    assert "no model was asked" in out
    lines = "".join(f"  {line}\n" for line in flags("config.yaml", "rows.jsonl"))
    assert f"Next: give slime these arguments, too\n{lines}None of slime's own" in out


def test_a_canary_whose_agent_uses_another_key_is_told_so(gateway_here, capfd, tmp_path):
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
    key, failed = told["findings"][-2:]
    assert key["text"].startswith("on line 2 the gateway refused 1 request with 401: ")
    assert "payload['_config']['api_key']" in key["remedy"]
    assert "answered with status 500" in failed["text"]
    canary = told["canary"]
    assert (canary["line"], canary["model_calls"], canary["cause"]) == (2, 0, "agent")
    [refused] = canary["refused"]
    assert (canary["requests"], refused["status"], refused["count"]) == (1, 401, 1)


def test_the_agent_of_the_page_runs(gateway_here, capfd, tmp_path):
    [agent] = re.findall(r"```py\n(.+?)```", PAGE, re.DOTALL)
    Path("served.py").write_text(agent)
    write_rows({"prompt": "Hi", "metadata": {"payload": {"question": "Hi", "answer": "script"}}})
    with agent_process(tmp_path / "served.py") as url:
        backend = {"backend": "turnleaf.sessions.HttpSession", "url": url}
        write_config(rollout_session_backend=backend)
        assert check("--canary", "--json") == 0
    canary = json.loads(capfd.readouterr().out)["canary"]
    assert (canary["model_calls"], canary["reward"], canary["requests"]) == (1, 1.0, 1)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("nest(100_000)", "{'reward': 1.0, 'x': {'a': {'a': {'a': {"),
        ("Exits()", "<dict that cannot be printed>"),
        ("10 ** 5000", "<dict that cannot be printed>"),
        ("float('nan')", "{'reward': 1.0, 'x': nan}"),
    ],
)
def test_a_result_that_is_not_json_is_told_as_far_as_it_prints(result, told, gateway_here, capfd):
    write_agent(f"return {{'reward': 1.0, 'x': {result}}}")
    with Path("agent.py").open("a") as agent:
        agent.write(
            "class Exits:\n"
            "    def __repr__(self):\n"
            "        raise SystemExit\n"
            "def nest(depth, inner=()):\n"
            "    for _ in range(depth):\n"
            "        inner = {'a': inner}\n"
            "    return inner\n"
        )
    write_config()
    write_rows()
    assert check("--canary", "--json") == 1  # no call of the model
    document = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert document["canary"]["result"].startswith(told)
    assert document["findings"][-1]["text"].startswith(f"it returned {told}")


def test_a_canary_that_ends_the_event_loop_is_a_finding(capfd):
    write_agent("[task.cancel() for task in asyncio.all_tasks() - {asyncio.current_task()}]")
    Path("agent.py").write_text(f"import asyncio\n{Path('agent.py').read_text()}")
    write_config()
    write_rows()
    assert check("--canary", "--json") == 1
    document = json.loads(capfd.readouterr().out)
    assert [found["check"] for found in document["findings"]] == ["config", "rows", "canary"]
    assert "event loop was ended from within" in document["findings"][-1]["text"]


def test_a_deep_result_is_json_or_text_but_never_too_deep_to_be_written():
    texts, result = 0, []
    for _ in range(1000):
        result = [result]
        rollout = Rollout(name="r", trajectory=Trajectory(), status="completed", result=result)
        told = json_result(Outcome(rollout, None, None, NOTHING))
        json.dumps({"canary": {"result": told}})
        texts += isinstance(told, str)
    assert 0 < texts < 1000


def test_a_deep_result_keeps_no_piece_of_the_key():
    rollout = Rollout(name="r", trajectory=Trajectory(), status="completed")
    deep = []
    for _ in range(10_000):
        deep = [deep]
    key = Key(id="key", base_url="http://10.0.0.1:9090/v1", secret="tl-" + "k" * 300)
    rollout = attrs.evolve(rollout, result={"key": key.secret, "x": deep})
    printed = Outcome(rollout, None, key, NOTHING).printed_result
    assert printed.startswith("{'key': '[api_key]', 'x': [[[")


NOTHING = Requests(0, Counter())


def refused(code, status=400):
    return Requests(2, Counter({Refusal(status, code, "why"): 2}))


def canary(*, turns=(), requests=NOTHING, **rollout):
    made = Rollout(**{"name": "r", "trajectory": Trajectory(turns), "status": "failed"} | rollout)
    plan = Plan(payload={}, settings=None, session=None, engine=None, model=None, replies=())
    key = Key(id="key", base_url="http://10.0.0.1:9090/v1", secret="tl-key")
    return [
        (found.verdict, found.text, found.remedy)
        for found in canary_findings(plan, Outcome(made, None, key, requests), line=7)
    ]


@pytest.mark.parametrize(
    ("error", "text", "remedy"),
    [
        (
            AgentError("rollout: the agent raised KeyError: 'question'"),
            "on line 7, before its first model call, the agent raised KeyError: 'question'",
            "does the row's payload have the fields",
        ),
        (
            AgentError("rollout: the agent raised APIConnectionError: Connection error."),
            "on line 7, before a call of its model came to the gateway, the agent raised API",
            "whether http://10.0.0.1:9090/v1 can be reached",
        ),
        (
            AgentError("rollout: the agent raised AuthenticationError: Error code: 401 - {}"),
            "on line 7, before a call of its model came to the gateway, the agent raised Auth",
            "another server than this gateway answered it: have its client use http://10.0.0.1",
        ),
        (
            RolloutTimeout("rollout: cut off after 5 s"),
            "on line 7 the agent was cut off after 5 s, before a call of its model came to",
            "if that was its model, see whether http://10.0.0.1:9090/v1 can be reached",
        ),
        (SessionError("rollout: no agent"), "no agent", ""),
    ],
)
def test_a_canary_that_failed_before_anything_arrived_says_why(error, text, remedy):
    [(verdict, told, advice)] = canary(error=error)
    assert verdict == "bad"
    assert told.startswith(text)
    assert remedy in advice
    assert ("10.0.0.1" in advice) == ("10.0.0.1" in remedy)


@pytest.mark.parametrize(
    ("requests", "remedy"),
    [
        (refused("invalid_api_key", 401), "payload['_config']['api_key']"),
        (refused("not_found", 404), "base_url as it is, which ends in /v1"),
        (refused("unsupported_parameter"), "docs/gateway.md says what a request may hold"),
        (refused(None, 503), "whether the engine answers"),
    ],
)
def test_what_the_gateway_refused_is_told(requests, remedy):
    error = AgentError("rollout: the agent raised APIStatusError: Connection error")
    (verdict, told, advice), failed = canary(error=error, requests=requests)
    status = next(iter(requests.refused)).status
    assert (verdict, told) == (
        "bad",
        f"on line 7 the gateway refused 2 requests with {status}: why",
    )
    assert remedy in advice
    assert failed == ("bad", str(error).removeprefix("rollout: "), "")


def test_a_canary_without_a_model_call_or_a_reward_is_told_what_is_missing():
    unheard, unrewarded = canary(status="completed", result={"said": "tl-key"})
    assert unheard[:2] == (
        "bad",
        "on line 7 the agent made no call of its model that reached the gateway",
    )
    assert "whether http://10.0.0.1:9090/v1 can be reached" in unheard[2]
    assert unrewarded[:2] == (
        "warning",
        "it returned {'said': '[api_key]'} after 0.0 s, without a reward",
    )
    assert "--rm-type" in unrewarded[2]
    unanswered, _ = canary(status="completed", result={}, requests=Requests(1, Counter()))
    assert "but no call of its model was answered" in unanswered[1]


def test_a_result_that_breaks_the_contract_is_told_beside_the_missing_call():
    unheard, broken = canary(error=BadResultError("rollout: the agent's result is not JSON: a"))
    assert "made no call of its model" in unheard[1]
    assert broken[:2] == ("bad", "the agent's result is not JSON: a")


def test_a_long_result_is_cut():
    _, (_, told, _) = canary(status="completed", result={"said": "a" * 300}, reward=1.0)
    assert re.search("a{100,190} … after 0.0 s$", told)


TURN = Turn(
    id="0",
    index=0,
    parent=None,
    keep=0,
    prompt=[1],
    output=[2],
    logprobs=[-1.0],
    finish_reason="stop",
)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (AgentError("rollout: no answer found in it"), "--engine URL"),
        (RolloutTimeout("rollout: cut off"), "raise max_rollout_time"),
    ],
)
def test_a_canary_that_failed_after_a_call_says_why_and_what_to_do(error, remedy):
    called, failed = canary(error=error, turns=[TURN], requests=Requests(1, Counter()))
    assert called[:2] == (
        "good",
        "on line 7 the agent reached the gateway: 1 call of its model, 1 leaf to train",
    )
    assert failed[:2] == ("bad", str(error).removeprefix("rollout: "))
    assert remedy in failed[2]


def test_a_refusal_beside_a_call_is_a_warning():
    requests = refused("unsupported_parameter")
    _, warning, good = canary(
        status="completed", result={"reward": 1}, reward=1.0, turns=[TURN], requests=requests
    )
    assert warning[:2] == ("warning", "the gateway refused 2 requests with 400: why")
    assert good[0] == "good"
    assert good[1].endswith("; a reward for a scripted reply says nothing")


def test_a_gateway_that_does_not_start_is_a_finding(capfd):
    write_agent("return {}")
    write_config()
    write_rows()
    Path("checkpoint").mkdir()
    assert check("--canary", "--engine", "http://127.0.0.1:1", "--model", "checkpoint") == 1
    out, _ = capfd.readouterr()
    assert "✗ gateway tokenizer checkpoint/tokenizer.json cannot be read" in out
    assert "Next: correct what ✗ names" in out


def test_an_agent_that_is_away_is_reported_once(gateway_here, capfd):
    write_rows()
    url = f"http://127.0.0.1:{free_port()}"
    write_config(rollout_session_backend={"backend": "turnleaf.sessions.HttpSession", "url": url})
    assert check("--canary", "--json") == 1
    told = json.loads(capfd.readouterr().out)
    assert [found["check"] for found in told["findings"] if found["verdict"] == "bad"] == ["agent"]
    assert told["findings"][-1]["text"] == "not run: the agent comes first"
    assert told["canary"] is None


def test_a_setting_that_stands_twice_is_refused(capfd):
    write_rows()
    Path("config.yaml").write_text("a: &a\n  b: [*a]\ngateway_port: 1\ngateway_port: 2\n")
    assert check() == 2
    _, err = capfd.readouterr()
    assert "--config config.yaml, line 4: 'gateway_port' stands twice, first in line 3" in err


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
