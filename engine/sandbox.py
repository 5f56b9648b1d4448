"""
Runs model-written Python against the tests of a data row, under bubblewrap (bwrap), where it can do no harm.

The program is one process in namespaces of its own, without privileges. It sees the Python interpreter and the system's
shared libraries, read-only, and an empty /tmp: no network, no other process, no /proc, no /dev, nothing of our environment.
Kernel limits bound its CPU time, memory, threads, files and output; a seccomp filter denies it further processes and the
kernel's rarer services. It is sent inputs only. What it answers is compared here, so no exit code, marker or patched builtin
is worth anything. And it runs under bwrap or not at all.

Not protected: against bugs of the kernel that an unprivileged process can reach, nor against spying through timing and CPU
caches. It can read the interpreter's lib folder (with its site-packages) and learn the kernel's version and the machine's size.

Memory that the kernel holds for it beside its own limit, measured: 16 MiB of files in /tmp and as much in its stdin, 30 MiB for
the names of files (TMP_FILES, looked after every 0.1 s), 12 in full sockets, 2 in full pipes, and page tables: 8 KiB for each
page that lies alone, 512 MiB at the usual vm.max_map_count of 65530. Where huge pages are always on, 2 MiB may stay of what is
unmapped but for a page, until the kernel needs them. Should all memory run out, the kernel is told to end programs first.

For a model that is itself your enemy, put a virtual machine around all of this.
"""
import concurrent.futures
import errno
import functools
import itertools
import json
import marshal
import math
import os
import pathlib
import platform
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from engine import CPUS
from engine.programs import check_tests, judge, tidy
from errors import BadInput, Stop, shorten

OUTPUT_LIMIT = 2**16  # bytes that we read back from a process, besides what its tests expect
WALL_FACTOR = 4  # wall-clock seconds that a program has for all its tests, for each second of CPU time that a process has
START_SECONDS = 30  # a sandbox that takes longer than this to start is broken
THREADS, OPEN_FILES, TMP_BYTES, TMP_FILES = 64, 64, 2**24, 10_000
LOOK_EVERY = 0.1  # seconds: how often TMP_FILES is looked after, which no limit of the kernel's does
OUT_OF_MEMORY = 97  # the bootstrap's exit code after a MemoryError
FIRST_UID = 2**31  # no system hands out user ids from here on
# The CPUs that we were started on (taskset). Import this before torch, whose OpenMP may pin the first thread to one of them.
runs = itertools.count()
starting = threading.Lock()  # of processes; see start


class Verdict(NamedTuple):
    passed: int  # test cases answered right
    total: int
    # pass; or "out of time", where what is missing was not run; or of the first case that did not pass: fail, error, crash,
    # killed, timeout, memory, output limit
    reason: str


def run_tests(code, tests, timeout=5, memory_mib=512, end=math.inf):
    """
    Run a program against a row's tests -> Verdict.

    code: Python source, whatever text the model wrote. tests: see check_tests. All function calls share one process, each
    stdin has its own; after one that was stopped at a limit the others are not run. timeout: CPU seconds a process (rounded up),
    and WALL_FACTOR times as many on the wall clock for all of them together, without their starts. end: when it must be over in
    any case, by time.monotonic(). memory_mib: its address space, of which Python itself takes 20.
    Raises BadInput for tests that make no sense and where bwrap is missing, Stop where the sandbox itself fails.
    """
    calls, outputs, scripts = check_tests(tests, "tests")
    source = code.encode("utf-8", "surrogatepass")  # half a surrogate pair is a SyntaxError, in there
    reasons, wall = [], WALL_FACTOR * timeout
    if calls:
        limit = OUTPUT_LIMIT + 1024 * len(calls) + 2 * len(json.dumps(outputs))
        written, ending, seconds = run_program(source, calls, b"", limit, timeout, memory_mib, wall, end)
        wall -= seconds
        answers = written.split(b"\n")[:-1]  # after the last newline there is nothing, or half an answer
        reasons += [judge(answer, want) for answer, want in zip(answers, outputs, strict=False)]
        reasons += [ending or "crash"] * (len(outputs) - len(reasons))  # it left before the end, however quietly
    for stdin, stdout in scripts:
        limit = OUTPUT_LIMIT + 2 * len(stdout)
        written, ending, seconds = run_program(source, None, stdin, limit, timeout, memory_mib, wall, end)
        wall -= seconds
        reasons.append(ending or ("pass" if tidy(written) == tidy(stdout) else "fail"))
        if ending in ("timeout", "out of time", "memory", "output limit"):
            break
    first = next((reason for reason in reasons if reason != "pass"), "pass")
    return Verdict(reasons.count("pass"), len(outputs) + len(scripts), "out of time" if "out of time" in reasons else first)


