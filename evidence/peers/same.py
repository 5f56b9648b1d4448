"""
Does quartet compute what TRL computes? Both take the same two steps: of the same float64 models, on
the same data, or on the batch that quartet has sampled. The table has the distance of their weights
afterwards, as a share of the way from the start. `bash evidence/peers.sh same` starts it.

The second step has ratios that are not 1, and clips some. TRL has rewards and advantages in
float32, so 1e-7 is rounding; another formula, or another scale of the loss, gives 1e-3 or more.
"""
import json
import random
import sys
import tempfile

from configurator import configure  # first: it must be imported before torch
from errors import BadInput

import torch
from safetensors.torch import load_file

from evidence.bench import ROOT, make_models, printed
from tools.runs import typed

# --------------------------------------------------------------------------------------------------
rows = "all"  # or some of them, as GRPO;PPO
ppo_python = ""  # interpreter of an environment with TRL 1.12
grpo_python = ""  # with TRL 1.16
config, system = configure(globals(), "config/keys.py", device_type="cpu")
# --------------------------------------------------------------------------------------------------
LLAMA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2)
LENGTH, NEW, B = 12, 16, 24  # the most tokens of a prompt, of a response; responses, or rows
EPS = 1.0  # AdamW's, larger than all gradients: otherwise the scale of a loss would be lost
# the keys of all rows of a script, quartet's and TRL's
PLAIN = dict(train_path="pairs.jsonl", learning_rate=0.3, beta2=0.999, max_iters=2)
SAMPLED = dict(policy_path="policy", prompts_path="prompts.jsonl", max_new_tokens=NEW, max_iters=1)
COMMON = {
    "sft": (PLAIN | dict(init_from="policy"), dict(learning_rate=0.3)),
    "rm": (PLAIN | dict(init_from="reward_model"), dict(learning_rate=0.3)),
    "recipes/dpo": (PLAIN | dict(policy_path="policy"), dict(learning_rate=0.3)),
    "ppo": (SAMPLED | dict(ppo_epochs=2, temperature=1.0, learning_rate=1.0, missing_eos_penalty=0,
                           reward_path="reward_model", value_lr_decay="constant"),
            dict(num_ppo_epochs=2, temperature=1.0 - 1e-7, learning_rate=1.0)),  # it adds 1e-7
    "grpo": (SAMPLED | dict(group_size=4, num_iterations=2, temperature=0.8, learning_rate=0.1,
                            reward_functions="rule.py:score"),
             dict(num_generations=4, num_iterations=2, temperature=0.8, learning_rate=0.1))}
OTHER = dict(kl_estimator="k3", gamma=0.99, lam=0.9, cliprange=0.1)  # in the words of both
# {row: (script, quartet's keys, TRL's)}: the algorithm in the words of both
ROWS = {
    "SFT": ("sft", {}, {}),
    "reward model": ("rm", dict(centre_coef=0.01), dict(center_rewards_coefficient=0.01)),
    "DPO": ("recipes/dpo", {}, {}),
    "PPO": ("ppo", {}, {}),
    "PPO, other keys": ("ppo", OTHER, OTHER),
    "GRPO": ("grpo", dict(kl_coef=0.04),
             dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False)),
    "GRPO, several turns": (
        "grpo", dict(kl_coef=0, environment="rule.py:talks", max_turns=3),
        dict(loss_type="grpo", beta=0.0)),
    "Dr. GRPO": (
        "grpo", dict(kl_coef=0, scale_by="none", aggregation="seq-mean-token-sum-norm",
                     learning_rate=2.0),
        dict(loss_type="dr_grpo", beta=0.0, scale_rewards="none", learning_rate=2.0)),
    "DAPO": ("grpo", dict(kl_coef=0, aggregation="token-mean", cliprange_high=0.28,
                          truncated="mask", entropy_coef=0.01, learning_rate=0.3),
             dict(loss_type="dapo", beta=0.0, epsilon_high=0.28, mask_truncated_completions=True,
                  entropy_coef=0.01, learning_rate=0.3)),
    "GSPO": ("grpo", dict(kl_coef=0, loss_type="gspo", cliprange=0.01, cliprange_high=0.02),
             dict(loss_type="grpo", beta=0.0, importance_sampling_level="sequence", epsilon=0.01,
                  epsilon_high=0.02)),
    "CISPO": ("grpo", dict(kl_coef=0, scale_by="batch", loss_type="cispo", cliprange=1,
                           cliprange_high=0.1, aggregation="token-mean"),
              dict(scale_rewards="batch", loss_type="cispo", beta=0.0, epsilon_high=1.1))}
