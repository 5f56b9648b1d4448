#!/usr/bin/env bash
# The whole test suite, in an environment of its own: no network after the install, no GPU, about 5 minutes
# on two cores.
#   bash runs/test.sh [pytest options]
more_requirements=requirements-dev.txt
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$PYTHON" -m ruff check .
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the tests run several processes at a time as it is

# Three parts beside one another where there are two cores or more: the first two compute, and take about
# as long; the tests of the third mostly wait, for time limits and for processes. What the second and the
# third one say is printed when all are done.
first=(tests/test_{knobs,ppo,by_hand,tools,zero,code_task,sft_rm}.py)
third=(tests/test_{sandbox,reliability,campaign}.py)
second=()
for file in tests/test_*.py; do
    case " ${first[*]} ${third[*]} " in *" $file "*) ;; *) second+=("$file") ;; esac
done
if [ "$("$PYTHON" -c 'import os; print(os.cpu_count() or 1)')" -lt 2 ]; then
    exec "$PYTHON" -m pytest -q "${first[@]}" "${second[@]}" "${third[@]}" "$@"
fi
said=$(mktemp -d) codes=(0 0 0)
"$PYTHON" -m pytest -q -o cache_dir=.pytest_cache/2 "${second[@]}" "$@" > "$said/2" 2>&1 &
part2=$!
"$PYTHON" -m pytest -q -o cache_dir=.pytest_cache/3 "${third[@]}" "$@" > "$said/3" 2>&1 &
part3=$!
trap 'kill "$part2" "$part3" 2>/dev/null || true; rm -rf "$said"' EXIT
"$PYTHON" -m pytest -q -o cache_dir=.pytest_cache/1 "${first[@]}" "$@" || codes[0]=$?
wait "$part2" || codes[1]=$?
wait "$part3" || codes[2]=$?
cat "$said/2" "$said/3"
for code in "${codes[@]}"; do
    [ "$code" = 5 ] || [ "$code" = 0 ] || exit "$code"  # 5: the options leave no test of this part
done
