"""
docs/diagnosis.md: what its last table says of a run is true of that run.

A row of the table is | NAME | `metric[i]` > x, ... |, where i is an iteration; without it all are
meant. RUNS has the run of this NAME: PPO or GRPO with one key, reward or line of the code that is
wrong, on a small toy: sums of two numbers from 0 to 4. As in the large one 3 of 10 demonstrations
think first, and these are right; of the others few are.
"""
import os
import random
import re
import shutil
import sys

import pytest
import transformers
from byte_tokenizer import write_byte_tokenizer
from tiny import MARKERS, ROOT, Started, jsonl, read_jsonl, typed, write

with open(f"{ROOT}/docs/diagnosis.md", encoding="utf-8") as page:
    TABLE = page.read().partition("## The runs")[2]
ROWS = dict(re.findall(r"^\| (.+?) \| (`.+) \|$", TABLE, re.MULTILINE))
CLAIM = re.compile(r"`([\w/]+)(?:\[(-?\d+)\])?` ([<>=]) (-?[\d.]+(?:e-?\d+)?)")
REWARDS = """
import random

def longer(batch):
    return [len(text) / 10 for text in batch["completions"]]

def same(batch):
    return [1.0 for text in batch["completions"]]

def nothing(batch):  # a number that has nothing to do with the text
    return [random.Random(text + str(i)).random() for i, text in enumerate(batch["completions"])]

def two(batch):  # one answer for all prompts
    return [float(text == "2") for text in batch["completions"]]

def other_rows(batch):  # right or not, in another order than the texts
    texts, rows = batch["completions"], batch["rows"]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    return [float(texts[i].split("</think>")[-1] == rows[i]["answer"]) for i in order]
"""
# in float64 other machines, which round otherwise, sample the same texts
KEYS = dict(device_type="cpu", dtype="float64", policy_path="sft/policy", eval_interval=100,
            prompts_path="rl.jsonl", eval_path="rl.jsonl", eval_size=0, batch_size=64,
            micro_batch_size=64, max_new_tokens=12, temperature=1.0, kl_coef=0.05, max_iters=3,
            learning_rate=3e-3, lr_decay="constant", missing_eos_penalty=0.0, num_minibatches=2,
            reward_functions="accuracy", checkpoint_interval=0)
PPO = KEYS | dict(script="ppo.py", value_init="policy", ppo_epochs=2)
GRPO = KEYS | dict(script="grpo.py", num_iterations=2)
RUNS = {  # name on the page: keys; a line (file, old, new) that is wrong
    "nothing wrong, PPO": (PPO, None),
    "nothing wrong, GRPO": (GRPO | dict(max_iters=4), None),
    "a learning rate 100 times too large": (GRPO | dict(learning_rate=0.3), None),
    "a learning rate 1,000 times too small": (PPO | dict(learning_rate=3e-6), None),
    "a reward that is always 1": (GRPO | dict(reward_functions="mine.py:same"), None),
    "a reward of length, `kl_coef` = 1e-9": (
        PPO | dict(reward_functions="mine.py:longer", kl_coef=1e-9, max_iters=4), None),
    "a reward that does not read the text": (
        GRPO | dict(reward_functions="mine.py:nothing"), None),
    "a reward for one answer to all prompts": (
        GRPO | dict(reward_functions="mine.py:two", learning_rate=1e-2, kl_coef=1e-9), None),
    "`kl_coef` = 100": (PPO | dict(kl_coef=100.0), None),
    "a penalty of the wrong sign, `kl_coef` = 0.3": (PPO | dict(kl_coef=0.3, max_iters=4), (
        "ppo.py", "rewards = -kl_coef * kl", "rewards = kl_coef * kl")),
    "`value_learning_rate` = 1e-9": (PPO | dict(value_learning_rate=1e-9), None),
    "`cliprange` = 0.002": (PPO | dict(cliprange=0.002), None),
    "old log-probs of now": (GRPO, (
        "grpo.py", 'logprobs - mb["old_logprobs"], 0)', "logprobs - logprobs.detach(), 0)")),
    "a mask without the EOS": (GRPO | dict(max_iters=1), (
        "rollout.py", "< lengths[:, None]", "< (lengths - finished.long())[:, None]")),
    "gradients that are never set to 0": (PPO, (
        "ppo.py", "parallel.zero_gradients(gradients)", "pass")),
    "`min` in the place of `max`, PPO of six passes": (PPO | dict(ppo_epochs=6, max_iters=2), (
        "ppo.py", "torch.max(pg_losses1, pg_losses2)", "torch.min(pg_losses1, pg_losses2)")),
    "a sampler that keeps its first weights, bfloat16": (
        GRPO | dict(dtype="bfloat16", eval_interval=2, max_iters=4), (
            "grpo.py", "batch = sample_batch(  # COLLECTIVE\n        policy",
            "batch = sample_batch(  # COLLECTIVE\n        ref_policy")),
    "scores in the order of the lengths, not of the texts": (
        GRPO | dict(reward_functions="mine.py:other_rows"), None),
    "a sampler of another temperature, bfloat16": (GRPO | dict(
        dtype="bfloat16", max_iters=1), (
        "rollout.py", "temperature or 1.0, tok", "0.7 * temperature, tok")),
}

