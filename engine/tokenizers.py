"""
Text -> ids and back. There are three kinds of tokenizer with one interface (class Tokenizer):

    ByteTokenizer   the built-in one, a token a byte; nothing to download
    GPT2Tokenizer   GPT-2's merges, from vocab.json
    HFTokenizer     whatever transformers' AutoTokenizer finds in a Hugging Face folder

load_tokenizer chooses by the files in a model's folder. Text that looks like a special token is
plain text to all three: nobody who writes a prompt can end a turn or a response.
"""
import bisect
import contextlib
import hashlib
import json
import os
import re

from engine.chats import CHAT_KEYS, MARK, ChatTemplate, attempt, common_prefix, content_of
from folders import model_folders, read_file, read_json, read_text
from engine.text_ends import text_ends_of
from errors import BadInput, first_line, shorten, warn
from rows import is_surrogate


# --------------------------------------------------------------------------------------------------
# which tokenizer a folder holds

MODEL_FILES = ("config.json", "generation_config.json")
JSON_FILES = ("config.json", "generation_config.json", "tiktoken.json", "tokenizer.json",
              "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


TOKENIZERS = ("tiktoken.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


def load_tokenizer(path, config=None):
    """
    The tokenizer of a model folder or hub name. Its eos_ids are all ends that its own files, its
    chat template and the model's files (config.json, generation_config.json) name. Raises BadInput
    where a file is broken, or where all ends that one of the model's files names are plain text to
    the tokenizer: then the two are of different models.

    config: the keys of a run, of which chat_template, template_kwargs, system_prompt and chat_date
    are for chats; any of them may be absent.
    """
    config = dict.fromkeys(CHAT_KEYS, "") | (config or {})
    alone = os.path.isfile(os.path.join(path, "tiktoken.json"))  # perhaps without a model
    # of an adapter: its own tokenizer if it has one, else its base model's
    folders = [path] if alone else model_folders(path, weights=False)
    folder = next((f for f in folders if any(os.path.isfile(os.path.join(f, name))
                                             for name in TOKENIZERS)), folders[-1])
    files = {name: os.path.join(folders[-1] if name in MODEL_FILES else folder, name)
             for name in JSON_FILES}
    settings = {name: read_json(file) for name, file in files.items() if os.path.isfile(file)}
    family = settings.get("config.json", {}).get("model_type")
    has_template = config["chat_template"] or os.path.isfile(f"{folder}/chat_template.jinja")
    if "tiktoken.json" in settings:
        file = os.path.join(folder, "tiktoken.json")
        tokenizer = ByteTokenizer(check_byte_settings(settings["tiktoken.json"], file))
    elif (family == "gpt2" and os.path.isfile(os.path.join(folder, "vocab.json"))
          and "tokenizer.json" not in settings and not has_template):
        tokenizer = GPT2Tokenizer(folder)
    else:
        tokenizer = HFTokenizer(folder, config["chat_template"], config["template_kwargs"],
                                config["system_prompt"], config["chat_date"])
    for key in ("chat_template", "template_kwargs", "system_prompt"):
        if config[key] and not tokenizer.template:
            raise BadInput(f"{key} is given, but the tokenizer of {path} has no chat template"
                           + (", and takes none; leave it out" if key == "chat_template" else
                              "; give one with --chat_template=FILE, or leave it out"))

    named = set()  # the ends that the model's files name
    for file in ("generation_config.json", "config.json"):
        ids = settings.get(file, {}).get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < tokenizer.vocab_size]
        if not wrong and all(map(tokenizer.is_plain_text, ids)):
            wrong = ids  # one of several ends may be plain text, such as a newline, but not all
        if wrong:
            raise BadInput(f"{files[file]}: eos_token_id = {shorten(wrong[0])} is "
                           "no special token of the tokenizer beside it, which has "
                           f"{tokenizer.vocab_size} tokens and ends with {tokenizer.eos_id}; do "
                           "they belong together?")
        named.update(ids)
    if named and tokenizer.eos_id not in named:
        warn(f"{folder}: the model ends with {sorted(named)}, its tokenizer with "
             f"{tokenizer.eos_id}; do they belong together? A response may end with any of them")
    tokenizer.eos_ids |= named
    tokenizer.generation_config = settings.get("generation_config.json", {})
    return tokenizer


def add_ends(tokenizer, extra, stop_strings, max_new_tokens):
    """
    Let a response end with other tokens and texts, too, as the keys of these names say. extra: the
    key extra_eos_ids, such as "198,50256". "" adds none. Raises BadInput for what is no id of the
    tokenizer, and for a text that can never be in a response.
    """
    words = [word.strip() for word in extra.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) < tokenizer.vocab_size):
            raise BadInput(f"extra_eos_ids = {extra!r}: {word!r} is no id of the tokenizer; wanted "
                           f"numbers below {tokenizer.vocab_size}, such as "
                           f"--extra_eos_ids={tokenizer.eos_id}")
    tokenizer.eos_ids = tokenizer.eos_ids | {int(word) for word in words}
    tokenizer.text_ends = text_ends_of(stop_strings, tokenizer, max_new_tokens)


