"""install_slime.sh, on a machine whose uv and git make what the real ones would.

SGLang and Megatron-LM are a few lines each, and slime's patches fit them; git applies them itself.
"""

import re
import shlex
import shutil
import sys
from itertools import cycle
from pathlib import Path

import pytest

from tests import slime_real
from tests.script_stand_ins import Machine, Run, machine
from turnleaf.adapters.slime.scripts.made import missing

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "src" / "turnleaf" / "adapters" / "slime" / "scripts"
INSTALL = SCRIPTS / "install_slime.sh"
SLIME = slime_real.TESTED_COMMIT
MEGATRON = "1dcf0dafa884ad52ffb243625717a3471643e087"
PATCHES = ("sglang", "sglang-top_p", "sglang-release_hicache", "sglang-pull_weights")

# In order; @ is the folder of the test, and the interpreter and the pins come after `install`.
TORCH = "torch==2.11.0 torchvision==0.26.0 torchaudio==2.11.0"
GIT_URL = "git+https://github.com"
ROUTER = "sglang_router-0.3.2-cp38-abi3-manylinux_2_28_x86_64.whl"
COMMANDS = f"""
uv pip install --editable '{ROOT}[slime,demo]'
uv pip install --torch-backend=cu130 {TORCH}
uv pip install 'setuptools<80' wheel ninja cmake pybind11
uv pip install einops
uv pip install --no-deps --only-binary flash-attn \
    --index https://wheels.astral.sh/simple/cu130/ flash-attn==2.8.3
uv pip install --no-build-isolation --torch-backend=cu130 \
    --override {SCRIPTS}/overrides.txt 'transformer-engine[pytorch,core-cu13]==2.11.0'
env APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=8 'NVCC_APPEND_FLAGS=--threads 4' \
    uv pip install --no-build-isolation --no-deps --reinstall-package apex \
    'apex @ {GIT_URL}/NVIDIA/apex.git@10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4'
uv pip install --no-build-isolation --torch-backend=cu130 'nvidia-modelopt[torch]>=0.37' {TORCH}
uv pip install --prerelease=allow --torch-backend=cu130 sglang==0.5.15.post1 {TORCH}
env TMS_CUDA_MAJOR=13 \
    uv pip install --no-build-isolation --no-deps --reinstall-package torch-memory-saver \
    'torch-memory-saver @ {GIT_URL}/zhuzilin/torch_memory_saver.git\
@8d30c59ca12a68d9deccbc9c6599076a1218cbc5'
git init --quiet @/Megatron-LM
git -C @/Megatron-LM fetch --depth 1 https://github.com/NVIDIA/Megatron-LM.git {MEGATRON}
git -C @/Megatron-LM -c advice.detachedHead=false checkout --force --detach {MEGATRON}
uv pip install --no-build-isolation --config-settings editable_mode=compat \
    --editable @/Megatron-LM
uv pip install --no-deps \
    --reinstall-package nvidia-cutlass-dsl-libs-base --reinstall-package pyjwt \
    nvidia-cutlass-dsl-libs-base==4.5.2 pyjwt
git init --quiet @/slime
git -C @/slime fetch --depth 1 https://github.com/THUDM/slime.git {SLIME}
git -C @/slime -c advice.detachedHead=false checkout --force --detach {SLIME}
uv pip install --torch-backend=cu130 \
    --requirement @/slime/requirements.txt 'wandb<0.28.2' {TORCH}
uv pip install --no-deps --editable @/slime
uv pip install --no-deps --reinstall-package sglang-router 'sglang-router @ \
https://github.com/zhuzilin/sgl-router/releases/download/v0.3.2-9daabcd/{ROUTER}'
uv pip install --no-config 'numpy<2' 'scipy<1.14' 'pyarrow<26' 'pandas<3.1'
git -C @/Megatron-LM apply @/slime/docker/patch/latest/megatron.patch
"""
PATCH_COMMAND = """
env GIT_CEILING_DIRECTORIES=%LIB% git -C %LIB%/site-packages apply -p2 \
    @/slime/docker/patch/latest/%NAME%.patch
"""

