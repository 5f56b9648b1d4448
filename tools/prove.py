"""
Does a changed script keep quartet's promises? It is run some twenty times with everything small,
each time with one thing changed that must change nothing, and what comes out is compared.

    python tools/prove.py grpo.py config/mine_fork.py --my_key=0.3      # the command of a run
    python tools/prove.py grpo.py config/mine_fork.py --only=resume     # one promise
    python tools/prove.py grpo.py config/mine_fork.py --deep            # three minutes, not one

It knows no algorithm. It reads log.jsonl and the final weights, and looks in at some functions of
the rooms to say where two runs part (prove_seen.py). The models are random ones of 16 numbers a
token, in float64. Keys that make a run large are made small; what is typed as --key=value stays.

The exit code is 0 if all promises are kept, whatever the notes say; 1 if one is broken; 2 for a
wrong command; 3 if the small run cannot be made. What it cannot see: a formula that is wrong in the
same way everywhere (for that: tests/by_hand.py), and what other keys than yours would do.
"""
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from types import SimpleNamespace

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                   TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")
if __name__ == "__main__" and "PYTHONHASHSEED" not in os.environ:  # it counts from a start on
    os.execve(sys.executable, [sys.executable, *sys.argv],
              os.environ | dict(PYTHONHASHSEED="0", PYTHONUNBUFFERED="1"))
sys.path[:0] = [f"{HERE}/tools", HERE, f"{HERE}/data", f"{HERE}/tests"]

import configurator  # noqa: E402  before torch
import small_world  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from errors import BadInput  # noqa: E402
from prove_seen import before  # noqa: E402
from prove_words import (CAUSES, CHANGED, EXACT, LOOKS, MAY_DIFFER, NOTES, PIECES,  # noqa: E402
                         PROMISES, REFUSED)

torch.set_num_threads(1)
TOLERANCE = 1e-7  # of sums in another order; mistakes change 1e-4 and more
PLACE = "kind", "name", "iteration", "step"  # of a difference


# -------------------------------------------------------------------------------------------------
# the run, made small

def shrink(script, argv, world):
    """(what is typed for a small run, all keys): the fork's own keys where they do no harm."""
    keys = configurator.read_keys(script)
    scripts_own = {*keys}
    keys = configurator.read_keys(f"{root_of(script)}/config/keys.py") | keys
    typed = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")}
    given = {name: value for name, (value, _) in configurator.read_arguments(keys, argv).items()}
    own = {name: given.get(name, key.default) for name, key in keys.items()}
    turns, group = own.get("environment") or own.get("tools"), own.get("group_size", 0)
    group = group if "group_size" in typed else min(group, 3)

    small = dict(
        device_type="cpu", dtype="float64", timeout=30, max_iters=4, epochs=0.0, eval_interval=2,
        eval_size=2, batch_size=3 * group or 6, group_size=group, micro_batch_size=2,
        micro_batch_tokens=0, rollout_batch_size=0, head_chunk=0, checkpoint_interval=0,
        sync_check_interval=1, report_to="", save_rollouts=0, keep_best="", compile=False,
        zero_stage="", offload="", roles="", sampler="own", generate_tp=1, quantize="none",
        max_prompt_tokens=0, max_tokens=0, system_prompt="", template_kwargs="", chat_template="",
        fields="", tools="", init_from=world.policy, tokenizer_path=world.policy,
        policy_path=world.policy, ref_path=world.older, judge_path=world.policy,
        reward_path=world.reward, teacher=world.reward)
    if turns:
        small |= small_world.several_turns(world)
        small["environment"] = own.get("environment") or world.talks
    for name, value in own.items():
        whole = type(value) is int
        if name in ("ref_path", "judge_path", "reward_path", "teacher") and not value:
            small[name] = value
        elif name in ("num_minibatches", "ppo_epochs", "num_iterations") and value > 2:
            small[name] = 2
        elif name == "max_new_tokens":
            small[name] = min(value, 16 if turns else 6)
        elif name.endswith("learning_rate") and value > 0:
            small[name] = max(value, 5e-3)
        elif whole and (name.endswith(("_iters", "_steps", "_interval", "_every"))
                        or "iterations" in keys[name].comment):
            small.setdefault(name, min(value, 2))  # all of it must happen in four iterations
        elif isinstance(value, str) and os.path.isfile(f"{value}/config.json"):
            small.setdefault(name, world.uncentered if name == "value_init" else world.policy)
    pairs = "pairs" if "pairs" in str(keys.get("train_path")) else "sft"
    for name, kind in dict(prompts_path="rl_train", eval_path="rl_val", val_path=f"{pairs}_val",
                           train_path=f"{pairs}_train", demonstrations_path="sft_val",
                           ptx_path="texts").items():
        if name in scripts_own and (own[name] or name == "eval_path"):
            small[name] = rows_of(own[name] or own["prompts_path"], own, kind, world)
    now = own | {name: x for name, x in small.items() if name in keys} | {
        name: given[name] for name in typed}
    return {name: x for name, x in now.items()
            if x != keys[name].default and name != "out_dir"}, now


