"""
Your reward model, from your pairs of a better and a worse answer. Copy this file, and change it.

    python rm.py config/mine_rm.py                         # after config/mine_sft.py

A row is {"prompt": ..., "chosen": ..., "rejected": ...}, messages or strings; docs/data.md. Sizes
are for a model of about 1B and one GPU of 80 GB, where we have not run it; --help has all keys.
The example of README sets its own in data/example/rm.py.
"""
out_dir = "out/mine_rm"  # leaves reward_model/
init_from = "out/mine_sft/policy"  # the model that begins with a new head; or a name on the hub
train_path = "pairs.jsonl"
val_path = "pairs_val.jsonl"  # eval/accuracy: how often the better answer scores higher
batch_size = 64  # pairs a step, on all GPUs together
learning_rate = 1e-5
max_iters = 150  # steps; one or two epochs, as more make it too sure of itself
dtype = "bfloat16"  # on a GPU; float32 on a CPU
