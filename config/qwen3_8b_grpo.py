"""
GRPO of Qwen3-8B on GSM8K on eight GPUs of 80 GB: what config/gsm8k_grpo.py needs for a model that
does not fit whole. That has the commands for the data.

    python tools/plan.py grpo.py config/gsm8k_grpo.py config/qwen3_8b_grpo.py --gpus=8xH100 \\
        --length=400 --price=2.5
    torchrun --nproc_per_node=8 grpo.py config/gsm8k_grpo.py config/qwen3_8b_grpo.py

tools/plan.py says that it fits, and that other values of zero_stage, head_chunk, rollout_batch_size
and micro_batch_tokens do not lower its limit, see docs/scale.md. We have not run it: no result is
promised.
"""
out_dir = "out/qwen3_8b_grpo"
policy_path = "Qwen/Qwen3-8B"
template_kwargs = "enable_thinking=False"  # its thoughts have thousands of tokens
max_prompt_tokens = 512
zero_stage = "3"  # 8.2e9 parameters with gradients and AdamW's states are 122 GiB: an eighth each
rollout_batch_size = 0  # all 128 of a rank decode at once
micro_batch_tokens = 49152
checkpoint_interval = 50  # 92 GiB each
