"""
DPO on the built-in addition task, from the 2,000 pairs that the reward model learns from.

    python data/arithmetic/pairs.py                          # after config/arithmetic_sft.py
    python recipes/dpo.py config/arithmetic_dpo.py
"""
out_dir = "out/arithmetic_dpo"
policy_path = "out/arithmetic_sft/policy"
train_path = "data/arithmetic/pairs_train.jsonl"
val_path = "data/arithmetic/pairs_val.jsonl"
max_iters = 100
batch_size = 64
learning_rate = 1e-4
