"""What all lessons say of large numbers."""
INFINITE = "for large numbers, such as logits of 800, it is not finite: exp(800) is inf, and the " \
           "logarithm of a probability that has become 0 is -inf. Use log_softmax or logsigmoid"


def small(log):
    """{words: parts} of a small number inside the logarithm. log: its part, of a number and x."""
    return {f"there is a small number such as {e:g} inside your logarithm: what is very unlikely "
            "looks less so, and has no slope. log_softmax and logsigmoid need none":
                dict(log=lambda x, e=e: log(e, x)) for e in (1e-6, 1e-8, 1e-10, 1e-12)}
