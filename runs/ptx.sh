#!/usr/bin/env bash
# What PPO-ptx buys: PPO on the toy without a KL penalty, with and without the SFT loss beside it.
# Then the loss of each policy, and of quickstart.sh's, on held-out demonstrations: what it forgot.
#   bash runs/ptx.sh [seed]      after runs/quickstart.sh of that seed
# On two cores of a Zen 4 it takes 100 s; two steps are made beside one another.
source "$(dirname "${BASH_SOURCE[0]}")/toy.sh"
out="out/ptx/$seed" runs="out/arithmetic_ppo" losses=""
for coef in 0 0.1 1; do
    ptx=() its="$out/ptx_$coef"
    [ "$coef" = 0 ] || ptx=(--ptx_path=data/arithmetic/sft_train.jsonl --ptx_coef="$coef")
    beside "$its.txt" ppo.py config/arithmetic_overoptimize.py --max_iters=6 --seed="$seed" \
        --checkpoint_interval=0 --out_dir="$its" "${ptx[@]}"
    runs="$runs,$its"
done
all_end
# sft.py says the held-out loss before its first step; that step, of learning rate 1e-12, is none
for policy in out/arithmetic_sft out/arithmetic_ppo "$out"/ptx_{0,0.1,1}; do
    its="$out/loss_of_$(basename "$policy")"
    beside "$its.txt" sft.py config/arithmetic_sft.py --init_from="$policy/policy" --max_iters=1 \
        --batch_size=1 --learning_rate=1e-12 --seed="$seed" --out_dir="$its"
    losses="$losses,$its"
done
all_end
step tools/plot.py --runs="$runs" --out=
step tools/plot.py --runs="${losses#,}" --out=
