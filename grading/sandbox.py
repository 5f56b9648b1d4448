"""
Runs Python that a model wrote under bubblewrap (bwrap), where it can do no harm. Without bwrap,
nothing is run.

The limits of the program:
- It is one process, without privileges, in namespaces of its own (for a process, only the things in
  its namespaces exist).
- It sees the Python interpreter, the system's shared libraries and time zones, and can write no
  file. It sees no network, no other process, no /proc, no /dev, and none of this process's
  environment variables.
- The kernel limits its CPU time, memory, threads, open files and output.
- A seccomp filter, which judges each system call, denies it more processes and the rarer services
  of the kernel.
- It gets the inputs of the tests and never the outputs. grading/programs.py compares its answers
  outside. So an exit code, a printed "passed" or a patched builtin does not help it.

There is no protection against bugs of the kernel that an unprivileged process can reach, and
against spying through timing and CPU caches. The program can read the interpreter's lib folder,
with its site-packages, and learn the kernel's version and the machine's size. The kernel needs more
memory for the program than the limit counts: at most 12 MiB for full sockets, 2 MiB for full pipes,
and 512 MiB for page tables, if each page lies alone. If all memory is used, the kernel ends these
programs first. If you think that the model itself may attack, run all of this in a virtual machine.

How to read this file: run_program starts one sandbox and reads its output; isolation,
seccomp_filter and BOOTSTRAP are its walls; PROBE tries them.
"""
import contextlib
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
import time
from zoneinfo import TZPATH

from errors import BadInput, Stop, shorten

CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count()))

OUTPUT_LIMIT = 2**16  # bytes that are read from a program, beside the bytes that the tests expect
# wall-clock seconds that a program has for all its tests, for each CPU second of a process
WALL_FACTOR = 4
START_SECONDS = 30  # a sandbox that takes longer than this to start is broken
THREADS, OPEN_FILES = 64, 64
OUT_OF_MEMORY = 97  # the bootstrap's exit code after a MemoryError
FIRST_UID = 2**31  # no system gives user ids from here on to its users
runs = itertools.count()  # numbers the sandboxes of this process


