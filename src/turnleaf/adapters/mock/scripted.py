"""`python -m turnleaf.adapters.mock.scripted`: the scripted engine as a child process.

Configuration, one line of JSON on stdin: `script` (rollout → replies, see `Reply`), and optionally
`tokenizer` (path of a tokenizer.json), `stop_token_id`, `repeat`, `seed`, `ledger` (path of the
ledger.jsonl to append to), `host` and `port`. Its readiness line is `{"url": …}`.
"""

import sys
from pathlib import Path
from typing import Any

import anyio
import attrs

from turnleaf.adapters.mock._engine_app import serve_engine
from turnleaf.adapters.mock._ledger import Ledger
from turnleaf.adapters.mock._script import Script
from turnleaf.adapters.mock._scripted import ScriptedEngine
from turnleaf.adapters.mock._tokenizer import FileTokenizer
from turnleaf.core import ContractError
from turnleaf.gateway._child import announce, announce_error, read_config, until_stdin_closes


@attrs.frozen
class _Config:
    script: Script = attrs.field(validator=attrs.validators.instance_of(dict))
    tokenizer: str | None = None
    stop_token_id: int | None = None
    repeat: bool = False
    seed: int = 0
    ledger: str | None = None
    host: str = "127.0.0.1"
    port: int = 0


def _configured(values: dict[str, Any]) -> _Config:
    try:
        return _Config(**values)
    except TypeError as error:
        raise ContractError(f"the scripted engine's configuration: {error.args[0]}") from None


def _engine(config: _Config) -> ScriptedEngine:
    tokenizer = None
    if config.tokenizer is not None:
        tokenizer = FileTokenizer(Path(config.tokenizer))
    return ScriptedEngine(
        config.script,
        tokenizer=tokenizer,
        stop_token_id=config.stop_token_id,
        repeat=config.repeat,
        seed=config.seed,
        ledger=Ledger(None if config.ledger is None else Path(config.ledger)),
    )


async def _serve() -> None:
    config = _configured(read_config())
    async with serve_engine(_engine(config), host=config.host, port=config.port) as url:
        announce({"url": url})
        await until_stdin_closes()


def main() -> None:
    """Serve until stdin closes."""
    try:
        anyio.run(_serve)
    except (ContractError, OSError) as error:
        announce_error(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
