"""
Rows with completions, for sft.py and rm.py. The prompt and the completions of a row are all
strings, or all lists of messages; then a completion's list continues the prompt's.

    {"prompt": "1+2=", "completion": "3"}               a demonstration
    {"prompt": "1+2=", "chosen": "3", "rejected": "4"}  a pair
"""
from errors import BadInput
from prompts import encode_rows, text_or_messages


def dialogue(row, *completions):
    """{"prompt", and each of the fields `completions`}: all strings, or all lists of messages."""
    texts = {field: text_or_messages(row, field) for field in ("prompt", *completions)}
    for field in completions:
        if type(texts[field]) is not type(texts["prompt"]):
            raise BadInput(f"'prompt' and {field!r} must both be strings, or both messages")
        if isinstance(texts[field], list):
            from options.chats import check_learned

            check_learned(texts[field], field)
    return texts


def encode_demonstrations(rows, tokenizer, limit, too_long):
    """
    Give Rows the (ids, target_mask) of each prompt and completion, see encode_learned. With
    too_long = "cut" a row is cut at its end; it is left out if no token to learn remains.
    """
    def cut(example):
        ids, target_mask = (x[:limit] for x in example)
        # nothing predicts a first token
        return (ids, target_mask) if any(target_mask[1:]) else None

    if tokenizer.chats:
        tokenizer.chats.check_kinds(rows, rows.path)
    tokenizer.say_marks(rows, ["prompt", "completion"], rows.path)
    return encode_rows(rows, lambda rows: [
        encode_learned(tokenizer, row["prompt"], row["completion"]) for row in rows], limit,
        too_long, cut, lambda example: len(example[0]))


def encode_learned(tokenizer, prompt, completion):
    """
    (ids, target_mask) of a demonstration. The mask is True on the tokens that SFT learns: the
    completion and EOS, or the assistant's turns of the completion with their ends. Raises BadInput.
    """
    if not isinstance(prompt, str):
        return tokenizer.need_chats().encode_learned(prompt, completion, tokenizer)
    before, after = tokenizer.encode_texts([prompt, completion])
    if tokenizer.adds_blank:  # no blank between the two
        from options.blanks import encode_behind

        (after,) = encode_behind(tokenizer, [completion])
    ids = tokenizer.bos_ids + before
    return (ids + after + [tokenizer.eos_id],
            [False] * len(ids) + [True] * (len(after) + 1))
