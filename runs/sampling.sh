#!/usr/bin/env bash
# What sampling does on the toy: the best of n of the SFT model's responses, by the reward model,
# beside PPO; and PPO with a truncated distribution (top_p), sampled truncated and whole afterwards.
#   bash runs/sampling.sh [seed]      after runs/quickstart.sh of that seed
# On two cores of a Zen 4 it takes 120 s; the two runs of PPO are made beside one another.
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"
out="out/sampling/$seed"
for p in 0.9 0.5; do
    beside "$out/top_p_$p.txt" ppo.py config/arithmetic_ppo.py --top_p="$p" --seed="$seed" \
        --out_dir="$out/top_p_$p"
done
all_end
step tools/plot.py --runs="out/arithmetic_ppo,$out/top_p_0.9,$out/top_p_0.5" --out=
step tools/eval.py --policies=out/arithmetic_sft/policy --samples=16 --limit=256 --greedy=False \
    --reward_path=out/arithmetic_rm/reward_model --batch_size=256 --seed="$seed" \
    --out="$out/best_of"
policies="out/arithmetic_sft/policy,out/arithmetic_ppo/policy"
policies="$policies,$out/top_p_0.9/policy,$out/top_p_0.5/policy"
for p in 1.0 0.9 0.5; do
    step tools/eval.py --policies="$policies" --samples=1 --limit=256 --greedy=False --top_p="$p" \
        --batch_size=256 --seed="$seed" --out="$out/sampled_$p"
done
