"""
PPO on Llama 3.2 1B, with the sizes of a real run: an instruct model as the SFT policy, a reward
model of 1B of the same family, bf16 autocast, TL;DR posts as chat prompts. Replace the models and
the prompts by yours.

    python data/tldr/prepare.py --chat --tokenizer=meta-llama/Llama-3.2-1B-Instruct
    torchrun --nproc_per_node=8 ppo.py config/llama.py

Meant for 8 GPUs of 80 GB; each has the whole models: about 42 GiB of weights, gradients and Adam
states, by arithmetic.

Both models are on the Hugging Face hub, where meta-llama's asks for your consent. We have not run
it: no result is promised.
"""
out_dir = "out/llama"
policy_path = "meta-llama/Llama-3.2-1B-Instruct"
reward_path = "Skywork/Skywork-Reward-V2-Llama-3.2-1B"
value_init = "policy"  # "reward" too, where both tokenizers are the same to the last added token
prompts_path = "data/tldr/prompts_train.jsonl"
eval_path = "data/tldr/prompts_val.jsonl"
batch_size = 512
rollout_batch_size = 64
micro_batch_size = 8
max_new_tokens = 128
temperature = 1.0
kl_coef = 0.05
ppo_epochs = 2
num_minibatches = 4
max_iters = 500
learning_rate = 1e-6
value_learning_rate = 5e-6
warmup_iters = 10
value_warmup_iters = 10
grad_clip = 1.0
eval_interval = 25
checkpoint_interval = 25
dtype = "bfloat16"
