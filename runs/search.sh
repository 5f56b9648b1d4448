#!/usr/bin/env bash
# Thinking longer, by itself: search (data/search/prepare.py), a task on which long responses pay.
# Data -> SFT -> GRPO, and PPO with its value model -> accuracy and length over the iterations.
#   bash runs/search.sh [seed]
# Under ten minutes on two CPU cores; docs/search.md explains what it shows. After Ctrl-C the same
# command goes on. After its end, or with another seed, it begins anew, and first deletes
# out/search_{sft,grpo,ppo}. SFT, GRPO, PPO: more keys of the steps, as PPO="--lam=0.95".
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
resumes="the same command goes on from there"

unfinished=out/search_seed
go_on_or_begin $unfinished out/search_{sft,grpo,ppo} out/search.{html,png}
began=$SECONDS
step data/search/prepare.py
make out/search_sft/policy on_ranks sft.py config/search_sft.py --seed="$seed" ${SFT:-}
make out/search_grpo/policy on_ranks grpo.py config/search_grpo.py --seed="$seed" ${GRPO:-}
make out/search_ppo/policy on_ranks ppo.py config/search_ppo.py --seed="$seed" ${PPO:-}
for run in sft grpo ppo; do
    echo; echo "After $run, the same prompts and the same noise:"
    step tools/sample.py --policy_path=out/search_$run/policy --prompts=data/search/rl_val.jsonl \
        --limit=6 --max_new_tokens=160 --seed="$seed"
done
step tools/plot.py --runs=out/search_grpo,out/search_ppo --out=out/search.html
step tools/plot.py --runs=out/search_grpo,out/search_ppo --out=out/search.png --smooth=0.5 \
    --metrics=objective/reward/solved,objective/length
rm $unfinished
echo; echo "Done in $((SECONDS - began)) s; the curves: out/search.html, out/search.png"
