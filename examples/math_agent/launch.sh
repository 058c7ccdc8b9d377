# shellcheck shell=bash
# What train.sh and eval.sh have in common. Sourced by them, after `here` is set to their folder;
# it reads the variables, looks for what is wrong, and runs slime's train.py on Ray.

DRY_RUN=${DRY_RUN-0}
NUM_GPUS=${NUM_GPUS-8}
CONFIG=${CONFIG-$here/config.yaml}
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda-13.0}

# SGLang's processes as they call themselves, and servers that are still starting.
SGLANG_PROCESSES='^(sglang::|[^ ]*python[0-9.]* -m sglang[._])'
RAY_JOBS=http://127.0.0.1:8265
# Ray's actors look in here late, so it must outlive the run.
NO_CUDA_12=${XDG_CACHE_HOME:-$HOME/.cache}/turnleaf/no-cuda-12

# --- what is wrong ---------------------------------------------------------------------------

faults=()

fault() { faults+=("$*"); }

# Something about this machine: a dry run, which may be on another one, goes on.
machine_fault() {
    if [ "$DRY_RUN" = 1 ]; then
        echo "note: a run on this machine would stop here: $*" >&2
    else
        fault "$*"
    fi
}

stop_if_faulty() {
    [ ${#faults[@]} -eq 0 ] && return
    printf '%s\n' "${faults[@]}" >&2
    exit 2
}

# --- the variables ---------------------------------------------------------------------------

# check_switch NAME: a variable that is 1 or 0.
check_switch() {
    case ${!1} in
        0 | 1) ;;
        *) fault "$1=${!1}: say $1=1, or leave it out" ;;
    esac
}

# check_folder NAME FILE WHAT: a variable that names a folder with FILE in it, which becomes absolute;
# false when something is wrong with it.
check_folder() {
    local value=${!1-}
    if [ -z "$value" ]; then
        fault "$1 is not set: it names $3"
    elif [ ! -d "$value" ]; then
        fault "$1=$value: there is no such folder; it names $3"
    elif [ ! -e "$value/$2" ]; then
        fault "$1=$value: there is no $2 in it; it names $3"
    else
        printf -v "$1" '%s' "$(realpath -- "$value")"
        return
    fi
    return 1
}

# check_data NAME: rows, of which slime's PATH@[FIRST:LAST] takes a part.
check_data() {
    local value=${!1-} path
    path=${value%@\[*\]}
    if [ -z "$value" ]; then
        fault "$1 is not set: it names the rows, a JSONL file as prepare_gsm8k.py writes it"
    elif [ ! -f "$path" ] || [ ! -r "$path" ]; then
        fault "$1=$value: there is no such file that can be read; prepare_gsm8k.py writes one"
    elif [ ! -s "$path" ]; then
        fault "$1=$value: the file is empty"
    else
        printf -v "$1" '%s' "$(realpath -- "$path")${value#"$path"}"
    fi
}

check_config() {
    if [ -f "$CONFIG" ] && [ -r "$CONFIG" ]; then
        CONFIG=$(realpath -- "$CONFIG")
    else
        fault "CONFIG=$CONFIG: there is no such file that can be read;" \
            "cp $here/config.yaml.example ${CONFIG:-config.yaml}, and say in it where your agent is"
    fi
}

