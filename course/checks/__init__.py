"""What all lessons say of large numbers."""
INFINITE = "for large numbers, such as logits of 800, it is not finite: exp(800) is inf, and the " \
           "logarithm of a probability that has become 0 is -inf. Use log_softmax or logsigmoid"
SMALL = "there is a small number such as 1e-8 inside your logarithm: what is very unlikely looks " \
        "less so, and has no slope. log_softmax and logsigmoid need none"
