"""
A fault campaign, from outside: nothing in the scripts knows of it. They are killed at chosen calls and at random times, the
same command is run again, and what it leaves must be, bit for bit, what an uninterrupted run leaves.

python tests/campaign.py --kills=200                          # fails on any difference
python tests/campaign.py --roles --kills=40                   # ranks with roles
python tests/campaign.py --only='[["ppo.py", 2], ["file", 0, 37, "before"]]'  # one kill again, as the campaign has named it

A run as a user starts it costs 4 to 8 s, nearly all of it imports. Here one process imports everything, never computes, and
forks the ranks of each run: 0.2 s. tests/forked.py runs other tests' scripts in the same way.

A fault is KIND, RANK, AT, WHEN. The kinds:
    collective, compute    the AT-th call of a collective; of a model, of backward, of an optimizer's step. before | after it
    file                   the AT-th rename, unlink, mkdir, fsync, ... in out_dir. before | after
    write                  the AT-th file that is written there. before | empty | half (of it is on the disk) | after
    time                   the fraction AT of the run's usual duration. RANK -1: all ranks at once
    signal                 as time, but the run is only asked, by the signal WHEN: it must save and end with 0
A second fault hits the resumption.
"""
import argparse
import builtins
import collections
import contextlib
import ctypes
import functools
import gc
import glob
import hashlib
import importlib
import io
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback

os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  OMP_WAIT_POLICY="passive")  # where a test has two threads, waiting must not take a core
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]

import safetensors.torch  # noqa: E402
import tokenizers  # noqa: E402, F401  (imported here, so that no child has to)
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  (the first optimizer of a process imports it, which takes over a second)
import torch.distributed as dist  # noqa: E402
import torch.distributed.fsdp  # noqa: E402, F401
import torch.distributed.optim  # noqa: E402, F401
from transformers import (  # noqa: E402, F401
    AutoModelForCausalLM, AutoTokenizer, GPT2ForSequenceClassification, GPT2LMHeadModel, GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification, PreTrainedTokenizerFast, Qwen3ForCausalLM, conversion_mapping, modeling_utils)

import configurator  # noqa: E402
import model  # noqa: E402
import checkpoint  # noqa: E402

import tiny  # noqa: E402


torch.set_num_threads(1)  # a forked child has none of its parent's threads, so the parent must never start any

TIMEOUT = 20  # the scripts': how long a collective waits for a lost rank
GRACE = 15  # seconds more for a rank to end; the machine may be slow
LONGEST = 900  # seconds that a run may take in all, or a row of them (tiny.in_a_row) on a busy machine
ATTEMPTS = 10  # to hit a run at a time: one that takes 0.1 s may have taken 1 s when it was measured
INTERVAL = {"sft.py": 2, "rm.py": 1, "ppo.py": 1, "grpo.py": 2}  # checkpoint_interval
KEYS = {"sft.py": dict(max_iters=4, eval_interval=2), "rm.py": dict(max_iters=3, eval_interval=2),
        "ppo.py": dict(max_iters=2, eval_interval=1, warmup_iters=3, keep_best=True, batch_size=4, ppo_epochs=1),
        "grpo.py": dict(max_iters=4, eval_interval=2, warmup_iters=3, max_refills=2, keep_best=True, reward_timeout=10)}
PRODUCTS = {"sft.py": ["policy"], "rm.py": ["reward_model"], "ppo.py": ["policy", "value_model"], "grpo.py": ["policy"]}
JOBS = [(script, ranks) for script in KEYS for ranks in (1, 2)]
# with --roles: the keys roles, staleness and zero_stage, too. Batches that are sampled ahead are a part of a checkpoint
ROLE_JOBS = [("ppo.py", 2, "train=1,generate=1", 1), ("grpo.py", 2, "train=1,generate=1", 0), ("grpo.py", 1, "", 2),
             ("ppo.py", 3, "train=1,generate=1,score=1", 0), ("grpo.py", 4, "train=2,generate=1,score=1", 1),
             ("ppo.py", 2, "train=1,score=1", 1), ("ppo.py", 2, "", 0, 3), ("grpo.py", 3, "", 0, 2), ("ppo.py", 2, "", 0, 1)]
