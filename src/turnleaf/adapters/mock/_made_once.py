"""Folders that are made once and kept in the user's cache directory."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["made_once"]


def made_once(kind: str, name: str, made_from: bytes, make: Callable[[Path], None]) -> Path:
    """The folder of that kind that `make` filled, in `$XDG_CACHE_HOME/turnleaf` (or
    `~/.cache/turnleaf`).

    made_from: all that its content follows from. Processes may race: each makes a folder apart, and
    the first to finish is kept.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parent = cache / "turnleaf" / kind
    folder = parent / f"{name}-{hashlib.sha256(made_from).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    try:
        make(draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
