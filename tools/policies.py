"""
A policy that a tool asks: how it is loaded, and how it samples.
"""
import os
import re
from types import SimpleNamespace

from folders import read_file


def plain(dtype="float32", **keys):
    """The shared keys of a tool, which calls `load` as a run does that sets none of them."""
    return SimpleNamespace(**dict(
        dtype=dtype, master_weights=True, zero_stage="", offload="", lora="", quantize="none",
        compile=False, gradient_checkpointing=False, attn_implementation="sdpa") | keys)


def response_length(path):
    """max_new_tokens of the run that left a model, by its config.json or the card; 0: unknown."""
    folder = os.path.realpath(path)
    for file in (os.path.join(folder, "..", "config.json"), os.path.join(folder, "README.md")):
        text = read_file(file).decode(errors="replace") if os.path.isfile(file) else ""
        found = re.search(r'\bmax_new_tokens"?(?: =|:) ?(\d{1,6})\b', text)
        if found:
            return int(found[1])
    return 0


def warpers(top_k=0, top_p=1.0, min_p=0.0):
    """
    transformers' own functions of logits, one after the other, for `generate`: each of them makes
    unlikely tokens impossible, their logits -inf; None where all tokens may be sampled.

    top_k: the k most likely tokens stay; 0 = all. top_p: of these, the most likely ones, up to the
    first at which their probabilities add up to top_p (nucleus sampling, arXiv 1904.09751); 1 =
    all. min_p: of these, those at least min_p times as likely as the most likely one (arXiv
    2407.01082); 0 = all.

    With the probabilities 0.5, 0.3, 0.15, 0.05: top_k = 3 keeps three of them; they become 0.526,
    0.316, 0.158. Then top_p = 0.8 keeps two, for 0.526 is below it, and min_p = 0.7 only the first.
    """
    from transformers.generation import (LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper,
                                         TopPLogitsWarper)

    chosen = LogitsProcessorList()
    if top_k > 0:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chosen.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        chosen.append(MinPLogitsWarper(min_p))
    return chosen or None
