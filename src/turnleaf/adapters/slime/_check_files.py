"""Files that a person names, read within limits."""

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from turnleaf.core import ContractError

__all__ = ["read_text", "regular_file"]


@contextlib.contextmanager
def regular_file(path: Path, *, where: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file that ends.

    Raises ContractError, which begins with `where`, for a pipe, a device and whatever cannot be
    read, also while it is read.
    """
    try:
        # A pipe would be waited for until someone writes into it.
        descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ContractError(f"{where}: cannot be read: {error.strerror}") from None
    except (RuntimeError, ValueError) as error:  # no such user's home, a NUL in the name
        raise ContractError(f"{where}: cannot be read: {error}") from None
    try:
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ContractError(
                    f"{where}: is a pipe or a device; write what it gives to a file, and name that"
                )
            yield file
    except OSError as error:
        raise ContractError(f"{where}: cannot be read: {error.strerror}") from None


def read_text(path: Path, *, where: str, limit: int) -> str:
    """A whole file of UTF-8 text of at most `limit` bytes; raises as `regular_file` does."""
    with regular_file(path, where=where) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ContractError(f"{where}: has more than {limit:,} bytes; is that the right file?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"{where}: is not UTF-8 text ({error.reason})") from None
