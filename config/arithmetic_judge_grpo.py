"""
GRPO on the built-in addition task with a judge as the reward: a language model that was trained to
grade sums. The true answers are used for nothing but the curve of the accuracy.

Where all answers of a group are right, what is left of the judge's score is noise. Divided by the
group's deviation, as GRPO does it, the noise would be as loud as the difference between right and
wrong, and the policy would learn it: so there is no division here, and a larger KL penalty.

    python grpo.py config/arithmetic_judge_grpo.py     # after config/arithmetic_judge_sft.py
"""
out_dir = "out/arithmetic_judge_grpo"
policy_path = "out/arithmetic_sft/policy"
judge_path = "out/arithmetic_judge/policy"
judge_template = "data/arithmetic/judge.txt"
reward_functions = "judge"
prompts_path = "data/arithmetic/rl_train.jsonl"
eval_path = "data/arithmetic/rl_val.jsonl"
batch_size = 256
group_size = 8
max_new_tokens = 48
scale_by = "none"
kl_coef = 0.3
missing_eos_penalty = 8.0
micro_batch_size = 64
max_iters = 30
eval_interval = 10
learning_rate = 3e-4
lr_decay = "linear"
