#!/usr/bin/env bash
# The toy by every algorithm of this repository, with the same budget of sampled responses: it makes
# docs/zoo.md and assets/zoo.png.
#   bash runs/zoo.sh [keys of runs/zoo/zoo.py, as --seeds=4,5 --rows=ppo,grpo --out=out/two]
# Two runs at a time, of one thread each. The same command again goes on where it was stopped.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS=1
make data/arithmetic/rl_val.jsonl data/arithmetic/prepare.py
make data/arithmetic/sft_hints.jsonl data/arithmetic/hints.py
step runs/zoo/zoo.py "$@"
