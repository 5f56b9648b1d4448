"""
CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5), see docs/algorithms.md. The paper clips the
weight from above only: here the lower bound is 1 - cliprange = 0. token-mean is over all tokens of
a step; equation 4 is that of one prompt's responses, in an expectation over prompts
(recipes/every_prompt.diff). Behind the config of a task:

    python grpo.py config/arithmetic_grpo.py config/cispo.py --num_minibatches=4
"""
scale_by = "std"
loss_type = "cispo"
aggregation = "token-mean"
kl_coef = 0.0
cliprange = 1.0
cliprange_high = 2.0
