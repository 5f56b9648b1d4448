"""
SFT on the built-in addition task: a GPT-2 of 0.27M parameters from scratch, on a laptop. It has one layer, so it can add on
paper but not in its head: expect it to think in 3 of 10 answers, to be right nearly always when it does (98 %) and hardly
ever when it does not (about 10 %). Two CPU cores: under a minute.
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
