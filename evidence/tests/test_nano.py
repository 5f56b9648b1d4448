"""
nano/ppo.py and nano/grpo.py, alone in an empty folder: in float64 they end in the weights of ppo.py
and grpo.py, for four families, on one rank and two, with other keys, and after a kill.
"""
import ast
import difflib
import importlib
import json
import os
import re
import signal

import pretend
import pytest
import transformers
from configurator import read_keys
from test_families import HEADS
from test_model import random_model, written
from tiny import (ENDS, ROOT, Started, assert_same_weights, keys_of, read_log, read_weights,
                  save_random, typed, well, write)

TRAINED = dict(ppo=("policy", "value_model"), grpo=("policy",))


def save_family(folder, kind, scalar):
    """A random model of a family, with its tokenizer; scalar: a reward model with a shift."""
    if kind in ("gpt2", "neox"):
        save_random(folder, kind, seed=1 + scalar, scalar=scalar, shift=0.25 if scalar else None)
        return
    model = random_model(kind, HEADS, scalar).double()
    if scalar:
        model.config.score_shift = 0.25
    else:  # some letters are likely, and so are the ends
        model.get_output_embeddings().weight.data[[*b"abcdxyz", *ENDS]] *= 4
        model.generation_config.eos_token_id = ENDS
    written(folder, model)


def lines_of(script):
    with open(f"{ROOT}/nano/{script}.py", encoding="utf-8") as f:
        return f.read().splitlines()


def keys_of_nano(script):
    """The keys that a file of nano/ has, with their defaults."""
    body = ast.parse("\n".join(lines_of(script))).body
    end = next(i for i, node in enumerate(body) if ast.unparse(node).startswith("keys ="))
    return {node.targets[0].id: getattr(node.value, "value", None) for node in body[:end]
            if isinstance(node, ast.Assign)}


def start(script, folder, keys, ranks=1, config=False, edits=(), **how):
    """
    nano/script.py, copied into an empty folder, with these keys, typed or in a config file. edits:
    pairs of an old text, which stands there once, and a new one, as by a fork.
    """
    os.makedirs(folder, exist_ok=True)
    text = "\n".join(lines_of(script))
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = write(f"{folder}/{script}.py", text)
    if config:  # it may have keys that only quartet has
        lines = "".join(f"{name} = {x!r}\n" for name, x in keys.items())
        argv = [write(folder / "config.py", lines), "--out_dir=out"]
    else:
        known = {name: x for name, x in keys.items() if name in keys_of_nano(script)}
        argv = typed(dict(out_dir="out") | known)
    return Started(file, argv, str(folder), ranks, **how).wait()


def nano(*args, **how):
    """The same, to its end: what each rank has left."""
    result = start(*args, **how)
    assert set(result.codes) == {0}, result
    return result


def keys_for(world, script, **changed):
    """Keys of a small run that scores by a reward model."""
    return keys_of(world, f"{script}.py", **dict(
        eval_path="", reward_path=world.reward, reward_functions="reward_model") | changed)


def assert_moved(policy_path, out):
    before, after = read_weights(policy_path), read_weights(f"{out}/policy")
    assert max((before[name] - after[name]).abs().max().item() for name in after) > 1e-3


@pytest.mark.parametrize("script, kind", [
    ("ppo", "gpt2"), ("ppo", "qwen3"), ("grpo", "neox"), ("grpo", "llama")])
def test_the_weights_of_quartet(world, kind, script, tmp_path):
    for name in ("policy", "reward"):
        save_family(f"{tmp_path}/{name}", kind, scalar=name == "reward")
    keys = keys_for(world, script, policy_path=f"{tmp_path}/policy",
                    reward_path=f"{tmp_path}/reward")
    quartet = well(f"{script}.py", tmp_path / "quartet", keys)
    for ranks, how in ((1, {}), (2, dict(config=True, before=pretend.begin))):
        result = nano(script, tmp_path / f"{ranks}", keys | dict(
            device_type="cuda" if how else "cpu"), ranks, **how)
        assert_same_weights(quartet, f"{tmp_path}/{ranks}/out", TRAINED[script], 1e-6)
        records = [json.loads(line) for line in result.out[0].splitlines()]
        for ours, theirs in zip(records, read_log(quartet), strict=False):
            assert ours["kl"] == pytest.approx(theirs["objective/kl"], abs=1e-6)
            assert ours["score"] == pytest.approx(theirs["objective/scores"], abs=1e-6)
            assert ours["length"] == theirs["objective/length"]
    assert_moved(keys["policy_path"], quartet)
    # transformers loads what is there, and a reward model's shift is in it
    assert transformers.AutoModelForCausalLM.from_pretrained(f"{tmp_path}/1/out/policy")
    if script == "ppo":
        with open(f"{tmp_path}/1/out/value_model/config.json", encoding="utf-8") as f:
            assert json.load(f)["score_shift"] == 0.25


