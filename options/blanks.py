"""Tokenizers that put a blank in front of a text, as SentencePiece's do: not so behind a mark."""
import functools

MARKS = "\x01|~^`;#"  # characters that hardly any tokenizer joins with the next ones


@functools.cache  # once for each tokenizer
def mark_of(tokenizer):
    """
    (mark, its ids): one of MARKS that survives encoding and decoding, and if possible joins with no
    character behind. None where no blank is added, or no mark survives (a few letters' vocabulary).
    """
    if not tokenizer.adds_blank:
        return None
    found = [(mark, ids) for mark in MARKS for ids in tokenizer.encode_texts([mark])
             if tokenizer.text_of(ids).strip() == mark]
    alone = [(mark, ids) for mark, ids in found
             if not any(mark in token[:-1] for token in tokenizer.vocabulary)]
    return next(iter(alone + found), None)


def encode_behind(tokenizer, texts):
    """The ids of each of these strings as they are behind another text: no blank is added."""
    if not mark_of(tokenizer):
        return tokenizer.encode_texts(texts)
    mark, mark_ids = mark_of(tokenizer)
    return [ids[len(mark_ids):] for ids in tokenizer.encode_texts([mark + x for x in texts])]


def text_after(tokenizer, ids):
    """The text of ids that continue a text: their first blank stays."""
    if not mark_of(tokenizer):
        return tokenizer.text_of(ids)
    mark, mark_ids = mark_of(tokenizer)
    return tokenizer.text_of(mark_ids + ids).partition(mark)[2]
