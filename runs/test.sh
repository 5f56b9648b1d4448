#!/usr/bin/env bash
# The whole test suite, in an environment of its own: no network after the install, no GPU, about 10 minutes on two cores.
#   bash runs/test.sh [pytest options]
more_requirements=requirements-dev.txt
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$PYTHON" -m ruff check .
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the tests run two processes at a time as it is
"$PYTHON" -m pytest -q tests "$@"
