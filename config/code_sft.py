"""
SFT on the one-line programs of data/code: a GPT-2 of 0.5M parameters from scratch, on a laptop. It learns to do as the careless
demonstrator does: be right in 1 of 4 programs, and else make one mistake. Two CPU cores: a few minutes.
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
