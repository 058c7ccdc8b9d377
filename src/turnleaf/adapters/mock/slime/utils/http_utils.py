"""`slime.utils.http_utils`: how slime talks with the router and the engines."""

import asyncio
import logging
from argparse import Namespace
from typing import Any

import httpx

__all__ = ["get", "get_rollout_num_engines", "init_http_client", "post"]

logger = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0  # seconds

_client: httpx.AsyncClient | None = None


def get_rollout_num_engines(args: Namespace) -> int:
    """Number of engines behind the router, of which slime's limit on running groups is made."""
    number = getattr(args, "rollout_num_engines", None)
    if number is not None:
        return int(number)
    gpus = getattr(args, "rollout_num_gpus", None) or 0
    per_engine = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    return max(1, gpus // per_engine) if gpus > 0 else 0


def init_http_client(args: Namespace) -> None:
    """Make the process's client, once; slime does so as it starts the engines."""
    global _client
    engines = get_rollout_num_engines(args)
    if engines <= 0 or _client is not None:
        return
    # Several event loops share the client, so that no connection may outlive its request.
    limits = httpx.Limits(
        max_connections=args.sglang_server_concurrency * engines, max_keepalive_connections=0
    )
    _client = httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None), trust_env=False)


async def post(
    url: str,
    payload: dict[str, Any] | None,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
) -> Any:
    """The reply's JSON, or its text; whatever fails is tried again, a second later each time."""
    for attempt in range(1, max_retries + 1):
        try:
            response = await _connected().post(url, json=payload or {}, headers=headers)
            response.raise_for_status()
            break
        except Exception as error:
            logger.info("%s: attempt %d of %d: %s", url, attempt, max_retries, error)
            if attempt == max_retries:
                raise
        await asyncio.sleep(_RETRY_PAUSE)
    else:
        raise ValueError(f"max_retries: {max_retries}")
    try:
        return response.json()
    except ValueError:
        return response.text


async def get(url: str) -> Any:
    """The reply's JSON; nothing is tried again."""
    response = await _connected().get(url)
    response.raise_for_status()
    return response.json()


def _connected() -> httpx.AsyncClient:
    if _client is None:
        raise AttributeError("no HTTP client: init_http_client was not called")
    return _client
