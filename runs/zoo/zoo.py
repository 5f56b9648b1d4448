"""
The zoo of runs/zoo.sh: it runs each row with each seed, judges the policies, and writes the page
and the picture. What has ended is not run again; to make a row anew, delete out/zoo/SEED/ROW.
After Ctrl-C it waits for the two runs of now.
"""
import glob
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import fmean

# Python looks for modules in this file's folder; ours are two folders above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from configurator import configure, read_json, write_json  # noqa: E402  before torch

import ranks  # noqa: E402
from errors import BadInput  # noqa: E402
from load import load  # noqa: E402
from loss import summarize  # noqa: E402
from model import response_logprobs  # noqa: E402
from prompts import micro_batches  # noqa: E402
from rewards import read_prompts, reward_terms, score_batch  # noqa: E402
from rollout import read_batch, sample_batch  # noqa: E402

# --------------------------------------------------------------------------------------------------
seeds = "1,2,3"  # of all that is made, the SFT model included
rows = "all"  # or some of them, as ppo,grpo
more = ""  # to try the rows: keys behind those of each script, as "--max_iters=2 --batch_size=64"
out = "out/zoo"  # all runs; the page is docs/zoo.md, of some rows or with more keys OUT/zoo.md
config, system = configure(globals(), "config/keys.py")
# --------------------------------------------------------------------------------------------------
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
# row            | command < a diff of recipes/, or the block of docs/algorithms.md behind this name
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
reinforce++      | GRPO --kl_estimator=k2 < REINFORCE++
maxrl            | GRPO --reward_functions=accuracy < MaxRL
sapo             | GRPO --num_minibatches=4 < SAPO
distill          | PPO config/arithmetic_distill.py --ref_path=@/ppo/policy
self_distill     | GRPO --policy_path=@/hints/policy --ref_path=@/hints/policy --kl_in=reward \
--kl_estimator=k1 --kl_coef=1 < recipes/self_distillation.diff
"""
CURVES = "ppo", "ppo_one_trunk", "reinforce", "grpo", "dapo", "cispo", "rloo", "maxrl", "distill"
COLUMNS = {  # title: (figure, format)
    "greedy": ("greedy", ".1%"), "sampled": ("sampled", ".1%"), "KL": ("kl", "z.2f"),
    "entropy": ("entropy", ".2f"), "length": ("length", ".1f"), "CPU s": ("seconds", ".0f"),
    "MiB": ("mib", ".0f")}


def code_of(diff):
    """The folder of the scripts: this one, or a copy to which a diff is applied."""
    if not diff:
        return "."
    shutil.rmtree(at := f"{out}/code/{os.path.basename(diff)}", ignore_errors=True)
    for path in [*glob.glob("*.py"), *glob.glob("config/*.py"), *glob.glob("options/*.py")]:
        os.makedirs(os.path.dirname(f"{at}/{path}"), exist_ok=True)
        shutil.copy(path, f"{at}/{path}")
    with open(diff if os.path.exists(diff) else "docs/algorithms.md", encoding="utf-8") as f:
        text = f.read()
    if not os.path.exists(diff):
        text = text.split(f"**{diff}**")[1].split("```diff\n")[1].split("```")[0]
    subprocess.run(["git", "apply", f"--directory={at}", "-"], input=text, text=True, check=True)
    return at


def make(seed, name):
    """Run a row, unless it has ended; its CPU seconds and MiB are the last that it leaves."""
    folder, seconds, mib = f"{out}/{seed}/{name}", 0, 0
    if os.path.exists(f"{folder}/cost.json"):
        return
    os.makedirs(folder, exist_ok=True)
    for command in table[name][0].split(" && "):
        words = " ".join(WORDS.get(word, word) for word in command.split())
        script, *keys = words.replace("@", f"{out}/{seed}").split()
        if script.startswith(("ppo", "grpo", "sft", "rm", "recipes")):
            keys += [f"--out_dir={folder}", *more.split()]
        with open(f"{folder}/said.txt", "a", encoding="utf-8") as said:
            child = subprocess.Popen(
                [sys.executable, f"{code[name]}/{script}", *keys, f"--seed={seed}"],
                stdout=said, stderr=said, start_new_session=True)
            _, child.returncode, used = os.wait4(child.pid, 0)
        if child.returncode:
            print(f"FAILED: {name}, seed {seed}; why is in {folder}/said.txt", flush=True)
            return
        seconds, mib = seconds + used.ru_utime + used.ru_stime, max(mib, used.ru_maxrss / 1024)
    write_json(f"{folder}/cost.json", dict(seconds=seconds, mib=mib))
    print(f"{name}, seed {seed}: {seconds:.0f} s of CPU, {mib:.0f} MiB", flush=True)


def judge(seed, name):
    """
    {figure: number} of a row. All policies answer the same problems with the same noise: greedily,
    then at temperature 1, where the KL is to the SFT model of the seed. Kept in judged.json.
    """
    folder = f"{out}/{seed}/{name}"
    if not os.path.exists(f"{folder}/cost.json"):
        return {}  # it has failed
    cost = read_json(f"{folder}/cost.json")
    if os.path.exists(f"{folder}/eval.json"):  # the best of n is no policy; its KL is a bound
        (judged,) = read_json(f"{folder}/eval.json")["policies"].values()
        return cost | dict(sampled=judged["sampled best@10 accuracy"]["mean"],
                           kl=math.log(10) - 9 / 10)
    if not os.path.exists(file := f"{folder}/judged.json"):
        policy, sft = (load(f"{out}/{seed}/{one}/policy", "policy", system, device)
                       for one in (name, "sft"))
        terms, figures = reward_terms("accuracy"), {}
        problems = read_prompts("data/arithmetic/rl_val.jsonl", terms, dict(policy=policy), 48,
                                system)
        for mode, heat in ("greedy", 0.0), ("sampled", 1.0):
            batch = sample_batch(policy, problems, range(len(problems)), (1, "zoo", 0), 48, heat,
                                 system, device)
            score_batch(batch, problems, terms, policy, None, 64, system, device)
            figures[mode] = batch["accuracy"].mean().item()
        batch["old_logprobs"] = batch["sampler_logprobs"]
        read_batch(batch, dict(ref_logprobs=sft), partial(response_logprobs, temperature=1.0),
                   micro_batches(batch, batch["index"], 64), device)
        write_json(file, figures | {key[2:]: x for key, x in summarize(batch, "x").items()})
    return cost | read_json(file)


def line_of(name):
    """A line of the table: of each figure the mean over the seeds; of the first three the range."""
    judged, cells = [judge(seed, name) for seed in numbers], []
    for column, (figure, form) in enumerate(COLUMNS.values()):
        found = [each[figure] for each in judged if figure in each]
        mean, low, high = (f"{of(found or [0]):{form}}" for of in (fmean, min, max))
        between = f" ({low.rstrip('%')} to {high.rstrip('%')})" * (column < 3 and low != high)
        cells.append(mean + between if found else "-")
    command, diff = table[name]
    return f"| {name} | `{command}`{diff and ' with ' + diff} | {' | '.join(cells)} |"


first, table = ({name.strip(): (command, diff) for name, command, diff in re.findall(
    r"(.+?) \| (.+?)(?: < (.+))?\n", text)} for text in (FIRST, ROWS))  # {row: (command, diff)}
chosen, numbers = list(table) if rows == "all" else rows.split(","), seeds.split(",")
chosen = [name for name in chosen if name != "sft"]  # that row is always there, the first
if unknown := set(chosen) - set(table):
    raise BadInput(f"rows = {rows!r}: there is no {min(unknown)}; there are {', '.join(table)}")
table |= first
code = {name: code_of(diff) for name, (_, diff) in table.items()}  # of all: each diff must apply
for seed in numbers:
    os.makedirs(f"{out}/{seed}", exist_ok=True)
    shutil.copy("data/arithmetic/rl_train.jsonl", f"{out}/{seed}")
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda seed: [make(seed, name) for name in first], numbers))
    for late in (False, True):  # a teacher comes before its pupil
        some = [name for name in chosen if ("@/ppo/" in table[name][0]) == late]
        list(pool.map(lambda one: make(*one), [(seed, name) for name in some for seed in numbers]))

device = ranks.init(system)
lines = [line_of(name) for name in ["sft", *chosen]]
if rows == "all" and not more:
    page, picture = "docs/zoo.md", "assets/zoo.png"
else:
    page, picture = f"{out}/zoo.md", f"{out}/zoo.png"
with open("docs/zoo.md", encoding="utf-8") as f:
    text = f.read().split("\n| row ")[0]  # the page as it is, without its table
with open(page, "w", encoding="utf-8") as f:
    f.write("\n".join([text, f"| row (seeds {seeds}) | command | {' | '.join(COLUMNS)} |",
                       "|---" * (2 + len(COLUMNS)) + "|", *lines, ""]))
print(f"saved {page}")
logs = [f"{out}/{numbers[0]}/{name}/log.jsonl" for name in CURVES if name in chosen]
if curves := ",".join(os.path.dirname(log) for log in logs if os.path.exists(log)):
    metrics = "--metrics=objective/accuracy,objective/entropy,objective/length"
    subprocess.run([sys.executable, "tools/plot.py", f"--runs={curves}", f"--out={picture}",
                    metrics, "--smooth=0.5"], check=True)
