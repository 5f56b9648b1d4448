"""
An example of what you bring: twenty chats with answers, and a chat model of random weights that is
as small as they come. Nothing is downloaded; runs in a few seconds.

    python data/example/prepare.py

The question is "Is 38 even?". The demonstrations, three to a question, are careless: one of three
answers is wrong. So a model that learns from them can get better by a reward. Writes beside itself:
    prompts.jsonl, prompts_val.jsonl   {"prompt": [messages], "answer"}, with no number in both
    demonstrations.jsonl               {"prompt": [messages], "completion": [messages]}
    pairs.jsonl                        {"prompt": [messages], "chosen": ..., "rejected": ...}
    model/                             a Llama of 0.1M parameters, its tokenizer and chat template
"""
import json
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; ours are in data/ and in the repository's.
sys.path[:0] = [os.path.dirname(HERE), os.path.dirname(os.path.dirname(HERE))]

from byte_tokenizer import write_byte_tokenizer  # noqa: E402
from checkpoint import save_model  # noqa: E402
from load import from_scratch  # noqa: E402
from tokenizer import load_tokenizer  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def message(role, content):
    return [dict(role=role, content=content)]


def write(name, rows):
    with open(os.path.join(HERE, f"{name}.jsonl"), "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{name}.jsonl: {len(rows)} rows")


numbers = random.Random(0).sample(range(10, 100), 40)
asked = [dict(prompt=message("user", f"Is {n} even?"), answer="no" if n % 2 else "yes")
         for n in numbers]
write("prompts", asked[:20])
write("prompts_val", asked[20:])
demonstrations, pairs = [], []
for row in asked[:20]:
    right = message("assistant", row["answer"])
    wrong = message("assistant", dict(yes="no", no="yes")[row["answer"]])
    demonstrations += [dict(prompt=row["prompt"], completion=x) for x in (right, right, wrong)]
    pairs.append(dict(prompt=row["prompt"], chosen=right, rejected=wrong))
write("demonstrations", demonstrations)
write("pairs", pairs)

folder = os.path.join(HERE, "model")
write_byte_tokenizer(folder, ["<|system|>", "<|user|>", "<|assistant|>"])
with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as f:
    f.write(TEMPLATE)
tokenizer = load_tokenizer(folder)
model = from_scratch(dict(
    model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=128, max_position_embeddings=64, vocab_size=tokenizer.vocab_size,
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_id,
    pad_token_id=tokenizer.pad_id, initializer_range=64**-0.5), seed=1)
save_model(folder, model, tokenizer)
print("model/: a chat model of random weights")
