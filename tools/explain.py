"""
One response under the microscope: every number of a PPO or GRPO iteration, token by token;
docs/algorithms.md explains one.

python tools/explain.py --run=out/arithmetic_ppo --prompt="123+456="
python tools/explain.py --run=out/arithmetic_grpo --prompt="123+456=" --answer=579

python tools/explain.py --run=out/arithmetic_ppo --iteration=7 --out=out/a.html  # all of it

Nothing is computed by a copy of the algorithm. The tool runs the script itself for one more
iteration, from the run's last checkpoint and with the run's keys, and looks at the variables that
the script then has. The prompt takes the first place of the iteration's batch; the others are the
run's own. At the end the script goes over the batch once more without taking a step: its numbers
are then the loss as one more step would see it. All this happens in a temporary folder. Rewards of
your own, an environment and tools of the run are Python files: then it takes --trust_code=True.

    policy, ref, new      log-probs of the token: as sampled, by the reference, after the update
    KL, reward            policy - ref, if it is k1; -kl_coef * KL, at the end with the score
    value                 the sum of the rewards from here on, as the value model expects it
    delta, raw, white     PPO's advantage: of this token, with all later ones, and whitened
    ret                   the return, raw + value
    advantage             GRPO's: of the response against its group
    ratio, clip, loss     exp(new - policy); whether the clip has taken the gradient away; and the
                          loss of one more step
"""
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402  first: it must be imported before torch

import metrics  # noqa: E402
import prompts  # noqa: E402
import rewards  # noqa: E402
import rollout  # noqa: E402
from batches import texts_of  # noqa: E402
from checkpoint import find_checkpoint  # noqa: E402
from errors import BadInput, visible  # noqa: E402
from run import Run  # noqa: E402
from tools.outputs import check_outputs  # noqa: E402
from tools.iteration import (  # noqa: E402
    PAGE, columns_of, keys_of_tool, run_again, script_of, show)
from tools.runs import config_of, texts_as_read  # noqa: E402

# -------------------------------------------------------------------------------------------------
run = "out/arithmetic_ppo"  # the folder of a run of ppo.py or grpo.py that has a checkpoint
prompt = "123+456="  # the policy answers it
answer = ""  # the right answer, where a reward needs it; empty = that of the run's data
seed = 1  # decides the response: another seed, another response [>= 0]
# or all responses of an iteration, as a page; tools/iteration.py
out = ""  # the page, FILE.html; empty = the table of one response
iteration = -1  # which; -1 = the one behind the last checkpoint [>= -1]
trust_code = False  # run the FILE.py:f that the run's config.json names? It can do anything
config, _ = configure(globals())
# -------------------------------------------------------------------------------------------------
if out or iteration >= 0:
    check_outputs("--out", [out], [PAGE])
    show(run, iteration, out, trust_code)
    sys.exit()

# -------------------------------------------------------------------------------------------------
# the run: its script, its keys, its last checkpoint

checkpoint, state = find_checkpoint(run)
if not checkpoint:
    raise BadInput(f"run {run!r} has no checkpoint; give the out_dir of a run that has saved one")
keys = config_of(checkpoint)
script = script_of(keys, f"{checkpoint}/config.json", trust_code)
if keys["roles"] or keys["staleness"]:
    raise BadInput(f"{run} has roles or staleness: its batches are sampled ahead of the update")
token_ids, iteration = keys["token_ids"], state["iteration"]
passes = "num_iterations" if "group_size" in keys else "ppo_epochs"
steps = keys[passes]  # so many passes train; one more looks
keys = keys_of_tool(keys) | {passes: steps + 1}
if "max_refills" in keys:
    keys["max_refills"] = 0  # the group stays, even if all its scores are equal
if iteration >= keys["max_iters"]:  # the run is over: its learning rate would be 0
    keys |= {name: "constant" for name in ("lr_decay", "value_lr_decay") if name in keys}
    keys["max_iters"] = iteration + 1
    print("the run is over: this update has the peak learning rate")

# -------------------------------------------------------------------------------------------------
# one more iteration of it, with a few functions of the house changed

names = {}  # the script's variables
seen = {}  # column -> (n,): the script's sums of the first response, in its last pass
encode_prompts, noise, add_up = prompts.encode_prompts, rollout.response_uniforms, metrics.add_up
take_step = Run.step