BREAK = "a learning rate 100 times too large", "`min` in the place of `max`, PPO of six passes"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The folder of the small toy's data, rewards and SFT model."""
    folder, drawn = str(tmp_path_factory.mktemp("toy")), random.Random(0)
    assert transformers.GPT2LMHeadModel  # imported once, before the forks
    write_byte_tokenizer(f"{folder}/tokenizer", MARKERS)
    write(f"{folder}/mine.py", REWARDS)
    rows = jsonl(f"{folder}/rl.jsonl", [dict(prompt=f"{a}+{b}=", answer=str(a + b))
                                        for a in range(5) for b in range(5)])
    demonstrations = []
    for row in read_jsonl(rows) * 40:
        thought = f"<think>{row['prompt'][:3]}</think>" if drawn.random() < 0.3 else ""
        right = drawn.random() < (0.95 if thought else 0.2)
        said = row["answer"] if right else str(drawn.randrange(9))
        demonstrations.append(dict(prompt=row["prompt"], completion=thought + said))
    done = run("sft.py", folder, dict(
        out_dir="sft", tokenizer_path="tokenizer", device_type="cpu", dtype="float64", d_model=32,
        n_head=2, d_ff=64, context=32, max_iters=150, batch_size=32, learning_rate=1e-2,
        train_path=jsonl(f"{folder}/sft.jsonl", demonstrations)))
    assert done.codes == [0], done
    return folder


def run(script, folder, keys, **how):
    return Started(script, typed(keys), folder, **how).wait(600)  # on a machine that is shared


def copied(folder, file, old, new):
    """
    For `before`: the repository's modules are now those of a copy, in which one line is another.
    """
    for name in os.listdir(ROOT):
        if name.endswith(".py"):
            shutil.copy(f"{ROOT}/{name}", folder)
    for name in ("config", "options"):
        os.symlink(f"{ROOT}/{name}", f"{folder}/{name}")
    with open(f"{folder}/{file}", encoding="utf-8") as f:
        source = f.read()
    assert source.count(old) == 1, (file, old)
    write(f"{folder}/{file}", source.replace(old, new))

    def before(rank):
        sys.path[:] = [folder] + [path for path in sys.path if path != ROOT]
        for name, module in [*sys.modules.items()]:
            if os.path.dirname(getattr(module, "__file__", None) or "") == ROOT:
                del sys.modules[name]

    return before


def test_the_table_has_each_run():
    assert ROWS.keys() == RUNS.keys()
    for claims in ROWS.values():  # nothing is said that is not tried
        assert not CLAIM.sub("", claims).strip(", "), claims


@pytest.mark.parametrize("name", RUNS)
def test_a_run_shows_what_the_page_says(toy, tmp_path, name):
    (keys, wrong), how, relations = RUNS[name], {}, {
        ">": float.__gt__, "<": float.__lt__, "=": float.__eq__}
    keys = keys | dict(out_dir=f"{tmp_path}/out")
    script = keys.pop("script")
    if "eval/" not in ROWS[name] and name not in SAMPLES:
        keys["eval_path"] = ""  # nothing is said of its evaluations
    if wrong:
        os.mkdir(f"{tmp_path}/copy")
        how["before"] = copied(f"{tmp_path}/copy", *wrong)
        script = f"{tmp_path}/copy/{script}"
    result = run(script, toy, keys, **how)
    assert result.codes == [0], result
    log = read_jsonl(f"{tmp_path}/out/log.jsonl")
    for metric, i, relation, x in CLAIM.findall(ROWS[name]):
        values = [record[metric] for record in log if metric in record]
        for value in [values[int(i)]] if i else values:
            assert relations[relation](float(value), float(x)), (metric, values)
    broken = "the policy is broken" in result.out[0]
    assert broken == (name in BREAK), result.out[0]
    if name in SAMPLES:
        SAMPLES[name](read_jsonl(f"{tmp_path}/out/samples.jsonl"), log, result.out[0])


def of_other_rows(samples, log, out):
    """The means are as they should be; the rows are not."""
    assert all(record["objective/scores"] == record["objective/accuracy"]
               for record in log if "objective/scores" in record)
    assert any(row["scores"]["scores"] != row["scores"]["accuracy"] for row in samples)


def of_old_weights(samples, log, out):
    """The evaluations' texts never change, and the run warns when the gap comes."""
    texts = {}
    for row in samples:
        texts.setdefault(row["iteration"], []).append(row["text"])
    assert len(texts) > 1 and all(some == texts[0] for some in texts.values())
    assert "the sampler's log-probs differ" in out


SAMPLES = {"scores in the order of the lengths, not of the texts": of_other_rows,
           "a sampler that keeps its first weights, bfloat16": of_old_weights}


def test_a_gradient_that_is_not_finite_is_named(toy, tmp_path):
    """What the page says of a run that stops: the step is too large, and the next is not taken."""
    keys = GRPO | dict(dtype="float32", learning_rate=1e20, out_dir=f"{tmp_path}/out")
    result = run(keys.pop("script"), toy, keys)
    assert result.codes == [1] and "is not finite" in result.err[0], result
    assert not os.path.exists(f"{tmp_path}/out/policy")
