"""
SFT on the built-in addition task: a GPT-2 of 0.47M parameters from scratch, on a laptop. It learns to do as the demonstrator
does: think in 3 of 10 answers and be right then (at least 96 %), else be right in 1 of 10. Two CPU cores: about a minute.
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
