#!/usr/bin/env bash
# The whole pipeline on a laptop; no data and no model is downloaded.
# Data -> SFT -> pairs -> reward model -> PPO -> a table and a page of curves and samples.
#   bash runs/quickstart.sh [seed]
# Every step is a command that you could type yourself; it is printed before it runs. After Ctrl-C
# the same command goes on. After its end, or with another seed, it begins anew, and first deletes
# the folders of the earlier run; to begin anew after Ctrl-C: rm out/quickstart_seed.
# On two ranks where there are two cores, as README's table; RANKS=1: on one process.
# SFT, PAIRS, RM, PPO: more keys of the steps, as PPO="--max_iters=40 --kl_coef=0".
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
resumes="the same command goes on from there"

unfinished=out/quickstart_seed
go_on_or_begin $unfinished out/arithmetic_{sft,rm,ppo} out/arithmetic_ppo.html
began=$SECONDS
shares=(2 45 4 8 2 33 2 4)  # of the steps below, in seconds of a quiet machine
step data/arithmetic/prepare.py
make out/arithmetic_sft/policy on_ranks sft.py config/arithmetic_sft.py --seed="$seed" ${SFT:-}
# where rm.py has begun, its pairs are complete
make out/arithmetic_rm on_ranks data/arithmetic/pairs.py --seed="$seed" ${PAIRS:-}
make out/arithmetic_rm/reward_model on_ranks rm.py config/arithmetic_rm.py --seed="$seed" ${RM:-}
echo; echo "Before PPO:"
step tools/sample.py --policy_path=out/arithmetic_sft/policy \
    --prompts=data/arithmetic/rl_val.jsonl --limit=6 \
    --reward_path=out/arithmetic_rm/reward_model --seed="$seed"
echo; echo "The curves while it runs, in another terminal:"
echo "  $PYTHON tools/plot.py --runs=out/arithmetic_ppo --out=out/live.html --watch=5"
make out/arithmetic_ppo/policy on_ranks ppo.py config/arithmetic_ppo.py --seed="$seed" ${PPO:-}
echo; echo "After PPO, the same prompts and the same noise:"
step tools/sample.py --policy_path=out/arithmetic_ppo/policy \
    --prompts=data/arithmetic/rl_val.jsonl --limit=6 \
    --reward_path=out/arithmetic_rm/reward_model --seed="$seed"
step tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.html
rm $unfinished
cat <<END

Done in $((SECONDS - began)) s. The table is of held-out problems: its first line is the SFT model,
its last line is the policy after PPO. docs/running.md explains each number that you have seen. Next:

Make "python" mean $PYTHON, in each new terminal:
  source $(dirname "$PYTHON")/activate
Talk to the policy; type 123+456=
  python tools/sample.py --policy_path=out/arithmetic_ppo/policy
Watch the score rise while the accuracy falls:
  python ppo.py config/arithmetic_ppo.py config/arithmetic_overoptimize.py
  python tools/plot.py --runs=out/arithmetic_ppo,out/arithmetic_overoptimize --out=out/both.png
The same run on three processes:
  torchrun --nproc_per_node=3 ppo.py config/arithmetic_ppo.py --out_dir=out/three_ranks
Read the algorithm downward:
  less ppo.py
END
