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
import shutil
import signal

import pytest
import torch
import transformers
from byte_tokenizer import write_byte_tokenizer
from tiny import (ENDS, EOS, MARKERS, PAD, ROOT, VOCABULARY, Started, keys_of, read_log,
                  read_weights, save_random, typed, well, write)

TRAINED = dict(ppo=("policy", "value_model"), grpo=("policy",))


def save_family(folder, kind, seed, **scalar):
    """A random model of a family, with its tokenizer; scalar: scalar=True and a shift."""
    if kind in ("gpt2", "neox"):
        return save_random(folder, kind, seed=seed, **scalar)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD,
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64, tie_word_embeddings=False)
    if scalar:
        config.num_labels, config.score_shift = 1, scalar["shift"]
    auto = (transformers.AutoModelForSequenceClassification if scalar else
            transformers.AutoModelForCausalLM)
    model, drawn = auto.from_config(config).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.empty(p.shape).normal_(float(p.dim() == 1), 0.2, generator=drawn))
        if not scalar:  # some letters are likely, and so are the ends
            model.get_output_embeddings().weight[[*b"abcdxyz", *ENDS]] *= 4
            model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, MARKERS)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """{family: the keys of its policy and its reward model}."""
    folder, made = tmp_path_factory.mktemp("families"), {}
    for kind in ("gpt2", "neox", "llama", "qwen3"):
        made[kind] = dict(policy_path=f"{folder}/{kind}", reward_path=f"{folder}/{kind}_reward")
        save_family(made[kind]["policy_path"], kind, 1)
        save_family(made[kind]["reward_path"], kind, 2, scalar=True, shift=0.25)
    return made


def keys_of_nano(script):
    """The keys that a file of nano/ has, with their defaults."""
    with open(f"{ROOT}/nano/{script}.py", encoding="utf-8") as f:
        body = ast.parse(f.read()).body
    lines = body[:next(i for i, node in enumerate(body) if ast.unparse(node).startswith("keys ="))]
    return {node.targets[0].id: getattr(node.value, "value", None) for node in lines
            if isinstance(node, ast.Assign)}


def start(script, folder, keys, ranks=1, config=False, **how):
    """nano/script.py, copied into an empty folder, with these keys, typed or in a config file."""
    os.makedirs(folder, exist_ok=True)
    file = shutil.copy(f"{ROOT}/nano/{script}.py", folder)
    if config:  # it may have keys that only quartet has
        lines = "".join(f"{name} = {x!r}\n" for name, x in keys.items())
        argv = [write(folder / "config.py", lines), "--out_dir=out"]
    else:
        known = {name: x for name, x in keys.items() if name in keys_of_nano(script)}
        argv = typed(dict(out_dir="out") | known)
    return Started(file, argv, str(folder), ranks, **how)


def nano(*args, **how):
    """The same, to its end: what each rank has left."""
    result = start(*args, **how).wait()
    assert set(result.codes) == {0}, result
    return result


def keys_for(world, script, **changed):
    """Keys of a small run that scores by a reward model."""
    return keys_of(world, f"{script}.py", **dict(
        eval_path="", reward_path=world.reward, reward_functions="reward_model") | changed)


def assert_same_weights(one, other, script, tolerance=1e-6):
    for model in TRAINED[script]:
        a, b = (read_weights(f"{folder}/{model}") for folder in (one, other))
        assert a.keys() == b.keys()
        assert max((a[name] - b[name]).abs().max().item() for name in a) <= tolerance, model


def assert_moved(policy_path, out):
    before, after = read_weights(policy_path), read_weights(f"{out}/policy")
    assert max((before[name] - after[name]).abs().max().item() for name in after) > 1e-3


@pytest.mark.parametrize("script, kind", [
    ("ppo", "gpt2"), ("ppo", "qwen3"), ("grpo", "neox"), ("grpo", "llama")])
def test_the_weights_of_quartet(world, families, kind, script, tmp_path):
    keys = keys_for(world, script, **families[kind])
    quartet = well(f"{script}.py", tmp_path / "quartet", keys)
    for ranks in (1, 2):
        result = nano(script, tmp_path / f"{ranks}", keys, ranks, config=ranks == 2)
        assert_same_weights(quartet, f"{tmp_path}/{ranks}/out", script)
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


PPO = dict(
    a=dict(gamma=0.9, lam=0.5, cliprange=0.02, cliprange_value=0, vf_coef=1.0, kl_coef=0.0,
           grad_clip=0.3, value_learning_rate=3e-2, num_minibatches=3, micro_batch_size=1),
    b=dict(missing_eos_penalty=0, temperature=1.3, ppo_epochs=3, num_minibatches=1, seed=7,
           micro_batch_size=9, batch_size=11, cliprange_value=0.01, adam_eps=1e-3, lam=0.0),
    c=dict(max_new_tokens=1, batch_size=3, gamma=0.0))
GRPO = dict(
    a=dict(kl_coef=0.5, cliprange=0.02, cliprange_high=0.3, grad_clip=0.0,
           num_iterations=3, missing_eos_penalty=2.0),
    b=dict(group_size=2, batch_size=8, num_minibatches=1, micro_batch_size=3, temperature=1.4),
    c=dict(max_new_tokens=1, seed=5, num_minibatches=3, group_size=6))


