"""Many rollouts on AgentCore at once; TURNLEAF_LONG=1 runs a thousand, in minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.agent_process import agent_process
from turnleaf.adapters.mock import (
    AgentCoreSettings,
    FileTokenizer,
    ScriptedEngine,
    cached_checkpoint,
    serve_agentcore,
    serve_engine,
)

pytestmark = pytest.mark.anyio

LONG = int(os.environ.get("TURNLEAF_LONG", "0"))
COUNT = 1000 if LONG else 20
MOST_MEMORY = 300e6
HERE = Path(__file__)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("envelope", ["auto", "never"] if LONG else ["auto"])
async def test_rollouts_that_all_run_at_once(tmp_path, envelope):
    checkpoint = cached_checkpoint("qwen3")
    tokenizer = FileTokenizer(checkpoint / "tokenizer.json")
    engine = ScriptedEngine(
        {"*": [{"text": "First."}, {"text": "Second."}]},
        tokenizer=tokenizer,
        stop_token_id=tokenizer.encode("<|im_end|>")[0],
    )
    with agent_process(HERE.with_name("agent_app.py"), str(tmp_path)) as agent:
        settings = AgentCoreSettings(
            agent_url=agent,
            invocations_per_second=None,
            stops_per_second=None,
            new_sessions_per_minute=None,
            active_sessions=None,
        )
        async with serve_engine(engine) as engine_url, serve_agentcore(settings) as emulator:
            said = {
                "backend": {
                    "backend": "turnleaf.sessions.AgentCoreHttpSession",
                    "agentcore_runtime_arn": emulator.arn,
                    "endpoint_url": emulator.endpoint_url,
                    "envelope": envelope,
                    "max_sessions": COUNT,
                    "sessions_per_minute": 60_000,
                },
                "engine_url": engine_url,
                "checkpoint": str(checkpoint),
                "count": COUNT,
                "limit": 300,
                "payload": {
                    "do": "converse",
                    "prompt": "What next?",
                    "meeting": envelope,
                    "others": COUNT,
                },
            }
            report, log = await hook(said)
            assert emulator.log.not_stopped() == []
            assert emulator.log.executed_twice() == {}
            assert len(emulator.log.sessions) == COUNT
            assert max_at_once(emulator.log.sessions) == COUNT
    assert report["errors"] == []
    assert report["statuses"] == {"completed": COUNT}
    assert report["turns"] == {"2": COUNT}
    assert report["rewards"] == {"1.0": COUNT}
    assert report["peak"] < MOST_MEMORY
    assert not {"transformers", "tokenizers", "turnleaf.gateway.rendering"} & set(report["modules"])
    assert "pool is full" not in log
    assert log.count("WARNING") == 0, log


async def hook(said):
    """What the process says that runs them, and what it logs."""
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}

    def run():
        return subprocess.run(
            [sys.executable, str(HERE.with_name("agentcore_load.py"))],
            input=json.dumps(said) + "\n",
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )

    ended = await anyio.to_thread.run_sync(run)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


def max_at_once(sessions):
    changes = sorted([(one.started, 1) for one in sessions] + [(one.ended, -1) for one in sessions])
    at_once = most = 0
    for _, change in changes:
        at_once += change
        most = max(most, at_once)
    return most
