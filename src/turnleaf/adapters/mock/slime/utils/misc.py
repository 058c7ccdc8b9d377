"""`slime.utils.misc`: functions by their dotted path, one instance per process, grouping."""

import importlib
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any, ClassVar, TypeVar

__all__ = ["SingletonMeta", "group_by", "load_function"]

Item = TypeVar("Item")


@cache
def load_function(path: str) -> Any:
    """What "module.attribute" names, as it was when the path was first asked for."""
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


class SingletonMeta(type):
    """The first call makes the class's instance; later ones return it, whatever their arguments."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


def group_by(
    items: Iterable[Item], key: Callable[[Item], Hashable] | None = None
) -> dict[Any, list[Item]]:
    """Items by their key (without one: by themselves), in order of appearance."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups
