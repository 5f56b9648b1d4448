r"""
PPO on the built-in addition task with one trunk in memory for all four models (Hydra).

The trunk is the SFT model, frozen. The policy is the trunk with a LoRA adapter; the value model
and the reward model are the trunk with an adapter and a head each; the reference is the trunk
alone. The reward model's adapter is trained first. Adapters learn well at higher learning rates
than whole models: here both are higher than in arithmetic_ppo.py.

    python rm.py config/arithmetic_rm.py --lora=16 --learning_rate=2e-3 --max_iters=150 \
        --out_dir=out/arithmetic_rm_lora
    python ppo.py config/arithmetic_hydra.py
"""
out_dir = "out/arithmetic_hydra"
policy_path = "out/arithmetic_sft/policy"
reward_path = "out/arithmetic_rm_lora/reward_model_adapter"
prompts_path = "data/arithmetic/rl_train.jsonl"
eval_path = "data/arithmetic/rl_val.jsonl"
share_base = True
lora = "policy=16,value=16"
batch_size = 256
max_new_tokens = 48
temperature = 1.0
kl_coef = 1.0
ppo_epochs = 2
num_minibatches = 2
micro_batch_size = 64
max_iters = 20
eval_interval = 5
learning_rate = 1e-3
value_learning_rate = 1e-3
vf_coef = 1.0
