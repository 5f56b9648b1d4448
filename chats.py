"""
Chats: messages {"role", "content"} -> token ids, by the chat template of a tokenizer. They are the
same ids as from transformers' apply_chat_template.

A prompt of messages ends where the assistant goes on: in a new turn behind the others, or in the
last message, if it is the assistant's.
"""
import ast
import contextlib
import inspect
import re
import signal
import threading

from errors import BadConfig, BadInput, first_line, one_line, shorten, warn
from rows import thoughts_of

RENDERING = 20  # seconds for one dialogue: a chat template is a program
# tokens of many families' templates: <|im_end|>, and DeepSeek's with other bars
MARKUP = r"<\|\w+\|>|<\uff5c[^<>\s]+\uff5c>"


def open_ids(tokenizer, messages):
    """The ids of a prompt of messages, before the assistant's response. Raises BadInput."""
    messages, last = with_system_prompt(tokenizer, messages), messages[-1]
    if last["role"] != "assistant":
        return chat_ids(tokenizer, messages, add_generation_prompt=True)
    if thoughts_of(last) or "<think>" in last["content"]:  # a template may change thoughts
        from options.assistant import begun_ids

        return begun_ids(tokenizer, messages)
    return chat_ids(tokenizer, messages, continue_final_message=True)


def chat_ids(tokenizer, messages, **how):
    """
    The ids of the messages in the chat template. how: arguments for transformers. Raises BadInput
    with the template's own words where it refuses the messages.
    """
    if not tokenizer.template:
        raise BadInput("this is a list of messages, but the tokenizer has no chat template; "
                       "write strings, or give one with --chat_template=FILE")
    try:
        with time_limit(RENDERING):
            apply = tokenizer.hf.apply_chat_template
            if "sanitize_control_tokens" in inspect.signature(apply).parameters:
                return apply(messages, sanitize_control_tokens=True, return_dict=False,
                             **tokenizer.kwargs, **how)
            from options.older_transformers import encode_chat

            return encode_chat(tokenizer, messages, **tokenizer.kwargs, **how)
    except Exception as e:  # a template is a program, which may raise anything
        raise BadInput(f"{tokenizer.name} refuses the messages: {one_line(first_line(e), 300)}"
                       ) from e


@contextlib.contextmanager
def time_limit(seconds):
    """
    A block that raises TimeoutError where it takes longer. It does so only in the main thread,
    because Python takes signals only there.
    """
    def late(*_):
        raise TimeoutError(f"it has not ended within {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # repeated: an error in a __del__ is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def with_system_prompt(tokenizer, messages):
    """The messages, with the run's system_prompt in front, if they have no system message."""
    if not tokenizer.system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": tokenizer.system_prompt}, *messages]


def joined(prompt, completion):
    """
    One dialogue of prompt and completion, strings or messages. If the prompt ends with the
    assistant, the completion continues its last message.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    last, first = prompt[-1], completion[0]
    if last["role"] == first["role"] == "assistant":
        whole = {**last, **first, "content": last["content"] + first["content"]}
        return [*prompt[:-1], whole, *completion[1:]]
    return [*prompt, *completion]


# --------------------------------------------------------------------------------------------------
# a template and its keys


def check_template(tokenizer):
    """Raise BadInput where the settings do not fit the template; warn if it writes the date."""
    name, text = tokenizer.name, tokenizer.template or ""
    if tokenizer.system_prompt and not text:
        raise BadInput("system_prompt is given, but the tokenizer has no chat template; give "
                       "one with --chat_template=FILE, or leave it out")
    for variable in tokenizer.kwargs:
        if not re.search(rf"\b{variable}\b", text):
            raise BadInput(f"template_kwargs: {name} has no variable {variable!r}")
    if "strftime_now" in text and "date_string" not in tokenizer.kwargs:
        warn(f"{name} writes today's date, so a run that goes on tomorrow would read other "
             "prompts; fix it, as in --template_kwargs=\"date_string='26 Jul 2024'\"")


def make_markup_special(hf, template):
    """
    Make all tokens in a template such as <|im_end|> special, also where their author has not done
    it: otherwise a message with one would end a turn. Other tokens in a template, such as <think>,
    are tokens in a message, too. hf: transformers' tokenizer.
    """
    plain = [t.content for t in hf.added_tokens_decoder.values()
             if not t.special and t.content in template and re.fullmatch(MARKUP, t.content)]
    hf.add_tokens(plain, special_tokens=True)
    hf.chat_control_tokens = []  # beside the special ones


def turn_ends(tokenizer):
    """
    {the id of the first special token that the template writes behind an answer}; empty where there
    is none. A base model's files may have another end than its chat template.
    """
    try:
        ids = chat_ids(tokenizer, [dict(role="user", content="a"),
                                   dict(role="assistant", content="ANSWER")])
    except BadInput:  # encoding the data's messages gives the error, if there are any
        return set()
    behind = tokenizer.text_of(ids).rpartition("ANSWER")[2]
    behind = tokenizer.hf.encode(behind, add_special_tokens=False)
    return set([i for i in behind if i in tokenizer.specials.values()][:1])


def parse_template_kwargs(text):
    """
    {name: value} of the key template_kwargs: "enable_thinking=False,date_string='1 May'", written
    like the arguments of a call in Python; the values are literals. Raises BadConfig.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    except (ValueError, SyntaxError) as e:
        raise BadConfig(f"template_kwargs = {shorten(text)}: wanted names with Python values, such "
                        "as enable_thinking=False,language='en'") from e
