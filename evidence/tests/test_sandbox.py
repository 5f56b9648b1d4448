"""
grading/sandbox.py under attack. What must hold is asserted from outside: the host's files,
processes and sockets are untouched, the verdict is not a pass, and nothing is left over. Without
bwrap these tests are skipped.
"""
import glob
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from errors import BadInput
from grading import sandbox
from grading.programs import Verdict, run_all, run_tests
from tiny import ROOT

TOKEN = secrets.token_hex(16)  # stands in the command line of each of our sandboxed processes
PASSED = Verdict(1, 1, "pass")
pytestmark = needs_bwrap = pytest.mark.skipif(
    not shutil.which("bwrap"), reason="there is no bwrap")


def ours():
    """The ids of all processes of this machine that belong to a sandbox of ours."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as f:
                found += [int(path.split("/")[2])] if TOKEN.encode() in f.read() else []
        except OSError:
            pass  # it has just ended
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """No test leaves a process, an open file or a thread."""
    monkeypatch.setattr(sandbox, "BOOTSTRAP", sandbox.BOOTSTRAP + f"# {TOKEN}\n")
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    assert ours() == []
    assert len(os.listdir("/proc/self/fd")) <= files and threading.active_count() <= threads


def returns(value, *arguments):
    """The test that f(*arguments) returns value."""
    return {"fn": "f", "inputs": [list(arguments)], "outputs": [value]}


def prints(text, stdin=""):
    return {"stdin": stdin, "stdout": text}


IMPORTS = "import _thread, ctypes, fcntl, mmap, os, resource, socket, stat, struct, sys, time\n"


def function(body):
    """The program of a function f(*a) with this body."""
    return f"{IMPORTS}def f(*a):\n" + textwrap.indent(body, "    ")


def assert_verdicts(cases, **how):
    """cases: [(program, tests, the verdict, or words of which one is its reason)]"""
    done = run_all([(code, tests) for code, tests, _ in cases], workers=4, **how)
    assert [(case, v) for case, v in zip(cases, done, strict=True)
            if v != case[2] and v.reason not in str(case[2]).split("|")] == []


def passes(body, value=None, *arguments):
    """The case that a function f with this body, called with these arguments, returns value."""
    return function(body), returns(value, *arguments), PASSED


LIBRARIES = """
import asyncio, concurrent.futures, sqlite3
with concurrent.futures.ThreadPoolExecutor(20) as pool: got = sum(pool.map(abs, range(-5, 5)))
sqlite3.connect(":memory:").execute("create table t (a)").execute("insert into t values (5)")
return got + asyncio.run(asyncio.sleep(0, 1))"""
HARMLESS = [
    ("def f(x): return 1 / x", {"fn": "f", "inputs": [[0], [1], [2]], "outputs": [0, 1, 3]},
     (1, 3, "error")),
    ("print(1)\nexit()", prints("1"), PASSED),
    ("print('noise')\ndef f(x):\n    print('noise', x)\n    return x",
     returns("a\n\u2028é\0", "a\n\u2028é\0"), PASSED),
    # what limits and filter could have broken
    passes(LIBRARIES, 26),
    ("import os\nprint(os.path.dirname(__file__) == os.getcwd(), os.path.basename(__file__))",
     prints("True solution.py"), PASSED),
    ("import os\nos.abort()", prints("1"), (0, 1, "crash"))]
LIMITS = [  # of time, memory and output; nothing takes longer than its limit
    ("import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
     "    except OSError: pass\nwhile True: pass", prints("1"), "timeout|killed"),
    ("import os, time\nos.closerange(0, 100)\ntime.sleep(1000)", prints("1"), "timeout"),
    # the time is that of all tests
    ("import time\ntime.sleep(1.5)", prints([""] * 10, [""] * 10), "timeout"),
    ("x = bytearray(2**31)", prints("1"), "memory"),
    ("print('x' * 70000)", prints("1"), "output limit"),
    ("print('x' * 10**6)", prints("x" * 10**6), "pass"),  # as expected
    # right, and longer than expected
    ("def f(): return [0.1 + 0.2] * 10000", returns([0.3] * 10000), "pass"),
    ("def f():\n    for _ in range(100): print('x' * 10**6)\n    return 1", returns(1), "pass")]
# an exit, a crash or a limit in the third of five calls takes the third and all later ones
IN_THE_THIRD = [("ctypes.string_at(0)", 2, "crash"), ("raise SystemExit", 4, "error"),
                ("while True: os.write(3, b'x' * 10**6)", 2, "output limit"),
                ("bytearray(2**31)", 4, "memory"), ("os.kill(os.getpid(), 9)", 2, "killed")]
FIVE = {"fn": "f", "inputs": [[n] for n in range(5)], "outputs": list(range(5))}


def test_verdicts():
    sandbox.check_sandbox()
    assert_verdicts(HARMLESS + [
        (f"import os, ctypes\ndef f(n):\n    if n == 2:\n        {act}\n    return n", FIVE,
         (passed, 5, why)) for act, passed, why in IN_THE_THIRD])
    start = time.monotonic()
    assert_verdicts(LIMITS, timeout=1, memory_mib=128)
    assert time.monotonic() - start < 60


# attacks on the host: programs that return what they got

HIDDEN = ["/etc", "/proc", "/sys", "/dev", "/home", "/var", "/run", "/usr/bin/env", "/bin/sh",
          "/usr/share/doc", ROOT, os.path.expanduser("~/.ssh")]
THREADS = """
lock = _thread.allocate_lock()
lock.acquire()
_thread.stack_size(2**15)
n = 0
try:
    while n < a[0]:
        _thread.start_new_thread(lock.acquire, ())
        n += 1
