r"""
Preference pairs that a judge makes, for rm.py. A policy answers each prompt several times, two
answers are a pair, and a language model says which of them is better.

    python data/label.py --policy_path=my/sft --judge_path=Qwen/Qwen2.5-7B-Instruct \
        --prompts_path=data/mine/prompts.jsonl --out=data/mine/labels.jsonl

A judge that compares likes the place of an answer, often the first. So it is asked in both orders,
and a pair is kept where it names the same answer both times. How often it does is printed. With a
template that has {response} each answer is graded by itself: the better grade wins.

Writes OUT, JSONL with "prompt", "chosen", "rejected" and "confidence": the probability, from 0.5 to
1, that the judge gives to the chosen one. With held_out also OUT's name with _val. The same command
writes the same pairs.
"""
import json
import math
import os
import sys

# Python looks for modules in this file's folder, data/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402

from configurator import configure  # noqa: E402
from prompts import encode_for_all  # noqa: E402
from options.judging import Judge, template_text  # noqa: E402
from launch import choose_device  # noqa: E402
from models import autocast, load  # noqa: E402
from tokenizer import check_tokenizer_fits, load_tokenizer  # noqa: E402
from errors import BadConfig, BadInput  # noqa: E402
from folders import model_folders  # noqa: E402
from rewards import accuracy, score_sequences  # noqa: E402
from rollout import generate, response_uniforms, texts_of  # noqa: E402
from rows import files_of, prompt_row, read_rows  # noqa: E402
from tools.output import check_writable, written  # noqa: E402
from tools.policies import plain  # noqa: E402

# --------------------------------------------------------------------------------------------------
# what is asked
policy_path = "out/arithmetic_sft/policy"  # whose answers are compared
judge_path = ""  # folder or hub name of the language model that compares them
judge_template = "compare"  # the question: compare, yes_no, rubric, or a file
prompts_path = "data/arithmetic/rl_train.jsonl"  # JSONL with "prompt"
fields = ""  # the data's names for ours: "question>prompt"
too_long = "error"  # a prompt that does not fit [error | drop]
# what is written
out = "out/labels.jsonl"  # an older file is replaced
pairs = 0  # so many pairs are enough; 0 = those of all prompts [>= 0]
held_out = 0  # so many pairs more, to OUT's name with _val [>= 0]
min_confidence = 0.5  # pairs with less are left out [0.5..1]
# sampling
samples = 2  # answers to each prompt; 2 are a pair, 4 two pairs [2..1000]
max_new_tokens = 48  # longest answer; one that does not end is left out [1..1000000]
temperature = 1.0  # of the answers [> 0]
stop_strings = ""  # texts that end a response, too: "</answer>", or several, "['Q:', '###']"
batch_size = 256  # answers that decode at once [2..1000000]
micro_batch_size = 64  # answers that the judge reads at once [>= 1]
seed = 1  # decides the answers [>= 0]
chat_template = ""  # a Jinja file in the place of the policy's own chat template
template_kwargs = ""  # what the policy's template is told, such as enable_thinking=False
system_prompt = ""  # the system message of chats that have none
# device
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
dtype = "float32"  # 16 bits: autocast [float32 | bfloat16 | float16 | float64]
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------
# the policy, the judge, the prompts

if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    raise BadConfig("label.py is one process; start it without torchrun, and give each of several "
                    "its own --prompts_path and --out")
if not judge_path:
    raise BadConfig("judge_path is empty; type --judge_path=FOLDER")
if samples % 2:
    raise BadConfig(f"samples = {samples}: wanted an even number, for two are a pair")
device = torch.device(choose_device(device_type))
system = plain(dtype)
stem, ending = os.path.splitext(out)
out_val = f"{stem}_val{ending}"  # the held-out pairs
read = files_of(prompts_path) + [judge_template, chat_template]
read += model_folders(policy_path) + model_folders(judge_path)
for path in (out, out_val) if held_out else (out,):
    check_writable(path, reads=read, made=rb'\{"prompt": .*, "confidence": [\d.e-]+\}\n')
if ending != ".jsonl":
    raise BadConfig(f"out = {out!r} must end with .jsonl")

tokenizer = load_tokenizer(policy_path, chat_template, template_kwargs, system_prompt, stop_strings)
judge_tokenizer = load_tokenizer(judge_path)
policy, model = (load(path, name, system, device) for path, name
                 in ((policy_path, "policy"), (judge_path, "judge")))
