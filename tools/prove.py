"""
Does a changed script keep quartet's promises? It is run a dozen times with everything small, each
time with one thing changed that must change nothing; what comes out is compared. It takes a minute.

    python tools/prove.py grpo.py config/mine_fork.py --my_key=0.3      # the command of a run
    python tools/prove.py grpo.py config/mine_fork.py --only=resume     # one promise; names below
    python tools/prove.py grpo.py config/mine_fork.py --deep            # three minutes

It knows no algorithm. It reads log.jsonl and the final weights, and looks in at some functions of
the rooms to say where two runs part (prove_seen.py). The models are random ones of 16 numbers a
token, in float64. Keys that make a run large are made small; what is typed as --key=value stays.

The exit code is 0 if all promises are kept, whatever the notes say; 1 if one is broken; 2 for a
wrong command; 3 if the small run cannot be made. What it cannot see: a formula that is wrong in the
same way everywhere (for that: tests/by_hand.py), and what other keys than yours would do.
"""
import ast
import contextlib
import glob
import json
import os
import re
import shutil
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
sys.path[:0] = [f"{HERE}/tools", HERE, f"{HERE}/data", f"{HERE}/tests"]

import configurator  # noqa: E402  before torch
import small_world  # noqa: E402
import torch  # noqa: E402
from errors import BadInput  # noqa: E402
from prove_seen import before, rooms_of  # noqa: E402
from prove_words import CAUSES, EXACT, LONG, LOOKS, MOVE, NOTES, PIECES, PROMISES  # noqa: E402

torch.set_num_threads(1)
TOLERANCE = 1e-7  # of sums in another order; mistakes change 1e-4 and more
ITERS, STOPPED, KILLED = 4, 1, 3  # iterations of a run, and where it is stopped and killed
TEXTS = "prompt", "completion", "chosen", "rejected", "text"  # fields of rows that a model reads


# -------------------------------------------------------------------------------------------------
# the run, made small

def shrink(script, argv, world):
    """(the keys of a small run, all keys' values): the fork's own keys where they do no harm."""
    keys = configurator.read_keys(script)
    own_keys = {*keys}
    keys = configurator.read_keys(f"{os.path.dirname(script)}/config/keys.py") | keys
    typed = {arg[2:].partition("=")[0] for arg in argv if arg.startswith("--")}
    given = {name: value for name, (value, _) in configurator.read_arguments(keys, argv).items()}
    own = {name: given.get(name, key.default) for name, key in keys.items()}
    group, turns = own.get("group_size", 0), own.get("environment") or own.get("tools")

    small = dict(
        device_type="cpu", dtype="float64", timeout=30, max_iters=ITERS, epochs=0.0,
        eval_interval=2, eval_size=2, batch_size=3 * min(group, 3) or 6, group_size=min(group, 3),
        micro_batch_size=2, micro_batch_tokens=0, rollout_batch_size=0, head_chunk=0,
        checkpoint_interval=0, sync_check_interval=1, report_to="", save_rollouts=0, keep_best="",
        compile=False, zero_stage="", offload="", roles="", sampler="own", generate_tp=1,
        quantize="none", max_prompt_tokens=0, max_tokens=0, system_prompt="", template_kwargs="",
        chat_template="", fields="", tools="")
    if turns:
        small |= dict(chat_template=world.template, max_turns=3, policy_path=world.chatty)
    most = dict(max_new_tokens=16 if turns else 6, num_minibatches=2, ppo_epochs=2,
                num_iterations=2)
    small |= {name: min(own[name], x) for name, x in most.items() if name in own}
    if own.get("tools"):
        small["environment"] = f"{world.rules}:talks"
    for name, value in own.items():  # what begins later, or comes rarely, must come in 4 iterations
        if name.endswith(("_iters", "_steps", "_interval", "_every")) and type(value) is int:
            small.setdefault(name, min(value, 1 + name.endswith(("_interval", "_every"))))
        if name.endswith("learning_rate") and value > 0:
            small[name] = max(value, 5e-3)
    models = dict(policy_path="policy", init_from="policy", tokenizer_path="policy",
                  ref_path="older", judge_path="policy", reward_path="reward", teacher="reward")
    for name, value in own.items():
        if name in models and value:
            small.setdefault(name, getattr(world, models[name]))
        elif name == "value_init" and value not in ("reward", "policy", "shared"):
            small[name] = world.uncentered
        elif isinstance(value, str) and os.path.isfile(f"{value}/config.json"):
            small[name] = world.policy  # of another model of the fork's
    pairs = "pairs" in getattr(keys.get("train_path"), "comment", "")
    kinds = dict(prompts_path="rl_train", eval_path="rl_val", demonstrations_path="sft_val",
                 train_path="pairs_train" if pairs else "sft_train",
                 val_path="pairs_val" if pairs else "sft_val", ptx_path="texts")
    for name in own_keys & kinds.keys():
        if own[name] or name == "eval_path":
            small[name] = rows_of(own[name] or own["prompts_path"], own, kinds[name], world)
    keys_now = own | {name: x for name, x in small.items() if name in keys} | {
        name: given[name] for name in typed}
    return {name: x for name, x in keys_now.items()
            if x != keys[name].default and name != "out_dir"}, keys_now


