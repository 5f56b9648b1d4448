r"""
PPO on the built-in addition task with one trunk in memory for all four models (Hydra): the SFT
model, frozen. Policy, value model and reward model are adapters on it, the last two with a head;
the reference is the trunk alone. The reward model's adapter is trained first. Adapters learn well
at higher learning rates than whole models. Behind arithmetic_ppo.py:

    python rm.py config/arithmetic_rm.py --lora=16 --learning_rate=2e-3 --max_iters=150 \
        --out_dir=out/arithmetic_rm_lora
    python ppo.py config/arithmetic_ppo.py config/arithmetic_hydra.py
"""
out_dir = "out/arithmetic_hydra"
reward_path = "out/arithmetic_rm_lora/reward_model_adapter"
share_base = True
lora = "policy=16,value=16"
learning_rate = 1e-3
value_learning_rate = 1e-3
