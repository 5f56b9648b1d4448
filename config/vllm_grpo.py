"""
GRPO on GSM8K with vLLM as the sampler, for one GPU of 80 GB: long responses of a model of 1.5B.
vLLM is on the same GPU, and sleeps while the policy trains.

    pip install -r requirements.txt vllm==0.32.0
    python data/gsm8k/prepare.py --chat
    python grpo.py config/vllm_grpo.py

Nobody has run it: no GPU was there. The same sampler has run on CPUs, on the toy (runs/vllm.sh).
docs/scale.md says why a run with vLLM does not repeat bit for bit.
"""
out_dir = "out/vllm_grpo"
sampler = "vllm"
vllm_cache = 16.0  # GiB
policy_path = "Qwen/Qwen2.5-1.5B-Instruct"
prompts_path = "data/gsm8k/rl_train.jsonl"
eval_path = "data/gsm8k/rl_val.jsonl"
reward_functions = "1.0*accuracy,0.1*format"
batch_size = 512
group_size = 8
rollout_batch_size = 256
max_new_tokens = 1024
micro_batch_tokens = 16384
head_chunk = 2048  # of 151,936 logits a token
gradient_checkpointing = True
kl_coef = 0.0
importance_cap = 2.0  # vLLM's log-probs are not those of the training forward
learning_rate = 1e-6
warmup_iters = 10
max_iters = 200
eval_interval = 20
checkpoint_interval = 20
dtype = "bfloat16"
