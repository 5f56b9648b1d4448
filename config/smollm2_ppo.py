"""
PPO of SmolLM2-135M on GSM-Symbolic: the task, the rules and the batch of config/smollm2_grpo.py;
the value model starts as the policy, too. Two epochs of two steps on each batch.

    python ppo.py config/smollm2_ppo.py           # after config/smollm2_sft.py

The classical way, with the reward model of config/smollm2_rm.py in the place of the rules:

    python ppo.py config/smollm2_ppo.py --out_dir=out/smollm2_ppo_rm --value_init=reward \\
        --reward_functions=reward_model --reward_path=out/smollm2_rm/reward_model
"""
out_dir = "out/smollm2_ppo"
policy_path = "out/smollm2_sft/policy"
value_init = "policy"
prompts_path = "data/gsm_symbolic/rl_train.jsonl"
eval_path = "data/gsm_symbolic/rl_val.jsonl"
reward_functions = "1.0*accuracy,0.1*data/gsm_symbolic/reward.py:form"
batch_size = 512
max_prompt_tokens = 192
max_new_tokens = 192
temperature = 1.0
kl_coef = 0.02
lam = 1.0  # returns are the scores themselves, not sums with the values of a new head
cliprange_value = 0.0  # the new head has far to go
ppo_epochs = 2
num_minibatches = 2
grad_clip = 1.0
vf_coef = 1.0
max_iters = 30
learning_rate = 5e-6
warmup_iters = 5  # the value model learns first
lr_decay = "constant"
value_learning_rate = 2e-5
value_lr_decay = "constant"
eval_interval = 20
checkpoint_interval = 20
micro_batch_tokens = 32768
dtype = "bfloat16"
