"""
The model card of a finished model, README.md in its folder: what it is, how to load it, from what
and with which settings it was made. Its head is YAML in the words of the Hugging Face hub.
"""
import os
import re
import sys


def model_card(name, config, source, size, record):
    """
    The text of a model card. name: what the run calls the model, such as policy. config: of the
    run. source: the path or hub name of the model that it was made from, or "". size: of its
    weights, in words. record: the run's last line of metrics, or {}.
    """
    scalar = name in ("reward_model", "value_model")
    script = os.path.basename(sys.argv[0]).removesuffix(".py")
    method = "reward-model" if script == "rm" else script  # as the hub calls them
    task = "text-classification" if scalar else "text-generation"
    kind = "SequenceClassification" if scalar else "CausalLM"
    made = f"made from `{public(source)}`" if source else "made from scratch"
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}",
             f"tags: [quartet, {method}]", "---", "", f"# {name}", "",
             f"{size}, {made} with quartet. Load this folder with", "",
             f"    AutoModelFor{kind}.from_pretrained(folder)", ""]
    if name == "reward_model":
        lines += ["`score_shift` in config.json is what quartet adds to the score that "
                  "transformers computes: with it the average demonstration scores 0. The score is "
                  "read at the last token of the text, the end of the response.", ""]
    numbers = [f"    {key} = {x:.4g}" for key, x in record.items() if isinstance(x, int | float)
               and key.startswith(("eval/", "loss/", "train/"))]
    lines += [f"Metrics of iteration {record['iteration']}:", "", *numbers, ""] if numbers else []
    settings = [f"    {key} = {public(value)!r}" for key, value in config.items()]
    return "\n".join([*lines, "Settings:", "", *settings]) + "\n"


def public(value):
    """
    A setting as others may see it. An absolute path names its user's folders: of each one in a
    value, as in "0.3*/users/me/a.jsonl,b.jsonl", only the last part is left.
    """
    if not isinstance(value, str):
        return value
    return ",".join(re.sub(r"(^|[^\w.-])/.*/|^/", r"\1", part) for part in value.split(","))
