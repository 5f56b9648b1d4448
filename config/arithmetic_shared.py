"""
PPO on the built-in addition task with the value model as a head on the policy's own trunk, the
classic variant: three models in memory.

Both losses train the trunk, so the value loss has a small weight. The head starts untrained, so
it has a large learning rate of its own.

    python ppo.py config/arithmetic_shared.py      # after config/arithmetic_rm.py
"""
out_dir = "out/arithmetic_shared"
policy_path = "out/arithmetic_sft/policy"
reward_path = "out/arithmetic_rm/reward_model"
prompts_path = "data/arithmetic/rl_train.jsonl"
eval_path = "data/arithmetic/rl_val.jsonl"
value_init = "shared"
batch_size = 256
max_new_tokens = 48
temperature = 1.0
kl_coef = 1.0
ppo_epochs = 2
num_minibatches = 2
micro_batch_size = 64
max_iters = 20
eval_interval = 5
learning_rate = 2e-4
value_learning_rate = 1e-2
vf_coef = 0.01
