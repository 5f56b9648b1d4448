"""
The reward model of the built-in addition task, from 2,000 pairs of the SFT model's own answers: a
right one and a wrong one in each pair.

    python data/arithmetic/pairs.py                # after config/arithmetic_sft.py
    python rm.py config/arithmetic_rm.py
"""
out_dir = "out/arithmetic_rm"
init_from = "out/arithmetic_sft/policy"
train_path = "data/arithmetic/pairs_train.jsonl"
val_path = "data/arithmetic/pairs_val.jsonl"
demonstrations_path = "data/arithmetic/sft_val.jsonl"
max_iters = 100
batch_size = 64
learning_rate = 3e-4
