"""
The assistant's messages in a chat template: how sft.py learns them, and how a policy continues
thoughts that a prompt has begun.

A template is a program: it may cut thoughts out of a message, or write empty ones in front of it.
Here a message is learned as it is written, behind the same ids that the policy would get as the
prompt; where the template makes this impossible, the row is refused.
"""
import functools
import os
import re

from chats import chat_ids, joined, open_ids, with_system_prompt
from errors import BadInput, shorten, warn
from rows import THOUGHTS, thoughts_of

# fields of several trainers that say whether a message is learned: {name: the meaning of true};
# None: data differ in the meaning
FLAGS = dict.fromkeys("""weight train training trainable train_on_turn learn supervised loss
    loss_mask loss_weight loss_scale train_detail training_detail""".split(), True)
FLAGS |= dict(masked=False, ignore=False, ignore_loss=False, mask=None)


# --------------------------------------------------------------------------------------------------
# messages -> ids


def learned_ids(tokenizer, prompt, completion):
    """
    (ids, trained) of a prompt and its completion, lists of messages. trained is True on the
    assistant's turns of the completion with their ends, except turns that a flag takes out.

    A trained turn begins behind the prompt that the policy would get there, and ends with the first
    end-of-turn token. If it is the only one, and the template changes it, it is put behind that
    prompt as it is written. Raises BadInput where one of several would not be learned as it is
    written.
    """
    prompt = with_system_prompt(tokenizer, prompt)
    messages = joined(prompt, completion)
    first = len(messages) - len(completion)  # number of the first message that may be trained
    turns = [first + n for n, message in enumerate(completion)
             if message["role"] == "assistant" and is_learned(message)]
    if not turns:
        raise BadInput("no message of the completion is to be learned; leave the row out")
    ids, trained = chat_ids(tokenizer, messages[:turns[-1] + 1]), []
    special_ends = tokenizer.eos_ids & set(tokenizer.specials.values())
    for i in turns:
        message = completion[i - first]
        for mark in ("<think>", "</think>"):
            if mark in tokenizer.specials and mark in message["content"]:
                raise BadInput(f"{mark} is a special token of this tokenizer, and would be learned "
                               "as letters; put the thoughts into the field reasoning_content, if "
                               "the template reads it")
        if i == first < len(prompt):  # the prompt has begun this message
            before = open_ids(tokenizer, prompt)
        else:
            before = chat_ids(tokenizer, messages[:i], add_generation_prompt=True)
        begin = len(os.path.commonprefix([ids, before]))
        end = next((n for n in range(begin, len(ids)) if ids[n] in special_ends), len(ids))
        written = None
        if end == len(ids) or not is_whole(tokenizer, message, ids[:end], before):
            answer = message["content"].rpartition("</think>")[2].strip()
            written = as_written(tokenizer, message, before)
            if (len(turns) > 1 or written is None or not tokenizer.turn_ends
                    or answer not in tokenizer.text_of(ids[begin:end])):
                refuse(tokenizer, message, ids[begin:end + 1])
            written += tokenizer.turn_ends
        elif len(turns) == 1 and begin < len(before) and opening(tokenizer, before):
            # the line break behind <think> is one token with the next line break of the template
            behind = text_behind(tokenizer, before, ids[:end])
            written = tokenizer.encode_texts([behind])[0] + [ids[end]]
        if written is not None:
            ids = before + written
            begin, end = len(before), len(ids) - 1
        trained += [False] * (begin - len(trained)) + [True] * (end + 1 - begin)
    return ids[:end + 1], trained


def begun_ids(tokenizer, messages):
    """
    The ids of messages, up to the place where the assistant goes on. The last message is the
    assistant's and has thoughts; if the template would change it, it is put there as it is written.
    Raises BadInput.
    """
    ids, last = chat_ids(tokenizer, messages, continue_final_message=True), messages[-1]
    before = chat_ids(tokenizer, messages[:-1], add_generation_prompt=True)
    if is_whole(tokenizer, last, ids, before):
        return ids
    written = as_written(tokenizer, last, before)
    if written is None:
        refuse(tokenizer, last, ids[-40:])
    return before + written


def as_written(tokenizer, message, before):
    """
    The ids of the assistant's message as it is written, without the template, behind the generation
    prompt `before`. None where they do not fit together.
    """
    content, thoughts = message["content"], thoughts_of(message)
    opened_by = opening(tokenizer, before)
    opened = opened_by.strip() == "<think>"
    if thoughts:  # in a field: the way to write them is only known behind <think>
        fits = opened and "think>" not in content
        content = f"{thoughts}\n</think>\n\n{content}"
    elif opened and content.lstrip().startswith("<think>"):  # the prompt has this <think>
        fits, content = True, content.lstrip().removeprefix("<think>")
        content = content.removeprefix(opened_by.removeprefix("<think>"))
    else:  # no answer inside open thoughts, and no thoughts behind ended ones
        fits = (content.count("</think>") > content.count("<think>") if opened else
                not opened_by or "think>" not in content)
    return tokenizer.encode_texts([content])[0] if fits else None


