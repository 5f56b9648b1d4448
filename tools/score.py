"""
Does quartet read a reward model as its author does? Score given pairs in both ways: as a run of
ppo.py or grpo.py does, and as transformers does with the model's own tokenizer, chat template and
pooling.

python tools/score.py --reward_path=out/arithmetic_rm/reward_model \\
    --pairs=data/arithmetic/pairs_val.jsonl --limit=100

Prints how many of the pairs each of them has right, and by how much they differ. The exit code is 0
if they agree, else 1. A reward model of rm.py is given to transformers as rm.py has trained it:
the score is read at the end of the turn, without what a template writes behind it, and score_shift
is added.
"""
import os
import sys

import torch

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from data import naming, right_pad  # noqa: E402
from folders import find_folder  # noqa: E402
from engine.adapters import load_whole  # noqa: E402
from engine.launch import choose_device  # noqa: E402
from engine.reading import Reader, as_dialogue, reader_of  # noqa: E402
from engine.tokenizers import load_tokenizer  # noqa: E402
from errors import BadInput, first_line, one_line  # noqa: E402
from formats import read_rows  # noqa: E402
from rows import preference_row  # noqa: E402
from model import freeze  # noqa: E402
from rewards import score_sequences  # noqa: E402


# --------------------------------------------------------------------------------------------------
reward_path = "out/arithmetic_rm/reward_model"  # folder or hub name of a reward model
reward_format = "auto"  # others' in their chat template, or as text [auto | chat | plain]
pairs = "data/arithmetic/pairs_val.jsonl"  # JSONL with "prompt", "chosen" and "rejected"
fields = ""  # the data's names for ours: "question>prompt,best>chosen"
limit = 0  # how many pairs of the file, 0 = all [>= 0]
batch_size = 8  # texts at once in quartet; transformers gets one by one [1..1000000]
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
dtype = "float32"  # of the weights [float32 | bfloat16 | float64]
config = configure(globals())
# --------------------------------------------------------------------------------------------------
device = torch.device(choose_device(device_type)).type
weights_dtype = getattr(torch, dtype)
# how far two scores may be apart by rounding alone, as a share of the largest score (at least 1)
ROUNDING = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.05}[dtype]

rows = read_rows(pairs, preference_row, fields)
rows = rows[:limit or len(rows)]
tokenizer = load_tokenizer(reward_path)
reward_model = freeze(load_whole(reward_path, "scalar", weights_dtype, device))
reader, said = reader_of(reward_model, tokenizer, reward_format, reward_path)
print(said or f"reward model {reward_path}: trained by rm.py; its score is read at the end of the "
              f"response, and score_shift = {reward_model.score_shift:g} is added")
longest = reward_model.max_positions


def encode(row, field):
    """The ids that quartet reads of a row's prompt and its chosen or rejected completion."""
    return reader.encode_response(row["prompt"], row[field])[:longest]


def encode_as_transformers(row, field):
    """The same by transformers' tokenizer and its apply_chat_template alone."""
    prompt, completion = row["prompt"], row[field]
    texts = isinstance(prompt, str) and isinstance(completion, str)
    ours = not isinstance(reader, Reader)
    if texts and ours:  # rm.py encodes them one by one
        ids = theirs(prompt)["input_ids"]
        ids += theirs(completion + theirs.eos_token, add_special_tokens=False)["input_ids"]
    elif texts and not reader.chat:
        ids = theirs(prompt + completion + theirs.eos_token)["input_ids"]
    else:
        text = theirs.apply_chat_template(as_dialogue(prompt, completion), tokenize=False)
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        while ours and ids[-1] not in tokenizer.eos_ids:
            ids.pop()  # rm.py stops at the end of the turn
    return ids[:longest]


def spells_special_tokens(row):
    """Whether a text of a row spells a special token: to quartet those are letters."""
    values = [row[field] for field in ("prompt", "chosen", "rejected")]
    texts = [text for value in values for text in
             ([value] if isinstance(value, str) else [m["content"] for m in value])]
    return any(map(tokenizer.specials_in, texts))


# quartet, as in a run
texts, sequences = [(n, field) for n in range(len(rows)) for field in ("chosen", "rejected")], []
for n, field in texts:
    with naming(pairs, n + 1):
        sequences.append(encode(rows[n], field))
tokens, mask = right_pad(sequences, tokenizer.pad_id)
scores = score_sequences(reward_model, tokens.to(device), mask.to(device), batch_size,
                         skipped_id=reader.skipped_id).double().cpu()  # (2 * pairs,)
shift = reward_model.score_shift
del reward_model

# transformers
folder = find_folder(reward_path, weights=True)
try:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=weights_dtype)
    model = model.eval().to(device)
    encoded = [encode_as_transformers(rows[n], field) for n, field in texts]
except ImportError as e:
    raise BadInput(f"{reward_path} is read by a library that is not here ({first_line(e)}); type "
                   f"pip install {e.name}") from e
except Exception as e:  # transformers raises anything
    raise BadInput(f"transformers cannot read {reward_path} or the pairs: "
                   f"{one_line(first_line(e), 300)}") from e
with torch.no_grad():
    logits = [model(torch.tensor([ids], device=device)).logits for ids in encoded]  # (1, 1) each
wanted = torch.cat(logits)[:, 0].double().cpu() + shift  # (2 * pairs,)


# --------------------------------------------------------------------------------------------------
# what came out


def accuracy(x):
    """In which share of the pairs the chosen one scores higher; a tie counts half."""
    chosen, rejected = x[::2], x[1::2]
    return ((chosen > rejected).double() + 0.5 * (chosen == rejected)).mean().item()


print(f"{len(rows)} pairs of {pairs}")
for name, x in (("quartet", scores), ("transformers", wanted)):
    print(f"{name:<12}  {accuracy(x):6.1%} of the pairs right, mean score {x[::2].mean():.4f} of "
          f"the chosen ones, {x[1::2].mean():.4f} of the rejected ones")
letters = torch.tensor([spells_special_tokens(rows[n]) for n, _ in texts])
if letters.all():
    raise BadInput(f"{pairs}: all pairs spell special tokens, which quartet reads as letters: "
                   "nothing can be compared; give the texts without them")
if letters.any():
    print(f"{int(letters.sum()) // 2} pairs spell special tokens, which quartet reads as letters: "
          "these are not compared")
gaps = (scores - wanted).abs().masked_fill(letters, 0)  # (2 * pairs,)
correlation = torch.corrcoef(torch.stack([scores, wanted])[:, ~letters])[0, 1].item()
print(f"correlation {correlation:.4f}, largest difference {gaps.max():.2g}")
if (scores == scores[0]).all():
    print("all scores are equal: the model tells nothing apart")
worst = int(gaps.argmax())
# not <=: the gap may be NaN
agree = bool(gaps[worst] <= ROUNDING * max(1, wanted.abs().max()))
if agree:
    print("they agree")
else:
    n, field = texts[worst]
    same = "the same tokens" if encoded[worst] == sequences[worst] else "other tokens"
    print(f"they do not agree: row {n + 1}, {field}, scores {scores[worst]:.4f} in quartet and "
          f"{wanted[worst]:.4f} in transformers, which reads {same} there. Try "
          "--reward_format=chat or plain, and look at the chat template and the pad_token_id of "
          "the model")
sys.exit(0 if agree else 1)
