import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from turnleaf.core import Settings, SettingsError
from turnleaf.core._settings import _path

DOCUMENT = Path(__file__).parents[1] / "docs" / "settings.md"
BACKEND = {"backend": "turnleaf.sessions.HttpSession", "url": "http://agent:8080"}


def parsed(text: str = "", *, ignore_unknown_top_level: bool = False) -> Settings:
    mapping = {"rollout_session_backend": BACKEND, **(yaml.safe_load(text) or {})}
    return Settings.from_mapping(mapping, ignore_unknown_top_level=ignore_unknown_top_level)


def refusal(text: str, *, ignore_unknown_top_level: bool = False) -> str:
    with pytest.raises(SettingsError) as raised:
        parsed(text, ignore_unknown_top_level=ignore_unknown_top_level)
    return str(raised.value)


def test_defaults_are_those_of_the_design() -> None:
    assert parsed() == Settings(
        rollout_session_backend=BACKEND,
        gateway_port=9090,
        gateway_host=None,
        max_rollout_time=900,
        tps_limit=5,
        model_id=None,
        public_url=None,
        client_reasoning="restore",
        thinking_retention="template",
        max_context_tokens=None,
        max_turns=None,
        max_rollout_tokens=None,
        max_requests_in_flight=64,
        on_bad_result="raise",
        on_infrastructure_failure="zero",
        failure_window=600,
        metrics_port=None,
        log_format="json",
        tool_call_parser="auto",
        reasoning_parser="auto",
    )


def test_every_setting_can_be_given() -> None:
    settings = parsed("""
        gateway_port: 0
        gateway_host: 10.0.0.1
        max_rollout_time: 1.5
        tps_limit: 1.0e-5
        model_id: a/b
        turnleaf:
          public_url: https://trainer.example.com:{port}/agents
          history: {client_reasoning: as_sent, thinking_retention: tool_cycle}
          max_context_tokens: 1
          max_turns: 2
          max_rollout_tokens: 3
          max_requests_in_flight: 4
          on_bad_result: fail_rollout
          on_infrastructure_failure: remove
          failure_window: 0.5
          metrics_port: 9100
          log_format: text
          tool_call_parser: qwen25
          reasoning_parser: qwen3
    """)
    assert settings == Settings(
        rollout_session_backend=BACKEND,
        gateway_port=0,
        gateway_host="10.0.0.1",
        max_rollout_time=1.5,
        tps_limit=0.00001,
        model_id="a/b",
        public_url="https://trainer.example.com:{port}/agents",
        client_reasoning="as_sent",
        thinking_retention="tool_cycle",
        max_context_tokens=1,
        max_turns=2,
        max_rollout_tokens=3,
        max_requests_in_flight=4,
        on_bad_result="fail_rollout",
        on_infrastructure_failure="remove",
        failure_window=0.5,
        metrics_port=9100,
        log_format="text",
        tool_call_parser="qwen25",
        reasoning_parser="qwen3",
    )


@pytest.mark.parametrize("text", ["turnleaf:", "turnleaf: {}", "turnleaf: {history: }"])
def test_an_empty_section_changes_nothing(text: str) -> None:
    assert parsed(text) == parsed()


