"""
What a fork keeps from one iteration to the next: an optimizer of its own, and run.state. A run that
was stopped must go on with all of it; what a checkpoint cannot have is refused by its name.
"""
import os
import re
import signal
import zlib
from collections import defaultdict, deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from checkpoint import optimizer_tensors, settings_of
from errors import BadInput
from evidence.proved import MISTAKES, copy_of
from gae import compute_gae
from model import scaled_logits
from options.fork_state import put_back, put_into_state, restored, values_of
from run import Run, make_optimizer
from small_world import rooms_of, wrap
from tiny import (ROOT, assert_one_line, assert_same_run, assert_stopped, at, keys_of,
                  keys_of_system, read_log, read_weights, run, well, write)


class Odd(torch.optim.Optimizer):
    """
    An optimizer whose steps depend on all that it keeps: numbers, texts and lists in its groups (as
    Prodigy and ScheduleFree do), in the state of each parameter, and by itself; and tensors of
    several dtypes.
    """

    def __init__(self, parameters, lr):
        super().__init__(list(parameters), dict(lr=lr, d=1e-6, kind="a", past=[], least=0.0))
        self.count, self.table = 0, {}

    @torch.no_grad()
    def step(self):
        self.count += 1
        self.table["x"] = self.table.get("x", 0.5) * 1.5
        for group in self.param_groups:
            group["d"] = group["d"] * 1.1 + 1e-7 / 3
            group["kind"] += "b"
            group["past"].append(group["d"])
            group["least"] = -float("inf") if group["least"] == 0 else float("nan")
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(n=0, norms=[], wide=torch.zeros((), dtype=torch.float64),
                             narrow=torch.zeros_like(p, dtype=torch.bfloat16), mask=p > 0)
                s["n"] += 1
                norm = p.grad.norm()
                s["norms"].append(getattr(norm, "full_tensor", lambda norm=norm: norm)().item())
                s["wide"] += s["norms"][-1] / 3
                s["narrow"].mul_(0.9).add_(p.grad)
                kept = [self.count, self.table, *(x for k, x in group.items() if k != "params"),
                        s["n"], s["norms"], s["wide"].item(), s["wide"].dtype]
                size = zlib.crc32(repr(kept).encode()) / 2**32
                p.sub_(s["narrow"].to(p.dtype) * s["mask"], alpha=group["lr"] * size)


class Drifting(torch.optim.AdamW):
    """torch's, whose groups' settings move with each step. Its own it hands on to its base."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, **settings)

    def step(self, closure=None):
        for group in self.param_groups:
            group["weight_decay"] = group["weight_decay"] * 0.7 + 0.3
            group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])
        super().step()


class Plain:
    """No optimizer of torch: Polyak's momentum, its steps growing."""

    def __init__(self, parameters, lr, **more):
        self.param_groups = [dict(params=list(parameters), lr=lr, t=0, **more)]
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        group["t"] += 1
        for p in (p for p in group["params"] if p.grad is not None):
            s = self.state[p]
            s["m"] = 0.9 * s.get("m", 0.0) + p.grad
            p.sub_(s["m"], alpha=group["lr"] * 0.01 * group["t"])


@pytest.mark.parametrize("kind, ranks, stage", [
    (Drifting, 1, ""), (Plain, 1, ""), (Odd, 2, "1"), (Odd, 2, "2")])
def test_a_run_goes_on_with_all_that_an_optimizer_keeps(world, tmp_path, kind, ranks, stage):
    """Also where two ranks share it."""
    keys = keys_of(world, "sft.py", max_iters=3, dtype="float32", learning_rate=1e-3,
                   zero_stage=stage, optim=f"policy={__file__}:{kind.__name__}")
    whole = well("sft.py", tmp_path / "whole", keys, ranks=ranks)
    cut = run("sft.py", tmp_path / "cut", keys, ranks=ranks, before=at(1, signal.SIGTERM))
    assert_stopped(cut, tmp_path / "cut")
    out = well("sft.py", tmp_path / "cut", keys, ranks=ranks)
    assert_same_run(whole, out)
    assert len({record["loss/sft"] for record in read_log(out)[:-1]}) == 3


class Apart(torch.optim.SGD):
    """Of its own a number that is another one on each rank."""

    def step(self, closure=None):
        super().step()
        self.param_groups[0]["rank"] = torch.distributed.get_rank()


