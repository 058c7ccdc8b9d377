#!/usr/bin/env bash
# Evaluates a checkpoint as training does, without training it: one rollout for each row, at
# temperature 0. The mean reward is in slime's log, as eval/gsm8k.
#
#   SLIME_DIR=… MODEL_DIR=… VAL_DATA_PATH=… MODEL_TYPE=qwen3-0.6B bash eval.sh [ARGUMENT…]
#
# MODEL_DIR can be what training saved: $CKPTS_DIR/hf/99. The ARGUMENTs are slime's, as of train.sh.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=examples/math_agent/launch.sh
source "$here/launch.sh"

check_variables VAL_DATA_PATH

common_arguments
arguments+=(
    # The engines load the checkpoint themselves, and Megatron none.
    --debug-rollout-only
    --num-rollout 0
    --eval-interval 1
    # slime asks for these, and reads no row of them.
    --prompt-data "$VAL_DATA_PATH"
    --rollout-batch-size 1
)
wandb_arguments
arguments+=("$@")

check_multiple --rollout-num-gpus-per-engine
check_programs
check_gpus
check_others
stop_if_faulty

set_environment
check_setup "$VAL_DATA_PATH"
stop_stale
submit
