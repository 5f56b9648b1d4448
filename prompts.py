"""
The data: prompts as token ids, the rows that an iteration trains on, micro-batches. What the rows
are read from, and how they must look, is in rows.py.

Which rows make up the batch of an iteration is a function of the seed and the iteration alone. So a
resumed run sees the same rows as one that was never stopped, with nothing to save.

A batch is a dict of tensors, with a row for each response: (B,) such as scores, (B, T) such as
tokens, or (B, R) such as logprobs. T = P + R: a prompt, padded on the left to P tokens, and a
response, padded on the right to R. The toy's prompt "123+456=" and response "579" EOS with P = 8
and R = 6 is a row of T = 14 tokens, the last two of them padding.
"""
import collections
import contextlib
import functools
import hashlib
import math
from array import array
from itertools import pairwise

import torch

import parallel
from errors import BadInput, warn
from rows import FLAGS, THOUGHTS, where_is

# --------------------------------------------------------------------------------------------------
# rows as token ids. All are encoded once, at the start: else a row that is too long could end a run
# on its third day


@contextlib.contextmanager
def naming(path, number):
    """
    A context: a BadInput that is raised in it, as by a chat template, gets the file and the number
    of the row in front.
    """
    try:
        yield
    except BadInput as e:
        raise BadInput(f"{path}, row {number}: {e}") from e


def at_row(rows, path):
    """A function of a row's number: the context that names it."""
    return lambda number: naming(*where_is(rows, path, number))


def say_special_tokens(rows, fields, tokenizer, path):
    """
    Print one line on rank 0 if strings in these fields contain special tokens, such as
    "<|im_start|>": somebody may have written out a chat template by hand.
    """
    strings = (row[field] for row in rows for field in fields if isinstance(row[field], str))
    counts = collections.Counter(s for text in strings for s in tokenizer.specials if s in text)
    if counts:
        said = ", ".join(f"{s!r} ({n} times)" for s, n in counts.most_common(3))
        warn(f"{path}: special tokens in strings are encoded as plain text, letter by letter: "
             f"{said}; for a chat, write a list of {{\"role\", \"content\"}} messages instead")


def rows_that_fit(rows, path, lengths, limit, whose, too_long):
    """
    The numbers of the rows of these lengths that have at most `limit` tokens, or that the caller
    will cut. whose: whose limit that is, for messages. too_long: what becomes of longer ones, see
    the scripts' key: "error" raises BadInput with the row, "drop" leaves them out, "cut" keeps
    them. A line says how many are dropped or cut.
    """
    long = [number for number, length in enumerate(lengths) if length > limit]
    if long and too_long == "error":
        with at_row(rows, path)(long[0]):
            raise BadInput(f"it has {lengths[long[0]]} tokens, and {whose} is {limit}; shorten or "
                           "drop it, or type --too_long=drop")
    if long:
        what = "cut" if too_long == "cut" else "dropped"
        warn(f"{path}: {len(long)} of {len(rows)} rows are {what}, as they have more tokens than "
             f"{whose} of {limit}")
    gone = set(long) if too_long != "cut" else ()
    return [number for number in range(len(lengths)) if number not in gone]


def keep(rows, numbers, *lists):
    """Take all other rows out of `rows`. Returns the lists, which are beside them, without them."""
    if len(numbers) < len(rows):
        rows.keep(numbers)
        lists = [[items[number] for number in numbers] for items in lists]
    return lists


def encode_prompts(rows, path, tokenizer, longest, whose, too_long="error"):
    """
    The ids of each row's prompt, of which `longest` tokens fit: a list of arrays. The toy's
    "123+456=" becomes [49, 50, 51, 43, 52, 53, 54, 61], a token for each byte.

    whose, too_long: see rows_that_fit. Rows that are dropped are taken out of `rows`, too; a prompt
    that is cut loses tokens at its beginning, behind BOS. Raises BadInput with the row.
    """
    found = tokenizer.encode_prompts([row["prompt"] for row in rows], at_row(rows, path))
    for number, ids in enumerate(found):
        if not ids:
            with at_row(rows, path)(number):
                raise BadInput("the prompt encodes to no token at all")
    kept = rows_that_fit(rows, path, list(map(len, found)), longest, whose, too_long)
    bos = tokenizer.bos_ids if longest > len(tokenizer.bos_ids) else []
    found, = keep(rows, kept, found)
    return [array("i", ids if len(ids) <= longest else bos + ids[len(ids) - longest + len(bos):])
            for ids in found]