def check_tokenizer_fits(tokenizer, model, path):
    """
    Raise BadInput if the tokenizer has ids for which the model has no embedding, unless it can do
    without them: Gemma 3 1B reads no images, but has a token for them. Fewer ids are fine: the
    model's other tokens are never sampled. But vocabularies are padded by a few per cent at most,
    so warn where far more are missing.
    """
    tokens, embeddings = tokenizer.vocab_size, model.config.vocab_size
    if tokens > embeddings and tokenizer.can_do_without(range(embeddings, tokens)):
        warn(f"{path}: the tokenizer has {tokens} tokens, the model embeddings for {embeddings}; "
             "the others stand for no text, and are left out")
        tokenizer.vocab_size = tokens = embeddings
    if tokens > embeddings:
        raise BadInput(f"{path}: the tokenizer has {tokens} tokens but the model's vocabulary only "
                       f"{embeddings}; they do not belong together")
    if tokens < 0.9 * embeddings:
        warn(f"{path}: the tokenizer has {tokens} tokens, the model embeddings for {embeddings}; "
             "do they belong together?")


# --------------------------------------------------------------------------------------------------
# the interface


class Tokenizer:
    """What all kinds share. encode: text -> ids; decode: ids -> text, without EOS and padding."""

    eos_id = pad_id = vocab_size = 0
    skipped_id = None  # a reward model is read at the last token that is not this: see reading.py
    eos_ids = frozenset()  # a response ends with any of them
    text_ends = None  # the stop strings, with which it ends as well
    special_texts = ()  # how special tokens are spelt; encode takes such text for plain text
    bos_ids = ()  # what stands before a plain-text prompt
    fingerprint = chat_fingerprint = ""  # of the vocabulary, of the chat template
    template = None  # the chat template's text, if there is one
    generation_config = {}  # of the model beside it: how its makers sample from it

    @property
    def whole_fingerprint(self):
        """
        Differs where any text becomes other ids. fingerprint: where strings do; of a policy and a
        reward model, which read chats with a template of their own each, that one must be the same.
        """
        return self.fingerprint + self.chat_fingerprint

    def specials_in(self, text):
        """Which special tokens a text spells."""
        return [s for s in self.special_texts if s in text]

    def is_plain_text(self, i):
        """Whether the token of this id is a piece of text, and no end or marker."""
        return False

    def can_do_without(self, ids):
        """Whether no text becomes one of these ids, nor any end, padding or template."""
        return False

    def pieces(self):
        """
        The bytes that each token adds to a text: (where it is the first one, where it stands behind
        others), lists of V; None for tokens that decode leaves out. A character may be cut between
        two tokens.
        """
        raise NotImplementedError

    def unseen_texts(self):
        """How the special tokens are spelt that decode leaves out."""
        return self.special_texts

    def decode_response(self, ids):
        """The text of a response; one with a stop string ends right behind that."""
        text = self.decode(ids)
        return self.text_ends.cut(text) if self.text_ends else text

    def end_of(self, prompt):
        """The id with which a response to a prompt ends: of a string the EOS."""
        return self.eos_id

    def encode_prompt(self, prompt):
        """Ids of a prompt: a string (after BOS, if there is one) or a list of chat messages."""
        if isinstance(prompt, str):
            return list(self.bos_ids) + self.encode(prompt)
        return self.encode_chat(prompt)

    def encode_chat(self, messages):
        raise BadInput("a prompt is a list of messages, but this tokenizer has no chat template; "
                       "write prompts as strings, or give one with --chat_template=FILE")

    @property
    def vocabulary(self):
        """What is equal where ids mean the same."""
        return self.fingerprint

    def encode_response(self, prompt, completion, finished=True):
        """Ids of a prompt and a response, as a reward model of rm.py reads them."""
        ids, _ = self.encode_example(prompt, completion)  # the last is EOS, or the end of the turn
        return ids if finished else ids[:-1]

    def encode_completion(self, completion):
        """Ids of a completion, a string, and EOS."""
        return self.encode(completion) + [self.eos_id]

    def encode_example(self, prompt, completion):
        """
        (ids, trained) of a prompt and its completion, which both are strings, or both lists of
        messages of one dialogue: the ids, and for each of them whether SFT trains it. That is the
        completion with its EOS, or the assistant's turns of the completion with their end-of-turn
        tokens. The toy's "1+2=" and "3" make [49, 43, 50, 61, 51, EOS] and [F, F, F, F, T, T].

        Messages are encoded as apply_chat_template would, up to the last end-of-turn token. A
        string beside a list is taken for a message of the user's or the assistant's. If the last
        message of the prompt and the first one of the completion are both the assistant's, they
        are one message, of which the second part is trained. Raises BadInput.
        """
        if isinstance(prompt, str) and isinstance(completion, str):
            ids, more = self.encode_prompt(prompt), self.encode_completion(completion)
            return ids + more, [False] * len(ids) + [True] * len(more)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if completion[-1]["role"] != "assistant":
            raise BadInput(f"the completion ends with a message of {completion[-1]['role']!r}; the "
                           "last message must be the assistant's, for it is what is learned")
        return self.encode_dialogue(prompt, completion)

    def encode_dialogue(self, prompt, completion):
        """encode_example for lists of messages; an error where there is no chat template."""
        return self.encode_chat(prompt)


