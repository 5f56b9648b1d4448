"""
PPO on Llama 3.1 8B, four models of 8B: bf16 autocast over fp32 weights, and all models are split
over the GPUs.

    python data/tldr/prepare.py --chat --tokenizer=meta-llama/Llama-3.1-8B-Instruct
    torchrun --nproc_per_node=8 ppo.py config/llama_8b.py

Meant for 8 GPUs of 80 GB. Each has, by arithmetic, about 33 GiB of weights, gradients and Adam
states, and in a rollout 17 GiB more: the whole policy.

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
