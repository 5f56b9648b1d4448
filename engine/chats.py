"""
Chat templates: messages -> text, as transformers' apply_chat_template renders them, and where in
that text a turn of the assistant begins. A template is a program of its author, in the language
Jinja; it may refuse messages, drop them or change them. engine/tokenizers.py makes ids of the text.
"""
import ast
import contextlib
import hashlib
import json
import os
import re
from datetime import datetime

from folders import read_text
from errors import BadConfig, BadInput, first_line, one_line, say, shorten, warn


CHAT_KEYS = "chat_template", "template_kwargs", "system_prompt", "chat_date"
MARK = "\ue000"  # the first of Unicode's private area, whose characters texts hardly ever hold
# what render passes itself, and what is for tokens, not for templates
OUR_KWARGS = (
    "messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens")


class ChatTemplate:
    """
    The chat template of a tokenizer. text: the template, None where there is none; name: how
    messages call it; own: whether it is a file of the run's; fingerprint: differs where one text
    may become another.
    """

    def __init__(self, backend, folder, chat_template="", template_kwargs="", system_prompt="",
                 chat_date=""):
        """
        backend: the tokenizer of transformers, from this folder. The other arguments are keys of
        engine/keys.py; chat_date: "" is today.
        """
        self.backend, self.own = backend, bool(chat_template)
        self.name = f"the chat template of {folder}"
        self.kwargs, self.system_prompt = parse_template_kwargs(template_kwargs), system_prompt
        self.text = self.find_text(chat_template)
        self.fix_date(chat_date)
        text = self.text or ""
        dated = chat_date if "strftime_now" in text else ""  # only some templates print a date
        settings = json.dumps([text, template_kwargs, system_prompt, dated])
        self.fingerprint = hashlib.blake2b(settings.encode()).hexdigest()
        for name in self.kwargs if text else ():
            if not re.search(rf"\b{name}\b", text):
                raise BadInput(f"template_kwargs: {self.name} has no variable {name!r}")

    def find_text(self, file):
        """
        The text of the chat template: of a file, or of the tokenizer itself where that is "". None
        where there is none.
        """
        if file:
            self.name = f"the chat template {file}"
            text = read_text(file)
            if not text.strip():
                raise BadInput(f"{self.name} is empty; leave the key out, or give another file")
            return text
        if not self.backend.chat_template:
            return None
        # where there are several, the one called default, or tool_use if there are tools
        tools = self.kwargs.get("tools")
        template, e = attempt(lambda: self.backend.get_chat_template(None, tools))
        if isinstance(template, str):
            return template
        warn(f"{self.name} cannot be used ({first_line(e)[:200] if e else 'it is no text'}"
             "); for chats give one with --chat_template=FILE")
        return None

    def fix_date(self, date):
        """
        Let the template print this date ("2026-01-31"), not the day on which it is rendered: a run
        that goes on tomorrow must read the same prompts. Raises BadInput where the key's template
        is none.
        """
        from transformers.utils import chat_template_utils

        fixed = parse_date(date)
        if not self.text:
            return
        # transformers keeps one compiled template for each text, and hands it out here as well. A
        # version without this function prints today's date; then a run only resumes on its day
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        if compile_template is None:
            return
        compiled, e = attempt(lambda: compile_template(self.text))
        if e:
            if self.own:
                raise BadInput(f"{self.name} is not written in Jinja: "
                               f"{one_line(first_line(e), 300)}") from e
            return  # said where a message is to be encoded
        compiled.globals["strftime_now"] = lambda form: (fixed or datetime.now()).strftime(form)
        if fixed and "strftime_now" in self.text:
            say(f"{self.name} prints a date: here always {date} (the key chat_date)")

    def with_system_prompt(self, messages):
        """The messages, with the run's system_prompt in front, if they have no system message."""
        if not self.system_prompt or messages and messages[0]["role"] in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def turn_begin(self, text, messages, i):
        """
        Where in the text of a whole dialogue the turn of message i, the assistant's, begins: behind
        the template's generation prompt. Some templates do not write all of that prompt in a turn
        that is there already, such as Qwen3's empty thoughts: then it begins where they stop.
        """
        before = prompt = None
        if i > 0:  # transformers refuses to render no messages at all
            with contextlib.suppress(BadInput):  # the template may want more messages than these
                prompt = self.render(messages[:i], add_generation_prompt=True)
                if text.startswith(prompt) and len(prompt) < len(text):
                    return len(prompt)
                before = self.render(messages[:i])
        other = [*messages[:i], {**messages[i], "content": MARK}, *messages[i + 1:]]
        content = common_prefix(text, self.render(other))  # where the message itself begins
        if content == len(text):
            raise BadInput(f"{self.name} drops the assistant's message, so there is nothing to "
                           "learn; give another --chat_template")
        if before is None:
            return content
        if text.startswith(before):
            return min(content, common_prefix(text, prompt))
        # the template writes earlier messages in another way when they are the last ones
        header = prompt[common_prefix(prompt, before):]
        at = text.rfind(header, 0, content) if header else -1
        return content if at < 0 else at + len(header)

    def render(self, messages, **how):
        """
        The text that the chat template makes of the messages. how: arguments for transformers.
        Raises BadInput with the template's own words where it refuses the messages.
        """
        try:
            return self.backend.apply_chat_template(
                messages, chat_template=self.text, tokenize=False, **self.kwargs, **how)
        except Exception as e:  # it may raise anything
            if "continue_final_message" in how and "continue_final_message" in str(e):
                return ""  # transformers has not found the last message in the template's text
            raise BadInput(f"{self.name} refuses the messages: {one_line(first_line(e), 300)}"
                           ) from e

    def render_open(self, messages):
        """
        The template's text of the messages that ends in an open turn of the assistant: the last
        message, if that is the assistant's, or an empty one. Raises BadInput if the template does
        not keep that last message.
        """
        if messages[-1]["role"] != "assistant":
            return self.render(messages, add_generation_prompt=True)
        last = content_of(messages[-1]).strip()
        text = self.render(messages, continue_final_message=True)
        if not (last and text.rstrip().endswith(last)):
            raise BadInput("the last message is the assistant's, for the response to go on with, "
                           "but the chat template drops or changes a part of it, or it is blank; "
                           "end the prompt with another role's message, or write it as a string")
        return text


