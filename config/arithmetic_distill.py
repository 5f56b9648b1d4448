"""
On-policy distillation on the toy: the policy that PPO has trained teaches a fresh SFT model. "A
teacher in the place of a reward" in docs/algorithms.md explains the keys. After
runs/quickstart.sh, behind arithmetic_ppo.py:

    python ppo.py config/arithmetic_ppo.py config/arithmetic_distill.py
"""
out_dir = "out/arithmetic_distill"
ref_path = "out/arithmetic_ppo/policy"  # the teacher
reward_path = ""
reward_functions = "0*accuracy"  # only measured
missing_eos_penalty = 0.0
value_init = "policy"
gamma = 0.0
lam = 0.0
