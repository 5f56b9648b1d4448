#!/usr/bin/env bash
# The record: seconds from the toy's SFT model to 95 % of its held-out problems. docs/speedrun.md has
# the rules and the records.
#   bash runs/speedrun.sh [seed]
#   RUN="grpo.py config/arithmetic_grpo.py --eval_size=0" bash runs/speedrun.sh 2    another entry
# The SFT model of a seed is made once, in out/speedrun/SEED, before the clock starts.
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
pin_threads
at=out/speedrun/$seed
[ -e data/arithmetic/rl_val.jsonl ] || step data/arithmetic/prepare.py
[ -e "$at/sft/policy" ] ||
    step sft.py config/arithmetic_sft.py --seed="$seed" --out_dir="$at/sft"
rm -rf "$at/run"
read -ra run <<< "${RUN:-grpo.py config/speedrun.py}"
TIMEFORMAT="%R s, %U + %S s of CPU"
{ time step "${run[@]}" --policy_path="$at/sft/policy" --out_dir="$at/run" --seed="$seed" 2>&3; } \
    3>&2 2> "$at/clock"
"$PYTHON" - "$at/run/log.jsonl" "$(tail -n 1 "$at/clock")" "${TARGET:-95}" <<'END'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as f:
    found = 100 * [record for line in f if "eval/accuracy" in (record := json.loads(line))][-1]["eval/accuracy"]
print(f"\n{found:.1f} % in {sys.argv[2]}: {'reached' if found >= float(sys.argv[3]) else 'MISSED'}")
sys.exit(found < float(sys.argv[3]))
END