@pytest.mark.parametrize("script, ranks, more", [
    ("ppo", 1, dict(
        gamma=0.9, lam=0.5, cliprange=0.02, cliprange_value=0, vf_coef=1.0, kl_coef=0.0,
        grad_clip=0.3, value_learning_rate=3e-2, num_minibatches=3, micro_batch_size=1)),
    ("ppo", 2, dict(
        missing_eos_penalty=0, temperature=1.3, ppo_epochs=3, num_minibatches=1, seed=7,
        micro_batch_size=9, batch_size=11, cliprange_value=0.01, adam_eps=1e-3, lam=0.0)),
    ("ppo", 1, dict(max_new_tokens=1, batch_size=3, gamma=0.0)),
    ("grpo", 1, dict(
        kl_coef=0.5, cliprange=0.02, cliprange_high=0.3, grad_clip=0.0, num_iterations=3,
        missing_eos_penalty=2.0)),
    ("grpo", 2, dict(
        group_size=2, batch_size=8, num_minibatches=1, micro_batch_size=3, temperature=1.4)),
    ("grpo", 1, dict(max_new_tokens=1, seed=5, num_minibatches=3, group_size=6))])
def test_other_keys(world, script, ranks, more, tmp_path):
    """Also with a reward model of others, without a score_shift."""
    keys = keys_for(world, script, reward_path=world.uncentered, **more)
    quartet = well(f"{script}.py", tmp_path / "quartet", keys)
    nano(script, tmp_path / "nano", keys, ranks)
    assert_same_weights(quartet, f"{tmp_path}/nano/out", TRAINED[script], 1e-6)
    assert_moved(world.policy, quartet)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """{script: (keys, the folder of a run with them on two ranks)}, which nobody kills."""
    runs = {script: (keys_for(world, script, max_iters=3, checkpoint_interval=1),
                     tmp_path_factory.mktemp(script)) for script in TRAINED}
    for script, (keys, folder) in runs.items():
        nano(script, folder, keys, ranks=2)
    return runs


KILLS = {  # before which call: of a module, a function; and of which number
    "in a rollout": ("transformers", "DynamicCache", 3), "while it saves": ("torch", "save", 2)}


@pytest.mark.parametrize("script, when", [
    *(("ppo", when) for when in KILLS), ("grpo", "while it saves")])
def test_a_killed_run_ends_in_the_same_bits(whole, script, when, tmp_path):
    """Rank 1, or rank 0 that writes the checkpoint, is gone; then the same command again."""
    keys, uncut = whole[script]

    def kill(rank):
        module, name, number = KILLS[when]
        module, calls = importlib.import_module(module), []
        function = getattr(module, name)

        def called(*args, **kwargs):
            calls.append(1)
            if len(calls) == number and rank == (name == "DynamicCache"):
                if name == "save":  # half of the file is there
                    args[1].write(b"half")
                    args[1].flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        setattr(module, name, called)

    cut = start(script, tmp_path, keys, ranks=2, before=kill)
    assert -signal.SIGKILL in cut.codes and not os.path.exists(tmp_path / "out/policy"), cut
    again = nano(script, tmp_path, keys, ranks=2)
    assert json.loads(again.out[0].splitlines()[0])["iteration"] in (1, 2)
    assert_same_weights(f"{uncut}/out", f"{tmp_path}/out", TRAINED[script])


END = "    if (iteration + 1) % checkpoint_interval"
SLIPS = {  # a word of the line; an old text and a new one
    "another rank": (END, f"    learned[0].data += rank\n{END}"),  # weights that part
    "a weight is not finite": (  # the least and the largest of the ranks' numbers may drop a NaN
        END, f"    learned[0].data[:] = learned[0].data * (torch.nan if rank else 1)\n{END}"),
    "a frozen model": (END, f"    everything[-1].data += 1\n{END}"),
    "log-probs differ": ("mask = torch.tensor([[0]", "mask = torch.tensor([[1]"),
    "not finite": ("* ratio\n", "* ratio * torch.nan\n")}


def test_what_goes_wrong_stops_the_run(world, tmp_path):
    """Slips of the pen, another run's folder, an unknown key."""
    keys = keys_for(world, "ppo", checkpoint_interval=1, max_iters=2)
    for number, (said, edit) in enumerate(SLIPS.items()):
        folder = tmp_path / str(number)  # a traceback names it: it may have no word of `said`
        result = start("ppo", folder, keys, ranks=2, edits=[edit])
        assert 0 not in result.codes and said in "".join(result.err), (said, result)
        assert not os.path.exists(folder / "out/policy")
    nano("ppo", tmp_path, keys)
    other = start("ppo", tmp_path, keys | dict(seed=2))
    assert other.codes == [1] and "a run with another seed" in other.err[0]
    unknown = Started(f"{tmp_path}/ppo.py", ["--learnin_rate=1"], str(tmp_path)).wait()
    assert unknown.codes == [1] and "no key learnin_rate" in unknown.err[0]


def test_the_ladder_is_short_and_stands_alone():
    """350 lines; quartet's names and defaults; GRPO is PPO with lines left out."""
    for script in TRAINED:
        lines = lines_of(script)
        assert len(lines) <= 350 and max(map(len, lines)) <= 100
        imported = re.findall(r"^(?:import|from) (\w+)", "\n".join(lines), re.MULTILINE)
        assert not {f"{name}.py" for name in imported} & {*os.listdir(ROOT)}
        theirs = read_keys(f"{ROOT}/{script}.py") | read_keys(f"{ROOT}/config/keys.py")
        for name, x in keys_of_nano(script).items():
            assert name in ("out_dir", "reward_path") or x in (None, theirs[name].default), name
    ours = [line for line in difflib.ndiff(*map(lines_of, TRAINED)) if line[0] == "+"]
    assert len(ours) <= 60, len(ours)