def cpus_of_a_rank():
    """
    How many processes a rank may run at once: the machine's ranks share the CPUs that this process
    was started on (taskset), or fewer where a container has a quota of CPU time in each period.
    """
    count = len(CPUS)
    with contextlib.suppress(OSError, ValueError):  # no cgroups v2; or no quota, which is "max"
        quota, period = map(int, pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, quota // period)
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def use_all_cpus():
    """OpenMP may have bound a thread to one CPU, which new threads and processes inherit."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, CPUS)


def check_sandbox():
    """Try the sandbox from inside, once, before training. Raises BadInput with fault and advice."""
    try:
        written, ending, _ = run_program(PROBE, [("probe", [])], b"", OUTPUT_LIMIT, timeout=5,
                                         memory_mib=256, wall=20)
    except Stop as e:
        raise BadInput(f"{e}. bwrap needs namespaces: a container must allow them (such as docker "
                       "run --privileged), and so must Ubuntu from 23.10 on (sysctl "
                       "kernel.apparmor_restrict_unprivileged_userns=0)") from e
    if written != b"[]\n":
        raise BadInput("the sandbox does not protect this system: the program that tests it got "
                       f"{written.decode().strip() or ending}")


# --------------------------------------------------------------------------------------------------
# one sandbox: starting it, reading from it, ending it


def run_program(source, calls, stdin, limit, timeout, memory_mib, wall, end=math.inf):
    """
    Run one program in one process.

    source: its text, in bytes.
    calls: the function calls [(name, arguments)]; it reports a line with the result of each; None:
        it is a script, which reads stdin (bytes) and prints.
    limit: how many bytes to read from it.
    timeout: its CPU seconds, rounded up.
    memory_mib: its address space; Python itself takes 20 MiB of it.
    wall: its seconds on the wall clock, from its start on.
    end: the last moment, by time.monotonic().

    Returns its output (at most limit bytes); the reason of its end (None: by itself, without an
    error); and the seconds that it took. Raises BadInput where bwrap is missing. Raises Stop unless
    it is certain that the program has started, or that there was no time left to start it.
    """
    if time.monotonic() >= end:
        return b"", "out of time", 0.0
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise BadInput("bwrap is missing, and model-written code runs nowhere else: apt install "
                       "bubblewrap; it needs Linux")
    limit_core_files()
    # Processes and threads are limited for each user, but not for root; and real root stays root
    # even in a user namespace. So for real root each sandbox becomes a new user, which nobody else
    # is. Otherwise it gets a user namespace.
    uid = FIRST_UID + os.getpid() % 2**22 * 256 + next(runs) % 256 if is_root() else 0
    # (limit, soft, hard). At the soft limit of CPU time a program gets SIGXCPU, which it may
    # ignore; at the hard one SIGKILL.
    limits = [(resource.RLIMIT_CPU, math.ceil(timeout), math.ceil(timeout) + 1)]
    limits += [(name, value, value) for name, value in (
        (resource.RLIMIT_AS, memory_mib * 2**20),
        (resource.RLIMIT_STACK, 2**23),
        (resource.RLIMIT_NPROC, THREADS),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),  # its stdin is an open file; no write makes it larger
        (resource.RLIMIT_SIGPENDING, THREADS))]
    try:
        # All inputs are in anonymous files: with a pipe, a program that does not read would block
        # this process.
        with memory_file(marshal.dumps((source, calls, limits, uid))) as job, \
                memory_file(stdin) as text, memory_file(seccomp_filter()) as seccomp, \
                memory_file() as info, memory_file() as errors, open(os.devnull, "wb") as null:
            # if all memory is used, the kernel should end this process, and not the trainer
            shell = '{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; exec "$@"'
            command = ["/bin/sh", "-c", shell, "sh",
                       bwrap, *isolation(uid != 0), "--info-fd", str(info.fileno()),
                       "--seccomp", str(seccomp.fileno()), "--",
                       # not -I, because it ignores PYTHONHASHSEED
                       base_python(), "-P", "-s", "-S", "-B", "-X", "utf8", "-X",
                       "int_max_str_digits=0", "-c", BOOTSTRAP, str(job.fileno()),
                       str(null.fileno())]
            with subprocess.Popen(
                    command, stdin=text, stdout=subprocess.PIPE, stderr=errors, env={}, bufsize=0,
                    start_new_session=True,  # Ctrl-C is not for the program
                    pass_fds=[f.fileno() for f in (job, null, info, seccomp)]) as process:
                cut = "interrupted"
                try:
                    written, cut, seconds = read_output(process.stdout.fileno(), limit, wall, end)
                finally:
                    if cut:
                        kill(process, info)
            lines = os.pread(errors.fileno(), 1000, 0).decode("utf-8", "replace")
            lines = lines.strip().splitlines()
    except OSError as e:
        raise Stop(f"the sandbox did not start: {e}") from e
    code = process.returncode
    # the ready byte never came, or somebody killed bwrap
    if not written and cut != "out of time" or not cut and code < 0:
        happened = "died" if written else "did not start"
        raise Stop(f"the sandbox {happened}: {lines[-1] if lines else cut or f'exit code {code}'}")
    endings = {0: None, OUT_OF_MEMORY: "memory", 128 + signal.SIGXCPU: "timeout",
               128 + signal.SIGKILL: "killed"}
    ending = cut or endings.get(code, "error" if code < 128 else "crash")
    return bytes(written[1:limit + 1]), ending, seconds  # without the ready byte


def limit_core_files():
    """
    Let this process, and so each sandbox, leave core files of at most 1 byte, which is none. With a
    limit of 0 a crash would still start the host's handler of core files, as root, if there is one
    (core(5)). It must be set before the sandbox starts, because the filter denies any change of it.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, hard or 1))  # root may raise a hard limit of 0
    except ValueError as e:
        handler = pathlib.Path("/proc/sys/kernel/core_pattern").read_text().strip()
        if handler.startswith("|"):
            raise BadInput(f"this system gives programs that crash to {shorten(handler[1:])}, "
                           "which runs as root, because the hard limit of core files is 0; raise "
                           "it, such as by docker run --ulimit core=-1") from e


