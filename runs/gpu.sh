#!/usr/bin/env bash
# All that needs a GPU, in about eight minutes on one: no network, and nothing is installed.
#   bash runs/gpu.sh
# The tests that need a GPU, the first toy from its data to GRPO, and how fast models of three sizes
# sample and train. What they say goes to the terminal and to out/gpu/report.txt. A step that fails
# does not keep the next ones from running; the exit code is then 1. Without a GPU it is 2.
# It takes the Python of .venv, or python3, or the one you name: PYTHON=/my/python bash runs/gpu.sh
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${PYTHON:-}" ] || { PYTHON=python3; [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; }
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: torch sees no GPU here, so there is nothing to show" >&2
    exit 2
fi
out=out/gpu failed=""
rm -rf "$out"
mkdir -p "$out"
step() {
    printf '\n$ python %s\n' "$*"
    timeout 240 "$PYTHON" "$@" || { echo "FAILED: $*"; failed="$failed $1"; }
}
bench() {
    step tools/bench.py --device_type=cuda --dtype=bfloat16 --prompt_length=128 \
        --max_new_tokens=256 --repeats=2 "$@"
}
{
    "$PYTHON" -c 'import torch; print(torch.cuda.get_device_properties(0), torch.__version__)'
    step -m pytest -q -s -m gpu --durations=5 tests/test_gpu.py
    step data/arithmetic/prepare.py
    step sft.py config/arithmetic_sft.py --out_dir=$out/sft --device_type=cuda
    step grpo.py config/arithmetic_grpo.py --out_dir=$out/grpo --policy_path=$out/sft/policy \
        --max_iters=20 --eval_interval=20 --device_type=cuda
    bench --d_model=768 --n_layer=12 --n_head=12 --n_kv_head=12 --d_ff=2048 --vocab_size=32000 \
        --batch_size=256 --micro_batch_size=64 --lengths=real
    bench --d_model=2048 --n_layer=16 --n_head=32 --n_kv_head=8 --d_ff=8192 --vocab_size=128256 \
        --batch_size=256 --ppo=False --grpo=False
    bench --d_model=1536 --n_layer=28 --n_head=12 --n_kv_head=2 --d_ff=8960 --vocab_size=151936 \
        --batch_size=64 --ppo=False --grpo=False
    [ -z "$failed" ] || echo "failed:$failed"
    [ -z "$failed" ]
} 2>&1 | tee "$out/report.txt"
exit "${PIPESTATUS[0]}"
