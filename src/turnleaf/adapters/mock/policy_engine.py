"""`python -m turnleaf.adapters.mock.policy_engine`: the policy's engine as a child process.

Configuration, one line of JSON on stdin: `weights` (path of an .npz file), `stop_token_id`, and
optionally `seed`, `weight_version`, `ledger` (path of the ledger.jsonl to append to), `host` and
`port`. Its readiness line is `{"url": …}`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs

from turnleaf.adapters.mock._blas import use_one_blas_thread
from turnleaf.adapters.mock._engine_app import serve_engine
from turnleaf.adapters.mock._engine_program import run_engine_program
from turnleaf.adapters.mock._ledger import Ledger
from turnleaf.adapters.mock._policy import Policy
from turnleaf.adapters.mock._policy_engine import PolicyEngine


@attrs.frozen
class _Config:
    weights: str
    stop_token_id: int
    seed: int = 0
    weight_version: str = "default"
    ledger: str | None = None
    host: str = "127.0.0.1"
    port: int = 0


@asynccontextmanager
async def _serve(config: _Config) -> AsyncIterator[str]:
    engine = PolicyEngine(
        Policy.load(Path(config.weights)),
        stop_token_id=config.stop_token_id,
        seed=config.seed,
        ledger=Ledger(None if config.ledger is None else Path(config.ledger)),
        model_path=config.weights,
        weight_version=config.weight_version,
    )
    async with serve_engine(engine, host=config.host, port=config.port) as url, engine.sampling():
        yield url


def main() -> None:
    """Serve until stdin closes."""
    use_one_blas_thread()
    run_engine_program(_Config, _serve, name="the policy engine")


if __name__ == "__main__":
    main()
