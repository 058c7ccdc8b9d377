#!/usr/bin/env bash
# Installs slime and all that it needs for CUDA 13 into the activated Python 3.12 environment, and
# clones Megatron-LM and slime into the current folder.
#
#   install_slime.sh             installs what is not there yet; run it again after an interruption
#   install_slime.sh --dry-run   prints every command in order, and changes nothing
#
# CUDA_HOME names the CUDA 13.0 toolkit, by default /usr/local/cuda-13.0. Each step is left out where
# all that it makes is there. docs/training.md says what each leaves behind.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

DRY_RUN=no
case $# in
    0) ;;
    *) [ "$*" = --dry-run ] || { echo "usage: install_slime.sh [--dry-run]" >&2; exit 2; }
       DRY_RUN=yes ;;
esac

export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda-13.0}
DISK_GB=40

TORCH=(torch==2.11.0 torchvision==0.26.0 torchaudio==2.11.0)
BUILD_TOOLS=("setuptools<80" wheel ninja cmake pybind11)
FLASH_ATTN=2.8.3
FLASH_ATTN_INDEX=https://wheels.astral.sh/simple/cu130/
TRANSFORMER_ENGINE=2.11.0
APEX=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
TORCH_MEMORY_SAVER=8d30c59ca12a68d9deccbc9c6599076a1218cbc5
MODELOPT="nvidia-modelopt[torch]>=0.37"
SGLANG=0.5.15.post1
CUTLASS=4.5.2
MEGATRON_URL=https://github.com/NVIDIA/Megatron-LM.git
MEGATRON=1dcf0dafa884ad52ffb243625717a3471643e087
SLIME_URL=https://github.com/THUDM/slime.git
SLIME=a74ae3a0ad16bd8b769d5386738e8ae3d1269d7e
WANDB="wandb<0.28.2"
ROUTER=https://github.com/zhuzilin/sgl-router/releases/download/v0.3.2-9daabcd/sglang_router-0.3.2-cp38-abi3-manylinux_2_28_x86_64.whl
LAST=("numpy<2" "scipy<1.14" "pyarrow<26" "pandas<3.1")
# In the order in which they lie upon each other.
SGLANG_PATCHES=(sglang sglang-top_p sglang-release_hicache sglang-pull_weights)

environment=${VIRTUAL_ENV:-$PWD/.venv}
python=$environment/bin/python
packages=$environment/lib/python3.12/site-packages
megatron=$(pwd -P)/Megatron-LM
slime=$(pwd -P)/slime
patches=$slime/docker/patch/latest

pins=$here/constraints.txt
# The clone that this script is in; empty where turnleaf was installed otherwise.
checkout=$(cd -- "$here/../../../../.." && pwd -P)
[ -f "$checkout/pyproject.toml" ] || checkout=

# --- what is wrong ---------------------------------------------------------------------------

faults=()

fault() {
    if [ $DRY_RUN = yes ]; then
        echo "note: an installation would stop here: $*" >&2
    else
        faults+=("$*")
    fi
}

fail() {
    echo "$*" >&2
    exit 1
}

check_machine() {
    local system release program version free
    system=$(uname -sm)
    [ "$system" = "Linux x86_64" ] || fault "Linux on x86_64 is needed, and this is $system"

    if [ ! -x "$CUDA_HOME/bin/nvcc" ]; then
        fault "CUDA_HOME=$CUDA_HOME: there is no bin/nvcc in it;" \
            "install the CUDA 13.0 toolkit, or set CUDA_HOME to where it is"
    else
        # Apex compiles only with the very version that torch was compiled with.
        release=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p' || true)
        [ "$release" = 13.0 ] ||
            fault "CUDA_HOME=$CUDA_HOME: its nvcc is of CUDA ${release:-?}, and 13.0 is needed;" \
                "set CUDA_HOME to a CUDA 13.0 toolkit"
    fi

    command -v uv >/dev/null ||
        fault "uv is not on PATH: install it (https://docs.astral.sh/uv), then run this again"
    for program in git g++; do
        command -v $program >/dev/null ||
            fault "$program is not on PATH: install it, then run this again"
    done

    if [ -z "${VIRTUAL_ENV-}" ]; then
        fault "no Python environment is activated: uv venv --python 3.12 && source .venv/bin/activate"
    elif ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        fault "the activated environment $environment has no Python that starts:" \
            "uv venv --python 3.12 && source .venv/bin/activate"
    elif [ "$version" != 3.12 ]; then
        fault "the activated environment $environment has Python $version, and 3.12 is needed:" \
            "uv venv --python 3.12 && source .venv/bin/activate"
    elif survey torch && [ -n "${lacking[torch]}" ]; then
        free=$(df -Pk "$environment" | awk 'NR == 2 { print int($4 / 1048576) }')
        [ "$free" -ge $DISK_GB ] ||
            fault "$environment has $free GB free, and the environment takes $DISK_GB GB:" \
                "free some, or make the environment elsewhere"
    fi
    check_checkout "$megatron" "$MEGATRON"
    check_checkout "$slime" "$SLIME"

    [ ${#faults[@]} -eq 0 ] && return
    printf '%s\n' "${faults[@]}" >&2
    exit 2
}

# A folder of that name which is ours, or was begun by us, or is not there.
check_checkout() {
    local commit
    if [ -e "$1" ] && [ ! -e "$1/.git" ]; then
        fault "$1 is no git checkout: move it away, since ${1##*/} is cloned there"
    elif [ -e "$1" ] && commit=$(git -C "$1" rev-parse --verify --quiet HEAD) && [ "$commit" != "$2" ]; then
        fault "$1 is at commit $commit, and $2 is needed: move it away, or check that out"
    fi
}

# --- running ---------------------------------------------------------------------------------

print_command() {
    local word line=""
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=@,+%-]+$ ]] || word=${word@Q}
        line+=" $word"
    done
    echo "${line# }"
}

