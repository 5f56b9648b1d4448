"""
Text -> token ids and back, with transformers' AutoTokenizer.

    encode_texts      strings, without BOS and EOS
    encode_prompts    prompts for the policy: a string, or messages in the chat template
    encode_scored     a prompt with its response, as a reward model reads them
    encode_learned    a prompt with its completion, as sft.py learns it

Messages become the ids of transformers' apply_chat_template. Text that looks like a special token
is plain text in all of them: a prompt cannot end a turn or a response.
"""
import ast
import glob
import inspect
import os
import re
from itertools import islice

from configurator import read_json, write_json
from errors import BadInput, first_line, shorten

MARK = "\x01"  # a character that SentencePiece never joins with the next ones
# tokens of many families' templates: <|im_end|>, and DeepSeek's with other bars
MARKUP = r"<\|\w+\|>|<\uff5c[^<>\s]+\uff5c>"


def load_tokenizer(path, system):
    """The Tokenizer of a model folder or hub name. Raises BadInput."""
    if path.startswith("tiktoken:") or glob.glob(os.path.join(glob.escape(path), "*.tiktoken")):
        from options.tiktoken_files import read

        return Tokenizer(read(path), path, system)
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        from options.lora import lowest_base

        path = lowest_base(path, unless="tokenizer*")
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    try:
        hf = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as e:  # transformers raises anything
        if not os.path.exists(path) and path.count("/") != 1:  # nor a name on the hub
            raise BadInput(f"{path!r}: no such folder; prepare the data first") from e
        raise BadInput(f"{path}: no usable tokenizer ({first_line(e)[:300]})") from e
    if hf.eos_token_id is None or len(hf.get_vocab()) < 3:
        raise BadInput(f"{path}: its tokenizer is empty, or has no EOS token; copy a tokenizer's "
                       "files there, and set eos_token in its tokenizer_config.json")
    use_parts_of_file(hf, path)
    return Tokenizer(hf, path, system)


def use_parts_of_file(hf, path):
    """
    Cut texts as tokenizer.json says. Version 5 of transformers makes the tokenizers of some classes
    anew, with their family's rules: SmolLM2 would read other ids for the line breaks in "\\n\\n1".
    """
    from transformers.utils import cached_file

    file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    backend, blank = getattr(hf, "backend_tokenizer", None), hf.init_kwargs.get("add_prefix_space")
    read = type(backend).from_file(file) if file and backend and not blank else None
    if read and (blank is None or "ByteLevel" in repr(read.decoder)):  # else the settings count
        for part in ("normalizer", "pre_tokenizer", "decoder", "model"):
            setattr(backend, part, getattr(read, part))
    if backend and backend.token_to_id("[INST]") and "{1,3}" in repr(backend.pre_tokenizer):
        from options.tiktoken_files import use_words_of_tekken

        use_words_of_tekken(hf, path)


