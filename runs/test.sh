#!/usr/bin/env bash
# The whole test suite, in an environment of its own: no network after the install, no GPU. It took
# ten minutes on two cores of a Zen 4.
#   bash runs/test.sh [pytest options]
more_requirements=requirements-dev.txt
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$PYTHON" -m ruff check .
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the tests run several processes at a time as it is

# Two pytests beside one another where there are two cores. Each takes the next file that the other
# has not taken (tests/conftest.py), the longest files first. What the second one says is printed
# when both are done.
longest=(knobs roles reliability lora by_hand families two_machines zero tensor_parallel ppo grpo
         campaign compile sandbox sft_rm saving judge scores reward_models model
         memory tokenizers reference device off_policy tools explain seeing parallel readme)
files=("${longest[@]/#/tests/test_}")
files=("${files[@]/%/.py}")
for file in tests/test_*.py; do
    case " ${files[*]} " in *" $file "*) ;; *) files+=("$file") ;; esac
done
pytest=("$PYTHON" -m pytest -q "${files[@]}" "$@")
if [ "$("$PYTHON" -c 'import os; print(os.cpu_count() or 1)')" -lt 2 ]; then
    exec "${pytest[@]}"
fi
QUARTET_TAKEN=$(mktemp -d) codes=(0 0)
export QUARTET_TAKEN
"${pytest[@]}" -o cache_dir=.pytest_cache/2 > "$QUARTET_TAKEN/said" 2>&1 &
second=$!
trap 'kill "$second" 2>/dev/null || true; rm -rf "$QUARTET_TAKEN"' EXIT
"${pytest[@]}" -o cache_dir=.pytest_cache/1 || codes[0]=$?
wait "$second" || codes[1]=$?
cat "$QUARTET_TAKEN/said"
for code in "${codes[@]}"; do
    [ "$code" = 5 ] || [ "$code" = 0 ] || exit "$code"  # 5: the options leave no test
done
