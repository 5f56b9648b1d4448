"""
DAPO (arXiv 2503.14476): clip-higher (equation 10), dynamic sampling (equation 11), every token alike (equation 12) and the soft
punishment of overlong responses (equation 13: the reward `length`); no KL. On top of a task:

    python grpo.py config/arithmetic_grpo.py config/dapo.py "--reward_functions=2*accuracy,length" --refill_by=accuracy

2*accuracy: the paper's reward is +1 for right and -1 for wrong, two apart, so that a right answer of full length, which loses 1,
is still better than any wrong one. refill_by: the paper replaces groups in which all are right or all are wrong, whatever their
lengths. It does so until the batch is full; here it is tried 3 times, and the groups that are left are not trained on.
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
