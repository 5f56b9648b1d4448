"""
For transformers before 5.23, such as in an environment with vLLM. It lacks the argument
sanitize_control_tokens of apply_chat_template. With it, special tokens in a message stay text, and
only those of the template are tokens; and the thoughts of a message may have any of three names.
"""
import re

BEGIN, END = "\U000f0000", "\U000f0001"  # around text that must stay text; no text has them


def encode_chat(tokenizer, messages, **how):
    """
    The ids that apply_chat_template(messages, sanitize_control_tokens=True) gives in transformers
    5.23. how: its other arguments, those of the template included.
    """
    messages = [with_thoughts(message) for message in messages]
    hf, names = tokenizer.hf, sorted(tokenizer.specials, key=len, reverse=True)
    pattern = "|".join(map(re.escape, names)) or "(?!)"
    marked, how = (mark(x, re.compile(pattern)) for x in (messages, how))
    text = hf.apply_chat_template(marked, tokenize=False, **how)
    # the template's text, a marked text, the template's text, ...; None: a mark without the other
    # one, because the template has cut the marked text
    first, *pieces = re.split(f"{BEGIN}({pattern}){END}|[{BEGIN}{END}]", text)
    ids, line = (hf.encode(part, add_special_tokens=False) for part in (first, "\n"))
    for number, piece in enumerate(pieces):
        if not piece:
            continue
        settings = dict(add_special_tokens=False, split_special_tokens=number % 2 == 0)
        # behind a line break, because otherwise SentencePiece would put a blank in front
        more = hf.encode("\n" + piece, **settings)
        fits = more[:len(line)] == line
        ids += more[len(line):] if fits else hf.encode(piece, **settings)
    return ids


def with_thoughts(message):
    """A message with its thoughts under the names that templates read."""
    fields = ("reasoning_content", "thinking", "reasoning")
    thoughts = next((message[name] for name in fields if message.get(name) is not None), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def mark(x, pattern):
    """A string, or all strings in lists and dicts, with marks around the pattern's matches."""
    if isinstance(x, str):
        return pattern.sub(lambda m: f"{BEGIN}{m[0]}{END}", x.replace(BEGIN, "").replace(END, ""))
    if isinstance(x, dict):
        return {key: mark(value, pattern) for key, value in x.items()}
    return [mark(value, pattern) for value in x] if isinstance(x, (list, tuple)) else x
