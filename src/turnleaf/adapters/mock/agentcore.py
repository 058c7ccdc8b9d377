"""`python -m turnleaf.adapters.mock.agentcore`: an emulated AgentCore Runtime as a child process.

Configuration, one line of JSON on stdin: what `AgentCoreSettings` takes, and optionally `host` and
`port`. Its readiness line is `{"url": …}`. The log is at `/_emulator/log`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs

from turnleaf.adapters.mock._agentcore import serve_agentcore
from turnleaf.adapters.mock._agentcore_settings import AgentCoreSettings
from turnleaf.adapters.mock._engine_program import run_engine_program


@attrs.frozen
class _Config:
    settings: AgentCoreSettings
    host: str
    port: int

    @classmethod
    def of(cls, *, host: str = "127.0.0.1", port: int = 0, **settings: Any) -> "_Config":
        return cls(AgentCoreSettings(**settings), host, port)


@asynccontextmanager
async def _serve(config: _Config) -> AsyncIterator[str]:
    async with serve_agentcore(config.settings, host=config.host, port=config.port) as emulator:
        yield emulator.endpoint_url


def main() -> None:
    """Serve until stdin closes."""
    run_engine_program(_Config.of, _serve, name="the AgentCore emulator")


if __name__ == "__main__":
    main()
