#!/usr/bin/env bash
# All that needs a GPU, in about eight minutes on one: the tests that are skipped elsewhere, and how
# fast models of three sizes sample and train. No network, and nothing is installed.
#   bash runs/gpu.sh
# The output also goes to out/gpu.txt. Exit code 1: a step has failed; the others still ran. Exit
# code 2: torch sees no GPU. PYTHON=/my/python bash runs/gpu.sh: another Python than .venv's.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${PYTHON:-}" ] || { PYTHON=python3; [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; }
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: torch sees no GPU here, so there is nothing to show" >&2
    exit 2
fi
failed=0
step() {
    printf '\n$ python %s\n' "$*"
    timeout 240 "$PYTHON" "$@" || { echo "FAILED: $*"; failed=1; }
}
bench() {
    step tools/bench.py --device_type=cuda --dtype=bfloat16 --prompt_length=128 \
        --max_new_tokens=256 --repeats=2 "$@"
}
mkdir -p out
{
    "$PYTHON" -c 'import torch; print(torch.cuda.get_device_properties(0), torch.__version__)'
    QUARTET_GPU="${CUDA_VISIBLE_DEVICES:-0}" step -m pytest -q -s --durations=5 tests/long/test_gpu.py
    bench --d_model=768 --n_layer=12 --n_head=12 --n_kv_head=12 --d_ff=2048 --vocab_size=32000 \
        --batch_size=256 --micro_batch_size=64 --lengths=real
    bench --d_model=2048 --n_layer=16 --n_head=32 --n_kv_head=8 --d_ff=8192 --vocab_size=128256 \
        --batch_size=64 --micro_batch_size=16 --work=sampling,grpo
    bench --d_model=1536 --n_layer=28 --n_head=12 --n_kv_head=2 --d_ff=8960 --vocab_size=151936 \
        --batch_size=64 --work=sampling
    exit "$failed"
} 2>&1 | tee out/gpu.txt
exit "${PIPESTATUS[0]}"
