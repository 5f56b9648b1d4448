"""
Two steps of TRL's trainer on quartet's data or batch; see same.py. It runs in an environment that
has TRL, in the folder of the data, and prints TRL's version.

python evidence/peers/trl_same.py sft|rm|recipes/dpo|ppo|grpo NEW '{"learning_rate": 0.3, ...}'
"""
import functools
import json
import os
import sys
import tempfile
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  TRANSFORMERS_VERBOSITY="error", TRL_EXPERIMENTAL_SILENCE="1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer)

kind, NEW, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained("policy")
language_model = functools.partial(
    AutoModelForCausalLM.from_pretrained, "policy", dtype=torch.float64)
scalar_model = functools.partial(
    AutoModelForSequenceClassification.from_pretrained, "reward_model", num_labels=1,
    dtype=torch.float64)
common = dict(
    output_dir=tempfile.mkdtemp(), bf16=False, use_cpu=True, gradient_checkpointing=False,
    report_to="none", save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
    max_grad_norm=0.0) | settings


def pairs(*fields):
    """These fields of the rows, as TRL's data."""
    with open("pairs.jsonl", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    return Dataset.from_list([{field: row[field] for field in ("prompt", *fields)} for row in rows])


def without_sampling(trainer, config, name, model, data, **more):
    """{name: the model} behind two steps of one of TRL's trainers."""
    trainer(model=model, args=config(**common, max_steps=2), processing_class=tokenizer,
            train_dataset=data, **more).train()
    return {name: model}


def sft():
    return without_sampling(
        trl.SFTTrainer, trl.SFTConfig, "policy", language_model(), pairs("completion"))


def rm():
    return without_sampling(trl.RewardTrainer, trl.RewardConfig, "reward_model", scalar_model(),
                            pairs("chosen", "rejected"))


def dpo():
    return without_sampling(trl.DPOTrainer, trl.DPOConfig, "policy", language_model(),
                            pairs("chosen", "rejected"), ref_model=language_model())


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
    trl.GRPOTrainer(
        model=policy, args=trl.GRPOConfig(**common, max_completion_length=NEW, max_steps=2),
        train_dataset=Dataset.from_dict({"prompt": tokenizer.batch_decode(prompts)}),
        reward_funcs=lambda score, **_: score, rollout_func=lambda *_: dict(sampled),
        processing_class=tokenizer).train()
    return dict(policy=policy)


def ppo():
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    # all responses have NEW tokens: TRL has the prompts padded on the left
    prompts, responses = parts(load_file("batch.safetensors"), "tokens")
    longest = max(map(len, prompts))
    tokens = torch.tensor([[tokenizer.pad_token_id] * (longest - len(ids)) + ids + said
                           for ids, said in zip(prompts, responses, strict=True)])

    def sampled(model, *_):
        logits = ppo_trainer.forward(model, tokens, tokenizer.pad_token_id).logits
        return tokens, logits[:, -NEW - 1:-1]

    ppo_trainer.batch_generation = sampled
    # it divides variances by n - 1, and quartet by n
    ppo_trainer.masked_var = functools.partial(ppo_trainer.masked_var, unbiased=False)
    policy, value = language_model(), scalar_model()
    data = Dataset.from_dict({"input_ids": tokens[:, :-NEW].tolist()})
    args = PPOConfig(
        **common, fp16=False, num_mini_batches=1, response_length=NEW, total_episodes=len(tokens),
        temperature=1.0 - 1e-7,  # it adds 1e-7
        stop_token="eos", num_sample_generations=0, local_rollout_forward_batch_size=len(tokens))
    trainer = PPOTrainer(
        args=args, processing_class=tokenizer, model=policy, ref_model=language_model(),
        reward_model=scalar_model(), value_model=value, train_dataset=data, eval_dataset=data)
    trainer.dataloader = [dict(input_ids=tokens[:, :-NEW])]  # in this order
    trainer.train()
    return dict(policy=policy, value_model=value)


for name, model in {"sft": sft, "rm": rm, "recipes/dpo": dpo, "ppo": ppo, "grpo": grpo}[
        kind]().items():
    save_file({key: p.detach().contiguous() for key, p in model.named_parameters()},
              f"{name}_trl.safetensors")
print(f"TRL {trl.__version__}")
