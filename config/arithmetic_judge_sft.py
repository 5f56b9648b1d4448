"""
SFT of a judge for the built-in addition task: it reads a problem and an answer, and says A (right)
or B (wrong). It starts as the SFT model, which already knows the sums, and learns to see mistakes.

    python data/arithmetic/judge.py                # after config/arithmetic_sft.py
    python sft.py config/arithmetic_judge_sft.py
"""
out_dir = "out/arithmetic_judge"
init_from = "out/arithmetic_sft/policy"
train_path = "data/arithmetic/judge_train.jsonl"
val_path = "data/arithmetic/judge_val.jsonl"
eval_size = 1000
max_iters = 500
batch_size = 128
micro_batch_size = 128
learning_rate = 2e-3
