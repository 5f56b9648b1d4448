#!/usr/bin/env bash
# The record: seconds from the toy's SFT model to 95 % of its held-out problems; the rules and the
# entries are in docs/speedrun.md.
#   bash runs/speedrun.sh [seed]
#   RUN="grpo.py config/arithmetic_grpo.py" bash runs/speedrun.sh 2    another entry
# The SFT model of a seed is made once, in out/speedrun/SEED, before the clock starts.
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
few_threads
at=out/speedrun/$seed
make data/arithmetic/rl_val.jsonl data/arithmetic/prepare.py
make "$at/sft/policy" sft.py config/arithmetic_sft.py --seed="$seed" --out_dir="$at/sft"
rm -rf "$at/run"
read -ra run <<< "${RUN:-grpo.py config/speedrun.py}"
TIMEFORMAT="%R s, %U + %S s of CPU"
{ time step "${run[@]}" --policy_path="$at/sft/policy" --out_dir="$at/run" --seed="$seed" 2>&3; } \
    3>&2 2> "$at/clock"
# behind the clock: the saved policy answers all held-out problems greedily
"$PYTHON" tools/eval.py --policies="$at/run/policy" --prompts_path=data/arithmetic/rl_val.jsonl \
    --reward_functions=accuracy --samples=0 --out="$at/judged" >/dev/null
found=$(grep -A 1 '"greedy accuracy"' "$at/judged.json" | grep -o '[0-9.]*' | head -n 1)
awk -v found="$found" -v wanted="${TARGET:-0.95}" -v clock="$(tail -n 1 "$at/clock")" 'BEGIN {
    printf "\n%.1f %% in %s: %s\n", 100 * found, clock, found < wanted ? "MISSED" : "reached"
    exit found < wanted
}'
