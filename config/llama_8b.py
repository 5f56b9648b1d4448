"""
PPO on Llama 3.1 8B, four models of 8B: bf16 autocast over fp32 weights, and everything that can
be is split over the GPUs.

    python data/tldr/prepare.py --chat --tokenizer=meta-llama/Llama-3.1-8B-Instruct
    torchrun --nproc_per_node=8 ppo.py config/llama_8b.py

Meant for 8 GPUs of 80 GB. The memory that each of them needs, predicted for prompts of up to 512
tokens by python tools/memory.py config/llama_8b.py --world-size=8 --gpu-gb=80:

    GiB             policy  ref_policy  reward_model  value_model       all
    parameters        3.74        1.87          1.75         3.49     10.85
    gradients         3.74        0.00          0.00         3.49      7.23
    optimizer         7.48        0.00          0.00         6.99     14.47
    activations       2.36        0.39          0.39         2.36
    logits            4.96        0.98          0.00         0.00
    KV cache          5.99        0.00          0.00         0.00
    buffers          14.96        0.12          0.12         2.20
    rollout 57.69 | update 41.38 | score 39.41 | save 34.76 | audit 32.68

Both models are on the Hugging Face hub, where meta-llama's asks for your consent. We have not run
it: no result is promised.
"""
out_dir = "out/llama_8b"
policy_path = "meta-llama/Llama-3.1-8B-Instruct"
reward_path = "Skywork/Skywork-Reward-V2-Llama-3.1-8B"
value_init = "policy"  # "reward" too, where both tokenizers are the same to the last added token
prompts_path = "data/tldr/prompts_train.jsonl"
eval_path = "data/tldr/prompts_val.jsonl"
zero_stage = "policy=3,ref=3,value=3,reward=3"
batch_size = 512
rollout_batch_size = 64
micro_batch_size = 4
max_new_tokens = 256
head_chunk = 1024  # of 128,256 logits a token
gradient_checkpointing = True
temperature = 1.0
kl_coef = 0.05
ppo_epochs = 1
num_minibatches = 4
max_iters = 500
learning_rate = 5e-7
value_learning_rate = 2e-6
warmup_iters = 10
value_warmup_iters = 10
grad_clip = 1.0
eval_interval = 25
checkpoint_interval = 25
dtype = "bfloat16"