# After the command has done its work: end the script at the Nth that no run before this one had.
STOPPING = """
[ -n "${STAND_IN_STOP-}" ] || exit 0
before=$(grep -cFx -- "$*" "$STAND_IN_DONE")
echo "$*" >>"$STAND_IN_DONE"
if [ "$before" = 0 ]; then
    left=$(($(cat "$STAND_IN_STOP") - 1))
    echo $left >"$STAND_IN_STOP"
    [ $left -gt 0 ] || kill -9 $PPID
fi
exit 0
"""
UV = """
case "$*" in *"${STAND_IN_FAILS-nothing at all}"*) exit "${STAND_IN_FAILS_WITH-1}" ;; esac
case "$*" in *"${STAND_IN_UNDOES-nothing at all}"*) rm "$STAND_IN_PACKAGES/pyjwt.py" ;; esac
%PYTHON% -I -S %UV% "$STAND_IN_PACKAGES" "$STAND_IN_SOURCES/sglang" "$@" || exit 1
"""
GIT = """
folder=$2
case "$*" in
    "init "*) mkdir -p "$3/.git" ;;
    *" fetch "*) [ -d "$folder/.git" ] && touch "$folder/.git/fetched" || exit 128 ;;
    *" checkout "*)
        [ -e "$folder/.git/fetched" ] || exit 128
        cp -r "$STAND_IN_SOURCES/$(basename "$folder")/." "$folder"
        echo "${@: -1}" >"$folder/.git/commit" ;;
    *" rev-parse "*) exec cat "$folder/.git/commit" 2>/dev/null ;;
    *" apply "*--check* | *" apply "*--reverse*) exec %GIT% "$@" ;;
    *" apply "*) %GIT% "$@" || exit 1 ;;
    *) echo "git $*: unexpected" >&2; exit 1 ;;
esac
"""
NVCC = """
[ "${STAND_IN_CUDA-}" != none ] || exit 127
echo "Cuda compilation tools, release ${STAND_IN_CUDA-13.0}, V13.0.88"
"""
DF = (
    'printf "Filesystem 1024-blocks Used Available\\n/dev/x 1 1 %s\\n" "${STAND_IN_FREE-104857600}"'
)


def patch(path: str, line: int, old: str, new: str) -> str:
    """A patch of one line, which the lines around it are told for."""
    around = {number: f"line {number}" for number in range(line - 1, line + 2)}
    return (
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n"
        f"@@ -{line - 1},3 +{line - 1},3 @@\n"
        f" {around[line - 1]}\n-{old}\n+{new}\n {around[line + 1]}\n"
    )


def sources(folder: Path) -> None:
    """What git and uv bring: the later patches of SGLang build on what the first has changed."""
    numbered = "".join(f"line {number}\n" for number in range(1, 10))
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "a.py").write_text(numbered)
    (folder / "Megatron-LM").mkdir()
    (folder / "Megatron-LM" / "a.py").write_text(numbered)
    latest = folder / "slime" / "docker" / "patch" / "latest"
    latest.mkdir(parents=True)
    requirements = "accelerate\nhttpx[http2]\nmemray  # a comment\nqwen_vl_utils # VLM\n\n"
    (folder / "slime" / "requirements.txt").write_text(
        f"{requirements}sglang-router>=0.3.0\nwandb\n"
    )
    (latest / "megatron.patch").write_text(patch("a.py", 2, "line 2", "patched"))
    target = "python/sglang/a.py"
    (latest / "sglang.patch").write_text(patch(target, 2, "line 2", "patched 1"))
    (latest / "sglang-top_p.patch").write_text(patch(target, 2, "patched 1", "patched 2"))
    (latest / "sglang-release_hicache.patch").write_text(patch(target, 5, "line 5", "patched 3"))
    (latest / "sglang-pull_weights.patch").write_text(patch(target, 8, "line 8", "patched 4"))


