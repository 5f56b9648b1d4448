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
import json
import os
import re
import signal
import sys
import tempfile
import textwrap
import time

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
from errors import BadInput, first_line  # noqa: E402
from prompts import read_rows  # noqa: E402
from prove_seen import before, root_of  # noqa: E402
from prove_words import (CAUSES, CHANGED, EXACT, LOOKS, MAY_DIFFER, NEEDS,  # noqa: E402
                         NOTES, PIECES, PROMISES, REFUSED)

torch.set_num_threads(1)
TOLERANCE = 1e-7  # of sums in another order; mistakes change 1e-4 and more


# -------------------------------------------------------------------------------------------------
# the run, made small

def shrink(script, argv, world):
    """(what is typed for a small run, all keys): the fork's own keys where they do no harm."""
    scripts_own = configurator.read_keys(script)
    keys = configurator.read_keys(f"{root_of(script)}/config/keys.py") | scripts_own
    given = configurator.read_arguments(keys, argv)  # {name: (value, where it is from)}
    own = {name: given.get(name, [key.default])[0] for name, key in keys.items()}
    typed = {name: x for name, (x, where) in given.items() if where == "command line"}
    turns = own.get("environment") or own.get("tools")
    group = typed.get("group_size", min(own.get("group_size", 0), 3))

    small = dict(
        device_type="cpu", dtype="float64", timeout=30, max_iters=4, epochs=0.0, eval_interval=2,
        eval_size=2, batch_size=3 * group or 6, group_size=group, micro_batch_size=2,
        micro_batch_tokens=0, rollout_batch_size=0, head_chunk=0, checkpoint_interval=0,
        sync_check_interval=1, report_to="", save_rollouts=0, keep_best="", compile=False,
        zero_stage="", offload="", roles="", sampler="own", generate_tp=1, quantize="none",
        max_prompt_tokens=0, max_tokens=0, system_prompt="", template_kwargs="", chat_template="",
        fields="", tools="", init_from=world.policy, tokenizer_path=world.policy,
        policy_path=world.policy, attn_implementation="sdpa")
    others = dict(ref_path=world.older, judge_path=world.policy, reward_path=world.reward,
                  teacher=world.reward)
    small |= {name: folder for name, folder in others.items() if own.get(name)}
    if turns:
        small |= small_world.several_turns(world)
        small["environment"] = own.get("environment") or world.talks
    for name, value in own.items():
        if name in ("num_minibatches", "ppo_epochs", "num_iterations"):
            small[name] = min(value, 2)
        elif name == "max_new_tokens":
            small[name] = min(value, 16 if turns else 6)
        elif name.endswith("learning_rate") and value > 0:
            small[name] = max(value, 5e-3)
        elif type(value) is int and (name.endswith(("_iters", "_steps", "_interval", "_every"))
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
    now = own | {name: x for name, x in small.items() if name in keys} | typed
    return {name: x for name, x in now.items()
            if x != keys[name].default and name != "out_dir"}, now


def rows_of(path, own, kind, world):
    """A file of a few rows of the run's own file, their texts short; or of the world's rows."""
    try:
        path = os.path.abspath(path.split(",")[0].rpartition("*")[2])  # the first of a mix
        rows = sorted(read_rows(path, dict, own.get("fields", ""))[:300],
                      key=lambda row: len(str(row.get("prompt"))))
        rows = [dict(rows[i * (len(rows) - 1) // 11]) for i in range(12)]  # of all lengths
    except Exception as e:  # whatever is wrong with it
        why = e if isinstance(e, BadInput) else f"{path} cannot be read: {first_line(e)}"
        vars(world).setdefault("read", f"the tool's own ({why})")
        return getattr(world, kind)
    vars(world).setdefault("read", f"those of {path}, with other texts for long ones")
    for i, row in enumerate(rows):
        for n, name in enumerate(("prompt", "completion", "chosen", "rejected", "text")):
            text = row.get(name, "a")
            if not isinstance(text, str) or not 0 < len(text.encode()) <= 24:
                row[name] = small_world.PROMPTS[(i + 5 * n) % 12]
    return small_world.jsonl(f"{world.root}/own_{kind}.jsonl",
                             rows[:9] if kind.endswith("train") else rows[9:])


def start(spec):
    """Start a run: spec is what Runs.ask has made."""
    keys = dict(out_dir=f"{spec['folder']}/out") | spec["keys"]
    return small_world.Started(
        spec["script"], small_world.typed(keys), spec["folder"], spec["ranks"], before(spec))


# -------------------------------------------------------------------------------------------------
# where two runs part

def gap(a, b):
    """How far two numbers are apart, by the first where it is large."""
    return abs(a - b) / (1 + abs(a))


def differs(a, b, tolerance):
    if isinstance(a, float) and isinstance(b, float):
        return a != b and not (a != a and b != b) and not gap(a, b) <= tolerance
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
    left, other = (f"{len(x.log)} records, {len(x.weights)} tensors" for x in (base, run))
    if left != other or base.weights.keys() != run.weights.keys():
        found.append(dict(kind="log", iteration=None, name="what it left", a=left, b=other))
    gaps = {name: (t - run.weights.get(name, t)).abs().max().item()
            for name, t in base.weights.items()}
    moved = [dict(kind="weights", iteration=None, name=name, a=0.0, b=x)
             for name, x in gaps.items() if not x <= tolerance]
    if not found and not moved:
        return None
    first = part(base.notes[0], run.notes[0], tolerance)
    found = found[:1] if moved or first else [dict(found[0], kind="metric")]
    return (first or (found or moved)[0]) | dict(logged=found, moved=max(gaps.values(), default=0))


def part(a, b, tolerance):
    """The first thing that the notes of two runs differ in, in the order of the page; or None."""
    a, b = ({x["iteration"]: x for x in notes if x["kind"] == "batch"} for notes in (a, b))
    for iteration in sorted(a.keys() & b.keys()):
        x, y = ({tuple(key): sums for *key, sums in of[iteration]["sums"]} for of in (a, b))
        for key in x | y:
            missing = [0.0, 0.0] if key[0] == "gradient" else []  # a step that one run lacks
            pairs = zip(x.get(key, missing), y.get(key, missing), strict=False)
            worst = max(pairs, key=lambda pair: gap(*pair), default=(0.0, 0.0))
            if gap(*worst) > max(tolerance, 1e-12):
                kind, name, step = key
                return dict(kind=kind, iteration=iteration, name=name, step=step, a=worst[0],
                            b=worst[1])
    return None


def lost_names(base, run):
    """{name: (value, value)} of what is not the whole run's where an iteration is begun again."""
    whole = {x["iteration"]: x["names"] for x in base if x["kind"] == "state"}
    again = next((x for x in run if x["kind"] == "state"), dict(iteration=0, names={}))
    then = whole.get(again["iteration"], {})
    found = {name: (then[name], value) for name, value in again["names"].items()
             if then.get(name, value) != value  # a name that each iteration binds anew:
             and {then[name][0], value[0]} not in ({"(", "{"}, {"(", "["})}
    return dict(sorted(found.items(), key=lambda x: ("." in x[0], x[0])))


def looks_of(run, *kinds):
    """What one run shows, in lines."""
    lines = [LOOKS[x["what"]].format(**x) for x in run.notes[0]
             if x["kind"] == "look" and x["what"] in kinds]
    return [*dict.fromkeys(lines)]


# -------------------------------------------------------------------------------------------------
# the checks

def checks_of(keys, world, deep):
    """
    {name: (promise, what is changed, the run to compare with, {run: options of Runs.ask})}. The
    run of the check's own name is compared. Where nothing is changed, others are compared with it.
    """
    found, samples = {}, "reward_functions" in keys
    longer = dict(max_iters=12, num_minibatches=2, ppo_epochs=2, num_iterations=2)
    bases = dict(
        base={}, lora=dict(lora="2"), long={name: longer[name] for name in longer.keys() & keys},
        turns=small_world.several_turns(world) | dict(
            reward_functions=f"{keys.get('reward_functions')},0.5*environment"))
    pieces = dict(micro_batch_size=5)
    if samples:
        pieces |= dict(head_chunk=4, rollout_batch_size=4)

    def add(name, changed, base="base", promise="", keys=(), ranks=1, **how):
        found[name] = promise or name.rpartition(", ")[2], changed, base, {
            name: dict(keys=bases[base] | dict(keys), ranks=ranks, how=how)}

    def add_stops(name, first, second, base="base", more=""):
        here = dict(keys=bases[base] | dict(checkpoint_interval=1), where=name)
        found[name] = "resume", (f"stopped in iteration {first}, killed in iteration {second}, the "
                                 f"same command again{more}"), base, {
            f"{name} 1": dict(here, how=dict(signal=(first, signal.SIGTERM))),
            f"{name} 2": dict(here, how=dict(signal=(second, signal.SIGKILL)), after=f"{name} 1"),
            name: dict(here, how=dict(state=1), after=f"{name} 2")}

    add("noise", "other seeds of torch, numpy and random, another order of Python's sets, another "
        "time of day, new memory full of NaN", elsewhere=1)
    add("parts", PIECES, keys=pieces)
    add("ranks", "2 ranks instead of 1", ranks=2)
    add_stops("resume", 1, 3)
    if samples:
        add("padding", "7 more columns", wide=7)
        add("ids", "other ids in the padding", ids=1)
        add("evaluation", "evaluations in every iteration, not every second",
            keys=dict(eval_interval=1))
        if not keys.get("max_refills"):  # there the order decides which other prompts come
            add("order", "the groups, and the responses of each, in another order",
                order=max(keys.get("group_size", 1), 1))
        if not keys.get("environment"):
            add("turns", "", "turns")
            add("turns, padding", "several turns; 7 more columns with other ids", "turns",
                wide=7, ids=1)
            add("turns, ranks", f"several turns; 2 ranks, {PIECES}", "turns", keys=pieces, ranks=2)
    if deep:
        more = "; 12 iterations, two passes of two minibatches"
        add("long", "", "long")
        add("long, ranks", f"3 ranks{more}", "long", ranks=3)
        for stage in (1, 3):
            add(f"long, zero_stage={stage}", f"zero_stage={stage} on 2 ranks{more}", "long",
                "ranks", keys=dict(zero_stage=stage), ranks=2)
        add_stops("long, resume", 5, 10, "long", more)
        if not keys.get("lora"):
            add("lora", "", "lora")
            add("lora, ranks", "lora=2; 2 ranks", "lora", ranks=2)
            add_stops("lora, resume", 1, 3, "lora", "; lora=2")
    return found


def pairs_of(keys):
    """{promise: two runs, {changed: options of Runs.ask}}: the first has the larger figure."""
    if "reward_functions" not in keys:
        return {}
    plain = dict(eval_path="") | {name: x for name, x in dict(
        max_refills=0, refill_by="").items() if name in keys}
    # the third iteration: some algorithms train no policy in the first ones
    pairs = dict(score={f"{more:+}": dict(keys=plain | dict(max_iters=3), how=dict(
        watch=2, more=more)) for more in (3, -3)})
    if keys.get("kl_coef", 0) > 0:
        pairs["kl"] = {f"{by}": dict(keys=plain | dict(kl_coef=keys["kl_coef"] * by), how=dict(
            watch=0)) for by in (0.01, 10)}
    return pairs


# -------------------------------------------------------------------------------------------------
# the words for it

def short(found):
    """The two values."""
    return " and ".join(f"{x:.8g}" if isinstance(x, float) else str(x)
                        for x in (found["a"], found["b"]))


def likely(promise, kind):
    """Two or three causes: of this kind, else of any."""
    kinds = [(promise, x) for x in (kind, "", "gradient") if (promise, x) in CAUSES]
    causes = CAUSES[kinds[0]] if kinds else []
    return ["likely:"] * bool(causes) + [f"  - {cause}" for cause in causes]


def folded(line, indent=8):
    """A line of at most 100 columns, or several."""
    deep = " " * (indent + len(line) - len(line.lstrip()))
    return textwrap.fill(line.strip(), 100, initial_indent=deep, subsequent_indent=f"{deep}  ",
                         break_on_hyphens=False, break_long_words=False)


class CannotRun(BadInput):
    """The small run cannot be made."""

    exit_code = 3


class Proof:
    """
    The small runs of a script, and what they show. found: {check: None, or how it is broken};
    untried: {check: why}. Raises BadInput.
    """

    def __init__(self, script, argv, folder, say=print):
        transformers.logging.disable_progress_bar()
        os.makedirs(f"{folder}/world")
        self.world = small_world.build(f"{folder}/world")
        typed, self.keys = shrink(script, argv, self.world)
        self.typed = [arg[2:].partition("=")[0] for arg in argv]
        self.runs = small_world.Runs(start, script, typed, folder, dict(
            temperature=self.keys.get("temperature", 1.0)))
        self.found, self.untried, self.say = {}, {}, say

    def of(self, only="", deep=False):
        """Try the promises, or one of them. Raises CannotRun."""
        checks = {name: check for name, check in checks_of(self.keys, self.world, deep).items()
                  if only in ("", name, check[2])}
        self.runs.ask("base", how=dict(state=1))
        for _, _, _, asked in checks.values():
            for name, options in asked.items():
                self.runs.ask(name, **options)
        try:
            if not self.runs_well(only):
                return
            for name, check in checks.items():
                found = self.check(name, *check[:3])
                if name == "noise" and found:
                    self.runs.ask("same")
                    if self.check("same", "same", "nothing", "base"):
                        self.say("        all that follows compares runs: mend this first")
                        return
            for name, pair in pairs_of(self.keys).items():
                if only in ("", name):
                    self.compare_pair(name, pair)
        finally:
            self.runs.close()

    def runs_well(self, only):
        """Whether the run to compare with ends, and what it shows by itself. Raises CannotRun."""
        base = self.runs.get("base")
        lines, ends = looks_of(base, "zero", "still", "lost"), {*base.codes} == {0}
        if not ends:
            if not re.search(REFUSED, base.said):  # it may be the small world's fault
                raise CannotRun(f"the small run fails: {base.said}; {self.why(base.said)}")
            lines = [f"the run itself says: {base.said}"]
        kls = [record["objective/kl"] for record in base.log if "objective/kl" in record]
        if not lines and self.keys.get("kl_coef", 0) > 0 and len(kls) > 1 and not any(kls):
            lines = [LOOKS["kl"]]
        if only in ("", "trained") or not ends:
            self.tell("trained", "trained", "", dict(kind="look") if lines else None, lines)
        if only in ("", "mask") and (lines := looks_of(base, "mask")):
            self.tell("mask", "mask", "", dict(kind="look"), lines)
        return ends

    def why(self, said):
        """What may be the cause of a small run's failure, by what it says; and what to type."""
        named = {name for name in self.keys if f"{name} = " in said}
        values = {name for name, x in self.keys.items() if isinstance(x, str) and x and (
            repr(x) in said or re.search(r"[./]", x) and x in said)}
        named |= values & {*self.typed} or values
        lines = [f"--{name} is what you typed" if name in self.typed else
                 f"{name} is {self.keys[name]!r} here" for name in sorted(named)]
        path = next((name for name in ("prompts_path", "train_path") if name in self.keys), "KEY")
        rows = "those that you typed" if path in self.typed else vars(self.world).get(
            "read", "the tool's own")
        return "; ".join([*lines, NEEDS.format(
            path=path, batch=self.keys.get("batch_size"), rows=rows)])

    def check(self, name, promise, changed, other):
        """Compare a run with another one; returns where they part, or None."""
        run, base, found = self.runs.get(name), self.runs.get(other), None
        if other in self.untried:
            return None
        if {*run.codes} != {0} and (2 in run.codes or not changed):  # keys that do not go together
            self.untried[name] = run.said
            self.say(folded(f"not tried  {PROMISES[promise]} ({name}): {run.said}", 0))
        elif not changed:  # others are compared with it
            masks = ["mask"] * (not looks_of(self.runs.get("base"), "mask"))
            if lines := looks_of(run, "lost", *masks):
                self.tell(name, promise, "", dict(kind="look"), lines)
        else:
            found = compare(base, run, 0.0 if promise in EXACT else TOLERANCE, MAY_DIFFER.get(
                promise, "objective/texts" if name == "turns, padding" else " "))
            lines = self.describe(promise, found, base, run) if found else []
            signs = found and found["kind"] == "weights" and looks_of(base, "sign")
            self.tell(name, promise, changed, found, lines, LOOKS["sign"] if signs else "")
        return found

    def compare_pair(self, name, pair):
        """The first of the two runs must have the larger figure."""
        for by, options in pair.items():
            self.runs.ask(f"{name}, {by}", **options)
        high, low = (sum(x[name] for x in self.runs.get(f"{name}, {by}").notes[0]
                         if x["kind"] == "end") for by in pair)
        wrong = low > high + (0.1 * high if name == "kl" else 0)
        kind = "wrong" if wrong else "none" if high == low else ""
        self.tell(name, name, CHANGED[name], dict(kind=kind) if kind else None, [
            f"{high:.6g} and {low:.6g}", *likely(name, kind)])

    # ----------------------------------------------------------------------------------------------
    # what is said

    def tell(self, name, promise, changed, found, lines, note=""):
        """note: why what is found breaks no promise."""
        note = note or NOTES.get(promise, "")
        self.found[name] = found and dict(found, note=note, lines=lines)
        mark = "ok    " if not found else "note  " if note else "BROKEN"
        self.say(f"{mark}  {PROMISES[promise]}" + f" ({name})" * (not found and name != promise))
        for line in [f"changed: {changed}" * bool(changed), note, *lines] if found else []:
            if line:
                self.say(folded(line))

    def describe(self, promise, found, base, run):
        """How a promise is broken, in lines."""
        kind, name, iteration = found["kind"], found["name"], found["iteration"]
        if kind == "died":
            return [f"this run fails: {name}", *likely(promise, kind)]
        what = dict(
            column=f"the column {name!r} of the batch (a sum over its tokens)",
            gradient=f"the gradient of {name}, step {found.get('step')} (all columns of the batch "
                     "agree)",
            metric=f"only the log's {name} (all weights agree)", log=f"the log's {name}",
            weights=f"the weight {name}")[kind]
        where = "at the end" if iteration is None else f"iteration {iteration}"
        lines = [f"first: {where}, {what}: {short(found)}"]
        if kind not in ("metric", "log"):
            lines += [f"  in the log: {x['name']}, {short(x)}; weights differ by up to "
                      f"{found['moved']:.2g}" for x in found["logged"]]
        if len(run.notes) > 1 and (other := part(*run.notes[:2], 1e-12)):
            lines.append(f"the ranks have another {other['name']!r} in iteration "
                         f"{other['iteration']}: {short(other)}; a batch must be the same on all: "
                         "a rank's number or share is in it")
        lost = lost_names(base.notes[0], run.notes[0]) if promise == "resume" else {}
        if kind != "gradient" or found["step"]:  # those of the last step are there in a right fork
            lost.pop("gradients", 0)
        lines += [f"where it resumes, `{name}` is not as in the run that was not stopped: "
                  f"{a[:60]}, resumed {b[:60]}" for name, (a, b) in [*lost.items()][:4]]
        return lines + likely(promise, kind)


def main(argv):
    if {"-h", "--help"} & {*argv} or not argv:
        print(__doc__.strip(), "The promises:", sep="\n\n")
        for name, text in PROMISES.items():
            print(f"    {name:<12}{text}{' (a note)' * (name in NOTES)}")
        return 0
    own = [arg for arg in argv if re.match("--(only|deep)(=|$)", arg)]
    only = [arg.partition("=")[2] for arg in own if arg.startswith("--only")]
    file = next((arg for arg in argv if not arg.startswith("-")), argv[0])
    if not os.path.isfile(file) or not file.endswith(".py"):
        raise BadInput(f"{file!r} is no script; type the command of a run: python tools/prove.py "
                       "grpo.py config/mine.py")
    with open(file, encoding="utf-8") as f:
        if not re.search("^from run import", f.read(), re.MULTILINE):
            raise BadInput(f"{file} does not call the rooms: it has no line 'from run import'")
    if len(only) > 1 or not {*only} <= PROMISES.keys():
        raise BadInput(f"--only={','.join(only)}: type one of {', '.join(PROMISES)}")
    began, argv = time.time(), [arg for arg in argv if arg not in (*own, file)]
    with tempfile.TemporaryDirectory(prefix="prove-", ignore_cleanup_errors=True) as folder:
        proof = Proof(os.path.abspath(file), argv, folder)
        proof.of("".join(only), deep=bool({"--deep", "--deep=True"} & {*own}))
    broken = [name for name, found in proof.found.items() if found and not found["note"]]
    print(f"{len(proof.found)} checks, {len(broken)} found something broken; "
          f"{len(proof.runs.ended)} runs in {time.time() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(max(start(json.loads(sys.argv[2])).wait().codes))
    sys.exit(main(sys.argv[1:]))