# --------------------------------------------------------------------------------------------------
# a message in the template


def is_whole(tokenizer, message, ids, before):
    """
    Whether ids have the message's thoughts and content behind the prompt `before`, and in front of
    them only text that the template writes in every turn.
    """
    text, parts = text_behind(tokenizer, before, ids), [message["content"], thoughts_of(message)]
    if text is None:
        return False
    if not all(part.strip() in text for part in parts):
        # some tokenizers write "e\u0301" as one letter
        parts = [tokenizer.text_of(part) for part in tokenizer.encode_texts(parts)]
    # some tokenizers write blanks around text that looks like a special token
    blank = " " if any(name in part for part in parts for name in tokenizer.specials) else ""
    text, content, thoughts = [tidy(part).replace(blank, "")
                               for part in (opening(tokenizer, before) + text, *parts)]
    if not text.endswith(content):
        return False
    front = text[:len(text) - len(content)].strip()
    for frame in frames(tokenizer):
        if "think>" in content and re.search("think>|THOUGHTS", frame):
            continue  # the content has thoughts: no other thoughts in front of them
        pattern = re.escape(frame.replace(blank, "")).replace(
            "THOUGHTS", rf"\s*{re.escape(thoughts)}\s*")
        if ("THOUGHTS" in frame or not thoughts) and re.fullmatch(pattern, front):
            return True
    ends_thoughts = "think>" in content and "<think>" not in content.partition("</think>")[0]
    return ends_thoughts and not thoughts and front == "<think>"


@functools.cache
def frames(tokenizer):
    """
    The texts that the template may write between the generation prompt and an answer: "" and more,
    such as <think>THOUGHTS</think> for thoughts in a field.
    """
    found = [""]
    asked, answer = dict(role="user", content="a"), dict(role="assistant", content="ANSWER")
    for thoughts in {}, dict.fromkeys(THOUGHTS, "THOUGHTS"):
        try:
            before = chat_ids(tokenizer, [asked], add_generation_prompt=True)
            ids = chat_ids(tokenizer, [asked, answer | thoughts])
        except BadInput:  # encoding the data's messages gives the error, if there are any
            break
        front, answered, _ = (text_behind(tokenizer, before, ids) or "").rpartition("ANSWER")
        frame = tidy(opening(tokenizer, before) + front)
        if answered and not frame.endswith("THOUGHTS"):  # the answer begins behind a mark
            found.append(frame)
    return found


def opening(tokenizer, before):
    """The <think> at the end of the prompt, and perhaps a </think> behind it; or ""."""
    return re.search(r"(<think>\s*)?(</think>\s*)?\Z", tokenizer.text_of(before[-40:]))[0]


def text_behind(tokenizer, before, ids):
    """The text of ids behind the prompt's ids. None where they do not begin with the prompt."""
    if ids[:len(before)] == before:
        return tokenizer.text_of(ids[len(before):])
    # the prompt's last token may be joined with the next text: two line breaks can be one token
    text, prompt = tokenizer.text_of(ids), tokenizer.text_of(before)
    return text[len(prompt):] if text.startswith(prompt) else None


def tidy(text):
    """A text without the blanks around it, and around its <think> and </think>."""
    return re.sub(r"\s*(</?think>)\s*", r"\1", text).strip()


def refuse(tokenizer, message, ids):
    """Raise BadInput: the template has these ids in the place of the assistant's message."""
    ends = ", ".join(sorted(tokenizer.hf.convert_ids_to_tokens(tokenizer.eos_ids)))
    raise BadInput(
        f"{tokenizer.name} does not write the assistant's {shorten(message['content'], 60)} as it "
        f"stands, with an end behind it ({ends}), but {shorten(tokenizer.text_of(ids), 60)}; write "
        "all thoughts into the content, between <think> and </think>, leave one message to "
        'learn in each row ("train": false in the others), or type --template_kwargs=NAME=VALUE'
        " (as enable_thinking=False) or --chat_template=FILE, with eos_token behind each turn")


# --------------------------------------------------------------------------------------------------
# other fields of a message


def is_learned(message):
    """Whether a message may be learned, by its FLAGS. Raises BadInput where one cannot be read."""
    learned = True
    for name in FLAGS.keys() & message.keys():
        value = str(message[name]).lower()
        if value in ("none", "", "[]"):
            continue
        if FLAGS[name] is None or value not in ("0", "0.0", "false", "1", "1.0", "true"):
            raise BadInput(f"a message has {name!r}: {shorten(value)}, which does not say whether "
                           'it is learned as a whole; write "train": true or false')
        learned &= FLAGS[name] == (value in ("1", "1.0", "true"))
    return learned


def say_unknown_fields(dialogues, path):
    """Print one line on rank 0 if messages to learn have unknown fields."""
    unknown = {field for messages in dialogues for message in messages
               if message["role"] == "assistant"
               for field in message.keys() - {"role", "content", *THOUGHTS, *FLAGS}}
    if unknown:
        warn(f"{path}: messages to learn have fields that only a chat template may read: "
             f"{', '.join(sorted(unknown))}")
