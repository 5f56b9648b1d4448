"""
GRPO of Qwen2.5-3B, a base model, on Countdown, the task of TinyZero (github.com/Jiayi-Pan/TinyZero): reach a number with three or
four others. Its prompt and its scores (1, or 0.1 for the form), with groups instead of a critic; 128 problems x 8 answers an
iteration. Learning rate 1e-6 and KL 0.001 are TinyZero's as we remember them, the rest is our choice.

    python data/countdown/prepare.py
    torchrun --nproc_per_node=8 grpo.py config/countdown_grpo.py

Meant for 8 GPUs of 80 GB; everything is replicated on each. By hand, for 3.09 billion parameters: policy, its gradient and Adam's
moments in fp32 49.4 GB, the reference 12.4 GB; KV cache of 64 responses of 1,200 tokens 2.8 GB; logits of 512 tokens at a time
0.3 GB, a few times over; layer inputs of a micro-batch of 4, recomputed, 1.4 GB (fp32 under autocast), and autocast's copy of
the weights 6.2 GB. So about 75 GB, which is tight: with kl_coef = 0 the reference goes. It
has not been run by us: no result is promised.
"""
out_dir = "out/countdown_grpo"
policy_path = "Qwen/Qwen2.5-3B"
prompts_path = "data/countdown/rl_train.jsonl"
eval_path = "data/countdown/rl_val.jsonl"
eval_size = 256
rewards = "countdown"
batch_size = 1024
group_size = 8
max_new_tokens = 1024
rollout_batch_size = 64
micro_batch_size = 4
head_chunk = 512
gradient_checkpointing = True
aggregation = "token-mean"
kl_coef = 0.001
max_iters = 200
learning_rate = 1e-6
eval_interval = 20
checkpoint_interval = 20
dtype = "bfloat16"
