"""Behind config/mine.py: its keys for the example, which a CPU runs in seconds."""
policy_path = "out/mine_sft/policy"  # mine_sft.py leaves it
prompts_path = "data/example/prompts.jsonl"
eval_path = "data/example/prompts_val.jsonl"
max_new_tokens = 8
batch_size = 160
learning_rate = 1e-3
max_iters = 10
dtype = "float32"
