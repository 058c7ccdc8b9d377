"""Stand-ins for what turnleaf's hooks, and the tests of them, meet of the trainer slime.

The same module paths, names and order of events as in slime, so that what breaks a hook there
breaks it here; without torch (arrays are numpy's), Ray, training or weights. `install` makes the
package importable as `slime`. What slime has and these modules lack is out of a hook's sight: the
multimodal inputs, checkpoints of the data source, chat templates, most reward models, engines'
start and supervision, the split of a batch over data-parallel ranks.
"""

import importlib
import importlib.util
import pkgutil
import sys

__all__ = ["install"]


def install() -> None:
    """Register this package and all of its modules in `sys.modules` as `slime`; again: no effect.

    Raises ImportError when another `slime` is imported or could be.
    """
    stand_ins = sys.modules[__name__]
    if sys.modules.get("slime") is stand_ins:
        return
    if "slime" in sys.modules or importlib.util.find_spec("slime") is not None:
        raise ImportError(
            "another package called slime is importable; the stand-ins would hide it. Take it off "
            "the path, or test against it and install no stand-ins"
        )
    for module in pkgutil.walk_packages(stand_ins.__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)
    for name in tuple(sys.modules):
        if name == __name__ or name.startswith(f"{__name__}."):
            sys.modules[f"slime{name.removeprefix(__name__)}"] = sys.modules[name]
