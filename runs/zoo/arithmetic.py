"""
The zoo on the task of addition: docs/zoo.md.
"""
DATA = "data/arithmetic"  # rl_train.jsonl, rl_val.jsonl
OUT, PAGE, PICTURE = "out/zoo", "docs/zoo.md", "assets/zoo.png"
RULES, LONGEST, BUDGET = "accuracy", 48, 0  # the first rule is what "greedy" and "sampled" mean
CURVES = ("ppo", "ppo_one_trunk", "reinforce", "grpo", "dapo", "cispo", "rloo", "maxrl", "distill")
METRICS = "objective/accuracy,objective/entropy,objective/length"  # of the picture
COLUMNS = {  # title: (figure, format)
    "greedy": ("greedy accuracy", ".1%"), "sampled": ("sampled accuracy", ".1%"),
    "KL": ("kl", "z.2f"), "entropy": ("entropy", ".2f"), "length": ("length", ".1f"),
    "CPU s": ("seconds", ".0f"), "MiB": ("mib", ".0f")}
# Commands; @ is the folder of the seed. 20 iterations of 256 are 5,120 responses; for GRPO half as
# many as its config has, so the learning rate is larger
WORDS = {
    "PPO": "ppo.py config/arithmetic_ppo.py --policy_path=@/sft/policy --eval_path=",
    "GRPO": "grpo.py config/arithmetic_grpo.py --policy_path=@/sft/policy --eval_path= "
            "--max_iters=20 --learning_rate=5e-4",
    "MODEL": "--reward_path=@/rm/reward_model",
    "PAIRS": "data/arithmetic/pairs.py --policy_path=@/sft/policy --prompts_path=@/rl_train.jsonl",
    "RM": "rm.py config/arithmetic_rm.py --init_from=@/sft/policy "
          "--train_path=@/pairs_train.jsonl --val_path="}
FIRST = """
sft              | sft.py config/arithmetic_sft.py
rm               | PAIRS && RM
rm_lora          | RM --lora=16 --learning_rate=2e-3 --max_iters=150
hints            | sft.py config/arithmetic_sft.py --context=128 --batch_size=64 \
--train_path=data/arithmetic/sft_train.jsonl,0.5*data/arithmetic/sft_hints.jsonl
"""  # once for each seed
# row            | command < a diff of recipes/
ROWS = """
ppo              | PPO MODEL
ppo_value_policy | PPO MODEL --value_init=policy
ppo_value_shared | PPO config/arithmetic_shared.py MODEL
ppo_one_trunk    | PPO config/arithmetic_hydra.py --reward_path=@/rm_lora/reward_model_adapter
reinforce        | PPO MODEL --ppo_epochs=1 --num_minibatches=1
best_of_10       | tools/eval.py --policies=@/sft/policy --samples=10 MODEL \
--reward_functions=reward_model --out=@/best_of_10/eval
dpo              | PAIRS --pairs=1100 --name=dpo && recipes/dpo.py config/arithmetic_dpo.py \
--policy_path=@/sft/policy --train_path=@/dpo_train.jsonl --val_path=
grpo             | GRPO
dr_grpo          | GRPO config/dr_grpo.py
dapo             | GRPO config/dapo.py --refill_by=accuracy --batch_size=128 --max_refills=1
gspo             | GRPO config/gspo.py --num_minibatches=4
cispo            | GRPO config/cispo.py --num_minibatches=4
rloo             | GRPO config/rloo.py
reinforce++      | GRPO --kl_estimator=k2 < recipes/reinforce_pp.diff
maxrl            | GRPO --reward_functions=accuracy < recipes/maxrl.diff
sapo             | GRPO --num_minibatches=4 < recipes/sapo.diff
distill          | PPO config/arithmetic_distill.py --ref_path=@/ppo/policy
self_distill     | GRPO --policy_path=@/hints/policy --ref_path=@/hints/policy --kl_in=reward \
--kl_estimator=k1 --kl_coef=1 < recipes/self_distillation.diff
"""
