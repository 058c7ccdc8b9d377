"""Where agents run: in this process, behind an address, or on AgentCore Runtime."""

import importlib
from typing import TYPE_CHECKING

from turnleaf.core import MissingExtraError
from turnleaf.sessions._factory import session_factory
from turnleaf.sessions._local import LocalSession

if TYPE_CHECKING:
    from turnleaf.sessions._agentcore import AgentCoreHttpSession
    from turnleaf.sessions._http import HttpSession

__all__ = ["AgentCoreHttpSession", "HttpSession", "LocalSession", "session_factory"]

# By name: the module, what it needs, and the extra that brings it.
_LAZY = {
    "AgentCoreHttpSession": ("turnleaf.sessions._agentcore", "boto3", "agentcore"),
    "HttpSession": ("turnleaf.sessions._http", "aiohttp", "gateway"),
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, needed, extra = _LAZY[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != needed:
            raise
        raise MissingExtraError(
            f"{name} needs {needed}, which is not installed: pip install 'turnleaf[{extra}]'"
        ) from error
