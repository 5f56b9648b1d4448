#!/usr/bin/env bash
# PPO on the toy with a reward model that does not say where its zero is, and whose zero lies at
# -15, 0 and 15. The three must reach the same accuracy: docs/rewards.md has the numbers.
<<<<<<< HEAD
#   bash runs/zero.sh [seeds] [value_inits]    # such as: bash runs/zero.sh "1 2 3" "reward policy"
=======
#   bash runs/zero.sh [seed] [value_inits]     after runs/quickstart.sh of that seed;
#                                              value_inits: "reward policy", or one of them
>>>>>>> dc5b101 (The toy's figures: one command a seed, from quickstart's models; PPO-ptx, best of n, truncated sampling)
# For comparison, without a zero of ours:   ZERO=never bash runs/zero.sh 1 policy
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"
center="${ZERO:-auto}" runs=""
for by in -15 0 15; do
    step data/arithmetic/move_zero.py --by="$by" --out="out/zero/$seed/moved$by"
done
for init in ${2:-reward policy}; do
    for by in -15 0 15; do
        run="out/zero/$seed/$init-$center$by"
        beside "$run.txt" ppo.py config/arithmetic_ppo.py --seed="$seed" --out_dir="$run" \
            --reward_path="out/zero/$seed/moved$by" --value_init="$init" --center_scores="$center"
        runs="$runs,$run"
    done
done
all_end
step tools/plot.py --runs="${runs#,}" --out="out/zero/$seed/$center.png" \
    --metrics=eval/accuracy,eval/finished,objective/score_shift