def run_all(programs, workers, timeout=5, memory_mib=512, seconds=math.inf):
    """
    The Verdict of each of programs [(code, tests)], in order, `workers` at a time. Raises what run_tests raises.

    seconds: wall-clock time for all together. What has not ended by then is "out of time", so no program can hold up the others'
    verdicts for longer. Until it runs short, no verdict depends on the others; nor do few that sleep take it from many that are
    quick: in a first round each gets half of its fair share, in a second one those that need more, in order, get what is left.
    """
    end, share = time.monotonic() + seconds, seconds / 2 * workers / max(len(programs), 1)

    def run(program, most):
        return run_tests(*program, timeout, memory_mib, min(end, time.monotonic() + most))

    # threads will do: they only wait. A pinned OpenMP master hands down its one core; programs may have any of ours
    pool = concurrent.futures.ThreadPoolExecutor(workers, initializer=lambda: os.sched_setaffinity(0, CPUS))
    try:
        verdicts = list(pool.map(run, programs, itertools.repeat(share)))
        late = [i for i, verdict in enumerate(verdicts) if verdict.reason == "out of time"]
        again = pool.map(run, [programs[i] for i in late], itertools.repeat(math.inf))
        for i, verdict in zip(late, again, strict=True):
            verdicts[i] = verdict
        return verdicts
    finally:
        pool.shutdown(cancel_futures=True)  # if one has failed: start no more


