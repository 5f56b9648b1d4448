"""
Reward hacking on purpose: no KL penalty, and larger and more steps. The learned score keeps rising,
while the true accuracy rises at first and then collapses; docs/algorithms.md says why. About two
minutes on two CPU cores. Behind arithmetic_ppo.py:

    python ppo.py config/arithmetic_ppo.py config/arithmetic_overoptimize.py
    python tools/plot.py --runs=out/arithmetic_ppo,out/arithmetic_overoptimize
"""
out_dir = "out/arithmetic_overoptimize"
kl_coef = 1e-9  # no penalty, but the KL is measured; with 0 there would be no reference policy
ppo_epochs = 4
max_iters = 40
eval_interval = 2
learning_rate = 3e-4
value_learning_rate = 5e-4
lr_decay = "constant"
value_lr_decay = "constant"