@pytest.mark.parametrize("script, name", [(script, name) for script in ("ppo", "grpo")
                                          for name in "abc"])
def test_other_keys(world, script, name, tmp_path):
    """Also with a reward model of others, without a score_shift."""
    more = dict(ppo=PPO, grpo=GRPO)[script][name]
    keys = keys_for(world, script, reward_path=world.uncentered, **more)
    quartet = well(f"{script}.py", tmp_path / "quartet", keys)
    nano(script, tmp_path / "nano", keys, ranks=1 + (name == "b"))
    assert_same_weights(quartet, f"{tmp_path}/nano/out", script)
    assert_moved(world.policy, quartet)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """{script: (keys, the folder of a run with them on two ranks)}, which nobody kills."""
    runs = {script: (keys_for(world, script, max_iters=3, checkpoint_interval=1),
                     tmp_path_factory.mktemp(script)) for script in ("ppo", "grpo")}
    for script, (keys, folder) in runs.items():
        nano(script, folder / "whole", keys, ranks=2)
    return runs


@pytest.mark.parametrize("script, when", [
    ("ppo", "in a rollout"), ("ppo", "while it saves"), ("ppo", "behind a checkpoint"),
    ("grpo", "while it saves")])
def test_a_killed_run_ends_in_the_same_bits(whole, script, when, tmp_path):
    """Rank 1, or rank 0 that writes the checkpoint, is gone; then the same command again."""
    keys, uncut = whole[script]

    def kill(rank):
        module, name, nth = {
            "in a rollout": ("transformers", "DynamicCache", 3), "while it saves": (
                "torch", "save", 2), "behind a checkpoint": ("os", "replace", 2)}[when]
        module, calls = importlib.import_module(module), []
        function = getattr(module, name)

        def called(*args, **kwargs):
            calls.append(1)
            if len(calls) == nth and rank == (name == "DynamicCache"):
                if name == "save":  # half of the file is there
                    args[1].write(b"half")
                    args[1].flush()
                if name == "replace":
                    function(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        setattr(module, name, called)

    cut = start(script, tmp_path / "cut", keys, ranks=2, before=kill).wait()
    assert -signal.SIGKILL in cut.codes and not os.path.exists(tmp_path / "cut/out/policy"), cut
    again = nano(script, tmp_path / "cut", keys, ranks=2)
    assert json.loads(again.out[0].splitlines()[0])["iteration"] in (1, 2)
    assert_same_weights(f"{uncut}/whole/out", f"{tmp_path}/cut/out", script, 0.0)


def test_what_goes_wrong_stops_the_run(world, tmp_path):
    """Weights that part, a frozen model that moves, another run's folder, an unknown key."""
    keys = keys_for(world, "ppo", checkpoint_interval=1, max_iters=2)

    def changed(file, *replaced):
        """nano/ppo.py with these lines changed, as by a fork."""
        with open(f"{ROOT}/nano/ppo.py", encoding="utf-8") as f:
            text = f.read()
        for old, new in replaced:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        folder = tmp_path / file
        folder.mkdir()
        known = {name: x for name, x in keys.items() if name in keys_of_nano("ppo")}
        return Started(write(folder / "ppo.py", text), typed(known | dict(out_dir="out")),
                       str(folder), 2).wait()

    end = "    if (iteration + 1) % checkpoint_interval"
    for file, said, *edits in (
            ("parts", "another rank", (end, f"    learned[0].data += rank\n{end}")),
            ("frozen", "frozen", (end, f"    everything[-1].data += 1\n{end}")),
            ("mask", "log-probs differ", ("mask = torch.tensor([[0]", "mask = torch.tensor([[1]")),
            ("nan", "not finite", ("* ratio\n", "* ratio * torch.nan\n"))):
        result = changed(file, *edits)
        assert 0 not in result.codes and said in "".join(result.err), (file, result)
        assert not os.path.exists(tmp_path / file / "out/policy")
    nano("ppo", tmp_path / "run", keys)
    other = start("ppo", tmp_path / "run", keys | dict(seed=2)).wait()
    assert other.codes == [1] and "a run with another seed" in other.err[0]
    unknown = Started(f"{tmp_path}/run/ppo.py", ["--learnin_rate=1"], str(tmp_path)).wait()
    assert unknown.codes == [1] and "no key learnin_rate" in unknown.err[0]


def test_the_ladder_is_short_and_stands_alone():
    """350 lines; quartet's names and defaults; GRPO is PPO with lines left out."""
    from configurator import read_keys

    texts = {}
    for script in ("ppo", "grpo"):
        with open(f"{ROOT}/nano/{script}.py", encoding="utf-8") as f:
            texts[script] = f.read().splitlines()
        assert len(texts[script]) <= 350 and max(map(len, texts[script])) <= 100
        imported = re.findall(r"^(?:import|from) (\w+)", "\n".join(texts[script]), re.MULTILINE)
        assert not {f"{name}.py" for name in imported} & {*os.listdir(ROOT)}
        theirs = read_keys(f"{ROOT}/{script}.py") | read_keys(f"{ROOT}/config/keys.py")
        for name, x in keys_of_nano(script).items():
            assert name in ("out_dir", "reward_path") or x in (None, theirs[name].default), name
    ours = [line for line in difflib.ndiff(texts["ppo"], texts["grpo"]) if line[0] == "+"]
    assert len(ours) <= 60, len(ours)
