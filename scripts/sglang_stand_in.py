"""Stands in for a package that needs CUDA, where SGLang imports it but never calls it.

Every attribute is an empty class, and so is every attribute of those; every submodule is another
module like this. `make-sglang-env` installs it under the package's name.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0"


class _Empty(type):
    def __getattr__(cls, name):
        return _empty(name)


class _StandIn(ModuleType):
    def __getattr__(self, name):
        value = _empty(name)
        setattr(self, name, value)
        return value


class _Submodules:
    def find_spec(self, name, path=None, target=None):
        inside = name.startswith(f"{__name__}.")
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


def _empty(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


sys.meta_path.append(_Submodules())
sys.modules[__name__].__class__ = _StandIn
