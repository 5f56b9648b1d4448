r"""
DAPO (arXiv 2503.14476): clip-higher (equation 10), dynamic sampling (equation 11), every token
weighs the same (equation 12), and the soft punishment of overlong responses (equation 13: the
reward `length`); no KL. On top of a task:

    python grpo.py config/arithmetic_grpo.py config/dapo.py \
        "--reward_functions=2*accuracy,length" --refill_by=accuracy

2*accuracy: the paper's reward is +1 for a right answer and -1 for a wrong one, which is a
difference of 2. A right answer of full length loses 1 for its length, and is still better than
any wrong one.

refill_by: the paper replaces groups in which all answers are right or all are wrong, whatever
their lengths, until the batch is full. Here it is tried 3 times (max_refills), and the groups
that are still flat then are not trained on.
"""
baseline = "mean"
scale_by = "std"
loss_type = "clip"
importance = "token"
aggregation = "token-mean"
truncated = "keep"
max_refills = 3
kl_coef = 0.0
cliprange = 0.2
cliprange_high = 0.28
