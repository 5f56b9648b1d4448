"""
GRPO on the built-in addition task, with rules as the reward: a right answer scores 1, and
thinking in the right form 0.1. There is no reward model and no value model. About a minute on two
CPU cores; the README has the accuracies.

    python grpo.py config/arithmetic_grpo.py       # after config/arithmetic_sft.py
"""
out_dir = "out/arithmetic_grpo"
policy_path = "out/arithmetic_sft/policy"
prompts_path = "data/arithmetic/rl_train.jsonl"
eval_path = "data/arithmetic/rl_val.jsonl"
reward_functions = "1.0*accuracy,0.1*format"
batch_size = 256
group_size = 8
max_new_tokens = 48
micro_batch_size = 64
max_iters = 40
eval_interval = 10
learning_rate = 3e-4
lr_decay = "linear"
