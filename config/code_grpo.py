"""
GRPO on the one-line programs of data/code, with the sandbox for a reward: a program that passes its problem's tests is worth 1.
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
