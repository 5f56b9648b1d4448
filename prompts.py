"""
A file of rows -> token ids -> the rows of an iteration.

    {"prompt": "1+2=", "answer": "3"}
    {"prompt": [{"role": "user", "content": "1+2=?"}], "answer": "3"}

demonstrations.py has rows with completions; options/sources.py reads other files, and several files
with weights. A script calls

    rows = read_prompts(path)         JSONL -> dicts
    check_rows(terms, rows)           rewards.py: has each row what the rewards need?
    encode_prompts(rows, models, ..)  -> rows.ids, by tokenizer.py; is a row too long?
    batch_rows(seed, iteration, ..)   which rows an iteration takes; nothing else decides it
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

from errors import BadInput, mistake, say, shorten

NO_UTF8 = "[\ud800-\udfff]"  # what Python reads where bytes are no UTF-8
NOT_PLAIN = re.compile(NO_UTF8 + r"|\A[\s'\"]*[\[{]")  # or a text that may be a list of messages
input_hash = hashlib.sha256()  # of all rows and FILE.pys that this process has read


class Rows(list):
    """The rows of a file, as dicts. path: of the file."""

    def __init__(self, rows=(), path=""):
        super().__init__(rows)
        self.path = path
        self.ids = ()  # the token ids of each row, see the functions encode_...
        self.mix = None  # of several files with weights, see options/sources.py
        self.sources = ()  # the name of each row's source, if the rows have the field `source`


def read_rows(path, check_row, fields=""):
    """
    The Rows of a JSONL file. check_row: a function such as prompt_row, which checks a row and
    brings it into one form. fields: the key. Raises BadInput, with file and line.
    """
    if not os.path.isfile(path) or re.search(r"(?i)\.(json|csv|parquet|gz)$", path):
        from options.sources import several_rows

        return several_rows(path, check_row, fields)
    if fields:
        from options.sources import renamed

        check_row = renamed(check_row, fields)
    rows = Rows(path=path)
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    rows.append(check_row(json.loads(line)))
                except ValueError as e:  # no JSON, or BadInput
                    raise BadInput(f"{path}, line {number}: {getattr(e, 'msg', e)}") from e
    if not rows:
        raise BadInput(f"{path}: the file is empty")
    return rows


def read_prompts(path, fields=""):
    """The Rows of a file of prompts. An empty path has none."""
    return read_rows(path, prompt_row, fields) if path else Rows()


def prompt_row(row):
    """A row with a prompt to answer; all other fields as they are, for rewards."""
    row = row | {"prompt": text_or_messages(row, "prompt")}
    answer = row.get("answer")
    finite = not isinstance(answer, float) or math.isfinite(answer)
    if not isinstance(answer, str | float | int | None) or not finite or re.search(
            NO_UTF8, str(answer)):
        raise BadInput(f"field 'answer' must be UTF-8 text or a number, found {shorten(answer)}")
    return row


def text_or_messages(row, field):
    """A field of a row, checked: a string that is not empty, or a list of messages."""
    value = row.get(field) if isinstance(row, dict) else None
    if isinstance(value, list):
        from options.chats import check_messages

        check_messages(value, field)
    elif not isinstance(value, str) or NOT_PLAIN.search(value) or not value and field == "prompt":
        from options.mistakes import check_text

        check_text(row, field)
    return value


def encode_prompts(rows, models, max_new_tokens, system):
    """
    Give Rows the ids of each prompt, rows.ids: the toy's "1+2=" becomes [49, 43, 50, 61]. A prompt
    and max_new_tokens more must fit into the context of every model; the first model is the policy.
    """
    tokenizer = next(iter(models.values())).tokenizer
    if system.environment or system.tools:  # the prompts contain the tools
        from options.environment import environment_of

        environment_of(system, tokenizer)
    context = min(model.max_positions for model in models.values())
    limit, key = context - max_new_tokens, f"{max_new_tokens=} in a context of {context}"
    if 0 < system.max_prompt_tokens < limit:
        limit, key = system.max_prompt_tokens, "max_prompt_tokens"
    if tokenizer.chats:
        tokenizer.chats.check_kinds(rows, rows.path)
    tokenizer.say_marks(rows, ["prompt"], rows.path)

    def encode(rows):
        prompts = tokenizer.encode_prompts([row["prompt"] for row in rows])
        return [array("i", ids) for ids in prompts]  # 4 bytes a token

    def cut(ids):
        from options.too_long import front_cut

        return front_cut(ids, limit, tokenizer.bos_ids)

    encode_rows(rows, encode, limit, system.too_long, cut, limit_key=key)
    if any("source" in row for row in rows):
        from options.sources import name_sources

        name_sources(rows, rows.path)
    return rows


def encode_rows(rows, encode, limit, too_long, cut, length=len,
                limit_key="max_tokens, and of a new model context"):
    """
    Give Rows their ids, and return the Rows. A row may have at most `limit` tokens.

    encode: a function, a list of rows -> the ids of each. length: a function, the ids of a row ->
    how many tokens they are. cut: a function, the ids of a row that is too long -> shorter ones, or
    None: the row is left out. too_long: the key that says what becomes of such a row. limit_key:
    the key that the limit comes from, for the error.
    """
    try:
        encoded = list(encode(rows))
    except BadInput as e:
        raise mistake("of_rows", rows, rows.path, encode, e) from e
    if not all(0 < length(ids) <= limit for ids in encoded):  # some rows do not fit
        from options.too_long import cut_or_drop

        encoded = cut_or_drop(rows, encoded, limit, too_long, cut, length, limit_key)
    rows.ids = encoded
    for row in rows:
        input_hash.update(ascii(row).encode())  # all its fields
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
    return torch.randperm(n, generator=torch.Generator().manual_seed(number_of(*key)))


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
    trained_on = {bytes(ids) for ids in train_rows.ids}
    shared = sum(bytes(ids) in trained_on for ids in eval_rows.ids)
    if shared:
        say(f"warning: {shared} of {len(eval_rows)} prompts of eval_path are also trained on: what "
            "they show may be learned by heart")


def number_of(*key, size=4):
    """A number of `size` bytes that depends only on the key, such as (seed, "epoch", 0)."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little")


def rows_to_evaluate(n, size, seed):
    """
    The numbers of the rows of an evaluation: `size` of the n rows of a file, in order; 0 = all. The
    file is cut into `size` equal parts, and each gives a row: in a file sorted by task, all tasks.
    """
    size = min(size or n, n)
    ends = [*(n * i // size for i in range(size)), n]
    return [first + number_of(seed, "eval", first, size=8) % (end - first)
            for first, end in pairwise(ends)]
