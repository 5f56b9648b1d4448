"""
Two machines: two network namespaces that only a cable joins, a veth pair. Each has a torchrun of its own, and so has nothing of
the other but the network and the disk. A machine is lost, the other goes on alone: what comes of it has the bits of a run that
nothing has happened to. It needs root and iproute2, and half a minute: pytest -m campaign.
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

import tiny
from tiny import forked, one_run

ADDRESSES = "192.0.2.1", "192.0.2.2"  # of a network for examples (RFC 5737)
# In the iteration that the variable PAUSE_AT names, each rank waits for the test: what is cut is then cut in the rollout,
# and nobody is writing to the disk.
PAUSE = """
import os, time
import data
batch_rows = data.batch_rows
def paused(seed, iteration, *rest):
    if iteration == int(os.environ.get("PAUSE_AT", -1)):
        open(f"{os.environ['SIGNS']}/here-{RANK}", "w").close()
        while not os.path.exists(f"{os.environ['SIGNS']}/go"):
            time.sleep(0.05)
    return batch_rows(seed, iteration, *rest)
data.batch_rows = paused
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)


class Run:
    """A torchrun and its ranks."""

    def __init__(self, command, environment):
        self.files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=self.files[0], stderr=self.files[1], env=environment, cwd=tiny.ROOT,
                                        start_new_session=True)

    def said(self):
        """(all on stdout, on stderr the lines of our own) so far."""
        out, err = (os.pread(file.fileno(), 2**20, 0).decode(errors="replace") for file in self.files)
        return out, [line for line in err.splitlines() if line.startswith("grpo.py: error")]

    def lines(self):
        """The lines of its rank, when there is one. Its torchrun may go on for minutes, if it cannot reach the other."""
        wait_for(lambda: self.said()[1] or self.ended(), "a line")
        time.sleep(1)  # for a second one, which must not be
        return self.said()[1]

    def ended(self):
        return self.process.poll() is not None

    def end(self):
        if not self.ended():
            os.killpg(self.process.pid, signal.SIGKILL)  # the ranks die with torchrun
            self.process.wait()


class Machine:
    """One end of the cable."""

    def __init__(self, number, cable):
        self.number, self.name, self.card = number, f"quartet{os.getpid()}-{number}", f"{cable}-{number}"
        self.running = []

    def set_up(self):
        """None, or what went wrong."""
        steps = [("netns", "add", self.name), ("link", "set", self.card, "netns", self.name),
                 ("-n", self.name, "addr", "add", f"{ADDRESSES[self.number]}/24", "dev", self.card),
                 ("-n", self.name, "link", "set", "lo", "up"), ("-n", self.name, "link", "set", self.card, "up")]
        return next((done.stderr for done in (ip(*step) for step in steps) if done.returncode), None)

    def start(self, wrapper, args, **environment):
        """torchrun, as docs/scale.md has it. (Which machine is HOST, the name of one would say.)"""
        meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[0]}:29500", "--rdzv_id=first",
                   f"--local_addr={ADDRESSES[self.number]}", f"--rdzv_conf=is_host={self.number == 0},join_timeout=120"]
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                   "--nproc_per_node=1", *meeting, wrapper, os.path.join(tiny.ROOT, "grpo.py"), *args]
        environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", PYTHONPATH=tiny.ROOT,
                                        GLOO_SOCKET_IFNAME=self.card) | environment
        self.running.append(Run(command, environment))
        return self.running[-1]

    def cable(self, state):
        assert ip("-n", self.name, "link", "set", self.card, state).returncode == 0

    def lose(self):
        """It loses its power: nobody says goodbye to the other one."""
        self.cable("down")
        self.end()

    def end(self):
        for run in self.running:
            run.end()
        self.running.clear()


@pytest.fixture(scope="module")
def machines():
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root, and ip of iproute2, to make two network namespaces")
    cable = f"q{os.getpid() % 100000}"
    both = [Machine(number, cable) for number in range(2)]
    made = ip("link", "add", both[0].card, "type", "veth", "peer", "name", both[1].card)
    problem = made.stderr or next(filter(None, (machine.set_up() for machine in both)), "")
    if not problem:
        yield both
    for machine in both:
        machine.end()
        ip("netns", "del", machine.name)  # and the end of the cable with it
    ip("link", "del", both[0].card)
    if problem:
        pytest.skip(f"two network namespaces cannot be made here: {problem.strip()}")


def wait_for(condition, what):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 240, what
        time.sleep(0.05)


@pytest.mark.campaign
def test_a_lost_machine_loses_nothing(machines, tmp_path):
    world = tiny.build(str(tmp_path / "world"))
    wrapper, signs = tiny.wrap(tmp_path / "wrapper.py", PAUSE), tmp_path / "signs"
    keys = dict(checkpoint_interval=1, max_iters=3, timeout=10, reward_timeout=5)
    args, out = world.grpo(tmp_path / "out", **keys), tmp_path / "out"

    signs.mkdir()
    runs = [machine.start(wrapper, args, SIGNS=str(signs), PAUSE_AT="2") for machine in machines]
    wait_for(lambda: len(list(signs.iterdir())) == 2 or any(run.ended() for run in runs), "both ranks pause")
    assert not any(run.ended() for run in runs), [run.said() for run in runs]

    # a machine loses its power: the other one says so in one line, when `timeout` is over
    machines[1].lose()
    (signs / "go").touch()
    lines = runs[0].lines()
    assert len(lines) == 1 and "iteration 2, rollout: lost touch with the other ranks" in lines[0], lines
    assert os.path.exists(out / "checkpoint-000002")
    machines[0].end()

    # the other one goes on with two ranks: not a bit is another
    cases = dict(again=[one_run("grpo.py", *[args] * 2)], never=[one_run("grpo.py", *[world.grpo("out", **keys)] * 2)])
    (alone,), (never,) = forked(str(tmp_path), cases).values()
    assert alone["codes"] == [0, 0] and "checkpoint-000002" in alone["stdout"][0], alone
    assert never["codes"] == [0, 0], never
    assert tiny.distance(f"{out}/policy", f"{tmp_path}/never/out/policy") == 0
    logs = [[tiny.measured(record) for record in tiny.read_log(str(folder))] for folder in (out, tmp_path / "never/out")]
    assert logs[0] == logs[1]
