"""Rows of more tokens than a run has room for, by the key too_long: an error, dropped, or cut."""
from array import array

from errors import BadInput, say


def cut_or_drop(rows, encoded, limit, too_long, cut, length, key):
    """
    The ids of the rows that are left, from `encoded`, those of all, of which some have more than
    `limit` tokens, or none. The others are taken out of the Rows. See prompts.encode_rows.
    """
    path, lengths = rows.path, [length(ids) for ids in encoded]
    if limit < 1:
        raise BadInput(f"{path}: no room for a row is left by the key {key}; lower it")
    for number, n in enumerate(lengths, 1):
        if n == 0 or n > limit and too_long == "error":
            hint = "shorten it, or type --too_long=drop" if min(lengths) <= limit else (
                "no row is short enough: change that key, or take a model with a longer context")
            raise BadInput(f"{path}, row {number}: it has {n} tokens, and 1 to {limit} fit (by the "
                           f"key {key}); {hint}")
    long = [i for i, n in enumerate(lengths) if n > limit]
    for i in long:
        encoded[i] = cut(encoded[i]) if too_long == "cut" else None
    kept = [i for i, ids in enumerate(encoded) if ids is not None]
    say(f"{path}: {len(long)} of {len(rows)} rows have more than {limit} tokens: {too_long}" + (
        f"; {len(rows) - len(kept)} of them have no token left to learn, and are left out"
        if too_long == "cut" and len(kept) < len(rows) else ""))
    if not kept:
        raise BadInput(f"{path}: no row is left; raise the limit of tokens")
    if rows.mix:
        rows.mix = rows.mix.keep(kept)
    rows[:] = [rows[i] for i in kept]
    return [encoded[i] for i in kept]


def front_cut(ids, limit, bos):
    """The last `limit` ids of a prompt, the first ones of which are its BOS, if it has one."""
    kept = array("i", bos) if ids[:len(bos)].tolist() == bos else array("i")
    return kept + ids[len(ids) - limit + len(kept):]
