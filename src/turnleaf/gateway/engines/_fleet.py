"""The engines behind an address: an engine itself, or all that the router there lists."""

import logging
import math
from collections.abc import Iterable
from http import HTTPStatus

import anyio
import orjson

from turnleaf.core import EngineError
from turnleaf.gateway.engines._connections import BROKEN, Connections, Response, describe

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)

# A trainer's abort ends every call at once; descriptors are finite.
_CONCURRENT_REQUESTS = 64
_STREAMING_KNOWN = 60.0  # seconds for which an answer holds
_STREAMING_UNKNOWN = 10.0  # seconds until engines are asked again of which one did not answer
_STREAMING_REFUTED = 600.0  # seconds for which engines are not asked again that said what is not so
_ASKING_TIME = 2.0  # seconds; an engine that loads weights answers nothing meanwhile


class Fleet:
    """url: of the engine or router, `http://host:port`."""

    def __init__(self, url: str, connections: Connections) -> None:
        self._url = url
        self._connections = connections
        self._requests = anyio.CapacityLimiter(_CONCURRENT_REQUESTS)
        self._asking = anyio.Lock()
        self._asked = False
        self._ask_at = -math.inf
        self._incremental = False

    async def engines(self) -> list[str]:
        """URLs of the engines behind the router; an engine itself lists none."""
        try:
            async with self._requests:
                response = await self._connections.exchange("GET", f"{self._url}/workers")
        except (EngineError, *BROKEN):
            return [self._url]
        if response.status != HTTPStatus.OK:
            return [self._url]
        return list(_worker_urls(response.body)) or [self._url]

    async def abort(self, rid: str) -> None:
        """Ask every engine to end the call; whoever cannot be asked is left to notice that the
        connection closes."""

        async def ask(engine: str) -> None:
            body = orjson.dumps({"rid": rid})
            try:
                async with self._requests:
                    await self._connections.exchange("POST", f"{engine}/abort_request", body=body)
            except (EngineError, *BROKEN) as error:
                logger.debug("%s could not be aborted at an engine: %s", rid, describe(error))

        async with anyio.create_task_group() as tasks:
            for engine in await self.engines():
                tasks.start_soon(ask, engine)

    async def streams_incrementally(self) -> bool:
        """Whether every engine says that its streams hold only what is new in each event.

        Asked once a minute; False until all have answered. An engine that cannot be asked leaves
        what was known of them, and while they are asked again, that has to do.
        """
        if self._asked and self._asking.locked():
            return self._incremental
        async with self._asking:
            if anyio.current_time() >= self._ask_at:
                await self._ask()
            return self._incremental

    def forget_streaming(self) -> None:
        """An engine failed and may come back started otherwise: ask before the next stream."""
        self._ask_at = -math.inf

    def refute_streaming(self) -> None:
        """A stream was not incremental."""
        self._incremental = False
        self._ask_at = anyio.current_time() + _STREAMING_REFUTED

    async def _ask(self) -> None:
        answers: dict[str, bool | None] = {}

        async def ask(engine: str) -> None:
            try:
                async with self._requests:
                    response = await self._connections.exchange("GET", f"{engine}/server_info")
            except (EngineError, *BROKEN) as error:
                logger.debug("an engine does not say how it streams: %s", describe(error))
            else:
                answers[engine] = _says_incremental(response)

        with anyio.move_on_after(_ASKING_TIME):
            async with anyio.create_task_group() as tasks:
                answers |= dict.fromkeys(await self.engines())
                for engine in tuple(answers):
                    tasks.start_soon(ask, engine)
        said = [*answers.values()]
        complete = bool(said) and None not in said
        if False in said or complete:
            self._incremental = False not in said
        hold = _STREAMING_KNOWN if complete else _STREAMING_UNKNOWN
        self._asked, self._ask_at = True, anyio.current_time() + hold


def _says_incremental(response: Response) -> bool | None:
    """SGLang lists its settings; None when it does not tell now.

    Versions with the setting's older name, `stream_output`, repeat log-probabilities in each event
    even then: they do not say it.
    """
    if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return None
    if response.status != HTTPStatus.OK:
        return False
    try:
        settings = orjson.loads(response.body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(settings, dict) and settings.get("incremental_streaming_output") is True


def _worker_urls(body: bytes) -> Iterable[str]:
    """The router's `/workers`: `{"workers": [{"url": …}]}`, in older ones `{"urls": […]}`."""
    try:
        listed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return
    if not isinstance(listed, dict):
        return
    for key in ("workers", "urls"):
        workers = listed.get(key)
        for worker in workers if isinstance(workers, list) else ():
            url = worker.get("url") if isinstance(worker, dict) else worker
            if isinstance(url, str) and url.startswith(("http://", "https://")):
                yield url.rstrip("/")
