"""
GRPO on the one-line programs of data/code, with the sandbox as the reward: a program that passes
the tests of its problem scores 1.

    python grpo.py config/code_grpo.py             # after config/code_sft.py
"""
out_dir = "out/code_grpo"
policy_path = "out/code_sft/policy"
prompts_path = "data/code/rl_train.jsonl"
eval_path = "data/code/rl_val.jsonl"
eval_size = 200
reward_functions = "code"
batch_size = 128
group_size = 8
max_new_tokens = 48
micro_batch_size = 64
num_minibatches = 2
max_iters = 40
eval_interval = 10
learning_rate = 3e-4
kl_coef = 0.0
lr_decay = "linear"
