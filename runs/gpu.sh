#!/usr/bin/env bash
# All that needs a GPU, in two parts of about six minutes each: the tests that are skipped
# elsewhere, and how fast models of three sizes sample and train. No network, nothing is installed.
#   bash runs/gpu.sh        both parts
#   bash runs/gpu.sh 1      a 1B model: decoding, update, TRL's GRPO beside ours; the tests; 135M
#   bash runs/gpu.sh 2      compiled: decoding, update; GRPO; vLLM beside our sampler; PPO; 1.5B
# What matters most comes first. The output also goes to out/gpu.txt (out/gpu1.txt). Exit code 1: a
# step has failed; the others still ran. 2: torch sees no GPU. PYTHON=/my/python bash runs/gpu.sh:
# another Python than .venv's. QUARTET_GPU=cpu: on a CPU, with tiny models, to try the script.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${PYTHON:-}" ] || { PYTHON=python3; [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; }
part="${1:-12}" cpu=
[ "${QUARTET_GPU:-}" != cpu ] || cpu=yes
if [ -z "$cpu" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
then
    echo "gpu.sh: torch sees no GPU here, so there is nothing to show" >&2
    exit 2
fi
failed=0
step() {
    printf '\n%s s$ python %s\n' "$SECONDS" "$*"
    timeout -s INT -k 20 180 "$PYTHON" "$@" || { echo "FAILED: $*"; failed=1; }
}
bench() {
    local sizes=(--device_type=cuda --dtype=bfloat16 --prompt_length=128 --max_new_tokens=256
                 --repeats=1 "$@")
    [ -z "$cpu" ] || sizes+=(
        --device_type=cpu --dtype=float32 --d_model=32 --n_layer=1 --n_head=2 --n_kv_head=1
        --d_ff=48 --vocab_size=64 --batch_size=4 --micro_batch_size=2 --prompt_length=6
        --max_new_tokens=8 --repeats=1)
    step evidence/bench.py "${sizes[@]}"
}
has() { "$PYTHON" -c "import $1" 2>/dev/null || { echo "skipped: $1 is not installed"; false; }; }
m135="--d_model=576 --n_layer=30 --n_head=9 --n_kv_head=3 --d_ff=1536 --vocab_size=49152"
b1="--d_model=2048 --n_layer=16 --n_head=32 --n_kv_head=8 --d_ff=8192 --vocab_size=128256"
b15="--d_model=1536 --n_layer=28 --n_head=12 --n_kv_head=2 --d_ff=8960 --vocab_size=151936"
peers=(--device_type=cuda --dtype=bfloat16)
[ -z "$cpu" ] || peers=(--device_type=cpu)
mkdir -p out
{
    [ -n "$cpu" ] || "$PYTHON" -c 'import torch
print(torch.cuda.get_device_properties(0), torch.__version__)'
    if [[ $part = *1* ]]; then
        bench $b1 --batch_size=64 --micro_batch_size=16 --work=sampling,update --head_chunk=2048
        has trl && step -m evidence.peers.table --grpo_python="$PYTHON" --rows=grpo_full --rounds=1 \
            --steps=2 "${peers[@]}"
        # with xdist, what the tests print comes at the end
        at_once="$("$PYTHON" -c 'import xdist; print("-n 4 -rP")' 2>/dev/null || echo -s)"
        QUARTET_GPU="${QUARTET_GPU:-${CUDA_VISIBLE_DEVICES:-0}}" \
            step -m pytest -q $at_once --durations=5 evidence/needs/test_gpu.py ${TESTS:-}
        bench $m135 --batch_size=512 --micro_batch_size=64 --work=sampling,update
    fi
    if [[ $part = *2* ]]; then
        # 64 tokens: the minute is for torch.compile
        bench $b1 --batch_size=64 --work=sampling --compile=True --max_new_tokens=64
        bench $b1 --micro_batch_size=16 --work=update --compile=True
        bench $b1 --batch_size=64 --micro_batch_size=16 --work=grpo --repeats=2
        has vllm && bench $b1 --batch_size=64 --micro_batch_size=16 --work=grpo --run_keys=sampler=vllm
        bench $m135 --batch_size=256 --micro_batch_size=64 --lengths=real --work=ppo --repeats=2
        bench $b15 --batch_size=64 --work=sampling
    fi
    exit "$failed"
} 2>&1 | tee "out/gpu${1:-}.txt"
exit "${PIPESTATUS[0]}"
