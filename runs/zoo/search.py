"""
The zoo on search, where thinking longer pays: docs/search.md.
"""
DATA = "data/search"  # rl_train.jsonl, rl_val.jsonl
OUT, PAGE, PICTURE = "out/zoo_search", "docs/search.md", "assets/zoo_search.png"
RULE = "data/search/reward.py:"
RULES = f"{RULE}solved,{RULE}attempts,{RULE}repeats,{RULE}slips"
LONGEST = 160
CURVES = ("ppo", "ppo_lam_95", "reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "maxrl")
METRICS = "objective/reward/solved,objective/length,objective/entropy"  # of the picture
COLUMNS = {  # title: (figure, format)
    "sampled": ("sampled solved", "each .1%"), "at 0.15M tokens": ("at budget", ".1%"),
    "length": ("length", "each .0f"), "of wrong ones": ("length of wrong ones", "each .0f"),
    "repeats": ("sampled repeats", "each .0%"), "slips": ("sampled slips", "each .0%"),
    "greedy": ("greedy solved", "each .0%"), "KL": ("kl", "each z.1f"),
    "entropy": ("entropy", "each .1f"), "CPU s": ("seconds", ".0f")}
BUDGET = 150_000  # sampled tokens: "at budget" is the share of right ones when a run has so many
SOLVED = f"--reward_functions={RULE}solved"
# Commands; @ is the folder of the seed. 20 iterations of 256 are 5,120 responses
WORDS = {
    "PPO": "ppo.py config/search_ppo.py --policy_path=@/sft/policy --eval_path= --max_iters=20",
    "GRPO": "grpo.py config/search_grpo.py --policy_path=@/sft/policy --eval_path= --max_iters=20",
    "SOLVED": SOLVED,
    "PAIRS": "data/arithmetic/pairs.py --policy_path=@/sft/policy --prompts_path=@/rl_train.jsonl "
             f"--max_new_tokens=160 {SOLVED}"}
FIRST = """
sft              | sft.py config/search_sft.py
"""  # once for each seed
# row            | command < a diff of recipes/
ROWS = """
ppo              | PPO
ppo_lam_95       | PPO --lam=0.95
ppo_value_shared | PPO --value_init=shared --value_learning_rate=1e-2 --vf_coef=0.01
reinforce        | PPO --ppo_epochs=1 --num_minibatches=1
best_of_10       | tools/eval.py --policies=@/sft/policy --samples=10 --max_new_tokens=160 SOLVED \
--right_by=solved --prompts_path=data/search/rl_val.jsonl --out=@/best_of_10/eval
dpo              | PAIRS --pairs=1100 --name=dpo && recipes/dpo.py config/arithmetic_dpo.py \
--policy_path=@/sft/policy --train_path=@/dpo_train.jsonl --val_path=
distill          | PPO config/arithmetic_distill.py --ref_path=@/ppo/policy \
--reward_functions=0*data/search/reward.py:solved,0*data/search/reward.py:attempts
grpo             | GRPO
grpo_one_step    | GRPO --num_minibatches=1
grpo_kl_0        | GRPO --kl_coef=0
grpo_attempts    | GRPO --reward_functions=data/search/reward.py:solved,\
-0.5*data/search/reward.py:repeats,-0.5*data/search/reward.py:slips
grpo_token_mean  | GRPO --aggregation=token-mean
grpo_clip_higher | GRPO --kl_coef=0 --cliprange_high=0.28
dr_grpo          | GRPO config/dr_grpo.py
dapo             | GRPO config/dapo.py --batch_size=128 --max_refills=1
dapo_overlong    | GRPO config/dapo.py --batch_size=128 --max_refills=1 --refill_by=solved \
--reward_functions=2*data/search/reward.py:solved,length
gspo             | GRPO config/gspo.py
cispo            | GRPO config/cispo.py
rloo             | GRPO config/rloo.py
reinforce++      | GRPO --kl_estimator=k2 < recipes/reinforce_pp.diff
maxrl            | GRPO < recipes/maxrl.diff
sapo             | GRPO < recipes/sapo.diff
trees            | GRPO --trunk=24 --branches=2 < recipes/trees.diff
staleness_1      | GRPO --staleness=1
staleness_2      | GRPO --staleness=2
staleness_4      | GRPO --staleness=4
"""
