"""The rollout gateway: an OpenAI-compatible endpoint that records the exact tokens.

The trainer's process needs `running_worker`, `WorkerConfig` and `GatewayClient` only; a worker is
always a process of its own, `python -m turnleaf.gateway`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from turnleaf.core import MissingExtraError

if TYPE_CHECKING:
    from turnleaf.gateway._client import (
        GatewayClient,
        RunningWorker,
        run_worker,
        running_worker,
    )
    from turnleaf.gateway._config import WorkerConfig, routable_address

__all__ = [
    "GatewayClient",
    "RunningWorker",
    "WorkerConfig",
    "routable_address",
    "run_worker",
    "running_worker",
]

_HOMES = {
    "GatewayClient": "_client",
    "RunningWorker": "_client",
    "WorkerConfig": "_config",
    "routable_address": "_config",
    "run_worker": "_client",
    "running_worker": "_client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("turnleaf"):
            raise
        raise MissingExtraError(
            f"turnleaf.gateway.{name} needs {error.name}: pip install 'turnleaf[gateway]'"
        ) from error
    return getattr(home, name)
