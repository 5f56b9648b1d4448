r"""
Talk to a model: one that these scripts have saved, or a language model of the hub.

python tools/sample.py --policy_path=out/arithmetic_ppo/policy    # type a prompt, get a response
python tools/sample.py --policy_path=out/arithmetic_ppo/policy --prompt="123+456=" --samples=4

Responses to the prompts of a file, each with its score:

python tools/sample.py --policy_path=out/arithmetic_ppo/policy \
    --prompts=data/arithmetic/rl_val.jsonl --limit=5 --reward_path=out/arithmetic_rm/reward_model

Each line that you type is a new conversation: the model does not see the earlier ones. A model with
a chat template answers it as a chat message; another model continues it as plain text.
"""
import os
import sys

import torch

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from prompts import encode_for_all  # noqa: E402
from launch import choose_device  # noqa: E402
from models import autocast, load  # noqa: E402
from tokenizer import check_tokenizer_fits, load_reader, load_tokenizer  # noqa: E402
from errors import BadConfig  # noqa: E402
from options.environment import Environment  # noqa: E402
from rows import check_text, prompt_row, read_rows  # noqa: E402
from report import answer_of  # noqa: E402
from rewards import as_read, score_sequences  # noqa: E402
from rollout import respond, texts_of, turns  # noqa: E402
from tools.policies import plain, response_length, warpers  # noqa: E402


# --------------------------------------------------------------------------------------------------
policy_path = "out/arithmetic_ppo/policy"  # folder or hub name of a language model
prompt = ""  # one prompt; empty = see prompts
prompts = ""  # JSONL file with "prompt"; both empty = each line of standard input is a prompt
fields = ""  # the data's names for ours: "question>prompt"
limit = 0  # how many prompts of the file, 0 = all [>= 0]
samples = 1  # responses to each prompt [1..1000000]
reward_path = ""  # folder or hub name of a reward model, whose score is printed; empty = none
max_new_tokens = 0  # longest response; 0 = as in the run that left the policy [0..1000000]
temperature = 1.0  # 0 = always the most likely token [>= 0]
top_k = 0  # sampled are only the k most likely tokens, 0 = all [>= 0]
top_p = 1.0  # of these the most likely ones, up to this probability together [0.001..1]
min_p = 0.0  # of these those at least this times as likely as the most likely one [0..1]
stop_strings = ""  # texts that end a response, too: "</answer>", or several, "['Q:', '###']"
batch_size = 64  # responses that decode at once [1..1000000]
environment = ""  # FILE.py:env, what answers the model; docs/turns.md
tools = ""  # FILE.py:f,FILE.py:g: functions that the model may call
max_turns = 8  # turns of the model in a response [1..1000]
chat_template = ""  # a Jinja file in the place of the tokenizer's own chat template
template_kwargs = ""  # what the template is told, such as enable_thinking=False
system_prompt = ""  # the system message of chats that have none
seed = 1  # decides the responses [>= 0]
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
dtype = "float32"  # bfloat16: fp32 weights under autocast [float32 | bfloat16 | float64]
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------

if prompt and prompts:
    raise BadConfig("prompt and prompts are both given; keep one")
max_new_tokens = max_new_tokens or response_length(policy_path) or 48
device = torch.device(choose_device(device_type))
system = plain(dtype, environment=environment, tools=tools, max_turns=max_turns, reward_timeout=300)
truncation = warpers(top_k, top_p, min_p) if temperature else None


# the policy; with reward_path also a reward model, which may have another tokenizer
tokenizer = load_tokenizer(policy_path, chat_template, template_kwargs, system_prompt, stop_strings)
answers = Environment(system, tokenizer) if environment or tools else None
policy = load(policy_path, "policy", system, device)
check_tokenizer_fits(tokenizer, policy, policy_path)
models, scorer_tokenizer = {"policy": policy}, tokenizer
if reward_path:
    scorer = load(reward_path, "reward", system, device, "scalar")
    scorer_tokenizer = load_reader(reward_path, scorer, tokenizer)
    models["reward_model"] = scorer


def answer(rows, path, first=0):
    """
    Print `samples` responses to the prompt of each row, batch by batch, with their scores where
    there is a reward model. path: where the rows are from, for errors. first: the number of the
    first prompt; seed and number decide the noise.
    """
    ids = encode_for_all(rows, path, max_new_tokens, models, tokenizer)
    picks = [(i, sample) for i in range(len(rows)) for sample in range(samples)]
    for begin in range(0, len(picks), batch_size):
        where, which = zip(*picks[begin:begin + batch_size], strict=True)
        asked = [(rows[i], ids[i]) for i in where]
        noise, slots = (seed, "sample", 0), [first + i for i in where]
        with torch.no_grad(), autocast(system, device):
            turn = turns(policy, tokenizer, noise, (slots, which), max_new_tokens, temperature,
                         truncation=truncation)
            batch = respond(turn, [row for row, _ in asked], [ids[i] for i in where], noise,
                            (slots, which), max_new_tokens, answers)
            batch |= texts_of(asked, batch, tokenizer)
            texts = batch["completions"]
            finished, scores = batch["finished"].tolist(), [None] * len(texts)
            if reward_path:
                read = scorer_tokenizer.encode_scored(
                    [row["prompt"] for row, _ in asked], as_read(batch, scorer_tokenizer.template),
                    finished, scorer.max_positions)
                scores = score_sequences(scorer, read, batch_size, device).tolist()
        for number, (i, sample, text, ended, score) in enumerate(zip(
                where, which, texts, finished, scores, strict=True)):
            said = rows[i]["prompt"]
            if sample == 0 and (prompt or prompts):  # above the first of a prompt
                print(f"> {said if isinstance(said, str) else said[-1]['content']}")
            cut = "" if ended else " [cut off at max_new_tokens]"
            if answers:
                text = answer_of(dict(messages=batch["dialogues"][number]))
                cut = "" if ended else " [cut off at max_new_tokens or max_turns]"
            scored = "" if score is None else f"   (score {score:.2f})"
            print(f"{text or '[empty]'}{cut}{scored}", flush=True)


def as_row(text, where):
    """
    A row of data with this text as its prompt: a chat message, if the model has a chat template.
    where: for errors. Raises BadInput.
    """
    check_text(text, f"{where}: the prompt")
    return {"prompt": [{"role": "user", "content": text}] if tokenizer.template else text}


if prompts:
    rows = read_rows(prompts, prompt_row, fields)
    answer(rows[:limit or len(rows)], prompts)
elif prompt:
    answer([as_row(prompt, "command line")], "command line")
else:
    if sys.stdin.isatty():
        print("type a prompt and press Enter; Ctrl-D ends")
    # a line that is not UTF-8 is read all the same: check_text then says which line it is
    sys.stdin.reconfigure(errors="surrogateescape")
    for number, line in enumerate(sys.stdin):
        if line.strip():
            where = f"line {number + 1} of standard input"
            answer([as_row(line.rstrip("\n"), where)], where, number)
