#!/usr/bin/env bash
# Feedback from a language model, on the first toy: a judge is trained, and takes the place of the
# checker. Run it after `bash runs/quickstart.sh SEED`; the policy starts as its SFT model.
#   bash runs/judge.sh [seed] [labels | reward]
# labels: judge -> pairs -> reward model -> PPO, to compare with quickstart.sh's PPO.
# reward: judge -> GRPO, with the judge as the reward.
# On two cores of a Zen 4 and with RANKS=1 the first takes 173 s, the second 137 s.
way="${2:-labels}"
case "$way" in
    labels | reward) ;;
    *) echo "judge.sh: wanted labels or reward, given '$way'" >&2; exit 2 ;;
esac
set -- "${1-1}"
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
needs_toy
choose_ranks
remove out/arithmetic_judge out/arithmetic_judge_{rm,ppo,grpo}
step data/arithmetic/judge.py --seed="$seed"
on_ranks sft.py config/arithmetic_judge_sft.py --seed="$seed"
if [ "$way" = reward ]; then
    on_ranks grpo.py config/arithmetic_grpo.py config/arithmetic_judge_grpo.py --seed="$seed"
    step tools/plot.py --runs=out/arithmetic_judge_grpo --out=out/arithmetic_judge_grpo.png
else
    step data/label.py --judge_path=out/arithmetic_judge/policy \
        --judge_template=data/arithmetic/judge.txt --min_confidence=0.9 --pairs=2000 \
        --held_out=200 --out=data/arithmetic/labels_train.jsonl --seed="$seed"
    on_ranks rm.py config/arithmetic_rm.py --train_path=data/arithmetic/labels_train.jsonl \
        --val_path=data/arithmetic/labels_train_val.jsonl --out_dir=out/arithmetic_judge_rm \
        --seed="$seed"
    on_ranks ppo.py config/arithmetic_ppo.py --reward_path=out/arithmetic_judge_rm/reward_model \
        --out_dir=out/arithmetic_judge_ppo --seed="$seed"
    step tools/plot.py --runs=out/arithmetic_judge_ppo --out=out/arithmetic_judge_ppo.png
fi
