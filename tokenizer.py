"""
Text -> token ids and back, with transformers' AutoTokenizer.

    encode_texts      strings, without BOS and EOS
    encode_prompts    prompts for the policy
    encode_scored     a prompt with its response, as a reward model reads them
    decode_response   the text of a response

Here are strings; options/chats.py writes messages in a chat template. Text that looks like a
special token is plain text in all of them: a prompt cannot end a turn or a response.
"""
import contextlib
import glob
import os
import re
from functools import partial

from configurator import read_json, write_json
from errors import BadInput, mistake, optional

# {file of a folder: what may ask for more than a machine has}; letters may stand as numbers
LARGE = {"config.json": rb'(layers?|num_labels)"\s*:\s*\d{4}|\\u00[5-7]',
         "tokenizer.json": rb'"Replace"|\\u00[5-7]'}
# how the chat templates of many families begin a turn
TURNS = r"<\|(?:im_start|start_header_id|start|turn|user)\|>|<start_of_turn>|<\uff5cUser\uff5c>"


def load_tokenizer(path, system):
    """The Tokenizer of a folder or hub name. system: None of a model that reads in its own way."""
    if path.startswith("tiktoken:") or glob.glob(os.path.join(glob.escape(path), "*.tiktoken")):
        from options.tiktoken_files import read

        hf = read(path)
    else:
        if os.path.isfile(os.path.join(path, "adapter_config.json")):
            from options.lora import lowest_base

            path = lowest_base(path, unless="tokenizer*")
        hf = read_folder(path)
    chats = None
    if hf.chat_template or system and (
            system.chat_template or system.system_prompt or system.template_kwargs):
        from options.chats import chats_of

        chats = chats_of(hf, path, system)
    return Tokenizer(hf, path, system, chats)


def read_folder(path):
    """The tokenizer of transformers in a model folder, or of a hub name. Raises BadInput."""
    if not os.path.isdir(path):  # a name on the hub
        from options.hub import check_name

        check_name(path)
    for file, large in LARGE.items():
        with contextlib.suppress(OSError), open(os.path.join(path, file), "rb") as f:
            if re.search(large, f.read()):
                optional("folders.check_sizes")(path, file)
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    try:
        hf = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as e:  # transformers raises anything
        raise mistake("no_tokenizer", path, e) from e
    if hf.eos_token_id is None or len(hf.get_vocab()) < 3:
        raise BadInput(f"{path}: its tokenizer is empty, or has no EOS token; copy a tokenizer's "
                       "files there, and set eos_token in its tokenizer_config.json")
    # transformers' general class reads tokenizer.json as it is; many families have others
    if (type(hf).__name__ != "TokenizersBackend" or "[INST]" in hf.get_vocab()
            or "add_prefix_space" in hf.init_kwargs):
        from options.tokenizer_kinds import use_parts_of_file

        use_parts_of_file(hf, path)
    return hf


def text_of(hf, ids):
    """The text of ids of a tokenizer of transformers, with all of their special tokens."""
    # some versions would take blanks out, as in 3 . 5, where the tokenizer's files ask for it
    return hf.decode(ids, clean_up_tokenization_spaces=False)


