r"""
Talk to a policy: one that these scripts have saved, or a language model of the hub.

python tools/sample.py --policy_path=out/arithmetic_ppo/policy    # type a prompt, get a response
python tools/sample.py --policy_path=out/arithmetic_ppo/policy --prompt="123+456=" --samples=4

Responses to the prompts of a file, each with its score:

python tools/sample.py --policy_path=out/arithmetic_ppo/policy \
    --prompts=data/arithmetic/rl_val.jsonl --limit=5 --reward_path=out/arithmetic_rm/reward_model

Each line that you type is a new conversation: the policy does not see the earlier ones. A policy
with a chat template answers it as a chat message, behind the system message of the run's first row,
if that has one and you type no system_prompt; another one continues it as plain text. Keys that you
do not type, such as temperature, system_prompt and environment, are those of the policy's run.
An environment or tools are Python files: with those of a run it takes --trust_code=True.
"""
import os
import sys

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402  first: it must be imported before torch
from batches import texts_of  # noqa: E402
from errors import BadInput, visible  # noqa: E402
from load import load, load_reward_model  # noqa: E402
from prompts import Rows, encode_prompts, prompt_row, read_rows  # noqa: E402
from ranks import choose_device  # noqa: E402
from rewards import reward_terms, score_batch  # noqa: E402
from rollout import sample_batch  # noqa: E402
from tools.runs import ASKED, as_in_run, system_message_of, texts_as_read  # noqa: E402

# -------------------------------------------------------------------------------------------------
policy_path = "out/arithmetic_ppo/policy"  # folder or hub name of a language model
prompt = ""  # one prompt; empty = see prompts
prompts = ""  # JSONL file with "prompt"; both empty = each line of standard input is a prompt
limit = 0  # with prompts: how many of them, 0 = all [>= 0]
samples = 1  # responses to each prompt [1..1000000]
reward_path = ""  # folder or hub name of a reward model, whose score is printed; empty = none
max_new_tokens = 48  # longest response [1..1000000]
temperature = 1.0  # 0 = always the most likely token [>= 0]
seed = 1  # decides the responses [>= 0]
trust_code = False  # run the FILE.py:f that the run's config.json names? It can do anything
config, system = configure(globals(), "config/keys.py", rollout_batch_size=64,
                           given=as_in_run(sys.argv[1:], "policy_path", policy_path, ASKED))
# -------------------------------------------------------------------------------------------------
if prompt and prompts:
    raise BadInput("type --prompt or --prompts, not both")
device = choose_device(system.device_type)
policy = load(policy_path, "policy", system, device)
models, terms = dict(policy=policy), []
if reward_path:
    models["reward_model"] = load_reward_model(reward_path, policy, system, device)
    terms = reward_terms("reward_model")


def answer(rows, where, first=0):
    """
    Print `samples` responses to the prompt of each row, batch by batch, with their scores where
    there is a reward model. where: the rows are from there, for errors. first: the number of the
    first prompt; seed and number decide the noise.
    """
    rows = encode_prompts(Rows(rows, where), models, max_new_tokens, system)
    at_once = system.rollout_batch_size // samples or 1
    for start in range(0, len(rows), at_once):
        numbers = range(start, min(start + at_once, len(rows)))
        batch = sample_batch(
            policy, rows, numbers, (seed, "sample", 0), max_new_tokens, temperature, system, device,
            samples, [first + number for number in numbers])
        if terms:
            score_batch(batch, rows, terms, policy, models["reward_model"], 16, system, device)
        texts = texts_of(batch, rows, policy.tokenizer)
        for i, text in enumerate(texts_as_read(texts)):
            if i % samples == 0 and (prompt or prompts):
                asked = texts["rows"][i]["prompt"]
                print(visible(f"> {asked if isinstance(asked, str) else asked[-1]['content']}"))
            cut = "" if batch["finished"][i] else " [cut off]"
            score = f"   (score {batch['scores'][i]:.2f})" if terms else ""
            print(f"{visible(text) or '[empty]'}{cut}{score}", flush=True)


def as_row(text):
    """A row of data with this text as its prompt: a chat message, if there is a chat template."""
    return prompt_row(dict(prompt=[*system_message, dict(role="user", content=text)]
                           if policy.tokenizer.chats else text))


system_message = []  # as the policy's run has it
if policy.tokenizer.chats and not any(arg.startswith("--system_prompt=") for arg in sys.argv):
    system_message = system_message_of(policy_path)
if system_message and not prompts:
    print(visible(f"system: {system_message[0]['content']}"))
if prompts:
    rows = read_rows(prompts, prompt_row, system.fields)
    answer(rows[:limit or len(rows)], prompts)
elif prompt:
    answer([as_row(prompt)], "--prompt")
else:
    if sys.stdin.isatty():
        print("type a prompt and press Enter; Ctrl-D ends")
    for number, line in enumerate(sys.stdin):
        if line.strip():
            answer([as_row(line.rstrip("\n"))], f"line {number + 1}", number)