KINDS = ["collective", "file", "write", "time", "compute", "signal"]

OURS = [name[:-3].replace(os.sep, ".") for folder in ("", "options/", "grading/")
        for name in glob.glob(f"{folder}[!_]*.py", root_dir=ROOT) if name not in KEYS]  # every module that the scripts may import

Fault = collections.namedtuple("Fault", "kind rank at when")


def command(world, job, **keys):
    """The arguments of a job's run here; out_dir is relative to the folder of the run, so that all runs' files are alike."""
    script, _, *rest = job
    if rest:
        keys |= dict(zip(("roles", "staleness", "zero_stage"), rest, strict=False))
    keys = dict(checkpoint_interval=INTERVAL[script], keep_checkpoints=1, timeout=TIMEOUT) | KEYS[script] | keys
    if script == "ppo.py":  # several turns
        keys |= dict(environment=world.rule("talks"), max_turns=2)
    if script == "grpo.py":
        keys["reward_functions"] = world.rule("odd")  # flat groups, for refills
    return getattr(world, script.removesuffix(".py"))("out", **keys)


# ---------------------------------------------------------------------------------------------------------------------
# in the child: count the calls, and die at one of them


class Points:
    """Numbers the calls of each kind, in order. Lists them, or kills this process at the one that is the fault."""

    def __init__(self, script, fault):
        self.script, self.fault, self.counts, self.listed = script, fault, collections.Counter(), []

    def begin(self, kind, what):
        """Before the call. Returns its number."""
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        where = f"line {frame.f_lineno}, iteration {frame.f_globals.get('iteration')}" if frame else "?"
        self.counts[kind] += 1
        self.listed.append((kind, self.counts[kind], f"{what} ({where})"))
        self.reach(kind, self.counts[kind], "before")
        return self.counts[kind]

    def is_fault(self, kind, number, when):
        return self.fault is not None and self.fault[0] == kind and self.fault[2:] == (number, when)

    def reach(self, kind, number, when):
        if self.is_fault(kind, number, when):
            os.kill(os.getpid(), signal.SIGKILL)

    def written(self, path, start, number):
        """A file is written, or a part of it, from start on. The fault may leave half of that, as a kill in the middle does."""
        if self.is_fault("write", number, "half"):
            os.truncate(path, start + (os.path.getsize(path) - start) // 2)
            self.reach("write", number, "half")


class Written:
    """A file open for writing. Its fate is decided when it is closed: whole, or cut to half of what was written to it."""

    def __init__(self, file, path, number, points):
        self.file, self.path, self.number, self.points = file, path, number, points
        self.start = os.path.getsize(path)  # 0, unless the file is appended to
        points.reach("write", number, "empty")

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def flush(self):
        self.file.flush()
        self.points.written(self.path, self.start, self.number)

    def close(self):
        if not self.file.closed:
            self.file.close()
            self.points.written(self.path, self.start, self.number)
            self.points.reach("write", self.number, "after")


def put(owner, name, new):
    """Put new in the place of owner.name, also where a module of ours has imported it by name."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    for module in map(sys.modules.get, OURS):
        for key in [k for k, v in vars(module).items() if v is old]:
            setattr(module, key, new)


def inject(points):
    """Wrap everything that a kill can come between. Of files, only those in out_dir count."""
    out, real_open, real_save = os.path.abspath("out"), builtins.open, safetensors.torch.save_file

    def inside(path):
        if isinstance(path, int):
            return True
        path = os.path.abspath(os.fsdecode(path))
        return path == out or path.startswith(out + os.sep)

    def shown(path):
        if isinstance(path, int):  # a file descriptor; Linux knows its path
            path = os.readlink(f"/proc/self/fd/{path}")
        return os.path.relpath(path, os.path.dirname(out)) if os.path.isabs(path) else path

    def wrap(owner, name, kind):
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            if kind == "file" and kwargs.get("dir_fd") is None and not inside(args[0]):
                return original(*args, **kwargs)
            number = points.begin(kind, f"{name} {shown(args[0])}" if kind == "file" else name)
            try:
                return original(*args, **kwargs)
            finally:  # also after one that fails, as mkdir does where a folder is
                points.reach(kind, number, "after")

        put(owner, name, wrapped)

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor", "barrier", "isend",
                 "irecv", "new_group", "init_process_group", "destroy_process_group"):
        wrap(dist, name, "collective")
    for owner, name in ((model.Model, "states"), (torch.Tensor, "backward"), (torch.optim.AdamW, "step")):
        wrap(owner, name, "compute")
    # rmtree and makedirs call these, one by one
    for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync", "truncate"):
        wrap(os, name, "file")

    def opened(path, mode="r", *args, **kwargs):
        if not set("wax+") & set(mode) or isinstance(path, int) or not inside(path):
            return real_open(path, mode, *args, **kwargs)
        number = points.begin("write", f"open {shown(path)} ({mode})")
        return Written(real_open(path, mode, *args, **kwargs), path, number, points)

    def saved(tensors, filename, *args, **kwargs):
        number = points.begin("write", f"save_file {shown(filename)}")
        if points.is_fault("write", number, "empty"):
            real_open(filename, "wb").close()
            points.reach("write", number, "empty")
        real_save(tensors, filename, *args, **kwargs)
        points.written(filename, 0, number)
        points.reach("write", number, "after")

    put(builtins, "open", opened)
    put(safetensors.torch, "save_file", saved)
    put(modeling_utils, "safe_save_file", saved)


def warm():
    """
    What every child would do again, done once in the parent: import our modules, compile the scripts and read their keys, look
    through what we imported. And leave out what is of no use.
    """
    # torch draws weights for each layer that is made, and all of them are overwritten: a seventh of a tiny run
    for layer in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm):
        layer.reset_parameters = lambda self: None
    configurator.read_lines = functools.cache(configurator.read_lines)
    runpy.compile = functools.cache(compile)  # where runpy looks for it
    for module in OURS:
        importlib.import_module(module)
    for script in KEYS:
        path = os.path.join(ROOT, script)
        configurator.read_keys(path)
        with open(path, "rb") as f:
            runpy.compile(f.read(), path, "exec")
    conversion_mapping.get_checkpoint_conversion_mapping("gpt2")  # 0.2 s at the first model of a process
    gc.collect()
    gc.freeze()


def begin_child():
    """Forget the campaign's signal handlers, and do not outlive it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def child(script, arguments, rank, ranks, port, folder, fault, count):
    """
    One rank, in a process of its own: run the script as python would, and end. arguments: the script's; or, of each rank,
    {"args", "code"}: what code of a test is run before, which may put functions of its own in the place of ours.
    """
    code = 70
    try:
        begin_child()
        os.chdir(folder)
        for fd, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, fd)
            os.close(file)
            setattr(sys, name, open(fd, "w", encoding="utf-8", closefd=False, buffering=8192 if fd == 1 else 1))
            setattr(sys, f"__{name}__", getattr(sys, name))
        if ranks > 1:
            # as torchrun does it, the store belongs to a process of its own
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                              MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        script = os.path.join(ROOT, script)
        sys.argv = [script, *arguments]
        points = Points(script, fault)
        if count or fault:
            inject(points)
        if isinstance(arguments[0], dict):
            tiny.run_patches(arguments[rank].get("code", ""), rank, map(sys.modules.get, OURS))
            sys.argv[1:] = arguments[rank]["args"]
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
        except BaseException:
            code = 1
            sys.excepthook(*sys.exc_info())  # ends here, if it is ours
        if count:
            with open(f"points-{rank}", "w", encoding="utf-8") as f:
                json.dump(points.listed, f)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# ---------------------------------------------------------------------------------------------------------------------
