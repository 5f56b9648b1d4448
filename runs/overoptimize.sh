#!/usr/bin/env bash
# Over-optimisation at home (Gao et al., arXiv 2210.10760): PPO without a KL penalty, against reward
# models that have seen 40, 250 and 2,000 pairs. In 3 of 10 pairs chosen and rejected are swapped,
# because people err, too. Then the true accuracy over the KL. About ten minutes on two CPU cores,
# after `bash runs/quickstart.sh SEED`.
#   bash runs/overoptimize.sh [seed]
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
needs_toy
choose_ranks
remove out/pairs_{40,250,2000}{,_rm}
on_ranks data/arithmetic/pairs.py --mistakes=0.3 --name=noisy --seed="$seed"
for pairs in 40 250 2000; do
    head -n $pairs data/arithmetic/noisy_train.jsonl > data/arithmetic/noisy_$pairs.jsonl
    on_ranks rm.py config/arithmetic_rm.py --train_path=data/arithmetic/noisy_$pairs.jsonl \
        --out_dir=out/pairs_${pairs}_rm --seed="$seed"
    on_ranks ppo.py config/arithmetic_ppo.py config/arithmetic_overoptimize.py --eval_interval=1 \
        --reward_path=out/pairs_${pairs}_rm/reward_model --out_dir=out/pairs_$pairs \
        --max_iters=20 --learning_rate=1e-4 --value_learning_rate=3e-4 --seed="$seed"
done
step tools/plot.py --runs=out/pairs_40,out/pairs_250,out/pairs_2000 --against=eval/kl \
    --metrics=eval/accuracy,eval/scores --out=out/overoptimize.png
