"""
SFT on the built-in addition task: a GPT-2 of 0.27M parameters, one layer, from scratch, on a laptop. Two CPU cores: about a minute and
a half. Expect it to think in 3 of 10 answers, to be right nearly always when it does and nearly never when it does not.
"""
out_dir = "out/arithmetic_sft"
init_from = "scratch"
tokenizer_path = "data/arithmetic/tokenizer"
train_path = "data/arithmetic/sft_train.jsonl"
val_path = "data/arithmetic/sft_val.jsonl"
max_iters = 700
batch_size = 128
micro_batch_size = 32
learning_rate = 4e-3
