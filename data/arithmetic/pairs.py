"""
Preference pairs for the built-in addition task, or for other problems that have answers. The SFT
model answers each problem several times; a checker takes the place of the human who compares: a
right and a wrong answer become a pair.

    python data/arithmetic/pairs.py
    python data/arithmetic/pairs.py --policy_path=out/arithmetic_sft/policy --pairs=2000 --seed=1

The true answers are used here for the last time: the reward model has to learn from the pairs which
answers are right, and PPO sees only the reward model.

Writes beside the problems: pairs_train.jsonl and pairs_val.jsonl {"prompt", "chosen", "rejected"}.
With mistakes, some pairs to train on are labelled wrongly, as people do it; held-out ones never.
"""
import json
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; ours are in the repository's, two folders above.
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from configurator import configure  # noqa: E402
from errors import BadInput  # noqa: E402

from load import autocast, load  # noqa: E402
from prompts import batch_rows, prompt_row, read_rows  # noqa: E402
from ranks import choose_device  # noqa: E402
from rewards import reward_terms  # noqa: E402
from rollout import decode, response_uniforms  # noqa: E402
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

device = choose_device(system.device_type)
model = load(policy_path, "policy", system, device)
tokenizer = model.tokenizer
prompts_path = prompts_path or os.path.join(HERE, "rl_train.jsonl")
written = {part: os.path.join(os.path.dirname(prompts_path), f"{name}_{part}.jsonl")
           for part in ("train", "val")}
check_outputs("--name", written.values(), files_of(prompts_path))
problems = read_rows(prompts_path, prompt_row, system.fields)
_, _, rule = reward_terms(reward_functions)[0]
wanted = pairs + pairs // 10
found = []
for iteration in range(100):
    # 128 problems, `samples` answers to each
    picked = batch_rows(seed, iteration, 128, problems)
    rows = [problems[i] for i in picked for _ in range(samples)]
    prompts = tokenizer.encode_prompts([row["prompt"] for row in rows])
    uniforms = response_uniforms(seed, "pairs", iteration, range(len(rows)), max_new_tokens)
    with autocast(system, device):
        responses, _, lengths, finished = (x.tolist() for x in decode(
            model, prompts, uniforms, graphs=system.cuda_graphs and device.type == "cuda"))
    completions = [tokenizer.decode_response(ids[:n], row["prompt"])
                   for ids, n, row in zip(responses, lengths, rows, strict=True)]

    right = [float(score) == 1.0 for score in rule(dict(completions=completions, rows=rows))]
    for i in range(0, len(rows), samples):
        # An answer that was cut off is left out, so that a pair differs in being right, and not in
        # having an end.
        answers = [(right[j], completions[j]) for j in range(i, i + samples)
                   if finished[j] and completions[j]]
        good = [text for ok, text in answers if ok]
        bad = [text for ok, text in answers if not ok]
        if isinstance(rows[i]["prompt"], list):  # a chat
            good, bad = ([[dict(role="assistant", content=text)] for text in texts]
                         for texts in (good, bad))
        found += [dict(prompt=rows[i]["prompt"], chosen=g, rejected=b)
                  for g, b in zip(good, bad, strict=False)]
    print(f"{min(len(found), wanted)}/{wanted} pairs from {(iteration + 1) * 128} problems",
          flush=True)
    if len(found) >= wanted:
        break
else:
    raise BadInput(f"{policy_path} gave only {len(found)} pairs of a right and a wrong answer; "
                   "is it trained?")

labeller = random.Random(seed)
for pair in found[:pairs]:
    if labeller.random() < mistakes:
        pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
for part, rows in (("train", found[:pairs]), ("val", found[pairs:wanted])):
    with open(written[part], "w", encoding="utf-8") as f:
        f.writelines(json.dumps(pair) + "\n" for pair in rows)
    print(f"{name}_{part}.jsonl: {len(rows)} rows")
