"""
Text -> token ids and back, with transformers' AutoTokenizer. Three ways:

    encode_texts      strings, without BOS and EOS
    encode_prompts    prompts for the policy: a string, or messages in the chat template
    encode_scored     a prompt with its response, as a reward model reads them

Text that looks like a special token is plain text in all of them: a prompt cannot end a turn or a
response. chats.py encodes messages.
"""
import ast
import contextlib
import glob
import hashlib
import json
import os

from chats import (chat_ids, check_template, joined, make_markup_special, open_ids,
                   parse_template_kwargs, turn_ends, with_system_prompt)
from errors import BadConfig, BadInput, first_line, shorten
from folders import CONFIGS, data_alone, model_folders, read_json, read_text

# files with a tokenizer's vocabulary; one of them must be there
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
MARK = "\x01"


# --------------------------------------------------------------------------------------------------
# loading


def load_tokenizer(path, chat_template="", template_kwargs="", system_prompt="", stop_strings=""):
    """
    The Tokenizer of a model folder or hub name; of an adapter its own, or its base model's. Its
    eos_ids are all ends in its files, its chat template, config.json and generation_config.json.
    Raises BadInput where a file is broken, or does not fit to the others.

    chat_template: a Jinja file in the place of the tokenizer's own; template_kwargs: the template's
    variables, "enable_thinking=False"; system_prompt: the system message of chats that have none;
    stop_strings: texts that end a response, see parse_stop_strings.
    """
    hf, folder, model_folder = read_files(path)
    if hf.eos_token_id is None:
        raise BadInput(f"{folder}: its tokenizer has no EOS token, so no response could ever end; "
                       "set eos_token in tokenizer_config.json")
    name = f"the chat template of {folder}"
    if chat_template:
        name, hf.chat_template = f"the chat template {chat_template}", read_text(chat_template)
    elif isinstance(hf.chat_template, dict) and "default" not in hf.chat_template:
        raise BadInput(f"{folder}: none of its chat templates ({', '.join(hf.chat_template)}) is "
                       "called default; write one into a file, and type --chat_template=FILE")
    tokenizer = Tokenizer(hf, name, parse_template_kwargs(template_kwargs), system_prompt)
    tokenizer.stop_strings = parse_stop_strings(stop_strings)
    for file in files_in(model_folder, ["config.json", "generation_config.json"]):
        settings = read_json(file)
        ends = settings.get("eos_token_id")
        ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
        if not all(type(end) is int and 0 <= end < tokenizer.vocab_size for end in ends):
            raise BadInput(f"{file}: eos_token_id = {shorten(ends)} is no token "
                           f"of the tokenizer beside it, which has {tokenizer.vocab_size}; do they "
                           "belong together?")
        tokenizer.eos_ids |= set(ends)
        if file.endswith("generation_config.json"):
            tokenizer.generation_config = settings
    return tokenizer


