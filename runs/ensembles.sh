#!/usr/bin/env bash
# What ensembles buy against over-optimisation: config/arithmetic_overoptimize.py with one reward
# model, and with three whose minimum, penalised score or mean counts; three seeds of each. Then a
# table and a picture, out/ensembles.png. After runs/quickstart.sh, whose models it begins with.
#   bash runs/ensembles.sh
# A run that is there already is not run again.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
step() { printf '\n\033[1m$ python %s\033[0m\n' "$*"; "$PYTHON" "$@"; }
if [ ! -d out/arithmetic_rm/reward_model ]; then
    echo "ensembles.sh: no out/arithmetic_rm/reward_model; type bash runs/quickstart.sh first" >&2
    exit 2
fi
one() {
    if [ "$1" = 1 ]; then echo out/arithmetic_rm/reward_model
    else echo "out/arithmetic_rm_$1/reward_model"; fi
}
for seed in 2 3; do
    step rm.py config/arithmetic_rm.py --seed="$seed" --out_dir="out/arithmetic_rm_$seed"
done
three="$(one 1),$(one 2),$(one 3)"
for seed in 1 2 3; do
    run() {
        step ppo.py config/arithmetic_overoptimize.py --seed="$seed" --max_iters=6 \
            --eval_interval=1 --checkpoint_interval=0 --out_dir="out/ensembles/$1_$seed" "${@:2}"
    }
    run one --reward_path="$(one "$seed")"
    run min --reward_path="$three" --reward_ensemble=min
    run penalised --reward_path="$three" --reward_ensemble=penalised
    run mean --reward_path="$three" --reward_ensemble=mean
done
step runs/ensembles.py
