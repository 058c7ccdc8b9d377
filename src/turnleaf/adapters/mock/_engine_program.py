"""What the programs of both mock engines have in common: from stdin to stdin's end."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import anyio

from turnleaf.core import ContractError
from turnleaf.gateway._child import announce, announce_error, read_config, until_stdin_closes

__all__ = ["run_engine_program"]

Config = TypeVar("Config")


def run_engine_program(
    kind: Callable[..., Config],
    serve: Callable[[Config], AbstractAsyncContextManager[str]],
    *,
    name: str,
) -> None:
    """Serve an engine until stdin closes; its readiness line is `{"url": …}`.

    kind: makes the configuration of what stdin says. serve: serves an engine until the context is
    left; yields its URL. name: in the error about a wrong configuration. What keeps the engine
    from starting is announced, and the program ends with 1.
    """

    async def run() -> None:
        values = read_config()
        try:
            config = kind(**values)
        except (TypeError, ValueError) as error:
            raise ContractError(f"{name}'s configuration: {error.args[0]}") from None
        async with serve(config) as url:
            announce({"url": url})
            await until_stdin_closes()

    try:
        anyio.run(run)
    except (ContractError, OSError) as error:
        announce_error(str(error))
        sys.exit(1)