def encode_with_the_prompt(rows, models, *rest):
    """prompts.encode_prompts, where the prompt takes the place of the batch's first row."""
    encode_prompts(rows, models, *rest)
    if rows.path == keys["prompts_path"]:
        count = keys["batch_size"] // keys.get("group_size", 1)
        first = prompts.batch_rows(keys["seed"], iteration, count, rows)[0]
        chat = rows[0]["prompt"] if isinstance(rows[0]["prompt"], list) else []
        system_message = [message for message in chat if message["role"] == "system"]
        asked = [*system_message, dict(role="user", content=prompt)] if chat else prompt
        known = [row for row in rows if row["prompt"] == asked]  # of the data, with all its fields
        known = known or [row for row in names["eval_rows"] if row["prompt"] == asked]
        row = known[0] if known else prompts.prompt_row(dict(prompt=asked))
        row = prompts.Rows([row | (dict(answer=answer) if answer else {})],
                           f"--prompt={prompt} --answer={answer}")
        terms = names["terms"]
        by_answer = {"accuracy", "math"} & {name for _, name, _ in terms}
        if by_answer and row[0].get("answer") is None:
            raise BadInput("a reward of this run needs the right answer; type --answer=579")
        rewards.check_rows(terms, row)
        row.path = "--prompt"
        encode_prompts(row, models, *rest)
        rows[first], rows.ids[first] = row[0], row.ids[0]
    return rows


def add_up_and_look(sums, mask, columns):
    """metrics.add_up, where the losses of the first response are kept."""
    if "loss/policy" in columns and 0 in names["mb"]["index"]:
        row = names["mb"]["index"].tolist().index(0)
        new = names["logprobs"]
        kept = dict(new=new, ratio=(new - names["mb"]["old_logprobs"]).exp(),
                    clip=columns["policy/clipfrac"], loss=columns["loss/policy"])
        seen.update({name: x.detach()[row][mask[row]] for name, x in kept.items()})
    add_up(sums, mask, columns)


def step(*args):
    """Run.step, but no step in the pass that only looks."""
    return take_step(*args) if names["epoch"] < steps else {}


prompts.encode_prompts, metrics.add_up, Run.step = encode_with_the_prompt, add_up_and_look, step
Run.log = lambda *_, **__: sys.exit()  # the iteration is over
# the run's own seed decides which prompts are in the batch; the noise may have another
rollout.response_uniforms = lambda _, *rest: noise(seed, *rest)
prompts.hash_of_ids = lambda _: token_ids  # the prompts are the run's but for the one asked about

run_again(script, keys, checkpoint, names)

# -------------------------------------------------------------------------------------------------
# the table: the first response in the script's variables

batch, mask = names["batch"], names["batch"]["response_mask"]
tokenizer, group = names["policy"].tokenizer, keys.get("group_size", 1)
texts = texts_of({name: x[:group] for name, x in batch.items()}, names["train_rows"], tokenizer)
said = texts_as_read(texts)
ids = batch["tokens"][0][mask[0]].tolist()
columns = {"#": list(range(1, len(ids) + 1)),
           "token": ["EOS" if i in tokenizer.eos_ids else ascii(tokenizer.decode([i]))
                     for i in ids]}
columns |= {name: x[0][mask[0]].tolist() for name, x in columns_of(names).items()}
# grpo.py makes no step where all advantages are 0: then nothing was seen
columns |= {name: x.tolist() for name, x in seen.items()}


def cell(x, digits=3):
    """The text of a number, a truth or a text in the table; z: there is no -0.000."""
    if isinstance(x, bool):
        return "yes" if x else "no"
    return f"{x:z.{digits}f}" if isinstance(x, float) else str(x)


def print_table(columns):
    """{name: values}: names above, text on the left, numbers on the right; up to 100 letters."""
    for digits in (3, 2, 1):
        shown = [[name, *(cell(x, digits + (name in ("KL", "reward"))) for x in values)]
                 for name, values in columns.items()]
        wide = [max(map(len, cells)) for cells in shown]
        if sum(wide) + len(wide) - 1 <= 100:
            break
    for line in zip(*shown, strict=True):
        print(" ".join(text.ljust(n) if name in ("token", "response") else text.rjust(n)
                       for name, text, n in zip(columns, line, wide, strict=True)).rstrip())


score = batch["scores"][0].item()
parts = [f"{weight:g} * {name} {cell(batch[f'reward/{name}'][0].item())}"
         for weight, name, _ in names["terms"]]
print(visible(f"one response of {run}: iteration {iteration} of {os.path.basename(script)}, from "
              f"{os.path.basename(checkpoint)}\n"))
asked = texts["rows"][0]["prompt"]
leads = [m["content"] for m in asked if m["role"] == "system"] if isinstance(asked, list) else []
for lead in leads or [keys["system_prompt"]] * bool(keys["system_prompt"]):
    print(visible(f"system    {lead!r}"))
print(visible(f"prompt    {prompt!r}\nresponse  {said[0]!r}"))
print(f"score     {cell(score)} = {' + '.join(parts)}"
      + ("" if batch["finished"][0] else "; cut off at max_new_tokens"))
print(f"shaped    {cell(names['scores'][0].item())}, the score after penalties\n")
if group > 1:
    print_table({
        "#": list(range(1, group + 1)), "score": names["scores"][:group].tolist(),
        "advantage": batch["advantages"][:group, 0].tolist(),
        "tokens": mask[:group].sum(1).tolist(),
        "response": [text if len(text) <= 70 else f"{text[:68]}.." for text in map(repr, said)]})
    print()
print_table(columns)
print("\n" + __doc__.rstrip().rpartition("\n\n")[2])  # what the columns are
