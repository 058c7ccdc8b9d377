"""The calculator agent behind HTTP, as it would be deployed: python agent.py PORT"""

import sys
from pathlib import Path

from bedrock_agentcore.runtime import BedrockAgentCoreApp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from calculator.agent import run

app = BedrockAgentCoreApp()
app.entrypoint(run)

if __name__ == "__main__":
    app.run(port=int(sys.argv[1]))
