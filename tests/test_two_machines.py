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
import time

import pytest

import tiny
from tiny import forked, one_run

ADDRESSES = "192.0.2.1", "192.0.2.2"  # of a network for examples (RFC 5737)
# In iteration 2 each rank waits for the test: what is cut is then cut in the rollout, and nobody is writing to the disk.
PAUSE = """
import os, time
import prompts
batch_rows = prompts.batch_rows
def paused(seed, iteration, *rest):
    if iteration == 2:
        open(f"{os.environ['SIGNS']}/here-{RANK}", "w").close()
        while not os.path.exists(f"{os.environ['SIGNS']}/go"):
            time.sleep(0.05)
    return batch_rows(seed, iteration, *rest)
prompts.batch_rows = paused
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)


@pytest.fixture
def machines():
    """The names of two namespaces and of the cards of their cable: [(name, card), ...]."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root, and ip of iproute2, to make two network namespaces")
    both = [(f"quartet{os.getpid()}-{number}", f"q{os.getpid() % 100000}-{number}") for number in range(2)]
    steps = [("link", "add", both[0][1], "type", "veth", "peer", "name", both[1][1])]
    for (name, card), address in zip(both, ADDRESSES, strict=True):
        steps += [("netns", "add", name), ("link", "set", card, "netns", name),
                  ("-n", name, "addr", "add", f"{address}/24", "dev", card),
                  ("-n", name, "link", "set", "lo", "up"), ("-n", name, "link", "set", card, "up")]
    problem = next((done.stderr for done in map(lambda step: ip(*step), steps) if done.returncode), None)
    if problem is None:
        yield both
    for name, _ in both:
        ip("netns", "del", name)  # and its end of the cable with it
    if problem is not None:
        pytest.skip(f"two network namespaces cannot be made here: {problem.strip()}")


def start(number, machine, args, said, signs):
    """torchrun, as docs/scale.md has it. (Which machine is HOST, the name of one would say.)"""
    name, card = machine
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[0]}:29500", "--rdzv_id=first",
               f"--local_addr={ADDRESSES[number]}", f"--rdzv_conf=is_host={number == 0},join_timeout=120"]
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
               *meeting, *args]
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", PYTHONPATH=tiny.ROOT,
                                    GLOO_SOCKET_IFNAME=card, SIGNS=str(signs))
    with open(said, "w") as f:
        return subprocess.Popen(command, stdout=f, stderr=f, env=environment, cwd=tiny.ROOT, start_new_session=True)


def end(run):
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)  # the ranks die with torchrun
        run.wait()


def wait_for(condition, what):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 240, what
        time.sleep(0.05)


@pytest.mark.campaign
def test_a_lost_machine_loses_nothing(machines, world, tmp_path):
    signs, out = tmp_path / "signs", tmp_path / "out"
    keys = dict(checkpoint_interval=1, max_iters=3, timeout=10, reward_timeout=5)
    signs.mkdir()
    args, wrapper = world.grpo(out, **keys), tiny.wrap(tmp_path / "wrapper.py", PAUSE)
    runs = [start(number, machine, [wrapper, os.path.join(tiny.ROOT, "grpo.py"), *args], tmp_path / f"said-{number}", signs)
            for number, machine in enumerate(machines)]

    def lines():  # of our own. The other torchrun may go on for minutes, if it cannot reach this one
        return [line for line in (tmp_path / "said-0").read_text().splitlines() if line.startswith("grpo.py: error")]

    try:
        wait_for(lambda: len(list(signs.iterdir())) == 2 or any(run.poll() is not None for run in runs), "both ranks pause")
        # a machine loses its power, and nobody says goodbye: the other one says so in one line, when `timeout` is over
        assert ip("-n", machines[1][0], "link", "set", machines[1][1], "down").returncode == 0
        end(runs[1])
        (signs / "go").touch()
        wait_for(lambda: lines() or runs[0].poll() is not None, "a line")
        time.sleep(1)  # for a second one, which must not be
    finally:
        for run in runs:
            end(run)
    assert len(lines()) == 1 and "iteration 2, rollout: lost touch with the other ranks" in lines()[0], lines()

    # the other one goes on with two ranks: not a bit is another
    cases = dict(again=[one_run("grpo.py", *[args] * 2)], never=[one_run("grpo.py", *[world.grpo("out", **keys)] * 2)])
    (alone,), (never,) = forked(str(tmp_path), cases).values()
    assert alone["codes"] == [0, 0] and "checkpoint-000002" in alone["stdout"][0], alone
    assert never["codes"] == [0, 0], never
    tiny.assert_same_run(out, f"{tmp_path}/never/out")
