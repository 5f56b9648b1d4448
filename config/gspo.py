"""
GSPO (arXiv 2507.18071, equations 5 to 7; the clip range: section 5.1), see docs/algorithms.md. With
an importance_cap each token has the mean of its response's weights. Behind the config of a task:

    python grpo.py config/arithmetic_grpo.py config/gspo.py --num_minibatches=4
"""
scale_by = "std"
loss_type = "gspo"
aggregation = "seq-mean-token-mean"
kl_coef = 0.0
cliprange = 0.0003
cliprange_high = 0.0004
