"""
GRPO on the built-in addition task with a judge as the reward: a language model that was trained to
grade sums. The true answers are only used for the curve of the accuracy.

Where all answers of a group are right, only noise is left in the judge's scores. A division by the
group's deviation would make this noise as large as the difference between right and wrong. So there
is no division here, and a larger KL penalty. Behind arithmetic_grpo.py, after
arithmetic_judge_sft.py:

    python grpo.py config/arithmetic_grpo.py config/arithmetic_judge_grpo.py
"""
out_dir = "out/arithmetic_judge_grpo"
judge_path = "out/arithmetic_judge/policy"
judge_template = "data/arithmetic/judge.txt"
reward_functions = "judge"
scale_by = "none"
kl_coef = 0.3
missing_eos_penalty = 8.0
max_iters = 30
