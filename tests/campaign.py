"""
A fault campaign, from outside: nothing in the scripts knows of it. They are killed at chosen calls and at random times, the
same command is run again, and what it leaves must be, bit for bit, what an uninterrupted run leaves.

python tests/campaign.py --kills=200 --corrupt=ppo.py         # prints a table; fails on any difference
python tests/campaign.py --only=ppo.py:2/file:0:37:before     # one kill again, as the campaign has named it
python tests/campaign.py --list=ppo.py:2                      # every call at which ppo.py on two ranks can be killed
python tests/campaign.py --roles --real-kills=40              # the same by python and torchrun, at any time

A run as a user starts it costs 4 to 8 s, nearly all of it imports. Here one process imports everything, never computes, and
forks the ranks of each run: 0.2 s. What that cannot show, being always the same process, --real does: the uninterrupted runs
are made again by python and torchrun, and must have the same bits. And --real-kills kills such runs, at random times: a rank,
or torchrun itself.

A fault is KIND:RANK:AT:WHEN. The kinds:
    collective, compute    the AT-th call of a collective; of a model, of backward, of an optimizer's step. before | after it
    file                   the AT-th rename, unlink, mkdir, fsync, ... in out_dir. before | after
    write                  the AT-th file that is written there. before | empty | half (of it is on the disk) | after
    time                   the fraction AT of the run's usual duration. RANK -1: all ranks at once
A second fault, after a /, hits the resumption. "finished" as the first one: the run was over, and is started once more.
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
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time


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
    GPTNeoXForSequenceClassification, PreTrainedTokenizerFast, Qwen3ForCausalLM, modeling_utils)

import configurator  # noqa: E402
import errors  # noqa: E402
import model  # noqa: E402
from engine import checkpoint, disk  # noqa: E402

import tiny  # noqa: E402


torch.set_num_threads(1)  # a forked child has none of its parent's threads, so the parent must never start any

TIMEOUT = 20  # the scripts': how long a collective waits for a lost rank
GRACE = 15  # seconds more for a rank to end; the machine may be slow
LONGEST = 180  # seconds that a run may take in all
ATTEMPTS = 10  # to hit a run at a time: one that takes 0.1 s may have taken 1 s when it was measured
INTERVAL = {"sft.py": 2, "rm.py": 1, "ppo.py": 2, "grpo.py": 2}  # checkpoint_interval
KEYS = {"sft.py": dict(max_iters=4, eval_interval=2), "rm.py": dict(max_iters=3, eval_interval=2),
        "ppo.py": dict(max_iters=4, eval_interval=2, warmup_iters=3, kl_coef_target=1.0),
        "grpo.py": dict(max_iters=4, eval_interval=2, warmup_iters=3, max_refills=2, keep_best=True, reward_timeout=10)}
MORE = dict(scale_scores="running", keep_best=True)  # more of ppo.py's state to save, where it has the key
PRODUCTS = {"sft.py": ["policy"], "rm.py": ["reward_model"], "ppo.py": ["policy", "value_model"], "grpo.py": ["policy"]}
JOBS = [(script, ranks) for script in KEYS for ranks in (1, 2)]
# with --roles: the keys roles and staleness, too. There the batches that are sampled ahead are a part of a checkpoint
ROLE_JOBS = [("ppo.py", 2, "train=1,generate=1", 1), ("grpo.py", 2, "train=1,generate=1", 0), ("grpo.py", 1, "", 2),
             ("ppo.py", 3, "train=1,generate=1,score=1", 0), ("grpo.py", 4, "train=2,generate=1,score=1", 1),
             ("ppo.py", 2, "train=1,score=1", 1)]
# with --sharded: the key zero_stage, too, and files of at most FILE_BYTES, which all trainers write
SHARDED_JOBS = [("ppo.py", 2, "", 0, 3), ("grpo.py", 3, "", 0, 2), ("ppo.py", 2, "", 0, 1),
                ("ppo.py", 3, "train=2,generate=1", 1, 3)]
FILE_BYTES = 20_000
KINDS = ["collective", "file", "write", "time", "compute"]

OURS = [name[:-3].replace(os.sep, ".") for name in glob.glob("*.py", root_dir=ROOT) + glob.glob("engine/[!_]*.py", root_dir=ROOT)
        if name not in KEYS]  # every module that the scripts may import

Fault = collections.namedtuple("Fault", "kind rank at when")
FINISHED = Fault("finished", 0, 0, "")  # no fault: the run has been finished, before the next fault hits it


def command(world, job, **keys):
    """The arguments of a job's run here; out_dir is relative to the folder of the run, so that all runs' files are alike."""
    script, _, *rest = job
    if rest:
        keys |= dict(zip(("roles", "staleness", "zero_stage"), rest, strict=False))
    keys = dict(checkpoint_interval=INTERVAL[script], keep_checkpoints=1, timeout=TIMEOUT) | KEYS[script] | keys
    known = configurator.read_keys(os.path.join(ROOT, script))
    keys |= {k: v for k, v in MORE.items() if script == "ppo.py" and k in known}
    if script == "grpo.py":
        keys["reward_functions"] = world.rule("odd")  # flat groups, for refills
    return getattr(world, script.removesuffix(".py"))("out", **keys)


# ---------------------------------------------------------------------------------------------------------------------
# in the child: count the calls, and die at one of them


class Points:
    """Numbers the calls of each kind, in order. Lists them, or kills this process at the one that is the fault."""

    def __init__(self, script, rank, fault):
        self.script, self.fault = script, fault
        self.said = os.path.abspath(f"hit-{rank}")
        self.counts, self.listed = collections.Counter(), []

    def begin(self, kind, what):
        """Before the call. Returns its number."""
        self.counts[kind] += 1
        self.listed.append((kind, self.counts[kind], f"{what} ({self.where()})"))
        self.reach(kind, self.counts[kind], "before")
        return self.counts[kind]

    def is_fault(self, kind, number, when):
        return self.fault is not None and self.fault[0] == kind and self.fault[2:] == (number, when)

    def reach(self, kind, number, when):
        if self.is_fault(kind, number, when):
            with open(self.said, "w", encoding="utf-8") as f:
                f.write(next(label for k, n, label in self.listed if (k, n) == (kind, number)))
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # a signal to oneself has come before kill returns; to be sure

    def where(self):
        """The line of the script, and the innermost function of the product that led here."""
        frame, function = sys._getframe(1), None
        while frame and frame.f_code.co_filename != self.script:
            if not function and frame.f_code.co_filename.startswith(ROOT) and frame.f_code.co_filename != __file__:
                function = frame.f_code.co_name
            frame = frame.f_back
        if not frame:
            return function or "?"
        iteration = frame.f_globals.get("iteration")
        return ", ".join([f"{os.path.basename(self.script)}:{frame.f_lineno}", *([function] if function else []),
                          *([] if iteration is None else [f"iteration {iteration}"])])


class Written:
    """A file open for writing. Its fate is decided when it is closed: whole, or cut to half of what was written to it."""

    def __init__(self, file, path, number, points):
        self.file, self.path, self.number, self.points = file, path, number, points
        self.start = os.path.getsize(path)  # 0, unless the file is appended to
        points.reach("write", number, "empty")

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __iter__(self):
        return iter(self.file)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def flush(self):
        self.file.flush()
        halve(self.path, self.start, self.number, self.points)

    def close(self):
        if not self.file.closed:
            self.file.close()
            halve(self.path, self.start, self.number, self.points)
            self.points.reach("write", self.number, "after")


def halve(path, start, number, points):
    """If the fault is here: leave half of what was written since start, as a kill in the middle of writing does, and die."""
    if points.is_fault("write", number, "half"):
        os.truncate(path, start + (os.path.getsize(path) - start) // 2)
        points.reach("write", number, "half")


def put(owner, name, new):
    """Put new in the place of owner.name, also where a module of ours has imported it by name."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(ROOT) and file != __file__:
            for key in [k for k, v in vars(module).items() if v is old]:
                setattr(module, key, new)