# in the parent: runs

LIVE = set()  # the process ids of our children


def start_store():
    """A process that keeps the store where the ranks of a run meet, and outlives them, as torchrun's. Returns its id, port."""
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            begin_child()
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(send, str(store.port).encode())
            while True:
                signal.pause()
        finally:
            os._exit(1)
    LIVE.add(pid)
    os.close(send)
    port = int(os.read(receive, 10))
    os.close(receive)
    return pid, port


def end(pid):
    """Kill a child of ours, and forget it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    LIVE.discard(pid)


class Run:
    """A script's run on some ranks. fault: where a rank kills itself. kick: (seconds, ranks, signal) from us."""

    def __init__(self, job, arguments, folder, fault=None, kick=None, count=False):
        self.job, self.arguments, self.folder, self.fault, self.kick, self.count = job, arguments, folder, fault, kick, count
        self.codes, self.ended, self.hung, self.kicked = {}, {}, [], []

    def start(self):
        script, ranks = self.job[:2]
        os.makedirs(self.folder, exist_ok=True)
        self.store, port = start_store() if ranks > 1 else (None, 0)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids, self.began, self.wall = {}, time.monotonic(), time.time()
        for rank in range(ranks):
            fault = self.fault if self.fault and self.fault.rank == rank else None
            pid = os.fork()
            if pid == 0:
                child(script, self.arguments, rank, ranks, port, self.folder, fault, self.count)
            LIVE.add(pid)
            self.pids[rank] = pid

    def poll(self):
        """Do what is due. Returns whether all ranks have ended."""
        now = time.monotonic()
        alive = [rank for rank in self.pids if rank not in self.codes]
        for rank in alive:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                LIVE.discard(pid)
                self.codes[rank], self.ended[rank] = os.waitstatus_to_exitcode(status), now
        alive = [rank for rank in alive if rank not in self.codes]
        if self.kick and now >= self.began + self.kick[0]:
            _, ranks, number = self.kick
            self.kick, self.kicked = None, [rank for rank in ranks if rank in alive]
            log = os.path.join(self.folder, "out", "log.jsonl")  # which a run writes anew when it begins
            self.logged = os.path.exists(log) and os.path.getmtime(log) >= self.wall
            for rank in self.kicked:
                os.kill(self.pids[rank], number)
        late = self.ended and now > min(self.ended.values()) + TIMEOUT + GRACE or now > self.began + LONGEST
        if alive and late and not self.hung:
            self.hung = alive
            for rank in alive:
                os.kill(self.pids[rank], signal.SIGKILL)
        if not alive and self.store:
            end(self.store)
            self.store = None
        return not alive

    def wait(self):
        self.start()
        while not self.poll():
            time.sleep(0.002)
        return self

    def idle(self):
        """Whether what is left of it only waits: for a rank that died before they could meet, or to be the last to end."""
        return bool(self.ended) and time.monotonic() > min(self.ended.values()) + 0.2

    def duration(self):
        return max(self.ended.values()) - self.began

    def killed(self):
        """The ranks that died of a fault."""
        return [rank for rank, code in self.codes.items() if code == -signal.SIGKILL and rank not in self.hung]

    def output(self, name="stderr"):
        """The end of what the ranks have said, for a report."""
        said = []
        for rank in self.pids:
            file = os.path.join(self.folder, f"{name}-{rank}")
            if not os.path.exists(file):  # killed before it could open it
                continue
            with open(file, encoding="utf-8", errors="replace") as f:
                said += [f"rank {rank}: {line}" for line in f.read().splitlines()[-3:]]
        return said