@pytest.fixture
def empty(tmp_path: Path) -> Machine:
    """CUDA 13, uv, git, and an activated environment of Python 3.12 with nothing in it."""
    return empty_machine(tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, Run]:
    """One on which it has run once, and how. Whoever changes it sees that it is whole again."""
    on = empty_machine(tmp_path_factory.mktemp("installed"))
    return on, install(on)


def empty_machine(tmp_path: Path) -> Machine:
    environment = tmp_path / "env"
    packages = environment / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "done").touch()
    sources(tmp_path / "sources")
    made = machine(
        tmp_path,
        {
            "VIRTUAL_ENV": str(environment),
            "CUDA_HOME": str(tmp_path / "cuda"),
            "STAND_IN_PACKAGES": str(packages),
            "STAND_IN_SOURCES": str(tmp_path / "sources"),
            "STAND_IN_DONE": str(tmp_path / "done"),
        },
    )
    uv = Path(__file__).parent / "uv_stand_in.py"
    made.add("uv", UV.replace("%PYTHON%", sys.executable).replace("%UV%", str(uv)) + STOPPING)
    made.add("git", GIT.replace("%GIT%", str(shutil.which("git"))) + STOPPING)
    made.add_quiet("g++", "")
    made.add_quiet("uname", 'echo "${STAND_IN_SYSTEM-Linux x86_64}"')
    made.add_quiet("df", DF)
    (made.programs / "python").rename(environment / "bin" / "python")
    made.add_quiet("nvcc", NVCC)
    (made.programs / "nvcc").rename(tmp_path / "cuda" / "bin" / "nvcc")
    return made


def install(on: Machine, *arguments: str, **variables: str | None) -> Run:
    return on.run(INSTALL, *arguments, at=on.folder / "data", **variables)


def commands(on: Machine) -> list[list[str]]:
    environment = on.folder / "env"
    text = COMMANDS + "".join(PATCH_COMMAND.replace("%NAME%", name) for name in PATCHES)
    text = text.replace("@/", f"{on.folder}/data/").replace(
        "%LIB%", f"{environment}/lib/python3.12"
    )
    always = ["--python", f"{environment}/bin/python", "--constraint", f"{SCRIPTS}/constraints.txt"]
    found = []
    for line in filter(None, text.splitlines()):
        words = shlex.split(line)
        if "uv" in words:
            at = words.index("install") + 1
            words[at:at] = always
        found.append(words)
    return found


def as_called(words: list[str]) -> list[str]:
    """Without `env` and what it sets."""
    return (
        words
        if words[0] != "env"
        else words[next(i for i, w in enumerate(words) if w in ("uv", "git")) :]
    )


def changes(run: Run) -> list[list[str]]:
    """The commands that change something; git is asked much besides."""
    asks = ("rev-parse", "--check", "--reverse")
    return [call for call in run.calls if not any(ask in call for ask in asks)]


def test_everything_is_installed_in_order_once(installed: tuple[Machine, Run]) -> None:
    on, run = installed
    assert run.code == 0, run.errors
    assert changes(run) == [as_called(words) for words in commands(on)]
    patched = Path(on.variables["STAND_IN_PACKAGES"], "sglang", "a.py").read_text()
    expected = {2: "patched 2", 5: "patched 3", 8: "patched 4"}
    assert patched.splitlines() == [expected.get(n, f"line {n}") for n in range(1, 10)]
    assert (on.folder / "data/Megatron-LM/a.py").read_text().splitlines()[1] == "patched"

    again = install(on, STAND_IN_FREE="1")
    assert (again.code, changes(again)) == (0, [])
    assert again.output.count(" is there\n") == 18


