"""
JSONL files and tokenizers; and which rows an iteration sees, as a function of (seed, iteration) alone.

Three kinds of tokenizer behind one face: the built-in byte-level one (tiktoken), GPT-2's from its vocab.json (tiktoken), and
whatever AutoTokenizer finds in a Hugging Face folder. Text that looks like a special token is plain text to all of them.
"""
import collections
import contextlib
import functools
import hashlib
import json
import os

import torch

from configurator import BadInput
from model import find_folder, read_json
from parallel import rank_and_size

# ---------------------------------------------------------------------------------------------------------------------
# JSONL


def read_jsonl(path, fields):
    """
    The rows of a JSONL file as dicts. fields: the names that every row must have, each a non-empty string, or, for all but
    `answer`, a non-empty list of {"role", "content"} messages. Raises BadInput with file, line and field.
    """
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
    for text in texts:
        if not isinstance(text, str):
            raise BadInput(f"{where}: field {field!r} must be a string, found {type(text).__name__}")
        if not text and field != "completion":
            raise BadInput(f"{where}: field {field!r} is empty")
        if any(0xD800 <= ord(ch) <= 0xDFFF for ch in text):
            raise BadInput(f"{where}: field {field!r} holds half a surrogate pair, which is not text")


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
    if counts and rank_and_size()[0] == 0:
        said = ", ".join(f"{s!r} in {n} of {len(rows)} rows" for s, n in counts.most_common(3))
        said += " and more" if len(counts) > 3 else ""
        print(f"{path}: {said}: special tokens, but in strings they are encoded as plain text, "
              "letter by letter; for a chat, write a list of {\"role\", \"content\"} messages "
              "instead (EOS is added by itself)", flush=True)


def encode_prompts(rows, tokenizer, longest, path):
    """
    The token ids of each row's prompt, all at once at the start: a prompt that is too long should not end a run on its third
    day. longest: how many tokens a prompt may have. Raises BadInput with the row.
    """
    prompts = []
    say_special_tokens(rows, ["prompt"], tokenizer, path)
    for number, row in enumerate(rows, 1):
        with naming(path, number):
            ids = tokenizer.encode_prompt(row["prompt"])
        if not 0 < len(ids) <= longest:
            raise BadInput(f"{path}, row {number}: the prompt has {len(ids)} tokens; from 1 to {longest} fit beside "
                           "max_new_tokens into the smallest context of the models. Shorten or drop it, or lower max_new_tokens")
        prompts.append(ids)
    return prompts


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


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


def load_tokenizer(path):
    """The tokenizer of a model folder or hub name. Its eos_ids are all that its configuration files name."""
    folder = path if os.path.isfile(os.path.join(path, "tiktoken.json")) else find_folder(path)
    config = os.path.join(folder, "config.json")
    family = read_json(config).get("model_type") if os.path.isfile(config) else None
    if os.path.isfile(os.path.join(folder, "tiktoken.json")):
        tokenizer = ByteTokenizer(read_json(os.path.join(folder, "tiktoken.json")))
    elif family == "gpt2" and os.path.isfile(os.path.join(folder, "vocab.json")) \
            and not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        tokenizer = GPT2Tokenizer(folder)
    else:
        tokenizer = HFTokenizer(folder)
    for file in ("generation_config.json", "config.json"):
        if os.path.isfile(os.path.join(folder, file)):
            ids = read_json(os.path.join(folder, file)).get("eos_token_id")
            tokenizer.eos_ids |= {i for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
    return tokenizer


def check_tokenizer_fits(tokenizer, model, path):
    """Raise BadInput if the tokenizer has ids that the model has no embedding for. (Fewer is fine: they are masked.)"""
    if tokenizer.vocab_size > model.config.vocab_size:
        raise BadInput(f"{path}: the tokenizer has {tokenizer.vocab_size} tokens but the model's vocabulary only "
                       f"{model.config.vocab_size}; they do not belong together")


class Tokenizer:
    """What all kinds share. encode is text -> ids; decode is ids -> text, without EOS and padding."""

    eos_id = pad_id = vocab_size = 0
    eos_ids = frozenset()
    special_texts = ()  # those of special tokens, which encode takes for plain text
    bos_ids = ()  # what stands before a plain-text prompt

    def specials_in(self, text):
        """Which special tokens a text spells."""
        return [s for s in self.special_texts if s in text]

    def encode_prompt(self, prompt):
        """Ids of a prompt: a string (after BOS, if the tokenizer has one) or a list of chat messages."""
        if isinstance(prompt, str):
            return list(self.bos_ids) + self.encode(prompt)
        return self.encode_chat(prompt)

    def encode_chat(self, messages):
        raise BadInput("a prompt is a list of messages, but this tokenizer has no chat template; write prompts as strings")

    def encode_completion(self, completion):
        """Ids of a whole completion, EOS included: a string, or a list with one assistant message."""
        if not isinstance(completion, str):
            completion = "".join(m["content"] for m in completion)
        return self.encode(completion) + [self.eos_id]


BYTE_LEVEL = {b: chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}  # GPT-2's printable names of bytes
BYTE_LEVEL |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTE_LEVEL)}


