"""
TRL's PPO (experimental.ppo) or GRPO trainer on the models of a folder. One line of JSON.

python runs/peers/trl_steps.py ppo|grpo FOLDER STEPS MICRO_BATCH_SIZE float32|bfloat16

The same work as runs/peers/quartet.py: 32 responses of up to 128 tokens; PPO: 4 epochs of one step,
GRPO: 8 prompts with 4 responses each, one step. STEPS are counted after two to warm up.
"""
import json
import os
import statistics
import sys
import tempfile
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  TRANSFORMERS_VERBOSITY="error")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from stopwatch import Stopwatch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback,
    TrainerCallback)

WARM_UP, PROMPTS, NEW = 2, 32, 128
kind, folder, steps, micro_batch_size, dtype = sys.argv[1:]
steps, micro_batch_size = int(steps), int(micro_batch_size)
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(os.path.join(folder, "policy"))
with open(os.path.join(folder, "prompts.jsonl"), encoding="utf-8") as f:
    prompts = [json.loads(line)["prompt"] for line in f]
policy = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "policy"), dtype=torch.float32)
common = dict(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro_batch_size,
    gradient_accumulation_steps=PROMPTS // micro_batch_size, temperature=1.0, learning_rate=1e-5,
    bf16=dtype == "bfloat16", gradient_checkpointing=False, use_cpu=True, report_to="none",
    logging_steps=1, save_strategy="no", disable_tqdm=True, seed=0)
watch, lengths = Stopwatch(), []


def grpo():
    """A click at the beginning of the first step and at the end of each."""
    def score(completion_ids, **_):
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    class Clicks(TrainerCallback):
        def on_step_begin(self, *_, **__):
            if not watch.clicks:
                watch.click()

        def on_step_end(self, *_, **__):
            watch.click()

    config = trl.GRPOConfig(
        **common, num_generations=4, max_completion_length=NEW, beta=0.04, num_iterations=1,
        max_steps=WARM_UP + steps, optim="adamw_torch")
    data = Dataset.from_dict({"prompt": prompts})
    return trl.GRPOTrainer(model=policy, reward_funcs=score, args=config, train_dataset=data,
                           processing_class=tokenizer, callbacks=[Clicks()])


def ppo():
    """A click at the beginning of each step's generation."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    generation = ppo_trainer.batch_generation

    def batch_generation(*args, **kwargs):
        watch.click()
        out = generation(*args, **kwargs)
        for row in out[0][:, -NEW:].tolist():
            end = tokenizer.eos_token_id
            lengths.append(row.index(end) + 1 if end in row else NEW)
        return out

    ppo_trainer.batch_generation = batch_generation
    reference = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "policy"),
                                                     dtype=torch.float32)
    reward, value = (AutoModelForSequenceClassification.from_pretrained(
        os.path.join(folder, "reward_model"), num_labels=1, dtype=torch.float32) for _ in range(2))
    data = Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]})
    config = PPOConfig(
        **common, fp16=False, num_mini_batches=1, num_ppo_epochs=4, response_length=NEW,
        total_episodes=PROMPTS * (WARM_UP + steps + 1), stop_token="eos", num_sample_generations=0,
        local_rollout_forward_batch_size=PROMPTS, kl_coef=0.05)
    return PPOTrainer(args=config, processing_class=tokenizer, model=policy, ref_model=reference,
                      reward_model=reward, value_model=value, train_dataset=data,
                      eval_dataset=data.select(range(PROMPTS)))


trainer = {"ppo": ppo, "grpo": grpo}[kind]()
trainer.remove_callback(PrinterCallback)
trainer.train()
watch.report(WARM_UP, length=statistics.mean(lengths), version=f"TRL {trl.__version__}")
