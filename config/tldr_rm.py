"""
The reward model of Pythia 1B on TL;DR with the settings of the N+ details paper (arXiv
2403.17031, details 10, 11, 15): one epoch of the human comparisons, AdamW with eps 1e-5, a
learning rate of 3e-6 on a cosine, batches of 64, and scores shifted so that those of the
demonstrations average 0.

    torchrun --nproc_per_node=8 rm.py config/tldr_rm.py        # after config/tldr_sft.py

Meant for 8 GPUs of 40 GB or more. We have not run it: no result is promised.
"""
out_dir = "out/tldr_rm"
init_from = "out/tldr_sft/policy"
train_path = "data/tldr/prefs_train.jsonl"
val_path = "data/tldr/prefs_val.jsonl"
demonstrations_path = "data/tldr/sft_val.jsonl"
eval_size = 4000
eval_interval = 200
max_iters = 1450  # one epoch of about 92,800 pairs
batch_size = 64
micro_batch_size = 4
learning_rate = 3e-6
warmup_iters = 0
lr_decay = "cosine"
beta2 = 0.999
adam_eps = 1e-5
grad_clip = 0.0
dtype = "bfloat16"
