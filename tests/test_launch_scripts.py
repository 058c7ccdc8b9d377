"""examples/math_agent's train.sh and eval.sh, on a machine of stand-ins."""

import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from tests import slime_host, slime_real
from tests.script_stand_ins import Machine, Run, machine
from turnleaf.core import Settings

FOLDER = Path(__file__).parents[1] / "examples" / "math_agent"
TRAIN, EVAL = FOLDER / "train.sh", FOLDER / "eval.sh"
MARKER = ".turnleaf-checkpoints"
SGLANG = r"^(sglang::|[^ ]*python[0-9.]* -m sglang[._])"

MODEL_ARGS = ["--swiglu", "--num-layers", "28", "--moe-layer-freq", "[0]*1+[1]*2"]

# Of both scripts, then of one; @ is the folder of the test.
COMMON = """
--custom-generate-function-path turnleaf.adapters.slime.generate
--custom-reward-post-process-path turnleaf.adapters.slime.normalize_episode_rewards
--custom-config-path @/config.yaml
--swiglu --num-layers 28 --moe-layer-freq '[0]*1+[1]*2'
--hf-checkpoint @/model
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --num-gpus-per-node 8 --colocate
--input-key prompt --rollout-max-context-len 14336 --rollout-max-response-len 2048
--eval-prompt-data gsm8k @/test.jsonl --n-samples-per-eval-prompt 1 --eval-temperature 0
--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.6 --sglang-cuda-graph-max-bs 32
"""
TRAINING = """
--ref-load @/model --load @/checkpoints/megatron --save @/checkpoints/megatron
--save-hf '@/checkpoints/hf/{rollout_id}' --save-interval 100
--prompt-data @/train.jsonl --rollout-shuffle --num-rollout 100 --rollout-batch-size 64
--n-samples-per-prompt 4 --num-steps-per-rollout 1 --rollout-temperature 1.0 --eval-interval 10
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
--entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.98 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
--use-precision-aware-optimizer --override-opt-param-scheduler
--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size
--max-tokens-per-gpu 14336 --balance-data
--attention-backend fused --attention-dropout 0.0 --hidden-dropout 0.0
--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
"""
EVALUATION = """
--debug-rollout-only --num-rollout 0 --eval-interval 1
--prompt-data @/test.jsonl --rollout-batch-size 1
"""
WANDB = "--use-wandb --wandb-project turnleaf-math-agent --wandb-group qwen3-0.6B"

# The names that are not in slime's own parser. Both whole commands, with the model arguments of
# qwen3-0.6B, went through slime's parse_args on Megatron-LM at 1dcf0da with slime's patch.
OF_MEGATRON = {
    "--accumulate-allreduce-grads-in-fp32",
    "--adam-beta1",
    "--adam-beta2",
    "--attention-backend",
    "--attention-dropout",
    "--attention-softmax-in-fp32",
    "--hidden-dropout",
    "--lr-decay-style",
    "--optimizer",
    "--optimizer-cpu-offload",
    "--overlap-cpu-optimizer-d2h-h2d",
    "--override-opt-param-scheduler",
    "--sequence-parallel",
    "--tensor-model-parallel-size",
    "--use-precision-aware-optimizer",
    "--weight-decay",
}
# Options of SGLang 0.5.15.post1's server, behind --sglang.
OF_SGLANG = {"--sglang-cuda-graph-max-bs", "--sglang-mem-fraction-static"}
# slime reads this one before all others, with a parser of its own.
OF_SLIME_EARLY = {"--debug-rollout-only"}

