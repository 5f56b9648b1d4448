"""
Rows -> prompts as token ids, the rows of an iteration, micro-batches.

The rows of an iteration depend only on the seed and the iteration. So a resumed run sees the same
rows as a run that was never stopped, and nothing is saved.

A batch is a dict of tensors, with a row for each response: (B,) such as scores, (B, T) such as
tokens, or (B, R) such as logprobs. T = P + R: a prompt, padded on the left to P tokens, and a
response, padded on the right to R. The toy's prompt "123+456=" and response "579" EOS with P = 8
and R = 6 are a row of T = 14 tokens; the last two are padding.
"""
import collections
import functools
import hashlib
import math
from array import array
from itertools import pairwise

import torch

import parallel
import status
from errors import BadInput, warn
from rows import at_row, keep_rows

# --------------------------------------------------------------------------------------------------
# prompts as token ids. All are encoded once, at the start: otherwise a row that is too long could
# end a run on its third day


def encode_for_all(rows, path, max_new_tokens, models, tokenizer, judge=None, max_prompt_tokens=0,
                   too_long="error"):
    """
    encode_prompts, where a prompt and max_new_tokens more must fit into the context of every model,
    and the prompt into max_prompt_tokens, if that is not 0. If there is a judge, its question must
    fit, too. models: {name: model}. Raises BadInput.
    """
    if judge:
        judge.check_rows(rows, path, max_new_tokens, too_long)
    say_special_tokens(rows, ["prompt"], tokenizer, path)
    context = min(model.max_positions for name, model in models.items() if name != "judge")
    longest = context - max_new_tokens
    limit_name = f"the smallest context, {context}, less max_new_tokens = {max_new_tokens},"
    if longest < 1:
        raise BadInput(f"max_new_tokens = {max_new_tokens} leaves no room for a prompt in the "
                       f"smallest context of the models, {context}; type a smaller "
                       "--max_new_tokens")
    if 0 < max_prompt_tokens < longest:
        longest, limit_name = max_prompt_tokens, "max_prompt_tokens"
    return encode_prompts(rows, path, tokenizer, longest, limit_name, too_long)


def encode_prompts(rows, path, tokenizer, longest, limit_name, too_long="error"):
    """
    The ids of each row's prompt, at most `longest` tokens: a list of arrays. The toy's "123+456="
    becomes [49, 50, 51, 43, 52, 53, 54, 61], a token for each byte.

    limit_name, too_long: see rows_that_fit. Dropped rows are taken out of `rows`, too. A prompt
    that is cut loses tokens at its beginning, behind BOS. Raises BadInput with the row.
    """
    at = at_row(rows, path)
    found = tokenizer.encode_prompts([row["prompt"] for row in rows], at)
    for number, ids in enumerate(found):
        if not ids:
            with at(number):
                raise BadInput("the prompt encodes to no token at all")
    kept = rows_that_fit(rows, path, list(map(len, found)), longest, limit_name, too_long)
    keep_rows(rows, kept)
    bos, prompts = tokenizer.bos_ids, []
    for ids in (found[number] for number in kept):
        if len(ids) > longest:
            # strings have BOS, and chats if their template writes it
            front = bos if len(bos) < longest and ids[:len(bos)] == bos else []
            ids = front + ids[len(ids) - longest + len(front):]
        prompts.append(array("i", ids))
    return prompts


def say_special_tokens(rows, fields, tokenizer, path):
    """
    Print one line on rank 0 if strings in these fields contain special tokens, such as
    "<|im_start|>": somebody may have written a chat template by hand.
    """
    strings = (row[field] for row in rows for field in fields if isinstance(row[field], str))
    counts = collections.Counter(s for text in strings for s in tokenizer.specials if s in text)
    if counts:
        found = ", ".join(f"{s!r} ({n} times)" for s, n in counts.most_common(3))
        warn(f"{path}: special tokens in strings are encoded as plain text, letter by letter: "
             f"{found}; for a chat, write a list of {{\"role\", \"content\"}} messages instead")


