#!/usr/bin/env bash
# What it costs to train on older batches, and what it brings: GRPO on the toy with two ranks, one
# that trains and one that samples, at staleness 0, 1, 2 and 4. Then a table and a picture,
# out/staleness.png. About a minute a run on two CPU cores; let nothing else run meanwhile.
#   bash runs/staleness.sh [seeds]               as in: bash runs/staleness.sh "1 2 3"
# A run that is there already is not run again.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
unset OMP_PROC_BIND OMP_PLACES
export OMP_NUM_THREADS=1  # for each of two ranks
seeds="${1:-1}"

if [ ! -e data/arithmetic/rl_train.jsonl ]; then step data/arithmetic/prepare.py; fi
for seed in $seeds; do
    sft="out/staleness/sft_$seed"
    if [ ! -d "$sft/policy" ]; then
        step sft.py config/arithmetic_sft.py --seed="$seed" --out_dir="$sft"
    fi
    for staleness in 0 1 2 4; do
        run="out/staleness/${staleness}_$seed"
        if [ ! -d "$run/policy" ]; then
            step -m torch.distributed.run --standalone --nproc_per_node=2 \
                grpo.py config/arithmetic_grpo.py --roles=train=1,generate=1 \
                --staleness="$staleness" --seed="$seed" --policy_path="$sft/policy" \
                --eval_interval=4 --checkpoint_interval=0 --out_dir="$run"
        fi
    done
done
step runs/staleness.py --seeds="${seeds// /,}"
