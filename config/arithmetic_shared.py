"""
PPO on the built-in addition task with the value model as a head on the policy's own trunk: three
models in memory. Both losses train the trunk, so the value loss has a small weight. The head starts
untrained, so it has a large learning rate. Behind arithmetic_ppo.py:

    python ppo.py config/arithmetic_ppo.py config/arithmetic_shared.py
"""
out_dir = "out/arithmetic_shared"
value_init = "shared"
learning_rate = 2e-4
value_learning_rate = 3e-3
vf_coef = 0.1
