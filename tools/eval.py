"""
Judge one policy or several on a file of prompts: how often they are right, pass@k, majority@k, best
of k, lengths, rewards, and how often one wins against another.

python tools/eval.py --policies=out/arithmetic_ppo/policy
python tools/eval.py --policies=out/arithmetic_sft/policy,out/arithmetic_ppo/policy \\
    --samples=8 --reward_path=out/arithmetic_rm/reward_model
torchrun --nproc_per_node=8 tools/eval.py --policies=out/gsm8k_grpo/policy \\
    --prompts_path=data/gsm8k/rl_val.jsonl --samples=16 --dtype=bfloat16

Each prompt is answered once greedily, and `samples` times at the temperature. It prints a table,
and leaves OUT.json, the table with all its digits, and OUT.jsonl, a line for each response. With
several policies, the first one is compared with each other one. The numbers are the same for any
number of ranks: the responses that decode together are the same ones, whichever rank has them.
"""
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import before_torch  # noqa: E402, F401, before torch: it notes which CPUs this process may use

import json  # noqa: E402
import math  # noqa: E402
import signal  # noqa: E402
from itertools import product  # noqa: E402
from statistics import fmean  # noqa: E402

from configurator import configure  # noqa: E402
from prompts import encode_for_all, spread  # noqa: E402
import launch  # noqa: E402
import parallel  # noqa: E402
import together  # noqa: E402
from answers import final_answer, whole_responses  # noqa: E402
from errors import BadConfig, say, shorten, warn  # noqa: E402
from load import outline  # noqa: E402
from models import autocast, dtypes, in_memory, load, load_reward_model  # noqa: E402
from options.judging import load_judge  # noqa: E402
from rewards import add_scores, read_prompts, reward_terms, score_responses  # noqa: E402
from rows import files_of  # noqa: E402
from tokenizer import check_tokenizer_fits  # noqa: E402
from tools.curves import short_names  # noqa: E402
from tools.figures import (best_of_k, majority_at_k, mean_and_error,  # noqa: E402
                           pass_at_k, wins)
from tools.output import check_writable, written  # noqa: E402
from tools.policies import ask, load_asked, longest_response, plain, warpers  # noqa: E402


# --------------------------------------------------------------------------------------------------
policies = "out/arithmetic_ppo/policy"  # folders or hub names, separated by commas
prompts_path = "data/arithmetic/rl_val.jsonl"  # "prompt", and "answer" for accuracy; docs/data.md
fields = ""  # the data's names for ours: "question>prompt,solution>answer"
limit = 0  # how many prompts, from all over the file, 0 = all [>= 0]
out = "out/eval"  # OUT.json and OUT.jsonl are written, and replaced if they are there
# sampling; empty keys are as in the run that made a policy
samples = 4  # responses to each prompt at the temperature, 0 = none [0..1000000]
max_new_tokens = 0  # longest response; 0 = as in the run [0..1000000]
temperature = 1.0  # of the samples [> 0]
top_k = 0  # sampled are only the k most likely tokens, 0 = all [>= 0]
top_p = 1.0  # of these the most likely ones, up to this probability together [0.001..1]
min_p = 0.0  # of these those at least this times as likely as the most likely one [0..1]
stop_strings = ""  # texts that end a response, too: "</answer>", or several, "['Q:', '###']"
system_prompt = ""  # the system message of chats that have none
template_kwargs = ""  # what the template is told, such as enable_thinking=False
chat_template = ""  # a Jinja file in the place of the tokenizers' own chat templates
batch_size = 64  # responses that decode at once; it decides rounding, too [1..1000000]
seed = 1  # decides the samples [>= 0]
environment = ""  # FILE.py:env, what answers the policy; docs/turns.md
tools = ""  # FILE.py:f,FILE.py:g: functions that the policy may call
max_turns = 8  # turns of the policy in a response [1..1000]
# judging
right_by = "accuracy"  # a response is right where this reward is 1, such as code
by = ""  # a field of the rows, such as task: the figures for each of its values, too
reward_functions = ""  # more scores, as "0.1*format,mine.py:brevity"; empty = none; see rewards.py
reward_path = ""  # a reward model, whose score is added; empty = none
judge_path = ""  # folder or hub name of a judge, whose score is added; empty = none
judge_template = "yes_no"  # its question: yes_no, rubric, or a file; docs/rewards.md
reward_timeout = 300  # seconds for the rules of a batch; below timeout [1..1000000]
code_seconds = 5  # of CPU time, for each process of a program that the reward code runs [1..10000]
micro_batch_size = 16  # responses that reward model and judge read at once [>= 1]
# device
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
dtype = "float32"  # 16 bits: autocast [float32 | bfloat16 | float16 | float64]
timeout = 600  # seconds after which waiting for a lost rank is an error [1..1000000]
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------
# set-up: the ranks, the policies and their judges, the prompts