class Tokenizer:
    """
    A tokenizer of transformers, `hf`, and its settings in a run:

        eos_ids        a response ends with any of them; eos_id is the tokenizer's own
        pad_id         fills rows; no mask is ever made from it
        bos_ids        the ids that it puts before each string, such as "a1": mostly BOS
        vocab_size     ids from this one on are never sampled
        skipped_id     a reward model's score is read at the last token that is not this one
        chats          its chat template, of options/chats.py, or None
        messages_of    a function of a response's ids, of several turns (options/environment.py)
        has_stop       a function of its ids so far: is there one of stop_strings in their text?
    """

    def __init__(self, hf, path, system, chats):
        self.hf, self.path, self.chats, self.text_of = hf, path, chats, partial(text_of, hf)
        self.stop_strings, self.has_stop = [], None
        if system and system.stop_strings:
            from options.stop_strings import parse, stops

            self.stop_strings, self.has_stop = parse(system.stop_strings), stops(self)
        self.eos_id = hf.eos_token_id
        self.pad_id = self.eos_id if hf.pad_token_id is None else hf.pad_token_id
        text, ids = self.encode_texts(["a1"])[0], hf("a1")["input_ids"]
        begins = (n for n in range(len(ids)) if ids[n:n + len(text)] == text)
        self.bos_ids = ids[:next(begins, 0)]
        self.vocabulary = hf.get_vocab()
        self.vocab_size = max(self.vocabulary.values()) + 1
        # many put a blank in front of a text, and SentencePiece takes it away from the text of ids
        self.adds_blank = " " in self.text_of(2 * self.encode_texts(["a"])[0])
        self.skipped_id = self.messages_of = None
        self.specials = {t.content: i for i, t in hf.added_tokens_decoder.items() if t.special}
        self.eos_ids = {self.eos_id} | (chats.turn_ends if chats else set())

    def save(self, folder):
        """
        Write transformers' files, for its version 4, too. With the source's special tokens: others
        would vanish from the texts that are decoded.
        """
        with self.chats.as_in_source() if self.chats else contextlib.nullcontext():
            self.hf.save_pretrained(folder)
        file = os.path.join(folder, "tokenizer_config.json")
        settings = read_json(file)
        if os.path.exists(os.path.join(folder, "tokenizer.json")):  # it has all, BOS and blanks
            settings |= dict(tokenizer_class="PreTrainedTokenizerFast",
                             model_input_names=self.hf.model_input_names)
        if "extra_special_tokens" in settings:
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        write_json(file, settings)

    def match_model(self, model, path):
        """
        Make the tokenizer fit the model: what ends a response in the settings of a language model
        ends it here, too. Raises BadInput if an id that texts may have has no embedding
        in the model. Gemma 3 1B has none for the id of images, which it does not read.
        """
        if model.head == "lm":
            for settings in filter(None, (model.hf.generation_config, model.config)):
                ends = settings.eos_token_id
                self.eos_ids |= set(ends if isinstance(ends, list) else [ends]) - {None}
        embeddings = model.config.vocab_size
        beyond = {*range(embeddings, self.vocab_size)} - {*self.specials.values()}
        if beyond or max(self.eos_ids | {self.pad_id, *self.bos_ids}) >= embeddings:
            raise BadInput(f"{path}: the tokenizer has {self.vocab_size} tokens, and the model "
                           f"{embeddings}; they do not belong together")
        self.vocab_size = min(self.vocab_size, embeddings)

    # text -> ids

    def encode_texts(self, texts):
        """The ids of each of these strings, without BOS and EOS."""
        if not texts:
            return []
        return self.hf(list(texts), add_special_tokens=False, split_special_tokens=True,
                       return_attention_mask=False, verbose=False)["input_ids"]

    def encode_prompts(self, prompts):
        """
        The ids of each prompt: BOS and a string; or messages, up to where the response begins: a
        new turn, or the last message, if it is the assistant's.
        """
        strings = iter(self.encode_texts([p for p in prompts if isinstance(p, str)]))
        return [self.bos_ids + next(strings) if isinstance(p, str) else
                self.need_chats().open_ids(p) for p in prompts]

    def encode_scored(self, prompts, completions, finished=None, longest=None):
        """
        The ids of each prompt and response, up to the token at which a reward model's score is
        read: the last one that is not skipped_id, as in transformers and TRL. With a chat template
        the two are a chat. Without one they are strings, joined, and EOS after them where the
        response has finished (None: all have). longest: further tokens are cut off.
        """
        pairs = list(zip(prompts, completions, strict=True))
        if self.chats or not all(isinstance(p, str) and isinstance(c, str) for p, c in pairs):
            sequences = [self.need_chats().ids_of_pair(*pair) for pair in pairs]
        else:
            ends = finished or [True] * len(pairs)
            texts = self.encode_texts([p + c for p, c in pairs])
            sequences = [self.bos_ids + ids + [self.eos_id] * end
                         for ids, end in zip(texts, ends, strict=True)]
        sequences = [ids[:longest] for ids in sequences]
        for ids in sequences:
            while len(ids) > 1 and ids[-1] == self.skipped_id:
                ids.pop()
        return sequences

    def say_marks(self, rows, fields, path):
        """Warn of rows that spell special tokens in these fields: they are read as letters."""
        names = sorted(self.specials, key=len, reverse=True)
        marks = re.compile("|".join([TURNS, *(re.escape(s) for s in names if len(s) > 2)]))
        if any(marks.search(str(row[field])) for row in rows for field in fields):
            optional("mistakes.say_marks")(rows, fields, path, marks)

    def need_chats(self):
        """The chats, of messages. Raises BadInput where there is no template."""
        if not self.chats:
            raise BadInput("this is a list of messages, but the tokenizer has no chat template; "
                           "give one with --chat_template=FILE")
        return self.chats

    # ids -> text

    def unseen(self):
        """The ids that no text shows: special ends, and padding that is in no stop string."""
        ends = {self.eos_id, *self.eos_ids.intersection(self.specials.values())}
        pad = self.text_of([self.pad_id]) if self.stop_strings else ""
        return ends if any(pad in s for s in self.stop_strings) else ends | {self.pad_id}

    def decode(self, ids, continues=False):
        """
        The text of ids without padding and special ends. continues: it continues another text, and
        its first blank stays.
        """
        unseen = self.unseen()
        kept = [i for i in ids if i not in unseen]
        if continues and self.adds_blank:
            from options.blanks import text_after

            return text_after(self, kept)
        return self.text_of(kept)

    def decode_response(self, ids, prompt=None):
        """
        The text of a response, cut right after its first stop string. prompt: the data's; the
        response continues it, if it is a string or ends with the assistant.
        """
        continues = prompt and (isinstance(prompt, str) or prompt[-1]["role"] == "assistant")
        text = self.decode(ids, bool(continues))
        ends = [text.index(s) + len(s) for s in self.stop_strings if s in text]
        return text[:min(ends, default=len(text))]

    def set_padding_apart(self):
        """
        For a reward model: its score is read at the last token that is not the padding. This should
        be the EOS, so the padding becomes a special token that ends nothing, if there is one.
        """
        if self.pad_id in self.eos_ids:
            free = [s for s, i in self.specials.items()
                    if i not in self.eos_ids and ("pad" in s.lower() or s == "<unk>")]
            self.hf.pad_token = min(free, default=self.hf.eos_token)
            self.pad_id = self.hf.pad_token_id
        self.skipped_id = self.pad_id
