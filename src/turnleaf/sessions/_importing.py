"""Finding what a setting names: a module, a Python file, something inside either."""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import threading
from collections.abc import Iterable, Iterator
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

    def load(self, path: Path, name: str, origin: str) -> ModuleType:
        with self._loading:
            if path not in self._modules:
                self._modules[path] = _executed(path, name, origin)
            return self._modules[path]


_files = _Files()


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence: `"; did you mean 'x'?"` for the nearest of `names`, or `"."`."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


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


def load_file(path: Path, *, name: str, origin: str) -> ModuleType:
    """Load a Python file, once per process, however many threads ask at once.

    Its folder is at the front of `sys.path` while it is loaded, as when it is run as a script, so
    that its neighbours come first; afterwards at the end, so that they come last for what the
    rest of the process imports, and for what the agent imports when it runs.

    name: of what is sought in it. Raises ContractError, beginning with `origin`, when there is no
    such file or it cannot be executed; the next call tries again.
    """
    found = path.expanduser().resolve()
    if not found.is_file():
        raise ContractError(f"{origin}: there is no file {found}; correct the path")
    return _files.load(found, name, origin)


def attribute(
    module: ModuleType, name: str, *, shown: str, origin: str, names: Iterable[str]
) -> Any:
    """`module.name`; raises ContractError that lists `names`, those that could be meant.

    shown: what the module is called by the one who asks for it.
    """
    try:
        return getattr(module, name)
    except AttributeError as error:
        known = sorted(names)
        raise ContractError(
            f"{origin}: {shown} has no {name!r}{nearest(name, known)} "
            f"It has {', '.join(known) or 'nothing of that kind'}."
        ) from error


def _executed(path: Path, name: str, origin: str) -> ModuleType:
    # Named after its whole path: two agents may both be called agent.py.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    module_name = f"turnleaf_agent_{digest}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ContractError(f"{origin}: {path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    # Pickle and dataclasses look a class's module up there.
    sys.modules[module_name] = module
    try:
        with _neighbours_first(str(path.parent)):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        if isinstance(error, ImportError) and "no known parent package" in str(error):
            advice = _advice_for_package(path, name)
        else:
            advice = f"`python {path}` shows the whole traceback"
        raise ContractError(
            f"{origin}: loading {path} failed with {describe(error, str(path))}; {advice}"
        ) from error
    return module


@contextlib.contextmanager
def _neighbours_first(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # What was loaded may have removed it itself.
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _advice_for_package(path: Path, name: str) -> str:
    """What to name instead of a file that imports by dots, and so is of a package."""
    root, parts = path.parent, [path.stem]
    while root.name and (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if len(parts) == 1:
        return (
            f"a file that imports by dots is part of a package: name it package.module:{name} "
            "instead of its path, with the folder that holds the package on PYTHONPATH"
        )
    return (
        f"it is part of a package: name it {'.'.join(parts)}:{name} instead of its path, "
        f"with {root} on PYTHONPATH"
    )


def _siblings(missing: str) -> list[str]:
    """The modules that exist beside a missing one."""
    parent = missing.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return []
    prefix = f"{parent}." if parent else ""
    return [prefix + found.name for found in pkgutil.iter_modules(path)]
