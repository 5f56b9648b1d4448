#!/usr/bin/env bash
# quartet and TRL do the same work, in turns: PPO and GRPO. It prints the table of docs/scale.md:
# seconds, ratios, memory. (Sampling beside transformers: evidence/bench.py --work=sampling.)
#   bash evidence/peers.sh [keys of evidence/peers/table.py, as --rounds=3 --rows=grpo_full]
#   bash evidence/peers.sh same    does quartet compute what TRL computes? Four minutes
# out/peers gets two virtual environments, for which the network is needed once. PPO_PYTHON,
# GRPO_PYTHON: interpreters that have TRL 1.12 and 1.16 already. About 15 minutes on two cores, on
# which nothing else should run.
source "$(dirname "${BASH_SOURCE[0]}")/../runs/environment.sh"
torch="$("$PYTHON" -c 'import torch; print(torch.__version__)')"

# environment NAME PACKAGE...: prints the interpreter of an environment, which it makes once
environment() {
    local venv="$PWD/out/peers/$1" index=()
    shift
    # the CPU build of torch is not on PyPI
    case "$torch" in *+cpu) index=(--extra-index-url https://download.pytorch.org/whl/cpu) ;; esac
    if [ ! -e "$venv/.installed" ]; then
        echo "+ $PYTHON -m venv $venv; pip install $*" >&2
        "$PYTHON" -m venv --clear "$venv"
        "$venv/bin/pip" install --quiet --disable-pip-version-check "${index[@]}" "$@" >&2
        touch "$venv/.installed"
    fi
    echo "$venv/bin/python"
}

same=("torch==$torch" transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0)
ppo="${PPO_PYTHON:-$(environment trl-1.12 "${same[@]}" trl==1.12.0)}"  # the last TRL with this PPO
grpo="${GRPO_PYTHON:-$(environment trl-1.16 "${same[@]}" trl==1.16.0)}"
# each thread on a core of its own, as evidence/bench.py says: nothing else should run here
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_PROC_BIND=true OMP_PLACES=cores
script=table
[ "${1:-}" != same ] || { script=same; shift; }
exec "$PYTHON" -m "evidence.peers.$script" --ppo_python="$ppo" --grpo_python="$grpo" "$@"
