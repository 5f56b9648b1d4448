r"""
TRL's PPO (experimental.ppo) or GRPO trainer on the models that evidence/bench.py makes: so many
responses of up to NEW tokens a step. PPO: 4 epochs of one step; GRPO: 4 responses to a prompt. It
runs in an environment that has TRL, and prints [seconds of each step, peak MiB, version]. As in
evidence/bench.py, the learning rate is so small that the lengths of the responses stay.

python evidence/peers/trl_steps.py ppo|grpo FOLDER STEPS MICRO_BATCH_SIZE RESPONSES NEW DEVICE \
    DTYPE compile|eager
"""
import json
import os
import sys
import tempfile
import time
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  TRANSFORMERS_VERBOSITY="error")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback,
    TrainerCallback)

WARM_UP = 2
kind, folder, *sizes, device, dtype, kernels = sys.argv[1:]
steps, micro_batch_size, PROMPTS, NEW = map(int, sizes)
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(os.path.join(folder, "policy"))
with open(os.path.join(folder, "prompts.jsonl"), encoding="utf-8") as f:
    prompts = [json.loads(line)["prompt"] for line in f]
policy, reference = (AutoModelForCausalLM.from_pretrained(
    os.path.join(folder, "policy"), dtype=torch.float32) for _ in range(2))
common = dict(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro_batch_size,
    gradient_accumulation_steps=PROMPTS // micro_batch_size, temperature=1.0, learning_rate=1e-12,
    bf16=dtype == "bfloat16", gradient_checkpointing=False, use_cpu=device == "cpu",
    report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True, seed=0,
    torch_compile=kernels == "compile")
clicks = []  # where a step ends and the next one begins, in seconds of the clock


def grpo():
    class Clicks(TrainerCallback):
        def on_step_begin(self, *_, **__):
            if not clicks:
                clicks.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            clicks.append(time.perf_counter())

    config = trl.GRPOConfig(
        **common, num_generations=4, max_completion_length=NEW, beta=0.04, num_iterations=1,
        max_steps=WARM_UP + steps, optim="adamw_torch")
    return trl.GRPOTrainer(
        model=policy, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 7 / 7 for ids in completion_ids],
        processing_class=tokenizer, callbacks=[Clicks()])


def ppo():
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    generation = ppo_trainer.batch_generation

    def batch_generation(*args, **kwargs):  # a step begins with it
        clicks.append(time.perf_counter())
        return generation(*args, **kwargs)

    ppo_trainer.batch_generation = batch_generation
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
seconds = [b - a for a, b in zip(clicks, clicks[1:], strict=False)][WARM_UP:]
with open("/proc/self/status", encoding="utf-8") as f:  # getrusage would count the parent's
    peak = next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))
if device == "cuda":
    peak = torch.cuda.max_memory_allocated() / 2**20
print(json.dumps([seconds, peak, f"TRL {trl.__version__}"]))
