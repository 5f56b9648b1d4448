"""
The model card of a finished model, README.md in its folder: what it is, how to load it, from what
and with which settings it was made. Its head is YAML in the words of the Hugging Face hub.
"""
import os
import re

from engine.hf_files import base_of, is_adapter

METHODS = (  # a key that only this script has, its name for the hub, and in words
    ("ppo_epochs", "ppo", "PPO (ppo.py, arXiv 1707.06347)"),
    ("group_size", "grpo", "GRPO (grpo.py, arXiv 2402.03300)"),
    ("demonstrations_path", "reward-model", "training on preference pairs (rm.py, Bradley-Terry)"),
    ("n_layer", "sft", "supervised fine-tuning (sft.py)"))
WHAT = {
    "policy": "The policy: a language model.",
    "best_policy": "The policy of the iteration with the best held-out score: a language model.",
    "ema_policy": "The moving average of the policy's weights: a language model.",
    "reward_model": "A reward model: one number for a prompt and a response.",
    "value_model": "A value model: for each token, the score that is still to be expected."}


def model_card(name, folder, config, source, model_config, elements, dtype, record):
    """
    The text of a model card. name: what the run calls the model, such as policy, or policy_adapter.
    folder: where it is saved. config: of the run. source: the path or hub name of the model that it
    was made from, or "". elements: how many numbers its weights have. dtype: of the saved weights,
    a str. record: the run's last line of metrics, or {}.
    """
    method = next((m for m in METHODS if m[0] in config), (None, "rlhf", "training"))
    adapter, name = name.endswith("_adapter"), name.removesuffix("_adapter")
    scalar = name in ("reward_model", "value_model")
    lines = ["---", f"library_name: {'peft' if adapter else 'transformers'}",
             f"pipeline_tag: {'text-classification' if scalar else 'text-generation'}"]
    base = hub_name(source)
    lines += [f"base_model: {base}"] * bool(base)
    named = [str(value).split(":")[1] for value in config.values()
             if re.match(r"hf:[\w.-]+/[\w.-]+", str(value))]
    if named:
        lines += ["datasets:", *(f"- {name}" for name in dict.fromkeys(named))]
    lines += ["tags:", "- quartet", *["- lora"] * adapter, f"- {method[1]}", "---", "",
              f"# {os.path.basename(folder)}", ""]

    start = f" from `{public(source)}`" if source else ""
    alone = " This is the LoRA adapter alone, to be used with that model." * adapter
    lines += [f"{WHAT.get(name, WHAT['policy'])} Family {model_config.family}, "
              f"{elements / 1e6:.2f}M weights in {dtype}. It is the result of {method[2]}{start} "
              f"with quartet.{alone}", "", "## How to load it", ""]
    lines += how_to_load(name, public(folder), adapter, source)
    where = "adapter_model.safetensors" if adapter else "config.json"
    if name == "reward_model":
        lines += ["", f"`score_shift` ({model_config.score_shift:.6g}, in {where}) is what "
                  "quartet adds to the score that transformers computes: with it the average "
                  "demonstration of the training scores 0. It changes no comparison of two "
                  "responses. The score is read at the last token, the end of the response: what a "
                  "chat template writes behind the end of the last turn, such as a line break, "
                  "must be cut off. Batches may be padded: the pad_token_id ends nothing."]

    data = {key: value for key, value in config.items()
            if key.endswith("_path") and value and "policy" not in key and "reward" not in key}
    if data:
        lines += ["", "## Data", ""]
        lines += [f"- {key}: `{public(value)}`" for key, value in data.items()]
    if record:
        lines += ["", f"## Metrics, iteration {record.get('iteration')}", "", "| metric | value |",
                  "|---|---|"]
        lines += [f"| {key} | {value:.4g} |" for key, value in record.items()
                  if isinstance(value, int | float)
                  and key.startswith(("eval/", "loss/", "train/"))]
    if config:
        lines += ["", "## Settings", "", "```",
                  *(f"{key} = {public(value)!r}" for key, value in config.items()), "```"]
    return "\n".join(lines) + "\n"


def how_to_load(name, folder, adapter, source):
    """The lines of a model card with the commands and the code that load it; see model_card."""
    scalar = name in ("reward_model", "value_model")
    lines = []
    if name == "reward_model":
        lines += ["With quartet:", "", f"    python ppo.py --reward_path={folder}", ""]
    elif name != "value_model":
        lines += ["With quartet:", "", f"    python tools/sample.py --policy_path={folder}", ""]
    if adapter and os.path.isdir(source) and is_adapter(source):
        # peft would not add the two up, but silently put this one in the place of the other
        return [*lines, "The model that it was trained on is an adapter itself, and peft loads "
                "only one of the two. With peft or transformers, load "
                f"`{name}` beside this folder: that is the whole model."]
    kind = "SequenceClassification" if scalar else "CausalLM"
    if adapter:
        labels = ", num_labels=1" * scalar
        return [*lines, "With peft, where the model that it was trained on is:", "", "```python",
                f"from peft import AutoPeftModelFor{kind}", "",
                f'model = AutoPeftModelFor{kind}.from_pretrained("{folder}"{labels})', "```"]
    lines += ["With transformers:", "", "```python",
              f"from transformers import AutoModelFor{kind}, AutoTokenizer", "",
              f'model = AutoModelFor{kind}.from_pretrained("{folder}")',
              f'tokenizer = AutoTokenizer.from_pretrained("{folder}")']
    if name == "reward_model":
        lines += ["# text: prompt, response and its end. If a chat template has written it, it may "
                  "begin with BOS:", "# then add_special_tokens=False",
                  'inputs = tokenizer(text, return_tensors="pt")',
                  "score = model(**inputs).logits[:, 0] + model.config.score_shift"]
    return [*lines, "```"]


def public(value):
    """A setting as others may see it: of absolute paths, which name the user, the last part."""
    if not isinstance(value, str):
        return value
    return re.sub(r"(^|[\s,=*])/(?:[^/,\s]+/)*", r"\1", value)


def hub_name(path):
    """
    The hub's name of the model that a path stands for, or comes from, as its own model card says;
    "" where that is not known.
    """
    for _ in range(10):  # adapters on adapters
        if path and not os.path.isdir(path):
            return path if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) else ""
        if not path or not is_adapter(path):
            break
        path = base_of(path)
    card = os.path.join(path, "README.md") if path else ""
    if not os.path.isfile(card):
        return ""
    with open(card, encoding="utf-8", errors="replace") as f:
        head = f.read().removeprefix("---\n").partition("\n---")[0]
    found = re.search(r"^base_model: ([\w./-]+)$", head, re.MULTILINE)
    return found[1] if found else ""
