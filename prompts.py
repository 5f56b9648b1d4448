"""
A file of rows -> token ids -> the rows of an iteration -> micro-batches.

    {"prompt": "1+2=", "answer": "3"}                                      prompt_row
    {"prompt": [{"role": "user", "content": "1+2=?"}], "answer": "3"}
    {"prompt": "1+2=", "completion": "3"}                                  dialogue, for sft.py
    {"prompt": "1+2=", "chosen": "3", "rejected": "4"}                     and for rm.py

A row's texts are all strings, or all lists of messages; a completion's list continues the prompt's.
options/sources.py reads other files, and several files with weights. The rows of an iteration
depend only on the seed and the iteration, so a run that resumes sees the same.

A batch is a dict of tensors, with a row for each response: (B,) such as scores, or (B, T) such as
tokens and logprobs; the head of rollout.py has an example. A micro-batch is a few of its rows and
the columns that these use, (b, W).
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

import parallel
from errors import BadInput, nearest, say, shorten

NO_UTF8 = re.compile("[\ud800-\udfff]")  # what Python reads where bytes are no UTF-8


class Rows(list):
    """Rows of data, as dicts. ids: the token ids of each row, see the functions below."""

    ids = ()
    mix = None  # of several files with weights, see options/sources.py
    sources = ()  # the name of each row's source, if they have some


def read_rows(path, shape, fields=""):
    """
    The Rows of a JSONL file. shape: a function of a row, such as prompt_row, which checks the row
    and brings it into one form. fields: "question>prompt,a.b>answer" renames fields. Raises
    BadInput, with file and line.
    """
    if not os.path.isfile(path) and re.search("[,*:]", path) or re.search(
            r"\.(json|csv|parquet|gz)$", path):
        from options.sources import several_rows

        return several_rows(path, shape, fields)
    if not os.path.isfile(path):
        maker = os.path.join(os.path.dirname(path), "prepare.py")
        hint = nearest(path) or f"; type: python {maker}" * os.path.isfile(maker)
        raise BadInput(f"{path or 'the data'}: no such file in {os.getcwd()}{hint}")
    rows = Rows()
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    rows.append(shape(rename(json.loads(line), fields)))
                except json.JSONDecodeError as e:
                    raise BadInput(f"{path}, line {number}: no JSON, from character {e.pos + 1} on "
                                   f"({e.msg}); a row is one line") from e
                except ValueError as e:  # mostly BadInput
                    raise BadInput(f"{path}, line {number}: {e}") from e
    if not rows:
        raise BadInput(f"{path}: the file is empty")
    return rows


def rename(row, fields):
    """A row with quartet's names of the fields. A dot leads into a nested field."""
    if not isinstance(row, dict):
        raise BadInput(f"wanted an object such as {{\"prompt\": \"1+2=\"}}, found {shorten(row)}")
    pairs = [part.split(">") for part in fields.split(",") if part]
    if any(len(pair) != 2 for pair in pairs):
        raise BadInput(f"fields = {fields!r}: wanted THEIRS>OURS, in quotes")
    renamed = {key: row[key] for key in row if key not in [pair[0].strip() for pair in pairs]}
    for theirs, ours in pairs:
        value = row
        for key in [theirs] if theirs in row else theirs.strip().split("."):
            if not isinstance(value, dict) or key not in value:
                raise BadInput(f"fields: {theirs!r} is missing; the row has {', '.join(row)}")
            value = value[key]
        renamed[ours.strip()] = value
    return renamed


def prompt_row(row):
    """A row with a prompt to answer, its answer as text; other fields as they are, for rewards."""
    row = row | {"prompt": text_or_messages(row, "prompt")}
    answer = row.get("answer")
    if isinstance(answer, int) or isinstance(answer, float) and math.isfinite(answer):
        row["answer"] = repr(answer).removesuffix(".0")
    elif answer is not None and (not isinstance(answer, str) or NO_UTF8.search(answer)):
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
    value = row.get(field)
    if value is None:
        raise BadInput(f"field {field!r} is missing or null; the row has {', '.join(row)}; rename "
                       f'one by --fields="THEIRS>{field}", or see data/convert.py')
    if isinstance(value, list):
        from options.chats import check_messages

        check_messages(value, field)
    elif not isinstance(value, str):
        raise BadInput(f"field {field!r} must be a string, or a list of {{\"role\", \"content\"}} "
                       f"messages of text, found {shorten(value)}")
    elif NO_UTF8.search(value) or not value and field == "prompt":
        raise BadInput(f"field {field!r} is empty, or no UTF-8 text: {shorten(value)}")
    elif value.lstrip(" \n\t'\"").startswith(("[", "{")):
        from options.chats import check_text

        check_text(value, field)
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
    limit = min(model.max_positions for model in models.values()) - max_new_tokens
    if limit < 1:
        raise BadInput(f"max_new_tokens = {max_new_tokens} leaves no room for a prompt in the "
                       f"models' smallest context, {limit + max_new_tokens} tokens; lower it")
    key = "max_prompt_tokens" if 0 < system.max_prompt_tokens < limit else "max_new_tokens"
    limit = min(limit, system.max_prompt_tokens or limit)
    if tokenizer.chats:
        tokenizer.chats.check_kinds(rows, path)
    tokenizer.say_marks(rows, ["prompt"], path)
    bos = tokenizer.bos_ids

    def front_cut(ids):
        kept = bos if ids[:len(bos)] == bos else []
        return kept + ids[len(ids) - limit + len(kept):]

    return encode_rows(rows, path, lambda rows: tokenizer.encode_prompts(
        [row["prompt"] for row in rows]), limit, system.too_long, front_cut,
        key=key)


