#!/usr/bin/env bash
# A task by every algorithm of this repository, with the same budget of sampled responses. The toy:
# docs/zoo.md and assets/zoo.png; --task=search: docs/search.md and assets/zoo_search.png.
#   bash runs/zoo.sh [keys of runs/zoo/zoo.py, as --seeds=4,5 --rows=ppo,grpo --out=out/two]
# Two runs at a time, of one thread each. The same command again goes on where it was stopped.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS=1
case " $* " in
    *" --task=search "*) make data/search/rl_val.jsonl data/search/prepare.py ;;
    *) make data/arithmetic/sft_hints.jsonl data/arithmetic/prepare.py ;;
esac
step runs/zoo/zoo.py "$@"
