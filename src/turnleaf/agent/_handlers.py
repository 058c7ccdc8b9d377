"""What an agent's handler does and returns, made into one JSON value or one exception."""

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from turnleaf.agent._streams import Events, last_event
from turnleaf.core import AgentError, BadResultError, described, hidden

__all__ = ["contained", "result_of"]

EXCERPT = 500


def contained(handler: Callable[..., Any]) -> Callable[..., Any]:
    """`handler`; a coroutine function that calls sys.exit() raises AgentError instead.

    It would end the event loop that all coroutines of the agent share, and nobody would be told.
    """
    function = handler
    while isinstance(function, functools.partial):
        function = function.func
    is_async = inspect.iscoroutinefunction(function)
    if not is_async and not inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004  # what it is, not whether it is there
        return handler

    async def guarded(*arguments: Any) -> Any:
        try:
            return await handler(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:
            ended = AgentError(f"the agent raised {described(error)}")
            raise ended.with_traceback(error.__traceback__) from None

    return guarded


async def result_of(returned: object, events: Events, secret: str) -> object:
    """The result in what a handler has returned: of a generator the last value.

    Of a response, the JSON in it. events: are told of a generator's values. Raises what
    `last_event` does, and BadResultError for a response without JSON or of another status than 2xx.
    """
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        return await last_event(returned, events, secret)
    if not isinstance(returned, Response):
        return returned
    body = getattr(returned, "body", b"")
    what = f"the agent returned a {type(returned).__name__} with status {returned.status_code}"
    if not 200 <= returned.status_code < 300:
        raise BadResultError(f"{what}: {_excerpt(body, secret)}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise BadResultError(f"{what}, which is not JSON: {_excerpt(body, secret)}") from None


def _excerpt(body: bytes, secret: str) -> str:
    return hidden(bytes(body).decode("utf-8", "replace"), secret)[:EXCERPT]