def read_files(path):
    """
    (transformers' tokenizer, its folder, the folder of its model's settings) of a path; a name such
    as tiktoken:gpt2 has no folders, and is returned in their place. Raises BadInput.
    """
    if path.startswith("tiktoken:"):
        from options.tiktoken_files import by_name

        return by_name(path), path, path
    files = set(os.listdir(path)) if os.path.isdir(path) else set()
    no_model = "tokenizer.json" in files and not files.intersection(CONFIGS)
    folders = [path] if no_model else model_folders(path, weights=False)
    folder = next((f for f in folders if files_in(f, VOCABULARIES)), None)
    of_tiktoken = [f for f in folders if glob.glob(os.path.join(glob.escape(f), "*.tiktoken"))]
    if folder is None and of_tiktoken:
        from options.tiktoken_files import from_folder

        return from_folder(of_tiktoken[0]), of_tiktoken[0], folders[-1]
    if folder is None:  # transformers would make an empty one
        raise BadInput(f"{path}: no tokenizer in this folder ({', '.join(VOCABULARIES)}, "
                       "*.tiktoken); copy its files there, or make it with the prepare.py of its "
                       "data")
    import transformers  # it takes seconds: not at the top, so that --help is fast

    # it warns that Llama 3's tokenizer.model is not sentencepiece's
    transformers.logging.set_verbosity_error()
    reading = contextlib.nullcontext()
    if not files_in(folder, ["tokenizer.json"]):  # transformers may read it with tiktoken
        from options.tiktoken_files import no_cache

        reading = no_cache()
    config, base = transformers.PretrainedConfig(), transformers.PreTrainedTokenizerBase
    if files_in(folder, ["config.json"]):
        with contextlib.suppress(BadInput), data_alone(folder) as room:  # of a family of its own
            config = transformers.AutoConfig.from_pretrained(room, trust_remote_code=False)
    try:
        for file in files_in(folder, ["config.json", "tokenizer_config.json"]):
            name = str(read_json(file).get("tokenizer_class"))
            if not issubclass(getattr(transformers, name, base), base):  # such as AutoModel
                raise TypeError(f"tokenizer_class = {name!r} is no tokenizer")
        with reading:
            hf = transformers.AutoTokenizer.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False)
        hf.decode(hf("a 1")["input_ids"])  # fails where settings are of another type
        given = hf.chat_template or ""
        if not all(isinstance(text, str) for text in getattr(given, "values", lambda: [given])()):
            raise TypeError("its chat_template is no text")
    except Exception as e:  # transformers raises anything
        raise BadInput(f"{folder}: no usable tokenizer in its files ({first_line(e)[:200]}); save "
                       "or download it again") from e
    return hf, folder, folders[-1]


def files_in(folder, names):
    """The paths of these files in a folder, of those that exist."""
    return [path for name in names if os.path.isfile(path := os.path.join(folder, name))]


def check_tokenizer_fits(tokenizer, model, path):
    """
    Raise BadInput if the tokenizer has ids without an embedding in the model, unless these are
    special tokens that no text needs: Gemma 3 1B reads no images, but has a token for them. Fewer
    ids are allowed: the model's other tokens are never sampled.
    """
    tokens, embeddings = tokenizer.vocab_size, model.config.vocab_size
    if tokens <= embeddings:
        return
    needed = tokenizer.eos_ids | {tokenizer.pad_id, *tokenizer.bos_ids}
    spare = set(tokenizer.specials.values()) - needed
    if not spare.issuperset(range(embeddings, tokens)):
        raise BadInput(f"{path}: the tokenizer has {tokens} tokens but the model's vocabulary only "
                       f"{embeddings}; they do not belong together")
    tokenizer.vocab_size = embeddings


def load_reader(path, reward_model, tokenizer):
    """
    The tokenizer of a reward model, for encode_scored: with the token at which the score is read,
    and with the run's settings for chats, from the policy's tokenizer. Raises BadInput where the
    model is a plain language model.
    """
    if reward_model.new_head:
        raise BadInput(f"{path!r} has no score head, it is a plain language model; train one with "
                       "rm.py")
    reader = load_tokenizer(path)
    check_tokenizer_fits(reader, reward_model, path)
    reader.system_prompt, reader.kwargs = tokenizer.system_prompt, tokenizer.kwargs
    reader.set_padding_apart()
    if len(model_folders(path, weights=False)) == 1:  # an adapter has no config.json of its own
        reader.skipped_id = reward_model.hf.config.pad_token_id
    return reader


# --------------------------------------------------------------------------------------------------
# the tokenizer


