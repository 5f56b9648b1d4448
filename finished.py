"""
The finished models of a run: folders that transformers, peft and the next script load, each with a
model card.
"""
import os
import re
import sys

import torch

from checkpoint import put_in_place, save_model, write_manifest
from errors import say
from together import alone


def save_final(out_dir, name, model, tokenizer, config=None):
    """
    A collective: write a finished model to out_dir/name, complete or not at all. A LoRA adapter is
    merged into the model, and also saved by itself, in out_dir/name_adapter. config: of the run,
    for the model card. Raises Stop, on all ranks, when the disk is full.
    """
    final, dtype = os.path.join(out_dir, name), model.hf.dtype
    if dtype == torch.float32 and model.file_dtype in (torch.bfloat16, torch.float16):
        dtype = model.file_dtype  # the dtype of the model that the run began with

    def write(folder):
        save_model(folder, model, tokenizer, dtype)  # COLLECTIVE
        alone(lambda: write_card(folder))  # COLLECTIVE
        if name == "best_policy":  # a run that resumes checks it
            alone(lambda: write_manifest(folder))  # COLLECTIVE

    def write_card(folder):
        count = sum(p.numel() for p in model.hf.parameters())
        size = f"{count / 1e6:.2f}M weights in {in_words(dtype)}"
        file = os.path.join(folder, "README.md")
        with open(file, "w", encoding="utf-8", errors="backslashreplace") as f:
            f.write(model_card(name, config or {}, model.path, size))

    put_in_place(write, final)  # COLLECTIVE
    if model.adapters:
        put_in_place(lambda folder: alone(lambda: model.save_own(folder)),  # COLLECTIVE
                     f"{final}_adapter")
        if model.warning():
            say(f"{final}_adapter: {model.warning()}")
    if dtype != model.hf.dtype and name != "best_policy":
        say(f"{final} is saved in {in_words(dtype)}, like the model with which the run began; "
            f"checkpoints are in {in_words(model.hf.dtype)}")


def in_words(dtype):
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def model_card(name, config, source, size):
    """
    The text of a model card, the README.md of a finished model: what it is, how to load it, the
    model and the settings that it was made from. Its head is YAML for the Hugging Face hub.

    name: the model's name in the run, such as policy. config: of the run. source: the path or hub
    name of the model that it was made from, or "". size: of its weights, in words.
    """
    scalar = name in ("reward_model", "value_model")
    task = "text-classification" if scalar else "text-generation"
    kind = "SequenceClassification" if scalar else "CausalLM"
    script = os.path.basename(sys.argv[0])
    made = f"made from `{public(source)}`" if source else "made from scratch"
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags: [quartet]",
             "---", "", f"# {name}", "",
             f"{size}, {made} with quartet's {script}. Load it with", "",
             f"    AutoModelFor{kind}.from_pretrained(folder)", ""]
    if name == "reward_model":
        lines += ["`score_shift` in config.json is what quartet adds to the score that "
                  "transformers computes: with it the average demonstration scores 0. The score is "
                  "read at the last token of the text, the end of the response.", ""]
    settings = [f"    {key} = {public(value)!r}" for key, value in config.items()]
    return "\n".join([*lines, "Settings:", "", *settings]) + "\n"


def public(value):
    """
    A setting that others may see. An absolute path shows its user's folders: only the last part of
    each one in a value such as "0.3*/users/me/a.jsonl,b.jsonl" is kept.
    """
    if not isinstance(value, str):
        return value
    return ",".join(re.sub(r"(^|[^\w.-])/.*/|^/", r"\1", part) for part in value.split(","))