def read_output(fd, limit, wall, end):
    """
    Read from the pipe fd: the bootstrap's ready byte, and then about limit bytes at most, until all
    writers are gone or a limit is hit.

    Returns the bytes; the limit that was hit (None: none); the seconds since the ready byte. limit,
    wall, end: see run_program.
    """
    written, began = bytearray(), time.monotonic()
    stop = min(began + START_SECONDS, end)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    # if it is too late: 0 milliseconds, in which bytes that are there already are still read
    while poll.poll(max(0, 1000 * (stop - time.monotonic()))):
        chunk = os.read(fd, 2**16)
        now = time.monotonic()
        if not written:
            began, stop = now, min(now + wall, end)
        written += chunk
        if not chunk or len(written) > limit + 1:
            return written, "output limit" if chunk else None, now - began
    return written, "out of time" if stop == end else "timeout", time.monotonic() - began


def kill(process, info):
    """
    End a sandbox and wait for it. This kills the first process of its PID namespace, whose id bwrap
    has written to the file info: then the kernel kills all others in there, and bwrap, which waits
    for the first one, ends, too. If bwrap itself were killed, the processes in there would stay as
    zombies.
    """
    try:
        os.kill(json.loads(os.pread(info.fileno(), 4096, 0))["child-pid"], signal.SIGKILL)
        process.wait(10)
    except (ValueError, ProcessLookupError, subprocess.TimeoutExpired):
        process.kill()  # the first process is not there yet, or has just ended
    process.wait()


def memory_file(content=b""):
    """An anonymous file with this content (bytes), open at its beginning."""
    f = open(os.memfd_create("quartet"), "w+b", buffering=0)
    f.write(content)
    f.seek(0)
    return f


def is_root():
    """Whether this process is real root, with power over all users, not a user namespace's root."""
    with open("/proc/self/uid_map") as f:
        return os.geteuid() == 0 and f.read().split() == ["0", "0", str(2**32 - 1)]


def base_python():
    """The running interpreter, or the one from which its virtual environment was made."""
    return os.path.realpath(sys._base_executable)


# --------------------------------------------------------------------------------------------------
# the walls: the files that the program sees


@functools.cache
def isolation(as_root):
    """
    The arguments of bwrap that make the program's world: nothing else exists in there, and it can
    only be read. as_root: the program starts as root, so that the bootstrap can become another
    user.
    """
    home = os.path.realpath(sys.base_prefix)
    arguments = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
                 "--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent",
                 "--new-session", "--cap-drop", "ALL", "--clearenv",
                 "--setenv", "PYTHONHASHSEED", "0", "--setenv", "LD_LIBRARY_PATH", f"{home}/lib",
                 # with more, each thread's arena would take 64 MiB of the address space
                 "--setenv", "MALLOC_ARENA_MAX", "1", "--dir", "/tmp"]
    if as_root:
        # gone once the bootstrap has become another user
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    visible = {base_python()}
    visible |= {os.path.join(top, lib) for top in (home, "/usr", "/") for lib in ("lib", "lib64")}
    visible |= {path for path in TZPATH if path.startswith((home, "/usr/")) and os.path.isdir(path)}
    parents = {str(parent) for path in visible for parent in pathlib.PurePath(path).parents} - {"/"}
    for path in sorted(parents | visible):  # sorted: a folder comes before its contents
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif path in visible and os.path.exists(path):
            arguments += ["--ro-bind", path, path]
        elif path in parents:
            # bwrap would make it by itself, but with some versions only root could read it
            arguments += ["--dir", path]
    return [*arguments, "--remount-ro", "/", "--chdir", "/tmp"]


