"""
The data: prompts as token ids, the rows that an iteration trains on, micro-batches. What the rows
are read from is in formats.py, and how they must look in rows.py.

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

import torch

import parallel
from errors import BadInput, warn
from formats import where_is


# --------------------------------------------------------------------------------------------------
# prompts as token ids


@contextlib.contextmanager
def naming(path, number):
    """
    A context: a BadInput that is raised within it, by a chat template for example, is raised again
    with the file and the number of the row in front.
    """
    try:
        yield
    except BadInput as e:
        raise BadInput(f"{path}, row {number}: {e}") from e


def say_special_tokens(rows, fields, tokenizer, path):
    """
    Print one line on rank 0 if strings in these fields of the rows contain special tokens, such as
    "<|im_start|>". In strings they are encoded as plain text, letter by letter. Somebody who has
    written out a chat template by hand should know that.
    """
    counts = collections.Counter()
    for row in rows:
        strings = [row[field] for field in fields if isinstance(row[field], str)]
        counts.update({special for text in strings for special in tokenizer.specials_in(text)})
    if counts:
        said = ", ".join(f"{s!r} in {n} of {len(rows)} rows" for s, n in counts.most_common(3))
        said += " and more" if len(counts) > 3 else ""
        warn(f"{path}: {said}: special tokens, but in strings they are encoded as plain text, "
             "letter by letter; for a chat, write a list of {\"role\", \"content\"} messages "
             "instead (EOS is added by itself)")


def say_system_prompt(rows, tokenizer, path):
    """
    Print a line on rank 0 if the key system_prompt is not used in some of the rows: it is the
    system message of chats that have none, and strings have no place for it.
    """
    chat = getattr(tokenizer, "chat", None)  # only a tokenizer with a chat template has the key
    if chat is None or not chat.system_prompt:
        return
    ours = {"role": "system", "content": chat.system_prompt}
    strings = sum(isinstance(row["prompt"], str) and row["prompt"] != "" for row in rows)
    other = sum(isinstance(row["prompt"], list) and row["prompt"][0]["role"] == "system"
                and row["prompt"][0] != ours for row in rows)
    if strings or other:
        warn(f"{path}: system_prompt is not used in {strings + other} of {len(rows)} rows: "
             f"{strings} are strings, {other} have a system message of their own")


def say_odd_texts(rows, fields, path):
    """
    Print a line on rank 0 where completions begin with their prompt, in more than half of the rows:
    they follow it, so it would be there twice; and where the two of a pair are one text.
    """
    twice = sum(isinstance(row["prompt"], str) and row["prompt"].strip() != "" and
                all(row[field].startswith(row["prompt"]) for field in fields) for row in rows)
    if twice > len(rows) / 2:
        warn(f"{path}: in {twice} of {len(rows)} rows {' and '.join(fields)} begin with the prompt "
             "that they follow, so it is there twice. Is that meant?")
    alike = sum(row["chosen"] == row["rejected"] for row in rows) if "rejected" in fields else 0
    if alike:
        warn(f"{path}: in {alike} of {len(rows)} pairs chosen and rejected are the same: there is "
             "nothing to learn from them")


def say_too_long(path, count, dropped, cut, limit, whose):
    """Print on rank 0 how many of so many rows are dropped or cut, if any. whose: the limit's."""
    if dropped or cut:
        what = [f"{dropped} dropped"] * (dropped > 0) + [f"{cut} cut"] * (cut > 0)
        warn(f"{path}: {' and '.join(what)} of {count} rows, as they have more tokens than {whose} "
             f"of {limit}")


def encode_each(rows, path, tokenizer):
    """The ids of each row's prompt, as the tokenizer gives them. Raises BadInput with the row."""
    prompts = []
    for number, row in enumerate(rows):
        with naming(*where_is(rows, path, number)):
            prompts.append(tokenizer.encode_prompt(row["prompt"]))
    return prompts


BESIDE = "beside max_new_tokens into {}. Shorten or drop it, or lower max_new_tokens"
CONTEXT = BESIDE.format("the smallest context of the models")


def encode_prompts(rows, tokenizer, longest, path, limit=CONTEXT, too_long="error",
                   encode=encode_each):
    """
    The token ids of each row's prompt: a list of lists. The toy's "123+456=" becomes
    [49, 50, 51, 43, 52, 53, 54, 61], a token for each byte.

    All prompts are encoded once, at the start: otherwise a prompt that is too long could end a run
    on its third day. longest: how many tokens a prompt may have. path: the file, and limit: what
    they fit into and what to do, both for the message. too_long: what becomes of a longer prompt:
    "error"; "drop", it is taken out of `rows`, too; "cut", it loses tokens at its beginning, behind
    BOS. encode: does what encode_each does, perhaps faster. Raises BadInput with the row.
    """
    prompts, kept, cut = encode(rows, path, tokenizer), [], 0
    for number, ids in enumerate(prompts):
        if len(ids) == 0 or len(ids) > longest and (too_long == "error" or longest < 1):
            with naming(*where_is(rows, path, number)):
                raise BadInput(f"the prompt has {len(ids)} tokens; from 1 to {longest} fit {limit}")
        if len(ids) > longest and too_long == "cut":
            bos = len(tokenizer.bos_ids) if longest > len(tokenizer.bos_ids) else 0
            prompts[number] = ids[:bos] + ids[len(ids) - longest + bos:]
            cut += 1
        if len(prompts[number]) <= longest:
            kept.append(number)
    say_too_long(path, len(rows), len(rows) - len(kept), cut, longest, "the limit")
    if len(kept) < len(rows):
        rows.keep(kept)
        prompts = [prompts[number] for number in kept]
    return prompts