def encode_demonstrations(rows, path, tokenizer, limit, too_long):
    """
    Give Rows the (ids, trained) of each prompt and completion, as Tokenizer.encode_learned makes
    them. With too_long = "cut" a row is cut at its end, and left out if no token that is learned
    remains.
    """
    def cut(example):
        ids, trained = (x[:limit] for x in example)
        return (ids, trained) if any(trained[1:]) else None  # nothing predicts a first token

    if tokenizer.chats:
        tokenizer.chats.check_kinds(rows, path)
    tokenizer.say_marks(rows, ["prompt", "completion"], path)
    return encode_rows(rows, path, lambda rows: [
        tokenizer.encode_learned(row["prompt"], row["completion"]) for row in rows], limit,
        too_long, cut, lambda example: len(example[0]))


def encode_rows(rows, path, encode, limit, too_long, cut, length=len, check=None,
                key="max_tokens, and of a new model context"):
    """
    Give Rows their ids, and return the Rows. encode: a function of a list of rows -> their ids.
    too_long: the key of this name, for rows of more than `limit` tokens: "error", "drop", or "cut":
    the function cut shortens a row's ids; where it gives None, the row is dropped.
    length: a function of a row's ids -> how many tokens they are. check: a function of the ids of
    all rows, such as check_pairs. key: the key that the limit comes from, for the error.
    """
    try:
        encoded = list(encode(rows))
    except BadInput:
        for number, row in enumerate(rows, 1):  # which one?
            try:
                encode([row])
            except BadInput as e:
                raise BadInput(f"{path}, row {number}: {e}") from e
        raise
    if check:
        check(encoded)
    lengths = [length(ids) for ids in encoded]
    for number, n in enumerate(lengths, 1):
        if n == 0 or n > limit and too_long == "error":
            hint = "shorten it, or type --too_long=drop" if min(lengths) <= limit else (
                "no row is short enough: change that key, or take a model with a longer context")
            raise BadInput(f"{path}, row {number}: it has {n} tokens, and 1 to {limit} fit (by the "
                           f"key {key}); {hint}")
    long = [i for i, n in enumerate(lengths) if n > limit]
    for i in long:
        encoded[i] = cut(encoded[i]) if too_long == "cut" else None
    kept = [i for i, ids in enumerate(encoded) if ids is not None]
    if long:
        say(f"{path}: {len(long)} of {len(rows)} rows have more than {limit} tokens: {too_long}" + (
            f"; {len(rows) - len(kept)} of them have no token left to learn, and are left out"
            if too_long == "cut" and len(kept) < len(rows) else ""))
    if not kept:
        raise BadInput(f"{path}: no row is left; raise the limit of tokens")
    if rows.mix:
        rows.mix = rows.mix.keep(kept)
    rows[:] = [rows[i] for i in kept]
    rows.ids = [encoded[i] for i in kept]
    if isinstance(rows.ids[0], list):
        rows.ids = [array("i", ids) for ids in rows.ids]
    return rows


def check_pairs(pairs, path, train_path):
    """
    Say in which pairs chosen and rejected have the same ids: these teach nothing. Raises BadInput
    if all pairs to train on are such: a chat template may leave out the part that differs.
    """
    ties = [number for number, (chosen, rejected) in enumerate(pairs, 1) if chosen == rejected]
    if ties:
        text = (f"{path}: in {len(ties)} of {len(pairs)} pairs chosen and rejected are the same "
                f"tokens: row {', '.join(map(str, ties[:5]))}{', ...' * (len(ties) > 5)}")
        if len(ties) == len(pairs) and path == train_path:
            raise BadInput(f"{text}; if the rows differ, the chat template leaves the difference "
                           "out; type --chat_template=FILE")
        say(f"warning: {text}; they teach nothing")


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


