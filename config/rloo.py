"""
RLOO, REINFORCE with a leave-one-out baseline (arXiv 2402.14740, equation 7; the KL as a part of the
reward: section 2.1), see docs/algorithms.md. Behind the config of a task:

    python grpo.py config/arithmetic_grpo.py config/rloo.py
"""
baseline = "others"
scale_by = "none"
aggregation = "seq-mean-token-sum-norm"
kl_coef = 0.04
kl_in = "reward"
kl_estimator = "k1"
