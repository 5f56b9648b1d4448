"""Behind config/mine_ppo.py: its keys for the example, which a CPU runs in seconds."""
prompts_path = "data/example/prompts.jsonl"
eval_path = "data/example/prompts_val.jsonl"
max_new_tokens = 8
batch_size = 160
learning_rate = 3e-4
value_learning_rate = 1e-3
max_iters = 10
dtype = "float32"
