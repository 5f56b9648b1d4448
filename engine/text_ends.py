"""
Stop strings: a response also ends with the token that completes one of them in its text.

Text is searched byte by byte, since a character may be cut between two tokens, and a stop string
between many. An automaton reads the bytes, and knows at each of them how much of a stop string has
just been read (Aho and Corasick, Communications of the ACM 18, 1975). What the bytes of a whole
token do to it is worked out once, for every token. With the stop string "ab" and its states 0
(nothing), 1 ("a") and 2 ("ab", where it stays), four tokens lead to

    state  "a"  "b"  "ca"  "cabs"
      0     1    0    1      2
      1     1    2    1      2
      2     2    2    2      2

So all that a response has to remember is a number, and a token is one look-up in a table: no text
is decoded while it is sampled, and it does not matter which tokens are looked at together.
"""
import ast

import torch

from errors import BadConfig, BadInput, shorten


def parse_stop_strings(text):
    """
    The key stop_strings -> a list of texts: one that is written as it is, or several as a list of
    Python's, "['Q:', '\\n\\n']"; "" are none. Raises BadConfig.
    """
    if not text.startswith("["):
        return [text] if text else []
    try:  # in a config file, the line breaks of "['\n']" are there already
        strings = ast.literal_eval(text.replace("\n", "\\n").replace("\r", "\\r"))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        strings = None
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise BadConfig(f"stop_strings = {shorten(text)}: wanted one text, or a list of texts in "
                        "quotes, such as --stop_strings=\"['Q:', '\\n\\n']\"")
    if "" in strings:
        raise BadConfig(f"stop_strings = {shorten(text)}: '' is in every text, so no response "
                        "could begin; leave it out")
    return strings


class TextEnds:
    """
    The stop strings of a run, for its tokenizer. They are searched in the bytes of the response
    alone: what the prompt ends with does not count. These bytes are those of its text, but where
    they are broken characters, which decoding shows as U+FFFD.

    strings: at least one, none empty. table: (1 + S, V) int16, the state behind each token. State 0
    is that of a response without tokens, whose first one may lose the blank in front of it; 1 that
    where nothing of a stop string has been read; in the last one, `ended`, all of one has.
    """

    def __init__(self, strings, first, later):
        """first, later: the bytes of each token, see Tokenizer.pieces."""
        self.strings = strings
        steps = automaton(tuple(s.encode() for s in strings))  # (S, 256)
        self.ended = len(steps)
        begin = read_pieces(steps, first)[:1] + 1  # (1, V)
        # a token that no text shows leaves the response as if it had none so far
        begin[0, [i for i, piece in enumerate(first) if piece is None]] = 0
        self.table = torch.cat([begin, read_pieces(steps, later) + 1]).short()  # (1 + S, V)

    def follow(self, state, tokens):
        """
        Read k new tokens of n responses, tokens (n, k), which were in these states, (n,): whether
        the text has a stop string, (n, k) bool, up to each token; and the states behind them, (n,).
        """
        self.table = self.table.to(tokens.device)
        found = []
        for token in tokens.unbind(1):
            state = self.table[state, token].long()
            found.append(state == self.ended)
        return torch.stack(found, 1), state

    def cut(self, text):
        """
        The text of a response without what stands behind its stop string, if it has one: the token
        that completes the string may go on, as the token "];" does behind "]".
        """
        ends = [text.index(s) + len(s) for s in self.strings if s in text]
        return text[:min(ends, default=len(text))]

    def least_tokens(self, ends):
        """
        How many tokens a response needs at least until it has a stop string; None: it cannot. ends:
        the ids of tokens that end it before.
        """
        others = torch.ones(self.table.shape[1], dtype=torch.bool)
        others[list(ends)] = False
        reached = torch.zeros(1, dtype=torch.int64)  # the states that n tokens can lead to
        for n in range(len(self.table)):
            if self.ended in reached:
                return n
            reached = self.table[:, others][reached].unique().long()
        return None


def automaton(strings):
    """
    The automaton of some byte strings: steps (S, 256), the state behind each byte. A state is the
    longest end of the bytes so far with which a string begins; 0 is none; the last one, in which it
    stays, is that of bytes that have a whole string in them.
    """
    begun = sorted({s[:n] for s in strings for n in range(len(s))})  # b"" is the first
    number = {begin: i for i, begin in enumerate(begun)}
    steps = torch.zeros(len(begun) + 1, 256, dtype=torch.int64)  # a byte of no string leads to 0
    steps[-1] = len(begun)
    for begin, i in number.items():
        for byte in set(b"".join(strings)):
            read = begin + bytes([byte])
            longest = next(number[read[n:]] for n in range(len(read) + 1) if read[n:] in number)
            steps[i, byte] = len(begun) if read.endswith(strings) else longest
    return steps


def read_pieces(steps, pieces):
    """Where V pieces, bytes of any length or None, lead from each state of an automaton: (S, V)."""
    pieces = [piece or b"" for piece in pieces]
    lengths = torch.tensor([len(piece) for piece in pieces])
    longest = int(lengths.max())
    padded = bytearray(b"".join(piece.ljust(longest) for piece in pieces))
    read = torch.frombuffer(padded, dtype=torch.uint8).view(len(pieces), longest).long()
    states = torch.arange(len(steps))[:, None].repeat(1, len(pieces))
    for n in range(longest):
        left = (lengths > n).nonzero()[:, 0]  # the pieces that have a byte there
        states[:, left] = steps[states[:, left], read[left, n]]
    return states


def text_ends_of(text, tokenizer, max_new_tokens):
    """
    The TextEnds of the key stop_strings; None where it is "". Raises BadInput unless each of the
    strings can end a response: some tokens of the tokenizer have it in their text, at most
    max_new_tokens of them, of which none ends the response before; and it spells no token that
    decoding leaves out, such as the EOS.
    """
    strings = parse_stop_strings(text)
    if not strings:
        return None
    first, later = tokenizer.pieces()
    for s in strings:
        try:
            s.encode()
        except UnicodeEncodeError as e:
            raise BadInput(f"stop_strings: {shorten(s)} holds half a surrogate pair, which is not "
                           "text") from e
        for token in tokenizer.unseen_texts():
            if token in s:
                raise BadInput(f"stop_strings: {shorten(s)} spells the special token {token!r}, "
                               "which ends a response or is padding, and is never in its text")
        least = TextEnds([s], first, later).least_tokens(tokenizer.eos_ids)
        if least is None:
            raise BadInput(f"stop_strings: {shorten(s)} can never occur: the tokenizer cannot "
                           "spell it, or only with a token that ends the response; leave it out")
        if least > max_new_tokens:
            raise BadInput(f"stop_strings: {shorten(s)} has {least} tokens or more, so it can "
                           f"never occur within max_new_tokens = {max_new_tokens}; raise that")
    return TextEnds(strings, first, later)