device = launch.init(device_type, timeout)
rank, world_size = parallel.rank_and_size()
for number in (signal.SIGINT, signal.SIGTERM):  # end the tool at once: there is nothing to save
    signal.signal(number, signal.default_int_handler)
paths = [path.strip() for path in policies.split(",") if path.strip()]
if not paths:
    raise BadConfig("policies is empty; type --policies=out/arithmetic_ppo/policy")
names = short_names(paths, "policies")
modes = {"greedy": (0.0, 1)}  # name: (temperature, responses to each prompt)
if samples:
    modes["sampled"] = temperature, samples
# of pass@k, majority@k and best@k: 1, 2, 4, ... and all samples
ks = sorted({2**i for i in range(samples.bit_length())} | {samples}) if samples else []

terms = reward_terms(reward_functions) if reward_functions else []  # [(weight, name, function)]
for name, key in dict(reward_model="reward_path", judge="judge_path").items():
    known = name in [term[1] for term in terms]
    if known and not config[key]:
        raise BadConfig(f"reward_functions names {name}; say which by --{key}=FOLDER")
    if config[key] and not known:
        terms += reward_terms(name)
# what is measured of each response; the last is the weighted sum of several rewards
rewards = [f"reward/{name}" for _, name, _ in terms]
metrics = list(dict.fromkeys(["accuracy", *rewards, *["scores"] * (len(terms) > 1)]))
right = right_by if right_by == "accuracy" else f"reward/{right_by}"
if right not in metrics:
    raise BadConfig(f"right_by = {right_by!r} is not measured; name it in --reward_functions, too")
ranked = metrics[-1] if terms else right  # who wins, and which of k samples is the best

rows = read_prompts(prompts_path, terms, fields)
if right == "accuracy" and not any("answer" in row for row in rows):
    warn(f"{prompts_path} has no answers: there will be no accuracy, pass@k and majority@k")
if by and not any(by in row for row in rows):
    raise BadConfig(f"by = {by!r}: no row of {prompts_path} has this field; the first has "
                    f"{', '.join(rows[0])}")
picked = spread(len(rows), limit, seed)  # the numbers of the rows whose prompts are answered
config["max_new_tokens"] = max_new_tokens = longest_response(paths, max_new_tokens)
say(f"a response ends after {max_new_tokens} tokens (--max_new_tokens)")
out = out.removesuffix(".jsonl").removesuffix(".json")
read = [*files_of(prompts_path), judge_template, chat_template, *paths, reward_path, judge_path]
made = {  # how these files begin
    ".jsonl": rb'\{"policy": .*"mode": "(greedy|sampled)", "row": \d+, "sample": \d+, "prompt": ',
    ".json": rb'\{\s*"config": \{\s*"policies": '}
together.alone(lambda: [check_writable(f"{out}{ending}", reads=read, made=begins)
                        for ending, begins in made.items()])

system = plain(**config)
precision = autocast(system, device)
asked = [load_asked(path, system) for path in paths]  # (tokenizer, what answers) of each policy
reward_model = reward_reader = judge = None
if reward_path:
    reward_model, reward_reader = load_reward_model(reward_path, None, asked[0][0], system, device)
if judge_path:
    judge = load_judge("", None, None, system, device)
