#!/usr/bin/env bash
# A real model and real problems: SmolLM2-135M-Instruct and GSM-Symbolic, on one GPU.
# Data -> SFT -> GRPO -> PPO -> pairs -> reward model -> PPO with it -> a table, a picture, a page.
#   bash runs/smollm2.sh [seed]
#   CPU=1 bash runs/smollm2.sh [seed]     on two cores: sums of two and three numbers, by rules only
# The same command again goes on where it was stopped; delete out/smollm2_* to begin anew.
# SFT, RL, PPO, RM: more keys of the steps, as RL="--max_iters=40 --kl_coef=0" for GRPO and PPO.
# MODEL=FOLDER: another model; out/smollm2, of data/gsm_symbolic/model_from_wheel.py, is taken if it
# is there.
takes_seed=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
resumes="the same command goes on from there"
out=out/smollm2 data=data/gsm_symbolic tokens=192 dtype=bfloat16 limit=0
[ -n "${MODEL:-}" ] || { MODEL=HuggingFaceTB/SmolLM2-135M-Instruct; [ ! -d $out ] || MODEL=$out; }
runs=(grpo ppo ppo_rm)
if [ -n "${CPU:-}" ]; then
    choose_ranks
    out=out/sums data=data/sums tokens=48 dtype=float32 runs=(grpo ppo) limit=100
    ! grep -qs amx_bf16 /proc/cpuinfo || dtype=bfloat16  # 1.7 times as fast there
    SFT="--train_path=$data/sft_train.jsonl --max_iters=12 --batch_size=16 --dtype=$dtype ${SFT:-}"
    RL="--prompts_path=$data/rl_train.jsonl --eval_path=$data/rl_val.jsonl --max_new_tokens=$tokens
        --policy_path=${out}_sft/policy --dtype=$dtype --batch_size=64 --eval_interval=6
        --eval_size=64 --checkpoint_interval=3 --micro_batch_tokens=1024 --max_iters=12 --lora=16
        --learning_rate=2e-4 --kl_coef=0.01 ${RL:-}"
    PPO="--ppo_epochs=1 --num_minibatches=4 --learning_rate=1e-4 --value_learning_rate=1e-3
        --warmup_iters=2 ${PPO:-}"
elif ! [ -e $data/rl_new.jsonl ]; then
    "$PYTHON" -m pip install --no-deps reasoning-gym==0.1.25
fi
train() { make "${out}_$1" on_ranks "${@:2}" --seed="$seed" --out_dir="${out}_${1%%/*}"; }

make $data/rl_new.jsonl $data/prepare.py
train sft/policy sft.py config/smollm2_sft.py --init_from="$MODEL" ${SFT:-}
train grpo/policy grpo.py config/smollm2_grpo.py ${RL:-}
train ppo/policy ppo.py config/smollm2_ppo.py ${RL:-} ${PPO:-}
if [ -z "${CPU:-}" ]; then
    make $data/pairs_train.jsonl on_ranks data/arithmetic/pairs.py --pairs=1000 \
        --policy_path=${out}_sft/policy --prompts_path=$data/rl_train.jsonl \
        --max_new_tokens=$tokens --dtype=$dtype --seed="$seed"
    train rm/reward_model rm.py config/smollm2_rm.py ${RM:-}
    train ppo_rm/policy ppo.py config/smollm2_ppo.py ${RL:-} ${PPO:-} --value_init=reward \
        --reward_functions=reward_model --reward_path=${out}_rm/reward_model
fi

policies=$MODEL folders=
for run in sft "${runs[@]}"; do policies+=,${out}_$run/policy; done
for run in "${runs[@]}"; do folders+=${folders:+,}${out}_$run; done
for part in val:seen new:new; do
    step tools/eval.py --policies="$policies" --prompts_path=$data/rl_${part%:*}.jsonl \
        --out="${out}_${part#*:}" --samples=1 --limit=$limit --max_new_tokens=$tokens \
        --batch_size=512 --dtype=$dtype --reward_functions=accuracy
done
for run in grpo ppo; do
    step tools/memory.py $run.py config/smollm2_$run.py ${RL:-} | tee "${out}_$run.memory"
done
step data/gsm_symbolic/table.py $out
step tools/plot.py --runs="$folders" --out=$out.png
step tools/plot.py --runs="$folders" --out=$out.html