# Sets MODEL_ARGS, as slime's script for the model has them.
read_model_args() {
    local script=$SLIME_DIR/scripts/models/${MODEL_TYPE-}.sh known
    known=$(find "$SLIME_DIR/scripts/models" -name '*.sh' -printf '%f\n' |
        sed 's/\.sh$//' | sort | tr '\n' ' ')
    if [ -z "${MODEL_TYPE-}" ]; then
        fault "MODEL_TYPE is not set: it names one of slime's models, which are: ${known% }"
    elif [[ ! $MODEL_TYPE =~ ^[A-Za-z0-9._-]+$ ]] || [ ! -f "$script" ]; then
        fault "MODEL_TYPE=$MODEL_TYPE is none of slime's models, which are: ${known% }"
    else
        mapfile -d '' -t MODEL_ARGS < <(
            set +eu
            MODEL_ARGS=()
            # shellcheck disable=SC1090
            source "$script" >/dev/null
            [ ${#MODEL_ARGS[@]} -eq 0 ] || printf '%s\0' "${MODEL_ARGS[@]}"
        )
        [ ${#MODEL_ARGS[@]} -gt 0 ] || fault "MODEL_TYPE=$MODEL_TYPE: $script sets no MODEL_ARGS"
    fi
}

# check_variables DATA…: those that both scripts have, and the ones that name rows.
check_variables() {
    check_switch DRY_RUN
    ! check_folder SLIME_DIR train.py "the checkout of slime that install_slime.sh made" ||
        read_model_args
    check_folder MODEL_DIR config.json "the model's checkpoint in Hugging Face's form" || true
    local name
    for name in "$@"; do check_data "$name"; done
    check_config
    [[ $NUM_GPUS =~ ^[1-9][0-9]{0,3}$ ]] || fault "NUM_GPUS=$NUM_GPUS: it is a number of GPUs, such as 8"
    stop_if_faulty
}

# --- slime's arguments -----------------------------------------------------------------------

# value_of ARGUMENT [DEFAULT]: what slime will read; of arguments given twice the last counts.
value_of() {
    local found=${2-} previous="" word
    for word in "${arguments[@]}"; do
        [ "$previous" != "$1" ] || found=$word
        case $word in "$1="*) found=${word#*=} ;; esac
        previous=$word
    done
    printf '%s' "$found"
}

# check_multiple ARGUMENT: as many GPUs as that takes must divide those that there are.
check_multiple() {
    local size
    size=$(value_of "$1" 1)
    if [[ ! $size =~ ^[1-9][0-9]*$ ]]; then
        fault "$1 $size: it is a number of GPUs"
    elif ((NUM_GPUS % size != 0)); then
        fault "NUM_GPUS=$NUM_GPUS is no multiple of $1 $size"
    fi
}

# What both scripts give slime. It comes first, so that what a script or its caller adds counts.
common_arguments() {
    arguments=(
        --custom-generate-function-path turnleaf.adapters.slime.generate
        --custom-reward-post-process-path turnleaf.adapters.slime.normalize_episode_rewards
        --custom-config-path "$CONFIG"

        "${MODEL_ARGS[@]}"
        --hf-checkpoint "$MODEL_DIR"

        --actor-num-nodes 1
        --actor-num-gpus-per-node "$NUM_GPUS"
        --num-gpus-per-node "$NUM_GPUS"
        --colocate

        --input-key prompt
        --rollout-max-context-len 14336
        --rollout-max-response-len 2048
        --eval-prompt-data gsm8k "$VAL_DATA_PATH"
        --n-samples-per-eval-prompt 1
        --eval-temperature 0

        --rollout-num-gpus-per-engine 2
        --sglang-mem-fraction-static 0.6
        --sglang-cuda-graph-max-bs 32
    )
}

wandb_arguments() {
    [ -n "${WANDB_API_KEY-}" ] || return 0
    # The key itself goes to Ray through its environment: arguments are there for all to see.
    export WANDB_API_KEY
    arguments+=(--use-wandb --wandb-project turnleaf-math-agent --wandb-group "$MODEL_TYPE")
}

# --- this machine ----------------------------------------------------------------------------

check_programs() {
    local program
    command -v python >/dev/null ||
        fault "python is not on PATH: activate the environment of install_slime.sh"
    for program in ray turnleaf; do
        command -v "$program" >/dev/null ||
            machine_fault "$program is not on PATH: activate the environment of install_slime.sh"
    done
    for program in pgrep pkill ps; do
        command -v "$program" >/dev/null || machine_fault "$program is not on PATH: install procps"
    done
    [ -d "$CUDA_HOME/lib64" ] ||
        machine_fault "CUDA_HOME=$CUDA_HOME: there is no lib64 in it; it names the CUDA 13 toolkit"
}

check_gpus() {
    local capabilities count
    if ! command -v nvidia-smi >/dev/null; then
        machine_fault "nvidia-smi is not on PATH: NVIDIA's driver is not installed"
        return
    elif ! capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1); then
        machine_fault "nvidia-smi tells no GPUs: ${capabilities##*$'\n'}"
        return
    fi
    count=$(grep -c . <<<"$capabilities" || true)
    [ "$count" -ge "$NUM_GPUS" ] ||
        machine_fault "NUM_GPUS=$NUM_GPUS, but nvidia-smi shows $count"
    [ "$(value_of --attention-backend)" = fused ] || return 0
    local capability
    while read -r capability; do
        if [[ ! $capability =~ ^([0-9]+)\.[0-9]+$ ]] || ((BASH_REMATCH[1] < 9)); then
            machine_fault "--attention-backend fused needs GPUs of compute capability 9.0 (Hopper)" \
                "or above, and one here has $capability: add --attention-backend flash to the command"
            return
        fi
    done <<<"$capabilities"
}

# raylets: each one's user by number and name, and its process. pgrep would also tell those that have
# ended and that nobody collects, as in a container without an init.
raylets() {
    ps -eo uid=,user:32=,pid=,stat=,comm= | awk '$4 !~ /^Z/ && $5 == "raylet" { print $1, $2, $3 }'
}

# Two Ray heads on one machine take each other's ports and jobs, and root's `ray stop` ends them all.
check_others() {
    local other
    command -v ps >/dev/null || return 0
    other=$(raylets | awk -v me="$EUID" '$1 != me { user = $2 } END { print user }')
    [ -z "$other" ] ||
        machine_fault "the user $other runs Ray on this machine, and there is room for one: ask them to stop it"
}

# --- running ---------------------------------------------------------------------------------

# print_command WORD…: as it can be pasted, an argument a line.
print_command() {
    local word
    printf '%s' "$1"
    for word in "${@:2}"; do
        case $word in --?*) printf ' \\\n   ' ;; esac
        if [[ $word =~ ^[A-Za-z0-9_./:=@,+%-]+$ ]]; then
            printf ' %s' "$word"
        else
            printf ' %s' "${word@Q}"
        fi
    done
    printf '\n'
}

run() {
    print_command "$@"
    [ "$DRY_RUN" = 1 ] || "$@"
}

# set_variable NAME VALUE: for this script, Ray and its actors.
set_variable() {
    print_command export "$1=$2"
    export "$1=$2"
}

# The CUDA 13 that pip installed must be found before any other, and no CUDA 12 at all.
set_environment() {
    local packages folder entry kept path=$NO_CUDA_12
    packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for folder in "$packages"/nvidia/*/lib; do
        [ ! -d "$folder" ] || path+=:$folder
    done
    [ "$path" != "$NO_CUDA_12" ] ||
        machine_fault "$packages has no nvidia/*/lib: install_slime.sh has not run in this environment"
    path+=:$CUDA_HOME/lib64
    while IFS= read -r -d : entry; do
        kept=:$path:
        case $entry in
            "" | /usr/local/cuda | /usr/local/cuda[-/]*) ;;
            *) [ "${kept/:"$entry":/}" != "$kept" ] || path+=:$entry ;;
        esac
    done <<<"${LD_LIBRARY_PATH-}:"
    stop_if_faulty

    run mkdir -p "$NO_CUDA_12"
    # An empty library: loading CUDA 12's runtime fails instead of finding the system's.
    run touch "$NO_CUDA_12/libcudart.so.12"
    set_variable LD_LIBRARY_PATH "$path"
    set_variable PATH "$CUDA_HOME/bin:$PATH"
    set_variable CUDA_HOME "$CUDA_HOME"
    set_variable CUDNN_HOME "$packages/nvidia/cudnn"
    set_variable CUDNN_PATH "$packages/nvidia/cudnn"
    set_variable CUDNN_FRONTEND_CUDART_LIB_NAME libcudart.so.13
    set_variable CUDA_DEVICE_MAX_CONNECTIONS 1
    set_variable PYTHONUNBUFFERED 1
    set_variable PYTHONPATH "$SLIME_DIR${PYTHONPATH:+:$PYTHONPATH}"
}

