"""
Judge one policy or several on held-out prompts: how often they are right, pass@k, majority@k, best
of k, rewards, lengths, and how often one wins against another.

python tools/eval.py --policies=out/arithmetic_ppo/policy
python tools/eval.py --policies=out/arithmetic_sft/policy,out/arithmetic_ppo/policy --samples=8
torchrun --nproc_per_node=8 tools/eval.py --policies=out/gsm8k_grpo/policy --samples=16

Each prompt is answered once greedily, and `samples` times at the temperature. It prints a table,
and leaves OUT.json, the table with all its digits, and OUT.jsonl, a line for each response. With
several policies the first one is compared with each other one. Keys that you do not type, such as
prompts_path, temperature, environment and reward_functions, are those of the policies' runs (of
several runs, the first that sets the key): so an evaluation is that of the training. Rewards of
your own, an environment and tools are Python files: with those of a run it takes --trust_code=True.
"""
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure, write_json, write_text  # noqa: E402  before torch

import json  # noqa: E402
import math  # noqa: E402
import signal  # noqa: E402
from statistics import fmean  # noqa: E402

import parallel  # noqa: E402
import ranks  # noqa: E402
from batches import texts_of  # noqa: E402
from errors import BadInput, say, shorten  # noqa: E402
from grading.answers import final_answer, same_answer, whole_responses  # noqa: E402
from load import load, load_reward_model  # noqa: E402
from options.hub import check_name  # noqa: E402
from prompts import encode_prompts, read_prompts, rows_to_evaluate  # noqa: E402
from rewards import check_rows, reward_terms, score_batch  # noqa: E402
from rollout import sample_batch  # noqa: E402
from tools.outputs import check_outputs, files_of  # noqa: E402
from tools.runs import ASKED, JUDGED, as_in_run, estimate, split_paths  # noqa: E402

# -------------------------------------------------------------------------------------------------
policies = "out/arithmetic_ppo/policy"  # folders or hub names, separated by commas
prompts_path = "data/arithmetic/rl_val.jsonl"  # "prompt", and "answer" for accuracy; docs/data.md
limit = 0  # how many prompts, from all over the file, 0 = all [>= 0]
out = "out/eval"  # OUT.json and OUT.jsonl are written, and replaced if they are there
# sampling
samples = 4  # responses to each prompt at the temperature, 0 = none [0..1000000]
max_new_tokens = 48  # longest response [1..1000000]
temperature = 1.0  # of the samples [> 0]
batch_size = 256  # responses at once, over all ranks [1..1000000]
seed = 1  # decides the samples [>= 0]
# judging
reward_functions = "accuracy"  # a sum, as in training; its sum decides who wins, and which is best
reward_path = ""  # a reward model, where reward_functions names reward_model
right_by = "accuracy"  # a response is right where this reward is 1, such as code
by = ""  # a field of the rows, such as task: the figures for each of its values, too
micro_batch_size = 16  # responses that reward model and judge read at once [>= 1]
trust_code = False  # run the FILE.py:f that the run's config.json names? It can do anything
config, system = configure(globals(), "config/keys.py",
                           given=as_in_run(sys.argv[1:], "policies", policies, ASKED | JUDGED))
# -------------------------------------------------------------------------------------------------
# responses: one policy after the other is loaded and answers all prompts

device = ranks.init(system)
ranks.on_requests(signal.SIG_DFL)  # they end the tool at once: nothing is to be saved
parallel.alone(lambda: check_outputs(
    "--out", [f"{out}.json", f"{out}.jsonl"], files_of(prompts_path)))
paths = split_paths(policies, "policies")  # {short name: path}
terms = reward_terms(reward_functions)  # [(weight, name, function)]
reward_names = [name for _, name, _ in terms]
if "reward_model" in reward_names and not reward_path:
    raise BadInput("reward_model is among the rewards: say which by --reward_path=FOLDER")
right = right_by if right_by == "accuracy" else f"reward/{right_by}"
if right_by not in ["accuracy", *reward_names]:
    raise BadInput(f"right_by = {right_by!r} is not measured; name it in --reward_functions, too")
modes = {"greedy": (0.0, 1)} | ({"sampled": (temperature, samples)} if samples else {})
for path in paths.values():  # all of them, before the first one answers
    check_name(path)
