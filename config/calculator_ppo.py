"""
PPO with several turns, on the task of config/calculator_grpo.py: a value model that starts as the
policy, and a rule as the reward. About two minutes on two CPU cores.

    python ppo.py config/calculator_ppo.py       # after config/calculator_sft.py
"""
out_dir = "out/calculator_ppo"
policy_path = "out/calculator_sft/policy"
value_init = "policy"
prompts_path = "data/calculator/rl_train.jsonl"
eval_path = "data/calculator/rl_val.jsonl"
environment = "data/calculator/calculator.py:calculator"
max_turns = 4
reward_functions = "accuracy"
kl_coef = 0.02
batch_size = 256
max_new_tokens = 40
micro_batch_size = 64
temperature = 1.0
max_iters = 20
eval_interval = 5
learning_rate = 3e-4
value_learning_rate = 1e-3
