"""
The reward model of the built-in task, from 2,000 pairs of the SFT model's own answers, a right and a wrong one each.
"""
out_dir = "out/arithmetic_rm"
init_from = "out/arithmetic_sft/policy"
train_path = "data/arithmetic/pairs_train.jsonl"
val_path = "data/arithmetic/pairs_val.jsonl"
demonstrations_path = "data/arithmetic/sft_val.jsonl"
max_iters = 100
batch_size = 64
learning_rate = 3e-4
