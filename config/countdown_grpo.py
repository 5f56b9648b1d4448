"""
GRPO of Qwen2.5-3B, a base model, on Countdown, the task of TinyZero
(github.com/Jiayi-Pan/TinyZero): reach a target with three or four numbers. Prompt and scores (1,
or 0.1 for the form alone) are TinyZero's; groups take the place of its critic. 128 problems x 8
answers an iteration. The learning rate 1e-6 and the KL coefficient 0.001 are TinyZero's, from
memory; the other numbers are our choice.

    python data/countdown/prepare.py
    torchrun --nproc_per_node=8 grpo.py config/countdown_grpo.py

Meant for 8 GPUs of 80 GB; each has the whole models: about 52 GiB of weights, gradients and Adam
states, by arithmetic. We have not run it: no result is promised.
"""
out_dir = "out/countdown_grpo"
policy_path = "Qwen/Qwen2.5-3B"
prompts_path = "data/countdown/rl_train.jsonl"
eval_path = "data/countdown/rl_val.jsonl"
eval_size = 256
reward_functions = "data/countdown/reward.py:countdown"
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
