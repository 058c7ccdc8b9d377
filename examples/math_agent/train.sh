#!/usr/bin/env bash
# Trains the math agent on GSM8K: slime's train.py with GRPO, on one machine with NUM_GPUS GPUs.
#
#   SLIME_DIR=… MODEL_DIR=… TRAIN_DATA_PATH=… MODEL_TYPE=qwen3-0.6B bash train.sh [ARGUMENT…]
#
# The ARGUMENTs are slime's and come last, so that they count instead of the ones below. Another
# agent needs its own data, and what is in its place here: sizes, lengths and names. docs/training.md
# describes every variable.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=examples/math_agent/launch.sh
source "$here/launch.sh"

RESUME=${RESUME-0}
CKPTS_DIR=${CKPTS_DIR-checkpoints}
VAL_DATA_PATH=${VAL_DATA_PATH:-${TRAIN_DATA_PATH-}}

# A folder with this file in it is one that this script made; nothing else is ever cleared.
MARKER=.turnleaf-checkpoints

check_checkpoints() {
    local input
    check_switch RESUME
    if [ -z "$CKPTS_DIR" ]; then
        fault "CKPTS_DIR is empty: it names the folder for checkpoints"
        return
    fi
    CKPTS_DIR=$(realpath -m -- "$CKPTS_DIR")
    if [ -e "$CKPTS_DIR" ] && [ ! -d "$CKPTS_DIR" ]; then
        fault "CKPTS_DIR=$CKPTS_DIR is no folder"
    elif [ "$RESUME" = 1 ]; then
        [ -f "$CKPTS_DIR/megatron/latest_checkpointed_iteration.txt" ] ||
            fault "RESUME=1, but CKPTS_DIR=$CKPTS_DIR has no checkpoint to resume from:" \
                "leave RESUME out to begin anew"
    elif [ ! -f "$CKPTS_DIR/$MARKER" ] && [ -n "$(ls -A "$CKPTS_DIR" 2>/dev/null)" ]; then
        fault "CKPTS_DIR=$CKPTS_DIR is not empty, and train.sh did not make it (there is no $MARKER):" \
            "name a new folder"
    else
        for input in SLIME_DIR MODEL_DIR TRAIN_DATA_PATH VAL_DATA_PATH CONFIG; do
            case ${!input-} in
                "$CKPTS_DIR"/*)
                    fault "$input=${!input} is in CKPTS_DIR=$CKPTS_DIR, which is cleared at the start:" \
                        "move it, or name another CKPTS_DIR"
                    ;;
            esac
        done
    fi
}

# Megatron counts in whole batches for each data-parallel rank. What is no number slime will say.
check_batch() {
    local name size ranks=$NUM_GPUS rollouts=1
    for name in --actor-num-nodes --rollout-batch-size --n-samples-per-prompt --num-steps-per-rollout \
        --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size; do
        size=$(value_of $name 1)
        [[ $size =~ ^[1-9][0-9]*$ ]] || return 0
        case $name in
            --actor-num-nodes) ranks=$((ranks * size)) ;;
            --num-steps-*) rollouts=$((rollouts / size)) ;;
            --*-parallel-size) ranks=$((ranks / size)) ;;
            *) rollouts=$((rollouts * size)) ;;
        esac
    done
    ((ranks == 0 || rollouts % ranks == 0)) ||
        fault "NUM_GPUS=$NUM_GPUS: the $rollouts rollouts of a step cannot be divided among $ranks" \
            "data-parallel ranks; use 2, 4 or 8 GPUs, or another --rollout-batch-size"
}

prepare_checkpoints() {
    [ "$RESUME" = 0 ] || return 0
    run mkdir -p "$CKPTS_DIR"
    run touch "$CKPTS_DIR/$MARKER"
    run rm -rf -- "$CKPTS_DIR/megatron" "$CKPTS_DIR/hf"
}

check_variables TRAIN_DATA_PATH ${VAL_DATA_PATH:+VAL_DATA_PATH}
check_checkpoints
stop_if_faulty

common_arguments
arguments+=(
    --ref-load "$MODEL_DIR"
    --load "$CKPTS_DIR/megatron"
    --save "$CKPTS_DIR/megatron"
    --save-hf "$CKPTS_DIR/hf/{rollout_id}"
    --save-interval 100

    --prompt-data "$TRAIN_DATA_PATH"
    --rollout-shuffle
    --num-rollout 100
    --rollout-batch-size 64
    --n-samples-per-prompt 4
    --num-steps-per-rollout 1
    --rollout-temperature 1.0
    --eval-interval 10

    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28

    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
    # With RESUME=1 these count, and the --num-rollout above, not what the checkpoint was made with.
    --override-opt-param-scheduler

    --tensor-model-parallel-size 2
    --sequence-parallel
    --use-dynamic-batch-size
    --max-tokens-per-gpu 14336
    --balance-data

    --attention-backend fused
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
)
wandb_arguments
arguments+=("$@")

check_multiple --tensor-model-parallel-size
check_multiple --rollout-num-gpus-per-engine
stop_if_faulty
check_batch
check_programs
check_gpus
check_others
stop_if_faulty

data=("$TRAIN_DATA_PATH")
[ "$VAL_DATA_PATH" = "$TRAIN_DATA_PATH" ] || data+=("$VAL_DATA_PATH")
set_environment
check_setup "${data[@]}"
stop_stale
prepare_checkpoints
submit