def inject(points):
    """Wrap everything that a kill can come between. Of files, only those in out_dir count."""
    out, real_open, real_os_open, real_save = os.path.abspath("out"), builtins.open, os.open, safetensors.torch.save_file

    def inside(path):
        if isinstance(path, int):
            return True
        path = os.path.abspath(os.fsdecode(path))
        return path == out or path.startswith(out + os.sep)

    def shown(path):
        if isinstance(path, int):  # a file descriptor; Linux knows its path
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{path}")
        return os.path.relpath(path, os.path.dirname(out)) if os.path.isabs(str(path)) else str(path)

    def wrap(owner, name, kind):
        original = getattr(owner, name, None)
        if original is None:
            return

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

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list",
                 "reduce", "gather", "gather_object", "scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor",
                 "barrier", "monitored_barrier", "isend", "irecv", "new_group", "init_process_group", "destroy_process_group"):
        wrap(dist, name, "collective")
    for owner, name in ((model.Model, "states"), (torch.Tensor, "backward"), (torch.optim.AdamW, "step")):
        wrap(owner, name, "compute")
    # rmtree and makedirs call these, one by one
    for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync", "truncate", "link", "symlink"):
        wrap(os, name, "file")

    def opened(path, mode="r", *args, **kwargs):
        if not set("wax+") & set(mode) or isinstance(path, int) or not inside(path):
            return real_open(path, mode, *args, **kwargs)
        number = points.begin("write", f"open {shown(path)} ({mode})")
        return Written(real_open(path, mode, *args, **kwargs), path, number, points)

    def os_opened(path, flags, *args, **kwargs):
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or kwargs.get("dir_fd") is not None or not inside(path):
            return real_os_open(path, flags, *args, **kwargs)
        number = points.begin("file", f"os.open {shown(path)}")
        fd = real_os_open(path, flags, *args, **kwargs)
        points.reach("file", number, "after")
        return fd

    def saved(tensors, filename, *args, **kwargs):
        number = points.begin("write", f"save_file {shown(filename)}")
        if points.is_fault("write", number, "empty"):
            real_open(filename, "wb").close()
            points.reach("write", number, "empty")
        real_save(tensors, filename, *args, **kwargs)
        halve(filename, 0, number, points)
        points.reach("write", number, "after")

    put(builtins, "open", opened)
    put(os, "open", os_opened)
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
    gc.collect()
    gc.freeze()


