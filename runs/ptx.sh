#!/usr/bin/env bash
# What PPO-ptx buys: PPO on the toy with and without the SFT loss beside it, under the KL penalty
# and without one. Then each policy's loss on held-out demonstrations: what it has forgotten.
#   bash runs/ptx.sh [seed]      after runs/quickstart.sh of that seed
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"
out="out/ptx/$seed" runs="out/arithmetic_ppo" losses=""
run() {
    beside "$out/$1.txt" ppo.py "${@:2}" --seed="$seed" --checkpoint_interval=0 --out_dir="$out/$1"
    runs="$runs,$out/$1"
}
ptx="--ptx_path=data/arithmetic/sft_train.jsonl"
run ptx config/arithmetic_ppo.py "$ptx"
run free config/arithmetic_overoptimize.py --max_iters=6
run free_ptx config/arithmetic_overoptimize.py --max_iters=6 "$ptx"
all_end
# sft.py says the held-out loss before its first step; that step, of learning rate 1e-12, is none
for policy in out/arithmetic_sft out/arithmetic_ppo "$out"/{ptx,free,free_ptx}; do
    its="$out/loss_of_$(basename "$policy")"
    beside "$its.txt" sft.py config/arithmetic_sft.py --init_from="$policy/policy" --max_iters=1 \
        --batch_size=1 --learning_rate=1e-12 --seed="$seed" --out_dir="$its"
    losses="$losses,$its"
done
all_end
step tools/plot.py --runs="$runs" --out=
step tools/plot.py --runs="${losses#,}" --out=
