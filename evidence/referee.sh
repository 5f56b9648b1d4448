#!/usr/bin/env bash
# What other trainers compute, formula by formula, beside quartet: writes evidence/referee.md, in a
# minute. Functions are cut out of their wheels, which pip downloads to out/referee; nothing of them
# is installed, and no GPU is needed. A column whose wheel cannot be had is left out.
#   bash evidence/referee.sh [keys of evidence/referee/table.py, as --wheels=FOLDER --page=out/referee.md]
source "$(dirname "${BASH_SOURCE[0]}")/../runs/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m evidence.referee.table "$@"
