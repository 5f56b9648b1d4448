"""
JSONL files; and which rows an iteration sees, as a function of (seed, iteration) alone.
"""
import collections
import contextlib
import functools
import hashlib
import json
import os

import torch

from errors import BadInput, warn


# ---------------------------------------------------------------------------------------------------------------------
# JSONL


def read_jsonl(path, fields):
    """
    The rows of a JSONL file as dicts. fields: the names that every row must have, each a non-empty string, or, for all but
    `answer`, a non-empty list of {"role", "content"} messages. Raises BadInput with file, line and field.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would hang, a device might never end
        raise BadInput(f"{path}: wanted a file, found something else, such as a directory, a pipe or a "
                       "device; it is read more than once")
    try:
        with open(path, "rb") as f:
            lines = f.read().split(b"\n")
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}; prepare the data first (data/*/prepare.py)") from e
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as e:
            raise BadInput(f"{where}: not UTF-8 (byte {e.start}); save the file as UTF-8") from e
        except (ValueError, RecursionError) as e:
            raise BadInput(f"{where}: not JSON ({e}); each line is one object, such as {{\"prompt\": \"1+2=\"}}") from e
        if not isinstance(row, dict):
            raise BadInput(f"{where}: wanted an object, found {type(row).__name__}")
        for field in fields:
            if field not in row:
                raise BadInput(f"{where}: field {field!r} is missing; it has {', '.join(map(repr, row)) or 'none'}")
            check_text(row[field], field, where)
        rows.append(row)
    if not rows:
        raise BadInput(f"{path}: the file is empty; prepare the data first (data/*/prepare.py)")
    return rows


def check_text(value, field, where):
    """Raise BadInput unless value is a non-empty string without lone surrogates, or a list of such messages."""
    texts = [value]
    if isinstance(value, list) and field != "answer":
        if not value or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
            raise BadInput(f"{where}: field {field!r} must be a string or a list of {{\"role\", \"content\"}} messages")
        texts = [m.get("content") for m in value]
        if any(is_surrogate(ch) for m in value for ch in m["role"]):
            raise BadInput(f"{where}: field {field!r} has a role with half a surrogate pair, which is not text")
    for text in texts:
        if not isinstance(text, str):
            raise BadInput(f"{where}: field {field!r} must be a string, found {type(text).__name__}")
        if not text and field != "completion":
            raise BadInput(f"{where}: field {field!r} is empty")
        if any(map(is_surrogate, text)):
            raise BadInput(f"{where}: field {field!r} holds half a surrogate pair, which is not text")


def is_surrogate(ch):
    return "\ud800" <= ch <= "\udfff"


@contextlib.contextmanager
def naming(path, number):
    """A BadInput from within, say of a chat template, says in which file and row it happened."""
    try:
        yield
    except BadInput as e:
        raise BadInput(f"{path}, row {number}: {e}") from e


def say_special_tokens(rows, fields, tokenizer, path):
    """
    Print one line on rank 0 if strings in these fields contain special tokens: they are encoded as
    plain text, which somebody who wrote a chat template's text by hand should know.
    """
    counts = collections.Counter()
    for row in rows:
        strings = [row[field] for field in fields if isinstance(row[field], str)]
        counts.update({special for text in strings for special in tokenizer.specials_in(text)})
    if counts:
        said = ", ".join(f"{s!r} in {n} of {len(rows)} rows" for s, n in counts.most_common(3))
        said += " and more" if len(counts) > 3 else ""
        warn(f"{path}: {said}: special tokens, but in strings they are encoded as plain text, letter "
             "by letter; for a chat, write a list of {\"role\", \"content\"} messages instead (EOS is "
             "added by itself)")


def encode_prompts(rows, tokenizer, longest, path, whose="the smallest context of the models"):
    """
    The token ids of each row's prompt, all at once at the start: a prompt that is too long should not end a run on its third
    day. longest: how many tokens a prompt may have; whose: the context that bounds it. Raises BadInput with the row.
    """
    prompts = []
    for number, row in enumerate(rows, 1):
        with naming(path, number):
            ids = tokenizer.encode_prompt(row["prompt"])
            if not 0 < len(ids) <= longest:
                raise BadInput(f"the prompt has {len(ids)} tokens; from 1 to {longest} fit beside max_new_tokens "
                               f"into {whose}. Shorten or drop it, or lower max_new_tokens")
        prompts.append(ids)
    return prompts


def encode_for_all(rows, path, max_new_tokens, models, tokenizer, reward_tokenizer):
    """
    encode_prompts with room for max_new_tokens in every one of {name: model}. A reward model with a
    tokenizer of its own reads the text anew, so the prompts are encoded with that one, too, only to
    see that they fit. How many of its tokens a response will be is not known before it is there: it
    must have room for as many as the policy may sample. Raises BadInput.
    """
    say_special_tokens(rows, ["prompt"], tokenizer, path)
    contexts = {name: m.config.max_positions for name, m in models.items()}
    if reward_tokenizer.fingerprint != tokenizer.fingerprint:
        longest = contexts.pop("reward_model") - max_new_tokens
        encode_prompts(rows, reward_tokenizer, longest, path, "the context of the reward model, in whose "
                       "tokenizer this is counted")
    return encode_prompts(rows, tokenizer, min(contexts.values()) - max_new_tokens, path)


@functools.lru_cache(maxsize=8)
def permutation(n, *key):
    """A permutation of n that is a function of the key, (n,) int64. Do not write into it: it is remembered."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=4).digest()
    return torch.randperm(n, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))


