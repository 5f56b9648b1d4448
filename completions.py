"""
Rows with completions, checked, from which sft.py, rm.py and PPO-ptx learn.

    supervised fine-tuning   {"prompt": ..., "completion": ...}                  sft_row
    preference pairs         {"prompt": ..., "chosen": ..., "rejected": ...}     preference_row

A prompt and its completions are either all strings or all lists of messages. A completion's list
continues the prompt's list. It begins and ends with the assistant, and may have several turns. If
the prompt ends with the assistant, too, the completion continues that same message. Fields that are
not named here are ignored.
"""
import math

from errors import BadInput, shorten
from rows import prompt_of, text_or_messages

PAIR = "chosen", "rejected"  # the fields of a pair


def sft_row(row):
    """{"prompt", "completion"} of a demonstration's row. Raises BadInput."""
    if isinstance(row.get("label"), bool):
        raise BadInput("field 'label': completions with a thumb up or down (KTO) cannot be used "
                       "here; wanted pairs of chosen and rejected, or demonstrations alone")
    return dialogue(row, "completion")


def preference_row(row):
    """
    {"prompt", "chosen", "rejected"} of a pair's row. Raises BadInput. Two more numbers are kept:
    `margin`, from 0 on, by which the chosen one is better; and `confidence`, the probability that
    it is the better one.
    """
    made = dialogue(row, *PAIR)
    for name, largest in (("margin", 1e30), ("confidence", 1.0)):
        if row.get(name) in (None, ""):
            continue
        try:
            made[name] = float(row[name])  # CSV has text
        except (ValueError, TypeError, OverflowError):
            made[name] = math.nan
        if not 0 <= made[name] <= largest:
            raise BadInput(f"field {name!r} must be a number from 0 to {largest:g}, found "
                           f"{shorten(row[name])}")
    return made


def dialogue(row, *completions):
    """{"prompt", and each of the fields `completions`}: all strings, or all lists of messages."""
    made = {"prompt": prompt_of(row)}
    for field in completions:
        made[field] = text_or_messages(row, field)
        if type(made[field]) is not type(made["prompt"]):
            raise BadInput(f"one of the fields 'prompt' and {field!r} is a string and one a list "
                           "of messages; wanted both alike")
        if isinstance(made[field], str):
            continue
        roles = [message["role"] for message in made[field]]
        if roles[0] != "assistant" or roles[-1] != "assistant" or "system" in roles:
            raise BadInput(f"field {field!r} has the roles {', '.join(roles)}; a completion begins "
                           "and ends with the assistant, and has no system message")
    return made
