r"""
DAPO (arXiv 2503.14476, equations 10 to 13), see docs/algorithms.md. Behind the config of a task:

    python grpo.py config/arithmetic_grpo.py config/dapo.py \
        "--reward_functions=2*accuracy,length" --refill_by=accuracy

2*accuracy: the paper's reward is +1 for a right answer and -1 for a wrong one, a difference of 2.
refill_by: the paper replaces groups with only right or only wrong answers, until the batch is full.
Here that is tried 3 times; groups that are still flat then are not trained on.
token-mean: over all tokens of a step; equation 12 is that of one prompt's responses, in an
expectation over prompts (recipes/every_prompt.diff).
"""
scale_by = "std"
aggregation = "token-mean"
max_refills = 3
kl_coef = 0.0
cliprange_high = 0.28