PGREP = '[ -e "$STAND_IN_STATE/sglang" ] && cat "$STAND_IN_STATE/sglang"'
# The user's number and name, the process, its state and its name.
PS = """
printf '%s\\n' '0 root 1 Ss init' "${STAND_IN_OTHERS-}"
[ ! -e "$STAND_IN_STATE/raylet" ] || echo "$EUID me $(cat "$STAND_IN_STATE/raylet") Sl raylet"
"""
PKILL = """
[ -e "$STAND_IN_STATE/sglang" ] || exit 1
[ "$1" = "${STAND_IN_ENDED_BY--TERM}" ] && rm "$STAND_IN_STATE/sglang"
exit 0
"""
RAY = """
case "$1" in
    stop) [ -n "${STAND_IN_RAYLET_STAYS-}" ] || rm -f "$STAND_IN_STATE/raylet" ;;
    start)
        echo 4711 >"$STAND_IN_STATE/raylet"
        printf '%s' "$LD_LIBRARY_PATH" >"$STAND_IN_STATE/path" ;;
    job) exit "${STAND_IN_JOB-0}" ;;
esac
"""
NVIDIA_SMI = """
[ -z "${STAND_IN_NO_DRIVER-}" ] || { echo "NVIDIA-SMI has failed"; exit 9; }
for capability in ${STAND_IN_GPUS-9.0 9.0 9.0 9.0 9.0 9.0 9.0 9.0}; do echo "$capability"; done
"""