reward_model, all_rows = None, None
responses = {}  # (policy, mode, row): the records of its responses, a dict for each
known = {}  # what was said to a prompt: its scores
for policy_name, path in paths.items():
    policy = load(path, "policy", system, device)
    models = dict(policy=policy)
    if "reward_model" in reward_names:
        if reward_model is None:
            reward_model = load_reward_model(reward_path, policy, system, device)
        models["reward_model"] = reward_model
    rows = read_prompts(prompts_path, system.fields)
    if not rows:
        raise BadInput("prompts_path is empty; type --prompts_path=FILE")
    check_rows(terms, rows, policy.tokenizer)
    encode_prompts(rows, models, max_new_tokens, system)
    if by and not any(by in row for row in rows):
        raise BadInput(f"by = {by!r}: no row of {prompts_path} has this field")
    if all_rows not in (None, rows):
        raise BadInput(f"{path}: its tokenizer drops other rows; raise max_prompt_tokens")
    all_rows = rows
    picked = rows_to_evaluate(len(rows), limit, seed)  # these are answered
    for mode, (heat, count) in modes.items():
        at_once = batch_size // count or 1
        for start in range(0, len(picked), at_once):
            numbers = picked[start:start + at_once]
            # the noise of the run's own evaluations: with equal prompts they see the same sample 0
            batch = sample_batch(  # COLLECTIVE
                policy, rows, numbers, (seed, "eval", 0), max_new_tokens, heat, system, device,
                count, range(start, start + len(numbers)))
            score_batch(batch, rows, terms, policy, reward_model, micro_batch_size, system, device)
            texts = texts_of(batch, rows, policy.tokenizer)
            measured = {name: x.tolist() for name, x in batch.items()
                        if name in ("accuracy", "scores") or name.startswith("reward/")}
            lengths, whole = batch["response_mask"].sum(1).tolist(), whole_responses(texts)
            for i, row in enumerate(batch["row"].tolist()):
                record = dict(
                    policy=policy_name, mode=mode, row=row, sample=i % count,
                    prompt=rows[row]["prompt"], text=texts["completions"][i],
                    answer=final_answer(whole[i]), finished=batch["finished"][i].item(),
                    length=lengths[i],
                    # NaN: it does not apply to this response
                    scores={name: x[i] for name, x in measured.items() if math.isfinite(x[i])})
                if "dialogues" in texts:
                    record["messages"] = texts["dialogues"][i]
                # equal responses to a prompt are a tie: they get the scores of the first one, for
                # the last bits of a model's scores depend on the responses beside them
                said = json.dumps([record.get(x) for x in (
                    "row", "text", "messages", "finished", "length")])
                record["scores"] = known.setdefault(said, record["scores"])
                responses.setdefault((policy_name, mode, row), []).append(record)
            say(f"{policy_name}, {mode}: {start + len(numbers)} of {len(picked)} prompts")
    del policy, models  # before the next one is loaded

# -------------------------------------------------------------------------------------------------
# figures of the samples to one prompt: lists of n texts or numbers


def best_of_k(scores, values, k):
    """
    The value of the best of k samples, the one with the highest score, of equal ones any: the mean
    over all sets of k of the n samples. Scores 3, 1, 2, which are their own values, and k = 2: the
    best of the sets are 3, 3, 2, so 2.667. With whether each sample is right for both it is pass@k,
    unbiased (Chen et al., arXiv 2107.03374, equation 1): of 4 samples one is right, k = 2: 0.5.
    """
    n, total = len(scores), 0.0
    for score in set(scores):
        tied = [value for own, value in zip(scores, values, strict=True) if own == score]
        below = sum(own < score for own in scores)
        # the sets without a higher one, less the sets without one of these, too
        sets = math.comb(below + len(tied), k) - math.comb(below, k)
        total += sets * fmean(tied)
    return total / math.comb(n, k)


def majority_at_k(answers, truths, k):
    """
    How often the answer is right that most of k samples give: of the n // k groups of k samples. Of
    answers that are given equally often the first one counts. "" has no vote.
    """
    won = []
    for start in range(0, len(answers) - k + 1, k):
        voters = [i for i in range(start, start + k) if answers[i]]
        classes = []  # lists of samples with the same answer
        for i in voters:
            same = next((c for c in classes if same_answer(answers[i], answers[c[0]])), None)
            if same:
                same.append(i)
            else:
                classes.append([i])
        won.append(truths[max(classes, key=len)[0]] if classes else 0)
    return fmean(won)


def wins(ours, theirs):
    """How often one of our scores is above one of theirs, over all pairs; a tie counts half."""
    return fmean((a > b) + 0.5 * (a == b) for a in ours for b in theirs)


# -------------------------------------------------------------------------------------------------
# the table: each figure is a mean over the prompts

