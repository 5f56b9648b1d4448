r"""
Preference pairs that a judge makes, for rm.py. A policy answers each prompt several times, two
answers are a pair, and a language model says which of them is better.

    python data/label.py --policy_path=my/sft --judge_path=Qwen/Qwen2.5-7B-Instruct \
        --prompts_path=data/mine/prompts.jsonl --out=data/mine/labels.jsonl

A judge that compares likes the place of an answer, often the first. So it is asked in both orders,
and a pair is kept where it names the same answer both times. How often it does is printed. With a
template that has {response} each answer is graded by itself: the better grade wins.

Writes OUT, JSONL with "prompt", "chosen", "rejected" and "confidence": the probability, from 0.5 to
1, that the judge gives to the chosen one. With held_out also OUT's name with _val: no prompt has
pairs in both files. The same command writes the same pairs.
"""
import json
import math
import os
import sys

# Python looks for modules in this file's folder, data/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402  first: it must be imported before torch

from batches import texts_of  # noqa: E402
from errors import BadInput  # noqa: E402
from load import autocast, load  # noqa: E402
from model import no_grad_forwards  # noqa: E402
from options.judging import Judge, template_text  # noqa: E402
from prompts import encode_prompts, prompt_row, read_rows  # noqa: E402
from ranks import choose_device  # noqa: E402
from rewards import score_sequences  # noqa: E402
from rollout import sample_batch  # noqa: E402
from tools.outputs import check_outputs, files_of  # noqa: E402

# -------------------------------------------------------------------------------------------------
# what is asked
policy_path = "out/arithmetic_sft/policy"  # whose answers are compared
prompts_path = "data/arithmetic/rl_train.jsonl"  # JSONL with "prompt"
samples = 2  # answers to each prompt; 2 are a pair, 4 two pairs [2..1000]
max_new_tokens = 48  # longest answer; one that does not end is left out [1..1000000]
temperature = 1.0  # of the answers [> 0]
batch_size = 256  # answers that decode at once [2..1000000]
micro_batch_size = 64  # answers that the judge reads at once [>= 1]
seed = 1  # decides the answers [>= 0]
# what is written
out = "out/labels.jsonl"  # an older file is replaced
pairs = 0  # so many pairs are enough; 0 = those of all prompts [>= 0]
held_out = 0  # so many pairs more, to OUT's name with _val [>= 0]
min_confidence = 0.5  # pairs with less are left out [0.5..1]
# judge_path, the language model that compares them, and judge_template, its question: compare,
# yes_no, rubric, or a file; and the keys of policies
config, system = configure(globals(), "config/keys.py", judge_template="compare")
# -------------------------------------------------------------------------------------------------
# the policy, the judge, the prompts

if not system.judge_path or samples % 2:
    raise BadInput(f"judge_path = {system.judge_path!r}, samples = {samples}: wanted a folder, and "
                   "an even number, for two answers are a pair")
stem, ending = os.path.splitext(out)
written = [out, f"{stem}_val{ending}"]
check_outputs("--out", written[:1 + bool(held_out)], files_of(prompts_path))
device = choose_device(system.device_type)
policy, model = (load(path, name, system, device) for path, name in (
    (policy_path, "policy"), (system.judge_path, "judge")))
compares = "{first}" in template_text(system.judge_template)
shown = 2 if compares else 1  # answers at once
judge = Judge(model, model.tokenizer, system.judge_path, system.judge_template,
              ("first", "second") if compares else ("response",))
print(judge.in_words())
rows = read_rows(prompts_path, prompt_row, system.fields)
rows = encode_prompts(rows, dict(policy=policy), max_new_tokens, system)

# -------------------------------------------------------------------------------------------------
# answers, and what the judge says of them


def ask(questions):
    """The judge's log-odds for each of [(row, responses)], a list."""
    sequences = [judge.encode(row, responses) for row, responses in questions]
    with autocast(system, device), no_grad_forwards([model], device):
        return score_sequences(judge, sequences, micro_batch_size, device).tolist()


def of_other_prompts(some, others):
    """Those of some pairs whose prompt is none of other pairs."""
    asked = {json.dumps(pair["prompt"]) for pair in others}
    return [pair for pair in some if json.dumps(pair["prompt"]) not in asked]


counts = dict.fromkeys(("cut off or empty", "the same text", "no answer both times",
                        "too little confidence", "of a held-out prompt"), 0)
kept, places = [], []
at_once = max(batch_size // samples, 1)
for first in range(0, len(rows), at_once):
    numbers = range(first, min(first + at_once, len(rows)))
    batch = sample_batch(policy, rows, numbers, (seed, "label", 0), max_new_tokens, temperature,
                         system, device, samples, numbers)
    answers, ended = texts_of(batch, rows, policy.tokenizer)["completions"], batch["finished"]
    found = []  # [(row, one answer, the other one)]
    for j in range(0, len(answers), 2):
        one, other = answers[j:j + 2]
        if not (ended[j:j + 2].all() and one.strip() and other.strip()):
            counts["cut off or empty"] += 1
        elif one == other:
            counts["the same text"] += 1
        else:
            found.append((rows[numbers[j // samples]], one, other))
    # log-odds that the one that is shown first is better, in both orders; or that each one is good
    forth = ask([(row, [one, other][:shown]) for row, one, other in found])
    back = ask([(row, [other, one][:shown]) for row, one, other in found])
    for (row, one, other), f, b in zip(found, forth, back, strict=True):
        margin = (f - b) / shown  # log-odds that `one` is better
        confidence = 1 / (1 + math.exp(-min(abs(margin), 500)))
        if compares:
            places.append("both" if f * b < 0 else "first" if f + b > 0 else "second")
        if margin == 0 or compares and f * b >= 0:
            counts["no answer both times"] += 1
        elif confidence < min_confidence:
            counts["too little confidence"] += 1
        else:
            chosen, rejected = (one, other) if margin > 0 else (other, one)
            pair = dict(chosen=chosen, rejected=rejected)
            if isinstance(row["prompt"], list):  # a chat
                pair = {name: [dict(role="assistant", content=text)] for name, text in pair.items()}
            kept.append(dict(prompt=row["prompt"], **pair, confidence=confidence))
    print(f"{len(kept)} pairs of {numbers[-1] + 1} prompts", flush=True)
    train = kept[:pairs]
    val = of_other_prompts(kept[pairs:], train)[:held_out]
    if pairs and len(train) == pairs and len(val) == held_out:
        break
else:  # all pairs are wanted, or there are no more: the last ones are held out
    val = kept[max(len(kept) - held_out, 0):]
    train = of_other_prompts(kept, val)
    counts["of a held-out prompt"] = len(kept) - len(train) - len(val)
    train = train[:pairs or None]
left_out = ", ".join(f"{name} {n}" for name, n in counts.items())
if not train or len(val) < held_out:
    raise BadInput(f"only {len(kept)} pairs are left, for held_out = {held_out} and training on "
                   f"other prompts; left out: {left_out}; give more prompts, or another judge")

# -------------------------------------------------------------------------------------------------
# what is written and printed

os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
for path, part in zip(written, (train, val), strict=True):
    if part:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(pair) + "\n" for pair in part)
        print(f"{path}: {len(part)} pairs")
print(f"left out: {left_out}")
if compares:
    both, one, two = (places.count(name) / len(places) for name in ("both", "first", "second"))
    print(f"asked in both orders, it names the same answer in {both:.1%} of {len(places)} pairs, "
          f"the first place in {one:.1%}, the second in {two:.1%}")
