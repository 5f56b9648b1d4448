#!/usr/bin/env bash
# PPO on the toy with a reward model that does not say where its zero is, and whose zero lies at
# -15, 0 and 15. The three must reach the same accuracy: docs/rewards.md has the numbers.
#   bash runs/zero.sh [seed] [value_init]     after runs/quickstart.sh of that seed
# With value_init = policy the three are one run: the zero is found, and all else is the same. With
# reward, the default, the value model begins with the bias that moves the zero, and trains it.
# On two cores of a Zen 4 it takes 161 s; two runs are made beside one another.
# For comparison, without a zero of ours:   ZERO=never bash runs/zero.sh 1 policy
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"
init="${2:-reward}" center="${ZERO:-auto}" runs=""
for by in -15 0 15; do
    step data/arithmetic/move_zero.py --by="$by" --out="out/zero/$seed/moved$by"
    run="out/zero/$seed/$init-$center$by"
    beside "$run.txt" ppo.py config/arithmetic_ppo.py --seed="$seed" --out_dir="$run" \
        --reward_path="out/zero/$seed/moved$by" --value_init="$init" --center_scores="$center"
    runs="$runs,$run"
done
all_end
step tools/plot.py --runs="${runs#,}" --out="out/zero/$seed/$init-$center.png" \
    --metrics=eval/accuracy,eval/finished,objective/score_shift
