"""
On-policy distillation on the toy: the policy that PPO has trained teaches a fresh SFT model. "A
teacher in the place of a reward" in docs/algorithms.md explains the keys.

python ppo.py config/arithmetic_distill.py      # after runs/quickstart.sh
"""
out_dir = "out/arithmetic_distill"
policy_path = "out/arithmetic_sft/policy"
ref_path = "out/arithmetic_ppo/policy"  # the teacher
prompts_path = "data/arithmetic/rl_train.jsonl"
eval_path = "data/arithmetic/rl_val.jsonl"
reward_functions = "0*accuracy"  # only measured
missing_eos_penalty = 0.0
value_init = "policy"
kl_coef = 1.0
gamma = 0.0
lam = 0.0
batch_size = 256
max_new_tokens = 48
temperature = 1.0
ppo_epochs = 2
num_minibatches = 2
micro_batch_size = 64
max_iters = 20
eval_interval = 5
learning_rate = 1e-4
value_learning_rate = 3e-4
vf_coef = 1.0
