"""What became of invocations, in files that outlive the process."""

import contextlib
import hashlib
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Self

import attrs

from turnleaf.core import SettingsError

__all__ = ["RecordLimits", "Records", "record_name"]

STARTED = ".started"
REPLY = ".json"
PART = ".part"
OURS = re.compile(r"[0-9a-f]{64}\.")
"""How the names of these files begin; whatever else is in the folder is somebody else's."""


@attrs.frozen
class RecordLimits:
    """What of it is kept.

    records: how many invocations that are over. seconds: for how long after their end.
    total_bytes: of their replies together.
    """

    records: int = 10_000
    seconds: float = 28_800.0
    total_bytes: int = 1024**3


def record_name(session_id: str, invocation_id: str) -> str:
    """A file name for what a client has chosen: nothing of that is in it."""
    # Neither a header nor an invocation id can hold the character between them.
    return hashlib.sha256(f"{session_id}\0{invocation_id}".encode()).hexdigest()


@attrs.frozen
class _Over:
    """An invocation that is over. at: when, in seconds since the epoch.

    reply: where it could not be written to a file.
    """

    is_finished: bool
    at: float
    size: int
    reply: bytes | None = None


@attrs.define(eq=False)
class Records:
    """The invocations that are over, and the files of these and of those that run.

    A marker is written before an invocation runs, its whole reply in place of it afterwards. A
    marker whose invocation runs in no process is one that was interrupted. Files appear under
    their names by being renamed, so none is ever read in part.

    Methods that touch files block, and may be called by several threads; they raise OSError.
    """

    folder: Path
    limits: RecordLimits
    _over: "OrderedDict[str, _Over]" = attrs.field(factory=OrderedDict, init=False)
    _bytes: int = attrs.field(default=0, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @classmethod
    def open(cls, folder: Path | None, limits: RecordLimits) -> Self:
        """The records of `folder`, with what earlier processes have left there.

        folder: None for one in the folder for temporary files that this user alone can read.
        Raises SettingsError where files cannot be made.
        """
        is_default = folder is None
        if folder is None:
            folder = Path(tempfile.gettempdir()) / f"turnleaf-invocations-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_default and folder.lstat().st_uid != os.getuid():
                raise PermissionError("another user has made it")
            with tempfile.TemporaryFile(dir=folder):
                pass
            records = cls(folder, limits)
            records._find()
        except OSError as error:
            raise SettingsError(
                f"state_dir: {folder} cannot hold the results of invocations: {error}; "
                "give state_dir a folder that can be written"
            ) from None
        return records

    def __contains__(self, name: object) -> bool:
        """Whether the invocation is over: finished, or interrupted."""
        with self._lock:
            return name in self._over

    def begin(self, name: str) -> None:
        """Write the marker of an invocation that is about to run."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(self._path(name, STARTED), b"")

    def finish(self, name: str, reply: bytes) -> None:
        """Write the reply of an invocation, and remove what goes beyond the limits."""
        self._write(self._path(name, REPLY), reply)
        self._remove(name, STARTED)
        self._add(name, _Over(is_finished=True, at=time.time(), size=len(reply)))
        self._prune()

    def remember(self, name: str, reply: bytes) -> None:
        """Keep a short reply in memory only, in place of one that could not be written."""
        self._add(name, _Over(is_finished=True, at=time.time(), size=0, reply=reply))
        self._prune()

    def interrupt(self, name: str) -> None:
        """Know an invocation that ended without a reply; touches no file."""
        self._add(name, _Over(is_finished=False, at=time.time(), size=0))

    def read(self, name: str) -> bytes | None:
        """The reply of an invocation that is over; None when it was interrupted.

        Raises FileNotFoundError when somebody has removed it.
        """
        with self._lock:
            over = self._over.get(name)
        if over is not None and over.reply is not None:
            return over.reply
        try:
            return self._path(name, REPLY).read_bytes()
        except FileNotFoundError:
            if over is not None and not over.is_finished:
                return None
            raise

    def _path(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}{suffix}"

    def _write(self, path: Path, data: bytes) -> None:
        descriptor, part = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=PART, dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(part).replace(path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise

    def _add(self, name: str, over: _Over) -> None:
        with self._lock:
            self._over[name] = over
            self._bytes += over.size

    def _find(self) -> None:
        """Take in what an earlier process has left behind; what it was writing is removed."""
        found: dict[str, _Over] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if OURS.match(entry.name) is None:
                    continue
                path = Path(entry.path)
                name, suffix = path.stem, path.suffix
                with contextlib.suppress(FileNotFoundError):  # several processes may share it
                    status = entry.stat()
                    if suffix == REPLY or (suffix == STARTED and name not in found):
                        size = status.st_size
                        found[name] = _Over(suffix == REPLY, at=status.st_mtime, size=size)
                    elif suffix == PART and status.st_mtime < time.time() - self.limits.seconds:
                        path.unlink()
        for name, over in sorted(found.items(), key=lambda item: item[1].at):
            self._add(name, over)
        self._prune()

    def _prune(self) -> None:
        oldest = time.time() - self.limits.seconds
        with self._lock:
            while len(self._over) > 1:
                name, over = next(iter(self._over.items()))
                if (
                    len(self._over) <= self.limits.records
                    and self._bytes <= self.limits.total_bytes
                    and over.at >= oldest
                ):
                    break
                # Under the lock: nobody can start it again until its files are gone.
                self._remove(name, REPLY, STARTED)
                del self._over[name]
                self._bytes -= over.size

    def _remove(self, name: str, *suffixes: str) -> None:
        for suffix in suffixes:
            # What stays on the disk is removed by the next process that opens the folder.
            with contextlib.suppress(OSError):
                self._path(name, suffix).unlink()
