#!/usr/bin/env bash
# A real model and real problems, on one GPU, in about ten minutes: SmolLM2-135M-Instruct and
# GSM-Symbolic. Data -> SFT -> GRPO -> PPO -> pairs -> reward model -> PPO with it -> a table, a
# page, a picture.
#   bash runs/smollm2.sh [seed]
# The same command again goes on where it was stopped; delete out/smollm2_* to begin anew.
# ITERS=60 iterations of GRPO and PPO; MODEL=FOLDER another model (out/smollm2, if it is there: see
# data/gsm_symbolic/model_from_wheel.py); OPTIONS="--batch_size=8 ..." more keys for GRPO and PPO.
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=out/smollm2 data=data/gsm_symbolic
[ -n "${MODEL:-}" ] || { MODEL=HuggingFaceTB/SmolLM2-135M-Instruct; [ ! -d $out ] || MODEL=$out; }
# a step, unless what it makes is there: made FOLDER COMMAND
make() { if [ -e "$1" ]; then echo "$1 is there"; else step "${@:2}"; fi; }
train() { make "$out"_"$1" "${@:2}" --seed="$seed" --out_dir="$out"_"${1%%/*}"; }
rl="--max_iters=${ITERS:-60} ${OPTIONS:-}"

[ -e $data/rl_new.jsonl ] || "$PYTHON" -m pip install --no-deps reasoning-gym==0.1.25
make $data/rl_new.jsonl $data/prepare.py
train sft/policy sft.py config/smollm2_sft.py --init_from="$MODEL" ${SFT_OPTIONS:-}
train grpo/policy grpo.py config/smollm2_grpo.py $rl
train ppo/policy ppo.py config/smollm2_ppo.py $rl
make $data/pairs_train.jsonl data/arithmetic/pairs.py --policy_path=${out}_sft/policy \
    --prompts_path=$data/rl_train.jsonl --pairs="${PAIRS:-1000}" --max_new_tokens=192 \
    --dtype=bfloat16 --seed="$seed"
train rm/reward_model rm.py config/smollm2_rm.py ${RM_OPTIONS:-}
train ppo_rm/policy ppo.py config/smollm2_ppo.py $rl --value_init=reward \
    --reward_functions=reward_model --reward_path=${out}_rm/reward_model

for run in grpo ppo; do
    make ${out}_$run.memory tools/memory.py config/smollm2_$run.py > ${out}_$run.memory
done
policies=$MODEL,${out}_sft/policy,${out}_grpo/policy,${out}_ppo/policy,${out}_ppo_rm/policy
for part in val:seen new:new; do
    step tools/eval.py --policies=$policies --prompts_path=$data/rl_${part%:*}.jsonl \
        --out=${out}_${part#*:} --samples=1 --max_new_tokens=192 --batch_size=512 --dtype=bfloat16
done
step $data/table.py $out
step tools/plot.py --runs=${out}_grpo,${out}_ppo,${out}_ppo_rm --out=$out.png
step tools/page.py --run=${out}_grpo,${out}_ppo,${out}_ppo_rm --out=$out.html
