"""What the steps of install_slime.sh have not made yet. Runs by itself, on Python's own.

    python made.py SITE_PACKAGES

Reads lines of a step's name, a tab and what is wanted of it, each of them one of

- `name`, `name==1.2.0`, `name<1.2`, `name>=1.2`: a distribution, and its version, without a local
  label such as `+cu130`; only `==` looks at more than its numbers
- `name@commit` or `name@…address`: a distribution that was installed from that commit, or else from
  an address that ends so
- `whole:name`: all files of a distribution are there as they were installed
- `no:name`: the distribution is not there
- `file:pattern`: a file of that name in the folder

Prints the name of each step of which something is lacking, a tab, and what that is.
"""

import base64
import csv
import hashlib
import json
import re
import sys
from pathlib import Path
from urllib.parse import unquote


def missing(packages: Path, wanted: list[str]) -> str | None:
    """The first of what is wanted that is not there, in words; None when all are."""
    installed = {
        _normalised(folder.name.partition("-")[0]): folder
        for folder in packages.glob("*.dist-info")
    }
    for want in wanted:
        problem = _problem(packages, installed, want)
        if problem is not None:
            return problem
    return None


def _problem(packages: Path, installed: dict[str, Path], want: str) -> str | None:
    if want.startswith("file:"):
        pattern = want.removeprefix("file:")
        return None if any(packages.glob(pattern)) else f"{packages / pattern} is not there"
    match = re.fullmatch(r"(whole:|no:)?([A-Za-z0-9._-]+?)(?:(==|<|>=|@)(.+))?", want)
    if match is None:
        return f"{want} is not understood"
    kind, name, relation, text = match.groups()
    folder = installed.get(_normalised(name))
    if kind == "no:":
        return f"{name} is installed" if folder else None
    if folder is None:
        return f"{name} is not installed"
    if kind == "whole:":
        changed = _changed(folder)
        return f"{changed} of {name} is not as it was installed" if changed else None
    if relation == "@":
        origin = _origin(folder)
        return None if origin.endswith(text) else f"{name} is installed from {origin}, not {text}"
    version = folder.name.removesuffix(".dist-info").partition("-")[2].partition("+")[0]
    if relation and not _fits(version, relation, text):
        return f"{name} is {version}, not {relation}{text}"
    return None


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _fits(version: str, relation: str, bound: str) -> bool:
    if relation == "==":
        return version == bound
    have, limit = _numbers(version), _numbers(bound)
    return have < limit if relation == "<" else have >= limit


def _numbers(version: str) -> tuple[int, ...]:
    """The release's numbers without zeros at their end: 1.10.0.post1 is (1, 10)."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _origin(folder: Path) -> str:
    """Which commit it was installed from, or else which address (PEP 610)."""
    recorded = folder / "direct_url.json"
    if not recorded.is_file():
        return "a package index"
    origin = json.loads(recorded.read_text())
    commit = origin.get("vcs_info", {}).get("commit_id")
    return commit or unquote(origin["url"]).rstrip("/")


def _changed(folder: Path) -> str | None:
    """The first file that is gone or differs from what was installed; None when all are as then."""
    with (folder / "RECORD").open(newline="") as record:
        for name, recorded, *_ in csv.reader(record):
            path = folder.parent / name
            if not path.is_file():
                return name
            mode, _, value = recorded.partition("=")
            if mode and _hash(path, mode) != value:
                return name
    return None


def _hash(path: Path, mode: str) -> str:
    digest = hashlib.new(mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def main(packages: Path) -> None:
    """Read what is wanted from standard input; say what is lacking on standard output."""
    wanted: dict[str, list[str]] = {}
    for line in sys.stdin:
        step, _, want = line.rstrip("\n").partition("\t")
        wanted.setdefault(step, []).append(want)
    for step, wants in wanted.items():
        problem = missing(packages, wants)
        if problem is not None:
            sys.stdout.write(f"{step}\t{problem}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
