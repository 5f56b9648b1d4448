"""The reward `length`, by a response's tokens."""


def length(batch):
    """
    (B,): DAPO's soft overlong punishment (arXiv 2503.14476, equation 13; the last fifth as in its
    section 4.1). With R = 100: up to 80 tokens give 0, 90 tokens -0.5, 100 tokens -1.
    """
    R, lengths = batch["max_new_tokens"], batch["response_mask"].sum(1).float()  # (B,)
    return ((R - lengths) / (R / 5) - 1).clamp(-1, 0)
