"""
GRPO on an 8B model with one card of 24 GB: the policy is an adapter on a trunk in 4 bits, which is
the reference, too, and AdamW has states of 8 bits. docs/scale.md has the predicted memory. Loading
takes 32 GB of the CPU's memory.

    pip install bitsandbytes
    python data/gsm8k/prepare.py --chat
    python grpo.py config/one_card.py

Nobody has run it: no GPU was there. A tiny model in 4 bits has run on CPUs
(tests/test_four_bits.py). The model is on the Hugging Face hub, where it asks for your consent.
"""
out_dir = "out/one_card"
policy_path = "meta-llama/Llama-3.1-8B-Instruct"
prompts_path = "data/gsm8k/rl_train.jsonl"
eval_path = "data/gsm8k/rl_val.jsonl"
reward_functions = "1.0*accuracy,0.1*format"
lora = "16"
quantize = "4bit"
optim = "adamw8bit"
batch_size = 64
group_size = 8
rollout_batch_size = 64
max_new_tokens = 512
micro_batch_size = 1
head_chunk = 256  # of 128,256 logits a token
gradient_checkpointing = True
kl_coef = 0.0
learning_rate = 1e-5
warmup_iters = 5
max_iters = 200
eval_interval = 20
eval_size = 128
checkpoint_interval = 20
dtype = "bfloat16"
