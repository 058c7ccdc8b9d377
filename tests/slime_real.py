"""slime itself for the tests: importable from a checkout, without a GPU, engines or Ray's cluster.

Its rollout side runs as it is. sglang, which takes a GPU to install, is stood in for by the few
names that slime's modules import from it at once; no test calls them.
"""

import importlib.machinery
import importlib.util
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TESTED_COMMIT = "a74ae3a0ad16bd8b769d5386738e8ae3d1269d7e"


def prepare(slime_dir: str | Path) -> None:
    """Make `import slime` find this checkout, but nothing else in it: neither `tests` nor `docs`.

    Raises FileNotFoundError where there is no slime, RuntimeError where another one is in use.
    """
    folder = Path(slime_dir).resolve()
    if not (folder / "slime" / "rollout" / "sglang_rollout.py").is_file():
        raise FileNotFoundError(f"{folder} is no checkout of slime: no slime/rollout in it")
    imported = sys.modules.get("slime")
    if imported is not None:
        places = list(getattr(imported, "__path__", []))
        if str(folder / "slime") not in places:
            raise RuntimeError(f"another slime is imported already, from {places}")
    else:
        sys.meta_path.insert(0, _CheckoutFinder(folder))
        for name, members in _STAND_INS.items():
            _stand_in(name, members)
        importlib.import_module("slime")


def describe(slime_dir: str | Path) -> str:
    """Which slime this is, and whether it is the one that the tests are known to pass with."""
    folder = Path(slime_dir).resolve()
    commit = _commit(folder)
    if commit == TESTED_COMMIT:
        return f"slime: {folder}, commit {commit}"
    found = f"commit {commit}" if commit else "of an unknown commit"
    return f"slime: {folder}, {found}; the tested commit is {TESTED_COMMIT}"


def rollout_manager_class() -> Any:
    """The class of slime's rollout manager, without the Ray actor class around it."""
    from slime.ray.rollout import RolloutManager

    return getattr(RolloutManager, "__ray_actor_class__", RolloutManager)


def argument_parser() -> ArgumentParser:
    """slime's own parser; the arguments of Megatron and of SGLang's server are lacking in it."""
    from slime.backends.sglang_utils.arguments import add_sglang_arguments
    from slime.utils.arguments import get_slime_extra_args_provider

    parser = ArgumentParser(allow_abbrev=False)
    get_slime_extra_args_provider()(parser)
    add_sglang_arguments(parser)
    return parser


def default_arguments() -> Namespace:
    """What slime's own parser makes of the one argument that it requires."""
    return argument_parser().parse_args(["--rollout-batch-size", "1"])


class _CheckoutFinder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "slime":
            return None
        return importlib.machinery.PathFinder.find_spec(name, [str(self._folder)], target)


class _Arguments:
    @staticmethod
    def add_cli_args(parser: ArgumentParser, **options: Any) -> None:
        """Without an engine there are no arguments of its."""


def _needs_an_engine(*arguments: Any, **options: Any) -> None:
    raise NotImplementedError("sglang is not installed where this test runs")


_STAND_INS: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang.srt": {},
    "sglang.srt.constants": {
        name: name
        for name in (
            "GPU_MEMORY_TYPE_CUDA_GRAPH",
            "GPU_MEMORY_TYPE_KV_CACHE",
            "GPU_MEMORY_TYPE_WEIGHTS",
        )
    },
    "sglang.srt.server_args": {"ServerArgs": _Arguments},
    "sglang.srt.utils": {"kill_process_tree": _needs_an_engine},
    "sglang_router": {},
    "sglang_router.launch_router": {
        "RouterArgs": _Arguments,
        "launch_router": _needs_an_engine,
    },
}


def _stand_in(name: str, members: dict[str, Any]) -> None:
    """Register a module unless the environment has the real one."""
    if importlib.util.find_spec(name) is None:
        spec = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module = importlib.util.module_from_spec(spec)
        vars(module).update(members)
        sys.modules[name] = module


def _commit(folder: Path) -> str | None:
    """The checkout's commit, with `-dirty` where files differ from it; None outside git."""
    if not (folder / ".git").exists():
        return None
    describe_head = ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), *describe_head], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return run.stdout.strip() or None
