"""
Dr. GRPO, "GRPO done right" (arXiv 2503.20783, section 3.2 and figure 1), see docs/algorithms.md.
Behind the config of a task:

    python grpo.py config/arithmetic_grpo.py config/dr_grpo.py
"""
scale_by = "none"
aggregation = "seq-mean-token-sum-norm"
kl_coef = 0.0