def schedule(trials, processes=2):
    """Run [(ranks, generator)], whose generators yield Runs and return a result; so many ranks at once. Yields the results."""
    waiting, active = list(trials), []
    processes = max([processes, *(ranks for ranks, _ in waiting)])  # a run of more ranks must fit, too
    while waiting or active:
        free = processes - sum(ranks for ranks, _, run in active if not run.idle())
        fits = next((trial for trial in waiting if trial[0] <= free), None)
        if fits and len(active) < 4 * processes:
            waiting.remove(fits)
            active.append([*fits, None])
        for trial in list(active):
            if trial[2] is None or trial[2].poll():
                try:
                    trial[2] = trial[1].send(trial[2])
                    trial[2].start()
                except StopIteration as e:
                    active.remove(trial)
                    yield e.value
        time.sleep(0.002)


# ---------------------------------------------------------------------------------------------------------------------
# what a run leaves


def snapshot(folder):
    """{path: sha256} of every file in folder/out, "folder" for each folder; without the log and the lock."""
    out, found = os.path.join(folder, "out"), {}
    for d, folders, files in os.walk(out):
        found |= {os.path.relpath(os.path.join(d, name), out): "folder" for name in folders}
        for name in files:
            with open(os.path.join(d, name), "rb") as f:
                found[os.path.relpath(os.path.join(d, name), out)] = hashlib.file_digest(f, "sha256").hexdigest()
    return {path: value for path, value in found.items() if path not in ("log.jsonl", ".lock")}


