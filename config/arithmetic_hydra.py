"""
PPO on the built-in addition task with one trunk in memory for all four models (Hydra): the frozen SFT model, on which the policy,
the value model and the reward model are LoRA adapters and heads, and the reference is nothing at all. The reward adapter comes
first; both learn faster than whole models do, so their learning rates are ten times as high.

    python rm.py config/arithmetic_rm.py --lora=16 --learning_rate=2e-3 --max_iters=150 --out_dir=out/arithmetic_rm_lora
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