def begin_child():
    """Forget the campaign's signal handlers, and do not outlive it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def child(script, arguments, rank, ranks, port, folder, fault, count):
    """One rank, in a process of its own: run the script as python would, and end."""
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
        points = Points(script, rank, fault)
        if any(argument.startswith("--zero_stage") for argument in sys.argv):
            disk.FILE_BYTES = FILE_BYTES
        if count or fault:
            inject(points)
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
        except BaseException as e:
            code = 1
            sys.excepthook(*sys.exc_info())  # ends here, if it is ours
            if isinstance(e, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
        if count:
            with open(f"points-{rank}", "w", encoding="utf-8") as f:
                json.dump(points.listed, f)
        sys.stdout.flush()
        sys.stderr.flush()
    except KeyboardInterrupt:  # before the script began: as an interpreter that is starting ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
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
        self.pids, self.began = {}, time.monotonic()
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
            self.logged = bool(read_records(self.folder)[0])
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
    """{path: sha256} of every file in folder/out, "folder" for each folder; without the log, and a lock file, if any."""
    out, found = os.path.join(folder, "out"), {}
    for d, folders, files in os.walk(out):
        found |= {os.path.relpath(os.path.join(d, name), out): "folder" for name in folders}
        for name in files:
            with open(os.path.join(d, name), "rb") as f:
                found[os.path.relpath(os.path.join(d, name), out)] = hashlib.file_digest(f, "sha256").hexdigest()
    return {path: value for path, value in found.items() if path not in ("log.jsonl", ".lock")}


def read_records(folder):
    """The records of the log as they are now, and how many of its lines are none."""
    file, records, broken = os.path.join(folder, "out", "log.jsonl"), [], 0
    if os.path.exists(file):
        with open(file, encoding="utf-8", errors="replace") as f:
            for line in f:
                try:
                    records.append(json.loads(line))
                except ValueError:
                    broken += 1
    return records, broken


def metrics(records):
    """What of the log must be the same every time."""
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "mem/"))} for record in records]


def left_by(folder):
    """All that must be the same."""
    records, broken = read_records(folder)
    return dict(files=snapshot(folder), metrics=metrics(records), broken=broken)


def differences(ours, theirs):
    """How two runs' left_by differ, in words; theirs is the uninterrupted run."""
    found = []
    a, b = ours["files"], theirs["files"]
    for words, paths in (("left over", a.keys() - b.keys()), ("missing", b.keys() - a.keys()),
                         ("different", {path for path in a.keys() & b.keys() if a[path] != b[path]})):
        # of a folder that is there, or not, name the folder alone
        found += [f"{words}: {path}" for path in sorted(paths) if os.path.dirname(path) not in paths]
    if ours["broken"]:
        found.append(f"log.jsonl has {ours['broken']} broken lines")
    a, b = ours["metrics"], theirs["metrics"]
    if [r.get("iteration") for r in a] != [r.get("iteration") for r in b]:
        found.append(f"log.jsonl has the iterations {[r.get('iteration') for r in a]}")
    else:
        found += [f"log.jsonl, iteration {x['iteration']}: {key} is {x.get(key)!r}, not {y.get(key)!r}"
                  for x, y in zip(a, b, strict=True) for key in sorted(x.keys() | y.keys()) if x.get(key) != y.get(key)]
    return found


