"""
One command that proves it on a GPU: `bash runs/gpu.sh`. It runs each check below in a process of
its own, with a time limit, whatever came of the others, and writes gpu_report.md and .json.

    python runs/gpu.py                   # all checks
    python runs/gpu.py tests toy         # only these
    python runs/gpu.py --dry-run         # what it would run
    python runs/gpu.py --page            # docs/gpu.md, from docs/gpu.json
    python runs/gpu.py --page=gpu_report.json    # that report becomes docs/gpu.json first

A process leaves its figures in a file whose path is in $QUARTET_FIGURES: a line of JSON for each,
{"name": ..., "value": ..., "unit": ...}. FIGURES says what they are, and what is wanted of them.
"""
import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MINUTES = 8  # for all checks; those for which no time is left are not run
PAGE = os.path.join(ROOT, "docs", "gpu.md")
TORCH = (2, 11)
NEEDED = "torch numpy safetensors tiktoken transformers pytest".split()


@dataclass
class Check:
    """A step of the list: commands, one after the other until one fails, in `seconds` together."""

    what: str
    seconds: int
    commands: list  # of the words behind "python"
    read: object = list  # when all went well: a function that returns more figures


def keys(**settings):
    return [f"--{key}={value}" for key, value in settings.items()]


def bench(name, what, seconds, **settings):
    """A check that is a run of tools/bench.py."""
    file = f"{OUT}/{name}.json"
    return Check(what, seconds, [["tools/bench.py", *keys(
        json=file, device_type="cuda", dtype="bfloat16", prompt_length=128, max_new_tokens=256,
        repeats=2, **settings)]], lambda: read_bench(file, name))


def read_bench(file, name):
    """The numbers of tools/bench.py's --json, as figures: "small, ppo, update", ..."""
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        tables = json.load(f)
    return [figure(f"{name}, {row}, {column}", value) for row, columns in tables.items()
            if isinstance(columns, dict) for column, value in columns.items()
            if isinstance(value, (int, float))]


def read_toy():
    """The held-out accuracy of the run of grpo.py, at its begin and at its end."""
    with open(os.path.join(ROOT, OUT, "grpo", "log.jsonl"), encoding="utf-8") as f:
        seen = [x["eval/accuracy"] for x in map(json.loads, f) if "eval/accuracy" in x]
    return [figure("toy accuracy before", 100 * seen[0], "%"),
            figure("toy accuracy after", 100 * seen[-1], "%")]


def figure(name, value, unit=""):
    return dict(name=name, value=value, unit=unit)


ADDITION = "data/arithmetic"  # the built-in task
OUT = "out/gpu"
CHECKS = {
    "tests": Check("the tests that need a GPU", 170, [
        ["-m", "pytest", "-q", "-m", "gpu", "--durations=5", "tests/test_gpu.py"]]),
    "toy": Check("the built-in task, from the data to GRPO, shortened", 90, [
        [f"{ADDITION}/prepare.py"],
        ["sft.py", "config/arithmetic_sft.py", *keys(out_dir=f"{OUT}/sft", device_type="cuda")],
        ["grpo.py", "config/arithmetic_grpo.py", *keys(
            out_dir=f"{OUT}/grpo", policy_path=f"{OUT}/sft/policy", max_iters=20, eval_interval=20,
            device_type="cuda")]], read_toy),
    "profile": Check("where the time goes: three iterations of PPO on 125M parameters", 60, [
        ["runs/gpu_profile.py", f"--out={OUT}/profile"]]),
    "small": bench("small", "how fast: 125M parameters in bf16, sampling, PPO and GRPO", 90,
                   d_model=768, n_layer=12, n_head=12, n_kv_head=12, d_ff=2048, vocab_size=32000,
                   batch_size=256, micro_batch_size=64, lengths="real"),
    "llama": bench("llama", "how fast: Llama 1B in bf16, sampling", 75, d_model=2048, n_layer=16,
                   n_head=32, n_kv_head=8, d_ff=8192, vocab_size=128256, batch_size=256,
                   lengths="full", ppo=False, grpo=False),
    "qwen": bench("qwen", "how fast: Qwen2.5 1.5B in bf16, sampling", 75, d_model=1536, n_layer=28,
                  n_head=12, n_kv_head=2, d_ff=8960, vocab_size=151936, batch_size=64,
                  lengths="full", ppo=False, grpo=False),
}
FIGURES = {  # name -> what it is, what is wanted
    "gpu busy": ("share of an iteration of PPO in which the GPU computes", "90 % at least"),
    "gap bfloat16": ("sampler against training forward, mean", "below 0.02 nats"),
    "gap float16": ("the same in float16", "below 0.02 nats"),
    "gap float32": ("the same in float32, largest", "below 1e-4 nats"),
    "ratio gap bfloat16": ("the first step's ratio, distance from 1", "0"),
    "cost of deterministic": ("seconds of a training step, against those without", "-"),
    "impossible tokens": ("of 10^8 draws at vocabularies of 32k to 152k", "0"),
    "toy accuracy before": ("held-out problems, the SFT model", "about 30 %"),
    "toy accuracy after": ("the same after 20 iterations of GRPO", "above 80 %"),
}


