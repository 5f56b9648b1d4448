"""
CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): the importance weight is clipped instead of the update, so no token is
ever left out; every token alike; no KL. The paper clips from above alone: a lower bound of 0 is cliprange = 1.
On top of a task: python grpo.py config/arithmetic_grpo.py config/cispo.py --num_minibatches=4
"""
baseline = "mean"
scale_by = "std"
loss_type = "cispo"
aggregation = "token-mean"
truncated = "keep"
kl_coef = 0.0
cliprange = 1.0
cliprange_high = 2.0
