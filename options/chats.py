"""
Messages, lists of {"role", "content"}: which ones a run can learn, and their ids in a chat
template. The ids are those of transformers' apply_chat_template. Text that looks like a special
token is plain text: a message cannot end a turn.
"""
import ast
import contextlib
import datetime
import inspect
import os
import re
from types import SimpleNamespace

from configurator import read_json
from errors import BadInput, first_line, say, shorten
from options.blanks import encode_behind, text_after
from options.hub import cached_folder
from options.mistakes import file_of_key
from prompts import NO_UTF8
from tokenizer import text_of

# tokens of many families' templates: <|im_end|>, and DeepSeek's with other bars
MARKUP = r"<\|\w+\|>|<\uff5c[^<>\s]+\uff5c>"
# what others write into a message that is not to be learned, such as "weight": 0
NOT_LEARNED = "weight", "train", "training", "trainable", "loss", "loss_mask"
# where others keep the thoughts of an assistant's message; many chat templates do not read them
THOUGHTS_APART = "reasoning_content", "reasoning", "thinking"
# how a template asks for today's date. It is a fixed day: Llama 3.2's own where there is no clock
TODAY = re.compile(r"""strftime_now\s*\(\s*(?:format\s*=\s*)?(["'])((?:(?!\1).)*)\1\s*\)""")
DAY = "2024-07-26"


def check_messages(messages, field):
    """Raise BadInput unless a data row's field, a list, is messages of text, and not empty."""
    if not messages:
        raise BadInput(f"field {field!r} is empty")
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or any(map(message.get, ("tool_calls", "function_call"))):
            raise BadInput(f"field {field!r} must be a string, or a list of {{\"role\", "
                           f"\"content\"}} messages of text, found {shorten(message)}")
        if message.get("role") not in ("system", "user", "assistant"):
            raise BadInput(f"field {field!r}, message {number}: the role is "
                           f"{shorten(message.get('role'))}; wanted system, user or assistant")
        if re.search(NO_UTF8, content) or not content and field == "prompt":
            raise BadInput(f"field {field!r} is empty, or no UTF-8 text: {shorten(content)}")


