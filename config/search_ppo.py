"""
PPO on search with its value model, where thinking longer pays: config/search_grpo.py has the task.
There is no reward model: the rule is the reward, and the value model starts as the policy. About
four minutes on two CPU cores.

    python ppo.py config/search_ppo.py             # after config/search_sft.py
"""
out_dir = "out/search_ppo"
policy_path = "out/search_sft/policy"
prompts_path = "data/search/rl_train.jsonl"
eval_path = "data/search/rl_val.jsonl"
reward_functions = ("data/search/reward.py:solved,0*data/search/reward.py:attempts,"
                    "0*data/search/reward.py:repeats,0*data/search/reward.py:slips")
value_init = "policy"
batch_size = 256
max_new_tokens = 160
temperature = 1.0
missing_eos_penalty = 0.0
kl_coef = 0.01
lam = 1.0
ppo_epochs = 2
num_minibatches = 2
micro_batch_size = 64
max_iters = 40
eval_interval = 10
learning_rate = 4e-4
value_learning_rate = 6e-4
vf_coef = 1.0
