"""
Your instruct model, your JSONL: the ten keys that matter. Copy this file, and change them.

    python grpo.py config/mine.py                          # rules as the reward
    python ppo.py config/mine.py --value_init=policy       # the same rules, and a value model
    torchrun --nproc_per_node=8 grpo.py config/mine.py     # 8 GPUs

mine.jsonl has a row a line: {"prompt": [{"role": "user", "content": "2 + 2 = ?"}], "answer": "4"}.
mine_sft.py, mine_rm.py and mine_ppo.py, beside this file, are for a reward model of your own. The
ten keys are meant for a model of about 1B on one GPU of 80 GB; we have not run them on one. On a
small machine: --micro_batch_size=1 --lora=16. Keys that are not here: `python grpo.py --help`.
The example of README sets its own in data/example/grpo.py.
"""
out_dir = "out/mine"  # log, checkpoints and, at the end, policy/: a folder for transformers
policy_path = "Qwen/Qwen2.5-0.5B-Instruct"  # a folder or a name on the hub; its template is used
prompts_path = "mine.jsonl"  # other names of fields: --fields="question>prompt,solution>answer"
eval_path = "mine_val.jsonl"  # prompts that are not trained on; "" = the curves of training alone
reward_functions = "1.0*accuracy"  # or a function of yours: "mine.py:brevity"; docs/data.md
max_new_tokens = 512  # longest response; eval/finished in the log says if it is too short
batch_size = 256  # responses an iteration, on all GPUs together; more = less noise, slower
learning_rate = 1e-6  # of the whole model; with --lora=16 begin with 1e-5
max_iters = 200  # watch objective/scores and objective/kl, and stop when you like: it can resume
dtype = "bfloat16"  # on a GPU; float32 on a CPU