def scores_of(prompt, *metrics):
    """A list for each metric: the scores of a prompt's responses; None where some have none."""
    if all(metric in record["scores"] for record in prompt for metric in metrics):
        return [[record["scores"][metric] for record in prompt] for metric in metrics]


def figures_of(prompts, mode):
    """{name: its estimate} of the responses to these prompts."""
    metrics = ["accuracy", *(f"reward/{name}" for name in reward_names if name != "accuracy")]
    metrics += ["scores"] * (len(terms) > 1)
    # of k = 1 all would repeat a mean, but pass@1 of a right_by that may be one half
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples}) if samples else []
    numbers = {}
    for prompt in prompts:
        for metric in metrics:
            scores = [record["scores"][metric] for record in prompt if metric in record["scores"]]
            if scores:  # a reward may apply to some responses only
                numbers.setdefault(metric, []).append(fmean(scores))
        for k in ks if mode == "sampled" else ():
            judged = scores_of(prompt, right)
            if judged and (k > 1 or right_by != "accuracy"):
                truths = [x == 1 for x in judged[0]]
                numbers.setdefault(f"pass@{k}", []).append(best_of_k(truths, truths, k))
                if right_by == "accuracy":
                    answers = [record["answer"] for record in prompt]
                    numbers.setdefault(f"majority@{k}", []).append(
                        majority_at_k(answers, truths, k))
            for metric in metrics if k > 1 and reward_names != ["accuracy"] else ():
                if judged := scores_of(prompt, "scores", metric):
                    numbers.setdefault(f"best@{k} {metric}", []).append(best_of_k(*judged, k))
        for name in ("length", "finished"):
            numbers.setdefault(name, []).append(fmean(record[name] for record in prompt))
    return {f"{mode} {name}": estimate(values) for name, values in numbers.items()}


def table_of(numbers):
    """{policy: {"mode figure": its estimate}} of the prompts of these rows."""
    return {name: {figure: its for mode in modes for figure, its in figures_of(
        [responses[name, mode, i] for i in numbers], mode).items()} for name in paths}


groups = {}  # value of the field `by`: its prompts
for i in picked if by else ():
    groups.setdefault(str(all_rows[i].get(by)), []).append(i)
groups = {value: dict(prompts=len(numbers), policies=table_of(numbers))
          for value, numbers in groups.items()}
table, mode, first = table_of(picked), list(modes)[-1], next(iter(paths))
duels = []  # the first policy against each of the others
for other in list(paths)[1:]:
    pairs = [(scores_of(responses[first, mode, i], "scores"),
              scores_of(responses[other, mode, i], "scores")) for i in picked]
    won = [wins(*ours, *theirs) for ours, theirs in pairs if ours and theirs]
    if won:
        duels.append(dict(policy=first, against=other, prompts=len(won), wins=estimate(won)))


def cell(its, form):
    """An estimate in a table."""
    if its is None:
        return "-"
    mean, error, low, high = (format(x, form) if x is not None else "?" for x in (
        its["mean"], its["error"], its["low"], its["high"]))
    # a length is no share, even if all are 1
    return f"{mean} ({low} to {high})" if its["wilson"] and form != ".1f" else f"{mean} ±{error}"


def show(title, table):
    """Print a table of policies."""
    lines = [["", *table]]
    for figure in dict.fromkeys(figure for its in table.values() for figure in its):
        form = ".1f" if figure.endswith(" length") else ".3f"
        lines.append([figure, *(cell(its.get(figure), form) for its in table.values())])
    left, *wide = (max(map(len, column)) + 2 for column in zip(*lines, strict=True))
    print(f"\n{title}")
    for figure, *cells in lines:
        print(f"{figure:<{left}}" + "".join(
            f"{text:>{max(n, 18)}}" for text, n in zip(cells, wide, strict=True)))


def finish():
    """Print the tables; write OUT.jsonl and OUT.json."""
    for value, group in groups.items():
        show(f"{group['prompts']} prompts with {by} = {shorten(value)}", group["policies"])
    show(f"{len(picked)} prompts, with 95 % confidence intervals of the means over prompts", table)
    for duel in duels:
        print(f"{first} wins {cell(duel['wins'], '.1%')} against {duel['against']} (by scores, "
              f"ties count half, {duel['prompts']} prompts)")
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    write_text(f"{out}.jsonl", "".join(
        json.dumps(record) + "\n" for records in responses.values() for record in records))
    write_json(f"{out}.json", dict(config=config, prompts=len(picked), policies=table,
                                   win_rates=duels, groups=groups))
    print(f"saved {out}.json and {out}.jsonl")


parallel.alone(finish)
ranks.leave()