def encode_for_all(rows, path, max_new_tokens, models, tokenizer, judge=None, max_prompt_tokens=0,
                   too_long="error"):
    """
    encode_prompts, where a prompt and max_new_tokens more must fit into the context of every model,
    and the prompt into max_prompt_tokens, if that is not 0. The question to the judge must fit,
    too, if there is one. models: {name: model}. Raises BadInput.
    """
    if judge:
        judge.check_rows(rows, path, max_new_tokens, too_long)
    say_special_tokens(rows, ["prompt"], tokenizer, path)
    context = min(model.max_positions for name, model in models.items() if name != "judge")
    longest, whose = context - max_new_tokens, "the smallest context, less max_new_tokens,"
    if longest < 1:
        raise BadInput(f"max_new_tokens = {max_new_tokens} leaves no room for a prompt in the "
                       f"smallest context of the models, {context}; type a smaller "
                       "--max_new_tokens")
    if 0 < max_prompt_tokens < longest:
        longest, whose = max_prompt_tokens, "max_prompt_tokens"
    return encode_prompts(rows, path, tokenizer, longest, whose, too_long)


def encode_examples(rows, path, tokenizer, context, max_tokens=0, too_long="error",
                    key="max_tokens"):
    """
    For sft.py and PPO-ptx: (ids, trained) of each row's prompt and completion. ids is an array of
    token ids; trained, of the same length, has 1 for the tokens that SFT trains, else 0.

    context: the model's; max_tokens: a smaller limit, 0 = none, and key: its name. An example that
    is cut loses its end, and so its EOS. Raises BadInput with the row.
    """
    say_special_tokens(rows, ["prompt", "completion"], tokenizer, path)
    unknown = {field for row in rows if isinstance(row["completion"], list)
               for message in row["completion"] if message["role"] == "assistant"
               for field in message.keys() - {"role", "content", *THOUGHTS, *FLAGS}}
    if unknown:
        warn(f"{path}: messages to learn have fields that only a chat template may read: "
             f"{', '.join(sorted(unknown))}")
    found = tokenizer.encode_examples([row["prompt"] for row in rows],
                                      [row["completion"] for row in rows], at_row(rows, path))
    limit, whose = limit_of(context, max_tokens, key)
    for number, (ids, trained) in enumerate(found):
        if rows[number]["prompt"] == "":  # before a text's first token is nothing to predict from
            trained[0] = False
        if trained[0] or not any(trained):
            with at_row(rows, path)(number):
                raise BadInput("there is nothing to learn in it, or nothing to predict it from: "
                               f"{len(ids)} tokens, of which {sum(trained)} are the answer's")
    kept = rows_that_fit(rows, path, [len(ids) for ids, _ in found], limit, whose, too_long)
    kept = [number for number in kept if any(found[number][1][:limit])]  # else nothing is left
    found, = keep(rows, kept, found)
    return [(array("i", ids[:limit]), array("b", trained[:limit])) for ids, trained in found]


def encode_scored(rows, path, tokenizer, fields, context, max_tokens=0, too_long="error"):
    """
    For rm.py: what a reward model reads of each row's prompt with each of the fields, such as
    "chosen" and "rejected": [(ids, ids), ...]. The rest as in encode_examples; nothing is cut,
    since a score is read at a text's end.
    """
    say_special_tokens(rows, ["prompt", *fields], tokenizer, path)
    prompts = [row["prompt"] for row in rows]
    lists = [tokenizer.encode_scored(prompts, [row[field] for row in rows], at=at_row(rows, path))
             for field in fields]
    found = [tuple(array("i", ids) for ids in group) for group in zip(*lists, strict=True)]
    limit, whose = limit_of(context, max_tokens, "max_tokens")
    lengths = [max(map(len, group)) for group in found]
    found, = keep(rows, rows_that_fit(rows, path, lengths, limit, whose, too_long), found)
    return found


def limit_of(context, max_tokens, key):
    """The smaller one of a model's context and max_tokens, the key (0: none), and its name."""
    if 0 < max_tokens < context:
        return max_tokens, key
    return context, "the model's context"


# --------------------------------------------------------------------------------------------------
# which rows an iteration sees