# --------------------------------------------------------------------------------------------------
# the walls: the system calls that the program may make


# The system calls that the filter denies: their numbers on (x86_64, aarch64), None where there is
# no such call. execve is allowed: bwrap itself needs it, and all limits stay after it.
DENIED = {
    # A second process: memory and CPU time are limited for each process, so there must be only one.
    "fork": (57, None), "vfork": (58, None),
    # access to bwrap's first process in there, which has no limits
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    # namespaces: in its own ones it would have capabilities, and could attack more of the kernel
    "unshare": (272, 97), "setns": (308, 268),
    # memory that no limit counts
    "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "io_setup": (206, 0), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "seccomp": (317, 277),
    # attributes of its stdin, a file in memory: each name could have 64 KiB of the kernel's
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    # pages that stay in a pipe or a socket after they are unmapped; sockets sent through sockets;
    # larger buffers of sockets
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "sendmsg": (46, 211),
    "sendmmsg": (307, 269), "setsockopt": (54, 208),
    # services with past security holes, or services that slow down the host
    "socket": (41, 198), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "syslog": (103, 116), "modify_ldt": (154, None),
    "personality": (135, 92), "sync": (162, 81), "syncfs": (306, 267)}


# The system calls that are judged by one of their arguments: (numbers as above, the argument's
# index, the bits of it that count, {their value: answer}, the answer for all other values). An
# answer is ALLOW, or the number of an error, or 0, which says "done" without doing it.
ALLOW, EPERM = None, errno.EPERM
BY_ARGUMENT = {
    # CLONE_THREAD | CLONE_FILES: only threads that share the table of open files, because each
    # table of its own would have OPEN_FILES more
    "clone": ((56, 220), 0, 0x10400, {0x10400: ALLOW}, EPERM),
    # AF_UNIX only: asyncio needs it
    "socketpair": ((53, 199), 0, 0xFFFFFFFF, {1: ALLOW}, EPERM),
    # MAP_SHARED | MAP_ANONYMOUS: the program could unmap all but one page of such a mapping, and
    # the kernel would keep all of it
    "mmap": ((9, 222), 3, 0x21, {0x21: EPERM}, ALLOW),
    # MADV_HUGEPAGE, MADV_COLLAPSE: the same with a huge page, until there is little memory
    "madvise": ((28, 233), 2, 0xFFFFFFFF, {14: EPERM, 25: EPERM}, ALLOW),
    # F_SETLK and F_SETLKW: a lock costs memory. The only process would always get its lock (sqlite3
    # wants one), so the answer is "done".
    # F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ: an error
    "fcntl": ((72, 25), 1, 0xFFFFFFFF,
              {6: 0, 7: 0, 37: EPERM, 38: EPERM, 1024: EPERM, 1026: EPERM, 1031: EPERM}, ALLOW),
    # PR_SET_SECCOMP: filters of its own would be in the kernel's memory
    "prctl": ((157, 167), 0, 0xFFFFFFFF, {22: EPERM}, ALLOW),
    # see limit_core_files
    "setrlimit": ((160, 164), 0, 0xFFFFFFFF, {resource.RLIMIT_CORE: EPERM}, ALLOW),
    "prlimit64": ((302, 261), 1, 0xFFFFFFFF, {resource.RLIMIT_CORE: EPERM}, ALLOW)}
# From this number on calls have the same number on all machines: io_uring, clone3, pidfds, mounts.
# All calls newer than 2018 are answered as unknown to the kernel; libraries can do without them.
NEWER = 424


