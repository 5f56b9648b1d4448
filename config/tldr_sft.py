"""
SFT of Pythia 1B on TL;DR with the settings of the N+ details paper (arXiv 2403.17031, details 3,
4, 9): one epoch, AdamW with eps 1e-5, a learning rate of 3e-6 on a cosine, batches of 128.

    python data/tldr/prepare.py
    torchrun --nproc_per_node=8 sft.py config/tldr_sft.py

Meant for 8 GPUs of 40 GB or more. We have not run it: no result is promised.
"""
out_dir = "out/tldr_sft"
init_from = "EleutherAI/pythia-1b-deduped"
train_path = "data/tldr/sft_train.jsonl"
val_path = "data/tldr/sft_val.jsonl"
max_iters = 911  # one epoch of 116,722 posts
batch_size = 128
micro_batch_size = 8
learning_rate = 3e-6
warmup_iters = 0
lr_decay = "cosine"
beta2 = 0.999
adam_eps = 1e-5
grad_clip = 0.0
dtype = "bfloat16"
