"""
PPO on the built-in addition task with the *learned* reward model. The true answers are only used
for the curve of the accuracy. About a minute on two CPU cores; the README has the accuracies.

The KL penalty keeps the policy near the SFT model, where the reward model is right;
arithmetic_overoptimize.py shows what happens without it.

    python ppo.py config/arithmetic_ppo.py         # after config/arithmetic_rm.py
"""
out_dir = "out/arithmetic_ppo"
policy_path = "out/arithmetic_sft/policy"
reward_path = "out/arithmetic_rm/reward_model"
prompts_path = "data/arithmetic/rl_train.jsonl"
eval_path = "data/arithmetic/rl_val.jsonl"
batch_size = 256
max_new_tokens = 48
temperature = 1.0
kl_coef = 1.0
ppo_epochs = 2
num_minibatches = 2
micro_batch_size = 64
max_iters = 20
eval_interval = 5
learning_rate = 1e-4
value_learning_rate = 3e-4
vf_coef = 1.0
