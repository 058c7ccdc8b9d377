import inspect
import re
from pathlib import Path

import pytest
import yaml

from turnleaf.core import SettingsError
from turnleaf.sessions import AgentCoreHttpSession, session_factory
from turnleaf.sessions._agentcore_settings import ARN_EXAMPLE

BACKEND = "turnleaf.sessions.AgentCoreHttpSession"
DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("arn", "region"),
    [
        (ARN_EXAMPLE, "us-west-2"),
        (
            "arn:aws-us-gov:bedrock-agentcore:us-gov-west-1:000000000000:runtime/a-b",
            "us-gov-west-1",
        ),
        ("arn:aws-cn:bedrock-agentcore:cn-north-1:000000000000:runtime/A_1-b", "cn-north-1"),
    ],
)
def test_the_region_is_the_arns(arn, region):
    session = AgentCoreHttpSession(arn, qualifier="prod")
    assert session._settings.region == region
    assert session._settings.target == {"agentRuntimeArn": arn, "qualifier": "prod"}


def test_each_session_has_an_id_that_agentcore_takes():
    ids = {AgentCoreHttpSession(ARN_EXAMPLE).session_id for _ in range(100)}
    assert len(ids) == 100
    assert all(33 <= len(one) <= 100 and one.replace("-", "").isalnum() for one in ids)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"agentcore_runtime_arn": None}, "agentcore_runtime_arn is None; give the ARN"),
        ({"agentcore_runtime_arn": "my_agent"}, "which looks like arn:aws:bedrock-agentcore:us-"),
        (
            {"agentcore_runtime_arn": ARN_EXAMPLE.replace("agentcore", "agentcore-control")},
            "give the ARN of an AgentCore runtime",
        ),
        ({"agentcore_runtime_arn": ARN_EXAMPLE + "\n"}, "give the ARN"),
        ({"agentcore_runtime_arn": ARN_EXAMPLE + "/runtime-endpoint/DEFAULT"}, "give the ARN"),
        ({"agentcore_runtime_arn": ARN_EXAMPLE.replace("us-west-2", "")}, "give the ARN"),
        ({"qualifier": ""}, "qualifier is ''; give the name of the runtime's endpoint"),
        ({"qualifier": 7}, "qualifier is 7"),
        ({"endpoint_url": "127.0.0.1:8080"}, "endpoint_url is '127.0.0.1:8080'; give the http"),
        ({"endpoint_url": "http://h:99999"}, "endpoint_url"),
        ({"endpoint_url": "http://user:pw@h"}, "endpoint_url must have no user name"),
        ({"envelope": "always"}, "envelope is 'always'; give 'auto' or 'never'"),
        ({"max_sessions": 0}, "max_sessions is 0; give a whole number from 1 to 10000"),
        ({"max_sessions": True}, "max_sessions is True"),
        ({"max_sessions": 2.5}, "max_sessions is 2.5"),
        ({"sessions_per_minute": -1}, "sessions_per_minute is -1; give a number above 0"),
        ({"polls_per_second": "5"}, "polls_per_second is '5'"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": 1e9}, "timeout is 1000000000.0; give a number of seconds up to 1000000"),
        ({"connect_timeout": 0}, "connect_timeout is 0"),
        ({"connect_timeout": 10**7}, "connect_timeout is 10000000; give a number of seconds"),
        ({"sessions_per_minute": 10**400}, "sessions_per_minute is 1000000"),
        ({"retry_time": None}, "retry_time is None"),
        ({"max_response_bytes": 1e6}, "max_response_bytes is 1000000.0; give a whole number"),
        ({"qualifer": "x"}, "has no argument 'qualifer'; did you mean 'qualifier'"),
    ],
)
def test_a_wrong_argument_is_named(arguments, said):
    with pytest.raises(SettingsError) as raised:
        session_factory({"backend": BACKEND, "agentcore_runtime_arn": ARN_EXAMPLE, **arguments})
    assert said in str(raised.value)
    assert "pw" not in str(raised.value)


def test_the_arn_is_needed():
    with pytest.raises(SettingsError, match="needs 'agentcore_runtime_arn'"):
        session_factory({"backend": BACKEND})


def test_the_table_of_arguments_is_the_code():
    section = (DOCS / "settings.md").read_text().partition("\n## AgentCoreHttpSession\n")[2]
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \| .+ \|$", section, re.MULTILINE)
    documented = {
        name: inspect.Parameter.empty if default == "required" else yaml.safe_load(default[1:-1])
        for name, default in rows
    }
    parameters = inspect.signature(AgentCoreHttpSession).parameters.values()
    assert documented == {one.name: one.default for one in parameters}


def test_the_configuration_of_the_page_is_valid():
    (example,) = re.findall(r"```yaml\n(.+?)```", (DOCS / "agentcore.md").read_text(), re.DOTALL)
    backend = yaml.safe_load(example)["rollout_session_backend"]
    assert isinstance(session_factory(backend)(), AgentCoreHttpSession)
