"""
GRPO of Qwen2.5-1.5B-Instruct on GSM8K, with rules as the reward: the right number scores 1, and
the form <think>...</think> 0.1. 128 problems x 8 answers an iteration, one step on each batch. The
algorithm is the paper's, but for DAPO's token mean and a small KL. The numbers are our choice,
within what published recipes use (learning rate 1e-6, groups of 8, 1,024 tokens).

    python data/convert.py --source=hf:openai/gsm8k:main:train --chat \\
        --out=data/gsm8k/rl_train.jsonl
    python data/convert.py --source=hf:openai/gsm8k:main:test --chat --out=data/gsm8k/rl_val.jsonl
    torchrun --nproc_per_node=8 grpo.py config/gsm8k_grpo.py

Meant for 8 GPUs of 80 GB; each has the whole models: about 26 GiB of weights, gradients and Adam
states, by arithmetic. The hub's test is our val, as usual: GSM8K has no third part. So choose no
settings by it if you want to report it. We have not run it: no result is promised.
"""
out_dir = "out/gsm8k_grpo"
policy_path = "Qwen/Qwen2.5-1.5B-Instruct"
prompts_path = "data/gsm8k/rl_train.jsonl"
eval_path = "data/gsm8k/rl_val.jsonl"
eval_size = 256
system_prompt = ("Reason step by step between <think> and </think>, then give the final number in "
                 "\\boxed{}.")
reward_functions = "1.0*accuracy,0.1*format"
batch_size = 1024
group_size = 8
max_new_tokens = 1024
rollout_batch_size = 64
micro_batch_size = 8
head_chunk = 1024
gradient_checkpointing = True
aggregation = "token-mean"
kl_coef = 0.001
max_iters = 200
learning_rate = 1e-6
warmup_iters = 5
eval_interval = 20
checkpoint_interval = 20
dtype = "bfloat16"