def say_prompts(train_rows, eval_rows, per_iteration, max_iters):
    """Say how often a run takes its prompts, and how many of the held-out ones are among them."""
    say(f"{len(train_rows)} prompts; {max_iters} iterations of {per_iteration} are "
        f"{max_iters * per_iteration / len(train_rows):.3g} epochs")
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
    if not 0 < size < n:
        return list(range(n))
    ends = [n * i // size for i in range(size + 1)]
    return [first + hashed_row(end - first, seed, "eval", first) for first, end in pairwise(ends)]


# micro-batches
PADDING = 256  # one more micro-batch takes about as much time as so many tokens


def deal_rows(lengths, micro_batch_size, micro_batch_tokens=0):
    """
    This rank's micro-batches of the rows of all ranks: lists of row numbers. All ranks have equally
    many, some of them empty, because a forward of a sharded model is a collective. A micro-batch
    has at most micro_batch_size rows; or, with micro_batch_tokens, at most so many tokens, padding
    included; and at most PADDING tokens of padding, or an eighth of micro_batch_tokens.

    lengths: the tokens of each row. The rows are sorted, the longest first, and dealt to the ranks
    like cards: so all have about equally many tokens. With lengths of 5, 2, 3, 4 on two ranks,
    rank 0 gets the rows 0 and 2, and rank 1 the rows 3 and 1.
    """
    rank, size = parallel.rank_and_size()
    # micro_batch_tokens is for GPUs, where launching a micro-batch's kernels takes longer
    padding = max(PADDING, micro_batch_tokens // 8)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    dealt = []  # for each rank its micro-batches
    for hand in (order[number::size] for number in range(size)):  # the rows of one rank
        parts, part = [], []
        for i in hand:
            tokens = lengths[(part or [i])[0]] * (len(part) + 1)  # with row i, and with padding
            full = tokens > micro_batch_tokens > 0
            full |= len(part) == micro_batch_size and micro_batch_tokens == 0
            if part and (full or tokens - sum(lengths[j] for j in [*part, i]) > padding):
                parts.append(part)
                part = []
            part.append(i)
        dealt.append(parts + [part] if part else parts)
    return dealt[rank] + [[]] * (max(map(len, dealt)) - len(dealt[rank]))


def micro_batches(batch, rows, micro_batch_size, micro_batch_tokens=0):
    """
    This rank's micro-batches of some rows of a batch, dicts like the batch; all ranks have equally
    many, some without rows. Rows of about the same length come together, cut to the W columns of
    the longest. Rows [0, 1, 2] on one rank, with micro_batch_size = 2, T = 6 and padding as a dot:

        batch["tokens"]   5 6 7 8 9 .    of 5 tokens
                          1 2 . . . .       2
                          3 4 5 . . .       3

        the first:        5 6 7 8 9      row 0, W = 5
                          3 4 5 . .      row 2
        the second:       1 2            row 1, W = 2
    """
    lengths = batch["lengths"][rows].tolist()
    made = (micro_batch(batch, rows[torch.tensor(part, dtype=torch.int64, device=rows.device)],
                        max([lengths[i] for i in part], default=2))
            for part in deal_rows(lengths, micro_batch_size, micro_batch_tokens))
    # to make one, the CPU waits for the GPU: on a GPU all are made before the training begins
    return list(made) if rows.is_cuda else made


def micro_batch(batch, rows, W):
    """
    b rows of the batch, and the first W columns of what has columns. Without rows there is still a
    text of two tokens, none of which the policy sampled: sharded models run the forward on all
    ranks. All else has no rows, so what is computed with it adds 0.
    """
    T = batch["tokens"].shape[1]
    mb = {name: x[rows, :W] if x.shape[1:] == (T,) else x[rows] for name, x in batch.items()}
    if len(rows) == 0:
        mb |= {name: mb[name].new_zeros(1, W) for name in ("tokens", "response_mask")}
    return mb


def right_pad(sequences, pad_id):
    """
    Lists of token ids -> tokens (b, W) int64, padded on the right to the longest, and their mask
    (b, W) bool, made from lengths, not from ids: the pad id may be the EOS. Without sequences: a
    row of two zeros.
    """
    sequences = sequences or [[0, 0]]
    lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.int64)  # (b,)
    tokens = torch.full((len(sequences), int(lengths.max())), pad_id, dtype=torch.int64)
    for row, ids in enumerate(sequences):
        tokens[row, :len(ids)] = torch.tensor(ids)
    return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]