def newest(folder):
    """The iteration of the newest good checkpoint, 0 if there is none."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found, _ = checkpoint.find_checkpoint(os.path.join(folder, "out"))
    return int(found.rpartition("-")[2]) if found else 0


# ---------------------------------------------------------------------------------------------------------------------
# trials


def reference(world, job, folder):
    """
    The uninterrupted run that trials are compared with; it lists its points. Then the same command once more, when all is done:
    it must change nothing, and has points of its own. A trial; its result is a dict.
    """
    run = yield Run(job, command(world, job), folder, count=True)
    assert set(run.codes.values()) == {0}, (job, run.codes, run.output())
    whole, points = left_by(folder), read_points(folder, job)
    last = KEYS[job[0]]["max_iters"]
    assert [r["iteration"] for r in whole["metrics"]] == list(range(last + 1)), whole["metrics"]
    index = ".index.json" if len(job) > 4 else ""
    for path in (f"checkpoint-{last:06d}/manifest.json", *(f"{p}/model.safetensors{index}" for p in PRODUCTS[job[0]])):
        assert path in whole["files"], path
    if job[0] == "ppo.py":
        assert len({r["objective/kl_coef"] for r in whole["metrics"][:-1]}) == last, "the adaptive coefficient does not move"
    if job[0] == "grpo.py":
        assert any("time/refill 0" in r for r in read_records(folder)[0]), "nothing was refilled"
    again = yield Run(job, command(world, job), folder, count=True)
    problems = [f"it ended with {again.codes}"] if set(again.codes.values()) != {0} else []
    problems = [f"{name_of(job, [FINISHED])}: {problem}" for problem in problems + differences(left_by(folder), whole)]
    return dict(job=job, folder=folder, whole=whole, points=points, duration=run.duration(), again=read_points(folder, job),
                again_duration=again.duration(), problems=problems)


def read_points(folder, job):
    """{(kind, rank, number): label} as the ranks of a counting run have listed them."""
    points = {}
    for rank in range(job[1]):
        with open(os.path.join(folder, f"points-{rank}"), encoding="utf-8") as f:
            points |= {(kind, rank, number): label for kind, number, label in json.load(f)}
    return points


def points_for(uninterrupted, faults, i):
    """The points among which the i-th fault was chosen, and the duration of that run; of other resumptions none are known."""
    if i == 0:
        return uninterrupted["points"], uninterrupted["duration"]
    return (uninterrupted["again"] if faults[0] == FINISHED else {}), uninterrupted["again_duration"]


def unnamed(point):
    """A point without the random names of folders: by which ranks see that they share out_dir, and those of saves."""
    return re.sub(r"(\.tmp-([^/ ]*/)?)[0-9a-f]{16}", r"\1...", point)


def kill(world, uninterrupted, faults, folder):
    """
    Kill a run, kill its resumption at each further fault, then let the same command run to its end and compare. Returns a
    dict: the kills that happened, the problems found, the seconds that the other ranks took to end, how they ended.
    """
    job = uninterrupted["job"]
    arguments, whole = command(world, job), uninterrupted["whole"]
    result = dict(job=job, faults=faults, kills=[], problems=[], slowest=0.0, codes=collections.Counter(), folder=folder, said=[])
    problems = result["problems"]
    if faults[0] == FINISHED:
        shutil.copytree(os.path.join(uninterrupted["folder"], "out"), os.path.join(folder, "out"))
    for i, fault in enumerate(faults):
        if fault == FINISHED:
            continue
        points, duration = points_for(uninterrupted, faults, i)
        before = newest(folder)
        # a run that was over before its time came is killed earlier, from the start; what is over early while it resumes is over
        for attempt in range(ATTEMPTS if i == 0 and fault.kind == "time" else 1):
            if attempt:
                shutil.rmtree(os.path.join(folder, "out"), ignore_errors=True)
            victims = list(range(job[1])) if fault.rank < 0 else [fault.rank]
            if fault.kind == "time":
                kick = (duration * fault.at * 0.7 ** attempt, victims, signal.SIGKILL)
                run = yield Run(job, arguments, folder, kick=kick)
            else:
                run = yield Run(job, arguments, folder, fault)
            if run.killed():
                break
        if run.hung:
            problems.append(f"after fault {i + 1}, rank {run.hung} had to be killed after {TIMEOUT + GRACE} s")
        killed = run.killed()
        if not killed:
            if i == 0:
                problems.append(f"the fault did not happen; the run ended with {run.codes}")
            elif set(run.codes.values()) != {0}:
                problems.append(f"fault {i + 1} did not happen, yet the run ended with {run.codes}")
                result["said"] = run.output()
            continue
        result["kills"].append(fault)
        if points and fault.kind != "time":
            with open(os.path.join(folder, f"hit-{fault.rank}"), encoding="utf-8") as f:
                hit = f.read()
            meant = points.get(fault[:3])
            if unnamed(hit) != unnamed(meant or ""):
                problems.append(f"the point has moved: it was {hit}, the uninterrupted run had {meant}")
        death = min(run.ended[rank] for rank in killed)
        for rank in run.codes.keys() - set(killed) - set(run.hung):
            result["slowest"] = max(result["slowest"], run.ended[rank] - death)
            result["codes"][run.codes[rank]] += 1
            if run.codes[rank] == 0 and differences(left_by(folder), whole):
                problems.append(f"rank {rank} ended with 0, as if all was done, though rank {killed} was killed")
        # what was saved must stay: the log is written after the checkpoint that is due before it
        done = max((r["iteration"] for r in read_records(folder)[0]), default=0)
        safe = max(before, done // INTERVAL[job[0]] * INTERVAL[job[0]])
        if newest(folder) < safe:
            problems.append(f"after fault {i + 1}, checkpoint {safe} is gone; the newest good one is {newest(folder)}")
    start, records = newest(folder), read_records(folder)[0]
    run = yield Run(job, arguments, folder)
    check_resumed(run, whole, start, records, result)
    return result


def check_resumed(run, whole, start, records, result):
    """After the last run: it went on from iteration start, and left what it should. records: the log before it."""
    problems, folder = result["problems"], run.folder
    if set(run.codes.values()) != {0}:
        problems.append(f"the same command again ended with {run.codes}{', hung' if run.hung else ''}")
        result["said"] = run.output()
    problems += differences(left_by(folder), whole)
    # it has gone on, not begun again, if the lines of what was done are those of then, seconds included
    kept = [r for r in records if r["iteration"] < start]
    if read_records(folder)[0][:len(kept)] != kept:
        problems.append(f"the log of iterations before {start} was written again, so they were run again")
    if not problems:
        shutil.rmtree(folder)


def signal_run(world, uninterrupted, fault, number, folder):
    """
    A signal that asks (SIGTERM, SIGINT) instead, at a fault of the kind time: all ranks must end with 0, having saved, and the
    same command must go on. A run that has logged nothing yet may just die of it: it had not set up its handler.
    """
    job, whole, name = uninterrupted["job"], uninterrupted["whole"], signal.Signals(number).name
    result = dict(job=job, faults=[fault], signal=name, kills=[], problems=[], slowest=0.0, codes=collections.Counter(),
                  folder=folder, said=[], graceful=0)
    problems = result["problems"]
    victims = list(range(job[1])) if fault.rank < 0 else [fault.rank]
    for attempt in range(ATTEMPTS):  # a run that was over before its time came is signalled earlier
        shutil.rmtree(os.path.join(folder, "out"), ignore_errors=True)
        due = uninterrupted["duration"] * fault.at * 0.7 ** attempt
        run = yield Run(job, command(world, job), folder, kick=(due, victims, number))
        if run.kicked:
            break
    if run.hung:
        problems.append(f"rank {run.hung} had to be killed")
    if run.kicked:
        result["kills"].append(fault)
        result["slowest"] = run.duration() - due
        result["codes"].update(run.codes.values())
        result["said"] = run.output()
        stopped = bool(differences(left_by(folder), whole))  # else it was about to end anyway
        if set(run.codes.values()) == {0}:
            result["graceful"] = 1
            done = len(read_records(folder)[0])
            if stopped and newest(folder) < done:
                problems.append(f"it stopped after {done} iterations, and left checkpoint {newest(folder)}")
            if stopped and "same command" not in " ".join(run.output("stdout")):
                problems.append(f"it stopped without saying that the same command resumes: {run.output('stdout')}")
        elif run.logged or -number not in run.codes.values():
            problems.append(f"the ranks ended with {run.codes}")
        if result["slowest"] > 30:
            problems.append(f"it took {result['slowest']:.0f} s to end")
    start, records = newest(folder), read_records(folder)[0]
    run = yield Run(job, command(world, job), folder)
    check_resumed(run, whole, start, records, result)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# which faults


def candidates(points, kind, thin=True):
    """
    The faults of a kind (but time) that a run with these points could have, in order. thin: of the many that are alike (a line
    broadcasts every parameter, a folder is synced or removed file by file), the first, the one in the middle and the last.
    """
    whens = ("before", "empty", "half", "after") if kind == "write" else ("before", "after")
    alike = {}
    for (k, rank, at), label in points.items():
        if k == kind:
            verb, _, place = label.partition(" (")
            alike.setdefault((rank, verb.split()[0] if verb.startswith(("fsync", "unlink")) else verb, place), []).append(at)
    chosen = [(rank, at) for (rank, _, _), ats in alike.items()
              for at in (sorted({ats[0], ats[len(ats) // 2], ats[-1]}) if thin else ats)]
    return [Fault(kind, rank, at, when) for rank, at in sorted(chosen) for when in whens]


def choose(points, ranks, kind, n, rng):
    """n faults of a kind, spread over all that there are."""
    if kind == "time":
        victims = [0] if ranks == 1 else [-1, *range(ranks)]
        first = rng.randrange(len(victims))
        return [Fault("time", victims[(first + i) % len(victims)], round((i + rng.random()) / n, 4), "") for i in range(n)]
    every = candidates(points, kind)
    return [every[int((i + rng.random()) / n * len(every))] for i in range(n)]


def plan(n, seed, references):
    """
    n trials, [(job, faults)]: every job gets as many, every kind of fault of a job gets as many, and a kind's faults are spread
    over the run. Of eleven trials (every job has its turn) one has a second fault in its resumption, and one hits a run that
    was over, started once more.
    """
    jobs, cells = list(references), []
    rng, chosen, trials = random.Random(f"{seed}"), {}, []

    def kinds_in(points):
        return [kind for kind in KINDS if kind == "time" or candidates(points, kind)]

    for i in range(n):
        job = jobs[i % len(jobs)]
        kinds = kinds_in(references[job]["points"])
        cells.append((job, kinds[(i // len(jobs) + i % len(jobs)) % len(kinds)]))
    for (job, kind), count in collections.Counter(cells).items():
        chosen[job, kind] = choose(references[job]["points"], job[1], kind, count, rng)
        rng.shuffle(chosen[job, kind])
    for i, (job, kind) in enumerate(cells):
        faults, points, again = [chosen[job, kind].pop()], references[job]["points"], references[job]["again"]
        if i % 11 == 4:
            kind = rng.choice(kinds_in(points))
            fault = choose(points, job[1], kind, 1, rng)[0]
            # the resumption is shorter than the run
            faults.append(fault._replace(at=round(fault.at * 0.6, 4) if kind == "time" else 1 + int(fault.at * 0.6)))
        elif i % 11 == 9:
            kind = kind if kind in kinds_in(again) else "time"
            faults = [FINISHED, choose(again, job[1], kind, 1, rng)[0]]
        trials.append((job, faults))
    return trials


def name_of(job, faults):
    """What --only takes."""
    names = ["finished" if fault == FINISHED else ":".join(map(str, fault)).rstrip(":") for fault in faults]
    return "/".join([":".join(map(str, job)), *names])


def from_name(text):
    """(job, faults) of what name_of has written."""
    job, *names = text.split("/")
    script, ranks, *rest = job.split(":")
    faults = []
    for name in names:
        kind, rank, at, when = (name.split(":") + [""])[:4] if name != "finished" else FINISHED
        faults.append(Fault(kind, int(rank), float(at) if kind == "time" else int(at), when))
    return (script, int(ranks), *rest[:1], *map(int, rest[1:])), faults


def describe(result, references):
    """A failed trial, for the reader: how to repeat it, where it was, what was wrong, where its files are."""
    repeat = "" if "signal" in result else "--only="
    lines = [f"FAILED {repeat}{name_of(result['job'], result['faults'])} {result.get('signal', '')}".rstrip()]
    for i, fault in enumerate(result["faults"]):
        if fault.kind == "time":
            lines.append(f"    {'all ranks' if fault.rank < 0 else f'rank {fault.rank}'} after {fault.at:.0%} of the duration")
        elif fault != FINISHED:
            label = points_for(references[result["job"]], result["faults"], i)[0].get(fault[:3], "in the resumption")
            lines.append(f"    rank {fault.rank}, {fault.when} {fault.kind} #{fault.at}: {label}")
    more = len(result["problems"]) - 6
    lines += [f"  - {problem}" for problem in result["problems"][:6]] + ([f"  - and {more} more"] if more > 0 else [])
    return "\n".join([*lines, *(f"    | {line}" for line in result["said"]), f"    files: {result['folder']}"])


def print_table(results):
    kinds = ["collective", "compute", "file", "write", "time"]
    print(f"{'script':<7} ranks trials {'collective':>11}{'compute':>9}{'file':>6}{'write':>7}{'time':>6}  all kills"
          "  bit for bit  slowest end")
    for job in sorted({r["job"] for r in results}):
        mine = [r for r in results if r["job"] == job]
        count = collections.Counter(fault.kind for r in mine for fault in r["kills"])
        a, b, c, d, e = (count[kind] for kind in kinds)
        good = sum(not r["problems"] for r in mine)
        print(f"{job[0]:<7} {job[1]:>5} {len(mine):>6} {a:>11}{b:>9}{c:>6}{d:>7}{e:>6}{sum(count.values()):>11}"
              f"{f'{good}/{len(mine)}':>13}{max(r['slowest'] for r in mine):>11.1f} s"
              + ("  roles {!r}, staleness {}".format(*job[2:]) if len(job) > 2 else "")
              + ("  zero_stage {}".format(*job[4:]) if len(job) > 4 else ""))
    codes = sum((r["codes"] for r in results), collections.Counter())
    print(f"the other ranks of killed runs ended with: {', '.join(f'{code} x {n}' for code, n in sorted(codes.items())) or '-'}")


# ---------------------------------------------------------------------------------------------------------------------
# a damaged checkpoint is refused


def damages(content, older, rng):
    """[(what, bytes, or None to delete)] of a file: something everywhere, its end, all of it, that of the older checkpoint."""
    size, found = len(content), []
    pieces = 24 if size > 4096 else size
    edges = [size * i // pieces for i in range(pieces + 1)]
    for a, b in zip(edges, edges[1:], strict=False):
        at, bit = rng.randrange(a, b), rng.randrange(8)
        found.append((f"bit {bit} of byte {at} flipped", content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1:]))
        found.append((f"bytes {a} to {b} zeroed", content[:a] + bytes(b - a) + content[b:]))
    lengths = sorted({size * i // 20 for i in range(20)} | {size - 1})
    found += [(f"cut to {length} of {size} bytes", content[:length]) for length in lengths]
    found += [("a zero appended", content + b"\0"), ("a newline appended", content + b"\n"), ("deleted", None)]
    return [(what, new) for what, new in [*found, ("that of the older checkpoint", older)] if new != content]


def corrupt(out_dir, seed=0, step=1):
    """
    Damage each file of out_dir's newest checkpoint in many ways, one at a time. find_checkpoint must return the one before
    it, and say one line that names the damaged one. Returns how many ways, and [what went wrong]. step: of
    each file's ways only every so many.
    """
    rng, tried, wrong = random.Random(seed), 0, []
    *_, older, folder = checkpoint.list_checkpoints(out_dir)
    files = sorted(os.path.relpath(os.path.join(d, f), folder) for d, _, fs in os.walk(folder) for f in fs)
    for name in files:
        path, before = os.path.join(folder, name), None
        with open(path, "rb") as f:
            content = f.read()
        if os.path.exists(os.path.join(older, name)):
            with open(os.path.join(older, name), "rb") as f:
                before = f.read()
        ways = damages(content, before, rng)
        if name == "manifest.json":  # a file that it does not know could be anything
            entries = json.loads(content)
            ways += [(f"without {key}", json.dumps({k: v for k, v in entries.items() if k != key}, indent=2).encode())
                     for key in entries]
        for what, new in ways[seed % step::step]:
            tried += 1
            if new is None:
                os.remove(path)
            else:
                with open(path, "wb") as f:
                    f.write(new)
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    found, _ = checkpoint.find_checkpoint(out_dir)
                if found != older:
                    wrong.append(f"{name}, {what}: {'accepted' if found == folder else f'found {found}'}")
                elif said.getvalue().count("\n") != 1 or folder not in said.getvalue():
                    wrong.append(f"{name}, {what}: it said {said.getvalue()!r}")
            except Exception as e:  # whatever it raises, the user gets no older checkpoint
                wrong.append(f"{name}, {what}: it raised {type(e).__name__}: {e}")
        with open(path, "wb") as f:
            f.write(content)
    assert checkpoint.find_checkpoint(out_dir)[0] == folder
    # with no other checkpoint, the run must not begin again as if there had been none
    shutil.rmtree(older)
    os.truncate(os.path.join(folder, "state.json"), 3)
    try:
        wrong.append(f"the only checkpoint, damaged: found {checkpoint.find_checkpoint(out_dir)}")
    except errors.BadInput as e:
        if os.path.basename(folder) not in str(e):
            wrong.append(f"the only checkpoint, damaged: it said {e}")
    return tried + 1, wrong


# ---------------------------------------------------------------------------------------------------------------------
# the campaign


class RealRun(Run):
    """
    A run as a user starts it. kick: (seconds, rank, signal), where the seconds count from the first sign of it in out_dir, and
    rank -1 is torchrun, or all there is.
    """

    def start(self):
        os.makedirs(self.folder, exist_ok=True)
        self.store, self.pids, self.began, self.seen = None, {0: None}, time.monotonic(), None
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.job[1]}"] if self.job[1] > 1 else []
        command = [sys.executable, *torchrun, os.path.join(ROOT, self.job[0]), *self.arguments]
        with open(os.path.join(self.folder, "stdout-0"), "a") as out, open(os.path.join(self.folder, "stderr-0"), "a") as err:
            self.process = subprocess.Popen(command, cwd=self.folder, env=os.environ | dict(PYTHONPATH=ROOT), stdout=out,
                                            stderr=err, stdin=subprocess.DEVNULL, start_new_session=True)
        LIVE.add(self.process.pid)

    def poll(self):
        now = time.monotonic()
        if self.seen is None and os.path.exists(os.path.join(self.folder, "out", "config.json")):
            self.seen = now
        due = self.kick and self.seen is not None and now >= self.seen + self.kick[0]
        if due and self.process.poll() is None:
            _, rank, number = self.kick
            self.kick, victim = None, self.process.pid if rank < 0 else self.pid_of(rank)
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                if victim:
                    os.kill(victim, number)
                    self.kicked, self.kicked_at = [rank], now
        if self.process.poll() is None and now > self.began + 3 * LONGEST:
            self.hung = [0]
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.poll() is not None and not self.codes:
            LIVE.discard(self.process.pid)
            self.codes, self.ended = {0: self.process.returncode}, {0: now}
        return bool(self.codes)

    def pid_of(self, rank):
        """The process of a rank, a child of torchrun; None where there is none any more."""
        with contextlib.suppress(OSError):
            with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children", encoding="utf-8") as f:
                children = f.read().split()
            for pid in children:
                with open(f"/proc/{pid}/environ", "rb") as f:
                    if f"RANK={rank}".encode() in f.read().split(b"\0"):
                        return int(pid)
        return self.process.pid if self.job[1] == 1 else None


def real_kill(world, uninterrupted, fault, folder):
    """
    Kill a real run at a time, then let the same command run to its end, and compare. duration: the seconds that an uninterrupted
    one takes from its first sign in out_dir to its end. Returns what `kill` does.
    """
    job, whole = uninterrupted["job"], uninterrupted["whole"]
    result = dict(job=job, faults=[fault], signal="by torchrun", kills=[], problems=[], slowest=0.0, codes=collections.Counter(),
                  folder=folder, said=[])
    for attempt in range(ATTEMPTS):  # a run that was over before its time came is killed earlier
        shutil.rmtree(os.path.join(folder, "out"), ignore_errors=True)
        due = uninterrupted["real_duration"] * fault.at * 0.7 ** attempt
        run = yield RealRun(job, command(world, job), folder, kick=(due, fault.rank, signal.SIGKILL))
        if run.kicked and run.codes[0] != 0:
            break
    if run.hung:
        result["problems"].append(f"it had to be killed after {3 * LONGEST} s")
    result["kills"] += [fault] * bool(run.kicked)
    result["slowest"] = run.ended[0] - run.kicked_at if run.kicked else 0.0
    result["codes"].update(run.codes.values())
    start, records = newest(folder), read_records(folder)[0]
    run = yield RealRun(job, command(world, job), folder)
    check_resumed(run, whole, start, records, result)
    return result


def real_durations(world, references, work):
    """Fill in real_duration: of one run of each job, which must have the forked run's bits. Returns the problems."""
    problems = []
    for job, uninterrupted in references.items():
        run = RealRun(job, command(world, job), os.path.join(work, f"real-{'-'.join(map(str, job))}")).wait()
        different = differences(left_by(run.folder), uninterrupted["whole"])
        assert run.codes == {0: 0}, (job, run.codes, run.output())
        problems += [f"{job}, as a user runs it: {d}" for d in different]
        print(f"{job[0]} on {job[1]} as a user runs it: {'; '.join(different[:5]) or 'the same bits'}", flush=True)
        uninterrupted["real_duration"] = run.ended[0] - run.seen
    return problems


