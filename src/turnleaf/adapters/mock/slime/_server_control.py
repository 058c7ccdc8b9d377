"""How slime has engines end what they run: `slime.backends.sglang_utils.server_control`."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from turnleaf.adapters.mock.slime.utils.http_utils import get, post

__all__ = ["abort_servers_until_idle"]

logger = logging.getLogger(__name__)

_RETRY_INTERVAL = 0.1  # seconds; slime waits 3


async def abort_servers_until_idle(urls: Iterable[str]) -> None:
    """Abort all calls at every engine, again until each says that it is idle.

    Calls that start afterwards run on. An engine that cannot be asked counts as idle.
    """
    await asyncio.gather(*(_abort_until_idle(url) for url in urls))


async def _abort_until_idle(url: str) -> None:
    while True:
        try:
            await post(f"{url}/abort_request", {"abort_all": True})
        except Exception as error:  # noqa: BLE001  # as slime does
            logger.warning("%s cannot be aborted: %s", url, error)
        try:
            loads = await get(f"{url}/v1/loads?include=core")
        except Exception as error:  # noqa: BLE001  # whatever it is, the log says it
            logger.warning("%s does not tell its load: %s", url, error)
            return
        if _requests(loads) <= 0:
            return
        await asyncio.sleep(_RETRY_INTERVAL)


def _requests(load: Any) -> int:
    """Running and waiting requests of an engine, over all of its ranks."""
    if isinstance(load, list):
        return sum(map(_requests, load))
    if not isinstance(load, dict):
        return 0
    if "loads" in load:
        return _requests(load["loads"])
    return int(load.get("num_running_reqs", 0)) + int(load.get("num_waiting_reqs", 0))
