#!/usr/bin/env bash
# What ensembles buy against over-optimisation: config/arithmetic_overoptimize.py with one reward
# model, and with three whose minimum, penalised score or mean counts. Then a table and a picture,
# out/ensembles.png, of all seeds that have been run.
#   bash runs/ensembles.sh [seed]      after runs/quickstart.sh of that seed
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"
out="out/ensembles/$seed" three=out/arithmetic_rm/reward_model
for other in $((seed + 10)) $((seed + 20)); do  # same pairs, another head, another order
    beside "$out/rm_$other.txt" rm.py config/arithmetic_rm.py --seed="$other" \
        --out_dir="$out/rm_$other"
    three="$three,$out/rm_$other/reward_model"
done
all_end
run() {
    beside "$out/$1.txt" ppo.py config/arithmetic_overoptimize.py --seed="$seed" --max_iters=6 \
        --eval_interval=1 --checkpoint_interval=0 --out_dir="$out/$1" "${@:2}"
}
run one
run min --reward_path="$three" --reward_ensemble=min
run penalised --reward_path="$three" --reward_ensemble=penalised
run mean --reward_path="$three" --reward_ensemble=mean
all_end
step runs/ensembles.py
