"""Standard output, kept for the report."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from turnleaf.core import ContractError

__all__ = ["abandon", "reserved_stdout", "visible", "write"]

_VISIBLE = str.maketrans(
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)
"""Control characters as pictures: what a model says must not steer the terminal."""


@contextlib.contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """The process's stdout; what an agent, or a program that it runs, writes goes to stderr.

    Characters that the encoding lacks are written as escapes.
    """
    sys.stdout.flush()
    encoding = sys.stdout.encoding
    with os.fdopen(os.dup(1), "w", encoding=encoding, errors="backslashreplace") as stdout:
        os.dup2(2, 1)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield stdout
        finally:
            os.dup2(stdout.fileno(), 1)


def write(stdout: TextIO, text: str) -> None:
    """Write all of `text`, or as much as whoever reads it wants to have.

    Raises ContractError when it cannot be written, as to a disk that is full.
    """
    try:
        stdout.write(text)
        stdout.flush()
    except OSError as error:
        abandon(stdout)
        if not isinstance(error, BrokenPipeError):
            raise ContractError(f"stdout cannot be written: {error.strerror}") from None


def abandon(stdout: TextIO) -> None:
    """Throw away what is still buffered, which would raise again when the stream is closed."""
    unread = os.open(os.devnull, os.O_WRONLY)
    os.dup2(unread, stdout.fileno())
    os.close(unread)


def visible(text: str) -> str:
    """`text` with its control characters as pictures, line feeds and tabs excepted."""
    return text.translate(_VISIBLE)