def content_of(message):
    """The content of a message, a string; "" where there is none, as beside a call of a tool."""
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise BadInput(f"the content of a message must be a string, found {shorten(content)}")
    return content or ""


def common_prefix(a, b):
    """How many characters, or ids, two strings or lists have in common at their beginning."""
    return len(os.path.commonprefix([a, b]))


def attempt(read):
    """
    (what read() returns, None), or (None, the exception). read calls libraries that raise anything
    on a broken file; PanicException is that of Rust code, and no Exception.
    """
    try:
        return read(), None
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        return None, e


def parse_template_kwargs(text):
    """
    {name: value} of the key template_kwargs: "enable_thinking=False,date_string='1 May'", the
    arguments of a call in Python whose values are literals. Raises BadConfig.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        kwargs = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
        if len(kwargs) < len(call.keywords):  # a name twice
            raise ValueError
    except (ValueError, SyntaxError, MemoryError, RecursionError) as e:
        raise BadConfig(f"template_kwargs = {shorten(text)}: wanted names with Python values, such "
                        "as enable_thinking=False,language='en'") from e
    for name in kwargs:
        if name is None or name in OUR_KWARGS:
            raise BadConfig(f"template_kwargs = {shorten(text)}: {name} is not the template's; "
                            "leave it out")
    return kwargs


def parse_date(text):
    """The key chat_date, such as "2026-01-31", as a datetime; None for "". Raises BadConfig."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError as e:
        raise BadConfig(f"chat_date = {shorten(text)} is no date such as 2026-01-31") from e
