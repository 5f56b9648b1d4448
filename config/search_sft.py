"""
SFT on search: a Llama of 0.47M parameters from scratch, on a laptop. About six minutes on two CPU
cores. It learns to do as the demonstrations do: it tries at random, and mostly gives up soon.

    python data/search/prepare.py
    python sft.py config/search_sft.py
"""
out_dir = "out/search_sft"
init_from = "scratch"
family = "llama"
d_ff = 352
tokenizer_path = "data/search/tokenizer"
train_path = "data/search/sft_train.jsonl"
val_path = "data/search/sft_val.jsonl"
context = 192
max_iters = 1500
batch_size = 64
micro_batch_size = 32
learning_rate = 3e-3
