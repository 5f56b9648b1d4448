#!/usr/bin/env bash
# What ensembles buy against over-optimisation: config/arithmetic_overoptimize.py with one reward
# model, and with three whose minimum, penalised score or mean counts. Then a table and a picture,
# out/ensembles.png, of all seeds that have been run.
#   bash runs/ensembles.sh [seeds]      after runs/quickstart.sh 1; the seeds of PPO, as in "1 2 3"
# Two runs are made beside one another; with one seed it takes 109 s on two cores of a Zen 4.
seeds="${1:-1}"
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh" 1
# the first, second and third model: another head, another order of the pairs
models=(out/arithmetic_rm{,_2,_3}/reward_model)
for seed in 2 3; do
    beside "out/arithmetic_rm_$seed.txt" rm.py config/arithmetic_rm.py --seed="$seed" \
        --out_dir="out/arithmetic_rm_$seed"
done
all_end
three="${models[0]},${models[1]},${models[2]}"
for seed in $seeds; do
    run() {
        beside "out/ensembles/$1_$seed.txt" ppo.py config/arithmetic_overoptimize.py \
            --seed="$seed" --max_iters=6 --eval_interval=1 --checkpoint_interval=0 \
            --out_dir="out/ensembles/$1_$seed" "${@:2}"
    }
    run one --reward_path="${models[$(((seed - 1) % 3))]}"
    run min --reward_path="$three" --reward_ensemble=min
    run penalised --reward_path="$three" --reward_ensemble=penalised
    run mean --reward_path="$three" --reward_ensemble=mean
done
all_end
step runs/ensembles.py
