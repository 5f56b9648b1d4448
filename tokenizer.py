"""
Text -> token ids and back, on transformers' AutoTokenizer. Texts come in three ways:

    encode_prompts    what the policy answers: a string, or messages in the chat template
    encode_examples   a prompt with its completion, and which of their tokens SFT trains
    encode_scored     a prompt with its response, as a reward model reads them

Text that looks like a special token is plain text in all of them: nobody who writes a prompt can
end a turn or a response. A chat becomes the very ids that transformers' apply_chat_template makes
of the same messages.
"""
import ast
import contextlib
import glob
import hashlib
import json
import os
import re
import signal
import threading

from errors import BadConfig, BadInput, first_line, one_line, shorten, warn
from folders import CONFIGS, data_alone, model_folders, read_json, read_text
from rows import THOUGHTS, is_learned, thoughts_of

# the files that hold a tokenizer's vocabulary, one of which must be there
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
RENDERING = 20  # seconds that a chat template, which is a program, may take for one dialogue
# how many families spell the tokens of their templates: <|im_end|>, and DeepSeek with other bars
MARKUP = r"<\|\w+\|>|<\uff5c[^<>\s]+\uff5c>"


# --------------------------------------------------------------------------------------------------
# loading


def load_tokenizer(path, chat_template="", template_kwargs="", system_prompt="", stop_strings=""):
    """
    The Tokenizer of a model folder or hub name; of an adapter its own, or its base model's. Its
    eos_ids are all ends that its files, its chat template, config.json and generation_config.json
    name. Raises BadInput where a file is broken, or does not belong to the others.

    chat_template: a Jinja file in the place of the tokenizer's own; template_kwargs: what the
    template is told, "enable_thinking=False"; system_prompt: the system message of chats that have
    none; stop_strings: texts that end a response, see parse_stop_strings.
    """
    hf, folder, beside = read_files(path)
    if hf.eos_token_id is None:
        raise BadInput(f"{folder}: its tokenizer has no EOS token, so no response could ever end; "
                       "set eos_token in tokenizer_config.json")

    hf.apply_chat_template = within(RENDERING, hf.apply_chat_template)
    name = f"the chat template of {folder}"
    if chat_template:
        name, hf.chat_template = f"the chat template {chat_template}", read_text(chat_template)
    elif isinstance(hf.chat_template, dict) and "default" not in hf.chat_template:
        raise BadInput(f"{folder}: none of its chat templates ({', '.join(hf.chat_template)}) is "
                       "called default; write one into a file, and type --chat_template=FILE")
    tokenizer = Tokenizer(hf, name, parse_template_kwargs(template_kwargs), system_prompt)
    tokenizer.stop_strings = parse_stop_strings(stop_strings)
    for file in files_in(beside, ["config.json", "generation_config.json"]):
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
    (transformers' tokenizer, its folder, the folder of its model's settings) of a path; of a name
    such as tiktoken:gpt2 there are no folders. Raises BadInput.
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

        with no_cache_of_tiktoken():
            return from_folder(of_tiktoken[0]), of_tiktoken[0], folders[-1]
    if folder is None:  # transformers would make an empty one
        raise BadInput(f"{path}: no tokenizer in this folder ({', '.join(VOCABULARIES)}, "
                       "*.tiktoken); copy its files there, or make it with the prepare.py of its "
                       "data")
    import transformers  # it takes seconds, which --help does not need

    # it warns that Llama 3's tokenizer.model is not sentencepiece's
    transformers.logging.set_verbosity_error()
    config, base = transformers.PretrainedConfig(), transformers.PreTrainedTokenizerBase
    if files_in(folder, ["config.json"]):
        with contextlib.suppress(BadInput), data_alone(folder) as room:  # of a family of its own
            config = transformers.AutoConfig.from_pretrained(room, trust_remote_code=False)
    try:
        for file in files_in(folder, ["config.json", "tokenizer_config.json"]):
            name = str(read_json(file).get("tokenizer_class"))
            if not issubclass(getattr(transformers, name, base), base):  # such as AutoModel
                raise TypeError(f"tokenizer_class = {name!r} is no tokenizer")
        with no_cache_of_tiktoken():
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


