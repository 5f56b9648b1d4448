#!/usr/bin/env bash
# A real model and real problems: SmolLM2-135M-Instruct and GSM-Symbolic, on one GPU, in about ten
# minutes. Data -> SFT -> GRPO -> PPO -> pairs -> reward model -> PPO with it -> a table, a picture
# and a page.
#   bash runs/smollm2.sh [seed]
#   CPU=1 bash runs/smollm2.sh [seed]     sums of two and three numbers, on two cores
# The same command again goes on where it was stopped; delete out/smollm2_* to begin anew. ITERS=60:
# iterations of GRPO and PPO. MODEL=FOLDER: another model; out/smollm2, if it is there, is what
# data/gsm_symbolic/model_from_wheel.py makes. SFT, RL, RM: more keys, as RL="--batch_size=64".
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=out/smollm2 data=data/gsm_symbolic tokens=192 dtype=bfloat16
[ -n "${MODEL:-}" ] || { MODEL=HuggingFaceTB/SmolLM2-135M-Instruct; [ ! -d $out ] || MODEL=$out; }
if [ -n "${CPU:-}" ]; then
    pin_threads
    out=out/sums data=data/sums tokens=40 dtype=float32 ITERS="${ITERS:-16}" PAIRS="${PAIRS:-150}"
    SFT="--train_path=$data/sft_train.jsonl --max_iters=60 --batch_size=16 --dtype=$dtype ${SFT:-}"
    RL="--prompts_path=$data/rl_train.jsonl --eval_path=$data/rl_val.jsonl --max_new_tokens=$tokens
        --policy_path=${out}_sft/policy --dtype=$dtype --batch_size=64 --eval_interval=8
        --eval_size=100 --checkpoint_interval=4 --micro_batch_tokens=1024 ${RL:-}"
    RM="--train_path=$data/pairs_train.jsonl --val_path=$data/pairs_val.jsonl --max_iters=20
        --init_from=${out}_sft/policy --dtype=$dtype --batch_size=16 ${RM:-}"
else
    [ -e $data/rl_new.jsonl ] || "$PYTHON" -m pip install --no-deps reasoning-gym==0.1.25
fi
# make PATH COMMAND: a step, unless what it makes is there
make() { if [ -e "$1" ]; then echo "$1 is there"; else step "${@:2}"; fi; }
train() { make "${out}_$1" "${@:2}" --seed="$seed" --out_dir="${out}_${1%%/*}"; }

make $data/rl_new.jsonl $data/prepare.py
train sft/policy sft.py config/smollm2_sft.py --init_from="$MODEL" ${SFT:-}
train grpo/policy grpo.py config/smollm2_grpo.py --max_iters="${ITERS:-60}" ${RL:-}
train ppo/policy ppo.py config/smollm2_ppo.py --max_iters="${ITERS:-60}" ${RL:-}
make $data/pairs_train.jsonl data/arithmetic/pairs.py --policy_path=${out}_sft/policy \
    --prompts_path=$data/rl_train.jsonl --pairs="${PAIRS:-1000}" --max_new_tokens=$tokens \
    --dtype=$dtype --seed="$seed"
train rm/reward_model rm.py config/smollm2_rm.py ${RM:-}
train ppo_rm/policy ppo.py config/smollm2_ppo.py --max_iters="${ITERS:-60}" ${RL:-} \
    --value_init=reward --reward_functions=reward_model --reward_path=${out}_rm/reward_model

policies=$MODEL
for run in sft grpo ppo ppo_rm; do policies+=,${out}_$run/policy; done
for part in val:seen new:new; do
    step tools/eval.py --policies="$policies" --prompts_path=$data/rl_${part%:*}.jsonl \
        --out="${out}_${part#*:}" --samples=1 --max_new_tokens=$tokens --batch_size=512 \
        --dtype=$dtype --reward_functions=accuracy
done
for run in grpo ppo; do
    step tools/memory.py config/smollm2_$run.py ${RL:-} | tee "${out}_$run.memory"
done
step data/gsm_symbolic/table.py $out
runs=${out}_grpo,${out}_ppo,${out}_ppo_rm
step tools/plot.py --runs=$runs --out=$out.png
step tools/plot.py --runs=$runs --out=$out.html
