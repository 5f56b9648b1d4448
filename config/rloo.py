"""
RLOO, REINFORCE with a leave-one-out baseline (arXiv 2402.14740, equation 7): the advantage of a
response is its score less the mean score of the *other* responses to its prompt.

In the paper the action is the whole response: a response's loss is a sum over its tokens, divided
by a constant only. The KL is part of the response's reward (section 2.1): the score less kl_coef
times the sampled KL of all its tokens. Behind the config of a task:

    python grpo.py config/arithmetic_grpo.py config/rloo.py
"""
baseline = "others"
scale_by = "none"
aggregation = "seq-mean-token-sum-norm"
kl_coef = 0.04
kl_in = "reward"
kl_estimator = "k1"
