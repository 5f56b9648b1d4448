"""Behind config/mine_rm.py: its keys for the example, which a CPU runs in seconds."""
train_path = "data/example/pairs.jsonl"
val_path = ""
learning_rate = 1e-3
max_iters = 30
dtype = "float32"
