"""
Reward hacking on purpose: arithmetic_ppo.py without its KL penalty, and with larger and more
steps.

The learned score keeps rising, while the true accuracy rises at first and then collapses. Far
from the SFT model the policy finds answers that please the reward model and are wrong (Goodhart's
law; Gao et al., arXiv 2210.10760). About two minutes on two CPU cores.

    python ppo.py config/arithmetic_overoptimize.py
    python tools/plot.py --runs=out/arithmetic_ppo,out/arithmetic_overoptimize
"""
out_dir = "out/arithmetic_overoptimize"
policy_path = "out/arithmetic_sft/policy"
reward_path = "out/arithmetic_rm/reward_model"
prompts_path = "data/arithmetic/rl_train.jsonl"
eval_path = "data/arithmetic/rl_val.jsonl"
batch_size = 256
max_new_tokens = 48
temperature = 1.0
kl_coef = 1e-9  # no penalty, but the KL is measured; with 0 there would be no reference policy
ppo_epochs = 4
num_minibatches = 2
micro_batch_size = 64
max_iters = 40
eval_interval = 2
learning_rate = 3e-4
value_learning_rate = 5e-4
lr_decay = "constant"
value_lr_decay = "constant"
vf_coef = 1.0
