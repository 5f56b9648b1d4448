"""
GRPO on Llama 3.1 70B over four machines of 8 GPUs: policy and reference are sharded over all 32,
and the 8 GPUs of a machine sample with one copy of the policy (generate_tp), in 16 bits. Behind
gsm8k_grpo.py:

    python data/gsm8k/prepare.py --chat
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_id=1 --rdzv_backend=c10d \\
        --rdzv_endpoint=HOST:29500 grpo.py config/gsm8k_grpo.py config/llama_70b_grpo.py

Meant for 32 GPUs of 80 GB, with a fast network between the machines. Each has, by arithmetic,
about 37 GiB of weights, gradients and Adam states, and 17 GiB of the copy that samples.

A checkpoint, weights (282 GB in fp32) and Adam's states (564 GB), takes 847 GB on the disk, and
twice as much while the next one is written. Then the first machine has all weights in its CPU's
memory. The model is on the Hugging Face hub, where it asks for your consent. We have not run it: no
result is promised.
"""
out_dir = "out/llama_70b_grpo"
policy_path = "meta-llama/Llama-3.1-70B-Instruct"
zero_stage = "3"  # of policy and reference
generate_tp = 8  # as many as a machine has GPUs: they exchange numbers at each layer and token
batch_size = 512
rollout_batch_size = 128
micro_batch_size = 2
learning_rate = 5e-7
checkpoint_interval = 50
timeout = 1800
