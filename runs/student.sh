#!/usr/bin/env bash
# A reward model of a quarter of the size learns what the toy's says (rm.py --teacher); then PPO
# with the teacher and with the student, three seeds each. Run runs/quickstart.sh first: its models
# are needed.
#   bash runs/student.sh
# A run that is there already is not run again.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
step() { printf '\n\033[1m$ python %s\033[0m\n' "$*"; "$PYTHON" "$@"; }
if [ ! -d out/arithmetic_rm/reward_model ]; then
    echo "student.sh: no out/arithmetic_rm/reward_model; type bash runs/quickstart.sh first" >&2
    exit 2
fi
step sft.py config/arithmetic_sft.py --d_model=64 --d_ff=192 --n_head=4 \
    --out_dir=out/arithmetic_sft_small
step rm.py config/arithmetic_rm.py --init_from=out/arithmetic_sft_small/policy \
    --teacher=out/arithmetic_rm/reward_model --learning_rate=1e-3 --max_iters=300 \
    --out_dir=out/arithmetic_rm_small
runs=""
for seed in 1 2 3; do
    for who in teacher student; do
        path=out/arithmetic_rm/reward_model
        if [ "$who" = student ]; then path=out/arithmetic_rm_small/reward_model; fi
        step ppo.py config/arithmetic_ppo.py --seed="$seed" --max_iters=15 --eval_interval=15 \
            --checkpoint_interval=0 --reward_path="$path" --out_dir="out/student/${who}_$seed"
        runs="$runs,out/student/${who}_$seed"
    done
done
step tools/plot.py --runs="${runs#,}" --out=