def rows_that_fit(rows, path, lengths, limit, limit_name, too_long):
    """
    The numbers of the rows that have at most `limit` tokens, or that the caller will cut. lengths:
    of the rows, in tokens. limit_name: the limit in words, for messages. too_long, for longer rows,
    see the scripts' key: "error" raises BadInput with the row, "drop" leaves them out, "cut" keeps
    them. A line says how many are dropped or cut.
    """
    long = [number for number, length in enumerate(lengths) if length > limit]
    if not long:
        return list(range(len(lengths)))
    if too_long == "error":
        with at_row(rows, path)(long[0]):
            raise BadInput(f"it has {lengths[long[0]]} tokens, and {limit_name} is {limit}; "
                           "shorten or drop it, or type --too_long=drop")
    what = "cut" if too_long == "cut" else "dropped"
    warn(f"{path}: {len(long)} of {len(rows)} rows are {what}, as they have more tokens than "
         f"{limit_name} of {limit}")
    return [number for number, length in enumerate(lengths)
            if length <= limit or too_long == "cut"]


def prompt_text(row):
    """The prompt of a data row as text: the string, or its last message; "" if it has none."""
    prompt = row.get("prompt", "")
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


# --------------------------------------------------------------------------------------------------
# which rows an iteration sees


@functools.lru_cache(maxsize=32)
def permutation(n, *key):
    """
    The numbers from 0 to n - 1 in a random order, (n,) int64. The order depends only on the key:
    permutation(5, 1, "epoch", 0) is always [1, 2, 0, 3, 4]. Do not write into the tensor: the cache
    gives the same tensor to the next caller.
    """
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def batch_rows(seed, iteration, batch_size, n):
    """
    The row numbers of an iteration: a list of batch_size of the n rows of a file.

    The epochs follow each other, each in an order of its own, with batch_size rows an iteration. A
    batch may end one epoch and begin the next. With n = 5 and seed = 1:

        epoch 0 has the order 1 2 0 3 4, epoch 1 the order 2 3 4 0 1
        the batches of batch_size = 3 are [1, 2, 0], [3, 4, 2], [3, 4, 0], ...

    n may also be [(rows, weight), ...] of several sources, with rows numbered one source after the
    other: each source has its own epochs, see turn_of in options/sources.py.
    """
    places = range(iteration * batch_size, (iteration + 1) * batch_size)  # counted over all epochs
    if isinstance(n, int):
        return [int(permutation(n, seed, "epoch", place // n)[place % n]) for place in places]
    from options.sources import turn_of

    sizes, rows = [size for size, _ in n], []
    for place in places:
        part, count = turn_of(place, n)
        order = permutation(sizes[part], seed, "file", part, "epoch", count // sizes[part])
        rows.append(sum(sizes[:part]) + int(order[count % sizes[part]]))
    return rows


def iterations(max_iters, epochs, n, batch_size):
    """max_iters; or, with epochs > 0, the iterations of batch_size rows that the epochs take."""
    # rounded, because 1.1 * 50 is a little above 55
    return math.ceil(round(epochs * n / batch_size, 6)) if epochs else max_iters


def hashed_row(n, *key):
    """A number from 0 to n - 1 that is a function of the key."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % n


def spread(n, size, seed):
    """
    The row numbers of an evaluation: `size` of the n rows of a file, in order, 0 = all. The file is
    cut into `size` equal parts, and the seed chooses one row of each: so if the file is sorted by
    task, all tasks are there.
    """
    if not 0 < size < n:
        return list(range(n))
    ends = [n * i // size for i in range(size + 1)]
    return [first + hashed_row(end - first, seed, "eval", first) for first, end in pairwise(ends)]


# --------------------------------------------------------------------------------------------------
# micro-batches


def right_pad(sequences, pad_id):
    """
    Lists of token ids -> tokens (B, T) int64, padded on the right, and attention_mask (B, T) bool:

        [5, 6, 7], [8] with pad_id 0  ->  tokens   5 6 7     attention_mask   T T T
                                                   8 0 0                      T F F

    The mask is made from lengths, not from ids: the pad id may be the EOS.
    """
    lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.int64)  # (B,)
    width = max([len(ids) for ids in sequences], default=2)  # for no sequences, any width will do
    tokens = torch.full((len(sequences), width), pad_id, dtype=torch.int64)
    for row, ids in enumerate(sequences):
        tokens[row, :len(ids)] = torch.tensor(ids)
    return tokens, torch.arange(width) < lengths[:, None]


def my_micro_batches(batch, rows, micro_batch_size, micro_batch_tokens=0, as_rank=None):
    """
    This rank's micro-batches of some rows of a batch: a generator of dicts like the batch. All
    ranks have equally many micro-batches, some without rows, and about equally many tokens.

    batch: a dict of tensors (B,), (B, T) or (B, R). rows: a tensor of row numbers.
    micro_batch_size: rows of a micro-batch; micro_batch_tokens: or its most tokens, if it is not 0.
    as_rank: (rank, size) instead of this rank's own.

    Rows of about the same length come together, so that there is little padding. Example, rows
    [0, 1, 2] on one rank, with micro_batch_size = 2, T = 5, R = 2 and padding as a dot:

        batch["tokens"]   5 6 7  8 9     of 5 tokens
                          . . 1  2 .        2
                          . 3 4  5 .        3

        the first:        5 6 7 8 9      row 0
                          3 4 5 . .      row 2
        the second:       1 2            row 1
    """
    lengths = batch["attention_mask"].sum(1)[rows].tolist()
    parts = parallel.deal_rows(lengths, micro_batch_size, micro_batch_tokens, as_rank)
    made = (micro_batch(batch, rows[torch.tensor(part, dtype=torch.int64, device=rows.device)])
            for part in parts)
    # To make a micro-batch, the CPU waits for the GPU. So on a GPU all are made before the training
    # begins, and the GPU does not wait for the CPU between two of them.
    for number, mb in enumerate(list(made) if rows.is_cuda else made, 1):
        status.show(f"micro-batch {number} of {len(parts)}")
        yield mb


def micro_batch(batch, rows):
    """
    b rows of the batch, as the models read them: tokens (b, T), each row from its first token on
    and padded on the right, and target_mask (b, T), True on the tokens that the policy sampled.
    Columns (B, R) of the batch are here (b, R); R and T are only as long as these rows need.

    Without rows, tokens still has one row, without targets: where the parameters are sharded, all
    ranks must run the forward, because they gather each layer together.
    """
    mb = {name: x[rows] for name, x in batch.items() if name not in ("tokens", "attention_mask")}
    R = batch["response_mask"].shape[1]
    mask = batch["attention_mask"][rows]  # (b, P + R)
    # tokens of the longest response, with its gaps in response_mask
    longest = max(mask[:, -R:].sum(1).tolist(), default=1)
    mb = {name: x[:, :longest] if x.dim() > 1 and x.shape[1] == R else x for name, x in mb.items()}
    if len(rows) == 0:
        tokens = batch["tokens"].new_zeros(1, 2)
        return mb | dict(tokens=tokens, target_mask=torch.zeros_like(tokens, dtype=torch.bool))
    tokens = left_aligned(batch["tokens"][rows], mask)  # (b, T)
    column = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
    t = column - mask[:, :-R].sum(1)[:, None]  # (b, T): the place in the response, from 0 on
    inside = (t >= 0) & (t < longest)
    target_mask = inside & mb["response_mask"].gather(1, t.clamp(0, longest - 1))  # (b, T)
    return mb | dict(tokens=tokens, target_mask=target_mask)


def left_aligned(tokens, mask):
    """
    Moves rows to the left: tokens (b, width), and mask, True on a row's tokens, without gaps -> (b,
    T), each row from its first token on; T is the longest row's length. Behind a row's tokens the
    last one is repeated; no token sees it.

        . . 1 2 .   ->  1 2 2
        . 3 4 5 .       3 4 5
    """
    first, lengths = mask.int().argmax(1), mask.sum(1)  # (b,) each
    column = torch.arange(max(lengths.tolist(), default=1), device=tokens.device)  # (T,)
    column = torch.minimum(column, (lengths - 1).clamp(min=0)[:, None])  # (b, T)
    return tokens.gather(1, first[:, None] + column)