def count_cpus(proc="/proc", cgroups="/sys/fs/cgroup"):
    """
    How many CPUs we have: those that we were started on, or fewer where a container's quota says so (cpu.max of cgroups v2,
    cpu.cfs_quota_us of v1; of our group and those above it). proc, cgroups: where the kernel shows them.
    """
    quotas = [len(CPUS)]
    try:
        with open(f"{proc}/self/cgroup") as f:
            groups = [line.strip().split(":", 2) for line in f]  # [number, controllers, path]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        tops = [f"{cgroups}/{controllers}", f"{cgroups}/cpu"] if controllers else [cgroups, f"{cgroups}/unified"]
        # in a container the path may be the host's, and its own group then is the top
        for folder in (f"{top}/{group}" for top in tops for group in [path, *map(str, pathlib.PurePath(path).parents)]):
            try:
                texts = [pathlib.Path(folder, name).read_text() for name in
                         (("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",))]
            except OSError:
                continue
            quota, period = " ".join(texts).split()
            if quota not in ("max", "-1"):
                quotas.append(int(quota) // int(period))
    return max(1, min(quotas))


def check_sandbox():
    """
    Try the sandbox from inside, once, before training. Raises BadInput with what is wrong and what to do about it. Call it from
    the main thread: where the shell that started us ignores SIGCHLD (trap '' CHLD), no parent hears of its children, neither
    bwrap nor we, and only the main thread can change that.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        written, ending, _ = run_program(PROBE, [("probe", [])], b"", OUTPUT_LIMIT, timeout=5, memory_mib=256)
    except Stop as e:
        raise BadInput(f"{e}. bwrap needs namespaces: a container must allow them (docker run --privileged, say), and so must "
                       "Ubuntu from 23.10 on (sysctl kernel.apparmor_restrict_unprivileged_userns=0)") from e
    if written != b"[]\n":
        raise BadInput(f"the sandbox does not hold on this system; a program got {written.decode().strip() or ending}")


# ---------------------------------------------------------------------------------------------------------------------
# the sandbox


def run_program(source, calls, stdin, limit, timeout, memory_mib, wall=None, end=math.inf):
    """
    One program, one process. calls: the function calls that it reports the results of, a line each; None: it is a script that
    reads stdin (bytes) and prints. wall: its seconds on the clock from its start on, WALL_FACTOR * timeout if None; end: see
    run_tests. Returns what it wrote (at most limit bytes), why it ended (None if it just did), and the seconds that it took.
    Raises BadInput where bwrap is missing, and Stop unless the program has started for certain, or had no time to.
    """
    wall = WALL_FACTOR * timeout if wall is None else wall
    if time.monotonic() >= end:
        return b"", "out of time", 0.0
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        raise Stop("the sandbox does not start while SIGCHLD is ignored; call check_sandbox first")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise BadInput("bwrap is missing, and model-written code runs nowhere else: apt install bubblewrap")
    # The kernel never counts root's processes, and who is root outside remains it in a user namespace. So real root becomes
    # somebody else, a new user for each sandbox, for processes are counted by user; everyone else gets a user namespace.
    uid = FIRST_UID + os.getpid() % 2**22 * 256 + next(runs) % 256 if is_root() else 0
    limits = [(resource.RLIMIT_CPU, math.ceil(timeout), math.ceil(timeout) + 1)]  # SIGXCPU, and SIGKILL if that is ignored
    limits += [(name, value, value) for name, value in (
        (resource.RLIMIT_AS, memory_mib * 2**20), (resource.RLIMIT_STACK, 2**23), (resource.RLIMIT_NPROC, THREADS),
        (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_FSIZE, TMP_BYTES), (resource.RLIMIT_SIGPENDING, THREADS))]
    try:  # all that goes in lies ready in anonymous files: a program that does not read blocks nobody
        with memory_file(marshal.dumps((source, calls, limits, uid))) as job, memory_file(stdin) as text, \
                memory_file(seccomp_filter()) as seccomp, memory_file() as info, memory_file() as errors, \
                open(os.devnull, "wb") as null:
            # if memory runs short after all, the kernel shall end this rather than the trainer
            command = ["/bin/sh", "-c", '{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; exec "$@"', "sh",
                       bwrap, *isolation(bwrap, uid != 0), "--info-fd", str(info.fileno()), "--seccomp", str(seccomp.fileno()),
                       "--", base_python(), "-P", "-s", "-S", "-B", "-X", "utf8", "-c", BOOTSTRAP,  # -I would undo PYTHONHASHSEED
                       str(job.fileno()), str(null.fileno())]
            with start(command, stdin=text, stdout=subprocess.PIPE, stderr=errors, env={}, bufsize=0,
                       start_new_session=True,  # a Ctrl-C is for us
                       pass_fds=[f.fileno() for f in (job, null, info, seccomp)]) as process:
                cut = "interrupted"
                try:
                    written, cut, seconds = read_output(process.stdout.fileno(), limit, wall, end, info)
                finally:
                    if cut:
                        kill(process, info)
            said = os.pread(errors.fileno(), 1000, 0).decode("utf-8", "replace").strip().splitlines()
    except OSError as e:
        raise Stop(f"the sandbox did not start: {e}") from e
    code = process.returncode
    if not written and cut != "out of time" or not cut and code < 0:  # the ready byte never came, or someone killed bwrap
        raise Stop(f"the sandbox {'died' if written else 'did not start'}: {said[-1] if said else cut or f'exit code {code}'}")
    died = {0: None, OUT_OF_MEMORY: "memory", 128 + signal.SIGXCPU: "timeout", 128 + signal.SIGKILL: "killed"}
    return bytes(written[1:limit + 1]), cut or died.get(code, "error" if code < 128 else "crash"), seconds


def start(command, **how):
    """
    subprocess.Popen, of a process whose core limit is 1 byte. That is no dump, while 0 would still call the host's handler if its
    core_pattern is a pipe. It must be so from the beginning, for the filter lets nobody in there change this limit.
    """
    with starting:  # a child has its limits from us, and they are those of all our threads
        ours = resource.getrlimit(resource.RLIMIT_CORE)
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (1, ours[1] or 1))  # root may raise a hard limit of 0
        except ValueError as e:
            with open("/proc/sys/kernel/core_pattern") as f:
                handler = f.read().strip()
            if handler.startswith("|"):
                raise BadInput(f"programs that crash would be handed to {shorten(handler[1:])}, as root, since the hard limit of "
                               "core files is 0 here; raise it (docker run --ulimit core=-1, say)") from e
        try:
            return subprocess.Popen(command, **how)
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, ours)


def read_output(fd, limit, wall, end, info):
    """
    What comes through the pipe fd, the bootstrap's ready byte and at most about limit more, until all its writers are gone, and
    then None; or what came until a limit was hit, and which. And the seconds since the ready byte.
    """
    written, began = bytearray(), time.monotonic()
    stop = min(began + START_SECONDS, end)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        late = time.monotonic() >= stop
        if poll.poll(max(0, 1000 * min(stop - time.monotonic(), LOOK_EVERY))):  # if we are late ourselves: take what is there
            chunk = os.read(fd, 2**16)
            now = time.monotonic()
            if not written:
                began, stop = now, min(now + wall, end)
            written += chunk
            if not chunk or len(written) > limit + 1:
                return written, "output limit" if chunk else None, now - began
        elif late:
            return written, "out of time" if stop == end else "timeout", time.monotonic() - began
        elif written and count_files(info) > TMP_FILES:
            return written, "memory", time.monotonic() - began


def count_files(info):
    """How many files a sandbox has made. The kernel keeps about 1 KB for each name, outside of all its limits."""
    try:
        size = os.statvfs(os.path.join(f"/proc/{first_process(info)}/root", "tmp"))
        return size.f_files - size.f_ffree
    except (ValueError, OSError):  # it is not that far yet, or has just ended
        return 0


def first_process(info):
    """The id, out here, of the first process in a sandbox, which bwrap has written to the file info. Raises ValueError."""
    return json.loads(os.pread(info.fileno(), 4096, 0))["child-pid"]


def kill(process, info):
    """
    End a sandbox and wait for it. With the first process of a PID namespace the kernel kills all others in there, and bwrap out
    here, which waits for that one, ends too. To kill bwrap instead would leave zombies to whoever adopts orphans.
    """
    try:
        os.kill(first_process(info), signal.SIGKILL)
        process.wait(10)
    except (ValueError, ProcessLookupError, subprocess.TimeoutExpired):  # it is not that far yet, or has just ended
        process.kill()
    process.wait()


def memory_file(content=b""):
    """An anonymous file of this content (bytes), open at its beginning."""
    f = open(os.memfd_create("quartet"), "w+b", buffering=0)
    f.write(content)
    f.seek(0)
    return f


def is_root():
    """Whether we are root over all users there are, and not only inside of some user namespace."""
    with open("/proc/self/uid_map") as f:
        return os.geteuid() == 0 and f.read().split() == ["0", "0", str(2**32 - 1)]


def base_python():
    """The interpreter itself, where ours is that of a virtual environment."""
    return os.path.realpath(sys._base_executable)


@functools.cache
def isolation(bwrap, as_root):
    """bwrap's arguments that make the program's world: what is not named here does not exist in there."""
    home = os.path.realpath(sys.base_prefix)
    arguments = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname",
                 "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv",
                 "--setenv", "PYTHONHASHSEED", "0", "--setenv", "LD_LIBRARY_PATH", f"{home}/lib",
                 "--setenv", "MALLOC_ARENA_MAX", "1"]  # or each thread's arena would take 64 MiB of the address space
    if as_root:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # gone once the bootstrap is somebody else
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    sized = "--size" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout  # from bwrap 0.7 on
    arguments += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"] if sized else ["--dir", "/tmp"]  # or read-only
    visible = {base_python(), *(os.path.join(top, lib) for top in (home, "/usr", "/") for lib in ("lib", "lib64"))}
    parents = {str(parent) for path in visible for parent in pathlib.PurePath(path).parents} - {"/"}
    for path in sorted(parents | visible):  # a folder before what is in it
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif path in visible and os.path.exists(path):
            arguments += ["--ro-bind", path, path]
        elif path in parents:
            arguments += ["--dir", path]  # bwrap makes them, too, but some versions for root's eyes only
    return [*arguments, "--remount-ro", "/", "--chdir", "/tmp"]


# What the filter denies, as system call numbers on (x86_64, aarch64). execve is not among them: bwrap itself needs it, and all
# limits outlast it.
DENIED = {
    # a second process: the limits of memory and CPU time are each process's own, so it must be the only one
    "fork": (57, None), "vfork": (58, None),
    # bwrap's first process in there, which has no limits
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    # namespaces, in which it would have capabilities, and with them much more of the kernel to attack
    "unshare": (272, 97), "setns": (308, 268),
    # memory that no limit counts
    "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "io_setup": (206, 0), "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "seccomp": (317, 277), "symlink": (88, None), "symlinkat": (266, 36),
    # pages that stay in a pipe or a socket when they are no longer mapped; sockets within sockets; and larger ones
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "setsockopt": (54, 208),
    # where the kernel has had its holes, or where the host would feel it
    "socket": (41, 198), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "syslog": (103, 116),
    "modify_ldt": (154, None), "personality": (135, 92), "sync": (162, 81), "syncfs": (306, 267)}


# Calls that are judged by one argument: numbers, which argument, the bits of it that count, {their value: answer}, answer else.
# An answer is an error's number, 0 for "done" without doing it, or ALLOW.
ALLOW, EPERM = None, errno.EPERM
BY_ARGUMENT = {
    # threads only, and only with the files of all the others: each own table would hold OPEN_FILES more
    "clone": ((56, 220), 0, 0x10400, {0x10400: ALLOW}, EPERM),  # CLONE_THREAD | CLONE_FILES
    "socketpair": ((53, 199), 0, 0xFFFFFFFF, {1: ALLOW}, EPERM),  # AF_UNIX, for asyncio
    # MAP_SHARED | MAP_ANONYMOUS: most of it can be unmapped again, and all of it stays as long as a page is mapped
    "mmap": ((9, 222), 3, 0x21, {0x21: EPERM}, ALLOW),
    # MADV_HUGEPAGE, MADV_COLLAPSE: of a huge page, too, most can be unmapped and all of it stays until memory runs short
    "madvise": ((28, 233), 2, 0xFFFFFFFF, {14: EPERM, 25: EPERM}, ALLOW),
    # F_SETLK and F_SETLKW cost memory; the only process always gets its lock (sqlite3 wants one), so say yes. F_OFD_SETLK,
    # F_OFD_SETLKW, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
    "fcntl": ((72, 25), 1, 0xFFFFFFFF, {6: 0, 7: 0, 37: EPERM, 38: EPERM, 1024: EPERM, 1026: EPERM, 1031: EPERM}, ALLOW),
    "prctl": ((157, 167), 0, 0xFFFFFFFF, {22: EPERM}, ALLOW),  # PR_SET_SECCOMP: filters of its own, in the kernel's memory
    "setrlimit": ((160, 164), 0, 0xFFFFFFFF, {resource.RLIMIT_CORE: EPERM}, ALLOW),  # see start
    "prlimit64": ((302, 261), 1, 0xFFFFFFFF, {resource.RLIMIT_CORE: EPERM}, ALLOW)}
NEWER = 424  # from here on numbers are the same everywhere, and all calls newer than 2018: io_uring, clone3, pidfds, mounts


@functools.cache
def seccomp_filter():
    """The filter as the kernel's BPF: instructions of 8 bytes (code, jump if true, jump if false, operand). Raises BadInput."""
    machines = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
    if platform.machine() not in machines:
        raise BadInput(f"the sandbox knows the system calls of {' and '.join(machines)} only; this is {platform.machine()}")
    column = list(machines).index(platform.machine())
    load, equal, at_least, bits, end = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, kill_process, deny, unknown = 0x7FFF0000, 0x80000000, 0x50000 + errno.EPERM, 0x50000 + errno.ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, machines[platform.machine()]), (end, 0, 0, kill_process),  # 32-bit system calls
               (load, 0, 0, 0), (at_least, 0, 1, NEWER), (end, 0, 0, unknown)]  # libraries then do without
    for number in (numbers[column] for numbers in DENIED.values() if numbers[column] is not None):
        program += [(equal, 0, 1, number), (end, 0, 0, deny)]
    for numbers, argument, mask, answers, otherwise in BY_ARGUMENT.values():
        checks = [(load, 0, 0, 16 + 8 * argument), (bits, 0, 0, mask)]  # the lower half of it
        for value, answer in [*answers.items(), (None, otherwise)]:
            checks += [(equal, 0, 1, value)] if value is not None else []
            checks += [(end, 0, 0, allow if answer is ALLOW else 0x50000 + answer)]
        program += [(equal, 0, len(checks), numbers[column]), *checks]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, (end, 0, 0, allow)])