def rows_of(path, own, kind, world):
    """A file of a few of the rows of the run's own file, their texts short; or the world's rows."""
    path, part = path.split(",")[0].rpartition("*")[2], slice(0, 9) if "train" in kind else slice(
        9, 12)
    with contextlib.suppress(Exception):  # whatever is wrong with it, a run will say it
        if path.endswith(".jsonl"):
            with open(path, encoding="utf-8") as f:
                path = small_world.write(f"{world.root}/first.jsonl", "".join(
                    line for line, _ in zip(f, range(300))))
        (read_rows,) = {vars(room)["read_rows"] for room in rooms_of(HERE)
                        if hasattr(room, "read_rows")}
        rows = sorted(read_rows(os.path.abspath(path), dict, own.get("fields", "")),
                      key=lambda row: len(str(row.get("prompt"))))
        rows = [dict(rows[i * (len(rows) - 1) // 11]) for i in range(12)]  # of all lengths
        for i, row in enumerate(rows):
            for n, name in enumerate(x for x in TEXTS if x in row):
                if not isinstance(row[name], str) or not 0 < len(row[name].encode()) <= 24:
                    row[name] = small_world.PROMPTS[(i + 5 * n) % 12]
        return small_world.jsonl(f"{world.root}/own_{kind}.jsonl", rows[part])
    return getattr(world, kind)


def small_files(folder):
    """small_world's world, and a chat template."""
    world = small_world.build(folder)
    # a policy that chats: </think> does not end its turns
    world.chatty = shutil.copytree(world.policy, f"{folder}/chatty")
    settings = configurator.read_json(f"{world.chatty}/generation_config.json")
    configurator.write_json(f"{world.chatty}/generation_config.json",
                            settings | dict(eos_token_id=small_world.EOS))
    world.template = small_world.write(f"{folder}/template.jinja", (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"))
    return world


# -------------------------------------------------------------------------------------------------
# runs, and what comes of them

class Runs:
    """Small runs, two at a time, each in a folder of its own."""

    def __init__(self, script, keys, folder):
        self.script, self.keys, self.folder = script, keys, folder
        self.waiting, self.going, self.ended, self.seconds = {}, {}, {}, {}

    def ask(self, name, keys=(), how=(), ranks=1, after="", where=""):
        """
        A run will be made. keys: what is typed, too. how: for prove_seen. after: the run that must
        have ended before it. where: the run whose folder it goes on in.
        """
        self.waiting[name] = dict(
            script=self.script, keys=self.keys | dict(keys), how=dict(how), ranks=ranks,
            after=after, folder=f"{self.folder}/{where or name}")

    def get(self, name):
        """A run that has ended: its codes and err of each rank, log, weights, notes of each."""
        while name not in self.ended:
            for other, (started, began, spec) in list(self.going.items()):
                codes = started.poll(kill=time.time() - began > 120)
                if codes is not None:
                    del self.going[other]
                    self.ended[other] = read(spec["folder"], codes)
                    self.seconds[other] = time.time() - began
            for other, spec in list(self.waiting.items()):
                if len(self.going) < 2 and (not spec["after"] or spec["after"] in self.ended):
                    self.going[other] = start(spec), time.time(), self.waiting.pop(other)
            time.sleep(0.01)
        return self.ended[name]

    def close(self):
        for started, _, _ in self.going.values():
            started.poll(kill=True)


def start(spec, twin=True):
    """Start a run. Where it is elsewhere, from a Python that has another hash of texts."""
    if twin and "elsewhere" in spec["how"]:
        process = subprocess.Popen([sys.executable, __file__, "--run", json.dumps(spec)],
                                   env=os.environ | dict(PYTHONHASHSEED="4242"))

        def poll(kill=False):
            if kill:
                process.kill()
            return None if process.poll() is None else [process.poll()]

        return SimpleNamespace(poll=poll)
    return small_world.Started(
        spec["script"], small_world.typed(dict(out_dir="out") | spec["keys"]), spec["folder"],
        spec["ranks"], before(spec["folder"], spec["how"], root_of(spec["script"])))


def root_of(script):
    """The folder with the rooms that a script imports: its own, or the one above it, or ours."""
    folder = os.path.dirname(script)
    return next((root for root in (folder, os.path.dirname(folder))
                 if os.path.exists(f"{root}/run.py")), HERE)


def read(folder, codes):
    """What a run has left."""
    def lines(name):
        paths = [f"{folder}/{name}-{rank}" for rank in range(len(codes))]
        return [open(path).read().splitlines() if os.path.exists(path) else [] for path in paths]

    run = SimpleNamespace(codes=codes, weights={}, log=[], said="")
    run.said = next((said[-1] for said in lines("stderr") if said), f"exit codes {codes}")[:400]
    run.notes = [[json.loads(line) for line in said] for said in lines("notes")]
    if os.path.exists(f"{folder}/out/log.jsonl"):
        run.log = small_world.read_log(f"{folder}/out")
        for path in sorted(glob.glob(f"{folder}/out/*/model.safetensors")):
            model = os.path.basename(os.path.dirname(path))
            run.weights |= {f"{model}/{name}": t for name, t in small_world.read_weights(
                f"{folder}/out/{model}").items()}
    return run


def differs(a, b, tolerance):
    if isinstance(a, float) and isinstance(b, float):
        return a != b and not (a != a and b != b) and not (
            abs(a - b) <= tolerance * (1 + abs(a)))
    return a != b


def compare(base, run, tolerance, but=" "):
    """
    None where two runs agree in log and weights. Else where they part: kind (died, sampled, scores,
    read, column, gradient, metric, log, weights), name, iteration, the two values a and b, step.
    but: how the names of metrics begin that need not agree.
    """
    if {*run.codes} != {0}:
        return dict(kind="died", name=run.said, iteration=None)
    found = [dict(kind="log", iteration=a["iteration"], name=name, a=a.get(name), b=b.get(name))
             for a, b in zip(base.log, run.log) for name in dict.fromkeys([*a, *b])
             if differs(a.get(name), b.get(name), tolerance) and not name.startswith(but)]
    if len(base.log) != len(run.log) or base.weights.keys() != run.weights.keys():
        found.append(dict(kind="log", iteration=len(run.log), name="what it left", a="", b=""))
    gaps = {name: (t - run.weights.get(name, t)).abs().max().item()
            for name, t in base.weights.items()}
    moved = [dict(kind="weights", iteration=None, name=name, a=0.0, b=x)
             for name, x in gaps.items() if not x <= tolerance]
    if not found and not moved:
        return None
    first = part(base.notes[0], run.notes[0], tolerance)
    answer = first or (found or moved)[0]
    if not moved and not first:
        answer |= dict(kind="metric")
    return answer | dict(logged=found[:1], moved=max(gaps.values(), default=0.0))


def part(a, b, tolerance):
    """The first thing that the notes of two runs differ in, in the order of the page; or None."""
    def by_iteration(notes):
        found, steps = {}, []
        for x in notes:  # a resumed run notes an iteration again
            if x["kind"] == "gradient":
                steps.append(x)
            elif x["kind"] in ("begin", "batch"):
                found[x.get("iteration")] = x, steps
                steps = []
        return found

    a, b = by_iteration(a), by_iteration(b)
    for iteration in sorted(a.keys() & b.keys() - {None}):
        (batch, steps), (other, other_steps) = a[iteration], b[iteration]
        bad = [name for name, sums in batch["columns"].items() if any(
            differs(x, y, max(tolerance, 1e-12)) for x, y in zip(
                sums, other["columns"].get(name, sums), strict=True))]
        # columns first; the script's own names only say where: a rank's may be its share
        own = [name for name in bad if name in batch["own"]]
        for name in (name for name in bad if name not in own):
            x, y = max(zip(batch["columns"][name], other["columns"][name]),
                       key=lambda x: abs(x[0] - x[1]) / (1 + abs(x[0])))
            return dict(kind=KINDS.get(name, "scores" if "reward/" in name else "column"),
                        iteration=iteration, name=name, a=x, b=y, own=own)
        for x, y in zip(steps, other_steps):
            if any(differs(x[name], y[name], tolerance) for name in ("norm", "sum")):
                return dict(kind="gradient", iteration=iteration, name=x["model"], own=own,
                            step=x["step"], a=x["norm"], b=y["norm"])
        if len(steps) != len(other_steps):
            return dict(kind="gradient", iteration=iteration, name="steps", step=len(steps),
                        a=float(len(steps)), b=float(len(other_steps)), own=own)
    return None


KINDS = dict.fromkeys(["tokens", "response_mask", "finished", "row", "slot", "sampler_logprobs"],
                      "sampled") | dict.fromkeys(["old_logprobs", "ref_logprobs", "values"], "read")
KINDS["scores"] = "scores"


def carried(script):
    """
    {name: line} of what a script's loop takes from one iteration to the next outside of run.state:
    names from above the loop that the loop binds anew, or changes in place. By reading it alone.
    """
    with open(script, encoding="utf-8") as f:
        body = ast.parse(f.read()).body
    number, loop = next(((i, node) for i, node in enumerate(body) if isinstance(node, ast.For)
                         and "run.iterations" in ast.unparse(node.iter)), (0, ast.Pass()))
    above = {name for node in body[:number] if "run.state" not in ast.unparse(node)
             for name in bound(node)} | {
        node.name for node in body[:number] if isinstance(node, ast.ClassDef)}
    found = {}
    for node in outer(loop):
        place = None
        if isinstance(getattr(node, "ctx", None), ast.Store):
            place = getattr(node, "value", node)  # of x[..] and x.y: x
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and re.fullmatch(
                "append|extend|add|update|pop|clear|insert|remove|setdefault|popleft|appendleft",
                node.func.attr):
            place = node.func.value
        if isinstance(place, ast.Name) and place.id in above - {"run"}:
            found.setdefault(place.id, node.lineno)
    return found


def outer(node):
    """The nodes below a node, but not those in functions and comprehensions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not hasattr(child, "generators") and not isinstance(
                child, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            yield from outer(child)


def bound(node):
    return [] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else [
        x.id for x in outer(node) if isinstance(getattr(x, "ctx", None), ast.Store)
        and isinstance(x, ast.Name)]


# -------------------------------------------------------------------------------------------------
# the verdicts

class Verdicts:
    """Tells what is found, and keeps it: found is {check: None, or how it is broken}."""

    def __init__(self, say=print):
        self.found, self.say, self.untried = {}, say, {}

    def tell(self, name, like, changed, found, lines=(), note=""):
        """note: why what is found breaks no promise."""
        note = note or NOTES.get(like, "")
        self.found[name] = found and dict(found, note=note, lines=lines)
        mark = "ok    " if not found else "note  " if note else "BROKEN"
        self.say(f"{mark}  {PROMISES[like]}" + f" ({name})" * (not found and name != like))
        for line in [f"changed: {changed}"] * bool(changed) + [note] * bool(note) + [*lines]:
            if found:
                deep = " " * (8 + len(line) - len(line.lstrip()))
                self.say(textwrap.fill(line.strip(), 100, initial_indent=deep, subsequent_indent=(
                    deep + "  "), break_on_hyphens=False, break_long_words=False))

    def check(self, name, like, changed, base, run):
        """Compare two runs; returns where they part, or None."""
        found, note = compare(base, run, 0.0 if like in EXACT else TOLERANCE, dict(
            evaluation="eval/").get(like, "objective/texts" if like in MOVE else " ")), ""
        if found and found["kind"] == "died" and {2} & {*run.codes}:  # these keys do not go together
            self.untried[name] = run.said
            return self.say(f"not tried  {PROMISES[like]} ({name}): {run.said}")
        if found and found["kind"] == "weights" and any(
                x.get("what") == "sign" for x in base.notes[0]):
            note = ("an optimizer that steps by a sign: where a gradient is 0 in theory, rounding "
                    "decides; right if yours does")
        lines = self.describe(like, found, base, run) if found else []
        self.tell(name, like, changed, found, lines, note)
        return found

    def describe(self, like, found, base, run):
        """How a promise is broken, in lines."""
        kind, place = found["kind"], [found.get(x) for x in PLACE]
        if kind == "died":
            return [f"this run fails: {found['name']}", *likely(like, kind)]
        where = "at the end" if found["iteration"] is None else f"iteration {found['iteration']}"
        what = {"gradient": f"the gradient of {found['name']}, step {found.get('step')} (all "
                            "columns of the batch agree)",
                "metric": f"only the log's {found['name']} (all weights agree)",
                "log": f"the log's {found['name']}", "weights": f"the weight {found['name']}"}
        what = what.get(kind, f"the column {found['name']!r} of the batch (a sum over its tokens)")
        lines = [f"first: {where}, {what}: {short(found['a'])} and {short(found['b'])}"]
        if found.get("own"):
            lines.append("  the script's own names that differ there, in its order: "
                         + ", ".join(found["own"][:6]))
        for x in found["logged"] * (kind not in ("metric", "log")):
            lines.append(f"  in the log: {x['name']}, {short(x['a'])} and {short(x['b'])}; weights "
                         f"differ by up to {found['moved']:.2g}")
        if len(run.notes) > 1 and (other := part(*run.notes[:2], 1e-12)):
            lines.append(f"the ranks have another {other['name']!r} in iteration "
                         f"{other['iteration']}: {short(other['a'])} and {short(other['b'])}; a "
                         "batch must be the same on all: a rank's number or share is in it")
        lost = lost_names(base.notes[0], run.notes[0]) if like == "resume" else {}
        if kind != "gradient" or found["step"]:  # the last step's; a right script sets them to 0
            lost.pop("gradients", 0)
        found["lost"] = [*lost]
        lines += [f"where it resumes, `{name}` is not as in the run that was not stopped: "
                  f"{a[:40]}, resumed {b[:40]}" for name, (a, b) in [*lost.items()][:4]]
        same = [name for name, other in self.found.items() if other
                and [other.get(x) for x in PLACE] == place]
        if same and not lost:
            return [*lines, f"the same place as above ({same[0]}): likely the same mistake"]
        return lines + likely(like, kind)


PLACE = "kind", "name", "iteration", "step"


def short(x):
    return f"{x:.8g}" if isinstance(x, float) else str(x)


def likely(like, kind):
    """Two or three causes: of this kind, else of any."""
    kinds = [kind, *["column"] * (kind in ("sampled", "scores", "read")), "", "gradient"]
    causes = next((CAUSES[like, x] for x in kinds if (like, x) in CAUSES), [])
    return ["likely:"] * bool(causes) + [f"  - {cause}" for cause in causes]


def lost_names(base, run):
    """{name: (value, value)} of what is not the whole run's where an iteration is begun again."""
    whole = {x["iteration"]: x["names"] for x in base if x["kind"] == "state"}
    found, fresh = {}, False
    for x in run:
        if x["kind"] == "state" and fresh and x["iteration"] > 0:
            before = whole.get(x["iteration"], {})
            for name, value in x["names"].items():
                if before.get(name, value) != value:
                    found.setdefault(name, (before[name], value))
        fresh = x["kind"] == "begin" or fresh and x["kind"] != "state"
    return dict(sorted(found.items(), key=lambda x: ("." in x[0], x[0])))


def checks_of(keys, world, deep):
    """
    {name: (promise, what is changed, the run to compare with, {run: options of Runs.ask})}; its
    last run is the one that is compared.
    """
    found, samples = {}, "reward_functions" in keys
    pieces = dict(micro_batch_size=5) | (dict(head_chunk=4, rollout_batch_size=4) if samples else {})

    def add(name, changed, base="base", **options):
        found[name] = (re.split(", | [0-9]", name)[-1 if ", " in name else 0], changed, base,
                       {name: options})

    def add_stops(name, first, second, base="base", keys=()):
        more = dict(keys=dict(keys) | dict(checkpoint_interval=1), where=name)
        stop, kill = (dict(state=1, signal=(n, int(number))) for n, number in (
            (first, signal.SIGTERM), (second, signal.SIGKILL)))
        found[name] = "resume", (
            f"stopped in iteration {first}, killed in iteration {second}, the same command again"
            + f"; {base}" * (base != "base")), base, {
            f"{name}, 1": dict(more, how=stop), f"{name}, 2": dict(more, how=kill, after=f"{name}, 1"),
            name: dict(more, how=dict(state=1), after=f"{name}, 2")}

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
            turns = dict(environment=f"{world.rules}:talks", chat_template=world.template,
                         max_turns=3, max_new_tokens=16, policy_path=world.chatty,
                         reward_functions=f"{keys['reward_functions']},0.5*environment")
            found["turns"] = "turns", "", "", {"turns": dict(keys=turns)}
            add("turns, padding", "7 more columns with other ids; several turns", "turns",
                keys=turns, how=dict(wide=7, ids=1))
            add("turns, ranks", f"2 ranks; {PIECES}; several turns", "turns", keys=turns | pieces,
                ranks=2)
    if deep:
        long = {name: x for name, x in dict(max_iters=12, num_minibatches=2, ppo_epochs=2,
                                            num_iterations=2).items() if name in keys}
        found["long"] = "deep", "", "", {"long": dict(keys=long)}
        add("long, ranks", f"3 ranks; {LONG}", "long", keys=long, ranks=3)
        for stage in (1, 3):
            add(f"long, zero {stage}", f"zero_stage={stage} on 2 ranks; {LONG}", "long", ranks=2,
                keys=long | dict(zero_stage=stage))
        add_stops("long, resume", 5, 10, "long", long)
        if not keys.get("lora"):
            lora = dict(lora="2")
            found["lora"] = "deep", "", "", {"lora": dict(keys=lora)}
            add("lora, ranks", "2 ranks; lora=2", "lora", keys=lora, ranks=2)
            add_stops("lora, resume", 1, 3, "lora", lora)
    return found


def prove(script, argv, folder, only="", deep=False, say=print):
    """Try the promises: (Verdicts, Runs). only: one of them. Raises BadInput, CannotRun."""
    os.makedirs(f"{folder}/world")
    world = small_files(f"{folder}/world")
    keys, values = shrink(script, argv, world)
    runs, verdicts, tried = Runs(script, keys, folder), Verdicts(say), checks_of(values, world, deep)
    tried = {name: check for name, check in tried.items() if only in ("", name, check[0], check[2])
             or name in [base for other, (_, _, base, _) in tried.items() if other == only]}
    how = dict(temperature=values.get("temperature", 1.0))
    runs.ask("base", how=how | dict(state=1))
    for _, _, _, asked in tried.values():
        for name, options in asked.items():
            runs.ask(name, **options | dict(how=how | options.get("how", {})))
    try:
        look(runs.get("base"), values, verdicts, script, only)
        if "trained" in verdicts.found and verdicts.found["trained"] and (
                verdicts.found["trained"]["kind"] == "died"):
            return verdicts, runs
        for name, (like, changed, base, _) in tried.items():
            if not base:
                run = runs.get(name)
                if {*run.codes} != {0}:
                    verdicts.untried[name] = run.said
                    verdicts.say(f"not tried  {PROMISES[like]}: {run.said}")
            elif base not in verdicts.untried:
                found = verdicts.check(name, like, changed, runs.get(base), runs.get(name))
                if name == "noise" and found:
                    runs.ask("same", how=how)
                    if verdicts.check("same", "same", "nothing", runs.get("base"), runs.get("same")):
                        say("        all that follows compares runs: mend this first")
                        return verdicts, runs
        if "reward_functions" in values and only in ("", "score"):
            higher_score(runs, values, verdicts, how)
        if "reward_functions" in values and only in ("", "kl") and values.get("kl_coef", 0) > 0:
            larger_kl(runs, values["kl_coef"], verdicts, how)
    finally:
        runs.close()
    return verdicts, runs


def look(base, values, verdicts, script, only):
    """What one run, and the script's text, show."""
    if {*base.codes} != {0}:
        if not re.search(OWN_CHECKS, base.said):
            raise CannotRun(base.said)
        return verdicts.tell("trained", "trained", "", dict(kind="died", name=""), [
            f"the run itself says: {base.said}"])
    looks = {(x["what"], x["name"]): x for x in base.notes[0] if x["kind"] == "look"}
    lines = [LOOKS[what].format(**x) for (what, _), x in looks.items()
             if what in LOOKS and what != "mask"]
    kls = [record["objective/kl"] for record in base.log if "objective/kl" in record]
    if values.get("kl_coef", 0) > 0 and len(kls) > 1 and not any(kls):
        lines.append("objective/kl is exactly 0 in every iteration: the reference is the policy "
                     "itself, or moves with it")
    if only in ("", "trained"):
        verdicts.tell("trained", "trained", "", dict(kind="look", name="") if lines else None, lines)
    masks = [LOOKS["mask"].format(**x) for (what, _), x in looks.items() if what == "mask"]
    names = [f"line {line}: {name}" for name, line in carried(script).items()]
    for name, lines in (("mask", masks), ("carried", names)):
        if only in ("", name) and lines:
            verdicts.tell(name, name, "", dict(kind=name, name=""), lines)


def higher_score(runs, values, verdicts, how):
    """One response's score, 3 higher and 3 lower: its log-prob must follow."""
    more = {name: x for name, x in dict(max_refills=0, refill_by="").items() if name in values}
    for wait in (0, 2):  # where the first iteration trains no policy: the third one
        for by in (3.0, -3.0):
            runs.ask(f"score {by:+}, {wait}", how=how | dict(bump=dict(by=by, wait=wait)),
                     keys=more | dict(max_iters=wait + 1, eval_path=""))
        up, down = (next((x["likely"] for x in runs.get(f"score {by:+}, {wait}").notes[0]
                          if x["kind"] == "end"), 0.0) for by in (3.0, -3.0))
        if up != down:
            break
    kind = "none" if up == down else "wrong"
    lines = ["whatever its score, the update is the same"] if up == down else [
        f"its log-prob behind one iteration: {short(up)} with the higher score, {short(down)} with "
        "the lower one"]
    verdicts.tell("score", "score", "the score of one response, 3 higher or 3 lower",
                  dict(kind=kind, name="") if up <= down else None, lines + likely("score", kind))


def larger_kl(runs, kl_coef, verdicts, how):
    for by in (0.01, 10.0):
        runs.ask(f"kl {by}", how=how | dict(drift=1), keys=dict(kl_coef=kl_coef * by, eval_path=""))
    near, far = (next((x["drift"] for x in runs.get(f"kl {by}").notes[0] if x["kind"] == "end"), 0.0)
                 for by in (0.01, 10.0))
    verdicts.tell("kl", "kl", "kl_coef, a hundredth of yours or ten times as much",
                  dict(kind="wrong", name="") if far > 1.1 * near else None, [
                      f"squared distance of a token's log-probs at the end: {near:.3g} with the "
                      f"small coefficient, {far:.3g} with the large one", *likely("kl", "")])


class CannotRun(Exception):
    """The small run cannot be made."""


# errors by which a run refuses what breaks a promise; other errors may be the small world's fault
OWN_CHECKS = ("run.state|optimizer keeps|has a trained parameter|before any update|drifted apart|"
              "changed although|not finite|metric")


def main(argv):
    own = [arg for arg in argv if arg == "--deep" or arg.startswith("--only=")]
    rest = [arg for arg in argv if arg not in own]
    scripts = [arg for arg in rest if not arg.startswith("--")][:1]
    only = next((arg.partition("=")[2] for arg in own if arg != "--deep"), "")
    if {"-h", "--help"} & {*argv} or not argv:
        print(__doc__.strip(), "\n\nThe promises:")
        for name, text in PROMISES.items():
            print(f"    {name:<12}{text}{' (a note)' * (name in NOTES)}")
        return 0
    if not scripts or not os.path.isfile(scripts[0]):
        raise BadInput(f"{(scripts or argv)[0]} is no script; type python tools/prove.py grpo.py "
                       "config/mine.py, the command of a run")
    if only and only not in PROMISES:
        raise BadInput(f"--only={only}: the promises are {', '.join(PROMISES)}")
    rest.remove(scripts[0])
    script, began = os.path.abspath(scripts[0]), time.time()
    import transformers

    transformers.logging.disable_progress_bar()
    folder = tempfile.mkdtemp(prefix="prove-")
    try:
        verdicts, runs = prove(script, rest, folder, only, "--deep" in own)
    except CannotRun as e:
        print(f"prove.py: the small run of {scripts[0]} cannot be made: {e}", file=sys.stderr)
        return 3
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    broken = [name for name, found in verdicts.found.items() if found and not found["note"]]
    print(f"{len(verdicts.found)} promises tried, {len(broken)} broken; {len(runs.seconds)} runs in "
          f"{time.time() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(max(start(json.loads(sys.argv[2]), twin=False).wait().codes))
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv],
                  os.environ | dict(PYTHONHASHSEED="0"))
    sys.exit(main(sys.argv[1:]))