# --------------------------------------------------------------------------------------------------
# running


def what_is_missing():
    """In one line what this machine lacks; "" if nothing."""
    if sys.version_info < (3, 11):  # noqa: UP036, for the Python that is there may be older
        return f"Python 3.11 or later is needed, and this is {sys.version.split()[0]}"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return (f"{' and '.join(missing)} cannot be imported by {sys.executable}; nothing is "
                "installed here, so name a Python that has them: PYTHON=... bash runs/gpu.sh")
    import torch

    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < TORCH:
        return f"torch 2.11 or later is needed, and this is {torch.__version__}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here; there is nothing to run"
    return ""


def machine():
    """The GPU and the versions, for the report."""
    import torch

    gpu = torch.cuda.get_device_properties(0)
    return {"GPU": gpu.name, "memory": f"{gpu.total_memory / 2**30:.1f} GiB",
            "GPUs": torch.cuda.device_count(), "torch": torch.__version__,
            "CUDA": torch.version.cuda, "Python": sys.version.split()[0]}


def run(check, figures, seconds):
    """
    Run a check in so many seconds at most. figures: the file for its figures. Returns a dict:
    outcome ("passed", "failed", "timed out"), seconds, what it said last, its figures.
    """
    began, said, outcome = time.monotonic(), "", "passed"
    os.makedirs(os.path.dirname(figures), exist_ok=True)
    open(figures, "w").close()
    environment = os.environ | {"QUARTET_FIGURES": figures, "HF_HUB_OFFLINE": "1"}
    for command in check.commands:
        left = seconds - (time.monotonic() - began)
        code, words = run_one([sys.executable, *command], environment, left)
        said += words.strip() + "\n"
        if code != 0:
            outcome = "timed out" if code is None else "failed"
            said += f"[python {' '.join(command)}: " + (
                "time is up]" if code is None else f"exit code {code}]")
            break
    with open(figures, encoding="utf-8") as f:
        found = [json.loads(line) for line in f]
    try:
        found += check.read() if outcome == "passed" else []
    except (OSError, LookupError, ValueError) as e:
        outcome, said = "failed", f"{said}\n[its figures cannot be read: {type(e).__name__}: {e}]"
    return dict(outcome=outcome, seconds=round(time.monotonic() - began, 1),
                said=said.strip().splitlines()[-40:], figures=found)


