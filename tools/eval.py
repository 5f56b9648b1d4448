"""
Judge one policy or several on a file of prompts: how often they are right, pass@k, majority@k, best
of k, lengths, rewards, and how often one wins against another.

python tools/eval.py --policies=out/arithmetic_ppo/policy
python tools/eval.py --policies=out/arithmetic_sft/policy,out/arithmetic_ppo/policy \\
    --samples=8 --reward_path=out/arithmetic_rm/reward_model
torchrun --nproc_per_node=8 tools/eval.py --policies=out/gsm8k_grpo/policy \\
    --prompts_path=data/gsm8k/test.jsonl --samples=16 --dtype=bfloat16

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
from statistics import fmean  # noqa: E402

from configurator import configure  # noqa: E402
from prompts import encode_for_all, spread  # noqa: E402
import launch  # noqa: E402
import parallel  # noqa: E402
import together  # noqa: E402
from tools.curves import short_names  # noqa: E402
from tools.figures import (best_of_k, majority_at_k, mean_and_error,  # noqa: E402
                           pass_at_k, wins)
from tools.output import check_writable, written  # noqa: E402
from tools.policies import plain, response_length, warpers  # noqa: E402
from options.environment import Environment  # noqa: E402
from options.judging import Judge  # noqa: E402
from load import outline  # noqa: E402
from models import autocast, dtypes, in_memory, load  # noqa: E402
from tokenizer import check_tokenizer_fits, load_reader, load_tokenizer  # noqa: E402
from errors import BadConfig, say, shorten, warn  # noqa: E402
from rows import files_of  # noqa: E402
from answers import final_answer  # noqa: E402
from rewards import (add_up, read_prompts, reward_terms, score_responses,  # noqa: E402
                     whole_responses)
from rollout import respond, texts_of, turns  # noqa: E402


# --------------------------------------------------------------------------------------------------
policies = "out/arithmetic_ppo/policy"  # folders or hub names, separated by commas
prompts_path = "data/arithmetic/rl_val.jsonl"  # "prompt", and "answer" for accuracy; docs/data.md
fields = ""  # the data's names for ours: "question>prompt,solution>answer"
limit = 0  # how many prompts, from all over the file, 0 = all [>= 0]
out = "out/eval"  # OUT.json and OUT.jsonl are written, and replaced if they are there
# sampling
samples = 4  # responses to each prompt at the temperature, 0 = none [0..1000000]
greedy = True  # also one response to each prompt at temperature 0
max_new_tokens = 0  # longest response; 0 = as in the run that left a policy [0..1000000]
temperature = 1.0  # of the samples [> 0]
top_k = 0  # sampled are only the k most likely tokens, 0 = all [>= 0]
top_p = 1.0  # of these the most likely ones, up to this probability together [0.001..1]
min_p = 0.0  # of these those at least this times as likely as the most likely one [0..1]
stop_strings = ""  # texts that end a response, too: "</answer>", or several, "['Q:', '###']"
batch_size = 64  # responses that decode at once; it decides rounding, too [1..1000000]
seed = 1  # decides the samples [>= 0]
environment = ""  # FILE.py:env, what answers the policy; docs/turns.md
tools = ""  # FILE.py:f,FILE.py:g: functions that the policy may call
max_turns = 8  # turns of the policy in a response [1..1000]
chat_template = ""  # a Jinja file in the place of the tokenizers' own chat templates
template_kwargs = ""  # what the template is told, such as enable_thinking=False
system_prompt = ""  # the system message of chats that have none
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
# set-up: the ranks, what is judged by what, the prompts

device = launch.init(device_type, timeout)
rank, world_size = parallel.rank_and_size()
for number in (signal.SIGINT, signal.SIGTERM):  # end the tool at once: there is nothing to save
    signal.signal(number, signal.default_int_handler)
paths = [path.strip() for path in policies.split(",") if path.strip()]
if not paths:
    raise BadConfig("policies is empty; type --policies=out/arithmetic_ppo/policy")
names = short_names(paths, "policies")
modes = [("greedy", 0.0, 1)] if greedy else []  # (name, temperature, responses to each prompt)
modes += [("sampled", temperature, samples)] if samples else []
if not modes:
    raise BadConfig("greedy = False and samples = 0 leave nothing to do; type --samples=4")
# of pass@k, majority@k and best@k: 1, 2, 4, ... and all samples
ks = sorted({2**i for i in range(samples.bit_length())} | {samples}) if samples else []

terms = reward_terms(reward_functions) if reward_functions else []  # [(weight, name, function)]
for name, key, path in (("reward_model", "reward_path", reward_path),
                        ("judge", "judge_path", judge_path)):
    if path and name not in [term[1] for term in terms]:
        terms += reward_terms(name)
    if not path and name in [term[1] for term in terms]:
        raise BadConfig(f"reward_functions names {name}; say which by --{key}=FOLDER")
rewards = [name for _, name, _ in terms]
# the scores that are measured; the last is the weighted sum of several rewards
known = list(dict.fromkeys(["accuracy", *rewards, *["scores"] * (len(terms) > 1)]))
# a reward may be called as another figure is: the rule length is not the length in tokens
metric_of = {score: score if score in ("accuracy", "scores") else f"reward/{score}"
             for score in known}
if right_by not in known:
    raise BadConfig(f"right_by = {right_by!r} is not measured; there are {', '.join(known)}, and "
                    "what --reward_functions adds")
ranked_by = known[-1] if terms else right_by  # who wins, and which of k samples is the best

if not prompts_path:
    raise BadConfig("prompts_path is empty; type --prompts_path=FILE")
rows = read_prompts(prompts_path, terms, fields)
if by and not any(by in row for row in rows):
    raise BadConfig(f"by = {by!r}: no row of {prompts_path} has this field; the first "
                    f"one has {', '.join(rows[0])}")
picked = spread(len(rows), limit, seed)  # the numbers of the rows whose prompts are answered
config["max_new_tokens"] = max_new_tokens = max_new_tokens or max(map(response_length, paths)) or 48
say(f"a response ends after {max_new_tokens} tokens (--max_new_tokens)")
out = out.removesuffix(".jsonl").removesuffix(".json")
read = files_of(prompts_path) + [judge_template, chat_template]
read += [*paths, reward_path, judge_path]  # folders: nothing in them is replaced
made = {  # how these files begin
    ".jsonl": rb'\{"policy": .*"mode": "(greedy|sampled)", "row": \d+, "sample": \d+, "prompt": ',
    ".json": rb'\{\s*"config": \{\s*"policies": '}
together.alone(lambda: [check_writable(f"{out}{ending}", reads=read, made=begins)
                        for ending, begins in made.items()])
if right_by == "accuracy" and not any("answer" in row for row in rows):
    warn(f"{prompts_path} has no answers: there will be no accuracy, pass@k and majority@k")
tokenizers = [load_tokenizer(path, chat_template, template_kwargs, system_prompt, stop_strings)
              for path in paths]
system = plain(dtype, micro_batch_tokens=0, reward_timeout=reward_timeout,
               code_seconds=code_seconds, environment=environment, tools=tools,
               max_turns=max_turns)
answering = [None] * len(paths)  # what answers each policy
if environment or tools:
    answering = [Environment(system, tokenizer) for tokenizer in tokenizers]
precision = autocast(system, device)
reward_model = reward_reader = judge = None
if reward_path:
    reward_model = load(reward_path, "reward", system, device, "scalar")
    reward_reader = load_reader(reward_path, reward_model, tokenizers[0])
if judge_path:
    judge = Judge(load(judge_path, "judge", system, device), load_tokenizer(judge_path), judge_path,
                  judge_template)
    check_tokenizer_fits(judge.tokenizer, judge.model, judge_path)
    judge.check_rows(rows, prompts_path, max_new_tokens)

# (name, path, tokenizer, what answers, tokenizer of the reward model, ids of the prompts) of each
checked = []
for name, path, tokenizer, answers in zip(names, paths, tokenizers, answering, strict=True):
    policy = outline(path, "lm", dtypes(system)[0])
    check_tokenizer_fits(tokenizer, policy, path)
    reward_tokenizer = reward_reader or tokenizer
    models = in_memory(policy=policy, reward_model=reward_model)
    ids = encode_for_all(rows, prompts_path, max_new_tokens, models, tokenizer)
    checked.append((name, path, tokenizer, answers, reward_tokenizer, ids))
together.agree(config | {"the prompts": rows})

# --------------------------------------------------------------------------------------------------
# responses: one policy after the other is loaded and answers all prompts. All responses are cut
# into batches; each rank takes every world_size-th of them

truncation = warpers(top_k, top_p, min_p)
records = []  # of this rank: a dict for each response
for name, path, tokenizer, answers, reward_tokenizer, ids in checked:
    policy = load(path, "policy", system, device)
    for mode, heat, count in modes:
        picks = [(i, sample) for i in picked for sample in range(count)]
        batches = [picks[i:i + batch_size] for i in range(0, len(picks), batch_size)]
        for first in range(0, len(batches), world_size):
            # every rank goes through as many batches, for scoring may be a collective; the last
            # ones of some ranks are empty
            mine = batches[first + rank] if first + rank < len(batches) else []
            where = [i for i, _ in mine]
            noise, names_of = (seed, "sample", 0), (where, [sample for _, sample in mine])
            with precision:
                turn = turns(policy, tokenizer, noise, names_of, max_new_tokens, heat,
                             truncation=truncation if heat else None)
                batch = respond(turn, [rows[i] for i in where], [ids[i] for i in where], noise,
                                names_of, max_new_tokens, answers)  # COLLECTIVE
            batch |= texts_of([(rows[i], ids[i]) for i in where], batch, tokenizer)
            batch |= score_responses(batch, len(mine) * world_size, terms, reward_model, judge,
                                     reward_tokenizer, micro_batch_size, system, device)
            if mine and terms:
                add_up(batch, terms)
            texts = whole_responses(batch)
            columns = {score: batch[metric].tolist()  # an empty batch has no scores
                       for score, metric in metric_of.items() if metric in batch}
            for j, (i, sample) in enumerate(mine):
                records.append(dict(
                    policy=name, mode=mode, row=i, sample=sample, prompt=rows[i]["prompt"],
                    text=batch["completions"][j], answer=final_answer(texts[j]),
                    finished=bool(batch["finished"][j]),
                    length=int(batch["response_mask"][j].sum()),
                    # NaN: it does not apply to this response
                    scores={score: x[j] for score, x in columns.items() if math.isfinite(x[j])}))
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

# --------------------------------------------------------------------------------------------------
# figures: each is a mean over the prompts, of one number a prompt

by_prompt = {}  # (policy, mode) -> for each prompt, the records of its responses
for record in records:
    prompts = by_prompt.setdefault((record["policy"], record["mode"]), {i: [] for i in picked})
    prompts[record["row"]].append(record)
by_prompt = {key: list(prompts.values()) for key, prompts in by_prompt.items()}


def scores_of(prompt, name):
    """The scores of that name of the responses to a prompt, a list; without those it lacks."""
    return [record["scores"][name] for record in prompt if name in record["scores"]]


def scored(prompts, name):
    """The prompts whose responses all have a score of that name."""
    return [prompt for prompt in prompts if len(scores_of(prompt, name)) == len(prompt)]


def estimate(values):
    """The mean over the prompts, and half of its 95 % interval: None for a single prompt."""
    middle, error = mean_and_error(values)
    return dict(mean=middle, error=None if math.isnan(error) else error)


def figures_of(prompts, mode):
    """{metric: its estimate} of the responses to these prompts."""
    numbers = {}  # metric -> one number a prompt
    for score in known:
        each = [scores_of(prompt, score) for prompt in prompts]
        numbers[metric_of[score]] = [fmean(values) for values in each if values]
    judged = scored(prompts, right_by)
    best_by = {score: scored(scored(prompts, ranked_by), score) for score in known if terms}
    for x in ks if mode == "sampled" else ():
        numbers[f"pass@{x}"], numbers[f"majority@{x}"] = [], []
        for prompt in judged:
            right = [float(value == 1.0) for value in scores_of(prompt, right_by)]
            numbers[f"pass@{x}"].append(pass_at_k(samples, int(sum(right)), x))
            if right_by == "accuracy":
                answers = [record["answer"] for record in prompt]
                numbers[f"majority@{x}"].append(majority_at_k(answers, right, x))
        # the best of k samples by the reward: its own score, and what else is measured of it
        for score, with_both in best_by.items():
            numbers[f"best@{x} {score}"] = [
                best_of_k(scores_of(prompt, ranked_by), scores_of(prompt, score), x)
                for prompt in with_both]
    numbers["length"] = [fmean([record["length"] for record in prompt]) for prompt in prompts]
    numbers["finished"] = [fmean([record["finished"] for record in prompt]) for prompt in prompts]
    return {f"{mode} {metric}": estimate(values) for metric, values in numbers.items() if values}


figures = {name: {} for name in names}  # policy -> "mode metric" -> its estimate
groups = {}  # value of by -> (how many prompts have it, figures of those)
for (name, mode), prompts in by_prompt.items():
    figures[name] |= figures_of(prompts, mode)
    values = [str(rows[prompt[0]["row"]].get(by)) for prompt in prompts]
    for value in sorted(set(values)) if by else ():
        mine = [prompt for prompt, its in zip(prompts, values, strict=True) if its == value]
        _, its = groups.setdefault(value, (len(mine), {name: {} for name in names}))
        its[name] |= figures_of(mine, mode)

# the first policy against each other one, prompt by prompt
duels, last = [], modes[-1][0]  # of the samples, where there are some
for other in names[1:]:
    both = [(scores_of(ours, ranked_by), scores_of(theirs, ranked_by)) for ours, theirs
            in zip(by_prompt[names[0], last], by_prompt[other, last], strict=True)]
    values = [wins(ours, theirs) for ours, theirs in both if ours and theirs]
    if values:
        won = estimate(values)
        duels.append(dict(policy=names[0], against=other, by=ranked_by, responses=last,
                          prompts=len(values), win_rate=won["mean"], error=won["error"]))

# --------------------------------------------------------------------------------------------------
# what is printed and written, by rank 0


def write():
    """OUT.jsonl and OUT.json."""
    with written(f"{out}.jsonl") as f:
        f.writelines(json.dumps(record) + "\n" for record in records)
    with written(f"{out}.json") as f:
        found = dict(config=config, prompts=len(picked), policies=figures, win_rates=duels)
        if by:
            found["groups"] = {value: dict(prompts=count, policies=its)
                               for value, (count, its) in groups.items()}
        json.dump(found, f, indent=2)


def shown(middle, error, form):
    """A mean with its interval, if it has one."""
    return f"{middle:{form}}" + ("" if error is None else f" ±{error:{form}}")


def print_table(title, figures):
    """A line for each metric, a column for each policy."""
    wide = max(16, *(len(name) + 2 for name in names))
    print(f"\n{title}\n{'':<24}" + "".join(f"{name:>{wide}}" for name in names))
    for metric in dict.fromkeys(metric for its in figures.values() for metric in its):
        form = ".1f" if metric.endswith("length") else ".3f"
        cells = [shown(*its[metric].values(), form) if metric in its else "nan"
                 for its in figures.values()]
        print(f"{metric:<24}" + "".join(f"{cell:>{wide}}" for cell in cells))


if rank == 0:
    for value, (count, its) in groups.items():
        print_table(f"{count} prompts with {by} = {shorten(value)}", its)
    print_table(f"{len(picked)} prompts, with 95 % confidence intervals of the means over prompts",
                figures)
    for duel in duels:
        won = shown(duel["win_rate"], duel["error"], ".1%")
        print(f"{duel['policy']} wins {won} against {duel['against']} (by {duel['by']}, ties count "
              f"half, {duel['prompts']} prompts)")
together.alone(write)
if rank == 0:
    print(f"saved {out}.json and {out}.jsonl")
launch.finish()
