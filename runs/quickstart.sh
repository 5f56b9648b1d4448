#!/usr/bin/env bash
# The whole pipeline on a laptop; no data and no model is downloaded.
# Data -> SFT -> pairs -> reward model -> PPO -> a table and a picture.
#   bash runs/quickstart.sh [seed]
# Every step is a command that you could type yourself; it is printed before it runs.
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
pin_threads

# Delete the folders of an earlier run: with the same seed there would be nothing left to do, and
# with another seed the run would be refused.
for old in out/arithmetic_{sft,rm,ppo} out/arithmetic_ppo.{png,html}; do
    if [ -e "$old" ]; then echo "removing $old of an earlier run"; rm -rf "$old"; fi
done
began=$SECONDS
step data/arithmetic/prepare.py
step sft.py config/arithmetic_sft.py --seed="$seed"
step data/arithmetic/pairs.py --seed="$seed"
step rm.py config/arithmetic_rm.py --seed="$seed"
echo; echo "Before PPO:"
step tools/sample.py --policy_path=out/arithmetic_sft/policy \
    --prompts=data/arithmetic/rl_val.jsonl --limit=6 \
    --reward_path=out/arithmetic_rm/reward_model --seed="$seed"
step ppo.py config/arithmetic_ppo.py --seed="$seed"
echo; echo "After PPO, the same prompts and the same noise:"
step tools/sample.py --policy_path=out/arithmetic_ppo/policy \
    --prompts=data/arithmetic/rl_val.jsonl --limit=6 \
    --reward_path=out/arithmetic_rm/reward_model --seed="$seed"
step tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.png
step tools/plot.py --runs=out/arithmetic_ppo --out=out/arithmetic_ppo.html
cat <<END

Done in $((SECONDS - began)) s. The table is of held-out problems: its first line is the SFT model,
its last line is the policy after PPO. Next:

Talk to the policy; type 123+456=
  python tools/sample.py --policy_path=out/arithmetic_ppo/policy
Watch the score rise while the accuracy falls:
  python ppo.py config/arithmetic_ppo.py config/arithmetic_overoptimize.py
  python tools/plot.py --runs=out/arithmetic_ppo,out/arithmetic_overoptimize --out=out/both.png
The same run on two processes:
  torchrun --nproc_per_node=2 ppo.py config/arithmetic_ppo.py --out_dir=out/two_ranks
Read the algorithm downward:
  less ppo.py
(python is $PYTHON)
END