def run_in_child(function, *args):
    """Call a function in a process of its own: what computes must not do so here."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            begin_child()
            function(*args)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0, f"{function.__name__} failed"


def campaign(options, work):
    """Everything that was asked for. Returns a report for JSON, whose "problems" and "accepted" are empty if all is well."""
    began, report = time.monotonic(), dict(problems=[], accepted=[])
    run_in_child(tiny.build, os.path.join(work, "world"))
    world = tiny.World(os.path.join(work, "world"))
    only = [from_name(text) for text in options.only]
    jobs = [job for job in JOBS if job[0] in options.scripts and job[1] in options.ranks]
    if options.roles:
        jobs = [job for job in ROLE_JOBS if job[0] in options.scripts]
    if options.sharded:
        jobs = [job for job in SHARDED_JOBS if job[0] in options.scripts]
    if only or options.list:
        wanted = [job for job, _ in only] + [from_name(text)[0] for text in [options.list] if text]
        jobs = [job for job in JOBS + ROLE_JOBS + SHARDED_JOBS if job in wanted]
    real = options.real or options.real_kills > 0
    made = schedule([(job[1], reference(world, job, os.path.join(work, f"whole-{'-'.join(map(str, job))}"))) for job in jobs
                     if options.kills or options.signals or only or options.list or options.every or real])
    references = {r["job"]: r for r in made}
    references = {job: references[job] for job in jobs if job in references}  # in this order, whichever was done first
    for uninterrupted in references.values():
        for problem in uninterrupted["problems"]:
            print(f"FAILED {problem}", flush=True)
            report["problems"].append(problem)
    if options.list:
        for start, points in (("", "points"), ("finished/", "again")):
            for (kind, rank, number), label in references[jobs[0]][points].items():
                print(f"{start}{kind}:{rank}:{number}  {label}")
        return report
    if real:
        report["problems"] += real_durations(world, references, work)

    planned = only or plan(options.kills, options.seed, references)
    if options.every:  # each point of every job, once
        planned = [(job, [*first, fault]) for job in jobs for first, points in (([], "points"), ([FINISHED], "again"))
                   for kind in options.every.split(",") for fault in candidates(references[job][points], kind, options.thin)]
    trials = [(job[1], kill(world, references[job], faults, os.path.join(work, f"kill-{i}"))) for i, (job, faults)
              in enumerate(planned)]
    rng = random.Random(f"signals {options.seed}")
    for i in range(options.signals):
        job = jobs[i % len(jobs)]
        fault = Fault("time", rng.choice([-1, *range(job[1])]), round(rng.random(), 4), "")
        number = [signal.SIGTERM, signal.SIGINT][i // len(jobs) % 2]
        trials.append((job[1], signal_run(world, references[job], fault, number, os.path.join(work, f"signal-{i}"))))
    rng = random.Random(f"real {options.seed}")
    for i in range(options.real_kills):
        job = jobs[i % len(jobs)]
        fault = Fault("time", [-1, *range(job[1])][i // len(jobs) % (1 + job[1])], round(rng.random(), 4), "")
        trials.append((job[1], real_kill(world, references[job], fault, os.path.join(work, f"real-kill-{i}"))))
    trials.sort(key=lambda trial: -trial[0])  # those of two ranks first: no core stays empty beside them at the end
    killed, signalled = [], []
    for result in schedule(trials):
        (signalled if "graceful" in result else killed).append(result)
        if result["problems"]:
            print(describe(result, references), flush=True)
            report["problems"].append(f"{name_of(result['job'], result['faults'])}: {result['problems'][0]}")
    if killed:
        print_table(killed)
        report["kills"] = sum(len(r["kills"]) for r in killed)
        report["by_kind"] = collections.Counter(fault.kind for r in killed for fault in r["kills"])
        report["by_job"] = collections.Counter(" ".join(map(str, r["job"])) for r in killed for _ in r["kills"])
        good = sum(not r["problems"] for r in killed)
        print(f"{report['kills']} kills in {len(killed)} trials, {good} resumed bit for bit; {time.monotonic() - began:.0f} s")
    if signalled:
        report["signals"], report["graceful"] = (sum(x) for x in zip(*((len(r["kills"]), r["graceful"]) for r in signalled),
                                                                     strict=True))
        good = sum(not r["problems"] for r in signalled)
        print(f"{report['signals']} signals, {report['graceful']} runs ended with 0 by then, {good}/{len(signalled)} well; "
              f"slowest end {max(r['slowest'] for r in signalled):.1f} s")
    if options.corrupt:
        folder, t = os.path.join(work, "corrupt"), time.monotonic()
        job = (options.corrupt, 1)
        run = Run(job, command(world, job, keep_checkpoints=2), folder).wait()
        assert run.codes == {0: 0}, run.output()
        tried, wrong = corrupt(os.path.join(folder, "out"), options.seed, options.corrupt_step)
        report |= dict(damages=tried, accepted=wrong)
        by_file = collections.Counter(w.split(",")[0] for w in wrong)
        print(f"{tried} ways to damage a checkpoint of {options.corrupt}, {tried - len(wrong)} refused; "
              f"{time.monotonic() - t:.1f} s" + "".join(f"\n    {n} not: {name}" for name, n in by_file.items()))
        for line in wrong[:10]:
            print(f"  - {line}")
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="how many trials, spread over scripts, ranks and kinds of faults")
    parser.add_argument("--seed", type=int, default=1, help="decides which")
    parser.add_argument("--only", action="append", default=[], help="this fault and no other (may be repeated)")
    parser.add_argument("--every", default="", help="all faults of these kinds, for instance --every=file,write")
    parser.add_argument("--thin", action="store_true", help="with --every: of those alike, only three")
    parser.add_argument("--list", default="", help="list the points of this job, for instance --list=ppo.py:2")
    parser.add_argument("--signals", type=int, default=0, help="how many runs to stop by SIGTERM or SIGINT")
    parser.add_argument("--corrupt", default="", help="damage a checkpoint of this script in every way")
    parser.add_argument("--corrupt-step", type=int, default=1, help="only every so many of these ways")
    parser.add_argument("--real", action="store_true", help="check the uninterrupted runs against python's and torchrun's")
    parser.add_argument("--real-kills", type=int, default=0, help="how many runs of python and torchrun to kill")
    parser.add_argument("--scripts", type=lambda text: text.split(","), default=list(KEYS), help="for instance sft.py,ppo.py")
    parser.add_argument("--ranks", type=lambda text: [int(x) for x in text.split(",")], default=[1, 2])
    parser.add_argument("--roles", action="store_true", help="runs with the keys roles and staleness, instead of the others")
    parser.add_argument("--sharded", action="store_true", help="runs with the key zero_stage, saved by all ranks, instead")
    parser.add_argument("--folder", default="", help="where to work (default: a new one, removed if all is well)")
    parser.add_argument("--report", default="", help="write a JSON report here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what follows finally is done
    warm()
    work = os.path.abspath(options.folder) if options.folder else tempfile.mkdtemp(prefix="campaign-")
    failed = True
    print(f"working in {work}", flush=True)
    try:
        report = campaign(options, work)
        failed = bool(report["problems"] + report["accepted"])
        if options.report:
            with open(options.report, "w", encoding="utf-8") as f:
                json.dump(report, f, indent=2)
        print(f"{len(report['problems'] + report['accepted'])} PROBLEMS" if failed else "all well")
    finally:
        for pid in list(LIVE):
            end(pid)
        if not failed and not options.folder:
            shutil.rmtree(work, ignore_errors=True)
    sys.exit(failed)

if __name__ == "__main__":
    main()
