"""Stand-ins for the programs that shell scripts call: a PATH on which nothing else is.

Each writes its name and arguments into a log, then does what its own bit of bash says.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

# What scripts may call as it is: it changes nothing but files, and is everywhere.
_REAL = [
    "awk",
    "basename",
    "bash",
    "cat",
    "cp",
    "cut",
    "dirname",
    "env",
    "find",
    "git",
    "grep",
    "head",
    "ls",
    "mkdir",
    "mktemp",
    "realpath",
    "rm",
    "sed",
    "sort",
    "touch",
    "tr",
    "xargs",
]

_LOGGED = """#!{bash}
{{ printf '%s' "${{0##*/}}"; printf '\\037%s' "$@"; printf '\\n'; }} >>"$STAND_IN_LOG"
"""


@attrs.frozen
class Run:
    """How a script ended, and the commands of stand-ins that it ran, in order."""

    code: int
    output: str
    errors: str
    calls: list[list[str]]


@attrs.frozen
class Machine:
    """A folder with programs, and the variables under which scripts run."""

    folder: Path
    variables: dict[str, str] = attrs.field(factory=dict)

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    @property
    def log(self) -> Path:
        return self.folder / "calls"

    def add(self, name: str, does: str = "") -> None:
        """A stand-in that is logged."""
        self._write(name, _LOGGED.format(bash=shutil.which("bash")) + does)

    def add_quiet(self, name: str, does: str) -> None:
        """A stand-in whose calls are not of interest."""
        self._write(name, f"#!{shutil.which('bash')}\n{does}")

    def run(
        self, script: Path, *arguments: str, at: Path | None = None, **variables: str | None
    ) -> Run:
        """Run a script of bash. variables: in addition to the machine's; None takes one away."""
        self.log.write_text("")
        whole = {**self.variables, **variables}
        run = subprocess.run(
            ["bash", str(script), *arguments],
            cwd=at or self.folder,
            env={name: value for name, value in whole.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=60,
        )
        calls = [line.split("\037") for line in self.log.read_text().splitlines()]
        return Run(run.returncode, run.stdout, run.stderr, calls)

    def _write(self, name: str, text: str) -> None:
        path = self.programs / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)


def machine(folder: Path, variables: Mapping[str, str]) -> Machine:
    """One with bash and its tools, and the Python of the tests as `python`."""
    made = Machine(folder, dict(variables))
    made.programs.mkdir(parents=True)
    for name in _REAL:
        found = shutil.which(name)
        if found is None:
            raise FileNotFoundError(f"the tests of scripts need {name}")
        (made.programs / name).symlink_to(found)
    made.add_quiet("python", python_stand_in())
    made.variables.update(
        PATH=str(made.programs),
        HOME=str(folder / "home"),
        LANG=os.environ.get("LANG", "C.UTF-8"),
        STAND_IN_LOG=str(made.log),
    )
    return made


def python_stand_in() -> str:
    """Answers what scripts ask of a Python about itself; all else runs on the tests' own."""
    return f"""
case "$*" in
    *purelib*) echo "$STAND_IN_PACKAGES" ;;
    *version_info*) echo "${{STAND_IN_PYTHON-3.12}}" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
