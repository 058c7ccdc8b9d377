"""`python toolkit_gateway.py`: the public toolkit's gateway, as its slime backend starts it.

Configuration, one line of JSON on stdin: `engine_url`, `model` (the checkpoint's folder) and
`history_mode` ("tree" or "linear"). Its readiness line is `{"base_url": …}`. Every further line on
stdin is a list of session ids to open, answered by a line on stdout. It ends with its stdin.
"""

import json
import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, ThreadedGatewayServer
from agentcore_rl_toolkit.rollout_gateway.gateway import RolloutGateway
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.sglang_http import SglangHttpBackend
from transformers import AutoTokenizer

config = json.loads(sys.stdin.readline())
tokenizer = AutoTokenizer.from_pretrained(config["model"])
gateway = RolloutGateway(
    backend=SglangHttpBackend(config["engine_url"]),
    renderer=HfTemplateRenderer(tokenizer),
    tokenizer=tokenizer,
    history_mode=config["history_mode"],
)
server = ThreadedGatewayServer(gateway, host="127.0.0.1")
server.start()
print(json.dumps({"base_url": server.base_url}), flush=True)
for line in sys.stdin:
    for session_id in json.loads(line):
        gateway.create_session(session_id)
    print("{}", flush=True)
