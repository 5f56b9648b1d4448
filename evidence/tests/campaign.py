"""
A fault campaign. Runs are killed at chosen calls, or from outside when their log has some lines;
the same command is run again; what it leaves must be, bit for bit, what a run leaves to which
nothing has happened.

    python evidence/tests/campaign.py --kills=60             # fails on any difference
    python evidence/tests/campaign.py --only='["ppo 2", ["call", 0, 37, "before"]]'  # one once more

Nothing in the scripts knows of it: the process of a rank is a fork of this one, in which the calls
are wrapped before the script begins: of collectives, and of all that changes a file in out_dir. A
fault is [KIND, VICTIM, AT, WHEN]; the kinds are
    call    the AT-th of these calls by the rank VICTIM. before | behind (a file is half written)
    line    AT lines are in the log: kill -9 of a rank, of "all", or of the "launcher" alone
A second fault hits the run that resumes.
"""
import argparse
import builtins
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests"))
import conftest  # noqa: F401  first: it puts the repository on the path

import checkpoint
import tiny

TIMEOUT, GRACE = 20, 25  # seconds: of the scripts; and how much later a rank must have ended
NEW_HEAD = dict(value_init="policy", reward_functions="9*reward_model")  # it finds a unit
JOBS = {  # name: script, ranks, keys, iterations between checkpoints
    "sft 3": ("sft.py", 3, dict(max_iters=4, lora="2", keep_checkpoints=2), 1),
    "rm 2": ("rm.py", 2, dict(), 1),
    "ppo 1": ("ppo.py", 1, dict(keep_best="score", ema_decay=0.5, save_rollouts=1), 1),
    "ppo 2": ("ppo.py", 2, NEW_HEAD | dict(value_init="shared", lr_decay="cosine"), 1),
    "grpo 2": ("grpo.py", 2, dict(max_refills=2, refill_by="sometimes", max_iters=4), 2),
    "ppo, shards": ("ppo.py", 2, NEW_HEAD | dict(
        zero_stage="policy=3,value=1", num_minibatches=1, batch_size=6), 1),
    "ppo, three roles": ("ppo.py", 3, dict(roles="train=1,generate=1,score=1", staleness=1), 1),
    "grpo, four ranks": ("grpo.py", 4, dict(roles="train=2,generate=1,score=1", staleness=2), 2),
    "grpo, two roles": ("grpo.py", 2, dict(roles="train=1,generate=1", max_refills=1), 1),
    "grpo, stale": ("grpo.py", 1, dict(staleness=2, max_iters=4), 1),
    "ppo, stale": ("ppo.py", 2, dict(staleness=1, importance_cap=2), 1)}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "recv",
               "isend", "reduce_scatter_tensor", "new_group", "init_process_group",
               "destroy_process_group")
FILES = "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync"  # rmtree calls these


# ---------------------------------------------------------------------------------------------
# in a rank: count the calls, and die at one of them