def encode_for_all(rows, path, max_new_tokens, models, tokenizer, reward_tokenizer,
                   max_prompt_tokens=0, too_long="error", encode=encode_each):
    """
    encode_prompts, where a prompt and max_new_tokens more must fit into the context of every model,
    and the prompt into max_prompt_tokens, if that is not 0. models: {name: model}.

    A reward model with another tokenizer than the policy's is given text. So the prompts are
    encoded with its tokenizer, too, but only to check that they fit. How many of its tokens a
    response will have is not known yet: max_new_tokens of them must fit. It is given the whole
    prompt even where the policy's is cut. Raises BadInput.
    """
    say_special_tokens(rows, ["prompt"], tokenizer, path)
    say_system_prompt(rows, tokenizer, path)
    # a judge reads text, and has looked at the rows itself
    contexts = {name: model.max_positions for name, model in models.items()
                if name != "judge"}
    if min(contexts.values()) <= max_new_tokens:
        raise BadInput(f"max_new_tokens = {max_new_tokens} leaves no room for a prompt in the "
                       f"smallest context of the models, {min(contexts.values())}; type a "
                       "smaller --max_new_tokens")
    if reward_tokenizer.fingerprint != tokenizer.fingerprint:
        read = [name for name in contexts if name.startswith("reward_model")]  # one, or an ensemble
        longest = min(contexts.pop(name) for name in read) - max_new_tokens
        limit = BESIDE.format("the context of the reward model, in whose tokenizer this is counted")
        encode_prompts(rows, reward_tokenizer, longest, path, limit,
                       "drop" if too_long == "drop" else "error", encode)
    longest, limit = min(contexts.values()) - max_new_tokens, CONTEXT
    if 0 < max_prompt_tokens < longest:
        longest, limit = max_prompt_tokens, "max_prompt_tokens; raise it, or type --too_long=drop"
    return encode_prompts(rows, tokenizer, longest, path, limit, too_long, encode)


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


def iterations(config, n, batch_size):
    """max_iters; or, with the key epochs, how many iterations of batch_size rows these take."""
    epochs = config["epochs"]
    return math.ceil(epochs * n / batch_size) if epochs else config["max_iters"]


def hashed_row(n, *key):
    """
    A number from 0 to n - 1 that is a function of the key. GRPO's dynamic sampling draws its extra
    prompts with it: they do not belong to the walk through the epochs.
    """
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % n


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


def my_micro_batches(batch, rows, config, whose=None):
    """
    This rank's micro-batches of some rows of a batch: a generator of dicts like the batch. All
    ranks have about as many tokens, and as many micro-batches, of which some may have no rows.

    batch: a dict of tensors (B,), (B, T) or (B, R). rows: a tensor of row numbers. config: its keys
    micro_batch_size and micro_batch_tokens say how large a micro-batch is. whose: those of rank
    (number, of how many) instead of this one's.

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
    parts = parallel.my_micro_batches(lengths, config["micro_batch_size"],
                                      config["micro_batch_tokens"], whose)
    made = (micro_batch(batch, rows[torch.tensor(part, dtype=torch.int64, device=rows.device)])
            for part in parts)
    # To make one, the CPU waits for the GPU. So there all are made before the first one is trained
    # on, and the GPU never waits for the CPU in between.
    for mb in list(made) if rows.is_cuda else made:
        parallel.show_life()
        yield mb


def micro_batches_of(items, tokens_of, config):
    """
    This rank's micro-batches of some items, which all ranks hold: lists of items, one by one. It
    deals them out as my_micro_batches does rows. tokens_of: a function, the tokens of an item.
    """
    for part in parallel.my_micro_batches([tokens_of(item) for item in items],
                                          config["micro_batch_size"], config["micro_batch_tokens"]):
        parallel.show_life()
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
    and padded on the right, and chosen (b, T), True on the tokens of the response. What the batch
    has of each response token, (B, R), is here (b, R); R and T are only as long as these rows need.

    Of no rows, tokens has one row all the same, with nothing chosen in it: where the parameters are
    sharded, all ranks must run the forward, because they gather each layer together.
    """
    mb = {name: x[rows] for name, x in batch.items() if name not in ("tokens", "attention_mask")}
    R = batch["response_mask"].shape[1]
    lengths = mb["response_mask"].sum(1)  # (b,), of the responses
    longest = max(lengths.tolist(), default=1)
    mb = {name: x[:, :longest] if x.dim() > 1 and x.shape[1] == R else x for name, x in mb.items()}
    if len(rows) == 0:
        tokens = batch["tokens"].new_zeros(1, 2)
        return mb | dict(tokens=tokens, chosen=torch.zeros_like(tokens, dtype=torch.bool))
    mask = batch["attention_mask"][rows]
    tokens = left_aligned(batch["tokens"][rows], mask)  # (b, T)
    prompts = mask[:, :-R].sum(1)  # (b,): how many tokens each prompt has
    column = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
    chosen = (column >= prompts[:, None]) & (column < (prompts + lengths)[:, None])  # (b, T)
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