class Tokenizer:
    """
    A tokenizer of transformers, `hf`, and its settings in a run:

        eos_ids        a response ends with any of them; eos_id is the tokenizer's own
        turn_ends      the one of them that ends a turn of the chat template, or none
        pad_id         fills rows; no mask is ever made from it
        bos_ids        the ids that the tokenizer itself puts before a string
        vocab_size     ids from this one on are never sampled
        skipped_id     a reward model's score is read at the last token that is not this one
        messages_of    a function of a response's ids, of several turns (options/environment.py)
    """

    def __init__(self, hf, path, system):
        self.hf, self.path, self.system_prompt = hf, path, system.system_prompt
        if system.chat_template:
            if not os.path.isfile(system.chat_template):
                raise BadInput(f"chat_template = {system.chat_template!r}: no such file")
            with open(system.chat_template, encoding="utf-8") as f:
                hf.chat_template = f.read()
        self.kwargs = parse_template_kwargs(system.template_kwargs)
        self.stop_strings = parse_stop_strings(system.stop_strings)
        self.eos_id = hf.eos_token_id
        self.pad_id = self.eos_id if hf.pad_token_id is None else hf.pad_token_id
        text, ids = self.encode_texts(["a1"])[0], hf("a1")["input_ids"]
        found = (n for n in range(len(ids)) if ids[n:n + len(text)] == text)
        self.bos_ids = ids[:next(found, 0)]
        # many put a blank in front of a text, and SentencePiece takes it away from the text of ids:
        # not so behind a mark
        self.mark = self.encode_texts([MARK])[0]
        text = self.text_of(self.mark + self.encode_texts(["a"])[0])
        self.adds_blank = text.endswith(f"{MARK} a")
        self.vocabulary = hf.get_vocab()
        self.vocab_size = max(self.vocabulary.values()) + 1
        self.skipped_id = self.messages_of = None
        self.template = hf.get_chat_template() if hf.chat_template else None
        if self.system_prompt and not self.template:
            raise BadInput("system_prompt: there is no chat template; type --chat_template=FILE")
        # tokens in a template such as <|im_end|> become special in the run: otherwise a message
        # with one would end a turn. Others, such as <think>, are tokens in a message, too
        self.plain = [t for t in hf.added_tokens_decoder.values() if not t.special
                      and t.content in (self.template or "") and re.fullmatch(MARKUP, t.content)]
        self.set_special(True)
        takes = inspect.signature(hf.apply_chat_template).parameters
        self.sanitizes = "sanitize_control_tokens" in takes  # else special tokens become tokens
        # beside the special ones; transformers before 5.23 has no such list
        self.controls, hf.chat_control_tokens = getattr(hf, "chat_control_tokens", None), []
        self.specials = {t.content: i for i, t in hf.added_tokens_decoder.items() if t.special}
        self.turn_ends = self.find_turn_ends()
        self.eos_ids = {self.eos_id} | self.turn_ends

    def set_special(self, special):
        """Make the tokens special that are plain in the source, or plain again."""
        # a token of its own: transformers would make one that keeps the blanks behind it
        self.hf.add_tokens([type(t)(**t.__getstate__() | dict(special=special))
                            for t in self.plain], special_tokens=special)

    def save(self, folder):
        """
        Write transformers' files, with the source's special tokens: another one would not show the
        reader of a response. Version 4 of transformers reads them, too.
        """
        self.set_special(False)
        self.hf.save_pretrained(folder)
        self.set_special(True)
        file = os.path.join(folder, "tokenizer_config.json")
        settings = read_json(file) | dict(chat_control_tokens=self.controls)
        if self.controls is None:
            del settings["chat_control_tokens"]
        if os.path.exists(os.path.join(folder, "tokenizer.json")):  # it has all, BOS and blanks
            settings |= dict(tokenizer_class="PreTrainedTokenizerFast",
                             model_input_names=self.hf.model_input_names)
        if "extra_special_tokens" in settings:
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        write_json(file, settings)

    def find_turn_ends(self):
        """{the id of the first special token that the template writes behind an answer}, or {}."""
        try:
            ids = self.chat_ids([dict(role="user", content="a"),
                                 dict(role="assistant", content="ANSWER")])
        except BadInput:  # encoding the data's messages gives the error, if there are any
            return set()
        behind = self.text_of(ids).rpartition("ANSWER")[2]
        behind = self.hf.encode(behind, add_special_tokens=False)
        return set([i for i in behind if i in self.specials.values()][:1])

    def fit(self, model, path):
        """
        Take a language model's own ends of a response. Raise BadInput if ids have no embedding in
        the model, unless no text needs them: Gemma 3 1B has a token for images, but reads none.
        """
        settings = getattr(model.hf, "generation_config", None) or model.config
        for ends in (settings.eos_token_id, model.config.eos_token_id):
            ends = set(ends if isinstance(ends, list) else [ends]) - {None}
            self.eos_ids |= ends if model.head == "lm" else set()
        embeddings = model.config.vocab_size
        needed = self.eos_ids | {self.pad_id, *self.bos_ids}
        spare = set(self.specials.values()) - needed
        if not spare.issuperset(range(embeddings, max(self.vocab_size, *(i + 1 for i in needed)))):
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

    def encode_behind(self, texts):
        """The ids of each of these strings as they are behind another text: no blank is added."""
        if not self.adds_blank:
            return self.encode_texts(texts)
        return [ids[len(self.mark):] for ids in self.encode_texts([MARK + t for t in texts])]

    def encode_prompts(self, prompts):
        """
        The ids of each prompt: BOS and a string; or messages, up to where the response begins: a
        new turn, or the last message, if it is the assistant's.
        """
        strings = iter(self.encode_texts([p for p in prompts if isinstance(p, str)]))
        return [self.bos_ids + next(strings) if isinstance(p, str) else self.open_ids(p)
                for p in prompts]

    def encode_scored(self, prompts, completions, finished=None, longest=None):
        """
        The ids of each prompt and response up to the token at which a reward model's score is read,
        the last one that is not skipped_id; as in transformers and TRL. With a chat template they
        are a chat (strings, too). Without one they are strings, joined, with EOS behind them where
        the response has finished (None: all have). longest: further tokens are cut off.
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
                ids = self.chat_ids(joined(*pair))
            ids = ids[:longest]
            while len(ids) > 1 and ids[-1] == self.skipped_id:
                ids.pop()
            found.append(ids)
        return found

    def encode_learned(self, prompt, completion):
        """
        (ids, trained) of a demonstration: trained is True on the tokens that SFT learns: the
        completion and EOS, or the assistant's turns of the completion with their ends, each behind
        the ids that the policy would get there as the prompt. Raises BadInput.
        """
        if isinstance(prompt, str):
            ids = self.bos_ids + self.encode_texts([prompt])[0]
            more = self.encode_behind([completion])[0] + [self.eos_id]
            return ids + more, [False] * len(ids) + [True] * len(more)
        messages, ids, trained = joined(prompt, completion), [], []
        for i in range(len(messages) - len(completion), len(messages)):
            message = messages[i]
            if message["role"] != "assistant":
                continue
            # the prompt has begun this message, or it is a new turn
            open_ids = self.open_ids(prompt if i < len(prompt) else messages[:i])
            whole = self.chat_ids(messages[:i + 1])
            end = next((n for n in range(len(open_ids), len(whole)) if whole[n] in self.eos_ids), 0)
            learned = self.text_of(whole[len(open_ids):end]).strip()
            said = message["content"].removeprefix(prompt[-1]["content"] if i < len(prompt) else "")
            if whole[:len(open_ids)] != open_ids or whole[:len(ids)] != ids or not end or (
                    learned != self.text_of(self.encode_texts([said])[0]).strip()):
                raise BadInput(f"the chat template of {self.path} does not write the assistant's "
                               f"{shorten(said)} as it stands, with an end behind it, but "
                               f"{shorten(self.text_of(whole[len(open_ids):end + 1]))}; type "
                               "--chat_template=FILE or --template_kwargs=enable_thinking=False")
            trained += [False] * (len(open_ids) - len(trained)) + [True] * (end + 1 - len(open_ids))
            ids = whole[:end + 1]
        return ids, trained

    def open_ids(self, messages):
        """The ids of a prompt of messages, before the assistant's response. Raises BadInput."""
        last = messages[-1]
        if last["role"] != "assistant":
            return self.chat_ids(messages, add_generation_prompt=True)
        ids = self.chat_ids(messages, continue_final_message=True)
        if not self.text_of(ids).rstrip().endswith(last["content"].strip()):
            raise BadInput(f"the chat template of {self.path} changes the assistant's "
                           f"{shorten(last['content'])}, which the response shall continue")
        return ids

    def chat_ids(self, messages, **how):
        """
        The ids of the messages in the chat template. how: for transformers. Raises BadInput, also
        where the template leaves a message out; it may drop the thoughts of an assistant's.
        """
        if not self.template:
            raise BadInput("this is a list of messages, but the tokenizer has no chat template; "
                           "give one with --chat_template=FILE")
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [dict(role="system", content=self.system_prompt), *messages]
        how = self.kwargs | how
        try:
            if self.sanitizes:
                ids = self.hf.apply_chat_template(messages, sanitize_control_tokens=True,
                                                  return_dict=False, **how)
            else:
                from options.older_transformers import encode_chat
                ids = encode_chat(self.hf, messages, self.specials, **how)
            marked = [marked_message(*numbered) for numbered in enumerate(messages)]
            text = self.hf.apply_chat_template(marked, tokenize=False, **how)
        except Exception as e:  # a template is a program, which may raise anything
            raise BadInput(f"the chat template of {self.path} refuses the messages: "
                           f"{first_line(e)[:300]}") from e
        for number, (message, its) in enumerate(zip(messages, marked, strict=True)):
            mark = f"[[{number}]]"
            before, after = (str(m.get("content")).count(mark) for m in (message, its))
            if text.count(mark) < after - before:
                raise BadInput(f"the chat template of {self.path} leaves out the "
                               f"{message['role']}'s {shorten(message['content'])}; type "
                               "--chat_template=FILE" + ", or write it into the user's message"
                               * (message["role"] == "system"))
        return ids

    # ids -> text

    def text_of(self, ids):
        """The text of ids with all of their special tokens."""
        # some versions would take blanks out, as in 3 . 5, where the tokenizer's files ask for it
        return self.hf.decode(ids, clean_up_tokenization_spaces=False)

    def unseen(self):
        """The ids that no text shows: special ends, and padding that is in no stop string."""
        pad = self.text_of([self.pad_id]) if self.stop_strings else ""
        shown = any(pad in s for s in self.stop_strings)
        ends = {self.eos_id, *self.eos_ids.intersection(self.specials.values())}
        return ends if shown else ends | {self.pad_id}

    def decode(self, ids, behind=False):
        """
        The text of ids without padding and special ends. behind: it continues another text; then
        its first blank stays.
        """
        unseen = self.unseen()
        kept = [i for i in ids if i not in unseen]
        if behind and self.adds_blank:
            return self.text_of(self.mark + kept).partition(MARK)[2]
        return self.text_of(kept)

    def decode_response(self, ids, prompt=None):
        """
        The text of a response, cut right behind its first stop string. prompt: the data's; the
        response continues it, if it is a string or ends with the assistant.
        """
        continues = prompt and (isinstance(prompt, str) or prompt[-1]["role"] == "assistant")
        text = self.decode(ids, behind=bool(continues))
        ends = [text.index(s) + len(s) for s in self.stop_strings if s in text]
        return text[:min(ends, default=len(text))]

    def has_stop(self, ids):
        """Whether the text of the last tokens of a response so far has a stop string."""
        # each token has at least one byte; one more: decoding may drop a text's first blank
        longest = max(len(s.encode()) for s in self.stop_strings) + 1
        unseen = self.unseen()
        last = [*islice((i for i in reversed(ids) if i not in unseen), longest)][::-1]
        text = self.text_of(last)
        return any(s in text for s in self.stop_strings)

    def set_padding_apart(self):
        """
        For a reward model: its score is read at the last token that is not the padding. This should
        be the EOS, so the padding becomes a special token that ends nothing, if there is one.
        """
        ends = {self.eos_id, *self.turn_ends}
        if self.pad_id in ends:
            free = [s for s, i in self.specials.items()
                    if i not in ends and ("pad" in s.lower() or s == "<unk>")]
            self.hf.pad_token = min(free, default=self.hf.eos_token)
            self.pad_id = self.hf.pad_token_id
        self.skipped_id = self.pad_id