prompts = []  # the ids of all prompts, as each policy reads them. All are checked before the first
for path, (tokenizer, _) in zip(paths, asked, strict=True):
    policy = outline(path, "lm", dtypes(system)[0])
    check_tokenizer_fits(tokenizer, policy, path)
    prompts.append(encode_for_all(
        rows, prompts_path, max_new_tokens,
        in_memory(policy=policy, reward_model=reward_model), tokenizer, judge))
together.agree(config | {"the prompts": rows})

# --------------------------------------------------------------------------------------------------
# responses: one policy after the other is loaded and answers all prompts. All responses are cut
# into batches; each rank takes every world_size-th of them

truncation = warpers(top_k, top_p, min_p)
records = []  # of this rank: a dict for each response
for name, path, (tokenizer, answers), ids in zip(names, paths, asked, prompts, strict=True):
    policy = load(path, "policy", system, device)
    for mode, (heat, count) in modes.items():
        picks = list(product(picked, range(count)))  # (row, sample) of each response
        batches = [picks[i:i + batch_size] for i in range(0, len(picks), batch_size)]
        for first in range(0, len(batches), world_size):
            # every rank goes through as many batches, for scoring may be a collective; the last
            # ones of some ranks are empty
            mine = batches[first + rank] if first + rank < len(batches) else []
            with precision:
                batch = ask(policy, tokenizer, answers, [(rows[i], ids[i]) for i, _ in mine],
                            ([i for i, _ in mine], [sample for _, sample in mine]), seed,
                            max_new_tokens, heat, truncation if heat else None)
            batch |= score_responses(batch, len(mine) * world_size, terms, reward_model, judge,
                                     reward_reader or tokenizer, micro_batch_size, system, device)
            if mine and terms:
                add_scores(batch, terms)
            texts = whole_responses(batch)
            for j, (i, sample) in enumerate(mine):
                scores = {metric: batch[metric][j].item() for metric in metrics}
                records.append(dict(
                    policy=name, mode=mode, row=i, sample=sample, prompt=rows[i]["prompt"],
                    text=batch["completions"][j], answer=final_answer(texts[j]),
                    finished=bool(batch["finished"][j]),
                    length=int(batch["response_mask"][j].sum()),
                    # NaN: it does not apply to this response
                    scores={metric: x for metric, x in scores.items() if math.isfinite(x)}))
                if answers:
                    records[-1]["messages"] = batch["dialogues"][j]
            if rank == 0:
                done = min((first + world_size) * batch_size, len(picks))
                print(f"{name}, {mode}: {done} of {len(picks)} responses", flush=True)
    del policy  # before the next one is loaded

# everyone's responses, in one order
records = [record for source in range(world_size)
           for record in together.from_rank(lambda: records, source)]
records.sort(key=lambda r: (names.index(r["policy"]), r["mode"], r["row"], r["sample"]))

# equal responses to a prompt are a tie: a model gives all of them the score of the first one, for
# the last bits of its scores depend on the responses beside them
known = {}
for record in records:
    response = json.dumps([record.get(name) for name in (
        "row", "text", "messages", "finished", "length")])
    scores = record["scores"]
    for name in (f"reward/{name}" for _, name, function in terms if function is None):
        scores[name] = known.setdefault((response, name), scores[name])
    if "scores" in scores:
        scores["scores"] = sum(weight * scores[f"reward/{name}"] for weight, name, _ in terms
                               if f"reward/{name}" in scores)

# --------------------------------------------------------------------------------------------------
# figures: each is a mean over the prompts, of one number a prompt

responses = {}  # (policy, mode, row): the records of its responses
for record in records:
    key = record["policy"], record["mode"], record["row"]
    responses.setdefault(key, []).append(record)


def scores_of(prompt, metric):
    """The scores by a metric of the responses to a prompt; without those that it lacks."""
    return [record["scores"][metric] for record in prompt if metric in record["scores"]]


def complete(prompts, *wanted):
    """The prompts whose responses all have these scores."""
    return [prompt for prompt in prompts
            if all(metric in record["scores"] for record in prompt for metric in wanted)]


def estimate(values):
    """The mean over the prompts, and half of its 95 % interval: None for a single prompt."""
    mean, error = mean_and_error(values)
    return dict(mean=mean, error=None if math.isnan(error) else error)


