# The other scripts source this file. It makes a virtual environment, once, in .venv or
# $QUARTET_VENV, and installs requirements.txt there, in the versions of requirements.lock. If an
# environment is active, it uses that one. It sets $PYTHON. $extras: those of pyproject.toml to
# install, too. $QUARTET_PYTHON: an interpreter that has them all; then it installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# A script may set `shares`: of each step, in order, its part of the whole time, roughly. Then a line
# says which step this is, and how long all of them will still take, told by those that have run here
shares=() number=0 took=0 known=0
place() {
    local left=0 share
    for share in "${shares[@]:$((number - 1))}"; do left=$((left + share)); done
    [ ${#shares[@]} = 0 ] || printf 'step %s of %s' "$number" ${#shares[@]}
    # in minutes, as the lines of a run; rounded up, so that it never says 0
    [ "$known" -lt 10 ] || printf ', about %s min left' "$((took * left / known / 60 + 1))"
    [ ${#shares[@]} = 0 ] || echo
}
# typed LINE COMMAND: print the line that one would type, and run the command
typed() {
    local began=$SECONDS
    number=$((number + 1))
    printf '\n'
    place
    printf '\033[1m$ %s\033[0m\n' "$1"
    "${@:2}"
    took=$((took + SECONDS - began)) known=$((known + ${shares[$((number - 1))]:-0}))
}
# a step: a command that you could type yourself; it is printed before it runs
step() { typed "python $*" "$PYTHON" "$@"; }
# the same on $RANKS ranks
on_ranks() {
    if [ "${RANKS:-1}" = 1 ]; then step "$@"; return; fi
    typed "torchrun --nproc_per_node=$RANKS $*" "$PYTHON" runs/ranks.py "$RANKS" "$@"
}
# make PATH COMMAND: a step, unless what it makes is there. COMMAND: for python, or on_ranks ...
make() {
    if [ -e "$1" ]; then
        number=$((number + 1))
        echo "$1 is there"
    elif [ "$2" = on_ranks ]; then
        "${@:2}"
    else
        step "${@:2}"
    fi
}
# remove PATH ...: what an earlier run has left; with it nothing would be done, or the run refused
remove() {
    for old in "$@"; do
        if [ -e "$old" ]; then echo "removing $old of an earlier run"; rm -rf "$old"; fi
    done
}
# go_on_or_begin FILE PATH ...: FILE is there from the first step to the last one, and has the seed
# and the number of ranks, which a run keeps. Where it has another seed, or is not there, the paths of
# an earlier run are removed
go_on_or_begin() {
    local began_with ranks
    read -r began_with ranks < <(cat "$1" 2>/dev/null) || true
    if [ "$began_with" = "$seed" ]; then
        choose_ranks "${ranks:-1}"
        echo "going on where it was stopped, on $RANKS rank(s); to begin anew: rm $1"
    else
        choose_ranks
        remove "$@"
        mkdir -p out
        echo "$seed $RANKS" > "$1"
    fi
}
# Ctrl-C reaches the step, too, which saves and exits 0: without this the next step would begin
resumes="the last command above resumes when you type it"
trap 'echo "$(basename "$0"): stopped; $resumes" >&2; exit 130' INT
# --help prints the comment at the head of the script
case "${1-}" in --help | -h) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
# A script that sets takes_seed may be given a seed and nothing else. It is looked at here, before
# anything is installed.
if [ -n "${takes_seed:-}" ]; then
    seed="${1-1}"
    # no 01 and no 20 digits: sft.py would refuse them, when the folders of an earlier run are gone
    if [ $# -gt 1 ] || ! [[ "$seed" =~ ^(0|[1-9][0-9]{0,17})$ ]]; then
        echo "$(basename "$0"): wanted a seed such as 2, given '$*'" >&2
        exit 2
    fi
fi
# Small operations gain little from more threads. They are not pinned to cores: that is somewhat
# faster where nothing else runs, and several times slower where another program has these cores.
# PASSIVE: a thread that has nothing to do sleeps, where it would else take a core from the others.
few_threads() {
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(($(getconf _NPROCESSORS_ONLN) < 2 ? 1 : 2))}"
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
}
# choose_ranks [NUMBER]: on how many ranks a script trains, one thread each: NUMBER, or $RANKS, or two
# where there are two cores (more than two have not been measured). Where they do not meet, as where
# the machine's own name leads nowhere: one
choose_ranks() {
    RANKS="${1:-${RANKS:-$(($(getconf _NPROCESSORS_ONLN) < 2 ? 1 : 2))}}"
    if [ "$RANKS" != 1 ] && ! "$PYTHON" runs/ranks.py "$RANKS" 2>/dev/null; then
        echo "$RANKS ranks do not meet within 10 s on this machine; so there is one"
        RANKS=1
    fi
    if [ "$RANKS" = 1 ]; then few_threads; else export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"; fi
}
# needs_toy: the SFT model that runs/quickstart.sh has made with this seed
needs_toy() {
    grep -qs "\"seed\": $seed\b" out/arithmetic_sft/config.json && return
    echo "$(basename "$0"): there is no out/arithmetic_sft of seed $seed; first:" \
         "bash runs/quickstart.sh $seed" >&2
    exit 2
}
# packages of the system, where this user may install some: as root, on Debian and Ubuntu
install_packages() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "+ apt-get install $*"
        apt-get update -qq && apt-get install -y -qq "$@" >/dev/null
    fi
}
if ! [[ "${RANKS-1}" =~ ^[1-9][0-9]?$ ]]; then
    echo "$(basename "$0"): wanted RANKS=1 or another number of ranks, given RANKS='$RANKS'" >&2
    exit 2
fi
if [ -n "${QUARTET_PYTHON:-}" ]; then
    PYTHON="$QUARTET_PYTHON"
    return
fi
venv="${QUARTET_VENV:-${VIRTUAL_ENV:-.venv}}"
# the first Python that is new enough and can make an environment
find_python() {
    local needs='import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))'
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c "$needs" 2>/dev/null; then echo "$candidate"; return; fi
    done
}
if [ ! -x "$venv/bin/python" ]; then
    base=$(find_python)
    if [ -z "$base" ]; then
        install_packages python3 python3-venv || true
        base=$(find_python)
    fi
    if [ -z "$base" ]; then
        echo "quartet needs Python 3.11 or later with its module venv;" \
             "on Debian and Ubuntu: apt install python3 python3-venv" >&2
        exit 2
    fi
    echo "+ $base -m venv $venv"
    "$base" -m venv "$venv"
fi
PYTHON="$venv/bin/python"
# PyPI's torch brings gigabytes of CUDA. Without an NVIDIA GPU the CPU build is taken, from PyTorch's
# own index; where that cannot be reached, what pip finds elsewhere
torch=$(grep -o '^torch==[0-9.]*' requirements.txt)
if [ "$(uname -s)" = Linux ] && ! [ -e /dev/nvidiactl ] && ! "$PYTHON" -c 'import torch' 2>/dev/null
then
    echo "no NVIDIA GPU here: + $PYTHON -m pip install $torch (the CPU build)"
    "$PYTHON" -m pip install --disable-pip-version-check --no-deps --retries 0 --timeout 30 "$torch" \
        --index-url https://download.pytorch.org/whl/cpu ||
        echo "PyTorch's own index cannot be reached; pip takes its usual one"
fi
# install once for each version of the requirements, and each extra
stamp="$venv/.installed${extras:+-$extras}"
if ! cat requirements.txt requirements.lock pyproject.toml | cmp -s - "$stamp"; then
    wanted=(-r requirements.txt ${extras:+".[$extras]"} -c requirements.lock)
    echo "+ $PYTHON -m pip install ${wanted[*]}"
    "$PYTHON" -m pip install --disable-pip-version-check "${wanted[@]}"
    cat requirements.txt requirements.lock pyproject.toml > "$stamp"
fi
