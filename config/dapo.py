"""
DAPO (arXiv 2503.14476): clip-higher (equation 10), dynamic sampling (equation 11), every token alike (equation 12) and the soft
punishment of overlong responses (equation 13: the reward `length`); no KL. Groups of equal scores are replaced up to 3 times.
On top of a task: python grpo.py config/arithmetic_grpo.py config/dapo.py --rewards=accuracy,format,length
"""
baseline = "mean"
scale = "std"
loss = "clip"
importance = "token"
aggregation = "token-mean"
truncated = "keep"
max_refills = 3
kl_coef = 0.0
cliprange = 0.2
cliprange_high = 0.28
