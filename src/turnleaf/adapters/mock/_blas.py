"""Keeping numpy's matrix products on one core."""

import ctypes
import logging
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

__all__ = ["use_one_blas_thread"]

logger = logging.getLogger(__name__)

_SETTERS = (
    "scipy_openblas_set_num_threads64_",  # numpy's own wheels since 2.0
    "openblas_set_num_threads64_",  # and before
    "openblas_set_num_threads",
    "MKL_Set_Num_Threads",
)
_SUFFIXES = tuple(EXTENSION_SUFFIXES)
_EXTENSIONS = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")


def use_one_blas_thread() -> bool:
    """Let this process multiply matrices on one core from now on; whether that is known to hold.

    The policy's matrices are so small that a second thread makes everything several times slower.
    The usual environment variables are read when numpy is first imported, which is earlier than a
    program can set them, so the library that numpy has loaded is asked itself.
    """
    for extension in _EXTENSIONS:
        try:
            spec = find_spec(extension)
        except ModuleNotFoundError:
            continue
        # The name of the other version's module is kept as a Python file that warns.
        if spec is None or spec.origin is None or not spec.origin.endswith(_SUFFIXES):
            continue
        loaded = ctypes.CDLL(spec.origin)  # a name is looked up in what it depends on, too
        for name in _SETTERS:
            if hasattr(loaded, name):
                getattr(loaded, name)(1)
                return True
    logger.info("numpy's BLAS is unknown; OPENBLAS_NUM_THREADS=1 may make the policy faster")
    return False
