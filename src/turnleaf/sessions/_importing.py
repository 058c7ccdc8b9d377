"""Finding what a setting names: a module, a Python file, something inside either."""

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from turnleaf.core import ContractError
from turnleaf.sessions._reporting import describe

__all__ = ["attribute", "import_module", "load_file", "nearest"]


class _Files:
    """Every file of this process that was loaded as an agent's, each of them once."""

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}
        # Reentrant: a file may itself load another one while it is being loaded.
        self._loading = threading.RLock()

    def load(self, path: Path, origin: str) -> ModuleType:
        with self._loading:
            if path not in self._modules:
                self._modules[path] = _executed(path, origin)
            return self._modules[path]


_files = _Files()


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence: `": did you mean 'x'?"` for the nearest of `names`, or `"."`."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f": did you mean {close[0]!r}?" if close else "."


def import_module(name: str, *, origin: str) -> ModuleType:
    """Import a module by its dotted name.

    Raises ContractError, beginning with `origin` (what names the module), when it is missing or
    when importing it fails.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ContractError(f"{origin}: {name!r} is not the dotted name of a module")
    try:
        return importlib.import_module(name)
    except ContractError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ContractError(
                f"{origin}: there is no module {missing!r}{nearest(missing, _siblings(missing))} "
                "Correct the name, install its package, or put its folder on PYTHONPATH."
            ) from error
        raise ContractError(
            f"{origin}: importing {name!r} failed with {describe(error, None)}"
        ) from error


def load_file(path: Path, *, origin: str) -> ModuleType:
    """Load a Python file, once per process, however many threads ask at once.

    Its folder goes to the front of `sys.path`, as when it is run as a script, so that it can
    import its neighbours. Raises ContractError, beginning with `origin`, when there is no such
    file or it cannot be executed; the next call tries again.
    """
    found = path.expanduser().resolve()
    if not found.is_file():
        raise ContractError(f"{origin}: there is no file {found}; correct the path")
    return _files.load(found, origin)


def attribute(module: ModuleType, name: str, *, origin: str, names: Iterable[str]) -> Any:
    """`module.name`; raises ContractError that lists `names`, those that could be meant."""
    try:
        return getattr(module, name)
    except AttributeError as error:
        known = sorted(names)
        raise ContractError(
            f"{origin}: {module.__name__} has no {name!r}{nearest(name, known)} "
            f"It has {', '.join(known) or 'nothing of that kind'}."
        ) from error


def _executed(path: Path, origin: str) -> ModuleType:
    # Named after its whole path: two agents may both be called agent.py.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"turnleaf_agent_{digest}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ContractError(f"{origin}: {path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Pickle and dataclasses look a class's module up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ContractError(
            f"{origin}: loading {path} failed with {describe(error, str(path))}; "
            f"`python {path}` shows the whole traceback"
        ) from error
    return module


def _siblings(missing: str) -> list[str]:
    """The modules that exist beside a missing one."""
    parent = missing.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return []
    prefix = f"{parent}." if parent else ""
    return [prefix + found.name for found in pkgutil.iter_modules(path)]