@pytest.fixture
def gpus(tmp_path: Path) -> Machine:
    """Eight H100s, with all that the scripts ask for; `state` holds which processes run."""
    slime = tmp_path / "slime"
    models = slime / "scripts" / "models"
    models.mkdir(parents=True)
    (slime / "train.py").touch()
    (models / "qwen3-0.6B.sh").write_text(f"MODEL_ARGS=({shlex.join(MODEL_ARGS)})\necho noise\n")
    (models / "derived.sh").write_text('source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-0.6B.sh"\n')
    (models / "empty.sh").write_text("OTHER_ARGS=(--swiglu)\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("gateway_port: 9090\n")
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("{}\n")
    for name in ("cuda", "nccl", "cudnn"):
        (tmp_path / "packages" / "nvidia" / name / "lib").mkdir(parents=True)
    (tmp_path / "cuda" / "lib64").mkdir(parents=True)
    (tmp_path / "state").mkdir()
    made = machine(
        tmp_path,
        {
            "SLIME_DIR": str(slime),
            "MODEL_DIR": str(tmp_path / "model"),
            "TRAIN_DATA_PATH": str(tmp_path / "train.jsonl"),
            "VAL_DATA_PATH": str(tmp_path / "test.jsonl"),
            "MODEL_TYPE": "qwen3-0.6B",
            "CONFIG": str(tmp_path / "config.yaml"),
            "CUDA_HOME": str(tmp_path / "cuda"),
            "STAND_IN_PACKAGES": str(tmp_path / "packages"),
            "STAND_IN_STATE": str(tmp_path / "state"),
        },
    )
    made.add("nvidia-smi", NVIDIA_SMI)
    made.add("ray", RAY)
    made.add("turnleaf", 'exit "${STAND_IN_CHECK-0}"')
    made.add("pkill", PKILL)
    made.add_quiet("pgrep", PGREP)
    made.add_quiet("ps", PS)
    made.add_quiet("sleep", "")
    return made


def words(text: str, folder: Path) -> list[str]:
    return shlex.split(text.replace("@", str(folder)))


def submitted(run: Run) -> list[str]:
    """What slime's train.py was given, without the environment."""
    assert run.code == 0, run.errors
    call = next(call for call in run.calls if call[:3] == ["ray", "job", "submit"])
    whole = call[call.index("--") + 1 :]
    assert whole[1].endswith("/train.py")
    assert whole[-2] == "--train-env-vars"
    return whole[2:-2]


def names(arguments: Iterable[str]) -> set[str]:
    return {word for word in arguments if word.startswith("--")}


def environments(run: Run) -> list[dict[str, str]]:
    """The job's, and that of slime's Megatron actors."""
    call = next(call for call in run.calls if call[:3] == ["ray", "job", "submit"])
    of_job = json.loads(call[call.index("--runtime-env-json") + 1])["env_vars"]
    return [of_job, json.loads(call[-1])]


# --- what is run -----------------------------------------------------------------------------


def test_training_runs_what_it_should_in_order(gpus: Machine) -> None:
    run = gpus.run(TRAIN)
    assert submitted(run) == words(COMMON + TRAINING, gpus.folder)
    check = ["turnleaf", "slime", "check", "--config", f"{gpus.folder}/config.yaml", "--data"]
    assert run.calls[:-1] == [
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
        [*check, f"{gpus.folder}/train.jsonl"],
        [*check, f"{gpus.folder}/test.jsonl"],
        ["pkill", "-TERM", "-u", str(os.geteuid()), "-f", SGLANG],
        ["ray", "stop", "--force"],
        shlex.split(
            "ray start --head --num-gpus 8 --disable-usage-stats "
            "--dashboard-host 127.0.0.1 --dashboard-port 8265"
        ),
    ]
    call = run.calls[-1]
    assert call[:5] == ["ray", "job", "submit", "--address", "http://127.0.0.1:8265"]
    assert call[7:10] == ["--", f"{gpus.programs}/python", f"{gpus.folder}/slime/train.py"]


def test_evaluation_runs_what_it_should_in_order(gpus: Machine) -> None:
    run = gpus.run(EVAL, TRAIN_DATA_PATH=None, STAND_IN_GPUS="8.0 " * 8)
    assert submitted(run) == words(COMMON + EVALUATION, gpus.folder)
    assert [call[0] for call in run.calls] == [
        "nvidia-smi",
        "turnleaf",
        "pkill",
        "ray",
        "ray",
        "ray",
    ]
    assert run.calls[1][-1] == f"{gpus.folder}/test.jsonl"
    assert not (gpus.folder / "checkpoints").exists()


def test_rows_to_evaluate_on_are_those_of_training_by_default(gpus: Machine) -> None:
    run = gpus.run(TRAIN, VAL_DATA_PATH=None)
    arguments = submitted(run)
    assert arguments[arguments.index("gsm8k") + 1] == f"{gpus.folder}/train.jsonl"
    assert len([call for call in run.calls if call[0] == "turnleaf"]) == 1


def test_a_part_of_the_rows_can_be_named(gpus: Machine) -> None:
    run = gpus.run(TRAIN, VAL_DATA_PATH="test.jsonl@[0:100]")
    arguments = submitted(run)
    part = f"{gpus.folder}/test.jsonl@[0:100]"
    assert arguments[arguments.index("gsm8k") + 1] == part
    assert [call[-1] for call in run.calls if call[0] == "turnleaf"][1] == part


def test_arguments_of_the_command_line_come_last(gpus: Machine) -> None:
    added = ["--lr", "2e-6", "--apply-chat-template-kwargs", '{"enable_thinking": false}']
    assert submitted(gpus.run(TRAIN, *added)) == words(COMMON + TRAINING, gpus.folder) + added
    assert submitted(gpus.run(EVAL, *added))[-4:] == added


def test_a_model_script_may_build_on_another(gpus: Machine) -> None:
    arguments = submitted(gpus.run(TRAIN, MODEL_TYPE="derived"))
    start = arguments.index("--swiglu")
    assert arguments[start : start + len(MODEL_ARGS)] == MODEL_ARGS


def test_paths_may_hold_spaces(gpus: Machine) -> None:
    folder = gpus.folder / "my model's"
    (gpus.folder / "model").rename(folder)
    arguments = submitted(gpus.run(TRAIN, MODEL_DIR=str(folder), CKPTS_DIR="check points"))
    assert arguments[arguments.index("--hf-checkpoint") + 1] == str(folder)
    assert arguments[arguments.index("--load") + 1] == f"{gpus.folder}/check points/megatron"


def test_the_key_of_wandb_is_on_no_command_line(gpus: Machine) -> None:
    run = gpus.run(TRAIN, WANDB_API_KEY="secret-key")
    assert submitted(run) == words(COMMON + TRAINING + WANDB, gpus.folder)
    assert "secret-key" not in run.output + run.errors + str(run.calls)


def test_the_environment_finds_one_cuda(gpus: Machine) -> None:
    cuda, packages = f"{gpus.folder}/cuda", f"{gpus.folder}/packages"
    empty = f"{gpus.folder}/home/.cache/turnleaf/no-cuda-12"
    before = f"/opt/lib:/usr/local/cuda-12.8/lib64::/usr/local/cuda/lib64:{cuda}/lib64:/opt/lib:/z"
    run = gpus.run(TRAIN, LD_LIBRARY_PATH=before, PYTHONPATH="/mine")
    expected = {
        "LD_LIBRARY_PATH": ":".join(
            [
                empty,
                *(f"{packages}/nvidia/{name}/lib" for name in ("cuda", "cudnn", "nccl")),
                f"{cuda}/lib64",
                "/opt/lib",
                "/z",
            ]
        ),
        "CUDA_HOME": cuda,
        "CUDNN_HOME": f"{packages}/nvidia/cudnn",
        "CUDNN_PATH": f"{packages}/nvidia/cudnn",
        "CUDNN_FRONTEND_CUDART_LIB_NAME": "libcudart.so.13",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{gpus.folder}/slime:/mine",
    }
    assert environments(run) == [expected, expected]
    assert (gpus.folder / "state" / "path").read_text() == expected["LD_LIBRARY_PATH"]
    assert (Path(empty) / "libcudart.so.12").read_bytes() == b""


def test_the_job_says_how_the_script_ends(gpus: Machine) -> None:
    assert gpus.run(TRAIN, STAND_IN_JOB="3").code == 3


# --- what is left from before ----------------------------------------------------------------


@pytest.mark.parametrize("signals", [["-TERM"], ["-TERM", "-KILL"]])
def test_old_processes_of_sglang_are_ended(gpus: Machine, signals: list[str]) -> None:
    (gpus.folder / "state" / "sglang").write_text("4242\n")
    run = gpus.run(TRAIN, STAND_IN_ENDED_BY=signals[-1])
    assert submitted(run)
    assert [call[1] for call in run.calls if call[0] == "pkill"] == signals


def test_sglang_that_cannot_be_ended_stops_it(gpus: Machine) -> None:
    (gpus.folder / "state" / "sglang").write_text("4242\n")
    run = gpus.run(TRAIN, STAND_IN_ENDED_BY="never")
    assert run.code == 1
    assert run.errors == (
        "old processes of SGLang cannot be ended: kill -9 4242, then start again\n"
    )
    assert run.calls[-1][0] == "pkill"


def test_a_raylet_that_is_left_stops_it(gpus: Machine) -> None:
    (gpus.folder / "state" / "raylet").write_text("4711\n")
    assert submitted(gpus.run(TRAIN))

    run = gpus.run(TRAIN, STAND_IN_RAYLET_STAYS="1")
    assert run.code == 1
    assert "`ray stop` left a raylet" in run.errors
    assert "kill -9 4711, then start again" in run.errors
    assert run.calls[-1] == ["ray", "stop", "--force"]


def test_a_raylet_that_has_ended_is_none(gpus: Machine) -> None:
    """Until its parent collects it, which in a container without an init nobody does."""
    ended = f"{os.geteuid()} me 4712 Z raylet\n4711 ann 9 Zl raylet <defunct>"
    assert submitted(gpus.run(TRAIN, STAND_IN_OTHERS=ended))


def test_what_the_check_finds_stops_it_first(gpus: Machine) -> None:
    mine = checkpoints(gpus)
    run = gpus.run(TRAIN, STAND_IN_CHECK="1")
    assert run.code == 1
    assert "turnleaf slime check found what is wrong; nothing has been started" in run.errors
    assert [call[0] for call in run.calls] == ["nvidia-smi", "turnleaf"]
    assert (mine / "megatron" / "latest_checkpointed_iteration.txt").exists()


# --- checkpoints -----------------------------------------------------------------------------


def checkpoints(gpus: Machine) -> Path:
    """A folder as an earlier run leaves it, with a file of the user's own."""
    folder = gpus.folder / "checkpoints"
    for name in ("megatron", "hf/99"):
        (folder / name).mkdir(parents=True)
    (folder / MARKER).touch()
    (folder / "megatron" / "latest_checkpointed_iteration.txt").write_text("99")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_checkpoints_of_an_earlier_run_are_cleared(gpus: Machine) -> None:
    folder = checkpoints(gpus)
    assert submitted(gpus.run(TRAIN))
    assert sorted(path.name for path in folder.iterdir()) == [MARKER, "notes.txt"]
    assert submitted(gpus.run(TRAIN))


def test_checkpoints_are_kept_to_resume_from(gpus: Machine) -> None:
    folder = checkpoints(gpus)
    before = sorted(folder.rglob("*"))
    assert submitted(gpus.run(TRAIN, RESUME="1")) == words(COMMON + TRAINING, gpus.folder)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("content", ["notes.txt", "megatron", "hf"])
def test_a_folder_of_others_is_never_cleared(gpus: Machine, content: str) -> None:
    folder = gpus.folder / "mine"
    (folder / content).mkdir(parents=True)
    run = gpus.run(TRAIN, CKPTS_DIR="mine")
    assert (run.code, run.calls) == (2, [])
    assert run.errors == (
        f"CKPTS_DIR={folder} is not empty, and train.sh did not make it (there is no {MARKER}): "
        "name a new folder\n"
    )
    assert (folder / content).exists()


def test_what_the_run_reads_is_not_cleared(gpus: Machine) -> None:
    folder = checkpoints(gpus)
    (folder / "hf" / "99" / "config.json").write_text("{}")
    run = gpus.run(TRAIN, MODEL_DIR=str(folder / "hf" / "99"))
    assert (run.code, run.calls) == (2, [])
    assert f"MODEL_DIR={folder}/hf/99 is in CKPTS_DIR={folder}, which is cleared" in run.errors
    assert submitted(gpus.run(TRAIN, MODEL_DIR=str(folder / "hf" / "99"), RESUME="1"))


def test_an_empty_folder_is_taken(gpus: Machine) -> None:
    (gpus.folder / "new").mkdir()
    assert submitted(gpus.run(TRAIN, CKPTS_DIR="new"))
    assert [path.name for path in (gpus.folder / "new").iterdir()] == [MARKER]


# --- dry runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [TRAIN, EVAL], ids=["train", "eval"])
def test_a_dry_run_prints_what_a_run_does(gpus: Machine, script: Path) -> None:
    folder = checkpoints(gpus)
    (gpus.folder / "it's").mkdir()
    (gpus.folder / "model").rename(gpus.folder / "it's" / "model")
    variables = {"MODEL_DIR": "it's/model", "WANDB_API_KEY": "secret-key"}
    gpus.log.touch()
    before = sorted(gpus.folder.rglob("*"))
    dry = gpus.run(script, DRY_RUN="1", **variables)
    assert (dry.code, dry.errors) == (0, "")
    assert [call[0] for call in dry.calls] == ["nvidia-smi"]
    assert sorted(gpus.folder.rglob("*")) == before
    assert "secret-key" not in dry.output

    pasted = gpus.folder / "pasted.sh"
    pasted.write_text(dry.output)
    by_hand = gpus.run(pasted, MODEL_DIR=None, WANDB_API_KEY=None)
    assert sorted(path.name for path in folder.iterdir()) == (
        [MARKER, "notes.txt"] if script == TRAIN else [MARKER, "hf", "megatron", "notes.txt"]
    )
    run = gpus.run(script, **variables)
    assert submitted(run)
    assert by_hand.calls == run.calls[1:]


def test_a_dry_run_needs_no_gpus(gpus: Machine) -> None:
    for name in ("nvidia-smi", "ray", "turnleaf"):
        (gpus.programs / name).unlink()
    run = gpus.run(TRAIN, DRY_RUN="1", CUDA_HOME="/nowhere", STAND_IN_PACKAGES="/nowhere")
    assert run.code == 0
    assert "--attention-backend fused" in run.output
    stops = "note: a run on this machine would stop here: "
    assert [line.removeprefix(stops).split()[0] for line in run.errors.splitlines()] == [
        "ray",
        "turnleaf",
        "CUDA_HOME=/nowhere:",
        "nvidia-smi",
        "/nowhere",
    ]


# --- what is wrong ---------------------------------------------------------------------------

MISSING = [
    "SLIME_DIR is not set: it names the checkout of slime",
    "MODEL_DIR is not set: it names the model's checkpoint in Hugging Face's form",
    "CONFIG=no.yaml: there is no such file that can be read; cp ",
    "NUM_GPUS=eight: it is a number of GPUs, such as 8",
]
NOT_THIS_MACHINE = [
    "CUDA_HOME=nowhere: there is no lib64 in it",
    "nvidia-smi tells no GPUs: NVIDIA-SMI has failed",
    "the user ann runs Ray on this machine",
]
OLDER = "9.0 8.0 9.0 9.0 9.0 9.0 9.0 9.0"


def told(run: Run, beginnings: list[str]) -> bool:
    """Whether just these sentences were said, one a line, before anything was done."""
    lines = run.errors.splitlines()
    assert [call for call in run.calls if call[0] != "nvidia-smi"] == []
    assert run.code == 2
    assert len(lines) == len(beginnings), lines
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(beginning)
    return True


@pytest.mark.parametrize(
    ("script", "rows"), [(TRAIN, "TRAIN_DATA_PATH"), (EVAL, "VAL_DATA_PATH")], ids=["train", "eval"]
)
def test_all_that_is_wrong_is_told_at_once(gpus: Machine, script: Path, rows: str) -> None:
    unset = dict.fromkeys(["SLIME_DIR", "MODEL_DIR", "TRAIN_DATA_PATH", "VAL_DATA_PATH"])
    run = gpus.run(script, CONFIG="no.yaml", NUM_GPUS="eight", DRY_RUN="yes", **unset)
    switch = "DRY_RUN=yes: say DRY_RUN=1, or leave it out"
    assert told(run, [switch, *MISSING[:2], f"{rows} is not set: it names the rows", *MISSING[2:]])

    # More behind it than a pipe holds: who reads must not stop at what it has found.
    many = "4711 ann 9 Sl raylet\n" + "0 root 2 I kworker\n" * 5000
    variables = {"STAND_IN_NO_DRIVER": "1", "STAND_IN_OTHERS": many}
    assert told(gpus.run(script, CUDA_HOME="nowhere", **variables), NOT_THIS_MACHINE)


@pytest.mark.parametrize(
    ("variables", "messages"),
    [
        (
            {"SLIME_DIR": "no", "MODEL_DIR": "slime", "VAL_DATA_PATH": "no@[0:9]", "NUM_GPUS": "0"},
            [
                "SLIME_DIR=no: there is no such folder; it names the checkout",
                "MODEL_DIR=slime: there is no config.json in it; it names the model's checkpoint",
                "VAL_DATA_PATH=no@[0:9]: there is no such file that can be read",
                "NUM_GPUS=0: it is a number of GPUs",
            ],
        ),
        (
            {"SLIME_DIR": "model", "TRAIN_DATA_PATH": "model", "VAL_DATA_PATH": "empty"},
            [
                "SLIME_DIR=model: there is no train.py in it",
                "TRAIN_DATA_PATH=model: there is no such file",
                "VAL_DATA_PATH=empty: the file is empty",
            ],
        ),
        (
            {"MODEL_TYPE": None},
            [
                "MODEL_TYPE is not set: it names one of slime's models, which are: derived empty "
                "qwen3-0.6B"
            ],
        ),
        (
            {"MODEL_TYPE": "../../train"},
            [
                "MODEL_TYPE=../../train is none of slime's models, which are: derived empty "
                "qwen3-0.6B"
            ],
        ),
        ({"MODEL_TYPE": "qwen9"}, ["MODEL_TYPE=qwen9 is none of slime's models, which are: "]),
        ({"MODEL_TYPE": "empty"}, ["MODEL_TYPE=empty: /"]),
        ({"STAND_IN_PACKAGES": "/no"}, ["/no has no nvidia/*/lib: install_slime.sh has not run"]),
        ({"NUM_GPUS": "16"}, ["NUM_GPUS=16, but nvidia-smi shows 8"]),
        (
            {"NUM_GPUS": "3"},
            [
                "NUM_GPUS=3 is no multiple of --tensor-model-parallel-size 2",
                "NUM_GPUS=3 is no multiple of --rollout-num-gpus-per-engine 2",
            ],
        ),
        (
            {"NUM_GPUS": "6"},
            [
                "NUM_GPUS=6: the 256 rollouts of a step cannot be divided among 3 data-parallel "
                "ranks; use 2, 4 or 8 GPUs, or another --rollout-batch-size"
            ],
        ),
        (
            {"STAND_IN_GPUS": OLDER},
            [
                "--attention-backend fused needs GPUs of compute capability 9.0 (Hopper) or above, "
                "and one here has 8.0: add --attention-backend flash to the command"
            ],
        ),
        ({"STAND_IN_GPUS": "[N/A] " * 8}, ["--attention-backend fused needs GPUs of"]),
        ({"RESUME": "yes"}, ["RESUME=yes: say RESUME=1, or leave it out"]),
        ({"RESUME": "1", "CKPTS_DIR": "model"}, ["RESUME=1, but CKPTS_DIR=/"]),
        ({"CKPTS_DIR": ""}, ["CKPTS_DIR is empty: it names the folder for checkpoints"]),
        ({"CKPTS_DIR": "train.jsonl"}, ["CKPTS_DIR=/"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_told_in_a_sentence(
    gpus: Machine, variables: dict[str, str | None], messages: list[str]
) -> None:
    (gpus.folder / "empty").touch()
    assert told(gpus.run(TRAIN, **variables), messages)


def test_programs_that_are_missing_are_named(gpus: Machine) -> None:
    for name in ("nvidia-smi", "ray", "turnleaf", "python", "pgrep", "ps"):
        (gpus.programs / name).unlink()
    names = ["python", "ray", "turnleaf", "pgrep", "ps", "nvidia-smi"]
    assert told(gpus.run(TRAIN), [f"{name} is not on PATH: " for name in names])


def test_other_attention_runs_on_older_gpus(gpus: Machine) -> None:
    assert submitted(gpus.run(TRAIN, STAND_IN_GPUS="10.0 " * 8))
    older = gpus.run(TRAIN, "--attention-backend=fused", STAND_IN_GPUS=OLDER)
    assert told(older, ["--attention-backend fused needs"])
    assert submitted(gpus.run(TRAIN, "--attention-backend", "flash", STAND_IN_GPUS=OLDER))


def test_sizes_of_the_command_line_are_the_ones_that_count(gpus: Machine) -> None:
    sizes = ["--tensor-model-parallel-size", "1", "--rollout-num-gpus-per-engine=1"]
    assert told(gpus.run(TRAIN, *sizes, NUM_GPUS="3"), ["NUM_GPUS=3: the 256 rollouts of a step"])
    assert submitted(gpus.run(TRAIN, *sizes, "--rollout-batch-size", "63", NUM_GPUS="3"))
    assert submitted(gpus.run(TRAIN, *sizes, "--context-parallel-size", "3", NUM_GPUS="3"))
    no_number = gpus.run(TRAIN, "--rollout-num-gpus-per-engine", "x")
    assert told(no_number, ["--rollout-num-gpus-per-engine x: it is a number of GPUs"])


# --- against the parts that they set up ------------------------------------------------------


def test_the_configuration_that_is_copied_is_valid() -> None:
    text = (FOLDER / "config.yaml.example").read_text()
    for form in (
        text,
        re.sub(r"(?m)^# (?=rollout_|  )", "", text.replace("\nrollout", "\nother", 1)),
    ):
        values = yaml.safe_load(form)
        values.pop("other_session_backend", None)
        settings = Settings.from_mapping(values)
        assert (settings.gateway_port, settings.max_rollout_time, settings.tps_limit) == (
            9090,
            900,
            5,
        )


if slime_host.SLIME_DIR:

    @pytest.mark.slime
    def test_every_argument_is_one_of_slimes() -> None:
        used = names(words(COMMON + TRAINING + EVALUATION + WANDB, Path("/")))
        used = used - set(MODEL_ARGS) | {"--train-env-vars"}
        known = set(slime_real.argument_parser()._option_string_actions)
        assert used - known == OF_MEGATRON | OF_SGLANG | OF_SLIME_EARLY

    @pytest.mark.slime
    def test_slimes_model_scripts_are_read(gpus: Machine) -> None:
        slime = Path(str(slime_host.SLIME_DIR))
        for name in ("qwen3-0.6B", "qwen3-4B-Instruct-2507", "glm4.7-30B-A3B"):
            arguments = submitted(gpus.run(TRAIN, SLIME_DIR=str(slime), MODEL_TYPE=name))
            assert "--num-layers" in arguments
