"""
A file of rows -> token ids -> the rows of an iteration.

    {"prompt": "1+2=", "answer": "3"}                                  prompt_row
    {"prompt": [{"role": "user", "content": "1+2=?"}], "answer": "3"}
    {"prompt": "1+2=", "completion": "3"}                              dialogue, for sft.py
    {"prompt": "1+2=", "chosen": "3", "rejected": "4"}                 and for rm.py

A row's texts are all strings, or all lists of messages; a completion's list continues the prompt's.
options/sources.py reads other files, and several files with weights. The rows of an iteration
depend only on the seed and the iteration, so a run that resumes sees the same.
"""
import functools
import hashlib
import json
import math
import os
import re
from array import array
from itertools import pairwise

import torch

from errors import BadInput, say, shorten

NO_UTF8 = "[\ud800-\udfff]"  # what Python reads where bytes are no UTF-8
alike = hashlib.sha256()  # of all rows and FILE.pys that a process has read, the same on all ranks
ODD = re.compile(NO_UTF8 + r"|\A[\s'\"]*[\[{]")  # or a text that may be a list of messages


class Rows(list):
    """Rows of data, as dicts. ids: the token ids of each row, see the functions below."""

    ids = ()
    mix = None  # of several files with weights, see options/sources.py
    sources = ()  # the name of each row's source, if they have some


def read_rows(path, shape, fields=""):
    """
    The Rows of a JSONL file. shape: a function of a row, such as prompt_row, which checks the row
    and brings it into one form. fields: the key; see options/sources.py. Raises BadInput, with file
    and line.
    """
    if not os.path.isfile(path) or re.search(r"(?i)\.(json|csv|parquet|gz)$", path):
        from options.sources import several_rows

        return several_rows(path, shape, fields)
    if fields:
        from options.sources import renamed

        shape = renamed(shape, fields)
    rows = Rows()
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    rows.append(shape(json.loads(line)))
                except ValueError as e:  # no JSON, or BadInput
                    raise BadInput(f"{path}, line {number}: {getattr(e, 'msg', e)}") from e
    if not rows:
        raise BadInput(f"{path}: the file is empty")
    return rows


def prompt_row(row):
    """A row with a prompt to answer; all other fields as they are, for rewards."""
    row = row | {"prompt": text_or_messages(row, "prompt")}
    answer = row.get("answer")
    finite = not isinstance(answer, float) or math.isfinite(answer)
    if not isinstance(answer, str | float | int | None) or not finite or re.search(
            NO_UTF8, str(answer)):
        raise BadInput(f"field 'answer' must be UTF-8 text or a number, found {shorten(answer)}")
    return row


def dialogue(row, *completions):
    """{"prompt", and each of the fields `completions`}: all strings, or all lists of messages."""
    made = {field: text_or_messages(row, field) for field in ("prompt", *completions)}
    for field in completions:
        if type(made[field]) is not type(made["prompt"]):
            raise BadInput(f"'prompt' and {field!r} must both be strings, or both messages")
        if isinstance(made[field], list):
            from options.chats import check_learned

            check_learned(made[field], field)
    return made


def text_or_messages(row, field):
    """A field of a row, checked: a string that is not empty, or a list of messages."""
    value = row.get(field) if isinstance(row, dict) else None
    if isinstance(value, list):
        from options.chats import check_messages

        check_messages(value, field)
    elif not isinstance(value, str) or ODD.search(value) or not value and field == "prompt":
        from options.mistakes import check_text

        check_text(row, field)
    return value


def encode_prompts(rows, path, models, max_new_tokens, system):
    """
    Give Rows the ids of each prompt, rows.ids: the toy's "1+2=" becomes [49, 43, 50, 61]. A prompt
    and max_new_tokens more must fit into the context of every model; the first one is the policy.
    """
    tokenizer = next(iter(models.values())).tokenizer
    if system.environment or system.tools:  # tools stand in the prompts
        from options.environment import environment_of

        environment_of(system, tokenizer)
    context = min(model.max_positions for model in models.values())
    limit = context - max_new_tokens
    key = "max_prompt_tokens" if 0 < system.max_prompt_tokens < limit else (
        f"max_new_tokens={max_new_tokens} in a context of {context}")
    limit = min(limit, system.max_prompt_tokens or limit)
    if tokenizer.chats:
        tokenizer.chats.check_kinds(rows, path)
    tokenizer.say_marks(rows, ["prompt"], path)

    def encode(rows):
        prompts = tokenizer.encode_prompts([row["prompt"] for row in rows])
        return [array("i", ids) for ids in prompts]  # 4 bytes a token

    def cut(ids):
        from options.too_long import front_cut

        return front_cut(ids, limit, tokenizer.bos_ids)

    return encode_rows(rows, path, encode, limit, system.too_long, cut, key=key)


