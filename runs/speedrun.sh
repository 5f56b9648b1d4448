#!/usr/bin/env bash
# The record: seconds from an SFT model to 95 % of the toy's held-out problems, greedily, or to 65 %
# of samples to those of search; the rules and the entries are in docs/speedrun.md.
#   bash runs/speedrun.sh [seed]
#   RUN="grpo.py config/arithmetic_grpo.py" bash runs/speedrun.sh 2    another entry
#   TASK=search bash runs/speedrun.sh [seed]                           the harder task
# The SFT model is made once, before the clock starts: one for each seed, in out/speedrun; of search
# one for all, in out/speedrun_search.
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
few_threads
case "${TASK:=arithmetic}" in
    arithmetic) at=out/speedrun/$seed sft=$at/sft sft_seed=$seed first="grpo.py config/speedrun.py"
        wanted=0.95 figure="greedy accuracy"
        judge="--reward_functions=accuracy --max_new_tokens=48 --samples=0" ;;
    search) at=out/speedrun_search/$seed sft=out/speedrun_search/sft sft_seed=1
        first="ppo.py config/search_ppo.py --eval_path= --max_iters=20"
        wanted=0.65 figure="sampled reward/solved"
        judge="--reward_functions=data/search/reward.py:solved --max_new_tokens=160 --samples=4" ;;
    *) echo "speedrun.sh: TASK=$TASK: wanted arithmetic or search" >&2; exit 2 ;;
esac
make data/$TASK/rl_val.jsonl data/$TASK/prepare.py
make "$sft/policy" sft.py config/${TASK}_sft.py --seed="$sft_seed" --out_dir="$sft"
mkdir -p "$at"
rm -rf "$at/run"
read -ra run <<< "${RUN:-$first}"
TIMEFORMAT="%R s, %U + %S s of CPU"
{ time step "${run[@]}" --policy_path="$sft/policy" --out_dir="$at/run" --seed="$seed" 2>&3; } \
    3>&2 2> "$at/clock"
# behind the clock: the saved policy answers all held-out problems
"$PYTHON" tools/eval.py --policies="$at/run/policy" --prompts_path=data/$TASK/rl_val.jsonl \
    $judge --out="$at/judged" >/dev/null
found=$(grep -A 1 "\"$figure\"" "$at/judged.json" | grep -o '[0-9.]*' | head -n 1)
awk -v found="$found" -v wanted="${TARGET:-$wanted}" -v clock="$(tail -n 1 "$at/clock")" 'BEGIN {
    printf "\n%.1f %% in %s: %s\n", 100 * found, clock, found < wanted ? "MISSED" : "reached"
    exit found < wanted
}'