def batch_rows(seed, iteration, batch_size, n):
    """Which of n rows make up the batch of an iteration: the next batch_size of an endless walk through the epochs."""
    places = range(iteration * batch_size, (iteration + 1) * batch_size)
    return [int(permutation(n, seed, "epoch", place // n)[place % n]) for place in places]


def hashed_row(n, *key):
    """One of n rows, as a function of the key: for prompts outside of the walk through the epochs."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % n


def replace_rows(batch, rows, fresh, pad_id):
    """
    A dict of tensors (B, ...) with these rows (an index tensor) taken from another such dict, whose prompts may be longer or
    shorter: the narrower (., P + R) tensors get columns of padding on the left.
    """
    R = batch["response_mask"].shape[1]
    P, Q = batch["tokens"].shape[1] - R, fresh["tokens"].shape[1] - R
    replaced = {}
    for name, x in batch.items():
        y = fresh[name]
        if name in ("tokens", "attention_mask"):
            fill = pad_id if name == "tokens" else False
            x, y = (torch.nn.functional.pad(t, (max(P, Q) + R - t.shape[1], 0), value=fill) for t in (x, y))
        replaced[name] = x.index_copy(0, rows, y)
    return replaced


def right_pad(sequences, pad_id):
    """Lists of ids -> tokens (B, T) int64 padded on the right, attention_mask (B, T) bool, built from lengths."""
    width = max([len(s) for s in sequences], default=2)  # no rows: any width
    tokens = torch.full((len(sequences), width), pad_id, dtype=torch.int64)
    for row, s in enumerate(sequences):
        tokens[row, :len(s)] = torch.tensor(s)
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int64)
    return tokens, torch.arange(width) < lengths[:, None]


def micro_batches(batch, rows, size, count=0):
    """
    Slices of a dict of tensors (B, ...) for these row indices, `size` at a time, with (b, T) and (b, R) tensors cut to the
    columns that any row of the slice uses. Rows of like length share a slice: less padding to compute. How rows are sliced
    cannot change a result beyond rounding. count: how many slices there are at least; the last ones may have no rows.
    """
    T, R = batch["tokens"].shape[1], batch["response_mask"].shape[1]
    rows = rows[batch["attention_mask"][rows].sum(1).argsort(stable=True)]
    for part in (rows[i * size:(i + 1) * size] for i in range(max(count, -(-len(rows) // size)))):
        used = batch["attention_mask"][part].any(0)  # (T,)
        if len(part) == 0:
            used[T - R - 1:T - R + 1] = True  # one token of the prompt, one of the response
        columns = {T: used, R: used[T - R:]}
        yield {k: x[part][:, columns[x.shape[1]]] if x.dim() == 2 else x[part] for k, x in batch.items()}


def prompt_text(row):
    """A row's prompt, or the last of its messages; "" if it has none."""
    prompt = row.get("prompt", "")
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