# The first Python in there, light on imports. Up to the ready byte all failure is the sandbox's, from there on the program's,
# which may meddle with the rest as it likes: whatever it changes are its own answers.
BOOTSTRAP = f"""
import _json, builtins, marshal, posix, resource, sys
def refuse(x):
    raise TypeError
def boot(job, null):
    with open(job, "rb") as f:
        source, calls, limits, uid = marshal.load(f)
    for name, soft, hard in limits:
        most = resource.getrlimit(name)[1]
        resource.setrlimit(name, (soft, hard) if most < 0 else (min(soft, most), min(hard, most)))
    if uid:
        posix.setgroups([])
        posix.setresgid(uid, uid, uid)
        posix.setresuid(uid, uid, uid)
    posix.write(1, b"+")
    if calls is not None:  # what it prints goes nowhere
        results = open(posix.dup(1), "wb")
        posix.dup2(null, 1)
    posix.dup2(null, 2)
    posix.close(null)
    builtins.exit = builtins.quit = sys.exit  # which -S has taken away
    sys.argv = ["solution.py"]
    main = type(sys)("__main__" if calls is None else "solution")
    sys.modules[main.__name__] = main
    try:
        exec(compile(source, "solution.py", "exec"), vars(main))
    except MemoryError:
        posix._exit({OUT_OF_MEMORY})
    if calls is None:
        return
    encode = _json.make_encoder(None, refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
    for name, arguments in calls:
        try:
            line = "".join(encode(getattr(main, name)(*arguments), 0))
        except MemoryError:
            line = "M"
        except BaseException:
            line = "!"
        results.write(line.encode() + b"\\n")
        results.flush()
    posix._exit(0)
boot(*map(int, sys.argv[1:]))
"""


# A program that rattles at its bars, and returns which of them give.
PROBE = b"""
import _socket, _thread, os, resource
lock = _thread.allocate_lock()
lock.acquire()
_thread.stack_size(2**16)
def threads(n):
    for _ in range(n):
        _thread.start_new_thread(lock.acquire, ())
def got(attempt, *arguments):
    try:
        attempt(*arguments)
        return True
    except (OSError, RuntimeError, MemoryError, ValueError):
        return False
def probe():
    if not got(threads, 1):
        return ["no thread at all (this takes Linux 5.14)"]
    return [name for name, *attempt in (
        ("a process", os.fork), ("a socket", _socket.socket), ("to be root", os.setuid, 0), ("the host's files", os.stat, "/etc"),
        ("the host's processes", os.stat, "/proc"), ("to write a file", open, "/x", "w"), ("a GiB", bytearray, 2**30),
        ("1000 threads", threads, 1000), ("rid of a limit", resource.setrlimit, resource.RLIMIT_AS, (-1, -1)),
    ) if got(*attempt)]
"""
