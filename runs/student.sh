#!/usr/bin/env bash
# A reward model of a quarter of the size learns what the toy's says (rm.py --teacher); then PPO
# with the teacher and with the student, 15 iterations each.
#   bash runs/student.sh [seeds]      after runs/quickstart.sh 1; the seeds of PPO, as in "1 2 3"
# Two runs are made beside one another; with one seed it takes 134 s on two cores of a Zen 4.
seeds="${1:-1}"
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh" 1
step sft.py config/arithmetic_sft.py --d_model=64 --d_ff=192 --n_head=4 \
    --out_dir=out/arithmetic_sft_small
step rm.py config/arithmetic_rm.py --init_from=out/arithmetic_sft_small/policy \
    --teacher=out/arithmetic_rm/reward_model --learning_rate=1e-3 --max_iters=300 \
    --out_dir=out/arithmetic_rm_small
runs=""
for seed in $seeds; do
    for who in teacher student; do
        path=out/arithmetic_rm/reward_model
        if [ "$who" = student ]; then path=out/arithmetic_rm_small/reward_model; fi
        beside "out/student/${who}_$seed.txt" ppo.py config/arithmetic_ppo.py --seed="$seed" \
            --max_iters=15 --eval_interval=15 --checkpoint_interval=0 --reward_path="$path" \
            --out_dir="out/student/${who}_$seed"
        runs="$runs,out/student/${who}_$seed"
    done
done
all_end
step tools/plot.py --runs="${runs#,}" --out=