def rows_of(path, own, kind, world):
    """A file of a few rows of the run's own file, their texts short; or of the world's rows."""
    with contextlib.suppress(Exception):  # whatever is wrong with it, a run will say it
        from prompts import read_rows

        path = os.path.abspath(path.split(",")[0].rpartition("*")[2])  # the first of a mix
        rows = sorted(read_rows(path, dict, own.get("fields", ""))[:300],
                      key=lambda row: len(str(row.get("prompt"))))
        rows = [dict(rows[i * (len(rows) - 1) // 11]) for i in range(12)]  # of all lengths
        for i, row in enumerate(rows):
            for n, name in enumerate(("prompt", "completion", "chosen", "rejected", "text")):
                text = row.get(name, "a")
                if not isinstance(text, str) or not 0 < len(text.encode()) <= 24:
                    row[name] = small_world.PROMPTS[(i + 5 * n) % 12]
        return small_world.jsonl(f"{world.root}/own_{kind}.jsonl",
                                 rows[:9] if kind.endswith("train") else rows[9:])
    return getattr(world, kind)


def root_of(script):
    """The folder with the rooms that a script imports: its own, or the one above it."""
    folder = os.path.dirname(script)
    return folder if os.path.exists(f"{folder}/run.py") else os.path.dirname(folder)


# -------------------------------------------------------------------------------------------------
# runs, and what comes of them

def start(spec, twin=True):
    """Start a run; one that is elsewhere in another Python, which has other hashes of texts."""
    if twin and "elsewhere" in spec["how"]:
        process = subprocess.Popen([sys.executable, __file__, "--run", json.dumps(spec)],
                                   env=os.environ | dict(PYTHONHASHSEED="4242"))

        def poll(kill=False):
            if kill:
                process.kill()
            return None if process.poll() is None else [process.poll()]

        return SimpleNamespace(poll=poll)
    return small_world.Started(
        spec["script"], small_world.typed(dict(out_dir=f"{spec['folder']}/out") | spec["keys"]),
        spec["folder"], spec["ranks"], before(spec["folder"], spec["how"], root_of(spec["script"])))


def differs(a, b, tolerance):
    if isinstance(a, float) and isinstance(b, float):
        return a != b and not (a != a and b != b) and not abs(a - b) <= tolerance * (1 + abs(a))
    return a != b


def compare(base, run, tolerance, but):
    """
    None where two runs agree in log and weights. Else where they part: kind (died, column,
    gradient, metric, log, weights), name, iteration, step, the two values a and b.
    but: how the names of metrics begin that need not agree.
    """
    if {*run.codes} != {0}:
        return dict(kind="died", name=run.said, iteration=None)
    found = [dict(kind="log", iteration=a["iteration"], name=name, a=a.get(name), b=b.get(name))
             for a, b in zip(base.log, run.log, strict=False) for name in dict.fromkeys([*a, *b])
             if differs(a.get(name), b.get(name), tolerance) and not name.startswith(but)]
    if len(base.log) != len(run.log) or base.weights.keys() != run.weights.keys():
        found.append(dict(kind="log", iteration=None, name="what it left", a="", b=""))
    gaps = {name: (t - run.weights.get(name, t)).abs().max().item()
            for name, t in base.weights.items()}
    moved = [dict(kind="weights", iteration=None, name=name, a=0.0, b=x)
             for name, x in gaps.items() if not x <= tolerance]
    if not found and not moved:
        return None
    first = part(base.notes[0], run.notes[0], tolerance)
    if first and found and found[0]["name"] == "policy/grad_norm" and (
            found[0]["iteration"] < first["iteration"]):
        first = None  # a gradient was changed behind its reduction, where it is noted
    found = found[:1] if moved or first else [dict(found[0], kind="metric")]
    return (first or (found or moved)[0]) | dict(logged=found, moved=max(gaps.values(), default=0))


def part(a, b, tolerance):
    """The first thing that the notes of two runs differ in, in the order of the page; or None."""
    a, b = in_order(a), in_order(b)
    for iteration in sorted(a.keys() & b.keys()):
        (marks, own), (others, _) = a[iteration], b[iteration]
        bad = [key for key, x in marks.items() if any(map(
            differs, x, others.get(key, x), itertools.repeat(max(tolerance, 1e-12))))]
        bad += [key for key in marks.keys() ^ others.keys() if key[0] == "gradient"]
        # the script's own names only say where: a rank's may be its share
        for kind, name, step in (key for key in bad if key[1] not in own):
            x, y = max(zip(*(x.get((kind, name, step), [0.0]) for x in (marks, others)),
                           strict=False), key=lambda x: abs(x[0] - x[1]) / (1 + abs(x[0])))
            return dict(kind=kind, iteration=iteration, name=name, step=step, a=x, b=y,
                        own=[key[1] for key in bad if key[1] in own])
    return None


def in_order(notes):
    """{iteration: ({(kind, name, step): sums} of its columns and then of its steps, own names)}."""
    found, steps = {}, {}
    for x in notes:  # a resumed run notes an iteration again
        if x["kind"] == "gradient":
            steps["gradient", x["model"], x["step"]] = [x["norm"], x["sum"]]
        elif x["kind"] in ("begin", "batch"):
            if x["kind"] == "batch":
                found[x["iteration"]] = {("column", name, None): sums for name, sums in x[
                    "columns"].items()} | steps, x["own"]
            steps = {}
    return found


# -------------------------------------------------------------------------------------------------
# the checks, and what is said of them

def checks_of(keys, world, deep):
    """
    {name: (promise, what is changed, the run to compare with, {run: options of Runs.ask})}. The
    run of the check's own name is compared; where there is none to compare with, it is one itself.
    """
    found, samples = {}, "reward_functions" in keys
    pieces = dict(micro_batch_size=5)
    if samples:
        pieces |= dict(head_chunk=4, rollout_batch_size=4)

    def add(name, changed, base="base", promise="", **options):
        found[name] = promise or name.rpartition(", ")[2], changed, base, {name: options}

    def add_stops(name, first, second, base="base", more=""):
        typed = dict(bases.get(base, {}), checkpoint_interval=1)
        found[name] = "resume", (f"stopped in iteration {first}, killed in iteration {second}, the "
                                 f"same command again{more}"), base, {
            f"{name} {i}": dict(keys=typed, where=name, how=dict(signal=(at, int(number))),
                                after=f"{name} 1" if i == 2 else "")
            for i, at, number in ((1, first, signal.SIGTERM), (2, second, signal.SIGKILL))} | {
            name: dict(keys=typed, where=name, how=dict(state=1), after=f"{name} 2")}

    bases = dict(turns=small_world.several_turns(world) | dict(
        reward_functions=f"{keys.get('reward_functions')},0.5*environment"))
    bases |= dict(long={name: x for name, x in dict(
        max_iters=12, num_minibatches=2, ppo_epochs=2, num_iterations=2).items() if name in keys},
        lora=dict(lora="2"))
    add("noise", "other seeds of torch, numpy and random, another order of Python's sets, another "
        "time of day, new memory full of NaN", how=dict(elsewhere=1))
    add("parts", PIECES, keys=pieces)
    add("ranks", "2 ranks instead of 1", ranks=2)
    add_stops("resume", 1, 3)
    if samples:
        add("padding", "7 more columns", how=dict(wide=7))
        add("ids", "other ids in the padding", how=dict(ids=1))
        add("evaluation", "evaluations in every iteration, not every second",
            keys=dict(eval_interval=1))
        if not keys.get("max_refills"):  # there the order decides which other prompts come
            add("order", "the groups, and the responses of each, in another order",
                how=dict(order=max(keys.get("group_size", 1), 1)))
        if not keys.get("environment"):
            add("turns", "", "", keys=bases["turns"])
            add("turns, padding", "several turns; 7 more columns with other ids", "turns",
                keys=bases["turns"], how=dict(wide=7, ids=1))
            add("turns, ranks", f"several turns; 2 ranks, {PIECES}", "turns", ranks=2,
                keys=bases["turns"] | pieces)
    if deep:
        add("long", "", "", keys=bases["long"])
        more = "; 12 iterations, two passes of two minibatches"
        add("long, ranks", f"3 ranks{more}", "long", keys=bases["long"], ranks=3)
        for stage in (1, 3):
            add(f"long, zero_stage={stage}", f"zero_stage={stage} on 2 ranks{more}", "long",
                "ranks", keys=bases["long"] | dict(zero_stage=stage), ranks=2)
        add_stops("long, resume", 5, 10, "long", more)
        if not keys.get("lora"):
            add("lora", "", "", keys=bases["lora"])
            add("lora, ranks", "lora=2; 2 ranks", "lora", keys=bases["lora"], ranks=2)
            add_stops("lora, resume", 1, 3, "lora", "; lora=2")
    return found


class Verdicts:
    """Says what is found, and keeps it: found is {check: None, or how it is broken}."""

    def __init__(self, say):
        self.found, self.say, self.untried = {}, say, {}

    def tell(self, name, promise, changed, found, lines=(), note=""):
        """note: why what is found breaks no promise."""
        note = note or NOTES.get(promise, "")
        self.found[name] = found and dict(found, note=note, lines=lines)
        mark = "ok    " if not found else "note  " if note else "BROKEN"
        self.say(f"{mark}  {PROMISES[promise]}" + f" ({name})" * (not found and name != promise))
        for line in [*([f"changed: {changed}"] if changed else []), note, *lines] if found else []:
            deep = " " * (8 + len(line) - len(line.lstrip()))
            self.say(textwrap.fill(line.strip(), 100, initial_indent=deep, subsequent_indent=(
                deep + "  "), break_on_hyphens=False, break_long_words=False)) if line else None

    def check(self, name, promise, changed, base, run):
        """Compare two runs; returns where they part, or None."""
        found = compare(base, run, 0.0 if promise in EXACT else TOLERANCE, MAY_DIFFER.get(
            promise, "objective/texts" if name == "turns, padding" else " "))
        if found and found["kind"] == "died" and 2 in run.codes:  # these keys do not go together
            return self.leave_out(name, promise, run)
        signs = [x for x in base.notes[0] if x.get("what") == "sign"]
        self.tell(name, promise, changed, found, self.describe(promise, found, base, run) if found
                  else (), LOOKS["sign"] if signs and found and found["kind"] == "weights" else "")
        return found

    def leave_out(self, name, promise, run):
        self.untried[name] = run.said
        self.say(textwrap.fill(f"not tried  {PROMISES[promise]} ({name}): {run.said}", 100,
                               subsequent_indent=" " * 8, break_on_hyphens=False))

    def describe(self, promise, found, base, run):
        """How a promise is broken, in lines."""
        kind, name = found["kind"], found["name"]
        if kind == "died":
            return [f"this run fails: {name}", *likely(promise, kind)]
        what = {"gradient": f"the gradient of {name}, step {found.get('step')} (all columns of the "
                            "batch agree)",
                "metric": f"only the log's {name} (all weights agree)", "log": f"the log's {name}",
                "weights": f"the weight {name}"}.get(
                    kind, f"the column {name!r} of the batch (a sum over its tokens)")
        where = "at the end" if found["iteration"] is None else f"iteration {found['iteration']}"
        lines = [f"first: {where}, {what}: {short(found)}"]
        if found.get("own"):
            lines.append("  the script's own names that differ there, in its order: "
                         + ", ".join(found["own"][:6]))
        lines += [f"  in the log: {x['name']}, {short(x)}; weights differ by up to "
                  f"{found['moved']:.2g}" for x in found["logged"] if kind not in ("metric", "log")]
        if len(run.notes) > 1 and (other := part(*run.notes[:2], 1e-12)):
            lines.append(f"the ranks have another {other['name']!r} in iteration "
                         f"{other['iteration']}: {short(other)}; a batch must be the same on all: "
                         "a rank's number or share is in it")
        lost = lost_names(base.notes[0], run.notes[0]) if promise == "resume" else {}
        if kind != "gradient" or found["step"]:  # those of the last step are there in a right fork
            lost.pop("gradients", 0)
        lines += [f"where it resumes, `{name}` is not as in the run that was not stopped: "
                  f"{a[:60]}, resumed {b[:60]}" for name, (a, b) in [*lost.items()][:4]]
        for name, other in self.found.items():
            if other and not lost and all(other.get(x) == found.get(x) for x in PLACE):
                return [*lines, f"the same place as above ({name}): likely the same mistake"]
        return lines + likely(promise, kind)


def short(found):
    """The two values."""
    return " and ".join(f"{x:.8g}" if isinstance(x, float) else str(x)
                        for x in (found["a"], found["b"]))


def likely(promise, kind):
    """Two or three causes: of this kind, else of any."""
    kinds = [(promise, x) for x in (kind, "", "gradient") if (promise, x) in CAUSES]
    causes = CAUSES[kinds[0]] if kinds else []
    return ["likely:"] * bool(causes) + [f"  - {cause}" for cause in causes]


def lost_names(base, run):
    """{name: (value, value)} of what is not the whole run's where an iteration is begun again."""
    whole = {x["iteration"]: x["names"] for x in base if x["kind"] == "state"}
    found, fresh = {}, False
    for x in run:
        if x["kind"] == "state" and fresh and x["iteration"] > 0:
            then = whole.get(x["iteration"], {})
            found |= {name: (then[name], value) for name, value in x["names"].items()
                      if then.get(name, value) != value  # a name that each iteration binds anew:
                      and {then[name][0], value[0]} not in ({"(", "{"}, {"(", "["})}
        fresh = x["kind"] == "begin" or fresh and x["kind"] != "state"
    return dict(sorted(found.items(), key=lambda x: ("." in x[0], x[0])))


def looks_of(run, *kinds):
    """What one run shows, in lines."""
    return [LOOKS[x["what"]].format(**x) for x in run.notes[0]
            if x["kind"] == "look" and x["what"] in kinds]


class CannotRun(Exception):
    """The small run cannot be made."""


def prove(script, argv, folder, only="", deep=False, say=print):
    """Try the promises: (Verdicts, Runs). only: one of them. Raises BadInput, CannotRun."""
    transformers.logging.disable_progress_bar()
    os.makedirs(f"{folder}/world")
    world = small_world.build(f"{folder}/world")
    typed, keys = shrink(script, argv, world)
    verdicts = Verdicts(say)
    runs = small_world.Runs(start, script, typed, folder,
                            dict(temperature=keys.get("temperature", 1.0)))
    runs.ask("base", how=dict(state=1))
    checks = {name: check for name, check in checks_of(keys, world, deep).items()
              if only in ("", name, check[2])}
    for _, _, _, asked in checks.values():
        for name, options in asked.items():
            runs.ask(name, **options)
    try:
        base = runs.get("base")
        look(base, keys, verdicts, only)
        if {*base.codes} != {0}:
            return verdicts, runs
        masks = looks_of(base, "mask")
        for name, (promise, changed, other, _) in checks.items():
            run = runs.get(name)
            if not other and {*run.codes} != {0}:
                verdicts.leave_out(name, promise, run)
            elif not other and (lines := looks_of(run, "lost", *["mask"] * (not masks))):
                verdicts.tell(name, promise, "", dict(kind="look"), lines)
            elif other and other not in verdicts.untried:
                found = verdicts.check(name, promise, changed, runs.get(other), run)
                if name == "noise" and found:
                    runs.ask("same")
                    if verdicts.check("same", "same", "nothing", base, runs.get("same")):
                        say("        all that follows compares runs: mend this first")
                        return verdicts, runs
        for name, tries in pairs_of(keys).items():
            for number, pair in enumerate(tries if only in ("", name) else []):
                asked = [f"{name} {number}, {by}" for by in pair]
                for run, options in zip(asked, pair.values(), strict=True):
                    runs.ask(run, **options)
                high, low = (sum(x[name] for x in runs.get(run).notes[0] if x["kind"] == "end")
                             for run in asked)
                kind = "wrong" if low > 1.1 * high and name == "kl" or high < low and (
                    name == "score") else "none" if high == low else ""
                if kind != "none":  # else the first iteration trains no policy: then a later one
                    break
            if only in ("", name):
                verdicts.tell(name, name, CHANGED[name], dict(kind=kind) if kind else None, [
                    f"{high:.6g} and {low:.6g}", *likely(name, kind)])
    finally:
        runs.close()
    return verdicts, runs


def pairs_of(keys):
    """{promise: pairs of runs, {what: options of Runs.ask}}: a figure of the first is larger."""
    if "reward_functions" not in keys:
        return {}
    plain = dict(eval_path="") | {name: x for name, x in dict(
        max_refills=0, refill_by="").items() if name in keys}
    found = dict(score=[{f"{by:+}": dict(how=dict(bump=dict(by=by, wait=wait)), keys=plain | dict(
        max_iters=wait + 1)) for by in (3, -3)} for wait in (0, 2)])
    if keys.get("kl_coef", 0) > 0:
        found["kl"] = [{f"{by}": dict(how=dict(drift=1), keys=plain | dict(
            kl_coef=keys["kl_coef"] * by)) for by in (0.01, 10)}]
    return found


def look(base, keys, verdicts, only):
    """What one run shows. Raises CannotRun."""
    lines = looks_of(base, "zero", "still", "lost")
    if {*base.codes} != {0}:
        if not re.search(REFUSED, base.said):  # it may be the small world's fault
            raise CannotRun(base.said)
        lines = [f"the run itself says: {base.said}"]
    kls = [record["objective/kl"] for record in base.log if "objective/kl" in record]
    if not lines and keys.get("kl_coef", 0) > 0 and len(kls) > 1 and not any(kls):
        lines.append(LOOKS["kl"])
    if only in ("", "trained") or {*base.codes} != {0}:
        verdicts.tell("trained", "trained", "", dict(kind="look") if lines else None, lines)
    if only in ("", "mask") and (lines := looks_of(base, "mask")):
        verdicts.tell("mask", "mask", "", dict(kind="look"), lines)


def main(argv):
    own = [arg for arg in argv if arg.partition("=")[0] in ("--deep", "--only")]
    files = [arg for arg in argv if not arg.startswith("-")]
    only = [arg.partition("=")[2] for arg in own if arg.startswith("--only")]
    if {"-h", "--help"} & {*argv} or not argv:
        print(__doc__.strip(), "The promises:", sep="\n\n")
        for name, text in PROMISES.items():
            print(f"    {name:<12}{text}{' (a note)' * (name in NOTES)}")
        return 0
    if not files or not os.path.isfile(files[0]) or not files[0].endswith(".py"):
        raise BadInput(f"{(files or argv)[0]!r} is no script; type the command of a run: python "
                       "tools/prove.py grpo.py config/mine.py")
    script = os.path.abspath(files[0])
    with open(script, encoding="utf-8") as f:
        if not re.search("^from run import", f.read(), re.MULTILINE):
            raise BadInput(f"{files[0]} does not call the rooms: it has no line 'from run import'")
    if len(only) > 1 or not {*only} <= PROMISES.keys():
        raise BadInput(f"--only={','.join(only)}: type one of {', '.join(PROMISES)}")
    began, argv = time.time(), [arg for arg in argv if arg not in (*own, files[0])]
    with tempfile.TemporaryDirectory(prefix="prove-", ignore_cleanup_errors=True) as folder:
        try:
            verdicts, runs = prove(script, argv, folder, "".join(only),
                                   bool({"--deep", "--deep=True"} & {*own}))
        except CannotRun as e:
            print(f"prove.py: error: the small run fails: {e}; what it lacks can be typed, such as "
                  "--prompts_path=FILE with rows of your fields", file=sys.stderr)
            return 3
    broken = [name for name, found in verdicts.found.items() if found and not found["note"]]
    print(f"{len(verdicts.found)} checks, {len(broken)} found something broken; {len(runs.ended)} "
          f"runs in {time.time() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(max(start(json.loads(sys.argv[2]), twin=False).wait().codes))
    sys.exit(main(sys.argv[1:]))
