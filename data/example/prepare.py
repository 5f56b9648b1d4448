"""
An example of your files: twenty chats with answers, and a chat model of random weights that is
as small as they come. Nothing is downloaded; runs in a few seconds.

    python data/example/prepare.py

The question is "Is 38 even?". The demonstrations, three to a question, are careless: one of three
answers is wrong. So a model that learns from them can get better by a reward. Writes beside itself:
    prompts.jsonl, prompts_val.jsonl   {"prompt": [messages], "answer"}, with no number in both
    demonstrations.jsonl               {"prompt": [messages], "completion": [messages]}
    pairs.jsonl                        {"prompt": [messages], "chosen": ..., "rejected": ...}
    model/                             a Llama of 0.1M parameters, its tokenizer and chat template
"""
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; these are in the folder above it.
sys.path.insert(0, os.path.dirname(HERE))

from byte_tokenizer import write_byte_tokenizer  # noqa: E402  first: it looks for the packages
from files import parser_of, write_rows  # noqa: E402

parser_of(__doc__).parse_args()  # --help need not wait for torch

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, logging  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def rows():
    """(file, row) of all files."""
    for i, number in enumerate(random.Random(0).sample(range(10, 100), 40)):
        answer, other = ("no", "yes") if number % 2 else ("yes", "no")
        prompt = [dict(role="user", content=f"Is {number} even?")]
        right, wrong = ([dict(role="assistant", content=text)] for text in (answer, other))
        yield "prompts" if i < 20 else "prompts_val", dict(prompt=prompt, answer=answer)
        if i < 20:
            for said in right, right, wrong:
                yield "demonstrations", dict(prompt=prompt, completion=said)
            yield "pairs", dict(prompt=prompt, chosen=right, rejected=wrong)


write_rows(HERE, ["prompts", "prompts_val", "demonstrations", "pairs"], rows())
folder = os.path.join(HERE, "model")
write_byte_tokenizer(folder, ["<|system|>", "<|user|>", "<|assistant|>"], TEMPLATE)
logging.disable_progress_bar()
torch.manual_seed(1)
eos = 256 + 3  # behind the bytes and the roles; then comes the padding
AutoModelForCausalLM.from_config(AutoConfig.for_model(
    "llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=64, vocab_size=eos + 2, bos_token_id=None, eos_token_id=eos,
    pad_token_id=eos + 1, initializer_range=64**-0.5)).save_pretrained(folder)
print("model/: a chat model of random weights")
