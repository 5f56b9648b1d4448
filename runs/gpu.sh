#!/usr/bin/env bash
# All that needs a GPU, in under eight minutes on one: no network, nothing is installed.
#   bash runs/gpu.sh              # leaves gpu_report.md and gpu_report.json
#   bash runs/gpu.sh --dry-run    # what it would do
# It takes the Python of .venv, or python3, or the one you name: PYTHON=/my/python bash runs/gpu.sh
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${PYTHON:-}" ] || { PYTHON=python3; [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python; }
exec "$PYTHON" runs/gpu.py "$@"
