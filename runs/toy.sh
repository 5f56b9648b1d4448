# The scripts that measure something on the first toy source this file with a seed: student.sh,
# ensembles.sh, zero.sh, ptx.sh, sampling.sh, judge.sh. It asks that quickstart.sh has left its
# models of that seed in out/, and sets $seed.
# A run that is there already goes on, or is not run again: delete its folder to begin anew.
seed="${1:-1}"
case "$seed" in
    *[!0-9]*) echo "$(basename "$0"): the seed must be a number, given '$seed'" >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
for of in sft rm ppo; do
    if ! grep -qs "\"seed\": $seed\b" "out/arithmetic_$of/config.json"; then
        echo "$(basename "$0"): there is no out/arithmetic_$of of seed $seed;" \
             "first: bash runs/quickstart.sh $seed" >&2
        exit 2
    fi
done

pin_threads

# beside FILE ARGUMENTS: a step that runs beside others, on one core each, as many at a time as
# there are cores, but two at most, or $AT_ONCE. What it says is written to FILE.
AT_ONCE="${AT_ONCE:-$(($(getconf _NPROCESSORS_ONLN) < 2 ? 1 : 2))}"
running=() said=()  # process ids, and their files
trap 'kill "${running[@]}" 2>/dev/null || true' EXIT
beside() {
    while [ "${#running[@]}" -ge "$AT_ONCE" ]; do first_ends; done
    printf '\n\033[1m$ python %s\033[0m > %s\n' "${*:2}" "$1"
    mkdir -p "$(dirname "$1")"
    OMP_NUM_THREADS=1 OMP_PROC_BIND=false "$PYTHON" "${@:2}" > "$1" 2>&1 &
    running+=($!) said+=("$1")
}
# wait for the step that began first; where it fails, so does the script
first_ends() {
    wait "${running[0]}" || { code=$?; tail -n 20 "${said[0]}" >&2; exit "$code"; }
    running=("${running[@]:1}") said=("${said[@]:1}")
}
all_end() { while [ "${#running[@]}" -gt 0 ]; do first_ends; done; }