def read_records(folder):
    """The records of the log as they are now; a line that is none is one without an iteration."""
    file = os.path.join(folder, "out", "log.jsonl")
    if not os.path.exists(file):
        return []
    records = []
    with open(file, encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                records.append(json.loads(line))
            except ValueError:
                records.append(dict(iteration=-1))
    return records


def left_by(folder):
    """All that must be the same."""
    return dict(files=snapshot(folder), log=[tiny.measured(record) for record in read_records(folder)])


def differences(ours, theirs):
    """How two runs' left_by differ, in words; theirs is the uninterrupted run."""
    a, b = ours["files"], theirs["files"]
    found = [f"{path}: {'left over' if path not in b else 'missing' if path not in a else 'different'}"
             for path in sorted(a.keys() | b.keys()) if a.get(path) != b.get(path)]
    a, b = ours["log"], theirs["log"]
    if [record["iteration"] for record in a] != [record["iteration"] for record in b]:
        return [*found, f"log.jsonl has the iterations {[record['iteration'] for record in a]}"]
    return found + [f"log.jsonl, iteration {x['iteration']}: {key} is {x.get(key)!r}, not {y.get(key)!r}"
                    for x, y in zip(a, b, strict=True) for key in sorted(x.keys() | y.keys()) if x.get(key) != y.get(key)]


def newest(folder):
    """The iteration of the newest good checkpoint, 0 if there is none."""
    with contextlib.redirect_stdout(io.StringIO()):
        found, _ = checkpoint.find_checkpoint(os.path.join(folder, "out"))
    return int(found.rpartition("-")[2]) if found else 0


# ---------------------------------------------------------------------------------------------------------------------
# trials: generators that yield Runs, and return a dict


def reference(world, job, folder):
    """
    The uninterrupted run that trials are compared with; it lists its points. Then the same command once more, when all is done:
    it must change nothing.
    """
    run = yield Run(job, command(world, job), folder, count=True)
    assert set(run.codes.values()) == {0}, (job, run.codes, run.output())
    whole, points, last = left_by(folder), read_points(folder, job), KEYS[job[0]]["max_iters"]
    for path in (f"checkpoint-{last:06d}/manifest.json", *(f"{p}/model.safetensors" for p in PRODUCTS[job[0]])):
        assert path in whole["files"], path
    if job[0] == "grpo.py":
        assert any("time/refill 0" in r for r in read_records(folder)), "nothing was refilled"
    again = yield Run(job, command(world, job), folder)
    problems = [f"{job}, once more: {d}" for d in differences(left_by(folder), whole)]
    if set(again.codes.values()) != {0}:
        problems.append(f"{job}, once more: it ended with {again.codes}")
    return dict(job=job, whole=whole, points=points, seconds=run.duration(), again_seconds=again.duration(), problems=problems)


def read_points(folder, job):
    """{(kind, rank, number): label} as the ranks of a counting run have listed them."""
    points = {}
    for rank in range(job[1]):
        with open(os.path.join(folder, f"points-{rank}"), encoding="utf-8") as f:
            points |= {(kind, rank, number): label for kind, number, label in json.load(f)}
    return points


def kill(world, uninterrupted, faults, folder):
    """Kill a run, or ask it to stop; its resumption at each further fault; let the same command run to its end, and compare."""
    job, whole, problems = uninterrupted["job"], uninterrupted["whole"], []
    result = dict(job=job, faults=faults, kills=[], problems=problems, folder=folder, said=[])
    for i, fault in enumerate(faults):
        timed = fault.kind in ("time", "signal")
        number = signal.Signals[fault.when] if fault.kind == "signal" else signal.SIGKILL
        before, seconds = newest(folder), uninterrupted["again_seconds" if i else "seconds"]
        # a run that was over before its time came is hit earlier, from the start; what is over early while it resumes is over
        for attempt in range(1 if i or not timed else ATTEMPTS):
            if attempt:
                shutil.rmtree(os.path.join(folder, "out"), ignore_errors=True)
            kick = (seconds * fault.at * 0.7 ** attempt, victims_of(fault, job), number) if timed else None
            run = yield Run(job, command(world, job), folder, None if kick else fault, kick)
            hit = run.killed() if number == signal.SIGKILL else run.kicked
            if hit:
                break
        ended_well = set(run.codes.values()) == {0}
        if run.hung:
            problems.append(f"rank {run.hung} had to be killed after {TIMEOUT + GRACE} s")
        if not hit and not (i and ended_well):
            problems.append(f"the fault did not happen; the run ended with {run.codes}")
            result["said"] = run.output()
        if not hit:
            continue
        result["kills"].append(fault)
        # what was saved must stay: the log is written after the checkpoint that is due before it
        done = max((r["iteration"] for r in read_records(folder)), default=0)
        due = done // INTERVAL[job[0]] * INTERVAL[job[0]]
        # a run that is asked, and has not begun its log, may just die of it: it had not set up its handler
        if fault.kind == "signal" and not ended_well and (run.logged or -number not in run.codes.values()):
            problems.append(f"asked to stop, the ranks ended with {run.codes}")
        if fault.kind == "signal" and ended_well and differences(left_by(folder), whole):  # else it was about to end anyway
            due = len(read_records(folder))
        if newest(folder) < max(before, due):
            problems.append(f"a checkpoint is gone; the newest good one is {newest(folder)}, {done} was logged")
    yield from go_on(world, job, whole, result)
    return result


def victims_of(fault, job):
    return list(range(job[1])) if fault.rank < 0 else [fault.rank]


def go_on(world, job, whole, result):
    """The same command once more: it goes on from the newest checkpoint, and leaves what it should."""
    problems, folder = result["problems"], result["folder"]
    start, records = newest(folder), read_records(folder)
    run = yield Run(job, command(world, job), folder)
    if set(run.codes.values()) != {0}:
        problems.append(f"the same command again ended with {run.codes}{', hung' if run.hung else ''}")
        result["said"] = run.output()
    problems += differences(left_by(folder), whole)
    # it has gone on, not begun again, if the lines of what was done are those of then, seconds included
    kept = [r for r in records if 0 <= r["iteration"] < start]
    if read_records(folder)[:len(kept)] != kept:
        problems.append(f"the log of iterations before {start} was written again, so they were run again")
    if not problems:
        shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------------------------------
# which faults


def candidates(points, kind):
    """
    The faults of a kind, which is not time or signal, that a run with these points could have. Of the many that are alike (a
    line broadcasts every parameter, a folder is synced or removed file by file), the first, the middle one and the last. The
    lock stays open, so there is no moment after it was written.
    """
    whens = ("before", "empty", "half", "after") if kind == "write" else ("before", "after")
    alike = {}
    for (k, rank, at), label in points.items():
        if k == kind:
            verb, _, place = label.partition(" (")
            alike.setdefault((rank, verb.split()[0] if verb.startswith(("fsync", "unlink")) else verb, place), []).append(at)
    return [Fault(kind, rank, at, when) for (rank, _, _), ats in alike.items()
            for at in sorted({ats[0], ats[len(ats) // 2], ats[-1]}) for when in whens
            if when != "after" or "/.lock (" not in points[kind, rank, at]]


def draw(points, ranks, kind, rng):
    """A fault of a kind; at a time where there is none of it."""
    found = candidates(points, kind)
    if found:
        return rng.choice(found)
    when = rng.choice(["SIGTERM", "SIGINT"]) if kind == "signal" else ""
    return Fault(kind if kind == "signal" else "time", rng.choice([-1, *range(ranks)]), round(rng.random(), 4), when)


def plan(n, seed, references):
    """
    n trials, [(job, faults)]: every job gets as many, and every kind of fault of a job. Of eleven trials one has a second fault
    in its resumption.
    """
    jobs, rng, trials = list(references), random.Random(f"{seed}"), []
    for i in range(n):
        job, kind = jobs[i % len(jobs)], KINDS[(i // len(jobs) + i % len(jobs)) % len(KINDS)]
        points = references[job]["points"]
        faults = [draw(points, job[1], kind, rng)]
        if i % 11 == 4:
            fault = draw(points, job[1], rng.choice(KINDS), rng)
            # the resumption is shorter than the run
            at = round(fault.at * 0.6, 4) if fault.kind in ("time", "signal") else 1 + int(fault.at * 0.6)
            faults.append(fault._replace(at=at))
        trials.append((job, faults))
    return trials


def describe(result, references):
    """A failed trial, for the reader: how to repeat it, where it was, what was wrong, where its files are."""
    points = references[result["job"]]["points"]
    only = json.dumps([result["job"], *result["faults"]])
    lines = [f"FAILED --only='{only}'"]
    lines += [f"    {fault.when} {points[fault[:3]]}" for fault in result["faults"] if fault[:3] in points]
    lines += [f"  - {problem}" for problem in result["problems"][:6]]
    return "\n".join([*lines, *(f"    | {line}" for line in result["said"]), f"    files: {result['folder']}"])


# ---------------------------------------------------------------------------------------------------------------------
# the campaign


def build_world(folder):
    """In a process of its own: what computes must not do so here."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            tiny.build(folder)
            os._exit(0)
        except Exception:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    return tiny.World(folder)


def campaign(work, kills=0, seed=1, roles=False, jobs=(), only=()):
    """
    Everything that was asked for, in the folder work. kills: how many trials, spread over jobs and kinds of faults. roles, jobs:
    ROLE_JOBS or these in the place of JOBS. only: these trials and no others. Returns a report for JSON, whose "problems" are
    empty if all is well.
    """
    world = build_world(os.path.join(work, "world"))
    only = [(tuple(job), [Fault(*fault) for fault in faults]) for job, *faults in map(json.loads, only)]
    jobs = [job for job, _ in only] or [tuple(job) for job in jobs] or (ROLE_JOBS if roles else JOBS)
    references, report = {}, dict(problems=[], kills=0, by_kind=collections.Counter(), by_job=collections.Counter())
    for r in schedule([(job[1], reference(world, job, f"{work}/whole-{i}")) for i, job in enumerate(dict.fromkeys(jobs))]):
        references[r["job"]] = r
        report["problems"] += r["problems"]
    planned = only or plan(kills, seed, references)
    trials = [(job[1], kill(world, references[job], faults, f"{work}/kill-{i}")) for i, (job, faults) in enumerate(planned)]
    trials.sort(key=lambda trial: -trial[0])  # those of most ranks first: no core stays empty beside them at the end
    for result in schedule(trials):
        report["kills"] += len(result["kills"])
        report["by_kind"].update(fault.kind for fault in result["kills"])
        report["by_job"].update([":".join(map(str, result["job"]))] * len(result["kills"]))
        if result["problems"]:
            report["problems"].append(describe(result, references))
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="how many trials, spread over scripts, ranks and kinds of faults")
    parser.add_argument("--seed", type=int, default=1, help="decides which")
    parser.add_argument("--roles", action="store_true", help="runs with the keys roles, staleness and zero_stage instead")
    parser.add_argument("--only", action="append", default=[], help="this fault and no other (may be repeated)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what follows finally is done
    warm()
    work = tempfile.mkdtemp(prefix="campaign-")
    print(f"working in {work}", flush=True)
    try:
        report = campaign(work, options.kills, options.seed, options.roles, (), options.only)
    finally:
        for pid in list(LIVE):
            end(pid)
    problems = report.pop("problems")
    print("\n".join([*problems[:20], json.dumps(report), f"{len(problems)} PROBLEMS" if problems else "all well"]))
    if not problems:
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
