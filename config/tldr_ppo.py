"""
PPO of Pythia 1B on TL;DR with the settings of the N+ details paper (arXiv 2403.17031), which are
the defaults of ppo.py: a million episodes in batches of 512, 4 epochs of one minibatch, KL 0.05 in
the reward, a learning rate of 3e-6 that falls linearly, 53 new tokens at temperature 0.7. A
response without EOS scores -1 (detail 23); the value model starts as the reward model (detail 22).

Two things differ: value model and policy have an optimizer each, and the score is added to the
last response token instead of the one after it.

    torchrun --nproc_per_node=8 ppo.py config/tldr_ppo.py      # after tldr_sft.py and tldr_rm.py

Meant for 8 GPUs of 80 GB. We have not run it: no result is promised.
"""
out_dir = "out/tldr_ppo"
policy_path = "out/tldr_sft/policy"
reward_path = "out/tldr_rm/reward_model"
prompts_path = "data/tldr/prompts_train.jsonl"
eval_path = "data/tldr/prompts_val.jsonl"
rollout_batch_size = 64
value_learning_rate = 3e-6
eval_interval = 50
dtype = "bfloat16"
