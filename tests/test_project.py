"""The promises that the project around the code makes."""

import json
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = sorted((ROOT / "constraints").glob("*.txt"))
ADDITIONS = {"clients.txt", "interop.txt", "openai3.txt", "test-slime.txt"}
APART = {"sglang.txt"}
COMPLETE = [path for path in CONSTRAINTS if path.name not in ADDITIONS | APART]

BASE = {"anyio", "attr", "attrs", "cattr", "cattrs", "numpy"}
NEEDED_BY_BASE = {"idna", "sniffio", "typing_extensions"}

NEW_MODULES = """
import json, sys
before = set(sys.modules)
import turnleaf
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def normalised(requirement: str) -> str:
    """The package that a requirement names, as constraint files spell it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_importing_turnleaf_loads_only_its_base_dependencies() -> None:
    run = subprocess.run(
        [sys.executable, "-I", "-c", NEW_MODULES], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(run.stdout))
    assert "turnleaf" in loaded
    # Some builds of numpy register what Cython compiled them with as modules.
    loaded = {name for name in loaded if "cython" not in name}
    assert loaded - sys.stdlib_module_names - {"turnleaf"} <= BASE | NEEDED_BY_BASE


def test_constraint_files_exist() -> None:
    assert {path.name for path in CONSTRAINTS} == {"dev.txt", "slime.txt"} | ADDITIONS | APART


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_constraints_are_sorted_name_and_version_lines(path: Path) -> None:
    lines = path.read_text().splitlines()
    wrong = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.+]*", line)]
    assert wrong == []
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))
    assert "turnleaf" not in names


@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.name)
def test_constraints_pin_every_dependency(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = {normalised(name) for name in chain(project["dependencies"], *extras)}
    pinned = {line.partition("==")[0] for line in path.read_text().splitlines()}
    script = (ROOT / "scripts" / "make-venv").read_text().replace("\\\n", " ")
    (apart,) = re.findall(r"--no-deps (.+)", script)
    assert (wanted - {"turnleaf"}) | set(apart.split()) <= pinned


def test_what_slime_fixes_is_pinned_for_slime() -> None:
    lines = set((ROOT / "constraints" / "slime.txt").read_text().splitlines())
    assert {
        "numpy==1.26.4",
        "openai==2.6.1",
        "tokenizers==0.22.2",
        "transformers==5.12.1",
    } <= lines


def tracked_files() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return listing.stdout.splitlines()


def test_every_shell_script_is_linted() -> None:
    scripts = [
        path
        for path in tracked_files()
        if path.endswith(".sh") or re.match(rb"#!.*sh\n", (ROOT / path).read_bytes())
    ]
    lint = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True)
    (command,) = [line for line in lint.stdout.splitlines() if "/shellcheck " in line]
    assert sorted(command.split()[2:]) == sorted(scripts)


def test_no_lock_file_is_tracked() -> None:
    locks = [
        path
        for path in tracked_files()
        if re.fullmatch(r"pylock.*\.toml|.*\.lock|package-lock\.json|.*lock\.yaml", Path(path).name)
    ]
    assert locks == []


def test_a_skip_fails_when_everything_is_required(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makepyfile(
        test_one="import pytest\ndef test(): pytest.skip('no reason')",
        test_module="import pytest\npytest.importorskip('turnleaf_is_missing_this')",
        test_expected="import pytest\n@pytest.mark.xfail\ndef test(): raise ValueError",
    )

    def outcomes() -> dict[str, int]:
        run = pytester.runpytest_subprocess("--continue-on-collection-errors")
        return run.parseoutcomes()

    monkeypatch.setenv("TURNLEAF_REQUIRE_ALL", "1")
    assert outcomes() == {"failed": 1, "errors": 1, "xfailed": 1}
    monkeypatch.delenv("TURNLEAF_REQUIRE_ALL")
    assert outcomes() == {"skipped": 2, "xfailed": 1}


def test_markdown_blocks_are_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makefile(
        ".md",
        good="```python\nassert 1 + 1 == 2\n```\n",
        bad="```python\nassert 1 + 1 == 3\n```\n",
        bare="No code here.\n",
    )
    outcomes = pytester.runpytest_subprocess("good.md", "bad.md", "bare.md").parseoutcomes()
    assert outcomes == {"passed": 1, "failed": 1}
