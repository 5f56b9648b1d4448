#!/usr/bin/env bash
# Several turns: a tiny model learns to ask a calculator.
# Data -> SFT -> GRPO -> PPO -> a table and a picture.
#   bash runs/calculator.sh [seed]
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
choose_ranks

remove out/calculator_{sft,grpo,ppo}
step data/calculator/prepare.py
on_ranks sft.py config/calculator_sft.py --seed="$seed"
on_ranks grpo.py config/calculator_grpo.py --seed="$seed"
on_ranks ppo.py config/calculator_ppo.py --seed="$seed"
step tools/sample.py --policy_path=out/calculator_grpo/policy \
    --prompts=data/calculator/rl_val.jsonl --limit=4 --seed="$seed" --trust_code=True
step tools/plot.py --runs=out/calculator_grpo,out/calculator_ppo --out=out/calculator.png