def test_it_goes_on_after_any_command(empty: Machine) -> None:
    stop = empty.folder / "stop"
    every = [" ".join(as_called(words)[1:]) for words in commands(empty)]
    for commands_until in cycle((1, 4, 2)):
        stop.write_text(str(commands_until))
        run = install(empty, STAND_IN_STOP=str(stop))
        if run.code != -9:
            break
    assert run.code == 0, run.errors
    done = [
        line
        for line in (empty.folder / "done").read_text().splitlines()
        if not re.search("rev-parse|--check|--reverse", line)
    ]
    assert list(dict.fromkeys(done)) == every
    # Only the beginnings of steps of several commands are repeated, and no patch.
    repeated = {line for line in done if done.count(line) > 1}
    starts = ("einops", "init", "fetch", "--requirement")
    assert all(any(start in line.split() for start in starts) for line in repeated)
    assert changes(install(empty)) == []


def test_a_dry_run_prints_all_commands_and_changes_nothing(empty: Machine) -> None:
    before = sorted(empty.folder.rglob("*"))
    run = install(empty, "--dry-run")
    empty.log.unlink()
    assert (run.code, run.errors, run.calls) == (0, "", [])
    assert sorted(empty.folder.rglob("*")) == before
    printed = [shlex.split(line) for line in run.output.splitlines() if line and line[0] != "#"]
    assert printed == commands(empty)


def test_a_dry_run_needs_nothing(empty: Machine) -> None:
    for name in ("uv", "git", "g++"):
        (empty.programs / name).unlink()
    run = install(
        empty, "--dry-run", VIRTUAL_ENV=None, CUDA_HOME="/nowhere", STAND_IN_SYSTEM="Darwin arm64"
    )
    assert run.code == 0
    assert len([line for line in run.output.splitlines() if line.startswith("uv ")]) == 14
    stops = "note: an installation would stop here: "
    assert [line.removeprefix(stops).split()[0] for line in run.errors.splitlines()] == [
        "Linux",
        "CUDA_HOME=/nowhere:",
        "uv",
        "git",
        "g++",
        "no",
    ]


def test_a_step_that_fails_is_named_and_tried_again(empty: Machine) -> None:
    failed = install(empty, STAND_IN_FAILS="apex")
    assert failed.code == 1
    assert failed.errors == 'step "Apex" failed; run this again to go on from there\n'
    without = install(empty, STAND_IN_FAILS="apex", STAND_IN_FAILS_WITH="0")
    assert without.code == 1
    assert without.errors == 'step "Apex" left something out: apex is not installed\n'

    undone = install(empty, STAND_IN_UNDOES="--no-config")
    rest = [as_called(words) for words in commands(empty)]
    start = next(at for at, words in enumerate(rest) if "apex" in words)
    assert (undone.code, changes(undone)) == (1, rest[start:])
    assert undone.errors == (
        'a later step undid "CUTLASS and PyJWT" (pyjwt.py of pyjwt is not as it was installed): '
        "run this again\n"
    )
    assert install(empty).code == 0


WHAT = (
    "uninstall",
    "transformer-engine[",
    "editable_mode=compat",
    "pyjwt",
    "sglang-router @",
    *(f"{name}.patch" for name in PATCHES),
)


def test_what_was_taken_away_is_made_again(installed: tuple[Machine, Run]) -> None:
    on, _ = installed
    packages = Path(on.variables["STAND_IN_PACKAGES"])
    (packages / "pyjwt.py").unlink()
    (packages / "nvidia_cutlass_dsl_libs_base.py").write_text("another package's\n")
    next(packages.glob("sglang_router-*.dist-info/direct_url.json")).unlink()
    (on.folder / "data/Megatron-LM/megatron/core/datasets/helpers_cpp.cpython-312.so").unlink()
    (packages / "transformer_engine_cu12-2.11.0.dist-info").mkdir()
    shutil.rmtree(packages / "sglang")
    shutil.copytree(on.folder / "sources" / "sglang", packages / "sglang")

    run = install(on)
    assert run.code == 0, run.errors
    made = [" ".join(call) for call in changes(run)]
    python = f"--python {on.folder}/env/bin/python"
    assert made[0] == f"uv pip uninstall {python} transformer-engine-cu12"
    assert set(made[1:]) <= {" ".join(as_called(words)) for words in commands(on)}
    assert [next(name for name in WHAT if name in command) for command in made] == list(WHAT)