# --------------------------------------------------------------------------------------------------
# bytes

# GPT-2 writes each byte as a printable character: itself, or one from 256 on
BYTE_LEVEL = {b: chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
BYTE_LEVEL |= {b: chr(256 + i)
               for i, b in enumerate(b for b in range(256) if b not in BYTE_LEVEL)}
BYTE_OF = {ch: b for b, ch in BYTE_LEVEL.items()}


class ByteTokenizer(Tokenizer):
    """
    One token a byte, then markers (such as <think>, which text may contain), EOS and padding:
    tiktoken without merges. settings: {"markers": [...], "eos": ..., "pad": ...}.
    """

    def __init__(self, settings):
        import tiktoken

        self.settings = settings
        self.special_texts = settings["eos"], settings["pad"]
        specials = [*settings["markers"], *self.special_texts]
        self.encoding = tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={s: 256 + i for i, s in enumerate(specials)})
        self.vocab_size = 256 + len(specials)
        self.eos_id, self.pad_id = self.vocab_size - 2, self.vocab_size - 1
        self.eos_ids = {self.eos_id}
        self.fingerprint = json.dumps(settings, sort_keys=True)

    def is_plain_text(self, i):
        return i < 256

    def encode(self, text):
        markers = set(self.settings["markers"])
        return self.encoding.encode(text, allowed_special=markers, disallowed_special=())

    def decode(self, ids):
        ids = [i for i in ids if i not in (self.eos_id, self.pad_id)]
        return self.encoding.decode(ids, errors="replace")

    def pieces(self):
        pieces = [self.encoding.decode_single_token_bytes(i) for i in range(self.vocab_size)]
        pieces[self.eos_id] = pieces[self.pad_id] = None
        return pieces, pieces

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
            json.dump(dict(tokenizer_class="PreTrainedTokenizerFast",
                           eos_token=self.settings["eos"], pad_token=self.settings["pad"],
                           # transformers 4 would add token_type_ids, which GPT-2 takes for words
                           model_input_names=["input_ids", "attention_mask"],
                           clean_up_tokenization_spaces=False), f, indent=2)