# What Ray's processes and slime's Megatron actors must have; the latter drop what the job has.
environment_json() {
    python -I -S -c \
        'import json, os, sys; print(json.dumps({name: os.environ[name] for name in sys.argv[1:]}))' \
        LD_LIBRARY_PATH CUDA_HOME CUDNN_HOME CUDNN_PATH CUDNN_FRONTEND_CUDART_LIB_NAME \
        CUDA_DEVICE_MAX_CONNECTIONS PYTHONUNBUFFERED PYTHONPATH
}

# check_setup DATA…: the configuration and each file of rows, before anything is started.
check_setup() {
    local data
    for data in "$@"; do
        run turnleaf slime check --config "$CONFIG" --data "$data" && continue
        echo "turnleaf slime check found what is wrong; nothing has been started or removed" >&2
        exit 1
    done
}

# Only this user's processes; others' are none of our business.
stop_stale() {
    local processes
    run pkill -TERM -u "$EUID" -f "$SGLANG_PROCESSES" || true
    sglang_is_gone 20 || run pkill -KILL -u "$EUID" -f "$SGLANG_PROCESSES" || true
    sglang_is_gone 10 || {
        processes=$(pgrep -d ' ' -u "$EUID" -f "$SGLANG_PROCESSES")
        echo "old processes of SGLang cannot be ended: kill -9 $processes, then start again" >&2
        exit 1
    }
    run ray stop --force
    [ "$DRY_RUN" = 0 ] || return 0
    processes=$(raylets | awk -v me="$EUID" '$1 == me { all = all " " $3 } END { print substr(all, 2) }')
    if [ -n "$processes" ]; then
        echo "\`ray stop\` left a raylet, whose actors would not see this run's environment:" \
            "kill -9 $processes, then start again" >&2
        exit 1
    fi
}

# sglang_is_gone HALVES: whether no process is left, within so many half seconds.
sglang_is_gone() {
    local tries
    for ((tries = 0; tries < $1; tries++)); do
        [ "$DRY_RUN" = 0 ] && pgrep -u "$EUID" -f "$SGLANG_PROCESSES" >/dev/null || return 0
        sleep 0.5
    done
    return 1
}

# Starts Ray on this machine and has it run slime's train.py, whose output this follows to its end.
submit() {
    local environment python
    environment=$(environment_json)
    python=$(command -v python)
    run ray start --head --num-gpus "$NUM_GPUS" --disable-usage-stats \
        --dashboard-host 127.0.0.1 --dashboard-port "${RAY_JOBS##*:}"
    run ray job submit --address "$RAY_JOBS" --runtime-env-json "{\"env_vars\": $environment}" -- \
        "$python" "$SLIME_DIR/train.py" "${arguments[@]}" --train-env-vars "$environment"
}