@functools.lru_cache(maxsize=32)
def permutation(n, *key):
    """
    The numbers from 0 to n - 1 in a random order, (n,) int64, which is a function of the key:
    permutation(5, 1, "epoch", 0) is [1, 2, 0, 3, 4] whenever and wherever it is called. Do not
    write into the tensor: the cache gives the same one to the next caller.
    """
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def batch_rows(seed, iteration, batch_size, n):
    """
    Which of the n rows of a file make up the batch of an iteration: a list of batch_size numbers.

    All epochs are walked through one after the other, each in an order of its own, batch_size rows
    an iteration. A batch may end one epoch and begin the next. With n = 5 and seed = 1:

        epoch 0 has the order 1 2 0 3 4, epoch 1 the order 2 3 4 0 1
        the batches of batch_size = 3 are [1, 2, 0], [3, 4, 2], [3, 4, 0], ...

    n may also be [(rows, weight), ...] of several files, whose rows are numbered one after the
    other: see mixed_row.
    """
    places = range(iteration * batch_size, (iteration + 1) * batch_size)  # on the walk
    if not isinstance(n, int):
        return [mixed_row(seed, place, n) for place in places]
    return [int(permutation(n, seed, "epoch", place // n)[place % n]) for place in places]


def mixed_row(seed, place, files):
    """
    The row at a place of the walk through several files, each in its own epochs.

    files: [(rows, weight), ...]. The first file gets the share s = weight / sum of all weights of
    the places: a place is its own if floor(s * place) grows there, and that number says how many
    of its rows came before. The other places are dealt out to the other files in the same way. So
    at any place each file has had its share, give or take fewer rows than there are files.

    With the weights 1 and 2 the places belong to the files  1 1 0  1 1 0  1 1 0 ...
    """
    first, weights = 0, [weight for _, weight in files]
    for number, (n, weight) in enumerate(files):
        share = weight / sum(weights[number:])  # of the places that files before have left
        before = int(share * place)
        if int(share * (place + 1)) > before:  # always so for the last file, whose share is 1
            order = permutation(n, seed, "file", number, "epoch", before // n)
            return first + int(order[before % n])
        place, first = place - before, first + n


def iterations(max_iters, epochs, n, batch_size):
    """max_iters; or, with epochs > 0, how many iterations of batch_size rows these take."""
    return math.ceil(epochs * n / batch_size) if epochs else max_iters


def hashed_row(n, *key):
    """
    A number from 0 to n - 1 that is a function of the key. GRPO's dynamic sampling draws its extra
    prompts with it: they do not belong to the walk through the epochs.
    """
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % n


def spread(n, size, seed):
    """
    Which of the n rows of a file an evaluation takes: `size` numbers in order, 0 = all. The seed
    says which one of each of so many equal stretches: of a file sorted by task all tasks count.
    """
    if not 0 < size < n:
        return list(range(n))
    ends = [n * i // size for i in range(size + 1)]
    return [first + hashed_row(end - first, seed, "eval", first) for first, end in pairwise(ends)]


def other_row(row, n, *key):
    """
    One of n rows, as a function of the key, but not this row (unless it is the only one). n may
    also be [(rows, weight), ...] of several files: then it is a row of the same file.
    """
    first = 0
    if not isinstance(n, int):
        sizes = [rows for rows, _ in n]
        file = next(i for i in range(len(sizes)) if row < sum(sizes[:i + 1]))
        first, n = sum(sizes[:file]), sizes[file]
    return first + (row - first + 1 + hashed_row(max(n - 1, 1), *key)) % n


# --------------------------------------------------------------------------------------------------
# batches


def replace_rows(batch, rows, fresh, pad_id):
    """
    The batch with some of its rows replaced: row rows[i] is row i of fresh.

    batch, fresh: dicts of tensors with the same names. rows: a tensor of row numbers. The longest
    prompts of the two may differ: then the tensors (., P + R) of the one with the shorter prompts
    get columns of padding on the left. Example, with R = 2 and pad_id 0: row 1 is replaced.

        batch["tokens"]   5 6  7 8      fresh["tokens"]   1 2 3  4 9      result   0 5 6  7 8
                          0 5  9 9                                                 1 2 3  4 9
    """
    width = max(batch["tokens"].shape[1], fresh["tokens"].shape[1])  # the wider P + R
    replaced = {}
    for name, old in batch.items():
        new = fresh[name]
        if name in ("tokens", "attention_mask"):
            fill = pad_id if name == "tokens" else False
            old = torch.nn.functional.pad(old, (width - old.shape[1], 0), value=fill)
            new = torch.nn.functional.pad(new, (width - new.shape[1], 0), value=fill)
        replaced[name] = old.index_copy(0, rows, new)
    return replaced


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


def my_micro_batches(batch, rows, micro_batch_size, micro_batch_tokens=0, whose=None):
    """
    This rank's micro-batches of some rows of a batch: a generator of dicts like the batch. All
    ranks have about as many tokens, and as many micro-batches, of which some may have no rows.

    batch: a dict of tensors (B,), (B, T) or (B, R). rows: a tensor of row numbers.
    micro_batch_size: rows of a micro-batch; or as many as have micro_batch_tokens, if that is
    given. whose: those of rank (number, of how many) instead of this one's.

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
    parts = parallel.my_micro_batches(lengths, micro_batch_size, micro_batch_tokens, whose)
    made = (micro_batch(batch, rows[torch.tensor(part, dtype=torch.int64, device=rows.device)])
            for part in parts)
    # To make one, the CPU waits for the GPU. So there all are made before the first one is trained
    # on, and the GPU never waits for the CPU in between.
    yield from list(made) if rows.is_cuda else made


def micro_batches_of(items, tokens_of, micro_batch_size, micro_batch_tokens=0):
    """
    This rank's micro-batches of some items, which all ranks hold: lists of items, one by one. It
    deals them out as my_micro_batches does rows. tokens_of: a function, the tokens of an item.
    """
    lengths = [tokens_of(item) for item in items]
    for part in parallel.my_micro_batches(lengths, micro_batch_size, micro_batch_tokens):
        yield [items[i] for i in part]


def tokens_of_example(example):
    """How many tokens a demonstration (ids, trained) has; trained is 1 on those it teaches."""
    return len(example[0])


def trained_tokens(examples):
    """How many tokens some demonstrations [(ids, trained), ...] teach, all together."""
    return sum(trained.count(1) for _, trained in examples)


def micro_batch(batch, rows):
    """
    b rows of the batch, as the models read them: tokens (b, T), each row from its first token on
    and padded on the right, and chosen (b, T), True on the tokens that the policy sampled. What the
    batch has of each response token, (B, R), is here (b, R); R and T are only as long as these rows
    need.

    Of no rows, tokens has one row all the same, with nothing chosen in it: where the parameters are
    sharded, all ranks must run the forward, because they gather each layer together.
    """
    mb = {name: x[rows] for name, x in batch.items() if name not in ("tokens", "attention_mask")}
    R = batch["response_mask"].shape[1]
    mask = batch["attention_mask"][rows]
    # the longest response: with gaps in response_mask it has more tokens than the policy sampled
    longest = max(mask[:, -R:].sum(1).tolist(), default=1)
    mb = {name: x[:, :longest] if x.dim() > 1 and x.shape[1] == R else x for name, x in mb.items()}
    if len(rows) == 0:
        tokens = batch["tokens"].new_zeros(1, 2)
        return mb | dict(tokens=tokens, chosen=torch.zeros_like(tokens, dtype=torch.bool))
    tokens = left_aligned(batch["tokens"][rows], mask)  # (b, T)
    prompts = mask[:, :-R].sum(1)  # (b,): how many tokens each prompt has
    column = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
    t = column - prompts[:, None]  # (b, T): which token of the response stands there
    inside = (t >= 0) & (t < longest)
    chosen = inside & mb["response_mask"].gather(1, t.clamp(0, longest - 1))  # (b, T)
    return mb | dict(tokens=tokens, chosen=chosen)


def left_aligned(tokens, mask):
    """
    Rows with padding on their left, (b, width), and mask, True on their tokens, which stand
    together -> (b, T), each from its first token on, T the tokens of the longest. What stands
    behind a row's tokens is one of them again; no model sees it from there.

        . . 1 2 .   ->  1 2 2
        . 3 4 5 .       3 4 5
    """
    first, lengths = mask.int().argmax(1), mask.sum(1)  # (b,) each
    column = torch.arange(max(lengths.tolist(), default=1), device=tokens.device)  # (T,)
    column = torch.minimum(column, (lengths - 1).clamp(min=0)[:, None])  # (b, T)
    return tokens.gather(1, first[:, None] + column)


def prompt_text(row):
    """The prompt of a data row as text: the string, or its last message; "" if it has none."""
    prompt = row.get("prompt", "")
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
