"""
SFT on the one-line programs of data/code: a GPT-2 of 0.5M parameters from scratch, on a laptop. A
few minutes on two CPU cores.

It learns to do as the demonstrations do: 1 program in 4 is right, and each of the others has a
mistake.

    python data/code/prepare.py
    python sft.py config/code_sft.py
"""
out_dir = "out/code_sft"
init_from = "scratch"
tokenizer_path = "data/code/tokenizer"
train_path = "data/code/sft_train.jsonl"
val_path = "data/code/sft_val.jsonl"
context = 128
max_iters = 400
batch_size = 64
micro_batch_size = 64
learning_rate = 3e-3
