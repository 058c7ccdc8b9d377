"""Where agents run: in this process, or behind an address that takes `POST /invocations`."""

from typing import TYPE_CHECKING

from turnleaf.core import MissingExtraError
from turnleaf.sessions._factory import session_factory
from turnleaf.sessions._local import LocalSession

if TYPE_CHECKING:
    from turnleaf.sessions._http import HttpSession

__all__ = ["HttpSession", "LocalSession", "session_factory"]


def __getattr__(name: str) -> object:
    if name != "HttpSession":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from turnleaf.sessions._http import HttpSession
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise MissingExtraError(
            "HttpSession needs aiohttp, which is not installed: pip install 'turnleaf[gateway]'"
        ) from error
    return HttpSession
