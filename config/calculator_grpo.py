"""
GRPO with several turns: the policy calls a calculator, reads the product, and answers. The reward
is 1 if the last answer is right. About a minute on two CPU cores.

    python grpo.py config/calculator_grpo.py       # after config/calculator_sft.py
"""
out_dir = "out/calculator_grpo"
policy_path = "out/calculator_sft/policy"
prompts_path = "data/calculator/rl_train.jsonl"
eval_path = "data/calculator/rl_val.jsonl"
environment = "data/calculator/calculator.py:calculator"
max_turns = 4
reward_functions = "accuracy"
batch_size = 256
group_size = 8
max_new_tokens = 40
micro_batch_size = 64
max_iters = 20
eval_interval = 5
learning_rate = 3e-4
lr_decay = "linear"
