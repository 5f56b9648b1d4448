"""
Preference pairs for the built-in task: the SFT model answers each problem several times, and a checker plays the human
labeller: where one answer is right and another wrong, they become a pair. This is the last time that anyone sees the truth;
the reward model has to learn it from the pairs, and PPO only ever sees the reward model.

    python data/arithmetic/pairs.py [--policy_path=out/arithmetic_sft/policy] [--pairs=2000] [--seed=1]

Writes pairs_train.jsonl and pairs_val.jsonl {"prompt", "chosen", "rejected"} beside itself.
"""
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

from configurator import configure  # noqa: E402
from data import batch_rows, read_jsonl  # noqa: E402
from engine.pretrained import from_pretrained  # noqa: E402
from engine.tokenizers import load_tokenizer  # noqa: E402
from errors import BadInput  # noqa: E402
from model import freeze  # noqa: E402
from rewards import accuracy  # noqa: E402
from rollout import generate, response_uniforms  # noqa: E402

policy_path = "out/arithmetic_sft/policy"  # the model whose answers are compared
pairs = 2000  # pairs to make for training; a tenth more is held out [>= 10]
samples = 4  # answers to each problem [>= 2]
max_new_tokens = 48  # longest answer [>= 1]
seed = 1  # decides problems and answers [>= 0]
config = configure(globals())

tokenizer = load_tokenizer(policy_path)
model = freeze(from_pretrained(policy_path))
problems = read_jsonl(os.path.join(HERE, "rl_train.jsonl"), ["prompt", "answer"])
wanted = pairs + pairs // 10
found = []
for iteration in range(100):
    rows = [problems[i] for i in batch_rows(seed, iteration, 128, len(problems)) for _ in range(samples)]
    batch = generate(model, [tokenizer.encode_prompt(row["prompt"]) for row in rows], max_new_tokens,
                     eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id, vocab_size=tokenizer.vocab_size,
                     uniforms=response_uniforms(seed, "pairs", iteration, range(len(rows)), max_new_tokens))
    responses = [t[-max_new_tokens:][m].tolist() for t, m in zip(batch["tokens"], batch["response_mask"], strict=True)]
    completions = [tokenizer.decode(r) for r in responses]
    # an answer that was cut off is no candidate: the pairs should be about being right
    right = (accuracy(dict(completions=completions, rows=rows)) == 1.0).tolist()
    for i in range(0, len(rows), samples):
        answers = [(right[j], completions[j]) for j in range(i, i + samples) if batch["finished"][j] and completions[j]]
        good = [text for ok, text in answers if ok]
        bad = [text for ok, text in answers if not ok]
        found += [dict(prompt=rows[i]["prompt"], chosen=g, rejected=b) for g, b in zip(good, bad, strict=False)]
    print(f"{min(len(found), wanted)}/{wanted} pairs from {(iteration + 1) * 128} problems", flush=True)
    if len(found) >= wanted:
        break
else:
    raise BadInput(f"{policy_path} gave only {len(found)} pairs of a right and a wrong answer; is it trained?")

for name, part in (("train", found[:pairs]), ("val", found[pairs:wanted])):
    with open(os.path.join(HERE, f"pairs_{name}.jsonl"), "w", encoding="utf-8") as f:
        f.writelines(json.dumps(pair) + "\n" for pair in part)
    print(f"pairs_{name}.jsonl: {len(part)} rows")
