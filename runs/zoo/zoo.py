"""
The zoo of runs/zoo.sh: it runs each row with each seed, judges the policies, and writes the page
and the picture. What has ended is not run again; to make a row anew, delete out/zoo/SEED/ROW.
After Ctrl-C it waits for the two runs of now.
"""
import glob
import importlib
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
from batches import forward_batch, micro_batches  # noqa: E402
from errors import BadInput  # noqa: E402
from load import load  # noqa: E402
from metrics import summarize  # noqa: E402
from model import response_logprobs  # noqa: E402
from prompts import encode_prompts, read_prompts  # noqa: E402
from rewards import reward_terms, score_batch  # noqa: E402
from rollout import sample_batch  # noqa: E402
from tools.runs import read_records  # noqa: E402

# --------------------------------------------------------------------------------------------------
seeds = "1,2,3"  # of all that is made, the SFT model included
rows = "all"  # or some of them, as ppo,grpo
more = ""  # to try the rows: keys behind those of each script, as "--max_iters=2 --batch_size=64"
task = "arithmetic"  # whose rows: a file beside this one [arithmetic | search]
out = ""  # all runs, empty = out/zoo, out/zoo_search; the page of some rows or more keys, too
config, system = configure(globals(), "config/keys.py")
# --------------------------------------------------------------------------------------------------
zoo = importlib.import_module(task)
out = out or zoo.OUT
rules = reward_terms(zoo.RULES)
RIGHT = rules[0][1]  # the name of the rule that says what is right


def code_of(diff):
    """The folder of the scripts: this one, or a copy to which a diff is applied."""
    if not diff:
        return "."
    shutil.rmtree(at := f"{out}/code/{os.path.basename(diff)}", ignore_errors=True)
    for path in [*glob.glob("*.py"), *glob.glob("[cog]*/*.py")]:  # config, options, grading
        os.makedirs(os.path.dirname(f"{at}/{path}"), exist_ok=True)
        shutil.copy(path, f"{at}/{path}")
    subprocess.run(["git", "apply", f"--directory={at}", diff], check=True)
    return at


def make(seed, name):
    """Run a row, unless it has ended; its CPU seconds and MiB are the last that it leaves."""
    folder, seconds, mib = f"{out}/{seed}/{name}", 0, 0
    if os.path.exists(f"{folder}/cost.json"):
        return
    os.makedirs(folder, exist_ok=True)
    for command in table[name][0].split(" && "):
        words = " ".join(zoo.WORDS.get(word, word) for word in command.split())
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
        best = "sampled best@10 " + ("" if RIGHT == "accuracy" else "reward/") + RIGHT
        return cost | {"kl": math.log(10) - 9 / 10, f"sampled {RIGHT}": judged[best]["mean"]}
    if not os.path.exists(file := f"{folder}/judged.json"):
        policy, sft = (load(f"{out}/{seed}/{one}/policy", "policy", system, device)
                       for one in (name, "sft"))
        problems = read_prompts(f"{zoo.DATA}/rl_val.jsonl")
        encode_prompts(problems, dict(policy=policy), zoo.LONGEST, system)
        figures = {}
        for mode, heat in ("greedy", 0.0), ("sampled", 1.0):
            batch = sample_batch(policy, problems, range(len(problems)), (1, "zoo", 0), zoo.LONGEST,
                                 heat, system, device)
            score_batch(batch, problems, rules, policy, None, 64, system, device)
            for _, rule, _ in rules:
                figures[f"{mode} {rule}"] = batch[f"reward/{rule}"].mean().item()
        wrong = batch["response_mask"].sum(1)[batch[f"reward/{RIGHT}"] == 0]
        figures["length of wrong ones"] = wrong.double().mean().item()
        batch["old_logprobs"] = batch["sampler_logprobs"]
        forward_batch(batch, dict(ref_logprobs=sft), partial(response_logprobs, temperature=1.0),
                   micro_batches(batch, batch["index"], 64), device)
        write_json(file, figures | {key[2:]: x for key, x in summarize(batch, "x").items()})
    return cost | read_json(file) | at_budget(folder)


