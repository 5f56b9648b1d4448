"""
What tests share: a small run's keys, runs that must end well or in one line, and what is compared.
Helpers, no tests. The world, and what starts a script in it, is in small_world.py.
"""
import os
import re
import sys
import traceback
from types import SimpleNamespace

import pytest
from configurator import read_keys
from small_world import (  # noqa: F401  tests take all of them from here
    ANSWERS, ENDS, EOS, MARKERS, PAD, PROMPTS, ROOT, RULES, VOCABULARY, Started, at, build, jsonl,
    of_copy, read_jsonl, read_log, read_weights, save_random, typed, write)


def lacks(said):
    """Whether this is a fork, which has no options/README.md, and it says that it lacks a file."""
    return not os.path.isfile(f"{ROOT}/options/README.md") and re.search(
        r"(named |from |needs |directory: \S*)'?(options|grading)\b|: --help lists the keys", said)


def assert_same_run(out, other, models=("policy",), tolerance=0.0):
    """
    Two runs left the same log and the same weights, within the tolerance, on whatever device; 0:
    the same bits.
    """
    for a, b in zip(read_log(out), read_log(other), strict=True):
        assert a.keys() == b.keys()
        for key, x in a.items():
            near = isinstance(x, float) and abs(x - b[key]) <= tolerance * max(1, abs(x))
            assert near or x == b[key], (a["iteration"], key, x, b[key])
    assert_same_weights(out, other, models, tolerance)


def assert_same_weights(out, other, models=("policy",), tolerance=0.0):
    for model in models:
        a, b = (read_weights(f"{folder}/{model}") for folder in (out, other))
        assert a.keys() == b.keys()
        assert max((a[name] - b[name]).abs().max().item() for name in a) <= tolerance, model


def keys_of_system(**changed):
    """The namespace `system` that the scripts pass on, with its defaults."""
    keys = read_keys(f"{ROOT}/config/keys.py")
    return SimpleNamespace(**{name: key.default for name, key in keys.items()} | changed)


def keys_of(world, script, **changed):
    """The keys of a small run of a script in which every part does something."""
    keys = dict(device_type="cpu", dtype="float64", timeout=60, max_iters=3, eval_interval=2,
                eval_size=2, batch_size=5, micro_batch_size=2, learning_rate=1e-2)
    sampled = dict(policy_path=world.policy, prompts_path=world.rl_train, eval_path=world.rl_val,
                   max_new_tokens=6, temperature=0.8, kl_coef=0.3, num_minibatches=2)
    own = {"ppo.py": sampled | dict(reward_path=world.reward, ppo_epochs=2),
           "grpo.py": sampled | dict(batch_size=6, group_size=3,
                                     reward_functions=f"{world.rules}:letters"),
           "sft.py": dict(init_from=world.policy, train_path=world.sft_train,
                          val_path=world.sft_val),
           "rm.py": dict(init_from=world.policy, train_path=world.pairs_train,
                         val_path=world.pairs_val, demonstrations_path=world.sft_val)}
    keys |= own[script] | changed
    if changed.get("epochs"):  # in the place of max_iters
        del keys["max_iters"]
    return keys


def answer(policy, prompts, R, uniforms=None, **how):
    """The batch of responses of up to R tokens to these prompts. how: see rollout.decode."""
    from batches import as_batch
    from rollout import decode, response_uniforms

    if uniforms is None:
        uniforms = response_uniforms(0, "generate", 0, range(len(prompts)), R)
    found = decode(policy, prompts, uniforms, **how)
    return as_batch(prompts, *found, max(map(len, prompts)), policy.tokenizer.pad_id)


def in_a_fork(check, *args):
    """check(*args) in a fork: for what leaves much behind in a process, as torch.compile does."""
    pid, code = os.fork(), 1
    if pid == 0:
        try:
            check(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def run(script, folder, keys, **how):
    """
    A run of a script with these keys, to its end; out_dir is folder/out. how: see Started. A test
    of a fork that has left out an option which this run needs is skipped.
    """
    result = Started(script, typed(dict(out_dir="out") | keys), str(folder), **how).wait()
    if lacks(said := "".join(result.err)):
        pytest.skip(said)
    return result


def well(script, folder, keys, **how):
    """The out_dir of a run that must come to its end."""
    result = run(script, folder, keys, **how)
    assert set(result.codes) == {0}, result
    return f"{folder}/out"


def said_by(program, folder, argv, **how):
    """What a program prints that must come to its end. argv: a list, or keys. how: see Started."""
    argv = typed(argv) if isinstance(argv, dict) else [*map(str, argv)]
    result = Started(program, argv, str(folder), **how).wait()
    assert set(result.codes) == {0} and "Traceback" not in "".join(result.err), result
    return result.out[0]


def assert_stopped(result, folder):
    """A run in a folder has left in order, before its end."""
    assert set(result.codes) == {0} and os.path.exists(f"{folder}/out/log.jsonl"), result
    assert not {"policy", "reward_model"}.intersection(os.listdir(f"{folder}/out")), result


def assert_one_line(result, script, *words, code=2):
    """
    The run has said why it ended, in one line with these words, and nothing else is said. (Without
    torchrun, which ends the other ranks, these say it as well, a second later.)
    """
    lines = {line.replace(f" (rank {rank})", "", 1) for rank, said in enumerate(result.err)
             for line in said.splitlines()}
    assert set(result.codes) == {code} and len(lines) == 1, result
    (said,) = lines
    assert said.startswith(f"{script}: error: ") and all(word in said for word in words), said