def test_patches_that_lie_below_are_looked_for(installed: tuple[Machine, Run]) -> None:
    """The uppermost is in the files and the lower ones are not: none counts, nor could they be."""
    on, _ = installed
    path = Path(on.variables["STAND_IN_PACKAGES"], "sglang", "a.py")
    whole = path.read_text()
    path.write_text(whole.replace("patched 2", "somebody's"))
    run = install(on)
    path.write_text(whole)
    assert (run.code, changes(run)) == (1, [])
    assert f"sglang.patch is neither in {path.parent} nor can it be applied: " in run.errors
    assert "uv pip install --no-deps --reinstall-package sglang sglang==0.5.15.post1" in run.errors


def test_megatron_that_somebody_changed_is_left_alone(installed: tuple[Machine, Run]) -> None:
    on, _ = installed
    path = on.folder / "data" / "Megatron-LM" / "a.py"
    whole = path.read_text()
    path.write_text(whole.replace("patched", "somebody's"))
    run = install(on)
    path.write_text(whole)
    assert (run.code, changes(run)) == (1, [])
    assert f"megatron.patch is neither in {path.parent} nor can it be applied: " in run.errors
    assert f"git -C {path.parent} checkout --force {MEGATRON}, then run this again" in run.errors


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"STAND_IN_SYSTEM": "Linux aarch64"},
            "Linux on x86_64 is needed, and this is Linux aarch64",
        ),
        ({"CUDA_HOME": "/no"}, "CUDA_HOME=/no: there is no bin/nvcc in it; install the CUDA 13.0"),
        ({"STAND_IN_CUDA": "12.8"}, "its nvcc is of CUDA 12.8, and 13.0 is needed; set CUDA_HOME"),
        ({"STAND_IN_CUDA": "none"}, "its nvcc is of CUDA ?, and 13.0 is needed; set CUDA_HOME"),
        ({"STAND_IN_CUDA": "13.1"}, "its nvcc is of CUDA 13.1, and 13.0 is needed; set CUDA_HOME"),
        (
            {"VIRTUAL_ENV": None},
            "no Python environment is activated: uv venv --python 3.12 && source",
        ),
        ({"STAND_IN_PYTHON": "3.11"}, "has Python 3.11, and 3.12 is needed: uv venv --python 3.12"),
        (
            {"VIRTUAL_ENV": "/no"},
            "the activated environment /no has no Python that starts: uv venv",
        ),
        (
            {"STAND_IN_FREE": "12582912"},
            "has 12 GB free, and the environment takes 40 GB: free some",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_machine_that_will_not_do_is_told(
    empty: Machine, variables: dict[str, str | None], message: str
) -> None:
    run = install(empty, **variables)
    assert (run.code, run.calls) == (2, [])
    assert message in run.errors
    assert len(run.errors.splitlines()) == 1


def test_all_that_is_wrong_is_told_at_once(empty: Machine) -> None:
    for name in ("uv", "git", "g++"):
        (empty.programs / name).unlink()
    (empty.folder / "data" / "slime").mkdir()
    run = install(empty, CUDA_HOME="/no", STAND_IN_PYTHON="3.13")
    assert run.code == 2
    assert [line.split()[0] for line in run.errors.splitlines()] == [
        "CUDA_HOME=/no:",
        "uv",
        "git",
        "g++",
        "the",
        f"{empty.folder}/data/slime",
    ]


def test_checkouts_of_others_are_left_alone(empty: Machine) -> None:
    for name in ("Megatron-LM", "slime"):
        (empty.folder / "data" / name / ".git").mkdir(parents=True)
        (empty.folder / "data" / name / ".git" / "commit").write_text("abc\n")
    run = install(empty)
    assert (run.code, changes(run)) == (2, [])
    folder = empty.folder / "data"
    assert run.errors.splitlines() == [
        f"{folder}/{name} is at commit abc, and {commit} is needed: move it away, or check that out"
        for name, commit in (("Megatron-LM", MEGATRON), ("slime", SLIME))
    ]


def test_only_one_option_is_known(empty: Machine) -> None:
    run = install(empty, "--dryrun")
    assert (run.code, run.errors, run.calls) == (2, "usage: install_slime.sh [--dry-run]\n", [])


def test_an_installed_package_has_its_own_pins(empty: Machine, tmp_path: Path) -> None:
    """As a wheel lays it out: the pins, a link in the clone, are a file."""
    packages = Path(empty.variables["STAND_IN_PACKAGES"])
    scripts = packages / "turnleaf" / "adapters" / "slime" / "scripts"
    shutil.copytree(SCRIPTS, scripts)
    (packages / "turnleaf-0.7.0.dist-info").mkdir()
    (packages / "turnleaf-0.7.0.dist-info" / "METADATA").write_text(
        "Name: turnleaf\nVersion: 0.7.0\n"
    )
    run = empty.run(scripts / INSTALL.name, "--dry-run", at=empty.folder / "data")
    assert run.code == 0, run.errors
    first = next(line for line in run.output.splitlines() if line.startswith("uv "))
    assert first.endswith("scripts/constraints.txt 'turnleaf[slime,demo]==0.7.0'")
    pins = (ROOT / "constraints" / "slime.txt").read_text()
    assert (scripts / "constraints.txt").read_text() == pins


def test_sglangs_own_pins_are_those_of_the_constraints() -> None:
    """SGLang 0.5.15.post1 requires these to the digit; with others it could not be installed."""
    pins = set((ROOT / "constraints" / "slime.txt").read_text().split())
    assert {"openai==2.6.1", "openai-harmony==0.0.4", "transformers==5.12.1"} <= pins


@pytest.mark.parametrize(
    ("want", "problem"),
    [
        ("torch", None),
        ("Torch==2.11.0", None),
        ("torch==2.11", "torch is 2.11.0, not ==2.11"),
        ("torch>=2.11", None),
        ("torch<2.11.1", None),
        ("torch<2.11", "torch is 2.11.0, not <2.11"),
        ("torch>=2.9", None),
        ("some.package<10", None),
        ("some_package<9", "some_package is 9.0.post1, not <9"),
        ("other", "other is not installed"),
        ("torch@abc", "torch is installed from a package index, not abc"),
        ("here@/a folder", None),
        ("here@/folder", "here is installed from file:///a folder, not /folder"),
        ("whole:some-package", "gone.py of some-package is not as it was installed"),
        ("no:other", None),
        ("no:torch", "torch is installed"),
        ("file:torch-*", None),
        ("file:no*.so", "/no*.so is not there"),
        ("a b", "a b is not understood"),
    ],
)
def test_what_is_there_is_known(tmp_path: Path, want: str, problem: str | None) -> None:
    for name in ("torch-2.11.0+cu130", "some_package-9.0.post1", "here-1.dev0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    (tmp_path / "here-1.dev0.dist-info" / "direct_url.json").write_text(
        '{"url": "file:///a%20folder/", "dir_info": {"editable": true}}'
    )
    (tmp_path / "some_package-9.0.post1.dist-info" / "RECORD").write_text("gone.py,sha256=x,1\n")
    found = missing(tmp_path, [want])
    assert (found or "").endswith(problem or "")
    assert (found is None) == (problem is None)
