#!/usr/bin/env bash
# What sampling does on the toy: the best of n of the SFT model's responses, by the reward model;
# and what a truncated distribution (top_p) changes for the SFT model and for PPO's.
#   bash runs/sampling.sh [seed]      after runs/quickstart.sh of that seed
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"
out="out/sampling/$seed"
step tools/eval.py --policies=out/arithmetic_sft/policy --samples=16 --limit=256 --greedy=False \
    --reward_path=out/arithmetic_rm/reward_model --batch_size=256 --seed="$seed" \
    --out="$out/best_of"
for p in 1.0 0.9 0.5; do
    step tools/eval.py --policies=out/arithmetic_sft/policy,out/arithmetic_ppo/policy --samples=1 \
        --limit=256 --greedy=False --top_p="$p" --batch_size=256 --seed="$seed" \
        --out="$out/sampled_$p"
done