class ByteTokenizer(Tokenizer):
    """One token a byte, plus markers that text may contain, EOS and padding: tiktoken without merges, nothing to download."""

    def __init__(self, settings):
        import tiktoken

        self.settings = settings
        self.special_texts = settings["eos"], settings["pad"]
        specials = [*settings["markers"], *self.special_texts]
        self.encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
                                          special_tokens={s: 256 + i for i, s in enumerate(specials)})
        self.vocab_size = 256 + len(specials)
        self.eos_id, self.pad_id = self.vocab_size - 2, self.vocab_size - 1
        self.eos_ids = {self.eos_id}
        self.fingerprint = json.dumps(settings, sort_keys=True)

    def encode(self, text):
        return self.encoding.encode(text, allowed_special=set(self.settings["markers"]), disallowed_special=())

    def decode(self, ids):
        return self.encoding.decode([i for i in ids if i not in (self.eos_id, self.pad_id)], errors="replace")

    def save(self, folder):
        """Write tiktoken.json for us, and the same as tokenizer.json for transformers."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        with open(os.path.join(folder, "tiktoken.json"), "w", encoding="utf-8") as f:
            json.dump(self.settings, f, indent=2)
        backend = Backend(models.BPE(vocab={BYTE_LEVEL[b]: b for b in range(256)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([AddedToken(s, normalized=False) for s in self.settings["markers"]])
        backend.add_special_tokens([self.settings["eos"], self.settings["pad"]])
        backend.save(os.path.join(folder, "tokenizer.json"))
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=self.settings["eos"],
                           pad_token=self.settings["pad"], clean_up_tokenization_spaces=False), f, indent=2)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's merges through tiktoken, from the vocab.json in the folder: its ids are in the order of the merges."""

    def __init__(self, folder):
        import tiktoken

        self.files = {}
        for name in ("vocab.json", "merges.txt"):
            if os.path.isfile(os.path.join(folder, name)):
                with open(os.path.join(folder, name), encoding="utf-8") as f:
                    self.files[name] = f.read()
        vocab = read_json(os.path.join(folder, "vocab.json"))
        byte_of = {name: b for b, name in BYTE_LEVEL.items()}
        eos = "<|endoftext|>"
        if eos not in vocab:
            raise BadInput(f"{folder}/vocab.json: {eos!r} is missing; this is not GPT-2's vocabulary")
        self.special_texts = (eos,)
        self.eos_id = self.pad_id = vocab[eos]
        ranks = {bytes(byte_of[ch] for ch in token): i for token, i in vocab.items() if token != eos}
        pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
        self.encoding = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={eos: self.eos_id})
        self.vocab_size = max(vocab.values()) + 1
        self.eos_ids = {self.eos_id}
        self.fingerprint = hashlib.blake2b(self.files["vocab.json"].encode()).hexdigest()

    def encode(self, text):
        return self.encoding.encode(text, disallowed_special=())

    def decode(self, ids):
        return self.encoding.decode([i for i in ids if i != self.eos_id], errors="replace")

    def save(self, folder):
        for name, text in self.files.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                f.write(text)


