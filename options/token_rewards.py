"""
Rules that give a number to each token, (b, T), as a process reward does: what rewards.py needs of
them, and where the token of a character stands: a rule reads text. docs/data.md has an example.
"""
import bisect
import math
import os.path

import torch

from errors import Stop, shorten


def as_token_rewards(name, returned, batch):
    """
    What a rule has returned for tokens, checked: (b, T) float64, a finite number for each token
    that the policy sampled, and 0 for all others. A row of NaN (beside zeros): the rule does not
    apply to this response; then the whole row becomes NaN. Raises Stop.
    """
    mask, shape = batch.get("response_mask", torch.zeros(0)).cpu(), tuple(returned.shape)  # (b, T)
    if shape != mask.shape:
        raise Stop(f"reward {name!r} returned numbers of the shape {shape}: wanted a number for "
                   f"each response, ({len(batch['completions'])},), or for each token, as "
                   f"batch['tokens'], {tuple(mask.shape)}")
    numbers = torch.as_tensor(returned).detach().to("cpu", torch.float64)
    nothing = (numbers.isnan() | ~mask).all(1) & numbers.isnan().any(1)  # (b,)
    numbers[nothing] = torch.where(numbers[nothing].isnan(), 0, numbers[nothing])
    for bad, what in ((mask & ~(numbers.abs() < 3e38), "no finite number"),  # float32's largest
                      (~mask & (numbers != 0), "a token that the policy has not sampled")):
        if bad.any():
            i, t = bad.nonzero()[0].tolist()
            raise Stop(f"reward {name!r} gave {shorten(numbers[i, t].item())} in column {t} of the "
                       f"row with the prompt {shorten(batch['rows'][i].get('prompt'))}: {what}. A "
                       "number stands where batch['response_mask'] is True; all others are 0")
    numbers[nothing] = math.nan
    return numbers


def token_at(batch, i, n):
    """
    The column of the token that ends character n of batch["completions"][i]; of several turns this
    is the last one. n = the length of the text: the last token that the policy sampled, the EOS
    where the response has ended. batch: a rule's. Raises IndexError.
    """
    text, tokenizer = batch["completions"][i], batch["tokenizer"]
    if not 0 <= n <= len(text):
        raise IndexError(f"token_at: the completion has {len(text)} characters, and none with the "
                         f"number {n}" + "; find gives -1 for what is not there" * (n == -1))
    columns = batch["response_mask"][i].nonzero().flatten().tolist()
    begins = [0] + [k for k in range(1, len(columns)) if columns[k] > columns[k - 1] + 1]
    turns = tokenizer.messages_of is not None  # else the completion is all that was sampled
    columns = columns[begins[-1] if turns else 0:]
    prompt = batch["rows"][i].get("prompt")
    if turns and len(begins) > 1 and tokenizer.chats:  # only the first turn continues the prompt
        prompt = None
    ids = batch["tokens"][i][columns].tolist()

    def written(k):  # how many characters of the text the first k + 1 tokens give
        return len(os.path.commonprefix([text, tokenizer.decode_response(ids[:k + 1], prompt)]))

    return columns[min(bisect.bisect_right(range(len(ids)), n, key=written), len(ids) - 1)]
