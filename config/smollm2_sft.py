"""
SFT of SmolLM2-135M-Instruct on 4,200 worked solutions of GSM-Symbolic, three epochs: the first step
of runs/smollm2.sh.

    python data/gsm_symbolic/prepare.py
    python sft.py config/smollm2_sft.py
"""
out_dir = "out/smollm2_sft"
init_from = "HuggingFaceTB/SmolLM2-135M-Instruct"
train_path = "data/gsm_symbolic/sft_train.jsonl"
max_iters = 200
batch_size = 64
learning_rate = 3e-4
micro_batch_tokens = 32768
dtype = "bfloat16"
