"""An agent that runs in this process."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from turnleaf.core import AgentError, ContractError, cancel_and_wait, is_interrupt, start_task
from turnleaf.sessions._importing import attribute, import_module, load_file
from turnleaf.sessions._reporting import Redaction, describe, kind_of
from turnleaf.sessions._threads import call_in_daemon_thread

__all__ = ["AgentFunction", "LocalSession"]

logger = logging.getLogger(__name__)

STOP_LIMIT = 5.0
"""Seconds that an async agent may take to end, once it is cancelled."""

AgentFunction = Callable[[dict[str, Any]], Any | Awaitable[Any]]
"""`async def run(payload) -> dict`, or a plain function that may block."""


class LocalSession:
    """Runs an agent in this process; a RolloutSession.

    target: the agent's function, or where to find it: `"path/to/agent.py:run"` or
        `"package.module:run"`. A file is loaded once. Its folder is first on `sys.path` meanwhile
        and last from then on: import neighbours that are named like an installed package at the
        top of the file, not within its functions.

    An async function runs in the caller's event loop, which it must not block, in a task of its
    own. Cancelling `run` cancels it, a few times at most; one that goes on for STOP_LIMIT seconds
    is logged and abandoned. A plain function
    gets a thread of its own; since threads cannot be cancelled, cancelling `run` abandons it: it
    runs on, unheard, until it returns or the process ends, which does not wait for it.

    Raises ContractError when the target cannot be found, loaded, or called with one payload.
    """

    def __init__(self, target: str | AgentFunction) -> None:
        function = _found(target) if isinstance(target, str) else target
        _check_callable(function, target)
        self._target = target
        self._function: AgentFunction = function
        self._file = _file_of(function)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to stop: the agent runs inside `run`, and ends with it."""

    async def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Call the agent with a copy of `payload` and return its result, as it came.

        Raises AgentError with the type, message, file and line of what the agent raised. An agent
        that exits or cancels itself has failed, too, and takes nobody along.
        """
        # The rollouts of a group share their row, and an agent may write into its payload.
        own = copy.deepcopy(payload)
        results: list[dict[str, Any]] = []
        failures: list[BaseException] = []

        async def call() -> None:
            try:
                results.append(await self._call(own))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if is_interrupt(error):
                    raise
                failures.append(error)

        # A task of its own, so that its CancelledError is told from the caller's cancellation. No
        # task group: its scope would cancel an agent that goes on at every turn of the loop.
        task = start_task(call(), name="turnleaf-agent")
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if not await cancel_and_wait([task], limit=STOP_LIMIT):
                logger.error(
                    "the agent %r ignores its cancellation; abandoned, it runs on", self._target
                )
            raise
        if failures:
            redaction = Redaction.of(payload)
            text = redaction.text(describe(failures[0], self._file))
            raise AgentError(f"the agent raised {text}") from redaction.cause(failures[0])
        if not results:
            raise AgentError(
                "the agent cancelled itself: a CancelledError left it that nobody asked for"
            )
        return results[0]

    async def _call(self, payload: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(payload)
        result = await call_in_daemon_thread(self._function, payload)
        return await result if inspect.isawaitable(result) else result


def _found(target: str) -> Any:
    origin = f"agent {target!r}"
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise ContractError(
            f"{origin}: say where the agent is and which function runs it, "
            "such as path/to/agent.py:run or package.module:run"
        )
    if place.endswith(".py") or "/" in place:
        path = Path(place)
        module, shown = load_file(path, name=name, origin=origin), path.name
    else:
        module, shown = import_module(place, origin=origin), place
    functions = (
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and not key.startswith("_")
    )
    return attribute(module, name, shown=shown, origin=origin, names=functions)


def _check_callable(function: object, target: object) -> None:
    if inspect.isclass(function):
        raise ContractError(
            f"agent {target!r} is a class; name a function, or an instance of the class that is "
            "called with the payload"
        )
    if not callable(function):
        raise ContractError(
            f"agent {target!r} is not callable (it is {kind_of(function)}); "
            "name a function that takes the payload and returns the result"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables written in C have none
        return
    try:
        signature.bind({})
    except TypeError as error:
        raise ContractError(
            f"agent {target!r} has the signature {signature}, but is called with one argument, "
            f"the payload: {error}"
        ) from error


def _file_of(function: AgentFunction) -> str | None:
    try:
        return inspect.getfile(inspect.unwrap(function))
    except TypeError:  # not a function: a callable object, a partial
        return None
