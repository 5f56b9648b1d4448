"""Letters that take two columns of a terminal, as those of Chinese."""
import unicodedata


def columns_of(text):
    """How many columns of a terminal a text takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut_wide(text, width):
    """run.cut of one line of text, in columns and not in letters."""
    if columns_of(text) <= width:
        return text
    half, parts = (width - 5) // 2, []
    for letters in (text, text[::-1]):
        while columns_of(letters) > half:
            letters = letters[:half] if len(letters) > half else letters[:-1]
        parts.append(letters)
    return f"{parts[0].rstrip()} ... {parts[1][::-1].lstrip()}"
