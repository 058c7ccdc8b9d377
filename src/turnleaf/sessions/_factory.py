"""From the `rollout_session_backend` setting to sessions."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

from turnleaf.core import ContractError, RolloutSession, SettingsError, described
from turnleaf.sessions._importing import attribute, import_module, nearest
from turnleaf.sessions._reporting import kind_of

__all__ = ["session_factory"]

SETTING = "rollout_session_backend"
EXAMPLE = "backend: turnleaf.sessions.HttpSession"


def session_factory(backend: Mapping[str, Any]) -> Callable[[], RolloutSession]:
    """What makes one session per rollout, as `rollout_session_backend` says.

    backend: `backend` is the import path of a RolloutSession class, every other key an argument
        of its constructor.

    All mistakes show here and not at the first rollout: one session is made at once, never
    entered, and dropped. Raises SettingsError, or another ContractError when importing fails.
    """
    if not isinstance(backend, Mapping):
        raise SettingsError(
            f"{SETTING} is {kind_of(backend)}; it must be a mapping, such as {{{EXAMPLE}}}"
        )
    arguments = {name: value for name, value in backend.items() if name != "backend"}
    if "backend" not in backend:
        close = difflib.get_close_matches("backend", map(str, arguments), n=1)
        found = f" (is {close[0]!r} meant to be it?)" if close else ""
        raise SettingsError(f"{SETTING} lacks the key `backend`{found}; it needs {EXAMPLE}")
    session = _session_class(backend["backend"])
    _check_arguments(session, arguments)
    factory = functools.partial(session, **arguments)
    try:
        factory()
    except ContractError:
        raise
    except Exception as error:
        raise SettingsError(
            f"{SETTING}: {session.__qualname__} refuses its arguments: {described(error)}"
        ) from error
    return factory


def _session_class(path: object) -> type[RolloutSession]:
    origin = f"{SETTING}: backend {path!r}"
    if not isinstance(path, str) or "." not in path:
        ours = _class_names(import_module("turnleaf.sessions", origin=origin))
        close = difflib.get_close_matches(str(path), ours, n=1)
        hint = f"did you mean turnleaf.sessions.{close[0]}?" if close else f"give one: {EXAMPLE}"
        raise SettingsError(f"{origin} is not the import path of a class; {hint}")
    module_name, _, name = path.rpartition(".")
    module = import_module(module_name, origin=origin)
    found = attribute(module, name, shown=module_name, origin=origin, names=_class_names(module))
    if not inspect.isclass(found):
        raise SettingsError(f"{origin} is {kind_of(found)}, not a class, such as {EXAMPLE}")
    methods = {key: getattr(found, key, None) for key in ("__aenter__", "__aexit__", "run")}
    lacking = [key for key, method in methods.items() if method is None]
    if lacking:
        raise SettingsError(f"{origin} is no RolloutSession: it lacks {', '.join(lacking)}")
    if not inspect.iscoroutinefunction(methods["run"]):
        raise SettingsError(f"{origin} is no RolloutSession: its run must be an `async def`")
    return cast("type[RolloutSession]", found)


def _class_names(module: types.ModuleType) -> list[str]:
    """By their capital: asking for each would import what is loaded lazily."""
    return [name for name in getattr(module, "__all__", vars(module)) if name[:1].isupper()]


def _check_arguments(session: type[RolloutSession], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(session).parameters.values()
    named = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    origin = f"{SETTING}: {session.__qualname__}"
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        for name in arguments:
            if name not in named:
                raise SettingsError(
                    f"{origin} has no argument {name!r}{nearest(str(name), named)} "
                    f"It takes {', '.join(named) or 'none'}."
                )
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise SettingsError(f"{origin} needs {name!r}; add it beside `backend`")
