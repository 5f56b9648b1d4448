#!/usr/bin/env bash
# The second toy: one-line programs. The sandbox runs each program, and scores it.
# Data -> SFT -> GRPO -> a table and a picture.
#   bash runs/code.sh [seed]
if ! command -v bwrap >/dev/null; then
    echo "code.sh: bwrap is missing, and model-written code runs nowhere else;" \
         "on Debian and Ubuntu: apt install bubblewrap" >&2
    exit 2
fi
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
choose_ranks

remove out/code_sft out/code_grpo
step data/code/prepare.py
on_ranks sft.py config/code_sft.py --seed="$seed"
on_ranks grpo.py config/code_grpo.py --seed="$seed"
step tools/sample.py --policy_path=out/code_grpo/policy \
    --prompts=data/code/rl_val.jsonl --limit=4 --seed="$seed"
step tools/plot.py --runs=out/code_grpo --out=out/code_grpo.png
