"""
The key stop_strings: texts that end a response, beside the EOS. They are found in tokenizer.py:
Tokenizer.has_stop and decode_response.
"""
import ast

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
