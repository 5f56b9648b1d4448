"""
GRPO of SmolLM2-135M on GSM-Symbolic, with rules as the reward: a right answer scores 1, and a last
line "#### 72" 0.1. 64 problems x 8 answers an iteration, one step on each batch.

    python grpo.py config/smollm2_grpo.py         # after config/smollm2_sft.py
"""
out_dir = "out/smollm2_grpo"
policy_path = "out/smollm2_sft/policy"
prompts_path = "data/gsm_symbolic/rl_train.jsonl"
eval_path = "data/gsm_symbolic/rl_val.jsonl"
reward_functions = "1.0*accuracy,0.1*data/gsm_symbolic/reward.py:form"
batch_size = 512
group_size = 8
max_prompt_tokens = 192
max_new_tokens = 192  # 97 of 100 demonstrations are not longer
kl_coef = 0.02
aggregation = "token-mean"
max_iters = 60
learning_rate = 1e-5
warmup_iters = 3
eval_interval = 20
checkpoint_interval = 20
micro_batch_tokens = 32768
dtype = "bfloat16"
