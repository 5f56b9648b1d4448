"""
GRPO of Qwen2.5-1.5B-Instruct on GSM8K with rules for a reward: the right number is worth 1, the form <think>...</think> 0.1. 128
problems x 8 answers an iteration, one step on each; the algorithm is config/grpo.py's with DAPO's token mean and a small KL. The
numbers are our choice, within what published recipes use (learning rate 1e-6, groups of 8, 1,024 tokens).

    python data/gsm8k/prepare.py --chat
    torchrun --nproc_per_node=8 grpo.py config/gsm8k_grpo.py

Meant for 8 GPUs of 80 GB; everything is replicated on each. By hand, for 1.54 billion parameters: policy, its gradient and Adam's
moments in fp32 24.7 GB, the reference 6.2 GB; KV cache of 64 responses of 1,300 tokens 2.4 GB; logits of 1,024 tokens at a
time 0.6 GB, a few times over; layer inputs of a micro-batch of 8, recomputed, 1.8 GB (fp32 under autocast), and autocast's
copy of the weights 3.1 GB. So about 40 GB. It has not been run by us: no result is promised.
"""
out_dir = "out/gsm8k_grpo"
policy_path = "Qwen/Qwen2.5-1.5B-Instruct"
prompts_path = "data/gsm8k/rl_train.jsonl"
eval_path = "data/gsm8k/rl_val.jsonl"
eval_size = 256
rewards = "1.0*accuracy,0.1*format"
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
