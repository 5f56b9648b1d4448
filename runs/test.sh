#!/usr/bin/env bash
# The whole test suite, in an environment of its own: tests/ and evidence/tests. After the install
# it needs no network, and no GPU. The last lines say how many tests were skipped, and why. (Those in
# evidence/needs need a GPU, vLLM, transformers 4, root or a downloaded model: evidence/README.md.)
#   bash runs/test.sh [pytest options]
#   OLDEST=1 bash runs/test.sh   the same with the oldest transformers of requirements.txt
#   NEWEST=1 bash runs/test.sh   with the newest transformers and torch that pip finds
#   KERNELS=oldest bash runs/test.sh   as on a CPU with SSE 4.1 and nothing newer
extras=dev,math
[ -z "${OLDEST:-}" ] || QUARTET_VENV="${QUARTET_VENV:-.venv-oldest}"
[ -z "${NEWEST:-}" ] || QUARTET_VENV="${QUARTET_VENV:-.venv-newest}"
case "${KERNELS:-}" in
    "") ;;
    oldest) export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE ;;
    *) echo "test.sh: KERNELS can be oldest, given '$KERNELS'" >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ -n "${OLDEST:-}" ]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check \
        "$(grep -o '^transformers>=[0-9.]*' requirements.txt | sed 's/>=/==/')"
fi
if [ -n "${NEWEST:-}" ]; then
    newest=(torch "$(grep -o '^transformers[^ ]*' requirements.txt)")
    # as in environment.sh: without an NVIDIA GPU the CPU build, where its index can be reached
    [ -e /dev/nvidiactl ] || newest+=(--extra-index-url https://download.pytorch.org/whl/cpu)
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --upgrade "${newest[@]}"
fi
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)  # the sandbox of the code reward
command -v g++ >/dev/null || missing+=(g++)  # for the key compile
# without them the tests that need them are skipped
[ ${#missing[@]} = 0 ] || install_packages "${missing[@]}" || true
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the tests run several processes at a time as it is
# a file's tests stay together: they share runs that take seconds. One process more than cores,
# because tests of several ranks wait; more than four would only wait for the longest file
cores=$("$PYTHON" -c 'import os
print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')
"$PYTHON" -m pytest -q -rs -n $((cores < 4 ? cores + 1 : 4)) --dist loadfile --no-loadscope-reorder \
    tests/test_*.py evidence/tests/test_*.py "$@"
# the style comes last, and only of files that git knows: yours may look as they like
git ls-files '*.py' 2>/dev/null | xargs -r "$PYTHON" -m ruff check
