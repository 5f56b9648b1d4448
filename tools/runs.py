"""
Reads the folder of a run: its keys in config.json, its records in log.jsonl, its samples. Runs a
script inside of a tool. And how sure a mean over prompts is.
"""
import contextlib
import html
import io
import json
import math
import os
import re
import sys
from statistics import fmean
from unittest import mock

from configurator import read_json
from errors import BadInput, first_line, say, visible
from options.home import from_home
from options.sources import raw_rows, rename

# {key: the run's name of it}: the keys by which a policy is asked, and its answers are judged
ASKED = {key: key for key in (
    "max_new_tokens", "temperature", "fields", "max_prompt_tokens", "system_prompt", "stop_strings",
    "template_kwargs", "environment", "tools", "max_turns", "reward_timeout", "dtype")}
JUDGED = {key: key for key in (
    "reward_functions", "reward_path", "judge_path", "judge_template")} | {
    "prompts_path": "eval_path", "seed": "seed"}
# keys that name code of the user's among other things: FILE.py:NAME
NAME_CODE = "reward_functions", "optim"


def estimate(values):
    """
    The mean over prompts; error, 1.96 of its standard errors; and low and high, the ends of its
    95 % confidence interval. Where all numbers are 0 or 1 the interval is Wilson's (1927): it does
    not leave 0 to 1, and 0 of 12 is not 0 for sure: 0 to 0.243. wilson: is it? Otherwise the
    interval is mean - error to mean + error; one prompt has none, so error, low, high are None.
    """
    n, mean, z = len(values), fmean(values), 1.96
    error = z * math.sqrt(math.fsum((x - mean) ** 2 for x in values) / max(n - 1, 1) / n)
    found = dict(mean=mean, error=error if n > 1 else None, wilson=set(values) <= {0, 1})
    if found["wilson"]:  # the shares p from which the mean is z of *their* standard errors away
        middle = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z * math.sqrt(mean * (1 - mean) / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
        return found | dict(low=max(min(middle - half, mean), 0.0),
                            high=min(max(middle + half, mean), 1.0))
    ends = (mean - error, mean + error) if n > 1 else (None, None)
    return found | dict(zip(("low", "high"), ends, strict=True))


def as_in_run(argv, key, default, keys):
    """
    {key: (value, file)} of the runs that have made a tool's policies, for keys that argv has not:
    these are as in training. key: the tool's key that has the policies, out_dir/policy, with
    commas between several; default: its default. keys: {key of the tool: of the run}. Of several
    runs the first one that sets a key counts; where another has another value, it is said. Raises
    BadInput, see refuse_code.
    """
    typed = {arg[2:].partition("=")[0]: arg.partition("=")[2] for arg in argv}
    taken = {}  # {key: (value, file)}
    for path in from_home(typed.get(key, default)).split(","):
        folder = os.path.dirname(os.path.realpath(path.strip()))
        run, file = config_of(folder), os.path.join(folder, "config.json")
        if "out_dir" in run:  # else it is not of a run
            known = {name: run[theirs] for name, theirs in keys.items() if theirs in run}
            new = {name: x for name, x in known.items()  # what is empty, a later run may set
                   if name not in typed and taken.get(name, [""])[0] == ""}
            refuse_code(new, file, typed.get("trust_code") == "True")
            where = os.path.relpath(file)
            other = [f"{keys[name]}={x!r}" for name, x in known.items()
                     if name in taken.keys() - new and x not in ("", taken[name][0])]
            if other:
                say(f"{where}: not used, because all are judged alike: {' '.join(other)}")
            taken |= {name: (x, where) for name, x in new.items()}
    asked = {name: x for name, (x, _) in taken.items()} | typed
    if not asked.get("environment") and not asked.get("tools"):  # --environment= says: none
        taken.pop("max_turns", None)  # it would have no effect
    return taken


def run_script(script, argv, names):
    """Run a script with these arguments, without a line. names: gets its variables."""
    names |= {"__name__": "__main__", "__file__": script}
    with open(script, encoding="utf-8-sig") as f:
        code = compile(f.read(), script, "exec")
    with mock.patch.object(sys, "argv", [sys.argv[0], *argv]), contextlib.redirect_stdout(
            io.StringIO()), contextlib.suppress(SystemExit):
        exec(code, names)


def typed(keys):
    """The arguments that give a script these keys."""
    return [f"--{name}={value}" for name, value in keys.items()]


def refuse_code(keys, file, trusted):
    """
    Raise BadInput where keys, which stand in the config.json `file` of a run, name a FILE.py:f:
    perhaps somebody has sent this folder, and a tool would run that file. trusted: it may.
    """
    for key, value in keys.items():
        # a tool writes KEY = VALUE: another key would be code, or a name in other letters
        if not (key.isascii() and key.isidentifier()):
            raise BadInput(f"{file} has {key!r} as a key, which is no name; no run writes this")
        text = "" if value is None else str(value)
        # FILE.py:f may stand in a list or behind a weight, so it is not looked for more closely
        if not trusted and (key in ("environment", "tools") and text or key in NAME_CODE
                            and ":" in text):
            # the innermost word is the file, or the beginning of its name
            named = re.split("[*,=]", text.rpartition(":")[0] or text)[-1].strip(" []'\"")
            raise BadInput(f"{file} names in its {key} the Python file "
                           f"{os.path.abspath(named)!r}, which this would run, from {text!r}; if "
                           "you trust it, type --trust_code=True")


def config_of(folder):
    """{key: value} of the config.json in the folder of a run; {} without one. Raises BadInput."""
    file = os.path.join(folder, "config.json")
    try:
        keys = read_json(file) if os.path.isfile(file) else {}
        if not isinstance(keys, dict):
            raise ValueError("it has no keys of a run")
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{file} is damaged ({first_line(e)[:200]}); give another folder") from e
    return keys


def system_message_of(path):
    """
    [the system message] of the first row that the run of a policy, out_dir/policy, has trained on;
    [] where it has none, or the file is gone.
    """
    run = config_of(os.path.dirname(os.path.realpath(path)))
    data = str(run.get("prompts_path") or run.get("train_path") or "")
    data = data if os.path.isfile(data) else data.split(",")[0].rpartition("*")[2].strip()
    with contextlib.suppress(BadInput, StopIteration, LookupError, TypeError):  # odd rows have none
        prompt = rename(next(raw_rows(data))[1], str(run.get("fields", ""))).get("prompt")
        if isinstance(prompt, list) and prompt[0]["role"] == "system":
            return prompt[:1]
    return []


def split_paths(text, key):
    """
    {short name: path} of a key's paths: x/a/ppo,x/b/ppo -> a/ppo and b/ppo. The names can be
    printed. Raises BadInput.
    """
    paths = [path.strip() for path in text.split(",") if path.strip()]
    for path in paths:
        if " " in path and not os.path.isdir(path) and any(map(os.path.isdir, path.split())):
            raise BadInput(f"{key} = {text!r}: there are commas between several folders")
    full = list(map(os.path.abspath, paths))
    if not paths or len(set(full)) < len(full):
        raise BadInput(f"{key} = {text!r}: wanted a folder, or several different ones with commas")
    above = os.path.commonpath(list(map(os.path.dirname, full)))
    names = [visible(os.path.relpath(one, above)) for one in full]
    return dict(zip(names, paths, strict=True))


def read_records(file):
    """
    The dicts of a log.jsonl, samples.jsonl or rollouts.jsonl; None in the place of a number that is
    not finite. A last line without an end is left out: the run may be writing it. Raises BadInput.
    """
    if not os.path.isfile(file):
        raise BadInput(f"{file}: no such file; give the folder of a run that has logged something")
    with open(file, encoding="utf-8", errors="replace") as f:
        lines = [line for line in f if line.endswith("\n")]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line, parse_constant=lambda name: None))
            if type(records[-1]["iteration"]) is not int:
                raise TypeError
        except (ValueError, TypeError, KeyError) as e:
            raise BadInput(f"{file}, line {number}: no record of a run") from e
    return records


