"""The calculator agent as it would be deployed on AgentCore Runtime: python agent.py PORT"""

import sys
from pathlib import Path

from turnleaf.agent import AgentCoreRuntimeApp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from calculator.agent import run

app = AgentCoreRuntimeApp()
app.entrypoint(run)

if __name__ == "__main__":
    app.run(port=int(sys.argv[1]))