class Tokenizer:
    """
    A tokenizer of transformers, `hf`, and its settings in a run:

        eos_ids             a response ends with any of them; eos_id is the tokenizer's own
        turn_ends           the one of them that ends a turn of the chat template, or none
        pad_id              fills rows; no mask is ever made from it
        bos_ids             the ids that the tokenizer itself puts before a string
        vocab_size          ids from this one on are never sampled
        specials            {text: id} of the special tokens
        stop_strings        texts that end a response, too
        skipped_id          a reward model's score is read at the last token that is not this one
        generation_config   of the model beside it: its makers' settings of sampling
        messages_of         a function of a response's ids, see Environment.messages_of; or None
    """

    def __init__(self, hf, name="the chat template", kwargs=None, system_prompt=""):
        """kwargs, system_prompt: see load_tokenizer. Raises BadInput where they do not fit."""
        self.hf, self.name, self.kwargs, self.system_prompt = hf, name, kwargs or {}, system_prompt
        self.eos_id = hf.eos_token_id
        self.pad_id = self.eos_id if hf.pad_token_id is None else hf.pad_token_id
        text, ids = self.encode_texts(["a1"])[0], hf("a1")["input_ids"]
        found = [n for n in range(len(ids)) if ids[n:n + len(text)] == text]
        self.bos_ids = ids[:min(found, default=0)]
        # SentencePiece puts a blank in front of a text, and takes one away from the text of ids;
        # not so behind a mark: a character that it never joins with the next ones
        self.mark = self.encode_texts([MARK])[0]
        self.adds_blank = self.text_of(self.mark + self.encode_texts(["a"])[0]) == f"{MARK} a"
        self.vocabulary = hf.get_vocab()
        self.vocab_size = max(self.vocabulary.values()) + 1
        self.skipped_id, self.stop_strings, self.generation_config = None, [], {}
        self.messages_of = None
        self.template = hf.get_chat_template() if hf.chat_template else None
        make_markup_special(hf, self.template or "")
        self.specials = {t.content: i for i, t in hf.added_tokens_decoder.items() if t.special}
        self.turn_ends = turn_ends(self)
        self.eos_ids = {self.eos_id} | self.turn_ends
        check_template(self)

    @property
    def fingerprint(self):
        """A hash that differs where any text becomes other ids."""
        settings = [self.vocabulary, self.template, self.kwargs, self.system_prompt,
                    self.skipped_id, self.pad_id, self.bos_ids]
        text = json.dumps(settings, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode()).hexdigest()

    # text -> ids. at: a context for each number, such as rows.at_row for errors

    def encode_texts(self, texts):
        """The ids of each of these strings, without BOS and EOS."""
        if not texts:
            return []
        return self.hf(list(texts), add_special_tokens=False, split_special_tokens=True,
                       return_attention_mask=False, verbose=False)["input_ids"]

    def encode_behind(self, texts):
        """The ids of each of these strings as they are behind another text: no blank is added."""
        if not self.adds_blank:
            return self.encode_texts(texts)
        return [ids[len(self.mark):] for ids in self.encode_texts([MARK + t for t in texts])]

    def encode_prompts(self, prompts, at=contextlib.nullcontext):
        """
        The ids of each prompt: BOS (where there is one) and a string; or messages, up to the place
        where the response begins: a new turn, or the last message, if it is the assistant's.
        """
        strings = iter(self.encode_texts([p for p in prompts if isinstance(p, str)]))
        found = []
        for number, prompt in enumerate(prompts):
            with at(number):
                found.append(self.bos_ids + next(strings) if isinstance(prompt, str) else
                             open_ids(self, prompt))
        return found

    def encode_scored(self, prompts, completions, finished=None, longest=None,
                      at=contextlib.nullcontext):
        """
        The ids of each prompt and response up to the token at which a reward model's score is read,
        the last one that is not skipped_id. With a chat template they are a chat (strings, too),
        with all the text of the template. Without one they are strings, joined to one text, with
        EOS behind it where the response has finished (None: all have). longest: further tokens are
        cut off, as if the response had never ended.

        transformers and TRL read the same ids; rm.py trains on the same.
        """
        pairs = list(zip(prompts, completions, strict=True))
        plain = [not self.template and isinstance(p, str) and isinstance(c, str) for p, c in pairs]
        texts = iter(self.encode_texts([p + c for (p, c), is_one in zip(pairs, plain, strict=True)
                                        if is_one]))
        found = []
        for number, pair in enumerate(pairs):
            if plain[number]:
                ends = finished is None or finished[number]
                ids = self.bos_ids + next(texts) + [self.eos_id] * ends
            else:
                with at(number):
                    ids = chat_ids(self, with_system_prompt(self, joined(*pair)))
            ids = ids[:longest]
            while len(ids) > 1 and ids[-1] == self.skipped_id:
                ids.pop()
            found.append(ids)
        return found

    # ids -> text

    def text_of(self, ids):
        """The text of ids with all of their special tokens."""
        # some versions would take blanks out, as in 3 . 5, where the tokenizer's files ask for it,
        # such as Llama 3's
        return self.hf.decode(ids, clean_up_tokenization_spaces=False)

    def decode(self, ids, behind=False):
        """
        The text of ids without padding and ends. An end that is text (a line break) stays. behind:
        the text continues another one; then its first blank stays, too.
        """
        unseen = {self.eos_id, self.pad_id, *self.eos_ids.intersection(self.specials.values())}
        kept = [i for i in ids if i not in unseen]
        if behind and self.adds_blank:
            return self.text_of(self.mark + kept)[1:]
        return self.text_of(kept)

    def decode_response(self, ids, prompt=None):
        """
        The text of a response, cut right behind its first stop string, if it has one. prompt: the
        data's; the response continues it, if it is a string or ends with the assistant. In a new
        turn of a chat a first blank is the template's.
        """
        continues = prompt and (isinstance(prompt, str) or prompt[-1]["role"] == "assistant")
        text = self.decode(ids, behind=bool(continues))
        ends = [text.index(s) + len(s) for s in self.stop_strings if s in text]
        return text[:min(ends, default=len(text))]

    @property
    def has_stop(self):
        """
        A function of the ids of a response so far: whether the text of its last tokens has a stop
        string. None where there are no stop strings.
        """
        if not self.stop_strings:
            return None
        # each token has at least one byte; one more: decoding may drop a text's first blank
        longest = max(len(s.encode()) for s in self.stop_strings) + 1
        return lambda ids: any(s in self.decode(ids[-longest:]) for s in self.stop_strings)

    # files

    def save(self, folder):
        """Write its files; from them transformers makes the same ids with the same template."""
        self.hf.save_pretrained(folder)

    def set_padding_apart(self):
        """
        For a reward model in training: its score is read at the last token that is not the padding,
        here and in transformers. This should be the EOS, so the padding becomes a special token
        that ends nothing, if there is one; else the score is read in front of the EOS.
        """
        ends = {self.eos_id, *self.turn_ends}
        if self.pad_id in ends:
            free = [s for s, i in self.specials.items()
                    if i not in ends and ("pad" in s.lower() or s == "<unk>")]
            self.hf.pad_token = min(free, default=self.hf.eos_token)
            self.pad_id = self.hf.pad_token_id
        self.skipped_id = self.pad_id


def parse_stop_strings(text):
    """
    The key stop_strings -> a list of texts. The key is one text as it is, or several as a list in
    Python, "['Q:', '\\n\\n']"; "" is no text. Raises BadConfig.
    """
    if not text.startswith("["):
        return [text] if text else []
    try:  # from a config file, "['\n']" has real line breaks
        strings = ast.literal_eval(text.replace("\n", "\\n"))
    except (ValueError, SyntaxError):
        strings = [None]
    if not all(s and isinstance(s, str) for s in strings):
        raise BadConfig(f"stop_strings = {shorten(text)}: wanted one text, or a list of texts in "
                        "quotes, such as --stop_strings=\"['Q:', '\\n\\n']\"")
    return strings
