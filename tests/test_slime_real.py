"""How the tests reach a checkout of slime; some of these need one, as `make test-slime` has it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import slime_host, slime_real

ROOT = Path(__file__).parents[1]

IMPORTS = """
import sys
from pathlib import Path
from tests.slime_real import prepare

prepare(sys.argv[1])
prepare(sys.argv[1])
from sglang.srt.server_args import ServerArgs
from slime.rollout import sglang_rollout
import tests.waiting

print(Path(sglang_rollout.__file__).parents[2])
print(Path(tests.waiting.__file__).parents[1])
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What is in slime's repository, as far as `prepare` looks; `tests` would hide turnleaf's."""
    for name in ("slime/__init__.py", "slime/rollout/sglang_rollout.py", "tests/__init__.py"):
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "checkout"


def test_a_checkout_is_importable_without_its_other_folders(checkout: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTS, str(checkout)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (run.stdout.split(), run.stderr) == ([str(checkout), str(ROOT)], "")


def test_a_folder_without_slime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} is no checkout of slime"):
        slime_real.prepare(tmp_path)


def test_another_slime_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slime", ModuleType("slime"))
    with pytest.raises(RuntimeError, match="another slime is imported"):
        slime_real.prepare(checkout)


def test_the_commit_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        run = subprocess.run(
            ["git", *identity, *arguments], cwd=checkout, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    untested = f"the tested commit is {slime_real.TESTED_COMMIT}"
    assert slime_real.describe(checkout) == f"slime: {checkout}, of an unknown commit; {untested}"

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "slime")
    commit = git("rev-parse", "HEAD")
    assert slime_real.describe(checkout) == f"slime: {checkout}, commit {commit}; {untested}"

    monkeypatch.setattr(slime_real, "TESTED_COMMIT", commit)
    assert slime_real.describe(checkout) == f"slime: {checkout}, commit {commit}"

    (checkout / "slime" / "__init__.py").write_text("patched = True\n")
    assert f"commit {commit}-dirty; the tested" in slime_real.describe(checkout)


if slime_host.SLIME_DIR:

    @pytest.mark.slime
    def test_arguments_are_those_of_slimes_own_parser() -> None:
        slimes = vars(slime_real.default_arguments())
        ours = vars(slime_host.slime_args())
        different = {name for name in ours.keys() & slimes.keys() if ours[name] != slimes[name]}
        derived = {
            "eval_function_path",
            "global_batch_size",
            "grpo_std_normalization",
            "over_sampling_batch_size",
        }
        chosen = {
            "hf_checkpoint",
            "input_key",
            "rollout_max_response_len",
            "rollout_num_gpus",
            "sglang_router_ip",
            "use_dynamic_batch_size",
        }
        assert different == derived | chosen

    @pytest.mark.slime
    def test_slime_takes_the_command_of_the_page() -> None:
        page = (ROOT / "docs" / "slime.md").read_text()
        command = re.findall(r"```bash\n(.+?)```", page, re.DOTALL)[0]
        added = re.findall(r"TURNLEAF_ARGS=\((.+?)\n\)", command, re.DOTALL)[0]
        whole = command.partition("train.py")[2].replace("\\\n", " ")
        for name, value in (("MODEL_ARGS", ""), ("TURNLEAF_ARGS", added)):
            whole = whole.replace(f'"${{{name}[@]}}"', value)
        arguments, unknown = slime_real.argument_parser().parse_known_args(shlex.split(whole))
        others = {"optimizer", "lr-decay-style", "weight-decay", "sequence-parallel"}
        others |= {"adam-beta1", "adam-beta2", "attention-backend", "sglang-mem-fraction-static"}
        groups = ("-parallel-size", "recompute-", "-dropout", "-in-fp32")
        flags = {text.removeprefix("--") for text in unknown if text.startswith("--")}
        assert {flag for flag in flags if not any(group in flag for group in groups)} == others
        assert arguments.custom_generate_function_path == "turnleaf.adapters.slime.generate"
        assert (arguments.use_dynamic_batch_size, arguments.max_tokens_per_gpu) == (True, 16384)
        assert (arguments.input_key, arguments.prompt_data) == ("prompt", "/root/run/rows.jsonl")

    @pytest.mark.slime
    def test_slime_logs_the_metrics_of_the_page() -> None:
        page = (ROOT / "docs" / "training.md").read_text()
        watched = page.split("\n## What to watch\n")[1].split("\n## ")[0]
        names = re.findall(r"`((?:rollout|perf|train)/[^`]+)`", watched)
        sources = [path.read_text() for path in Path(slime_host.SLIME_DIR, "slime").rglob("*.py")]
        # What is filled in, and the statistic, are not in its text.
        literals = {re.sub(r"[0-9.]+$|(?<=/)mean$", "", name).partition("/")[2] for name in names}
        missing = {name for name in literals if not any(name in text for text in sources)}
        assert len(literals) > 15
        assert missing == set()

    @pytest.mark.slime
    def test_the_manager_is_a_plain_class() -> None:
        manager = slime_real.rollout_manager_class()
        assert isinstance(manager, type)
        assert hasattr(manager.__new__(manager), "_convert_samples_to_train_data")
