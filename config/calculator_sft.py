"""
The SFT model of the task calculator: products of numbers of three digits. In 3 of 10 answers it
calls a calculator. About a minute on two CPU cores.

    python data/calculator/prepare.py
    python sft.py config/calculator_sft.py
"""
out_dir = "out/calculator_sft"
init_from = "scratch"
tokenizer_path = "data/calculator/tokenizer"
train_path = "data/calculator/sft_train.jsonl"
val_path = "data/calculator/sft_val.jsonl"
max_iters = 700
batch_size = 128
micro_batch_size = 32
learning_rate = 3e-3
