"""
Prompts with completions, for sft.py, rm.py and whatever else learns texts that are there already:

    {"prompt": "1+2=", "completion": "3"}                     sft.py
    {"prompt": "1+2=", "chosen": "3", "rejected": "4"}        rm.py

A row's texts are all strings, or all lists of messages; a completion's list continues the prompt's.
"""
from errors import BadInput
from options.blanks import encode_behind
from prompts import encode_rows, text_or_messages


def dialogue(row, *completions):
    """{"prompt", and each of the fields `completions`}: all strings, or all lists of messages."""
    made = {field: text_or_messages(row, field) for field in ("prompt", *completions)}
    for field in completions:
        if type(made[field]) is not type(made["prompt"]):
            raise BadInput(f"'prompt' and {field!r} must both be strings, or both messages")
        if isinstance(made[field], list):
            from options.chats import check_learned

            check_learned(made[field], field)
    return made


def encode_demonstrations(rows, path, tokenizer, limit, too_long):
    """
    Give Rows the (ids, trained) of each prompt and completion, see encode_learned. With
    too_long = "cut" a row is cut at its end, and left out if no token that is learned remains.
    """
    def cut(example):
        ids, trained = (x[:limit] for x in example)
        return (ids, trained) if any(trained[1:]) else None  # nothing predicts a first token

    if tokenizer.chats:
        tokenizer.chats.check_kinds(rows, path)
    tokenizer.say_marks(rows, ["prompt", "completion"], path)
    return encode_rows(rows, path, lambda rows: [
        encode_learned(tokenizer, row["prompt"], row["completion"]) for row in rows], limit,
        too_long, cut, lambda example: len(example[0]))


def encode_learned(tokenizer, prompt, completion):
    """
    (ids, trained) of a demonstration: trained is True on the tokens that SFT learns: the completion
    and EOS, or the assistant's turns of the completion with their ends. Raises BadInput.
    """
    if not isinstance(prompt, str):
        return tokenizer.need_chats().encode_learned(prompt, completion, tokenizer)
    ids = tokenizer.bos_ids + tokenizer.encode_texts([prompt])[0]
    more = encode_behind(tokenizer, [completion])[0] + [tokenizer.eos_id]
    return ids + more, [False] * len(ids) + [True] * len(more)
