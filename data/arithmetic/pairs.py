"""
Preference pairs for the built-in addition task, or for other problems that have answers. The SFT
model answers each problem several times; a checker takes the place of the human who compares: a
right and a wrong answer become a pair.

    python data/arithmetic/pairs.py
    python data/arithmetic/pairs.py --policy_path=out/arithmetic_sft/policy --pairs=2000 --seed=1
    torchrun --nproc_per_node=2 data/arithmetic/pairs.py    # each rank samples its share

The true answers are used here for the last time: the reward model has to learn from the pairs which
answers are right, and PPO sees only the reward model.

Writes beside the problems: pairs_train.jsonl and pairs_val.jsonl {"prompt", "chosen", "rejected"}.
With mistakes, some pairs to train on are labelled wrongly, as people do it; held-out ones never.
"""
import functools
import os
import random
import signal
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; files.py is above it, and knows where ours are.
sys.path.insert(0, os.path.dirname(HERE))

from files import write_rows  # noqa: E402

from configurator import configure  # noqa: E402
from errors import BadInput, say  # noqa: E402

import parallel  # noqa: E402
import ranks  # noqa: E402
from batches import texts_of  # noqa: E402
from load import load  # noqa: E402
from prompts import batch_rows, encode_prompts, prompt_row, read_rows  # noqa: E402
from rewards import reward_terms  # noqa: E402
from rollout import sample_batch  # noqa: E402
from tools.outputs import check_outputs, files_of  # noqa: E402

policy_path = "out/arithmetic_sft/policy"  # the model whose answers are compared
prompts_path = ""  # the problems, with answers; empty = the toy's, rl_train.jsonl beside this file
pairs = 2000  # pairs to make for training; a tenth more is held out [>= 10]
samples = 4  # answers to each problem [>= 2]
max_new_tokens = 48  # longest answer [>= 1]
reward_functions = "accuracy"  # a response is right where this rule gives 1, as mine.py:solved
mistakes = 0.0  # share of the pairs for training that are labelled the wrong way round [0..0.5]
name = "pairs"  # of the files: pairs_train.jsonl, pairs_val.jsonl
seed = 1  # decides problems and answers [>= 0]
config, system = configure(globals(), "config/keys.py")

device = ranks.init(system)  # COLLECTIVE
ranks.on_requests(signal.SIG_DFL)  # they end it at once: nothing is to be saved
policy = load(policy_path, "policy", system, device)
prompts_path = prompts_path or os.path.join(HERE, "rl_train.jsonl")
folder, names = os.path.dirname(prompts_path), (f"{name}_train", f"{name}_val")
parallel.alone(lambda: check_outputs(  # COLLECTIVE
    "--name", [os.path.join(folder, f"{file}.jsonl") for file in names], files_of(prompts_path)))
problems = read_rows(prompts_path, prompt_row, system.fields)
problems = encode_prompts(problems, dict(policy=policy), max_new_tokens, system)
_, _, rule = reward_terms(reward_functions)[0]


def pairs_of(batch):
    """[{"prompt", "chosen", "rejected"}] of a batch: a right and a wrong answer to one prompt."""
    texts, finished = texts_of(batch, problems, policy.tokenizer), batch["finished"].tolist()
    right = [float(score) == 1.0 for score in rule(texts)]
    found = []
    for i in range(0, len(right), samples):
        # An answer that was cut off is left out, so that a pair differs in being right, and not in
        # having an end.
        answers = [(right[j], texts["completions"][j]) for j in range(i, i + samples)
                   if finished[j] and texts["completions"][j]]
        good = [text for ok, text in answers if ok]
        bad = [text for ok, text in answers if not ok]
        prompt = texts["rows"][i]["prompt"]
        if isinstance(prompt, list):  # a chat
            good, bad = ([[dict(role="assistant", content=text)] for text in texts]
                         for texts in (good, bad))
        found += [dict(prompt=prompt, chosen=g, rejected=b)
                  for g, b in zip(good, bad, strict=False)]
    return found


wanted = pairs + pairs // 10
found = []
for iteration in range(100):
    # 128 problems, `samples` answers to each
    batch = sample_batch(  # COLLECTIVE
        policy, problems, batch_rows(seed, iteration, 128, problems), (seed, "pairs", iteration),
        max_new_tokens, 1.0, system, device, samples)
    found += parallel.alone(functools.partial(pairs_of, batch))  # COLLECTIVE
    say(f"{min(len(found), wanted)}/{wanted} pairs from {(iteration + 1) * 128} problems")
    if len(found) >= wanted:
        break
else:
    raise BadInput(f"{policy_path} gave only {len(found)} pairs of a right and a wrong answer; "
                   "is it trained?")

labeller = random.Random(seed)
for pair in found[:pairs]:
    if labeller.random() < mistakes:
        pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
parallel.alone(lambda: write_rows(  # COLLECTIVE
    folder, names, [(names[i >= pairs], pair) for i, pair in enumerate(found[:wanted])]))
ranks.leave()  # COLLECTIVE