run() {
    print_command "$@"
    [ $DRY_RUN = yes ] || "$@" || fail "step \"$title\" failed; run this again to go on from there"
}

install() {
    run uv pip install --python "$python" --constraint "$pins" "$@"
}

# What a step has not made yet, in words; empty where all of it is there.
declare -A lacking

STEPS=()
declare -A TITLES

# step NAME TITLE: three functions. wants_NAME sets `wants` to what made.py looks for, also_NAME, where
# there is one, prints what else is lacking, and make_NAME makes it all.
step() {
    STEPS+=("$1")
    TITLES[$1]=$2
}

# survey STEP…: sets `lacking` of these.
survey() {
    local name problem report wants
    report=$(
        for name in "$@"; do
            wants=()
            "wants_$name"
            [ ${#wants[@]} -eq 0 ] || printf "$name\t%s\n" "${wants[@]}"
        done | "$python" -I -S "$here/made.py" "$packages"
    ) || fail "$python does not say what is in $packages"
    for name in "$@"; do lacking[$name]=""; done
    while IFS=$'\t' read -r name problem; do
        [ -z "$name" ] || lacking[$name]=$problem
    done <<<"$report"
    for name in "$@"; do
        if [ -z "${lacking[$name]}" ] && declare -F "also_$name" >/dev/null; then
            lacking[$name]=$("also_$name")
        fi
    done
}

run_steps() {
    local name number=0
    [ $DRY_RUN = yes ] || survey "${STEPS[@]}"
    for name in "${STEPS[@]}"; do
        title=${TITLES[$name]}
        number=$((number + 1))
        if [ $DRY_RUN = yes ]; then
            printf '\n# %d/%d: %s\n' $number ${#STEPS[@]} "$title"
            "make_$name"
        elif [ -z "${lacking[$name]}" ]; then
            printf '%d/%d: %s is there\n' $number ${#STEPS[@]} "$title"
        else
            printf '%d/%d: %s\n' $number ${#STEPS[@]} "$title"
            "make_$name"
            survey "$name"
            [ -z "${lacking[$name]}" ] ||
                fail "step \"$title\" left something out: ${lacking[$name]}"
        fi
    done
}

# What one step made another may have taken away again.
verify_steps() {
    local name
    survey "${STEPS[@]}"
    for name in "${STEPS[@]}"; do
        [ -z "${lacking[$name]}" ] ||
            fail "a later step undid \"${TITLES[$name]}\" (${lacking[$name]}): run this again"
    done
}

# --- the steps -------------------------------------------------------------------------------

step turnleaf "turnleaf"
wants_turnleaf() {
    wants=(turnleaf aiohttp boto3 orjson starlette transformers typer uvicorn)
    [ -z "$checkout" ] || wants+=("turnleaf@$checkout")
}
make_turnleaf() {
    if [ -n "$checkout" ]; then
        install --editable "${checkout}[slime,demo]"
    else
        install "turnleaf[slime,demo]==$(version_here)"
    fi
}
# Of the turnleaf that this script is a part of.
version_here() {
    local metadata
    metadata=$(echo "$here"/../../../../turnleaf-*.dist-info/METADATA)
    sed -n 's/^Version: //p' "$metadata" | head -1
}

step torch "torch"
wants_torch() { wants=("${TORCH[@]}"); }
make_torch() { install --torch-backend=cu130 "${TORCH[@]}"; }

# Of the builds below, which must see torch and so have no environment of their own.
step build_tools "build tools"
wants_build_tools() { wants=("${BUILD_TOOLS[@]}"); }
make_build_tools() { install "${BUILD_TOOLS[@]}"; }

step flash_attn "flash-attn"
wants_flash_attn() { wants=("flash-attn==$FLASH_ATTN" einops "file:flash_attn_2_cuda*.so"); }
make_flash_attn() {
    install einops
    # From source it would take hours.
    install --no-deps --only-binary flash-attn --index "$FLASH_ATTN_INDEX" "flash-attn==$FLASH_ATTN"
}

step transformer_engine "Transformer Engine"
wants_transformer_engine() {
    wants=(
        "transformer-engine==$TRANSFORMER_ENGINE" "transformer-engine-cu13==$TRANSFORMER_ENGINE"
        "transformer-engine-torch==$TRANSFORMER_ENGINE" no:transformer-engine-cu12
    )
}
make_transformer_engine() {
    [[ ${lacking[transformer_engine]-} != transformer-engine-cu12* ]] ||
        run uv pip uninstall --python "$python" transformer-engine-cu12
    # Beside its CUDA 13 part, the one for CUDA 12 ends in "Multiple libcudart libraries found".
    install --no-build-isolation --torch-backend=cu130 --override "$here/overrides.txt" \
        "transformer-engine[pytorch,core-cu13]==$TRANSFORMER_ENGINE"
}

step apex "Apex"
wants_apex() {
    wants=("apex@$APEX" "file:apex_C*.so" "file:amp_C*.so" "file:fused_layer_norm_cuda*.so")
}
make_apex() {
    run env APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=8 "NVCC_APPEND_FLAGS=--threads 4" \
        uv pip install --python "$python" --constraint "$pins" --no-build-isolation --no-deps \
        --reinstall-package apex "apex @ git+https://github.com/NVIDIA/apex.git@$APEX"
}

step modelopt "modelopt"
wants_modelopt() { wants=("${MODELOPT/\[torch\]/}"); }
make_modelopt() { install --no-build-isolation --torch-backend=cu130 "$MODELOPT" "${TORCH[@]}"; }

step sglang "SGLang"
wants_sglang() { wants=("sglang==$SGLANG" sglang-kernel); }
make_sglang() {
    install --prerelease=allow --torch-backend=cu130 "sglang==$SGLANG" "${TORCH[@]}"
}

step torch_memory_saver "torch_memory_saver"
wants_torch_memory_saver() {
    wants=(
        "torch-memory-saver@$TORCH_MEMORY_SAVER"
        file:torch_memory_saver_hook_mode_preload_cu13.abi3.so
    )
}
make_torch_memory_saver() {
    # After SGLang, which would take the one of the package index. The number is the major version of
    # torch's CUDA; it names the library that slime looks for.
    run env TMS_CUDA_MAJOR=13 \
        uv pip install --python "$python" --constraint "$pins" --no-build-isolation --no-deps \
        --reinstall-package torch-memory-saver \
        "torch-memory-saver @ git+https://github.com/zhuzilin/torch_memory_saver.git@$TORCH_MEMORY_SAVER"
}

step megatron_clone "Megatron-LM"
wants_megatron_clone() { :; }
also_megatron_clone() { not_cloned "$megatron" "$MEGATRON"; }
make_megatron_clone() { make_clone "$megatron" "$MEGATRON_URL" "$MEGATRON"; }

step megatron_package "Megatron-LM's package"
wants_megatron_package() { wants=("megatron-core@$megatron"); }
also_megatron_package() {
    compgen -G "$megatron/megatron/core/datasets/helpers_cpp*.so" >/dev/null ||
        echo "$megatron/megatron/core/datasets/helpers_cpp*.so is not there"
}
make_megatron_package() {
    # Editable, since its wheel lacks megatron.training; in compat mode that can be imported, too.
    install --no-build-isolation --config-settings editable_mode=compat --editable "$megatron"
}

step overwritten "CUTLASS and PyJWT"
wants_overwritten() {
    wants=("nvidia-cutlass-dsl-libs-base==$CUTLASS" whole:nvidia-cutlass-dsl-libs-base whole:pyjwt)
}
make_overwritten() {
    # Other packages write over the files of the one, and remove those of the other.
    install --no-deps --reinstall-package nvidia-cutlass-dsl-libs-base --reinstall-package pyjwt \
        "nvidia-cutlass-dsl-libs-base==$CUTLASS" pyjwt
}

step slime_clone "slime"
wants_slime_clone() { :; }
also_slime_clone() { not_cloned "$slime" "$SLIME"; }
make_slime_clone() { make_clone "$slime" "$SLIME_URL" "$SLIME"; }

step slime_package "slime's package"
wants_slime_package() {
    wants=("slime@$slime" "$WANDB")
    [ ! -f "$slime/requirements.txt" ] || mapfile -t -O ${#wants[@]} wants < <(
        sed -e 's/#.*//' -e 's/\[.*\]//' -e 's/[[:space:]]//g' -e '/^$/d' "$slime/requirements.txt"
    )
}
make_slime_package() {
    install --torch-backend=cu130 --requirement "$slime/requirements.txt" "$WANDB" "${TORCH[@]}"
    install --no-deps --editable "$slime"
}

step router "router"
wants_router() { wants=("sglang-router@$ROUTER"); }
make_router() {
    # The one of the package index drops the fields of requests that replay needs.
    install --no-deps --reinstall-package sglang-router "sglang-router @ $ROUTER"
}

step last "last versions"
wants_last() { wants=("${LAST[@]}"); }
# Whatever a uv.toml says: Megatron needs these.
make_last() { install --no-config "${LAST[@]}"; }

step megatron_patch "Megatron-LM's patch"
wants_megatron_patch() { :; }
also_megatron_patch() {
    git -C "$megatron" apply --reverse --check "$patches/megatron.patch" 2>/dev/null ||
        echo "megatron.patch is not applied"
}
make_megatron_patch() {
    [ $DRY_RUN = yes ] || git -C "$megatron" apply --check "$patches/megatron.patch" ||
        fail "megatron.patch is neither in $megatron nor can it be applied:" \
            "git -C $megatron checkout --force $MEGATRON, then run this again"
    run git -C "$megatron" apply "$patches/megatron.patch"
}

step sglang_patches "SGLang's patches"
wants_sglang_patches() { :; }
also_sglang_patches() {
    local applied
    applied=$(applied_patches)
    [ "$applied" = ${#SGLANG_PATCHES[@]} ] ||
        echo "$applied of ${#SGLANG_PATCHES[@]} patches are applied"
}
make_sglang_patches() {
    local applied=0 name
    [ $DRY_RUN = yes ] || applied=$(applied_patches)
    for name in "${SGLANG_PATCHES[@]:applied}"; do
        [ $DRY_RUN = yes ] || patch_sglang "$packages" "$name" --check ||
            fail "$name.patch is neither in $packages/sglang nor can it be applied:" \
                "uv pip install --no-deps --reinstall-package sglang sglang==$SGLANG, then run this again"
        run env "GIT_CEILING_DIRECTORIES=${packages%/*}" \
            git -C "$packages" apply -p2 "$patches/$name.patch"
    done
}

# not_cloned FOLDER COMMIT
not_cloned() {
    [ -e "$1/.git" ] && [ "$(git -C "$1" rev-parse --verify --quiet HEAD)" = "$2" ] ||
        echo "$1 is not at $2"
}

# make_clone FOLDER ADDRESS COMMIT: HEAD names the commit only when all of its files are there.
make_clone() {
    run git init --quiet "$1"
    run git -C "$1" fetch --depth 1 "$2" "$3"
    run git -C "$1" -c advice.detachedHead=false checkout --force --detach "$3"
}

# patch_sglang FOLDER NAME OPTION…: of FOLDER/sglang. In a folder of a repository's git would pass over
# files in silence; the ceiling keeps it from finding one.
patch_sglang() {
    GIT_CEILING_DIRECTORIES=${1%/*} git -C "$1" apply -p2 "${@:3}" "$patches/$2.patch"
}

# How many of SGLang's patches are in its files. They lie upon each other: the uppermost is found by
# whether it can be taken off, and counts when all that lie below it can be, too, from copies.
applied_patches() {
    local count=${#SGLANG_PATCHES[@]} copies index
    while [ "$count" -gt 0 ]; do
        patch_sglang "$packages" "${SGLANG_PATCHES[count - 1]}" --reverse --check 2>/dev/null && break
        count=$((count - 1))
    done
    copies=$(mktemp -d)
    for ((index = 0; index < count; index++)); do
        sed -n 's|^+++ b/python/||p' "$patches/${SGLANG_PATCHES[index]}.patch" |
            (cd "$packages" && xargs -d '\n' cp --parents --target-directory "$copies")
    done
    for ((index = count - 1; index >= 0; index--)); do
        patch_sglang "$copies" "${SGLANG_PATCHES[index]}" --reverse 2>/dev/null || { count=0; break; }
    done
    rm -rf "$copies"
    echo "$count"
}

check_machine
run_steps
if [ $DRY_RUN = no ]; then
    verify_steps
    echo "all is there; what is next: docs/training.md"
fi
