"""`python -m turnleaf.adapters.mock.scripted`: the scripted engine as a child process.

Configuration, one line of JSON on stdin: `script` (rollout → replies, see `Reply`), and optionally
`tokenizer` (path of a tokenizer.json), `stop_token_id`, `repeat`, `seed`, `ledger` (path of the
ledger.jsonl to append to), `routed_experts_shape`, `knows_top_p_ids`, `streaming`, `host` and
`port`. Its readiness line is `{"url": …}`.
"""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs

from turnleaf.adapters.mock._calls import Streaming
from turnleaf.adapters.mock._engine_app import serve_engine
from turnleaf.adapters.mock._engine_program import run_engine_program
from turnleaf.adapters.mock._ledger import Ledger
from turnleaf.adapters.mock._script import Script
from turnleaf.adapters.mock._scripted import ScriptedEngine
from turnleaf.adapters.mock._tokenizer import FileTokenizer


@attrs.frozen
class _Config:
    script: Script = attrs.field(validator=attrs.validators.instance_of(dict))
    tokenizer: str | None = None
    stop_token_id: int | None = None
    repeat: bool = False
    seed: int = 0
    ledger: str | None = None
    routed_experts_shape: tuple[int, int] | None = attrs.field(
        default=None, converter=attrs.converters.optional(tuple)
    )
    knows_top_p_ids: bool = True
    streaming: Streaming = attrs.field(
        default="cumulative", validator=attrs.validators.in_(("incremental", "cumulative", None))
    )
    host: str = "127.0.0.1"
    port: int = 0


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
        routed_experts_shape=config.routed_experts_shape,
        knows_top_p_ids=config.knows_top_p_ids,
        streaming=config.streaming,
    )


def _serve(config: _Config) -> AbstractAsyncContextManager[str]:
    return serve_engine(_engine(config), host=config.host, port=config.port)


def main() -> None:
    """Serve until stdin closes."""
    run_engine_program(_Config, _serve, name="the scripted engine")


if __name__ == "__main__":
    main()