def run_one(command, environment, seconds):
    """
    (exit code, or None where the time was up; what was said). A process that hangs is ended with
    all that it has started: it has a group of its own.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True)
    try:
        said, _ = process.communicate(timeout=seconds)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return None, said


# --------------------------------------------------------------------------------------------------
# the report, and the page


def write_report(path, device, results):
    """Write path.json and path.md. results: {name of a check: what `run` returns}."""
    report = dict(device=device, checks=results)
    with open(f"{path}.json", "w", encoding="utf-8") as f:
        json.dump(report, f, indent=1)
    with open(f"{path}.md", "w", encoding="utf-8") as f:
        f.write("\n".join(["# What a GPU says", "", *tables(report), *transcripts(report)]))


def tables(report):
    """The lines of the report that are tables: the machine, the checks, the figures."""
    device, results = (report or {}).get("device", {}), (report or {}).get("checks", {})
    lines = [*(f"- {name}: {value}" for name, value in device.items()), *([""] * bool(device))]
    lines += ["| check | what | outcome | seconds |", "|---|---|---|---|"]
    for name, check in CHECKS.items():
        done = results.get(name, dict(outcome="not run yet", seconds="-"))
        lines.append(f"| {name} | {check.what} | {done['outcome']} | {done['seconds']} |")
    found = {}
    for done in results.values():
        found |= {x["name"]: f"{x['value']:.4g} {x.get('unit', '')}".strip()
                  for x in done["figures"]}
    lines += ["", "| figure | what it is | wanted | measured |", "|---|---|---|---|"]
    for name in [*FIGURES, *(name for name in found if name not in FIGURES)]:
        what, wanted = FIGURES.get(name, ("", "-"))
        lines.append(f"| {name} | {what} | {wanted} | {found.get(name, 'missing')} |")
    return [*lines, ""]


def transcripts(report):
    """What each check said last."""
    lines = []
    for name, done in report["checks"].items():
        said = [f"    {line}" for line in done["said"]]
        lines += [f"## {name}: {done['outcome']}", "", *said, ""]
    return lines


def page(report):
    """docs/gpu.md, from a report; None: there is none yet."""
    begin = ["# On a GPU", "",
             "What needs a GPU is one command, which installs nothing and needs no network:", "",
             "    bash runs/gpu.sh", "    bash runs/gpu.sh --dry-run    # what it would do", "",
             "It leaves `gpu_report.md` and `gpu_report.json`. "
             "This page is made from such a report:",
             "", "    python runs/gpu.py --page=gpu_report.json", ""]
    if report is None:
        begin += ["**No report is there yet: nobody has run it on a GPU, and every figure below is",
                  "missing.** What could be tested without one is: the same code on a CPU, and "
                  "whole",
                  "runs on a pretended GPU, which finds tensors in two places and operations that",
                  "have no exact kernel (`tests/test_device.py`).", ""]
    return "\n".join(begin + tables(report))


def make_page(report):
    """Write docs/gpu.md. report: a file that becomes docs/gpu.json first, or ""."""
    kept = PAGE.replace(".md", ".json")
    if report:
        with open(report, encoding="utf-8") as f, open(kept, "w", encoding="utf-8") as g:
            g.write(f.read())
    with open(PAGE, "w", encoding="utf-8") as f:
        f.write(page(kept_report()))


def kept_report():
    """The report in docs/gpu.json; None if there is none."""
    kept = PAGE.replace(".md", ".json")
    if not os.path.exists(kept):
        return None
    with open(kept, encoding="utf-8") as f:
        return json.load(f)


def refuse(message):
    print(f"gpu.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checks", nargs="*")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--page", nargs="?", const="", metavar="REPORT")
    parser.error = refuse
    options = parser.parse_args(arguments)
    wrong = [name for name in options.checks if name not in CHECKS]
    if wrong:
        refuse(f"{wrong[0]!r} is no check; they are {', '.join(CHECKS)}")
    if options.page is not None:
        return make_page(options.page)
    chosen = {name: CHECKS[name] for name in options.checks or CHECKS}
    if options.dry_run:
        for name, check in chosen.items():
            print(f"{name}: {check.what}; at most {check.seconds} s")
            print("\n".join(f"    python {' '.join(command)}" for command in check.commands))
        return
    missing = what_is_missing()
    if missing:
        refuse(missing)
    os.chdir(ROOT)
    shutil.rmtree(OUT, ignore_errors=True)  # of an earlier run
    all_of(chosen, machine(), "gpu_report")


def all_of(checks, device, path):
    """Run these checks, and write the report after each one: path.md and path.json."""
    results, began = {}, time.monotonic()
    for name, check in checks.items():
        left = 60 * MINUTES - (time.monotonic() - began)
        if left < 5:
            break
        print(f"{name}: {check.what} ...", end=" ", flush=True)
        results[name] = run(check, f"{OUT}/{name}.figures", min(check.seconds, left))
        print(f"{results[name]['outcome']} in {results[name]['seconds']} s", flush=True)
        write_report(path, device, results)
    failed = [name for name in checks if results.get(name, {}).get("outcome") != "passed"]
    print(f"{path}.md: {', '.join(failed) + ' did not pass' if failed else 'all have passed'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
