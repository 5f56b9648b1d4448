"""
TRL's trainers, in an environment that has TRL, in the folder of quartet's models and data. Prints
TRL's version, and with it what same.py and table.py ask for:

python evidence/peers/of_trl.py same sft|rm|recipes/dpo|ppo|grpo SETTINGS
    two steps on quartet's data or batch; NAME_trl.safetensors has the weights behind them
python evidence/peers/of_trl.py time ppo|grpo SETTINGS
    prints [seconds of each step, peak MiB], after two steps to warm up

SETTINGS: those of TRL's config as JSON; with new, the most tokens of a response; batch_size,
responses of a step; steps. PPO is experimental.ppo.
"""
import functools
import json
import os
import sys
import tempfile
import time
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback,
    TrainerCallback)

job, kind, settings = *sys.argv[1:3], json.loads(sys.argv[3])
new, batch_size, steps = (settings.pop(name) for name in ("new", "batch_size", "steps"))
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained("policy")
dtype = torch.float64 if job == "same" else torch.float32
language_model = functools.partial(AutoModelForCausalLM.from_pretrained, "policy", dtype=dtype)
scalar_model = functools.partial(
    AutoModelForSequenceClassification.from_pretrained, "reward_model", num_labels=1, dtype=dtype)
settings |= dict(output_dir=tempfile.mkdtemp(), gradient_checkpointing=False, report_to="none",
                 save_strategy="no", disable_tqdm=True)


def rows_of(file, *fields):
    """These fields of a file's rows, as TRL's data."""
    with open(file, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    return Dataset.from_list([{field: row[field] for field in ("prompt", *fields)} for row in rows])


def grpo_trainer(policy, data, **more):
    args = trl.GRPOConfig(**settings, max_completion_length=new, max_steps=steps)
    return trl.GRPOTrainer(model=policy, args=args, train_dataset=data, processing_class=tokenizer,
                           **more)


def ppo_trainer(policy, value, data):
    """data: ids of prompts."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    args = PPOConfig(
        **settings, fp16=False, num_mini_batches=1, response_length=new, stop_token="eos",
        total_episodes=batch_size * steps, num_sample_generations=0,
        local_rollout_forward_batch_size=batch_size)
    data = Dataset.from_dict({"input_ids": data})
    return PPOTrainer(
        args=args, processing_class=tokenizer, model=policy, ref_model=language_model(),
        reward_model=scalar_model(), value_model=value, train_dataset=data,
        eval_dataset=data.select(range(batch_size)))


# the same steps: each function gives {name: the model behind them} --------------------------------

def without_sampling(trainer, config, name, model, data, **more):
    trainer(model=model, args=config(**settings, max_steps=steps), processing_class=tokenizer,
            train_dataset=data, **more).train()
    return {name: model}


def sft():
    return without_sampling(trl.SFTTrainer, trl.SFTConfig, "policy", language_model(),
                            rows_of("pairs.jsonl", "completion"))


def rm():
    return without_sampling(trl.RewardTrainer, trl.RewardConfig, "reward_model", scalar_model(),
                            rows_of("pairs.jsonl", "chosen", "rejected"))


def dpo():
    return without_sampling(trl.DPOTrainer, trl.DPOConfig, "policy", language_model(),
                            rows_of("pairs.jsonl", "chosen", "rejected"),
                            ref_model=language_model())


def parts(batch, column):
    """The prompt's part and the response's of each row of a column, as lists."""
    rows = zip(batch[column].tolist(), batch["begins"].tolist(), batch["lengths"].tolist(),
               strict=True)
    prompts, responses = zip(*((x[:begin], x[begin:end]) for x, begin, end in rows), strict=True)
    return list(prompts), list(responses)


def grpo():
    batch, policy = load_file("batch.safetensors"), language_model()
    prompts, responses = parts(batch, "tokens")
    masks = [[*map(int, mask)] for mask in parts(batch, "response_mask")[1]]
    sampled = dict(prompt_ids=prompts, completion_ids=responses, env_mask=masks, logprobs=None,
                   score=batch["scores"].tolist())
    grpo_trainer(policy, Dataset.from_dict({"prompt": tokenizer.batch_decode(prompts)}),
                 reward_funcs=lambda score, **_: score, rollout_func=lambda *_: dict(sampled)
                 ).train()
    return dict(policy=policy)


def ppo():
    from trl.experimental.ppo import ppo_trainer as room

    # all responses have `new` tokens: TRL has the prompts padded on the left
    prompts, responses = parts(load_file("batch.safetensors"), "tokens")
    longest = max(map(len, prompts))
    tokens = torch.tensor([[tokenizer.pad_token_id] * (longest - len(ids)) + ids + said
                           for ids, said in zip(prompts, responses, strict=True)])

    def sampled(model, *_):
        logits = room.forward(model, tokens, tokenizer.pad_token_id).logits
        return tokens, logits[:, -new - 1:-1]

    room.batch_generation = sampled
    # it divides variances by n - 1, and quartet by n
    room.masked_var = functools.partial(room.masked_var, unbiased=False)
    policy, value = language_model(), scalar_model()
    trainer = ppo_trainer(policy, value, tokens[:, :-new].tolist())
    trainer.dataloader = [dict(input_ids=tokens[:, :-new])]  # in this order
    trainer.train()
    return dict(policy=policy, value_model=value)


# the seconds of steps: the learning rate is so small that the lengths of the responses stay -------

WARM_UP = 2
clicks = []  # where a step ends and the next one begins, in seconds of the clock


def click(*_, **__):
    clicks.append(time.perf_counter())


class Clicks(TrainerCallback):
    on_step_end = staticmethod(click)

    def on_step_begin(self, *_, **__):
        clicks or click()


def timed_grpo():
    return grpo_trainer(
        language_model(), rows_of("prompts.jsonl"), callbacks=[Clicks()],
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 7 / 7 for ids in completion_ids])


def timed_ppo():
    from trl.experimental.ppo import ppo_trainer as room

    generation = room.batch_generation
    room.batch_generation = lambda *args, **how: (click(), generation(*args, **how))[1]
    return ppo_trainer(language_model(), scalar_model(),
                       tokenizer(rows_of("prompts.jsonl")["prompt"][:])["input_ids"])


if job == "same":
    for name, model in {"sft": sft, "rm": rm, "recipes/dpo": dpo, "ppo": ppo, "grpo": grpo}[
            kind]().items():
        save_file({key: p.detach().contiguous() for key, p in model.named_parameters()},
                  f"{name}_trl.safetensors")
else:
    steps += WARM_UP + (kind == "ppo")  # PPO's last step ends with no click
    trainer = dict(grpo=timed_grpo, ppo=timed_ppo)[kind]()
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seconds = [b - a for a, b in zip(clicks, clicks[1:], strict=False)][WARM_UP:]
    with open("/proc/self/status", encoding="utf-8") as f:  # getrusage would count the parent's
        peak = next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps([seconds, peak]))
print(f"TRL {trl.__version__}")