@pytest.mark.parametrize(
    ("text", "name", "value", "expected"),
    [
        ("gateway_port: -1", "gateway_port", "-1", "a whole number from 0 to 65535"),
        ("gateway_port: 65536", "gateway_port", "65536", "a whole number from 0 to 65535"),
        ("gateway_port: yes", "gateway_port", "True", "a whole number from 0 to 65535"),
        ("gateway_port: 9090.0", "gateway_port", "9090.0", "a whole number"),
        ("gateway_port:", "gateway_port", "None", "a whole number"),
        ("gateway_port: '9090'", "gateway_port", "'9090'", "without quotes"),
        ("gateway_port: 0x" + 5000 * "f", "gateway_port", "<int that cannot", "a whole number"),
        ("gateway_host: 10", "gateway_host", "10", "a host name"),
        ("gateway_host: ''", "gateway_host", "''", "a host name"),
        ("gateway_host: http://x", "gateway_host", "'http://x'", "a host name"),
        ("gateway_host: a b", "gateway_host", "'a b'", "a host name"),
        ('gateway_host: "a\\0b"', "gateway_host", r"'a\x00b'", "a host name"),
        ("gateway_host: x:80", "gateway_host", "'x:80'", "a host name"),
        ("gateway_host: a..b", "gateway_host", "'a..b'", "a host name"),
        (f"gateway_host: {'ü' * 60}", "gateway_host", "'üü", "a host name"),
        ("gateway_host: xn--ü", "gateway_host", "'xn--ü'", "a host name"),
        ("max_rollout_time: 0", "max_rollout_time", "0", "a number above 0"),
        ("max_rollout_time: .inf", "max_rollout_time", "inf", "a number above 0"),
        ("max_rollout_time: .nan", "max_rollout_time", "nan", "a number above 0"),
        ("max_rollout_time: 31536000.5", "max_rollout_time", "31536000.5", "at most 31536000"),
        ("max_rollout_time: 1" + 400 * "0", "max_rollout_time", "1000", "at most 31536000"),
        ("max_rollout_time: true", "max_rollout_time", "True", "a number above 0"),
        ("max_rollout_time: 15m", "max_rollout_time", "'15m'", "a number above 0"),
        ("tps_limit: 1e-5", "tps_limit", "'1e-5'", "1.0e-5"),
        ("tps_limit: 0x" + 5000 * "f", "tps_limit", "<int that cannot", "a number above 0"),
        ("tps_limit: 1" + 400 * "0", "tps_limit", "1000", "a number above 0"),
        ("tps_limit: -5", "tps_limit", "-5", "a number above 0"),
        ('model_id: "a\\0b"', "model_id", r"'a\x00b'", "text or null"),
        ("model_id: [a]", "model_id", "['a']", "text or null"),
        ("turnleaf: 5", "turnleaf", "5", "a mapping"),
        ("turnleaf: {history: restore}", "turnleaf.history", "'restore'", "a mapping"),
        (
            "turnleaf: {history: {client_reasoning: drop}}",
            "turnleaf.history.client_reasoning",
            "'drop'",
            "`restore` or `as_sent`",
        ),
        (
            "turnleaf: {history: {thinking_retention: user}}",
            "turnleaf.history.thinking_retention",
            "'user'",
            "`template`, `tool_cycle` or `all`",
        ),
        ("turnleaf: {max_context_tokens: 0}", "turnleaf.max_context_tokens", "0", "from 1 to 21"),
        (
            "turnleaf: {max_context_tokens: 2147483648}",
            "turnleaf.max_context_tokens",
            "2147483648",
            "from 1 to 2147483647",
        ),
        ("turnleaf: {max_context_tokens: 1e4}", "turnleaf.max_context_tokens", "'1e4'", "quotes"),
        (
            "turnleaf: {on_bad_result: zero}",
            "turnleaf.on_bad_result",
            "'zero'",
            "`raise` or `fail_rollout`",
        ),
        (
            "turnleaf: {on_infrastructure_failure: }",
            "turnleaf.on_infrastructure_failure",
            "None",
            "`zero` or `remove`",
        ),
        ("turnleaf: {failure_window: 0}", "turnleaf.failure_window", "0", "a number above 0"),
        ("turnleaf: {failure_window: 6e2}", "turnleaf.failure_window", "'6e2'", "quotes"),
        ("turnleaf: {failure_window: .inf}", "turnleaf.failure_window", "inf", "a number above 0"),
        ("turnleaf: {tool_call_parser: null}", "turnleaf.tool_call_parser", "None", "text"),
        ("turnleaf: {reasoning_parser: 3}", "turnleaf.reasoning_parser", "3", "text"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(
    text: str, name: str, value: str, expected: str
) -> None:
    message = refusal(text)
    assert message.startswith(f"{name} is {value}")
    assert ", but must be " in message
    assert len(message) < 500
    assert expected in message


def test_only_numbers_as_text_are_said_to_be_numbers() -> None:
    assert "YAML" not in refusal("max_rollout_time: 15m")
    assert "YAML" not in refusal("turnleaf: {history: {client_reasoning: '5'}}")


@pytest.mark.parametrize(
    "address",
    [
        "http://host",
        "http://host:{port}",
        "https://{port}.agents.example.com",
        "https://host/gateway/{port}/",
        "http://[::1]:{port}",
    ],
)
def test_an_address_for_agents_is_accepted(address: str) -> None:
    assert parsed(f"turnleaf: {{public_url: '{address}'}}").public_url == address


@pytest.mark.parametrize(
    "address",
    [
        "host:9090",
        "ftp://host",
        "http://",
        "http://:9090",
        "http://host:{prot}",
        "http://host:{port",
        "http://host:0",
        "http://host:99999",
        "http://host:x",
        "http://[::1",
        "http://user:secret@host",
        "http://host?key=1",
        "http://host#part",
        "http://ho st",
        " http://host",
        r"http://host\0",
        "http://host,other",
        "https://host/v1",
        "https://host:{port}/v1/",
        "",
    ],
)
def test_an_address_that_agents_cannot_use_is_refused(address: str) -> None:
    message = refusal(f"turnleaf: {{public_url: '{address}'}}")
    assert message.startswith("turnleaf.public_url is ")
    assert "{port}" in message


def test_an_address_with_a_control_character_is_refused() -> None:
    assert "is 'http://host/" in refusal(r'turnleaf: {public_url: "http://host/\0"}')


def test_an_address_with_the_v1_that_is_added_is_refused_with_the_reason() -> None:
    assert refusal("turnleaf: {public_url: 'https://h/v1'}").endswith("which is added to it")
    assert "/v1" not in refusal("turnleaf: {public_url: 'ftp://h'}")
    assert parsed("turnleaf: {public_url: 'https://h/v1/agents'}").public_url is not None


def test_all_that_is_wrong_is_told_at_once() -> None:
    text = """
        gateway_port: -1
        turnleaf: {history: 5, failure_window: 0, workres: 2, history.client_reasoning: a}
    """
    faults = Settings.faults(yaml.safe_load(text))
    assert [fault.split(" ")[0] for fault in faults] == [
        *("gateway_port", "turnleaf.history", "turnleaf.failure_window", "unknown", "unknown"),
        "rollout_session_backend",
    ]
    with pytest.raises(SettingsError) as raised:
        Settings.from_mapping(yaml.safe_load(text))
    told = str(raised.value)
    assert told.startswith("6 settings are wrong:\n- gateway_port is -1, but ")
    assert [line for line in told.split("\n")[1:] if not line.startswith(("- ", "  "))] == []
    assert Settings.faults({"rollout_session_backend": BACKEND}) == []


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "node-7", "a_b.example.com.", "büro.example"])
def test_a_host_is_accepted(host: str) -> None:
    assert parsed(f"gateway_host: '{host}'").gateway_host == host


def test_the_longest_time_is_a_year() -> None:
    assert parsed("max_rollout_time: 31_536_000").max_rollout_time == 31_536_000


@pytest.mark.parametrize("mapping", [None, [], 5, "a", [16**5000]])
def test_settings_that_are_no_mapping_are_refused(mapping: Any) -> None:
    with pytest.raises(SettingsError, match=r"^the settings are .*, but must be a mapping"):
        Settings.from_mapping(mapping)


@pytest.mark.parametrize("name", [(16**5000,), (1, 2), None])
def test_a_name_of_any_kind_is_refused(name: object) -> None:
    with pytest.raises(SettingsError, match="unknown setting"):
        Settings.from_mapping({"rollout_session_backend": BACKEND, name: 1})  # type: ignore[dict-item]  # what is no name


@pytest.mark.parametrize(
    ("text", "name", "nearest"),
    [
        ("gatway_port: 1", "gatway_port", "gateway_port"),
        ("turnleaf: {public_ulr: x}", "turnleaf.public_ulr", "turnleaf.public_url"),
        ("turnleaf: {gateway_port: 1}", "turnleaf.gateway_port", "gateway_port"),
        ("turnleaf: {tps_limit: 1}", "turnleaf.tps_limit", "tps_limit"),
        ("metrics_port: 1", "metrics_port", "turnleaf.metrics_port"),
        ("turnleaf: {client_reasoning: x}", None, "turnleaf.history.client_reasoning"),
        ("turnleaf: {histroy: {}}", "turnleaf.histroy", "turnleaf.history"),
        ("turnleaf: {1: 2}", "turnleaf.1", None),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    text: str, name: str | None, nearest: str | None
) -> None:
    message = refusal(text)
    assert message.startswith("unknown setting ")
    assert name is None or name in message
    assert nearest is None or message.endswith(f"the nearest valid one is {nearest!r}")


@pytest.mark.parametrize(
    ("text", "name", "nested"),
    [
        ("turnleaf.public_url: a", "turnleaf.public_url", "turnleaf:\n  public_url: …"),
        ("turnleaf.public_ulr: a", "turnleaf.public_ulr", "turnleaf:\n  public_url: …"),
        (
            "turnleaf: {history.client_reasoning: restore}",
            "turnleaf.history.client_reasoning",
            "turnleaf:\n  history:\n    client_reasoning: …",
        ),
    ],
)
@pytest.mark.parametrize("ignored", [False, True])
def test_names_joined_by_dots_are_to_be_nested(
    text: str, name: str, nested: str, ignored: bool
) -> None:
    message = refusal(text, ignore_unknown_top_level=ignored)
    assert message.startswith(f"unknown setting '{name}': ")
    assert message.endswith(f"\n{nested}")


@pytest.mark.parametrize("backend", [{"backend": "LocalSession", "target": "x"}, "LocalSesion"])
def test_a_session_without_its_module_is_recognised(backend: object) -> None:
    with pytest.raises(SettingsError, match=r"did you mean turnleaf\.sessions\.LocalSession\?$"):
        Settings.from_mapping({"rollout_session_backend": backend})


def test_top_level_names_of_a_trainer_are_not_ours_to_judge() -> None:
    text = "hf_checkpoint: a\ntps_limit: 7\nrollout.batch_size: 3"
    assert parsed(text, ignore_unknown_top_level=True) == parsed("tps_limit: 7")
    message = refusal("a: 1\nturnleaf: {a: 1}", ignore_unknown_top_level=True)
    assert message.startswith("unknown setting 'turnleaf.a'")


def test_the_session_backend_is_required() -> None:
    with pytest.raises(SettingsError, match=r"^rollout_session_backend is missing; .*backend: "):
        Settings.from_mapping({})


@pytest.mark.parametrize(
    "backend",
    [
        None,
        "turnleaf.sessions.HttpSession",
        {},
        {"backend": None},
        {"backend": "HttpSession"},
        {"backend": "turnleaf.sessions:HttpSession"},
        {"backend": "turnleaf..HttpSession"},
        {"backend": "turnleaf.sessions.HttpSession", 1: 2},
    ],
)
def test_a_session_backend_names_a_class(backend: object) -> None:
    with pytest.raises(SettingsError, match=r"^rollout_session_backend is .* import path"):
        Settings.from_mapping({"rollout_session_backend": backend})


def documented() -> dict[str, tuple[str, str]]:
    settings = DOCUMENT.read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| .+ \|$", settings, re.MULTILINE)
    return {name: (kind, default) for name, kind, default in rows}


def shown(field: "attrs.Attribute[Any]") -> str:
    if field.default is attrs.NOTHING:
        return "required"
    return f"`{'null' if field.default is None else field.default}`"


def test_the_table_of_settings_is_the_code() -> None:
    assert documented() == {
        _path(field): (field.validator.expects, shown(field))  # type: ignore[union-attr]
        for field in attrs.fields(Settings)
    }


def test_the_example_in_the_documentation_is_valid() -> None:
    (example,) = re.findall(r"```yaml\n(.+?)```", DOCUMENT.read_text(), re.DOTALL)
    mapping: Mapping[str, Any] = yaml.safe_load(example)
    assert Settings.from_mapping(mapping).public_url == "https://trainer.example.com:{port}"