def at_budget(folder):
    """
    {"at budget": share} of right responses when a run has sampled zoo.BUDGET tokens: of the three
    training batches up to then. Nothing of a row that samples fewer, or none.
    """
    if not zoo.BUDGET or not os.path.exists(log := f"{folder}/log.jsonl"):
        return {}
    size, tokens, right = read_json(f"{folder}/config.json")["batch_size"], 0, []
    for record in read_records(log):
        if f"objective/reward/{RIGHT}" not in record:
            continue
        # one attempt of refills samples each flat group anew
        again = record["objective/flat_groups"] if "trained/flat_groups" in record else 0
        tokens += size * record["objective/length"] * (1 + again)
        right.append(record[f"objective/reward/{RIGHT}"])
        if tokens >= zoo.BUDGET:
            return {"at budget": fmean(right[-3:])}
    return {}


def line_of(name):
    """
    A line of the table: of each figure the mean over the seeds; of the first three the range, too,
    and of one whose format begins with "each" what each seed has.
    """
    judged, cells = [judge(seed, name) for seed in numbers], []
    for column, (figure, form) in enumerate(zoo.COLUMNS.values()):
        found = [each[figure] for each in judged if figure in each]
        every, form = form.startswith("each "), form.removeprefix("each ")
        of_all = [of(found or [0]) for of in (fmean, min, max)]
        mean, low, high, *seen = (f"{x:{form}}".rstrip("%") for x in [*of_all, *found])
        between = f" ({', '.join(seen)})" * every or f" ({low} to {high})" * (column < 3)
        cells.append(mean + "%" * ("%" in form) + between * (low != high)
                     if len(found) == len(judged) else "-")
    command, diff = table[name]
    return f"| {name} | `{command}`{diff and ' with ' + diff} | {' | '.join(cells)} |"


first, table = ({name.strip(): (command, diff) for name, command, diff in re.findall(
    r"(.+?) \| (.+?)(?: < (.+))?\n", text)} for text in (zoo.FIRST, zoo.ROWS))
# {row: (command, diff)} each
chosen, numbers = list(table) if rows == "all" else rows.split(","), seeds.split(",")
chosen = [name for name in chosen if name != "sft"]  # that row is always there, the first
if unknown := set(chosen) - set(table):
    raise BadInput(f"rows = {rows!r}: there is no {min(unknown)}; there are {', '.join(table)}")
table |= first
code = {name: code_of(diff) for name, (_, diff) in table.items()}  # of all: each diff must apply
for seed in numbers:
    os.makedirs(f"{out}/{seed}", exist_ok=True)
    shutil.copy(f"{zoo.DATA}/rl_train.jsonl", f"{out}/{seed}")
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda seed: [make(seed, name) for name in first], numbers))
    for late in (False, True):  # a teacher comes before its pupil
        some = [name for name in chosen if ("@/ppo/" in table[name][0]) == late]
        list(pool.map(lambda one: make(*one), [(seed, name) for name in some for seed in numbers]))

device = ranks.init(system)
lines = [line_of(name) for name in ["sft", *chosen]]
if rows == "all" and not more:
    page, picture = zoo.PAGE, zoo.PICTURE
else:
    page, picture = f"{out}/zoo.md", f"{out}/zoo.png"
with open(zoo.PAGE, encoding="utf-8") as f:
    text = f.read().split("\n| row ")[0]  # the page as it is, without its table
with open(page, "w", encoding="utf-8") as f:
    f.write("\n".join([text, f"| row (seeds {seeds}) | command | {' | '.join(zoo.COLUMNS)} |",
                       "|---" * (2 + len(zoo.COLUMNS)) + "|", *lines, ""]))
print(f"saved {page}")
logs = [f"{out}/{numbers[0]}/{name}/log.jsonl" for name in zoo.CURVES if name in chosen]
if curves := ",".join(os.path.dirname(log) for log in logs if os.path.exists(log)):
    subprocess.run([sys.executable, "tools/plot.py", f"--runs={curves}", f"--out={picture}",
                    f"--metrics={zoo.METRICS}", "--smooth=0.5"], check=True)
