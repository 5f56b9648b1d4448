"""Behind config/mine_sft.py: its keys for the example, which a CPU runs in seconds."""
init_from = "data/example/model"
train_path = "data/example/demonstrations.jsonl"
val_path = ""
learning_rate = 3e-3
max_iters = 60
dtype = "float32"
