#!/usr/bin/env bash
# A reward model of a quarter of the size learns what the toy's says (rm.py --teacher); then PPO
# with the student, beside quickstart.sh's PPO with the teacher.
#   bash runs/student.sh [seed]      after runs/quickstart.sh of that seed
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"
out="out/student/$seed"
step sft.py config/arithmetic_sft.py --d_model=64 --d_ff=192 --n_head=4 --seed="$seed" \
    --out_dir="$out/sft"
step rm.py config/arithmetic_rm.py --init_from="$out/sft/policy" --learning_rate=1e-3 \
    --teacher=out/arithmetic_rm/reward_model --max_iters=300 --seed="$seed" --out_dir="$out/rm"
step ppo.py config/arithmetic_ppo.py --reward_path="$out/rm/reward_model" --seed="$seed" \
    --out_dir="$out/ppo"
step tools/plot.py --runs="out/arithmetic_ppo,$out/ppo" --out="$out.png"
