#!/usr/bin/env bash
# PPO on the toy with a reward model that does not say where its zero is, and whose zero lies at
# -15, 0 and 15. The three must reach the same accuracy: docs/rewards.md has the numbers.
#   bash runs/zero.sh [seeds] [value_inits]    # such as: bash runs/zero.sh "1 2 3" "reward policy"
# For comparison, without a zero of ours:   ZERO=never bash runs/zero.sh 1 policy
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
center="${ZERO:-auto}"

step() { printf '\n\033[1m$ python %s\033[0m\n' "$*"; "$PYTHON" "$@" || exit; }

ended=""
step data/arithmetic/prepare.py
for seed in ${1:-1 2 3}; do
    models=out/zero/seed$seed
    if [ ! -d "$models/rm/reward_model" ]; then
        step sft.py config/arithmetic_sft.py --seed="$seed" --out_dir="$models/sft"
        step data/arithmetic/pairs.py --seed="$seed" --policy_path="$models/sft/policy"
        step rm.py config/arithmetic_rm.py --seed="$seed" --init_from="$models/sft/policy" \
            --out_dir="$models/rm"
    fi
    for init in ${2:-reward policy}; do
        for by in -15 0 15; do
            run="out/zero/seed$seed-$init-$center$by"
            step data/arithmetic/move_zero.py --reward_path="$models/rm/reward_model" --by="$by" \
                --out="$models/moved$by"
            step ppo.py config/arithmetic_ppo.py --seed="$seed" --out_dir="$run" \
                --policy_path="$models/sft/policy" --reward_path="$models/moved$by" \
                --value_init="$init" --center_scores="$center"
            ended="$ended,$run"
        done
    done
done
step tools/plot.py --runs="${ended#,}" --out="out/zero/$center.png" \
    --metrics=eval/accuracy,eval/finished,objective/score_shift
