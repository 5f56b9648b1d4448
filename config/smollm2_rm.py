"""
The reward model of SmolLM2-135M on GSM-Symbolic, from pairs of the SFT model's own answers, a right
one and a wrong one to the same problem.

    python data/arithmetic/pairs.py --policy_path=out/smollm2_sft/policy --pairs=1000 \\
        --prompts_path=data/gsm_symbolic/rl_train.jsonl --max_new_tokens=192 --dtype=bfloat16
    python rm.py config/smollm2_rm.py
"""
out_dir = "out/smollm2_rm"
init_from = "out/smollm2_sft/policy"
train_path = "data/gsm_symbolic/pairs_train.jsonl"
val_path = "data/gsm_symbolic/pairs_val.jsonl"
max_iters = 60
batch_size = 32
learning_rate = 5e-5
eval_interval = 20
micro_batch_tokens = 32768
dtype = "bfloat16"
