"""
PPO with your reward model: the keys that matter. Copy this file, and change them.

    python ppo.py config/mine_ppo.py                       # after mine_sft.py and mine_rm.py

Sizes are for a model of about 1B and one GPU of 80 GB, where we have not run it; --help has all
keys. The example of README sets its own in data/example/ppo.py.
"""
out_dir = "out/mine_ppo"  # log, checkpoints and, at the end, policy/
policy_path = "out/mine_sft/policy"  # also the reference: the KL keeps the policy near it
reward_path = "out/mine_rm/reward_model"  # a folder or a hub name, of a model with one output
prompts_path = "mine.jsonl"
eval_path = "mine_val.jsonl"  # prompts that are not trained on
max_new_tokens = 512  # longest response; one that does not end scores -1
kl_coef = 0.05  # lower: a higher score, further from the reference, where the reward model errs
batch_size = 256  # responses an iteration, on all GPUs together; more = less noise, slower
learning_rate = 1e-6  # of the policy
value_learning_rate = 5e-6  # of the value model, which has to learn faster: val/explained_variance
max_iters = 200  # watch objective/scores and objective/kl, and stop when you like: it can resume
dtype = "bfloat16"  # on a GPU; float32 on a CPU