check_tokenizer_fits(tokenizer, policy, policy_path)
check_tokenizer_fits(judge_tokenizer, model, judge_path)
compares = "{first}" in template_text(judge_template)
judge = Judge(model, judge_tokenizer, judge_path, judge_template,
              ("first", "second") if compares else ("response",))
print(judge.in_words)
rows = read_rows(prompts_path, prompt_row, fields)
prompts = encode_for_all(rows, prompts_path, max_new_tokens, dict(policy=policy), tokenizer, judge,
                         too_long=too_long)

# --------------------------------------------------------------------------------------------------
# answers, and what the judge says of them


def answer(numbers):
    """[(text, whether it ended)] of `samples` answers to each prompt of these numbers."""
    which = [(i, sample) for i in numbers for sample in range(samples)]
    uniforms = response_uniforms(seed, "label", 0, [i for i, _ in which], max_new_tokens,
                                 [sample for _, sample in which])
    with torch.no_grad(), autocast(system, device):
        batch = generate(policy, [prompts[i] for i, _ in which], max_new_tokens, temperature,
                         tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size, uniforms,
                         has_stop=tokenizer.has_stop)
    texts = texts_of([(rows[i], prompts[i]) for i, _ in which], batch, tokenizer)["completions"]
    return list(zip(texts, batch["finished"].tolist(), strict=True))


def ask(questions):
    """The judge's log-odds for each of [(row, responses)], a list."""
    with torch.no_grad(), autocast(system, device):
        sequences = [judge.encode(row, responses) for row, responses in questions]
        return score_sequences(judge, sequences, micro_batch_size, device).tolist()


wanted = pairs + held_out if pairs else len(rows) * samples
counts = dict.fromkeys(("cut off or empty", "the same text", "no answer both times",
                        "too little confidence"), 0)
kept, places, unlike = [], [], []
at_once = max(batch_size // samples, 1)
for first in range(0, len(rows), at_once):
    numbers = range(first, min(first + at_once, len(rows)))
    answers = answer(numbers)
    found = []  # [(row, one answer, the other one)]
    for j in range(0, len(answers), 2):
        (one, ended), (other, other_ended) = answers[j:j + 2]
        if not (ended and other_ended and one.strip() and other.strip()):
            counts["cut off or empty"] += 1
        elif one == other:
            counts["the same text"] += 1
        else:
            found.append((rows[numbers[j // samples]], one, other))
    if compares:  # log-odds that the one that is shown first is better, in both orders
        forth = ask([(row, [one, other]) for row, one, other in found])
        back = ask([(row, [other, one]) for row, one, other in found])
    else:
        forth = ask([(row, [one]) for row, one, _ in found])
        back = ask([(row, [other]) for row, _, other in found])
    for (row, one, other), f, b in zip(found, forth, back, strict=True):
        margin = (f - b) / 2 if compares else f - b  # log-odds that `one` is better
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
            right = accuracy(dict(rows=[row, row], completions=[chosen, rejected])).tolist()
            unlike += [right[0]] if sorted(right) == [0.0, 1.0] else []
    print(f"{len(kept)} pairs of {numbers[-1] + 1} prompts", flush=True)
    if len(kept) >= wanted:
        break
left_out = ", ".join(f"{name} {n}" for name, n in counts.items())
if len(kept) <= held_out:
    raise BadInput(f"only {len(kept)} pairs are left, for held_out = {held_out} and training; left "
                   f"out: {left_out}; give more prompts, or another judge")

# --------------------------------------------------------------------------------------------------
# what is written and printed

kept = kept[:wanted]
train = kept[:len(kept) - held_out]
for path, part in ((out, train), (out_val, kept[len(train):])):
    if part:
        with written(path) as file:
            file.writelines(json.dumps(pair) + "\n" for pair in part)
        print(f"{path}: {len(part)} pairs")
print(f"left out: {left_out}")
if compares:
    both, one, two = (places.count(name) / len(places) for name in ("both", "first", "second"))
    print(f"asked in both orders, it names the same answer in {both:.1%} of {len(places)} pairs, "
          f"the first place in {one:.1%}, the second in {two:.1%}")
if unlike:  # known answers are for this line alone
    print(f"by the rows' answers: of {len(unlike)} pairs with one right answer the judge has "
          f"chosen it in {sum(unlike) / len(unlike):.1%}")