def read_samples(file):
    """read_records of a samples.jsonl or rollouts.jsonl, each with its response as one text."""
    samples = read_records(file)
    for number, sample in enumerate(samples, 1):
        try:
            sample["text"] = response_of(sample["text"], sample.get("messages"))
            sample["scores"] = {name: x for name, x in sample["scores"].items()
                                if isinstance(x, (int, float))}
        except (TypeError, KeyError, AttributeError) as e:
            raise BadInput(f"{file}, line {number}: no sample of a run") from e
    return samples


def response_of(text, messages):
    """A response as one text; of several turns, with the messages in between."""
    if messages is None:
        return text
    return " ".join(m["content"].strip() if m["role"] == "assistant" else
                    f"[{m['role']}: {m['content'].strip()}]" for m in messages)


def texts_as_read(texts):
    """[response_of each response] in the texts that batches.texts_of gives."""
    dialogues = texts.get("dialogues") or [None] * len(texts["completions"])
    return list(map(response_of, texts["completions"], dialogues))


def fill_page(file, title, data):
    """The text of a page: of `file`, a page without data, with a title and the data as JSON."""
    # Inside <script> the browser only looks for "<": with none of them in the data, no text of a
    # sample can end the script or begin a tag. JSON reads \u003c as the same character.
    data = json.loads(json.dumps(data), parse_constant=lambda name: None)  # JSON has no NaN
    text = json.dumps(data).replace("<", "\\u003c")
    with open(file, encoding="utf-8") as f:
        page = f.read().replace("<!-- title -->", html.escape(visible(title)))
    return page.replace("<!-- data -->", text, 1)