@contextlib.contextmanager
def no_cache_of_tiktoken():
    """
    In this block tiktoken reads a file of this machine from where it lies. By itself it copies each
    file under the hash of its path, and would read that copy when another file lies there.
    """
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    try:
        yield
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]
        if before is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def within(seconds, function):
    """
    The function, which raises TimeoutError where it takes longer. It is so in the main thread, in
    which alone Python takes signals.
    """
    def late(*_):
        raise TimeoutError(f"it has not ended within {seconds} s")

    def bounded(*args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again: a __del__ would swallow one
        try:
            return function(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return bounded


def files_in(folder, names):
    """The paths of those of these files that are in a folder."""
    return [path for name in names if os.path.isfile(path := os.path.join(folder, name))]


class Tokenizer:
    """
    A tokenizer of transformers, `hf`, and what a run knows of it:

        eos_ids             a response ends with any of them; eos_id is the tokenizer's own
        pad_id              fills rows; no mask is ever made from it
        bos_ids             what stands before a string: what the tokenizer itself puts there
        vocab_size          ids from here on are never sampled
        specials            {text: id} of the special tokens
        stop_strings        texts that end a response, too
        skipped_id          a reward model's score is read at the last token that is not this one
        generation_config   of the model beside it: how its makers sample from it
    """

    def __init__(self, hf, name="the chat template", kwargs=None, system_prompt=""):
        """kwargs, system_prompt: see load_tokenizer. Raises BadInput where they do not fit."""
        self.hf, self.name, self.kwargs, self.system_prompt = hf, name, kwargs or {}, system_prompt
        self.eos_id = hf.eos_token_id
        self.pad_id = self.eos_id if hf.pad_token_id is None else hf.pad_token_id
        text, ids = self.encode_texts(["a1"])[0], hf("a1")["input_ids"]
        found = [n for n in range(len(ids)) if ids[n:n + len(text)] == text]
        self.bos_ids = ids[:min(found, default=0)]
        self.vocabulary = hf.get_vocab()
        self.vocab_size = max(self.vocabulary.values()) + 1
        self.skipped_id, self.stop_strings, self.generation_config = None, [], {}
        self.template = hf.get_chat_template() if hf.chat_template else None
        text = self.template or ""
        if system_prompt and not text:
            raise BadInput("system_prompt is given, but the tokenizer has no chat template; give "
                           "one with --chat_template=FILE, or leave it out")
        for variable in self.kwargs:
            if not re.search(rf"\b{variable}\b", text):
                raise BadInput(f"template_kwargs: {name} has no variable {variable!r}")
        # Tokens that a template writes, such as <|im_end|>, are special where their author has not
        # said so, too: or who types one into a message would end a turn. Others that it writes,
        # such as <think>, are tokens in a message as well.
        plain = [t.content for t in hf.added_tokens_decoder.values()
                 if not t.special and t.content in text and re.fullmatch(MARKUP, t.content)]
        hf.add_tokens(plain, special_tokens=True)
        hf.chat_control_tokens = []  # beside the special ones
        self.specials = {t.content: i for i, t in hf.added_tokens_decoder.items() if t.special}
        self.read_template()
        self.eos_ids = {self.eos_id} | self.turn_ends
        if "strftime_now" in text and "date_string" not in self.kwargs:
            warn(f"{name} writes today's date, so a run that goes on tomorrow would read other "
                 "prompts; fix it, as in --template_kwargs=\"date_string='26 Jul 2024'\"")

    def read_template(self):
        """
        Find what the template writes around an answer. turn_ends: {the id of the first special
        token behind it}; empty where there is none. A base model's own files may name another end
        than its chat template has. frames: what stands between the generation prompt and an answer,
        "" and more, as <think>THOUGHTS</think> of thoughts in a field.
        """
        self.turn_ends, self.frames = set(), [""]
        asked, answer = dict(role="user", content="a"), dict(role="assistant", content="ANSWER")
        for thoughts in {}, dict.fromkeys(THOUGHTS, "THOUGHTS"):
            try:
                before = self.chat_ids([asked], add_generation_prompt=True)
                ids = self.chat_ids([asked, answer | thoughts])
            except BadInput:  # the template's own words come where messages are to be encoded
                return
            behind = self.text_of(ids).rpartition("ANSWER")[2]
            behind = self.hf.encode(behind, add_special_tokens=False)
            self.turn_ends = set([i for i in behind if i in self.specials.values()][:1])
            text = self.text_behind(before, ids) or ""
            frame = tidy(self.opening(before) + text.rpartition("ANSWER")[0])
            if "ANSWER" in text and not frame.endswith("THOUGHTS"):  # it begins behind a mark
                self.frames.append(frame)

    @property
    def fingerprint(self):
        """Differs where any text becomes other ids."""
        settings = [self.vocabulary, self.template, self.kwargs, self.system_prompt,
                    self.skipped_id, self.pad_id, self.bos_ids]
        text = json.dumps(settings, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode()).hexdigest()

    # text -> ids. at: a context for each number, such as one that names the row in errors

    def encode_texts(self, texts):
        """The ids of each of these strings, without BOS and EOS."""
        if not texts:
            return []
        return self.hf(list(texts), add_special_tokens=False, split_special_tokens=True,
                       return_attention_mask=False, verbose=False)["input_ids"]

    def encode_prompts(self, prompts, at=contextlib.nullcontext):
        """
        The ids of each prompt: BOS (where there is one) and a string; or messages, up to where the
        response begins: in a new turn, or in the last message, if that is the assistant's.
        """
        strings = iter(self.encode_texts([p for p in prompts if isinstance(p, str)]))
        found = []
        for number, prompt in enumerate(prompts):
            with at(number):
                found.append(self.bos_ids + next(strings) if isinstance(prompt, str) else
                             self.open_ids(self.with_system_prompt(prompt)))
        return found

    def encode_examples(self, prompts, completions, at=contextlib.nullcontext):
        """
        [(ids, trained), ...] of prompts and completions, strings or lists of messages: trained is
        True on the tokens that SFT trains. Of strings that is the completion with its EOS: the
        toy's "1+2=" and "3" make [49, 43, 50, 61, 51, EOS] and [F, F, F, F, T, T]. Of messages it
        is the assistant's turns of the completion, with their ends.
        """
        pairs = list(zip(prompts, completions, strict=True))
        texts = iter(self.encode_texts([text for pair in pairs if are_strings(*pair)
                                        for text in pair]))
        found = []
        for number, pair in enumerate(pairs):
            with at(number):
                if are_strings(*pair):
                    ids, more = self.bos_ids + next(texts), next(texts) + [self.eos_id]
                    found.append((ids + more, [False] * len(ids) + [True] * len(more)))
                else:
                    found.append(self.dialogue(*pair))
        return found

    def encode_scored(self, prompts, completions, finished=None, longest=None,
                      at=contextlib.nullcontext):
        """
        The ids of each prompt and response up to the token at which a reward model's score is read,
        the last one that is not skipped_id. With a chat template they are a chat, strings too, read
        to the end of what the template writes. Without one they are strings, read as one text, with
        EOS behind it where the response has finished (None: all have). longest: more tokens are cut
        off, as if the response had never ended.

        This is what transformers and TRL read of the same texts; rm.py trains on the same.
        """
        pairs = list(zip(prompts, completions, strict=True))
        plain = [not self.template and are_strings(*pair) for pair in pairs]
        texts = iter(self.encode_texts([p + c for (p, c), is_one in zip(pairs, plain, strict=True)
                                        if is_one]))
        found = []
        for number, pair in enumerate(pairs):
            if plain[number]:
                ends = finished is None or finished[number]
                ids = self.bos_ids + next(texts) + [self.eos_id] * ends
            else:
                with at(number):
                    ids = self.chat_ids(self.with_system_prompt(joined(*pair)))
            ids = ids[:longest]
            while len(ids) > 1 and ids[-1] == self.skipped_id:
                ids.pop()
            found.append(ids)
        return found

    # chats

    def with_system_prompt(self, messages):
        """The messages, with the run's system_prompt in front, if they have no system message."""
        if not self.system_prompt or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def chat_ids(self, messages, **how):
        """
        The ids of all that the chat template writes of the messages. how: arguments for
        transformers. Raises BadInput with the template's own words where it refuses them.
        """
        if not self.template:
            raise BadInput("here is a list of messages, but this tokenizer has no chat template; "
                           "write strings, or give one with --chat_template=FILE")
        try:
            return self.hf.apply_chat_template(messages, sanitize_control_tokens=True,
                                               return_dict=False, **self.kwargs, **how)
        except Exception as e:  # a template is a program, which may raise anything
            raise BadInput(f"{self.name} refuses the messages: {one_line(first_line(e), 300)}"
                           ) from e

    def open_ids(self, messages):
        """
        The ids of messages up to where the assistant goes on: see encode_prompts. Thoughts that the
        last message has begun stand as they are written, if the template would change them.
        """
        if messages[-1]["role"] != "assistant":
            return self.chat_ids(messages, add_generation_prompt=True)
        ids, last = self.chat_ids(messages, continue_final_message=True), messages[-1]
        if not thoughts_of(last) and "<think>" not in last["content"]:
            return ids
        before = self.chat_ids(messages[:-1], add_generation_prompt=True)
        if self.is_whole(last, ids, before):
            return ids
        written = self.as_written(last, before)
        return self.refuse(last, ids[-40:]) if written is None else before + written

    def opening(self, before):
        """What opens thoughts at the end of the prompt, and perhaps ends them; or ""."""
        return re.search(r"(<think>\s*)?(</think>\s*)?\Z", self.text_of(before[-40:]))[0]

    def text_behind(self, before, ids):
        """The text of ids behind those of the prompt. None where they do not go on from it."""
        if ids[:len(before)] == before:
            return self.text_of(ids[len(before):])
        # the prompt's last token may have become one with what follows, as two line breaks do
        text, prompt = self.text_of(ids), self.text_of(before)
        return text[len(prompt):] if text.startswith(prompt) else None

    def is_whole(self, message, ids, before):
        """
        Whether ids have the message's thoughts and content behind the prompt `before`, and in front
        of them only what the template writes in any turn.
        """
        text, parts = self.text_behind(before, ids), [message["content"], thoughts_of(message)]
        if text is None:
            return False
        if not all(part.strip() in text for part in parts):
            # some tokenizers write "e\u0301" as one letter
            parts = [self.text_of(part) for part in self.encode_texts(parts)]
        # some write blanks around what spells a special token
        blank = " " if any(name in part for part in parts for name in self.specials) else ""
        text, content, thoughts = [tidy(part).replace(blank, "")
                                   for part in (self.opening(before) + text, *parts)]
        front, frames = text[:len(text) - len(content)].strip(), self.frames
        if "think>" in content:  # no other thoughts stand in front of its own
            frames = [frame for frame in frames if not re.search("think>|THOUGHTS", frame)]
            frames += ["<think>"] * ("<think>" not in content.partition("</think>")[0])
        return text.endswith(content) and any(
            re.fullmatch(re.escape(frame.replace(blank, "")).replace(
                "THOUGHTS", rf"\s*{re.escape(thoughts)}\s*"), front)
            for frame in frames if "THOUGHTS" in frame or not thoughts)

    def as_written(self, message, before):
        """
        The ids of the assistant's message as it is written, without the template, behind the
        generation prompt `before`. None where the two do not fit.
        """
        content, thoughts, opening = message["content"], thoughts_of(message), self.opening(before)
        opened = opening.strip() == "<think>"
        if thoughts:  # in a field: how the model writes them is clear behind a <think> alone
            fits = opened and "think>" not in content
            content = f"{thoughts}\n</think>\n\n{content}"
        elif opened and content.lstrip().startswith("<think>"):  # the prompt has written that
            fits, content = True, content.lstrip().removeprefix(opening.strip())
            content = content.removeprefix(opening.removeprefix("<think>"))
        else:  # no answer where thoughts go on, and no thoughts where they have ended
            fits = (content.count("</think>") > content.count("<think>") if opened else
                    not opening or "think>" not in content)
        return self.encode_texts([content])[0] if fits else None

    def refuse(self, message, ids):
        """Raise BadInput: the template has these ids in the place of the assistant's message."""
        ends = ", ".join(sorted(self.hf.convert_ids_to_tokens(self.eos_ids)))
        raise BadInput(
            f"{self.name} does not write the assistant's {shorten(message['content'], 60)} as it "
            f"stands, with an end behind it ({ends}), but {shorten(self.text_of(ids), 60)}; write "
            "all thoughts into the content, between <think> and </think>, leave one message to "
            'learn in each row ("train": false in the others), or type --template_kwargs=NAME=VALUE'
            " (as enable_thinking=False) or --chat_template=FILE, with eos_token behind each turn")

    def dialogue(self, prompt, completion):
        """
        encode_examples for one row with messages. A turn that is trained begins where the prompt
        that the policy would answer there ends, and ends with the first end-of-turn token. If only
        one is, and the template changes it, it stands as it is written behind that prompt. Raises
        BadInput where one of several would not be learned as it is written.
        """
        prompt = self.with_system_prompt(as_messages(prompt, "user"))
        completion = as_messages(completion, "assistant")
        messages = joined(prompt, completion)
        first = len(messages) - len(completion)  # the number of the first that may be trained
        turns = [first + n for n, message in enumerate(completion)
                 if message["role"] == "assistant" and is_learned(message)]
        if not turns:
            raise BadInput("no message says that it is to be learned; leave the row out")
        ids, trained = self.chat_ids(messages[:turns[-1] + 1]), []
        special_ends = self.eos_ids & set(self.specials.values())
        for i in turns:
            message = completion[i - first]
            for mark in ("<think>", "</think>"):
                if mark in self.specials and mark in message["content"]:
                    raise BadInput(f"{mark} is a special token of this tokenizer, and would be "
                                   "learned as letters; put the thoughts into the field "
                                   "reasoning_content, if the template reads it")
            before = (self.open_ids(prompt) if i == first < len(prompt) else  # which has begun it
                      self.chat_ids(messages[:i], add_generation_prompt=True))
            begin = len(os.path.commonprefix([ids, before]))
            end = next((n for n in range(begin, len(ids)) if ids[n] in special_ends), len(ids))
            written = None
            if end == len(ids) or not self.is_whole(message, ids[:end], before):
                answer = message["content"].rpartition("</think>")[2].strip()
                written = self.as_written(message, before)
                if (len(turns) > 1 or written is None or not self.turn_ends
                        or answer not in self.text_of(ids[begin:end])):
                    self.refuse(message, ids[begin:end + 1])
                written += self.turn_ends
            elif len(turns) == 1 and begin < len(before) and self.opening(before):
                # the line break behind <think> has become one token with the template's next
                written = self.encode_texts([self.text_behind(before, ids[:end])])[0] + [ids[end]]
            if written is not None:
                ids = before + written
                begin, end = len(before), len(ids) - 1
            trained += [False] * (begin - len(trained)) + [True] * (end + 1 - begin)
        return ids[:end + 1], trained

    # ids -> text

    def text_of(self, ids):
        """The text of ids with all of their special tokens."""
        # some versions would take the blanks out of ' ' and 3 . 5 where the tokenizer's files ask
        # for it, as Llama 3's do
        return self.hf.decode(ids, clean_up_tokenization_spaces=False)

    def decode(self, ids):
        """The text of ids without padding and ends. An end that is text, as a line break, stays."""
        unseen = {self.eos_id, self.pad_id, *self.eos_ids.intersection(self.specials.values())}
        return self.text_of([i for i in ids if i not in unseen])

    def decode_response(self, ids):
        """The text of a response; one with a stop string ends right behind that."""
        text = self.decode(ids)
        ends = [text.index(s) + len(s) for s in self.stop_strings if s in text]
        return text[:min(ends, default=len(text))]

    @property
    def has_stop(self):
        """
        A function of the ids of a response so far: whether its last tokens have a stop string in
        their text. None where there are no stop strings.
        """
        if not self.stop_strings:
            return None
        # each token is a byte at least, and one more, since decoding may drop a text's first blank
        longest = max(len(s.encode()) for s in self.stop_strings) + 1
        return lambda ids: any(s in self.decode(ids[-longest:]) for s in self.stop_strings)

    # files

    def save(self, folder):
        """Write its files, which transformers reads again: the same ids, the same template."""
        self.hf.save_pretrained(folder)

    def set_padding_apart(self):
        """
        For a reward model in training: its score is read at the last token that is not the padding,
        by us as by transformers. So that this can be the EOS, the padding becomes a special token
        that ends nothing, if there is one; else the score is read in front of the EOS.
        """
        ends = {self.eos_id, *self.turn_ends}
        if self.pad_id in ends:
            free = [s for s, i in self.specials.items()
                    if i not in ends and ("pad" in s.lower() or s == "<unk>")]
            self.hf.pad_token = min(free, default=self.hf.eos_token)
            self.pad_id = self.hf.pad_token_id
        self.skipped_id = self.pad_id


def check_tokenizer_fits(tokenizer, model, path):
    """
    Raise BadInput if the tokenizer has ids for which the model has no embedding, unless these are
    special tokens that no text needs: Gemma 3 1B reads no images, but has a token for them. Fewer
    ids are fine: the model's other tokens are never sampled.
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
    The tokenizer of a reward model, as encode_scored needs it: it knows at which token the score is
    read, and the run's settings for chats, which are those of the policy's tokenizer. Raises
    BadInput where the model is a plain language model.
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
# prompts and completions


def are_strings(prompt, completion):
    return isinstance(prompt, str) and isinstance(completion, str)


def as_messages(text, role):
    """Messages as they are; of a string, one message of this role."""
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def tidy(text):
    """A text without the blanks around it, and around its <think> and </think>."""
    return re.sub(r"\s*(</?think>)\s*", r"\1", text).strip()


def joined(prompt, completion):
    """
    One dialogue of prompt and completion, strings or messages. A completion behind an assistant's
    message goes on with that message.
    """
    prompt, completion = as_messages(prompt, "user"), as_messages(completion, "assistant")
    last, first = prompt[-1] if prompt else {}, completion[0]
    if last.get("role") == first["role"] == "assistant":
        whole = {**last, **first, "content": last["content"] + first["content"]}
        return [*prompt[:-1], whole, *completion[1:]]
    return [*prompt, *completion]


# --------------------------------------------------------------------------------------------------
# keys


def parse_template_kwargs(text):
    """
    {name: value} of the key template_kwargs: "enable_thinking=False,date_string='1 May'", the
    arguments of a call in Python whose values are literals. Raises BadConfig.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    except (ValueError, SyntaxError) as e:
        raise BadConfig(f"template_kwargs = {shorten(text)}: wanted names with Python values, such "
                        "as enable_thinking=False,language='en'") from e


def parse_stop_strings(text):
    """
    The key stop_strings -> a list of texts: one that is written as it is, or several as a list of
    Python's, "['Q:', '\\n\\n']"; "" are none. Raises BadConfig.
    """
    if not text.startswith("["):
        return [text] if text else []
    try:  # in a config file, the line breaks of "['\n']" are there already
        strings = ast.literal_eval(text.replace("\n", "\\n"))
    except (ValueError, SyntaxError):
        strings = [None]
    if not all(s and isinstance(s, str) for s in strings):
        raise BadConfig(f"stop_strings = {shorten(text)}: wanted one text, or a list of texts in "
                        "quotes, such as --stop_strings=\"['Q:', '\\n\\n']\"")
    return strings