# the models that a script trains, and the folder in which each begins
TRAINED = {"rm": dict(reward_model="reward_model"),
           "ppo": dict(policy="policy", value_model="reward_model")}
# the script as a user runs it; then its last batch, and its models
RUN = """
import runpy, sys
root, *sys.argv = sys.argv[1:]
sys.path.insert(0, root)
end = runpy.run_path(sys.argv[0], run_name="__main__")
from safetensors.torch import save_file
columns = "tokens", "begins", "lengths", "response_mask", "scores"
if "response_mask" in end.get("batch", ()):
    save_file({name: end["batch"][name].clone() for name in columns}, "batch.safetensors")
for name, model in end["run"].trained.items():
    save_file({key: p.contiguous() for key, p in model.hf.named_parameters()},
              name + "_ours.safetensors")
"""


def make_data(folder, end_share):
    """Models, a rule, an environment, prompts of different lengths, and pairs, in a folder."""
    torch.manual_seed(0)
    make_models(folder, LLAMA, LENGTH, NEW, end_share, system, ppo=True)
    with open(f"{folder}/rule.py", "a", encoding="utf-8") as f:
        f.write("def talks(messages, row):\n    return messages[0]['content'][:2]\n")
    with open(f"{folder}/prompts.jsonl", encoding="utf-8") as f:
        prompts = [json.loads(line)["prompt"][n % 5:] for n, line in enumerate(f)]
    drawn, pairs = random.Random(0), []
    for prompt in prompts[:B]:
        texts = ["".join(drawn.choices(prompts[-1], k=drawn.randint(3, NEW - 1))) for _ in range(3)]
        pairs.append(dict(zip(("completion", "chosen", "rejected"), texts, strict=True),
                          prompt=prompt))
    for name, written in (("prompts", [dict(prompt=prompt) for prompt in prompts]),
                          ("pairs", pairs)):
        with open(f"{folder}/{name}.jsonl", "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in written)


def distance(folder, name, begin):
    """The distance of a model's two ends, as a share of the way from its beginning."""
    start, ours, theirs = (load_file(f"{folder}/{file}.safetensors") for file in (
        f"{begin}/model", f"{name}_ours", f"{name}_trl"))
    at = [torch.cat([part[key].double().flatten() for key in ours])
          for part in (start, ours, theirs)]
    return ((at[1] - at[2]).norm() / (at[1] - at[0]).norm()).item()


def row_of(name, folder):
    """A line of the table."""
    script, own, their = ROWS[name]
    keys = COMMON[script][0] | own | dict(
        out_dir="run", dtype="float64", batch_size=B, micro_batch_size=5, lr_decay="constant",
        warmup_iters=0, adam_eps=EPS, grad_clip=0, checkpoint_interval=0, device_type="cpu")
    printed([sys.executable, "-c", RUN, ROOT, f"{ROOT}/{script}.py", *typed(keys)], folder)
    settings = COMMON[script][1] | their | dict(
        new=NEW, batch_size=B, steps=1 if script == "ppo" else 2, adam_epsilon=EPS, bf16=False,
        use_cpu=True, per_device_train_batch_size=B, lr_scheduler_type="constant",
        max_grad_norm=0.0)
    python = config["ppo_python" if script == "ppo" else "grpo_python"]
    version = printed([python, f"{ROOT}/evidence/peers/of_trl.py", "same", script,
                       json.dumps(settings)], folder).splitlines()[-1]
    trained = TRAINED.get(script, dict(policy="policy"))
    apart = ", ".join(f"{distance(folder, *each):.1e}" for each in trained.items())
    return f"| {name} | {version} | {apart} |"


if __name__ == "__main__":
    wanted = list(ROWS) if rows == "all" else rows.split(";")
    if not set(wanted) <= set(ROWS) or not ppo_python or not grpo_python:
        raise BadInput(f"rows = {rows!r}: wanted all, or some of {';'.join(ROWS)}; and both "
                       "environments with TRL: type bash evidence/peers.sh same")
    print("| two steps of | beside | distance |\n|---|---|---|")
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            # in PPO all responses are cut: TRL has the score of others one token behind their end
            make_data(folder, 0.0 if ROWS[name][0] == "ppo" else 2 / NEW)
            print(row_of(name, folder), flush=True)
