"""
Your model learns from your demonstrations: the keys that matter. Copy this file, and change them.

    python sft.py config/mine_sft.py

A row is {"prompt": [messages], "completion": [messages]}, or both are strings; docs/data.md. Sizes
are for a model of about 1B and one GPU of 80 GB, where we have not run it; --help has all keys.
The example of README sets its own in data/example/sft.py.
"""
out_dir = "out/mine_sft"  # leaves policy/: a folder for transformers, and for the next script
init_from = "Qwen/Qwen2.5-0.5B-Instruct"  # a folder or a name on the hub; its template is used
train_path = "demonstrations.jsonl"
val_path = "demonstrations_val.jsonl"  # not learned; eval/loss rises when it learns by heart
batch_size = 64  # demonstrations a step, on all GPUs together
learning_rate = 1e-5
max_iters = 500  # steps; or --epochs=2
dtype = "bfloat16"  # on a GPU; float32 on a CPU
