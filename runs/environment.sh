# Sourced by the other scripts: a virtual environment with requirements.txt in it, made once, in .venv (or $QUARTET_VENV).
# If you are in a virtual environment of your own, that one is used. Sets $PYTHON. $more_requirements: files to install, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${QUARTET_VENV:-${VIRTUAL_ENV:-.venv}}"
if [ ! -x "$venv/bin/python" ]; then
    base=""
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then base=$candidate; break; fi
    done
    [ -n "$base" ] || { echo "quartet needs Python 3.11 or later; on Debian and Ubuntu: apt install python3 python3-venv" >&2; exit 2; }
    "$base" -c 'import ensurepip, venv' 2>/dev/null \
        || { echo "$base has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
    echo "+ $base -m venv $venv"
    "$base" -m venv "$venv"
fi
PYTHON="$venv/bin/python"
# install once for each version of the requirements
for file in requirements.txt ${more_requirements:-}; do
    stamp="$venv/.installed-$(basename "$file")"
    if ! cmp -s "$file" "$stamp"; then
        echo "+ $PYTHON -m pip install -r $file"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -r "$file"
        cp "$file" "$stamp"
    fi
done
