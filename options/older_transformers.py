"""
For transformers before 5.23, such as in an environment with vLLM (its release 0.33 wants 5.16.1 to
5.19): its apply_chat_template lacks the argument sanitize_control_tokens. With it, special tokens
in a message stay text, and only those of the template are tokens.
"""
import re

BEGIN, END = "\U000f0000", "\U000f0001"  # around text that must stay text; no text has them


def encode_chat(hf, messages, specials, write, **how):
    """
    The ids of hf.apply_chat_template(messages, sanitize_control_tokens=True) in transformers
    5.23. specials: the special tokens. write(messages, **how): the text in the chat template. how:
    its other arguments, those of the template included.
    """
    names = "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)"
    messages, how = (mark(x, re.compile(names)) for x in (messages, how))
    text = write(messages, **how)
    # the template's text, a marked text, the template's text, ...; None: a mark without the other
    # one, because the template has cut the marked text
    first, *pieces = re.split(f"{BEGIN}({names}){END}|[{BEGIN}{END}]", text)
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


def mark(x, names):
    """A string, or all strings in lists and dicts, with marks around the special tokens' names."""
    if isinstance(x, str):
        return names.sub(lambda m: f"{BEGIN}{m[0]}{END}", x.replace(BEGIN, "").replace(END, ""))
    if isinstance(x, dict):
        return {key: mark(value, names) for key, value in x.items()}
    return [mark(value, names) for value in x] if isinstance(x, (list, tuple)) else x
