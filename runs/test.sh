#!/usr/bin/env bash
# The whole test suite, in an environment of its own: no network after the install, no GPU, five and a half minutes
# on two cores.
#   bash runs/test.sh [pytest options]
more_requirements=requirements-dev.txt
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$PYTHON" -m ruff check .
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the tests run several processes at a time as it is

# Two halves, which take about as long, beside one another where there are two cores. What the second one
# says is printed when both are done.
first=(tests/test_{knobs,ppo,by_hand,reliability,tools,zero,code_task,sft_rm}.py)
second=()
for file in tests/test_*.py; do
    case " ${first[*]} " in *" $file "*) ;; *) second+=("$file") ;; esac
done
if [ "$("$PYTHON" -c 'import os; print(os.cpu_count() or 1)')" -lt 2 ]; then
    exec "$PYTHON" -m pytest -q "${first[@]}" "${second[@]}" "$@"
fi
said=$(mktemp) codes=(0 0)
"$PYTHON" -m pytest -q -o cache_dir=.pytest_cache/2 "${second[@]}" "$@" > "$said" 2>&1 &
second_half=$!
trap 'kill "$second_half" 2>/dev/null || true; rm -f "$said"' EXIT
"$PYTHON" -m pytest -q -o cache_dir=.pytest_cache/1 "${first[@]}" "$@" || codes[0]=$?
wait "$second_half" || codes[1]=$?
cat "$said"
for code in "${codes[@]}"; do
    [ "$code" = 5 ] || [ "$code" = 0 ] || exit "$code"  # 5: the options leave no test of this half
done