def marked_message(number, message):
    """
    A message with a mark behind its content, and one before it, to see whether a template writes
    all of it: templates strip contents, and a short one may stand in the text by chance. None is
    before an assistant's, because templates drop earlier thoughts; and none is in one with calls.
    """
    content, mark = message.get("content"), f"[[{number}]]"
    if not isinstance(content, str) or not content.strip() or message.get("tool_calls"):
        return message
    return message | dict(content=mark * (message["role"] != "assistant") + content + mark)


def joined(prompt, completion):
    """One dialogue of prompt and completion; this may continue a last message of the prompt."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    last, first = prompt[-1], completion[0]
    if last["role"] == first["role"] == "assistant":
        whole = {**last, **first, "content": last["content"] + first["content"]}
        return [*prompt[:-1], whole, *completion[1:]]
    return [*prompt, *completion]


def parse_stop_strings(text):
    """The key stop_strings, one text as it is, or a list in Python -> a list of texts."""
    if not text.startswith("["):
        return [text] if text else []
    try:  # from a config file, "['\n']" has real line breaks
        return [s for s in ast.literal_eval(text.replace("\n", "\\n")) if s + ""]
    except (ValueError, SyntaxError, TypeError) as e:
        raise BadInput(f"stop_strings = {shorten(text)}: wanted one text, or a list, such as "
                       "--stop_strings=\"['Q:', '\\n\\n']\"") from e


def parse_template_kwargs(text):
    """{name: value} of the key template_kwargs, written like the arguments of a call in Python."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        return {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    except (ValueError, SyntaxError) as e:
        raise BadInput(f"template_kwargs = {shorten(text)}: wanted Python values, such as "
                       "enable_thinking=False,language='en'") from e
