#!/usr/bin/env bash
# The whole test suite, about 10 minutes on two cores. It needs no GPU, and no network after the
# install.
#   bash runs/test.sh [pytest options]
more_requirements=requirements-dev.txt
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$PYTHON" -m ruff check .
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the tests themselves run two processes at a time
"$PYTHON" -m pytest -q tests "$@"