@functools.cache
def seccomp_filter():
    """
    The filter as a program for the kernel (BPF): instructions of 8 bytes, (code, how many
    instructions to skip if true, how many if false, operand). For each system call the kernel runs
    it on a record: the call's number at byte 0, the machine at byte 4, the arguments from byte 16
    on, 8 bytes each. Raises BadInput on a machine whose system calls are not known here.
    """
    machines = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
    if platform.machine() not in machines:
        raise BadInput(f"the sandbox knows the system calls of {' and '.join(machines)} only; this "
                       f"is {platform.machine()}")
    column = list(machines).index(platform.machine())
    load, equal, at_least, bits, end = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, kill_process, error = 0x7FFF0000, 0x80000000, 0x50000  # an error's number is added
    deny, unknown = error + errno.EPERM, error + errno.ENOSYS
    program = [
        # another machine: 32-bit system calls, which have other numbers
        (load, 0, 0, 4), (equal, 1, 0, machines[platform.machine()]), (end, 0, 0, kill_process),
        (load, 0, 0, 0), (at_least, 0, 1, NEWER), (end, 0, 0, unknown)]
    for number in (numbers[column] for numbers in DENIED.values() if numbers[column] is not None):
        program += [(equal, 0, 1, number), (end, 0, 0, deny)]
    for numbers, argument, mask, answers, otherwise in BY_ARGUMENT.values():
        # the lower half of the argument
        checks = [(load, 0, 0, 16 + 8 * argument), (bits, 0, 0, mask)]
        for value, answer in [*answers.items(), (None, otherwise)]:
            checks += [(equal, 0, 1, value)] if value is not None else []
            checks += [(end, 0, 0, allow if answer is ALLOW else error + answer)]
        program += [(equal, 0, len(checks), numbers[column]), *checks]
    program += [(end, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


# --------------------------------------------------------------------------------------------------
# the code that runs in there


# What LeetCode's judge writes before a solution; to the program these names are built-in ones. The
# star imports end with Python's built-in names, so pow is not math's; and a module comes before a
# name in it, so bisect.bisect works.
LIBRARY = ("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math",
           "random", "statistics", "itertools", "functools", "operator", "io", "sys", "json")
LEETCODE = "\n".join([*(f"from {name} import *" for name in (*LIBRARY, "builtins")),
                      f"import {', '.join(LIBRARY)}", "sys.setrecursionlimit(50_000)"])


# The first Python in the sandbox: it sets the limits, writes the ready byte "+", runs the program
# and reports the results of its functions. It imports little, to start fast. A failure before the
# ready byte is the sandbox's; a later one is the program's. The program can change the rest of this
# code, but with it only its own answers.
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
    main.__file__ = "/tmp/solution.py"
    try:
        code = compile(source, "solution.py", "exec")
        if calls and (b"class Solution" in source or any("." in name for name, _ in calls)):
            main.__builtins__ = dict(vars(builtins))
            exec({LEETCODE!r}, main.__builtins__)
        exec(code, vars(main))
    except MemoryError:
        posix._exit({OUT_OF_MEMORY})
    if calls is None:
        return
    encode = _json.make_encoder(None, refuse, _json.encode_basestring_ascii, None, ":", ",",
                                False, False, True)
    for name, arguments in calls:
        try:
            owner, _, method = name.rpartition(".")
            if not owner and hasattr(vars(main).get("Solution"), name):
                owner = "Solution"
            function = getattr(vars(main)[owner](), method) if owner else vars(main)[name]
            line = "".join(encode(function(*arguments), 0))
        except MemoryError:
            line = "M"
        except BaseException:
            line = "!"
        results.write(line.encode() + b"\\n")
        results.flush()
    posix._exit(0)
boot(*map(int, sys.argv[1:]))
"""


# With this program check_sandbox tries the walls: it attempts actions that should be denied, and
# returns the list of the successful ones.
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
        ("a process", os.fork),
        ("a socket", _socket.socket),
        ("to be root", os.setuid, 0),
        ("the host's files", os.stat, "/etc"),
        ("the host's processes", os.stat, "/proc"),
        ("to write a file", open, "/x", "w"),
        ("a GiB", bytearray, 2**30),
        ("1000 threads", threads, 1000),
        ("rid of a limit", resource.setrlimit, resource.RLIMIT_AS, (-1, -1)),
    ) if got(*attempt)]
"""
