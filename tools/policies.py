"""
A policy that a tool asks: the keys with which it is loaded, the settings of its run, its answers.
"""
import ast
import contextlib
import os
import re
from types import SimpleNamespace

import configurator
from errors import say
from folders import read_file, read_json
from options.environment import Environment
from rollout import respond, texts_of, turns
from tokenizer import load_tokenizer


def plain(dtype="float32", **given):
    """The shared keys as attributes, with their defaults, but for the given ones."""
    folder = os.path.dirname(os.path.abspath(configurator.__file__))
    keys = [configurator.read_lines(os.path.join(folder, file))[0]
            for file in ("keys.py", "rl_keys.py")]
    defaults = {name: key.default for name, key in (keys[0] | keys[1]).items()}
    return SimpleNamespace(**defaults | dict(dtype=dtype) | given)


def from_run(path, key, default):
    """
    The value of a key in the run that made a policy, by the run's config.json beside the policy, or
    by the policy's card; the default where neither has the key.
    """
    folder, value = os.path.realpath(path), default
    config, card = os.path.join(folder, "..", "config.json"), os.path.join(folder, "README.md")
    if os.path.isfile(config):
        value = read_json(config).get(key)
    elif os.path.isfile(card):
        text = read_file(card).decode(errors="replace")
        found = re.search(rf"^    {key} = (.*)$", text, re.MULTILINE)
        with contextlib.suppress(TypeError, ValueError, SyntaxError):
            value = ast.literal_eval(found[1])
    return value if type(value) is type(default) else default


def longest_response(paths, given):
    """max_new_tokens: the given one, or the largest of the runs that made these policies."""
    return given or max(from_run(path, "max_new_tokens", 0) for path in paths) or 48


def load_asked(path, system):
    """
    (tokenizer, environment or None) of a policy. Where no system message, stop strings or template
    arguments are given, they are those of the policy's run.
    """
    keys = {key: getattr(system, key) or from_run(path, key, "")
            for key in ("template_kwargs", "system_prompt", "stop_strings")}
    taken = [f"{key} = {value!r}" for key, value in keys.items() if value != getattr(system, key)]
    if taken:
        say(f"{path}: as in its run, {', '.join(taken)}")
    tokenizer = load_tokenizer(path, system.chat_template, **keys)
    answers = system.environment or system.tools
    return tokenizer, Environment(system, tokenizer) if answers else None


def ask(policy, tokenizer, environment, asked, names, seed, length, temperature, truncation=None):
    """
    A batch of responses with their texts: to each (data row, ids of its prompt) of `asked` one.
    names: their slots and samples, which with the seed decide the noise. Of several turns (where
    there is an environment) a collective.
    """
    noise = seed, "sample", 0
    turn = turns(policy, tokenizer, noise, names, length, temperature, truncation=truncation)
    rows, ids = ([one[part] for one in asked] for part in (0, 1))
    batch = respond(turn, rows, ids, noise, names, length, environment)  # COLLECTIVE
    return batch | texts_of(asked, batch, tokenizer)


def warpers(top_k=0, top_p=1.0, min_p=0.0):
    """
    transformers' own functions of logits, one after the other, for `ask`: each of them makes
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

    processors = LogitsProcessorList()
    if top_k > 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        processors.append(MinPLogitsWarper(min_p))
    return processors or None
