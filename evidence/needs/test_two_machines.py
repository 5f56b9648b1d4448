"""
Two machines: two network namespaces that only a cable joins, a veth pair. A rank in each has
nothing of the other but the network and the disk. One is lost, and the other goes on: what comes of
it has the bits of a run to which nothing has happened. It needs root and iproute2.

    python -m pytest evidence/needs/test_two_machines.py
"""
import ctypes
import os
import shutil
import signal
import subprocess
import time

import pytest

from tiny import Started, assert_same_run, keys_of, run, typed, well

ADDRESSES = "192.0.2.1", "192.0.2.2"  # of a network for examples (RFC 5737)
CLONE_NEWNET = 0x40000000  # of setns: the network is changed


def ip(words):
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=30)


@pytest.fixture
def machines():
    """The names of two namespaces and of the cards of their cable: [(name, card), ...]."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root, and ip of iproute2, to make two network namespaces")
    both = [(f"quartet{os.getpid()}-{number}", f"q{os.getpid() % 100000}-{number}")
            for number in range(2)]
    steps = [f"link add {both[0][1]} type veth peer name {both[1][1]}"]
    for (name, card), address in zip(both, ADDRESSES, strict=True):
        steps += [f"netns add {name}", f"link set {card} netns {name}",
                  f"-n {name} addr add {address}/24 dev {card}",
                  f"-n {name} link set lo up", f"-n {name} link set {card} up"]
    problem = next((done.stderr for done in map(ip, steps) if done.returncode), None)
    if problem is None:
        yield both
    for name, _ in both:
        ip(f"netns del {name}")  # and its end of the cable with it
    if problem is not None:
        pytest.skip(f"two network namespaces cannot be made here: {problem.strip()}")


def test_a_lost_machine_loses_nothing(machines, world, tmp_path):
    """Its power is gone, and nobody says goodbye: the other one waits for `timeout`."""
    keys = keys_of(world, "grpo.py", checkpoint_interval=1, timeout=6, reward_timeout=5)

    def before(rank):
        import prompts

        name, card = machines[rank]
        with open(f"/run/netns/{name}") as f:
            assert ctypes.CDLL(None).setns(f.fileno(), CLONE_NEWNET) == 0
        os.environ |= dict(MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME=card)
        drawn = prompts.batch_rows

        def batch_rows(seed, iteration, *rest, **how):
            if iteration == 2:  # what is cut here is cut while nobody writes to the disk
                open(f"here-{rank}", "w").close()
                while not os.path.exists("go"):
                    time.sleep(0.02)
            return drawn(seed, iteration, *rest, **how)

        prompts.batch_rows = batch_rows

    started = Started("grpo.py", typed(dict(out_dir="out") | keys), str(tmp_path), 2, before)
    end = time.time() + 60
    while not all(os.path.exists(tmp_path / f"here-{rank}") for rank in range(2)):
        assert time.time() < end, [open(tmp_path / f"stderr-{rank}").read() for rank in range(2)]
        time.sleep(0.02)
    name, card = machines[1]
    assert ip(f"-n {name} link set {card} down").returncode == 0
    os.kill(started.pids[1], signal.SIGKILL)
    open(tmp_path / "go", "w").close()
    result = started.wait(60)
    assert result.codes == [1, -signal.SIGKILL], result
    said = [line for line in result.err[0].splitlines() if not line.startswith("[W")]  # torch's
    assert len(said) == 1 and "iteration 2, rollout: lost touch with another rank" in said[0]
    # the other one goes on with two ranks: not a bit is another
    again = run("grpo.py", tmp_path, keys, ranks=2)
    assert again.codes == [0, 0] and "checkpoint-000002" in again.out[0], again
    assert_same_run(well("grpo.py", tmp_path / "never", keys, ranks=2), f"{tmp_path}/out")
