"""
The key stop_strings: texts that end a response, beside the EOS. Tokenizer.decode_response cuts a
response behind the first one.
"""
import ast
from itertools import islice

from errors import BadInput, shorten


def parse(text):
    """One text as it is, or a list in Python -> a list of texts. Raises BadInput."""
    if not text.startswith("["):
        return [text]
    try:  # from a config file, "['\n']" has real line breaks
        return [s for s in ast.literal_eval(text.replace("\n", "\\n")) if s + ""]
    except (ValueError, SyntaxError, TypeError) as e:
        raise BadInput(f"stop_strings = {shorten(text)}: wanted one text, or a list, such as "
                       "--stop_strings=\"['Q:', '\\n\\n']\"") from e


def stops(tokenizer):
    """A function of a response's ids so far: whether their last tokens' text has a stop string."""
    def has_stop(ids):
        # each token has at least one byte; one more: decoding may drop a text's first blank
        longest = max(len(s.encode()) for s in tokenizer.stop_strings) + 1
        unseen = tokenizer.unseen()
        last = [*islice((i for i in reversed(ids) if i not in unseen), longest)][::-1]
        text = tokenizer.text_of(last)
        return any(s in text for s in tokenizer.stop_strings)

    return has_stop
