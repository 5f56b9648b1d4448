"""
GSPO (arXiv 2507.18071, equations 5 to 7): one ratio for each response, the geometric mean of its
tokens' ratios. It moves far less than a token's ratio, so its clip range is far smaller (section
5.1: 3e-4 and 4e-4). No KL. Behind the config of a task:

    python grpo.py config/arithmetic_grpo.py config/gspo.py --num_minibatches=4
"""
scale_by = "std"
importance = "sequence"
aggregation = "seq-mean-token-mean"
kl_coef = 0.0
cliprange = 0.0003
cliprange_high = 0.0004