def inject(rank, fault, counted):
    """Wrap every call between which a kill can come. The file `counted` gets a byte for each."""
    import torch.distributed as dist
    from transformers import modeling_utils

    out, real_open = os.path.abspath("out"), builtins.open
    count_file = os.open(counted, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    numbers = iter(range(1, sys.maxsize))

    def die(file="", start=0):
        """A file that was just written loses half of what stands in it from `start` on."""
        if file:
            os.truncate(file, start + (os.path.getsize(file) - start) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def reach():
        """A call comes, and perhaps the end before it. Whether the end comes behind it."""
        os.write(count_file, b".")
        number = next(numbers)
        if fault == ["call", rank, number, "before"]:
            die()
        return fault == ["call", rank, number, "behind"]

    def inside(path, dir_fd=None, **_):
        return dir_fd is not None or isinstance(path, int) or os.path.abspath(path).startswith(out)

    def wrap(owner, name, counts=lambda *args, **how: True, file=None):
        """file: which argument names the file that the function writes."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args, **how):
            dies = counts(*args[:1], **how) and reach()
            try:
                return original(*args, **how)
            finally:  # also behind one that fails
                if dies:
                    die(args[file] if file else "")

        setattr(owner, name, wrapped)

    def opened(path, mode="r", *args, **how):
        if not set("wax+") & set(mode) or isinstance(path, int) or not inside(path):
            return real_open(path, mode, *args, **how)
        dies, file = reach(), real_open(path, mode, *args, **how)
        start, close = os.path.getsize(path), file.close  # 0, unless the file is appended to
        if dies:
            file.close = lambda: (close(), die(path, start))
        return file

    for name in COLLECTIVES:
        wrap(dist, name)
    for name in FILES:
        wrap(os, name, inside)
    wrap(checkpoint, "save_file", file=1)
    wrap(modeling_utils, "safe_save_file", file=1)
    builtins.open = opened


# ---------------------------------------------------------------------------------------------
# a run and its launcher


def launch(world, job, folder, fault=None):
    """
    Start a job's run; the process id of its launcher. The files `pids` and `codes` in the folder
    will have the processes of its ranks, and their exit codes.
    """
    script, ranks, keys, interval = job
    keys = tiny.keys_of(world, script, **dict(
        dtype="float32", timeout=TIMEOUT, checkpoint_interval=interval, out_dir="out") | keys)
    if script in ("ppo.py", "grpo.py"):
        keys["reward_timeout"] = TIMEOUT - 5
    if "max_refills" in keys:
        keys["reward_functions"] = f"{world.rules}:sometimes"  # flat groups
    for name in ("pids", "codes"):
        Path(folder, name).unlink(missing_ok=True)
    launcher = os.fork()
    if launcher:
        return launcher

    def before(rank):
        import errors

        errors.PARENT = os.getppid()  # as if this process had imported it
        if ranks > 1:
            os.environ |= dict(TORCHELASTIC_RUN_ID="x", TORCHELASTIC_USE_AGENT_STORE="True")
        inject(rank, fault, f"{folder}/counted-{rank}")

    try:
        import torch.distributed as dist

        started = tiny.Started(script, tiny.typed(keys), folder, ranks, before)
        tiny.write(f"{folder}/pids.tmp", json.dumps(started.pids))
        os.rename(f"{folder}/pids.tmp", f"{folder}/pids")
        store = ranks > 1 and dist.TCPStore("127.0.0.1", started.port, is_master=True,
                                            wait_for_workers=False)
        tiny.write(f"{folder}/codes", json.dumps(started.wait(600).codes))
        del store
    finally:
        os._exit(0)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_once(world, job, folder, fault=None):
    """A run with a fault, to its end: (whether the fault came, the codes, what was wrong)."""
    os.makedirs(folder, exist_ok=True)
    launcher, wrong, came = launch(world, job, folder, fault), [], False
    while not os.path.exists(f"{folder}/pids"):
        time.sleep(0.002)
    pids = json.loads(open(f"{folder}/pids").read())
    kind, victim, at, _ = fault or ("none", None, None, None)
    due, lost, log = kind == "line", None, f"{folder}/out/log.jsonl"
    while living := [pid for pid in pids if alive(pid)]:
        if due and (os.path.exists(log) and open(log, "rb").read().count(b"\n")) >= at:
            due, came = False, len(living) == len(pids)
            victims = {"all": pids, "launcher": [launcher]}.get(victim) or [pids[victim]]
            for pid in victims if came else ():
                os.kill(pid, signal.SIGKILL)
        if len(living) < len(pids):
            lost = lost or time.time()
            if time.time() > lost + TIMEOUT + GRACE:
                wrong.append(f"{len(living)} ranks did not end after the first one had")
                for pid in living:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    os.waitpid(launcher, 0)
    codes = json.loads(open(f"{folder}/codes").read()) if os.path.exists(f"{folder}/codes") else []
    if kind == "call":
        came = codes[victim] == -signal.SIGKILL
    said = [open(path).read() for path in (f"{folder}/stderr-{rank}" for rank in range(len(pids)))
            if os.path.exists(path)]  # a rank may be killed before it has one
    wrong += [f"a traceback: {text[-300:]}" for text in said if "Traceback" in text]
    return came, codes, wrong


# ---------------------------------------------------------------------------------------------
# what a run leaves, and trials


def records(folder):
    """The whole lines of the log."""
    return [record for _, record in checkpoint.lines_of(f"{folder}/out/log.jsonl")]


def left_by(folder):
    """All that must be the same, {path: what is there}."""
    out = Path(folder, "out")
    found = {str(path.relative_to(out)): "folder" if path.is_dir() else
             hashlib.sha256(path.read_bytes()).hexdigest() for path in out.rglob("*")
             if path.name not in (".lock", "log.jsonl")}
    return found | {"log": str(tiny.read_log(out) if (out / "log.jsonl").exists() else [])}


def newest(folder):
    """The iteration of the newest good checkpoint, 0 if there is none."""
    good = [f for f in checkpoint.list_checkpoints(f"{folder}/out") if not checkpoint.damage(f)]
    return max(map(checkpoint.iteration_of, good), default=0)


def trial(world, job, whole, faults, folder):
    """The kills that came, and what was wrong, in words."""
    kills, wrong = 0, []
    for fault in faults:
        there = newest(folder)
        came, codes, more = run_once(world, job, folder, fault)
        wrong, kills = wrong + more, kills + came
        if not came:
            wrong += [] if set(codes) == {0} else [f"the fault did not come, but codes {codes}"]
            continue
        last = max((record["iteration"] for record in records(folder)), default=0)
        due = last // job[3] * job[3]  # a checkpoint comes before the line of its iteration
        if newest(folder) < max(there, due):
            wrong.append(f"the newest checkpoint is {newest(folder)}, not {max(there, due)}")
    start, before = newest(folder), records(folder)
    _, codes, more = run_once(world, job, folder)
    wrong += more + ([] if set(codes) == {0} else [f"resumed, it ended with {codes}"])
    now = left_by(folder)
    wrong += [f"{path} differs" for path in now | whole if now.get(path) != whole.get(path)]
    kept = [record for record in before if record["iteration"] < start]
    if records(folder)[:len(kept)] != kept:  # with their seconds: they were not done again
        wrong.append(f"iterations before {start} were done again")
    return kills, wrong


def draw(rng, job, folder):
    """A fault that a run of the job can have; folder: a whole run's."""
    _, ranks, keys, _ = job
    victim, at = rng.randrange(ranks), rng.randint(0, keys.get("max_iters", 3))
    if rng.random() < 0.3:
        return ["line", rng.choice([victim, "all", *["launcher"] * 2 * (ranks > 1)]), at, ""]
    count = os.path.getsize(f"{folder}/counted-{victim}")
    return ["call", victim, rng.randint(1, count), rng.choice(["before", "behind"])]


def campaign(world, work, jobs, kills=0, seed=1, only=()):
    """
    The trials `only`, [job, fault, ...] each; or drawn ones, until so many kills came. Returns the
    number of kills, and the problems in words.
    """
    whole, rng, came, problems, number = {}, random.Random(seed), 0, [], 0
    while number < len(only) or came < kills:
        name, *faults = only[number] if only else [list(jobs)[number % len(jobs)]]
        if name not in whole:
            _, codes, wrong = run_once(world, jobs[name], f"{work}/{name} whole")
            assert set(codes) == {0} and not wrong, (name, codes, wrong)
            whole[name] = left_by(f"{work}/{name} whole")
        for _ in range(0 if only else 1 + (number % 7 == 3)):
            faults.append(draw(rng, jobs[name], f"{work}/{name} whole"))
        folder = f"{work}/{number}"
        hits, wrong = trial(world, jobs[name], whole[name], faults, folder)
        came, number, again = came + hits, number + 1, json.dumps([name, *faults])
        print(f"{came:3} kills: {again}" + "".join(f"\n    WRONG: {line}" for line in wrong[:9]),
              flush=True)
        problems += [f"--only='{again}': {line}" for line in wrong[:4]]
        if not wrong:
            shutil.rmtree(folder)
    return came, problems


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="how many, over all jobs and kinds")
    parser.add_argument("--seed", type=int, default=1, help="decides which")
    parser.add_argument("--only", type=json.loads, action="append", default=[],
                        help="this trial and no other; may be repeated")
    options = parser.parse_args()
    work = tempfile.mkdtemp(prefix="campaign-")
    os.mkdir(f"{work}/world")
    came, problems = campaign(tiny.build(f"{work}/world"), work, JOBS, options.kills, options.seed,
                              options.only)
    print("\n".join([*problems, f"{came} kills, {len(problems)} problems; files: {work}"]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