@pytest.mark.parametrize("stage", ["", "1"])
def test_numbers_of_an_optimizer_are_those_of_all_ranks(world, tmp_path, stage):
    """Only rank 0's would be saved."""
    keys = keys_of(world, "sft.py", zero_stage=stage, optim=f"policy={__file__}:Apart")
    result = run("sft.py", tmp_path, keys, ranks=2)
    assert 0 not in result.codes and "differ between the ranks" in "".join(result.err), result


@pytest.mark.parametrize("text, more, said", [
    ("class A:\n    def __init__(self, parameters, lr): pass", {}, "'A' .*'step'"),
    ("class A:\n    def __init__(self, parameters, beta): pass", {}, "TypeError.*beta"),
    ("class B: pass", {}, "'A'.*B"),
    ("from torch.optim import SGD as A", dict(offload="policy=optimizer"), "offload.*AdamW"),
    ("def A(parameters, lr): pass", dict(weight_decay=0.1), "weight_decay = 0.1")])
def test_an_optimizer_in_a_file_that_is_wrong(tmp_path, text, more, said):
    system = keys_of_system(optim=f"{write(tmp_path / 'mine.py', text)}:A", **more)
    with pytest.raises(BadInput, match=f"mine.py.*{said}|{said}.*mine.py"):
        make_optimizer(torch.nn.Linear(2, 3), "policy", system, 0.1, (0.8, 0.95), 1e-3)


@pytest.mark.parametrize("kind, decay, keys", [
    (Drifting, 0.1, dict(betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)),
    (Odd, 0.0, dict(d=1e-6))])
def test_what_an_optimizer_in_a_file_is_given(kind, decay, keys):
    """What its class takes by name, and its base where it hands all on."""
    model = torch.nn.Linear(2, 3)
    system = keys_of_system(optim=f"policy={__file__}:{kind.__name__}", weight_decay=decay)
    made, other = (make_optimizer(model, name, system, 0.25, (0.8, 0.95), 1e-3)
                   for name in ("policy", "value"))
    first, *rest = made.param_groups
    assert type(made).__name__ == kind.__name__ and isinstance(other, torch.optim.AdamW)
    assert first["lr"] == 0.25 and keys.items() <= first.items() and len(rest) == (decay > 0)
    assert not rest or rest[0]["weight_decay"] == 0 and rest[0]["params"] == [model.bias]


