"""
GRPO on search, where thinking longer pays: accuracy and length of the responses rise together. A
rule is the reward: 1 where the last attempt hits, else 0. Nothing asks for length. About two
minutes on two CPU cores.

    python grpo.py config/search_grpo.py           # after config/search_sft.py
"""
out_dir = "out/search_grpo"
policy_path = "out/search_sft/policy"
prompts_path = "data/search/rl_train.jsonl"
eval_path = "data/search/rl_val.jsonl"
reward_functions = ("data/search/reward.py:solved,0*data/search/reward.py:attempts,"
                    "0*data/search/reward.py:repeats,0*data/search/reward.py:slips")
batch_size = 256
group_size = 8
max_new_tokens = 160
num_minibatches = 4
micro_batch_size = 64
max_iters = 40
eval_interval = 10
learning_rate = 4e-4
lr_decay = "linear"
kl_coef = 0.01
