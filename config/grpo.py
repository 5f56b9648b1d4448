"""
GRPO as published (DeepSeekMath, arXiv 2402.03300, equation 3): advantages are divided by the
group's standard deviation, every response weighs the same, and the KL is in the loss, by k3 with
0.04. On top of a task:

    python grpo.py config/arithmetic_grpo.py config/grpo.py
"""
baseline = "mean"
scale_by = "std"
loss_type = "clip"
importance = "token"
aggregation = "seq-mean-token-mean"
truncated = "keep"
kl_coef = 0.04
kl_estimator = "k3"
kl_correction = False
cliprange = 0.2
cliprange_high = 0.2