class HFTokenizer(Tokenizer):
    """Any tokenizer that transformers can load, with its chat template."""

    def __init__(self, folder):
        from transformers import AutoTokenizer  # here, for it takes seconds and 150 MB that the toy does not need

        names = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
        if not any(os.path.isfile(os.path.join(folder, name)) for name in names):  # it would make up an empty one
            raise BadInput(f"{folder}: no tokenizer in this folder ({', '.join(names)}); copy its files there")
        try:
            self.backend = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as e:
            raise BadInput(f"{folder}: no usable tokenizer in this folder ({str(e).splitlines()[0]})") from e
        if self.backend.eos_token_id is None:
            raise BadInput(f"{folder}: its tokenizer has no EOS token, so no response could ever end; set eos_token in "
                           "tokenizer_config.json")
        self.eos_id = self.backend.eos_token_id
        self.pad_id = self.eos_id if self.backend.pad_token_id is None else self.backend.pad_token_id
        self.eos_ids = {self.eos_id}
        added = self.backend.added_tokens_decoder.values()
        # whether tokenizer_config.json names a role of theirs or not
        self.special_texts = [t.content for t in added if t.special and t.content.strip()]
        self.vocab_size = max(self.backend.get_vocab().values()) + 1
        lead = self.backend("")["input_ids"]  # [BOS] where the tokenizer puts one before text, else []
        self.bos_ids = [i for i in lead if i == self.backend.bos_token_id]
        self.fingerprint = hashlib.blake2b(json.dumps(self.backend.get_vocab(), sort_keys=True).encode()).hexdigest()

    def encode(self, text):
        return self.backend.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids):
        return self.backend.decode([i for i in ids if i not in self.eos_ids and i != self.pad_id])

    def encode_chat(self, messages):
        """
        The template's ids of these messages up to where the response goes on: in a new turn, or,
        where the last message is the assistant's, at its end, in the same turn. A user who types a
        special token gets its letters, not the token. Raises BadInput.
        """
        if not self.backend.chat_template:
            return super().encode_chat(messages)
        # a text that contains a special token is rendered as a placeholder; the blanks around it
        # stay, for the template may trim them
        filled, hidden = [dict(m) for m in messages], {}
        for i, m in enumerate(filled):
            if self.specials_in(m["content"]):
                mark, content = f"\ue000{i}\ue001", m["content"].strip()
                m["content"], hidden[mark] = m["content"].replace(content, mark), content
        text, ids = self.render(filled), []
        # the template's pieces are encoded with special tokens, the hidden texts without
        for mark, content in hidden.items():
            before, found, text = text.partition(mark)
            if not found:
                raise BadInput("a message contains special tokens and the chat template drops or moves messages; "
                               "remove the special tokens from the prompt")
            ids += self.backend.encode(before, add_special_tokens=False) + self.encode(content)
        return ids + self.backend.encode(text, add_special_tokens=False)

    def render(self, messages):
        """
        The chat template's text of some messages, with an open turn of the assistant at its end:
        its last message, or a new turn. Raises BadInput where the template does not keep that
        message.
        """
        last = messages[-1]["content"].strip() if messages[-1]["role"] == "assistant" else None
        how = dict(add_generation_prompt=last is None, continue_final_message=last is not None)
        try:
            text = self.backend.apply_chat_template(messages, tokenize=False, **how)
        except ValueError:
            if last is None:
                raise
            text = ""  # transformers does not find the last message in what the template gave
        if last is not None and not (last and text.rstrip().endswith(last)):
            raise BadInput("the last message is the assistant's, for the response to go on with, "
                           "but the chat template drops or changes a part of it, or it is blank; "
                           "end the prompt with another role's message, or write it as a string")
        return text

    def save(self, folder):
        self.backend.save_pretrained(folder)