except RuntimeError: pass
time.sleep(a[1])
return 30 <= n <= 64"""
WRITES = """
won = []
OLD = (lambda p: os.open(p, os.O_WRONLY), lambda p: os.chmod(p, 0o755), lambda p: os.rename(p, p),
       lambda p: os.setxattr(p, "user.x", b"x"))
NEW = (lambda p: open(p, "x"), os.mkdir, os.mkfifo, lambda p: os.mknod(p, 0o060666, 0x800),
       lambda p: os.link(a[0][0], p), lambda p: os.symlink("/etc", p))
for paths, attempts in (a[0], OLD), (a[1], NEW):
    for attempt in attempts:
        for path in paths:
            try: won.append([attempt(path), path])
            except OSError: pass
return won"""
ATTACKS = {  # what it looks for: a function's body, what it must return, its arguments
    "threads, also those that take no memory": (THREADS, True, 10**5, 0),
    "files but the interpreter, the shared libraries and the time zones": ("""
gone = [p for p in a if os.path.lexists(p)]
found = []
for top, folders, files in os.walk("/"):
    folders[:] = [d for d in folders if d not in ("lib", "lib64", "zoneinfo")]
    found += [os.path.join(top, f) for f in files]
known = {"lib", "lib64", "tmp", "usr", sys.base_prefix.split("/")[1]}
return [gone, found, sorted(set(os.listdir("/")) - known), os.listdir("/tmp")]""",
        [[], [sandbox.base_python()], [], []], *HIDDEN),
    "what is open: 0 to 2 and the pipe of the results": ("""
found = []
for fd in range(2000):
    try: info = os.fstat(fd)
    except OSError: continue
    kind = "file" if stat.S_ISREG(info.st_mode) else "pipe" if stat.S_ISFIFO(info.st_mode) else "?"
    found.append([fd, "null" if info.st_rdev == 0x103 else kind])
return found""", [[0, "file"], [1, "null"], [2, "null"], [3, "pipe"]]),
    "room in its stdin, a file in memory": ("""
for grow in ((os.write, b"x" * 99), (os.ftruncate, 99), (os.posix_fallocate, 0, 99),
             (os.setxattr, "user.x", b"x" * 99)):
    try: return grow[0](0, *grow[1:])
    except OSError: pass""", None),
    "more open files": ("""
x = []
try:
    while True: x.append(open(a[0]))
except OSError: return len(x)""", sandbox.OPEN_FILES - 4, os.__file__),
    "capabilities, no_new_privs, groups, root; a secret of our environment": ("""
libc = ctypes.CDLL(None)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, data)
return [data[0], data[1], data[3], data[4], libc.prctl(39, 0, 0, 0, 0), os.getgroups(),
        0 in os.getresuid() + os.getresgid(), os.environ.get("QUARTET_SECRET")]""",
        [0, 0, 0, 0, 1, [], False, None]),
    "core files: a limit of 1 byte keeps the host's handler away (core(5)); nothing lowers it": ("""
for lower in (lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
              lambda: resource.prlimit(os.getpid(), resource.RLIMIT_CORE, (0, 1))):
    try: lower()
    except (ValueError, OSError): pass
