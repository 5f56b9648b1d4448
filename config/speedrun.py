"""
The record of docs/speedrun.md: from the toy's SFT model to 95 % of its held-out problems.

    bash runs/speedrun.sh 1                        # or, with an SFT model that is there already:
    python grpo.py config/speedrun.py
"""
out_dir = "out/speedrun"
policy_path = "out/arithmetic_sft/policy"
prompts_path = "data/arithmetic/rl_train.jsonl"
reward_functions = "1.0*accuracy,0.5*format"
batch_size = 256
group_size = 8
max_new_tokens = 40
temperature = 0.5
micro_batch_size = 64
max_iters = 6
kl_coef = 0.0
learning_rate = 5e-4
lr_decay = "linear"