def stepped(kind):
    """A model and its optimizer behind the first step; and its settings before."""
    model = torch.nn.Linear(2, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    made = settings_of(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer, made


def test_a_setting_that_is_typed_anew_is_the_new_one():
    """Only what the steps have changed comes out of the checkpoint, not what a key says."""
    model, optimizer, made = stepped(Drifting)
    anew = Drifting(model.parameters(), lr=0.2, eps=2.0)
    put_back(model, anew, values_of("policy", model, optimizer, made))
    (before,), (group,) = optimizer.param_groups, anew.param_groups
    assert (group["eps"], group["lr"]) == (2.0, 0.2)
    assert group["betas"] == before["betas"] == (0.9 * 0.9, 0.999)
    assert group["weight_decay"] == before["weight_decay"] > 0.3


def keeps(make, where="state", word="hoard"):
    """An optimizer class that keeps what make(p) gives in one place."""
    class Keeps(Plain):
        def step(self):
            super().step()
            (group,) = self.param_groups
            for p in group["params"]:
                places = dict(state=self.state[p], group=group, itself=vars(self),
                              elsewhere=self.state)
                places[where][word] = make(p)

    return Keeps


def inner(p):
    return torch.optim.SGD([p.detach().clone()], lr=1)


# this word is the optimizer within in torch's wrapper at ZeRO stage 1
Lookahead = keeps(inner, "itself", "optim")


@pytest.mark.parametrize("kind", [
    keeps(lambda p: [torch.zeros_like(p)]), keeps(lambda p: deque([1.0])),
    keeps(lambda p: {1.5, 2.5}.union), keeps(lambda p: {"a": torch.ones(2)}),
    keeps(lambda p: Plain([p], 0.1)), keeps(lambda p: torch.full((), p.norm().item()), "group"),
    partial(Plain, hoard=torch.tensor(0.12345)),  # its group's, and it stays what it was
    keeps(lambda p: p.clone(), "itself"), keeps(lambda p: [p * 2], "itself"),
    keeps(lambda p: {p: p.clone()}, "itself"), keeps(lambda p: torch.Generator(), "itself"),
    keeps(inner, "itself"), keeps(lambda p: dict(m=torch.zeros_like(p)), "elsewhere"),
    keeps(lambda p: dict(m=1.0), "elsewhere")])
def test_what_a_checkpoint_cannot_have_is_refused_behind_the_first_step(kind):
    with pytest.raises(BadInput, match="^policy's optimizer keeps .*'hoard'"):
        values_of("policy", *stepped(kind))


def test_what_is_refused_ends_the_run_in_a_line(world, tmp_path):
    """Behind the first step: no iteration is in the log."""
    keys = keys_of(world, "sft.py", max_iters=9, val_path="", optim=f"{__file__}:Lookahead")
    assert_one_line(run("sft.py", tmp_path, keys), "sft.py", "'optim'")
    assert not (tmp_path / "out/log.jsonl").exists()


def remembers(change):
    """For `before`: the page of ppo.py changes run.state in each iteration."""
    def before(rank):
        runs = []
        wrap([Run], "__init__", then=lambda _, run, *keys: runs.append(run))
        wrap(rooms_of(ROOT), "summarize",
             first=lambda *_: change(rank, runs[0].state, runs[0].iteration))

    return before


# names that run.py itself has for its own figures, as "run/said", are free
SOUND = dict(weights=[0.5], said="no", broken=1, finished=0.5, optimizers={}, loss_scale=2.0,
             count=3, share=0.1, flag=True, word="ä\ud800", none=None, many=[1, 2.5, [None, "a"]],
             table={"a": [1], "b": {"c": -0.0}}, nan=float("nan"), inf=float("-inf"))


def test_what_json_has_as_it_was_goes_on(world, tmp_path):
    def change(rank, state, iteration):
        if iteration > 0:
            assert repr({name: state[name] for name in SOUND}) == repr(SOUND)
        state |= SOUND

    keys = keys_of(world, "ppo.py", eval_path="", checkpoint_interval=1, max_iters=2)
    well("ppo.py", tmp_path, keys, before=remembers(change))
    well("ppo.py", tmp_path, keys | dict(max_iters=3), before=remembers(change))


@pytest.mark.parametrize("name, x", [("iteration", 7), (3, 4), *(("mine", x) for x in (
    torch.ones(()), torch.ones(3), (1, 2), [1, (2,)], {1: 2.0}, {"a": {True: 1}}, {1, 2}, b"a",
    1 + 2j, defaultdict(int, a=1), object(), range(3), dict(a=1).keys(), torch.float32))])
def test_what_json_changes_is_refused_by_name(name, x):
    with pytest.raises(TypeError, match=re.escape(f"run.state[{name!r}]")):
        put_into_state(SimpleNamespace(state={name: x}, optimizers={}))


def test_the_rank_whose_state_is_wrong_names_it(world, tmp_path):
    """In the iteration in which it becomes wrong: there is no checkpoint before the last one."""
    def change(rank, state, iteration):
        if rank and iteration == 1:
            state["mine"] = torch.ones(())

    keys = keys_of(world, "ppo.py", eval_path="", timeout=20, max_iters=4, checkpoint_interval=4)
    result = run("ppo.py", tmp_path, keys, ranks=2, before=remembers(change))
    assert 0 not in result.codes and "TypeError: run.state['mine']" in result.err[1], result
    # rank 0, whose state is right, may have written its record
    assert [record["iteration"] for record in read_log(tmp_path / "out")] in ([0], [0, 1])


def leaves_out(rank):
    wrap([Run], "__init__", first=lambda *keys: keys[7].pop("value_model"))  # of its optimizers


def has_more(parameters, lr):
    return torch.optim.AdamW([*parameters, torch.nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("optim, before, said", [
    ("", leaves_out, "value_model has"), ("has_more", lambda rank: None, "no model has")])
def test_each_trained_parameter_has_a_model_and_its_optimizer(world, tmp_path, optim, before, said):
    """A checkpoint would lack one that is stepped, but of no model."""
    keys = keys_of(world, "ppo.py", eval_path="", optim=optim and f"policy={__file__}:{optim}")
    result = run("ppo.py", tmp_path, keys, before=before)
    assert result.codes == [1] and f"TypeError: {said}" in result.err[0], result
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("odd", [lambda t: t[:-1], lambda t: t.reshape(-1), lambda t: None])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_tensor_of_another_shape_is_refused(tmp_path, key, odd):
    """torch's kernels would read beside it; a right manifest does not know."""
    model, optimizer, _ = stepped(torch.optim.AdamW)
    tensors = optimizer_tensors(model, optimizer)
    write(tmp_path / "state.json", "{}")
    assert len([*restored(tmp_path, "policy", model, optimizer, tensors.items())]) == 6
    tensors[f"weight.{key}"] = odd(tensors[f"weight.{key}"])
    given = {name: t for name, t in tensors.items() if t is not None}
    with pytest.raises(BadInput, match=f"weight.{key}"):
        list(restored(tmp_path, "policy", model, optimizer, given.items()))


FIFTH = {  # in ppo.py: what stands there, and what a fork puts in its place
    "from load import autocast": "from load import load, autocast",
    "run = Run(  # COLLECTIVE\n": """\
models["critic"] = critic = load(
    f"{policy_path}/../reward", "reward", system, device, head="scalar", trained=True)
optimizers["critic"] = make_optimizer(critic, "reward", system, 1e-2, (beta1, beta2), adam_eps)
run = Run(  # COLLECTIVE
""",
    "    sums = {}  # {metric: (sum, count)}, measured": """\
    lrs["critic"] = 1e-2
    sums = {}  # {metric: (sum, count)}, measured""",
    "                # the value model: squared error, with": """\
                guessed = response_values(critic, mb)  # (b, W)
                (masked_sum((guessed - mb["index"][:, None]) ** 2, m) / token_count).backward()
                add_up(sums, m, {"loss/critic": (guessed - mb["index"][:, None]) ** 2})
                # the value model: squared error, with"""}


def test_a_fifth_model_that_is_trained(world, tmp_path):
    """
    Saved, resumed by two ranks that share it; its folder has a card, and is the run's: it may be
    none of its inputs, nor another's work.
    """
    models, keys = ("policy", "value_model", "critic"), keys_of(world, "ppo.py")
    script = copy_of(f"{tmp_path}/copy", [(None, *edit) for edit in FIFTH.items()], script="ppo")
    script += "/ppo.py"
    whole = well(script, tmp_path / "whole", keys)
    cut = run(script, tmp_path / "cut", keys, before=at(1, signal.SIGTERM))
    assert_stopped(cut, tmp_path / "cut")
    out = well(script, tmp_path / "cut", keys | dict(zero_stage="3"), ranks=2)
    assert_same_run(whole, out, models, 1e-9)
    log = [record["loss/critic"] for record in read_log(whole) if "loss/critic" in record]
    with open(f"{whole}/critic/README.md", encoding="utf-8") as f:
        assert "# critic" in f.read() and len(log) == 3 and log[0] != log[1]
    assert read_weights(f"{whole}/critic").keys() == read_weights(world.reward).keys()
    again = keys | dict(reward_path=f"{tmp_path}/whole/out/critic")
    assert_one_line(run(script, tmp_path / "whole", again), "ppo.py", "reward_path", "out_dir")
    os.makedirs(tmp_path / "other/out/critic")
    assert_one_line(run(script, tmp_path / "other", keys), "ppo.py", "critic", "no run's")


@pytest.mark.parametrize("script, edits", [
    # the losses are of log-probs of this step
    ("grpo", MISTAKES["no_detach"][3:]),
    ("ppo", [(None, 'ratio = (logprobs - mb["old_logprobs"])', "ratio = (logprobs - logprobs)")])])
def test_a_policy_without_a_gradient_is_said_once(world, tmp_path, script, edits):
    keys = keys_of(world, f"{script}.py", kl_coef=0, max_iters=2, eval_path="")
    copy = copy_of(f"{tmp_path}/copy", edits, script=script)
    result = run(f"{copy}/{script}.py", tmp_path / "run", keys)
    said = [line for line in result.out[0].splitlines() if "exactly 0" in line]
    assert result.codes == [0] and len(said) == 1 and said[0].startswith("warning: iteration 0")


@pytest.mark.parametrize("name, call", [
    ("temperature", lambda x: scaled_logits(x, x[0])),
    ("temperature", lambda x: scaled_logits(x, x[:, :1])),
    ("gamma", lambda x: compute_gae(x, x, x > 0, 1.0, x[:, :1])),
    ("lam", lambda x: compute_gae(x, x, x > 0, 1.0, x[0]))])
def test_a_tensor_in_the_place_of_a_number_is_named(name, call):
    """Some shapes would give numbers that are silently wrong, as a lam (B, 1) where B = T."""
    with pytest.raises(TypeError, match=rf"{name}.*\(4,"):
        call(torch.ones(4, 4))