def check_byte_settings(settings, file):
    """
    The settings of a ByteTokenizer, as they are. Raises BadInput unless markers, eos and pad are
    there, and all of them different strings.
    """
    markers = settings.get("markers")
    names = [*(markers if isinstance(markers, list) else [None]),
             settings.get("eos"), settings.get("pad")]
    texts = [x for x in names if isinstance(x, str) and x and not any(map(is_surrogate, x))]
    if len(set(texts)) < len(names):
        raise BadInput(f"{file}: wanted markers, a list of strings, eos and pad, all of them "
                       "different")
    return settings


# --------------------------------------------------------------------------------------------------
# GPT-2


class GPT2Tokenizer(Tokenizer):
    """GPT-2's merges through tiktoken. vocab.json is enough: its ids are in the order of merges."""

    def __init__(self, folder):
        import tiktoken

        self.files = read_tokenizer_files(folder)
        vocab = read_json(os.path.join(folder, "vocab.json"))
        check_ids(vocab, f"{folder}/vocab.json")
        eos = "<|endoftext|>"
        if eos not in vocab:
            raise BadInput(f"{folder}/vocab.json: {eos!r} is missing; this is not GPT-2's "
                           "vocabulary")
        unknown = [t for t in vocab if t != eos and (not t or set(t) - BYTE_OF.keys())]
        unknown += [ch for ch in BYTE_OF if ch not in vocab]
        if unknown:
            raise BadInput(f"{folder}/vocab.json: {shorten(unknown[0])} is no token of GPT-2's, or "
                           "is missing there; this is not its vocabulary")
        ranks = {bytes(BYTE_OF[ch] for ch in t): i for t, i in vocab.items() if t != eos}
        self.bytes_of = {i: t for t, i in ranks.items()}
        # how GPT-2 cuts a text into words before it merges
        pattern = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"""
                   r"""|\s++$|\s+(?!\S)|\s""")
        self.encoding = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks,
                                          special_tokens={eos: vocab[eos]})
        self.special_texts = (eos,)
        self.eos_id = self.pad_id = vocab[eos]
        self.eos_ids = {self.eos_id}
        self.vocab_size = max(vocab.values()) + 1
        self.fingerprint = vocabulary_hash(vocab)

    def is_plain_text(self, i):
        return i != self.eos_id

    def encode(self, text):
        return self.encoding.encode(text, disallowed_special=())

    def decode(self, ids):
        return self.encoding.decode([i for i in ids if i != self.eos_id], errors="replace")

    def pieces(self):
        pieces = [self.bytes_of.get(i) for i in range(self.vocab_size)]
        return pieces, pieces

    def save(self, folder):
        write_files(folder, self.files)


# --------------------------------------------------------------------------------------------------
# Hugging Face


# how many families spell the tokens of their templates: <|im_end|>, and DeepSeek with other bars
MARKUP = r"<\|\w+\|>|<\uff5c[^<>\s]+\uff5c>"


class HFTokenizer(Tokenizer):
    """Any tokenizer that transformers can load, with its chat template."""

    def __init__(self, folder, *chat):
        """chat: the values of CHAT_KEYS."""
        # imported here: it takes seconds and 150 MB, which the other tokenizers do not need
        from transformers import AutoTokenizer

        names = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
        if not any(os.path.isfile(os.path.join(folder, name)) for name in names):
            # transformers would make an empty tokenizer here
            raise BadInput(f"{folder}: no tokenizer in this folder ({', '.join(names)}); copy its "
                           "files there")
        self.folder = folder
        template = os.path.join(folder, "chat_template.jinja")
        if os.path.isfile(template):
            read_text(template)  # raises BadInput if it cannot be read

        def read():
            self.backend = AutoTokenizer.from_pretrained(folder, local_files_only=True,
                                                         trust_remote_code=False)
            self.backend.decode(self.backend.encode("a"))
            lead = self.backend("")["input_ids"]  # [BOS] if it puts one before text, else []
            ids = (self.backend.eos_token_id, self.backend.pad_token_id, self.backend.bos_token_id)
            return self.backend.get_vocab(), lead, *ids

        found, e = attempt(read)
        if e:
            raise BadInput(f"{tokenizer_file_at_fault(folder)}: no usable tokenizer "
                           f"({first_line(e)[:200]}); save or download it again") from e
        vocab, lead, eos, pad, bos = found
        if eos is None:
            raise BadInput(f"{folder}: its tokenizer has no EOS token, so no response could ever "
                           "end; set eos_token in tokenizer_config.json")
        self.fast = self.backend.is_fast  # whether it knows which characters a token stands for
        fast = getattr(self.backend, "backend_tokenizer", None)
        check_ids(fast.get_vocab(with_added_tokens=False) if fast else vocab,
                  f"{folder}: its vocabulary")
        self.eos_id, self.pad_id = eos, eos if pad is None else pad
        self.eos_ids = {self.eos_id}
        self.bos_ids = [i for i in lead if i == bos]
        self.vocab_size = max(vocab.values()) + 1
        # all added tokens, even those for which tokenizer_config.json names no role
        added = self.backend.added_tokens_decoder
        self.specials = {i: t.content for i, t in added.items()}
        self.special_texts = [t.content for t in added.values() if t.special and t.content.strip()]
        if vocab.get("[PAD]") == self.vocab_size - 1:
            vocab.pop("[PAD]")  # which rm.py may have added: no other id means anything else by it
        self.fingerprint = vocabulary_hash(vocab)
        self.special_ids = {i for i, t in added.items() if t.special}
        names = getattr(self.backend, "vocab_files_names", {}).values()
        self.files = read_tokenizer_files(folder, names)
        self.chat = ChatTemplate(self.backend, folder, *chat)
        self.template, self.chat_fingerprint = self.chat.text, self.chat.fingerprint
        text = self.template or ""
        self.mark_as_special([t for t in added.values() if t.content in text and not t.special
                              and re.fullmatch(MARKUP, t.content)])
        self.said = set()  # what say_once has printed
        self.turn_end = self.find_turn_end()
        self.eos_ids |= {self.turn_end} - {None}
        letters = set(re.findall(MARKUP, text)) - self.backend.get_vocab().keys()
        if letters:
            warn(f"{self.chat.name} writes {min(letters)}, which to its tokenizer is no token but "
                 "plain letters; is that meant?")

    def mark_as_special(self, tokens):
        """
        Take tokens that a template writes, such as <|im_end|>, for special ones where their author
        has not: or who types one into a message would end a turn. The saved files stay as they are.
        """
        from transformers import AddedToken

        for t in tokens:
            self.backend.add_tokens([AddedToken(t.content, special=True, normalized=t.normalized,
                                                lstrip=t.lstrip, rstrip=t.rstrip)], True)
            self.special_texts.append(t.content)
            self.special_ids.add(self.backend.convert_tokens_to_ids(t.content))

    def is_plain_text(self, i):
        return i not in self.specials

    def can_do_without(self, ids):
        needed = self.eos_ids | {self.pad_id, *self.bos_ids}
        return all(i in self.special_ids and i not in needed
                   and self.specials[i] not in (self.template or "") for i in ids)

    def encode(self, text):
        return self.backend.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids):
        return self.text_of([i for i in ids if i not in self.eos_ids and i != self.pad_id])

    def text_of(self, ids):
        """The text of ids, EOS and padding included, with all its blanks."""
        # some versions would take those out of ' ' and 3 . 5 where the tokenizer's files want it,
        # as Llama 3's do
        return self.backend.decode(ids, clean_up_tokenization_spaces=False)

    def pieces(self):
        names = self.backend.convert_ids_to_tokens(range(self.vocab_size))
        seen = [name is not None and i not in self.eos_ids and i != self.pad_id
                for i, name in enumerate(names)]
        both = []
        for before in ([], self.encode("a")[-1:]):
            skipped = len(self.text_of(before))
            ids = [[*before, i] for i in range(self.vocab_size)]
            if self.fast:  # 100 times as fast as one by one
                texts = self.backend.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)
            else:
                texts = map(self.text_of, ids)
            both.append([bytes_of(name, text[skipped:]) if shown else None
                         for name, text, shown in zip(names, texts, seen, strict=True)])
        return tuple(both)

    def unseen_texts(self):
        return [self.specials[i] for i in {*self.eos_ids, self.pad_id} & self.special_ids]

    def end_of(self, prompt):
        chat = not isinstance(prompt, str) and self.turn_end is not None
        return self.turn_end if chat else self.eos_id

    def encode_chat(self, messages):
        """
        Ids of these messages in the chat template, up to where the response begins: in a new turn,
        or, if the last message is the assistant's, at the end of that message, in its turn. A user
        who types a special token gets its letters, not the token. Raises BadInput.
        """
        if not self.template:
            return super().encode_chat(messages)
        filled, hidden = self.hide(self.chat.with_system_prompt(messages))
        text = self.chat.render_open(filled)
        self.say_what_is_left_out(text, filled)
        return self.encode_text(text, hidden)[0]

    def encode_whole(self, messages):
        """
        Ids of all that the chat template makes of the messages, to the last character. A message
        that spells a special token gets its letters. Raises BadInput.
        """
        filled, hidden = self.hide(messages)
        return self.encode_text(self.chat.render(filled), hidden)[0]

    def encode_dialogue(self, prompt, completion):
        """
        encode_example for lists of messages. What is trained of a turn begins where the prompt that
        the policy would answer ends, and ends with the first end-of-turn token. Raises BadInput.
        """
        if not self.template:
            return super().encode_dialogue(prompt, completion)
        prompt = self.chat.with_system_prompt(prompt)
        filled, hidden = self.hide([*prompt, *completion])
        first = len(prompt)  # the first message that may be trained
        opened = None  # the text in front of it, where it goes on with the prompt's last message
        if first and filled[first - 1]["role"] == filled[first]["role"] == "assistant":
            opened = self.chat.render_open(filled[:first])
            whole = content_of(filled[first - 1]) + content_of(filled[first])
            first -= 1
            filled[first:first + 2] = [{**filled[first], **filled[first + 1], "content": whole}]
        text = self.chat.render(filled)
        self.say_what_is_left_out(text, filled)
        ids, ends = self.encode_text(text, hidden)
        trained = [False] * len(ids)

        begins = [self.chat.turn_begin(text, filled, i) for i in range(first, len(filled))
                  if filled[i]["role"] == "assistant"]
        if opened is not None:
            begins[0] = common_prefix(text, opened)
        begins = [self.token_at(begin, text, ids, ends, hidden) for begin in begins]
        turn_ends = {i for i in self.eos_ids if not self.is_plain_text(i)}
        for begin, limit in zip(begins, [*begins[1:], len(ids)], strict=True):
            end = next((j for j in range(begin, limit) if ids[j] in turn_ends), None)
            if limit < len(ids) and (end is None or self.turn_end is None):
                raise BadInput(f"{self.chat.name} writes no end of turn behind the assistant's "
                               "messages, so several of them cannot be told apart; leave one in "
                               "each row, or give another --chat_template")
            if end is None:  # the last turn, and the template does not end it
                self.say_once(f"{self.chat.name} writes no end of turn behind the assistant's "
                              "message; EOS is put there")
                end, ids, trained = len(ids), [*ids, self.eos_id], [*trained, True]
            trained[begin:end + 1] = [True] * (end + 1 - begin)
        return ids[:end + 1], trained[:end + 1]

    def say_once(self, message):
        """Print a warning, but not a second time."""
        if message not in self.said:
            warn(message)
        self.said.add(message)

    def say_what_is_left_out(self, text, messages):
        """
        Print once for each role that the template's text has not all of a message's: Qwen3's drops
        the thoughts of earlier turns, DeepSeek-R1's those of all, Mistral's the system message of
        some chats; and for each of the fields of thoughts that it leaves out. Blanks and line
        breaks may change.
        """
        letters = "".join(text.split())
        for m in messages:
            if "".join(content_of(m).split()) not in letters:
                self.say_once(f"{self.chat.name} does not write all of each message of the role "
                              f"{m['role']!r}; what it leaves out, the model does not see")
            for name in ("reasoning_content", "reasoning", "thinking"):
                if "".join(str(m.get(name) or "").split()) not in letters:
                    self.say_once(f"{self.chat.name} does not write the field {name!r} of each "
                                  "message; what it leaves out, the model does not see")

    def hide(self, messages):
        """
        (messages, hidden): the messages, in which a content that spells a special token is replaced
        by a mark, and {mark: content}. A template would make a token of it. The blanks around the
        content stay, because the template may strip them. Raises BadInput where something else
        than the content spells one, such as a role.
        """
        filled, hidden = [dict(m) for m in messages], {}
        contents = [content_of(m) for m in messages]
        # a character of Unicode's private area that no message has
        sign = next(chr(c) for c in range(ord(MARK), 0xF900)
                    if not any(chr(c) in content for content in contents))
        for i, (m, content) in enumerate(zip(filled, contents, strict=True)):
            if self.specials_in(content):
                mark, content = f"{sign}{i}{sign}", content.strip()
                m["content"], hidden[mark] = m["content"].replace(content, mark), content
            rest = {k: v for k, v in m.items() if k != "content"}
            rest = json.dumps(rest, ensure_ascii=False, default=str)
            if self.specials_in(rest):
                raise BadInput(f"a message spells the special token {self.specials_in(rest)[0]!r} "
                               "in another field than its content; remove it")
        return filled, hidden

    def encode_text(self, text, hidden):
        """
        (ids, ends) of a template's text, in which special tokens are tokens; the hidden contents
        are encoded without any. ends: where in the text each token ends; None where the tokenizer
        does not know.
        """
        ids, ends, at = [], [], 0
        pattern = "|".join(map(re.escape, hidden))
        for piece in re.split(f"({pattern})", text) if hidden else [text]:
            if piece in hidden:
                new = self.encode(hidden[piece])
                new_ends = [len(piece)] * len(new)
            else:
                if hidden and pattern[0] in piece:
                    raise BadInput("a message spells special tokens and the chat template changes "
                                   "its text; remove the special tokens from it")
                found = self.backend(piece, add_special_tokens=False, verbose=False,
                                     return_offsets_mapping=self.fast)
                new = found["input_ids"]
                new_ends = [end for _, end in found["offset_mapping"]] if self.fast else []
            ids, ends = ids + new, ends + [at + end for end in new_ends]
            at += len(piece)
        return ids, ends if self.fast else None

    def token_at(self, at, text, ids, ends, hidden):
        """
        The number of the first token that reaches beyond the first `at` characters of the text. If
        that is a special token from before, which takes in the blanks behind it as Phi-3's
        <|assistant|> does, the next one. Without offsets: the first one that differs from the
        tokens of these characters alone.
        """
        if ends is None:
            return common_prefix(ids, self.encode_text(text[:at], hidden)[0])
        number = bisect.bisect_right(ends, at)
        begins_before = number < len(ids) and (ends[number - 1] if number else 0) < at
        return number + (begins_before and ids[number] in self.special_ids)

    def find_turn_end(self):
        """
        The id of the template's end-of-turn token: the first special token behind the message of an
        assistant who answers a user. None if there is no template, or no such token.
        """
        if not self.template:
            return None
        question = {"role": "user", "content": f"{MARK}0"}
        answer = {"role": "assistant", "content": f"{MARK}1"}
        opening = ""  # what the template writes in front of an answer
        try:
            _, answered, rest = self.chat.render([question, answer]).rpartition(answer["content"])
        except BadInput:
            return None  # it is said where a message is to be encoded
        with contextlib.suppress(BadInput):  # of a question alone, too
            prompt = self.chat.render([question], add_generation_prompt=True)
            opening = prompt[common_prefix(prompt, self.chat.render([question])):]
        opens, behind = ([i for i in self.backend.encode(piece, add_special_tokens=False)
                          if i in self.special_ids] for piece in (opening, rest))
        # a template that always opens the next turn writes that behind the answer, too
        return next((i for i in behind if answered and i not in opens), None)

    def save(self, folder):
        """
        The files that it was read from, as they are: other versions of transformers, and other
        programs, read them as they read the source's. A template of the run's own comes with them.
        """
        own = {"chat_template.jinja": self.template.encode()} if self.chat.own else {}
        write_files(folder, self.files | own)


def bytes_of(name, text):
    """
    The bytes of a token that is decoded to this text. Where they are no whole characters, its name
    in the vocabulary has them: as <0xE4>, or as GPT-2 writes bytes.
    """
    if "\ufffd" not in text:
        return text.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes.fromhex(name[3:5])
    return bytes(map(BYTE_OF.get, name)) if set(name) <= BYTE_OF.keys() else text.encode()


def tokenizer_file_at_fault(folder):
    """The tokenizer.json in a folder, if that alone cannot be read, else the files beside it."""
    from tokenizers import Tokenizer as Backend

    file = os.path.join(folder, "tokenizer.json")
    if os.path.isfile(file) and attempt(lambda: Backend.from_file(file))[1]:
        return file
    names = ("tokenizer_config.json", "special_tokens_map.json")
    names = [name for name in names if os.path.isfile(os.path.join(folder, name))]
    return os.path.join(folder, " or ".join(names))


# --------------------------------------------------------------------------------------------------
# files


# what a tokenizer is read from, beside the files that its class of transformers names itself
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json")


def read_tokenizer_files(folder, more=()):
    """{name: content in bytes} of the files in a folder that its tokenizer is made from."""
    names = {*TOKENIZER_FILES, *more}
    templates = "additional_chat_templates"
    if os.path.isdir(os.path.join(folder, templates)):
        names |= {f"{templates}/{name}" for name in os.listdir(os.path.join(folder, templates))}
    files = {}
    for name in sorted(names):
        if os.path.isfile(os.path.join(folder, name)):
            files[name] = read_file(os.path.join(folder, name))
    return files


def write_files(folder, files):
    """Write {name: content in bytes} into a folder."""
    for name, content in files.items():
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        with open(os.path.join(folder, name), "wb") as f:
            f.write(content)


def vocabulary_hash(vocab):
    """
    A hash of a vocabulary {token: id}: of GPT-2's it is the same, whether vocab.json has it or the
    tokenizer.json that TRL makes of that.
    """
    return hashlib.blake2b(json.dumps(vocab, sort_keys=True).encode()).hexdigest()


def check_ids(vocab, file):
    """Raise BadInput unless a vocabulary {token: id} gives every token an id of its own."""
    tokens = {}
    for token, i in vocab.items():
        if type(i) is not int or not 0 <= i < 10**8:
            raise BadInput(f"{file}: the id of {shorten(token)} is {shorten(i)}; wanted an integer "
                           "from 0")
        if i in tokens:
            raise BadInput(f"{file}: {shorten(tokens[i])} and {shorten(token)} have the same id "
                           f"{i}")
        tokens[i] = token