def figures_of(prompts, mode):
    """{name: its estimate} of the responses to these prompts."""
    numbers = {metric: [fmean(scores_of(prompt, metric)) for prompt in prompts
                        if scores_of(prompt, metric)] for metric in metrics}
    for k in ks if mode == "sampled" else ():
        numbers[f"pass@{k}"], numbers[f"majority@{k}"] = [], []
        for prompt in complete(prompts, right):
            truths = [float(value == 1.0) for value in scores_of(prompt, right)]
            numbers[f"pass@{k}"].append(pass_at_k(samples, int(sum(truths)), k))
            if right == "accuracy":
                answers = [record["answer"] for record in prompt]
                numbers[f"majority@{k}"].append(majority_at_k(answers, truths, k))
        # the best of k samples by the reward: its own score, and what else is measured of it
        for metric in metrics if terms else ():
            numbers[f"best@{k} {metric}"] = [
                best_of_k(scores_of(prompt, ranked), scores_of(prompt, metric), k)
                for prompt in complete(prompts, ranked, metric)]
    for name in ("length", "finished"):
        numbers[name] = [fmean(record[name] for record in prompt) for prompt in prompts]
    return {f"{mode} {name}": estimate(values) for name, values in numbers.items() if values}


def table_of(numbers):
    """{policy: {"mode figure": its estimate}} of the prompts of these rows."""
    table = {name: {} for name in names}
    for name, mode in product(names, modes):
        table[name] |= figures_of([responses[name, mode, i] for i in numbers], mode)
    return table


groups = {}  # value of `by`: the rows that have it
for i in picked if by else ():
    groups.setdefault(str(rows[i].get(by)), []).append(i)
table, groups = table_of(picked), {value: dict(prompts=len(groups[value]),
                                               policies=table_of(groups[value]))
                                   for value in sorted(groups)}

# the first policy against each other one, prompt by prompt
duels, last = [], [*modes][-1]  # of the samples, where there are some
for other in names[1:]:
    both = [[scores_of(responses[name, last, i], ranked) for name in (names[0], other)]
            for i in picked]
    values = [wins(ours, theirs) for ours, theirs in both if ours and theirs]
    if values:
        won = estimate(values)
        duels.append(dict(policy=names[0], against=other, by=ranked, responses=last,
                          prompts=len(values), win_rate=won["mean"], error=won["error"]))

# --------------------------------------------------------------------------------------------------
# the output of rank 0


def shown(middle, error, form):
    """A mean with its interval, if it has one."""
    return f"{middle:{form}}" + ("" if error is None else f" ±{error:{form}}")


def show(title, table):
    """Print a line for each figure, with a column for each policy."""
    figures = list(dict.fromkeys(figure for its in table.values() for figure in its))
    left, wide = max(map(len, figures)), max(16, *(len(name) + 2 for name in names))
    print(f"\n{title}\n{'':<{left}}" + "".join(f"{name:>{wide}}" for name in names))
    for figure in figures:
        form = ".1f" if figure.endswith(" length") else ".3f"
        cells = [shown(*its[figure].values(), form) if figure in its else "nan"
                 for its in table.values()]
        print(f"{figure:<{left}}" + "".join(f"{cell:>{wide}}" for cell in cells))


def finish():
    """Print the tables; write OUT.jsonl and OUT.json."""
    for value, group in groups.items():
        show(f"{group['prompts']} prompts with {by} = {shorten(value)}", group["policies"])
    show(f"{len(picked)} prompts, with 95 % confidence intervals of the means over prompts", table)
    for duel in duels:
        won = shown(duel["win_rate"], duel["error"], ".1%")
        print(f"{duel['policy']} wins {won} against {duel['against']} (by {duel['by']}, ties count "
              f"half, {duel['prompts']} prompts)")
    with written(f"{out}.jsonl") as f:
        f.writelines(json.dumps(record) + "\n" for record in records)
    with written(f"{out}.json") as f:
        found = dict(config=config, prompts=len(picked), policies=table, win_rates=duels)
        json.dump(found | (dict(groups=groups) if by else {}), f, indent=2)
    print(f"saved {out}.json and {out}.jsonl")


together.alone(finish)
launch.finish()
