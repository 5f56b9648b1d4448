"""
GRPO on Llama 3.1 70B over four machines of 8 GPUs: policy and reference are sharded over all 32,
and to sample, the 8 GPUs of a machine hold one copy of the policy together (generate_tp), in 16
bits. No GPU ever holds all of it.

    python data/gsm8k/prepare.py --chat
    torchrun --nnodes=4 --nproc_per_node=8 --rdzv_id=1 --rdzv_backend=c10d \\
        --rdzv_endpoint=HOST:29500 grpo.py config/llama_70b_grpo.py

Meant for 32 GPUs of 80 GB, with a fast network between the machines. The memory that each GPU
needs, predicted for prompts of up to 512 tokens by
python tools/memory.py config/llama_70b_grpo.py --world-size=32 --gpu-gb=80:

    GiB             policy  ref_policy       all
    parameters        8.21        4.11     12.32
    gradients         8.21        0.00      8.21
    optimizer        16.43        0.00     16.43
    activations       8.49        0.65
    logits            9.06        0.98
    KV cache          7.50        0.00
    buffers          16.43        0.06
    rollout 61.85 | update 57.80 | score 50.69 | save 41.00 | audit 37.05

A checkpoint, weights (282 GB in fp32) and Adam's states (564 GB), takes 847 GB on the disk, twice
that while the next one is written. All ranks write it, a file of up to 5 GB each at a time, so a
machine needs 40 GB of memory for its 8. docs/scale.md says how long that takes. The model is on the
Hugging Face hub, where it asks for your consent. We have not run it: no result is promised.
"""
out_dir = "out/llama_70b_grpo"
policy_path = "meta-llama/Llama-3.1-70B-Instruct"
prompts_path = "data/gsm8k/rl_train.jsonl"
eval_path = "data/gsm8k/rl_val.jsonl"
eval_size = 256
reward_functions = "1.0*accuracy,0.1*format"
zero_stage = "3"  # of policy and reference
generate_tp = 8  # as many as a machine has GPUs: they exchange numbers at each layer and token
batch_size = 512
group_size = 8
max_new_tokens = 1024
rollout_batch_size = 128  # of the 8 GPUs that sample together
micro_batch_size = 2
head_chunk = 1024
gradient_checkpointing = True
aggregation = "token-mean"
kl_coef = 0.001
max_iters = 200
learning_rate = 5e-7
warmup_iters = 5
eval_interval = 20
checkpoint_interval = 50
timeout = 1800
dtype = "bfloat16"
