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

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402

from configurator import configure  # noqa: E402
from prompts import encode_for_all, prompt_text  # noqa: E402
from launch import choose_device  # noqa: E402
from models import autocast, load, load_reward_model  # noqa: E402
from tokenizer import check_tokenizer_fits  # noqa: E402
from rows import check_text, prompt_row, read_rows  # noqa: E402
from report import answer_of  # noqa: E402
from rewards import as_read, score_sequences  # noqa: E402
from tools.policies import ask, load_asked, longest_response, plain, warpers  # noqa: E402


# --------------------------------------------------------------------------------------------------
policy_path = "out/arithmetic_ppo/policy"  # folder or hub name of a language model
prompt = ""  # one prompt; empty = see prompts
prompts = ""  # JSONL file with "prompt"; both empty = each line of standard input is a prompt
fields = ""  # the data's names for ours: "question>prompt"
limit = 0  # how many prompts of the file, 0 = all [>= 0]
samples = 1  # responses to each prompt [1..1000000]
reward_path = ""  # folder or hub name of a reward model, whose score is printed; empty = none
# sampling; empty keys are as in the run that made the policy
max_new_tokens = 0  # longest response; 0 = as in the run [0..1000000]
temperature = 1.0  # 0 = always the most likely token [>= 0]
top_k = 0  # sampled are only the k most likely tokens, 0 = all [>= 0]
top_p = 1.0  # of these the most likely ones, up to this probability together [0.001..1]
min_p = 0.0  # of these those at least this times as likely as the most likely one [0..1]
stop_strings = ""  # texts that end a response, too: "</answer>", or several, "['Q:', '###']"
system_prompt = ""  # the system message of chats that have none
template_kwargs = ""  # what the template is told, such as enable_thinking=False
chat_template = ""  # a Jinja file in the place of the tokenizer's own chat template
batch_size = 64  # responses that decode at once [1..1000000]
environment = ""  # FILE.py:env, what answers the model; docs/turns.md
tools = ""  # FILE.py:f,FILE.py:g: functions that the model may call
max_turns = 8  # turns of the model in a response [1..1000]
seed = 1  # decides the responses [>= 0]
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
dtype = "float32"  # bfloat16: fp32 weights under autocast [float32 | bfloat16 | float64]
config, _ = configure(globals())
# --------------------------------------------------------------------------------------------------

device, system = torch.device(choose_device(device_type)), plain(**config)
max_new_tokens = longest_response([policy_path], max_new_tokens)
truncation = warpers(top_k, top_p, min_p) if temperature else None
tokenizer, environment = load_asked(policy_path, system)
policy = load(policy_path, "policy", system, device)
check_tokenizer_fits(tokenizer, policy, policy_path)
models = {"policy": policy}
if reward_path:
    models["reward_model"], reader = load_reward_model(reward_path, policy, tokenizer, system,
                                                       device)


def answer(rows, path, first=0):
    """
    Print `samples` responses to the prompt of each row, batch by batch, with their scores where
    there is a reward model. path: where the rows are from, for errors. first: the number of the
    first prompt; seed and number decide the noise.
    """
    ids = encode_for_all(rows, path, max_new_tokens, models, tokenizer)
    picks = [(i, sample) for i in range(len(rows)) for sample in range(samples)]
    for begin in range(0, len(picks), batch_size):
        part = picks[begin:begin + batch_size]
        names = [first + i for i, _ in part], [sample for _, sample in part]
        with torch.no_grad(), autocast(system, device):
            batch = ask(policy, tokenizer, environment, [(rows[i], ids[i]) for i, _ in part], names,
                        seed, max_new_tokens, temperature, truncation)
            scored = [""] * len(part)
            if reward_path:
                read = reader.encode_scored(
                    [row["prompt"] for row in batch["rows"]], as_read(batch, reader.template),
                    batch["finished"].tolist(), models["reward_model"].max_positions)
                scores = score_sequences(models["reward_model"], read, batch_size, device)
                scored = [f"   (score {score:.2f})" for score in scores.tolist()]
        for number, (i, sample) in enumerate(part):
            if sample == 0 and (prompt or prompts):  # above the first of a prompt
                print(f"> {prompt_text(rows[i])}")
            sampled = dict(text=batch["completions"][number])
            if environment:
                sampled["messages"] = batch["dialogues"][number]
            cut = "" if batch["finished"][number] else " [cut off]"
            print(f"{answer_of(sampled) or '[empty]'}{cut}{scored[number]}", flush=True)


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