def encode_demonstrations(rows, path, tokenizer, limit, too_long):
    """
    Give Rows the (ids, trained) of each prompt and completion, see encode_learned. With
    too_long = "cut" a row is cut at its end, and left out if no token that is learned remains.
    """
    def cut(example):
        ids, trained = (x[:limit] for x in example)
        return (ids, trained) if any(trained[1:]) else None  # nothing predicts a first token

    if tokenizer.chats:
        tokenizer.chats.check_kinds(rows, path)
    tokenizer.say_marks(rows, ["prompt", "completion"], path)
    return encode_rows(rows, path, lambda rows: [
        encode_learned(tokenizer, row["prompt"], row["completion"]) for row in rows], limit,
        too_long, cut, lambda example: len(example[0]))


def encode_learned(tokenizer, prompt, completion):
    """
    (ids, trained) of a demonstration: trained is True on the tokens that SFT learns: the completion
    and EOS, or the assistant's turns of the completion with their ends. Raises BadInput.
    """
    if not isinstance(prompt, str):
        return tokenizer.need_chats().encode_learned(prompt, completion, tokenizer)
    before, behind = tokenizer.encode_texts([prompt, completion])
    if tokenizer.adds_blank:  # not between the two
        from options.blanks import encode_behind

        (behind,) = encode_behind(tokenizer, [completion])
    ids = tokenizer.bos_ids + before
    return (ids + behind + [tokenizer.eos_id],
            [False] * len(ids) + [True] * (len(behind) + 1))


def encode_rows(rows, path, encode, limit, too_long, cut, length=len,
                key="max_tokens, and of a new model context"):
    """
    Give Rows their ids, and return the Rows. encode: a function of a list of rows -> their ids.
    length: of a row's ids -> how many tokens they are. cut: shortens the ids of a row of more than
    `limit` tokens, or gives None: it is dropped. too_long: the key, which says whether this is
    done. key: the one that the limit comes from, for the error.
    """
    try:
        encoded = list(encode(rows))
    except BadInput as e:
        from options.mistakes import of_rows

        raise of_rows(rows, path, encode, e) from e
    if not all(0 < length(ids) <= limit for ids in encoded):  # some rows do not fit
        from options.too_long import fit

        encoded = fit(rows, encoded, path, limit, too_long, cut, length, key)
    rows.ids = encoded
    for row in rows:
        alike.update(ascii(row).encode())  # all its fields
    return rows


def hash_of_ids(rows):
    """A hash of all ids of Rows: a resumed run must read the same texts."""
    digest = hashlib.sha256()
    for ids in rows.ids:
        digest.update(repr(tuple(ids)).encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=32)
def permutation(n, *key):
    """
    The numbers from 0 to n - 1 in a random order, (n,) int64, which depends only on the key:
    permutation(5, 1, "epoch", 0) is always [1, 2, 0, 3, 4]. Never write into it: it is cached.
    """
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def batch_rows(seed, iteration, batch_size, rows):
    """
    The row numbers of an iteration. The epochs follow each other, each in an order of its own; a
    batch may end one and begin the next. With 5 rows and seed = 1:

        epoch 0 has the order 1 2 0 3 4, epoch 1 the order 2 3 4 0 1
        the batches of batch_size = 3 are [1, 2, 0], [3, 4, 2], [3, 4, 0], ...
    """
    places = range(iteration * batch_size, (iteration + 1) * batch_size)  # counted over all epochs
    if rows.mix:
        return [rows.mix.row_at(place, seed) for place in places]
    n = len(rows)
    return [int(permutation(n, seed, "epoch", place // n)[place % n]) for place in places]


def run_length(max_iters, epochs, n, batch_size):
    """max_iters; or, with epochs > 0, the iterations of batch_size rows that the epochs take."""
    # rounded, because 1.1 * 50 is a little above 55
    return math.ceil(round(epochs * n / batch_size, 6)) if epochs else max_iters


def say_length(what, rows, steps, max_iters, batch_size):
    """Say how often a run takes its rows."""
    say(f"{what}: {len(rows)}; {steps} of {batch_size}: {max_iters}; epochs: "
        f"{max_iters * batch_size / len(rows):.4g}")


def say_prompts(train_rows, eval_rows, per_iteration, max_iters):
    """Say how often a run takes its prompts, and how many of the held-out ones are among them."""
    say_length("prompts", train_rows, "iterations", max_iters, per_iteration)
    known = {bytes(ids) for ids in train_rows.ids}
    both = sum(bytes(ids) in known for ids in eval_rows.ids)
    if both:
        say(f"warning: {both} of {len(eval_rows)} prompts of eval_path are also trained on: what "
            "they show may be learned by heart")


def hashed_row(n, *key):
    """A number from 0 to n - 1 that is a function of the key."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % n


def spread(n, size, seed):
    """
    The row numbers of an evaluation: `size` of the n rows of a file, in order, 0 = all: one of each
    of `size` equal parts, so if the file is sorted by task, all tasks are there.
    """
    size = min(size or n, n)
    ends = [*(n * i // size for i in range(size)), n]
    return [first + hashed_row(end - first, seed, "eval", first) for first, end in pairwise(ends)]
