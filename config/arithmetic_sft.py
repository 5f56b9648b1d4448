"""
SFT on the built-in addition task: a GPT-2 of 0.47M parameters from scratch, on a laptop. About a
minute on two CPU cores.

It learns to do as the demonstrations do: 3 of 10 think first and are then right, the others
answer at once and are right in 1 of 10. Of the model's answers that think, at least 96 % are
right.

    python data/arithmetic/prepare.py
    python sft.py config/arithmetic_sft.py
"""
out_dir = "out/arithmetic_sft"
init_from = "scratch"
tokenizer_path = "data/arithmetic/tokenizer"
train_path = "data/arithmetic/sft_train.jsonl"
val_path = "data/arithmetic/sft_val.jsonl"
max_iters = 700
batch_size = 128
micro_batch_size = 32
learning_rate = 3e-3
