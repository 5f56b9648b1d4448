"""
GRPO as published (DeepSeekMath, arXiv 2402.03300, equation 3). These are the defaults of grpo.py; a
task's config may have others. Behind such a config:

    python grpo.py config/gsm8k_grpo.py config/grpo.py
"""
scale_by = "std"
aggregation = "seq-mean-token-mean"
kl_coef = 0.04