limits = (ctypes.c_ulong * 2)()
ctypes.CDLL(None).syscall(97 if os.uname().machine == "x86_64" else 163, 4, limits)
return limits[0]""", 1),
    "processes; if they were ours, the signals below would hit more than planned": (
        "return os.getpid(), os.getppid()", [2, 1])}
# everything that can be signalled: neither we nor a neighbour notice
KILLS = ("os.kill(-1, 9)", "os.killpg(0, 9)", "os.kill(a[0], 9)", "os.kill(a[1], 15)",
         "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\n1 / 0")


def test_no_attack_on_the_host_succeeds(monkeypatch):
    monkeypatch.setenv("QUARTET_SECRET", "4815162342")
    with open("/proc/self/maps") as f:
        libc = re.search(r"/.*/libc[-.].*", f.read()).group()
    files = [os.__file__, libc, sandbox.base_python()]
    new = [os.path.join(folder, "quartet" + TOKEN)
           for folder in ["/", "/usr", "/tmp", *map(os.path.dirname, files)]]
    # the threads of one program do not keep another from its own
    attacks = [*ATTACKS.values(), (WRITES, [], files, new), *[(THREADS, True, 40, 0.5)] * 4]
    assert_verdicts([passes(*attack) for attack in attacks])
    assert not any(map(os.path.lexists, new))
    with subprocess.Popen(["sleep", "60"]) as victim:
        tests = returns(None, victim.pid, os.getpid())
        done = run_all([(function(f"{act}\nos._exit(0)"), tests) for act in KILLS], 4)
        assert [v.passed for v in done] == [0] * len(KILLS) and victim.poll() is None
        victim.kill()


# mov eax, 20; int 0x80; ret: getpid, as a 32-bit system call
NATIVE = """
x = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
x.write(bytes.fromhex("b814000000cd80c3"))
return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(x)))() > 0"""
# what would cost the kernel's memory: only some arguments of these calls are denied
BY_ARGUMENT = """
won = []
for attempt in (lambda: fcntl.fcntl(os.pipe()[1], 1031, 2**20),  # large pipes
                lambda: mmap.mmap(-1, 8192, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
                lambda: mmap.mmap(-1, 2**22, flags=mmap.MAP_PRIVATE).madvise(14),  # huge pages
                *[lambda n=n: socket.socketpair(n) for n in range(46) if n != 1]):
    try: won.append(str(attempt()))
    except OSError: pass
f = open(os.__file__)
fcntl.lockf(f, fcntl.LOCK_SH, 1)  # "done", but not done
with open(os.__file__) as other:  # F_OFD_GETLK: would a lock of mine fit in?
    held = fcntl.fcntl(other, 36, struct.pack("hhqqi4x", 1, 0, 0, 1, 0))
return won + [kind for kind in struct.unpack_from("h", held) if kind != fcntl.F_UNLCK]"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_the_filter():
    """Calls that only native code would make: EPERM, or ENOSYS to what is newer than 2018."""
    calls = {name: numbers[0] for name, numbers in sandbox.DENIED.items()}
    want = dict.fromkeys(calls, 1)
    newer = {"io_uring_setup": 425, "open_tree": 428, "fsopen": 430, "pidfd_open": 434,
             "clone3": 435, "pidfd_getfd": 438, "memfd_secret": 447, "landlock": 444,
             "x32 getpid": 0x40000000 + 39}
    want |= dict.fromkeys(newer, 38) | {"getpid": False}
    libc = "libc = ctypes.CDLL(None, use_errno=True)\n"
    cases = [passes(f"{libc}return {{k: libc.syscall(n, *[0] * 6) < 0 and ctypes.get_errno() "
                    "for k, n in a[0].items()}", want, calls | newer | {"getpid": 39})]
    # flags of clone; EINVAL is the kernel's own answer to a broken thread
    flags = {17: 1, 0: 1, 0x10000000: 1, 0x10000: 1, 0x400: 1, 0x10400: 22, 0x10010400: 22}
    clone = f"{libc}libc.syscall(56, a[0], 0, 0, 0, 0)\nreturn ctypes.get_errno()"
    assert_verdicts(cases + [passes(clone, error, given) for given, error in flags.items()] + [
        passes(BY_ARGUMENT, []), (function(NATIVE), returns(True), (0, 1, "crash"))])


def test_the_filter_has_the_right_numbers():
    headers = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"
    if not all(map(os.path.exists, headers)):
        pytest.skip("no kernel headers here")
    for column, path in enumerate(headers):
        with open(path) as f:
            known = {name: int(n) for name, n in re.findall(
                r"#define __NR(?:3264)?_(\w+)\s+(\d+)", f.read())}
        rules = sandbox.DENIED | {name: rule[0] for name, rule in sandbox.BY_ARGUMENT.items()}
        assert {name: known.get(name) for name in rules} == {
            name: numbers[column] for name, numbers in rules.items()}
        assert known["pidfd_send_signal"] == sandbox.NEWER


# attacks on the verdict

def test_cheating():
    """It does not know that the answer is 42.5, or that 41 is the next; nor judges an assertion."""
    cheat = function("os.write(3, b'+pass\\ntrue\\n{\"passed\": 1}\\n')\nreturn 1")
    tests = {"fn": "f", "inputs": [[], []], "outputs": [42.5, 41]}
    equal = "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()"
    assert run_tests(cheat, tests)[:2] == (0, 2)
    assert run_tests(equal, ["assert f(1) == 2"])[:2] == (0, 1)


def test_expected_values_stay_outside(monkeypatch):
    """The child is handed code and inputs, and nothing else of the tests."""
    sent, memory_file = [], sandbox.memory_file
    monkeypatch.setattr(sandbox, "memory_file",
                        lambda content=b"": sent.append(content) or memory_file(content))
    for code, tests, given in (
            ("def f(x): return x + '!'", returns("4815162342!", "4815162342"), b"4815162342"),
            ("print(input() + '!')", prints("108108!", "108108"), b"108108")):
        assert run_tests(code, tests) == PASSED
        assert any(given in x for x in sent) and not any(given + b"!" in x for x in sent)


# the sandbox fails: never a verdict


def test_a_sandbox_that_does_not_hold_is_found_out(monkeypatch):
    """The self-test of check_sandbox, with one bar sawn through at a time."""
    isolation = sandbox.isolation
    for name, sawn, message in (
            ("isolation", lambda root: ["--ro-bind", "/etc", "/etc", *isolation(root)], "files"),
            ("isolation", lambda root: ["--ro-bind", "/proc", "/proc", *isolation(root)],
             "processes"),
            ("seccomp_filter", lambda: bytes.fromhex("06000000 0000ff7f"), "a process.*a socket"),
            ("THREADS", 4000, "1000 threads")):
        with monkeypatch.context() as m, pytest.raises(BadInput, match=message):
            m.setattr(sandbox, name, sawn)
            sandbox.check_sandbox()


CHILD = f"""
import sys
sys.path.insert(0, {ROOT!r})
from grading import sandbox
sandbox.BOOTSTRAP += "# {TOKEN}\\n"
"""


def test_a_sandbox_as_the_host_sees_it():
    """
    Its processes are the first to end without memory, share no namespace with us, and die with the
    trainer, though it has no time to see to that.
    """
    code = CHILD + "sandbox.run_program(b'import time\\ntime.sleep(99)', None, b'', 9, 9, 128, 99)"
    trainer = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while len(ours()) < 4:  # the trainer, bwrap, its first process and the program
        time.sleep(0.01)
        assert trainer.poll() is None
    time.sleep(1)  # before its ready byte is read, a program ends by itself

    def namespaces(pid):
        return {os.readlink(f"/proc/{pid}/ns/{kind}")
                for kind in ("ipc", "mnt", "net", "pid", "uts")}

    scores = {pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in ours()}
    assert scores.pop(trainer.pid) < 1000 and {*scores.values()} == {1000}
    assert any(namespaces(pid).isdisjoint(namespaces("self")) for pid in scores)
    trainer.kill()
    trainer.wait(30)
    deadline = time.monotonic() + 5
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_an_ordinary_user():
    """Root's sandbox is another than everyone else's: try that, where the system has a Python."""
    python = "/usr/bin/python3"
    version = "import sys; sys.exit(sys.version_info < (3, 11))"
    if os.geteuid() or not os.path.exists(python) or subprocess.call([python, "-c", version]):
        pytest.skip("only root can be another user, who needs a Python 3.11 in /usr/bin")
    code = """
sandbox.check_sandbox()
look = b'''import os
print(os.getresuid(), os.uname().nodename, os.path.exists('/etc'))'''
for text in look, b"while True: pass":
    print(sandbox.run_program(text, None, b"", 999, 1, 128, 20)[:2])
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # $TMPDIR may be root's alone
        os.mkdir(f"{folder}/grading")
        for file in "errors.py", "grading/sandbox.py":
            shutil.copy(f"{ROOT}/{file}", f"{folder}/{file}")
        with open(f"{folder}/torch.py", "w"):
            pass  # errors.py asks whether there is one; the sandbox needs none
        os.chmod(folder, 0o755)
        done = subprocess.run([python, "-B", "-c", CHILD.replace(ROOT, folder) + code],
                              user=12345, group=12345, extra_groups=[], capture_output=True,
                              text=True, cwd="/")
    if done.returncode and "needs namespaces" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout == (
        "(b'(65534, 65534, 65534) sandbox False\\n', None)\n(b'', 'timeout')\n"), done.stderr


def test_bwrap_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, message in (("exit 0", "exit code 0"), ("kill -9 $$", "exit code -9"),
                            ("echo 'bwrap: No permissions' >&2; exit 1", "No permissions")):
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
        with pytest.raises(sandbox.Stop, match=message):
            run_all([("", prints(""))] * 5, 2)
        with pytest.raises(BadInput, match=message):
            sandbox.check_sandbox()