def check_learned(messages, field):
    """Raise BadInput unless messages are a completion that is learned as it is."""
    for message in messages:
        for key, value in beside_its_content(message).items():
            why = (f"{key!r} is {value!r}, but each answer in it is learned; end the prompt behind "
                   "this one")
            if key in THOUGHTS_APART:
                why = (f"thoughts in {key!r} would not be learned; write them into 'content', as "
                       "the model shall: <think>...</think>")
            raise BadInput(f"field {field!r}: {why}")
    if {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
        raise BadInput(f"field {field!r}: a completion begins and ends with the assistant")


def beside_its_content(message):
    """{key: value} of an assistant's message that would be lost if its content is learned."""
    if message["role"] != "assistant":
        return {}
    thoughts = {key: message[key] for key in THOUGHTS_APART if message.get(key)}
    return thoughts | {key: message[key] for key in NOT_LEARNED
                       if message.get(key) not in (None, 1)}


def last_question(messages):
    """What a run prints of a prompt: the last message of the user, or the last one."""
    users = [message for message in messages if message["role"] == "user"]
    return (users or messages)[-1]["content"]


# --------------------------------------------------------------------------------------------------
# messages -> ids


def chats_of(hf, path, system):
    """
    The Chats of a tokenizer of transformers, `hf`, which gets the run's template; None if it has
    none. system: None for another model than the run's own, see trained_with. Raises BadInput.
    """
    system = system or trained_with(path)
    if system.chat_template:
        hf.chat_template = file_of_key(system.chat_template, "chat_template")
    if not hf.chat_template:
        if system.system_prompt:
            raise BadInput("system_prompt: the tokenizer has no chat template; give one with "
                           "--chat_template=FILE")
        return None
    chats = Chats(hf, path, system.template_kwargs, system.system_prompt)
    chats.set_special(True)
    chats.turn_ends = chats.find_turn_ends()
    if TODAY.search(chats.template):
        say(f"{path}: its chat template asks for today's date, which is {chats.day} in every run "
            "and tool of quartet, so that a run can resume tomorrow; for another day type "
            "--template_kwargs=strftime_now='2025-01-31'")
    return chats


def trained_with(path):
    """
    The keys with which another model than the run's own reads chats: none, or those that rm.py has
    noted in a reward model's config.json; its tokenizer's files have the template. Raises BadInput.
    """
    folder, notes = path if os.path.isdir(path) else cached_folder(path), {}
    if folder and os.path.isfile(os.path.join(folder, "adapter_config.json")):
        from options.lora import read_adapter

        notes = read_adapter(folder)[2]
    elif folder:
        with contextlib.suppress(OSError, ValueError):  # the model's loading says it
            notes = read_json(os.path.join(folder, "config.json"))
    keys = {key: notes[key] if "score_shift" in notes and key in notes else ""
            for key in ("system_prompt", "template_kwargs")}
    if not all(isinstance(x, str) for x in keys.values()):
        raise BadInput(f"{path}: system_prompt and template_kwargs, with which a reward model was "
                       f"trained, must be texts in its config.json, found {shorten(keys)}")
    return SimpleNamespace(chat_template="", **keys)


class Chats:
    """
    The chat template of a tokenizer of transformers, `hf`, in a run:

        template         its text
        keys             {the key system_prompt or template_kwargs: its value}
        kwargs           what it is given beside the messages
        day              what it takes for today, as "2024-07-26"
        system_prompt    of dialogues that have none
        turn_ends        {the id that ends a turn of the assistant}, or empty
    """

    def __init__(self, hf, path, template_kwargs, system_prompt):
        self.hf, self.path, self.system_prompt = hf, path, system_prompt
        self.keys = dict(system_prompt=system_prompt, template_kwargs=template_kwargs)
        self.kwargs = parse_template_kwargs(template_kwargs)
        self.day = self.kwargs.pop("strftime_now", DAY)
        self.template = hf.get_chat_template()
        both = self.template + hf.get_chat_template(tools=[{}])  # with tools it may be another
        if re.search(r"strftime_now(?!\s+is\s)", TODAY.sub("", both)):
            raise BadInput(f"{path}: its chat template reads the clock by strftime_now, in another "
                           "way than by a format in quotes; type --chat_template=FILE")
        if found := re.search(r"\d{9,}", self.template):  # a width, or a count: gigabytes
            raise BadInput(f"{path}: its chat template has the number {shorten(found[0])}, and may "
                           "write as many letters; type --chat_template=FILE")
        # all tokens in a template such as <|im_end|> become special in the run: otherwise a message
        # with one would end a turn. Others, such as <think>, are tokens in a message, too
        self.plain = [t for t in hf.added_tokens_decoder.values() if not t.special
                      and t.content in self.template and re.fullmatch(MARKUP, t.content)]
        takes = inspect.signature(hf.apply_chat_template).parameters
        self.sanitizes = "sanitize_control_tokens" in takes  # else special tokens become tokens
        # tokens beside the special ones that are none in messages; no such list before 5.23
        self.controls = getattr(hf, "chat_control_tokens", None)
        self.turn_ends = set()

    def check_kinds(self, rows, path):
        """
        Raise BadInput where some prompts of a file are strings and others messages. Say where all
        are strings, which no template touches, and of how many system_prompt is not the system's.
        """
        strings, chats = ([n for n, row in enumerate(rows, 1) if isinstance(row["prompt"], kind)]
                          for kind in (str, list))
        if strings and chats:
            raise BadInput(f"{path}: the prompt of row {strings[0]} is a string, that of row "
                           f"{chats[0]} messages; make all messages (data/convert.py --chat)")
        if strings:
            say(f"warning: {path}: the prompts are strings, so they do not get the chat template "
                f"of {self.path}{' nor system_prompt' * bool(self.system_prompt)}; a chat model "
                "wants messages (data/convert.py --chat)")
        own = sum(row["prompt"][0]["role"] == "system" for row in rows if not strings)
        if self.system_prompt and own:
            say(f"{path}: {own} of {len(rows)} rows have a system message of their own, and not "
                "system_prompt")

    def set_special(self, special):
        """Make the tokens special that are plain in the source, or plain again."""
        # a token of its own: transformers would make one that keeps the blanks behind it
        self.hf.add_tokens([type(t)(**t.__getstate__() | dict(special=special))
                            for t in self.plain], special_tokens=special)
        self.hf.chat_control_tokens = [] if special else self.controls

    @contextlib.contextmanager
    def as_in_source(self):
        """In this block the tokenizer has the source's special tokens."""
        self.set_special(False)
        yield
        self.set_special(True)

    def find_turn_ends(self):
        """{the id of the first special token that the template writes behind an answer}, or {}."""
        try:
            ids = self.ids_of([dict(role="user", content="a"),
                                 dict(role="assistant", content="ANSWER")])
        except BadInput:  # encoding the data's messages gives the error, if there are any
            return set()
        behind = text_of(self.hf, ids).rpartition("ANSWER")[2]
        behind = self.hf.encode(behind, add_special_tokens=False)
        return set([i for i in behind if i in self.specials()][:1])

    def write(self, messages, **how):
        """What transformers' apply_chat_template makes of messages, on a fixed day: mostly text."""
        how = dict(tokenize=False) | self.kwargs | how
        # at midnight of the day: transformers' strftime_now reads the clock, and takes the place of
        # any that is given
        now = datetime.datetime.fromisoformat(self.day)
        template = TODAY.sub(lambda date: f"{date[1]}{now.strftime(date[2])}{date[1]}",
                             self.hf.get_chat_template(tools=how.get("tools")))
        return self.hf.apply_chat_template(messages, chat_template=template, **how)

    def specials(self):
        """{id: text} of the special tokens."""
        return {i: t.content for i, t in self.hf.added_tokens_decoder.items() if t.special}

    def ids_of_pair(self, prompt, completion):
        return self.ids_of(joined(prompt, completion))

    def encode_learned(self, prompt, completion, tokenizer):
        """
        demonstrations.encode_learned of messages: each of the assistant's turns stands behind the
        ids that the policy would get there as the prompt. Raises BadInput.
        """
        messages, ids, trained = joined(prompt, completion), [], []
        for i in range(len(messages) - len(completion), len(messages)):
            message = messages[i]
            if message["role"] != "assistant":
                continue
            # the prompt has begun this message, or it is a new turn
            open_ids = self.open_ids(prompt if i < len(prompt) else messages[:i])
            begin, whole = len(open_ids), self.ids_of(messages[:i + 1])
            end = next((n for n in range(begin, len(whole)) if whole[n] in tokenizer.eos_ids), 0)
            learned = text_after(tokenizer, whole[begin:end])
            said = message["content"].removeprefix(prompt[-1]["content"] if i < len(prompt) else "")
            # as its letters come back, perhaps in NFC; the template may add blanks, and strip those
            # behind it, but no indentation
            wanted = text_after(tokenizer, encode_behind(tokenizer, [said])[0])
            same = learned.strip() == wanted.strip() and learned.rstrip().endswith(wanted.rstrip())
            if not same or not end or whole[:begin] != open_ids or whole[:len(ids)] != ids:
                raise BadInput(f"the chat template of {self.path} does not write the assistant's "
                               f"{shorten(said)} as it stands, with an end behind it, but "
                               f"{shorten(text_of(self.hf, whole[begin:end + 1]))}; type "
                               "--chat_template=FILE or --template_kwargs=enable_thinking=False")
            ids = whole[:end + 1]
            trained += [False] * (begin - len(trained)) + [True] * (len(ids) - begin)
        return ids, trained

    def open_ids(self, messages):
        """The ids of a prompt of messages, before the assistant's response. Raises BadInput."""
        last = messages[-1]
        if last["role"] != "assistant":
            return self.ids_of(messages, add_generation_prompt=True)
        ids = self.ids_of(messages, continue_final_message=True)
        if not text_of(self.hf, ids).rstrip().endswith(last["content"].rstrip()):
            raise BadInput(f"the chat template of {self.path} changes the assistant's "
                           f"{shorten(last['content'])}, which the response shall continue")
        return ids

    def ids_of(self, messages, **how):
        """
        The ids of the messages in the chat template. how: for transformers. Raises BadInput, also
        where the template leaves a message out; it may drop the thoughts of an assistant's.
        """
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [dict(role="system", content=self.system_prompt), *messages]
        try:
            marked = [marked_message(*numbered) for numbered in enumerate(messages)]
            text = self.write(marked, **how)
            if self.sanitizes:
                ids = self.write(messages, tokenize=True, sanitize_control_tokens=True,
                                 return_dict=False, **how)
            else:
                from options.older_transformers import encode_chat
                ids = encode_chat(self.hf, messages, self.specials().values(), self.write,
                                  **self.kwargs | how)
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


def marked_message(number, message):
    """
    A message with a mark behind its content, and one before it, to see whether a template writes
    all of it: a short content may stand in the text by chance. None is before an assistant's,
    because templates drop earlier thoughts; and none is in one with calls.
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


def parse_template_kwargs(text):
    """{name: value} of the key template_kwargs, as of a call in Python. Raises BadInput."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        kwargs = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    except (ValueError, SyntaxError) as e:
        raise BadInput(f"template_kwargs = {shorten(text)}: wanted Python values, such as "
                       "enable_thinking=False,language='en'") from e
    day = kwargs.get("strftime_now", DAY)
    with contextlib.suppress(TypeError, ValueError):
        if datetime.date.fromisoformat(day).isoformat() == day:
            return kwargs
    raise BadInput(f"template_kwargs: strftime_now = {shorten(day)}; wanted the day that the "
                   f"template takes for today, such as strftime_now='{DAY}'")
