"""
What a user may have meant, looked up once something has failed. The core does the plain thing;
where it fails, a function here looks at what was given, and returns the error: in one line what is
wrong, where, and what to type.
"""
import difflib
import glob
import os
import re
import secrets
import shlex
import traceback
from collections import Counter
from pathlib import Path

from configurator import unknown
from errors import BadInput, first_line, say, shorten

CODE = ".py", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".rs", ".go", ".js", ".ts", ".java"  # of files
# keys that decide, beside the rows and the tokenizer, which token ids a run reads
READ_BY = ("fields", "too_long", "max_prompt_tokens", "max_tokens", "chat_template",
           "template_kwargs", "system_prompt", "environment", "tools")


def nearest(path):
    """"; it is a folder", or "; did you mean FILE?" of a file with nearly this name, or ""."""
    if os.path.isdir(path):
        return "; it is a folder: give a file in it"
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)  # not sft_val for rl_val
    return f"; did you mean {os.path.join(folder, near[0])}?" if near else ""


def nearest_or_maker(path):
    """nearest, or how to make the path, where a prepare.py lies beside it; or ""."""
    maker = os.path.join(os.path.dirname(path), "prepare.py")
    return nearest(path) or f"; type: python {maker}" * os.path.isfile(maker)


def another_run(out_dir, key, before, config):
    """
    Of an out_dir whose run, with the config `before`, has another value of this key than the
    config. Of token_ids, a hash, it names the keys that decide it and differ.
    """
    differ = ", ".join(f"{name} = {before.get(name)!r}, not {config.get(name)!r}"
                       for name in (READ_BY if key == "token_ids" else [key])
                       if before.get(name) != config.get(name))
    what = f"{before['script']} with {differ}"
    if key == "token_ids":
        differ = differ or "the rows have changed, the tokenizer, or its chat template"
        what = f"other token ids: {differ}"
    return BadInput(f"{out_dir} holds a run of {what}; put it back, or choose another --out_dir")


def line_of(path, error):
    """The line of a file at which it has failed, or which is no Python."""
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == path]
    return lines[-1] if lines else getattr(error, "lineno", "?")


# --------------------------------------------------------------------------------------------------
# arguments and config files


def without_value(argv, keys):
    """Of arguments, one of which is a key alone, such as --rate 0.5."""
    arg, behind = next((arg, behind) for arg, behind in zip(argv, [*argv[1:], "--"], strict=True)
                       if arg.startswith("--") and "=" not in arg)
    if arg[2:] not in keys:
        return unknown(arg[2:], keys, arg)
    if behind.startswith("--") or behind.endswith(".py"):  # the next argument, and not the value
        default = keys[arg[2:]].default
        behind = not default if isinstance(default, bool) else default  # who names it changes it
    return BadInput(f"{arg}: a value is missing; type {arg}={shlex.quote(str(behind))}")


def check_others(config, keys, overrides):
    """Raise BadInput where a set key lacks another one, or excludes it: see configurator."""
    for name, (value, where) in overrides.items():
        comment = keys[name].comment
        beside = re.match(r"\*? ?with (\w+(?: or \w+)*): ", comment)
        if beside and value != keys[name].default and not any(
                is_on(config.get(other), keys.get(other)) for other in beside[1].split(" or ")):
            raise BadInput(f"{name} ({where}) has no effect without {beside[1]}")
        instead = re.match(r"instead of (\w+): ", comment)
        _, other = overrides.get(instead and instead[1], ("", ""))
        if value and other in (where, "command line"):
            raise BadInput(f"{name} ({where}) is set, and {instead[1]} ({other}); keep one of them")


def is_on(value, key):
    """Whether a key is set: a text is not the default, any other value is not 0."""
    return value != key.default if isinstance(value, str) else bool(value)


def no_config_file(path, keys, error):
    """Of a file that could not be run as a config file, or an argument that is no file."""
    if not os.path.isfile(path):
        name = path.partition("=")[0].lstrip("+-")
        if "=" in path and name not in keys:  # a key without its dashes, or as Hydra has it
            return unknown(name, keys, path)
        more = "; type --key=value, without blanks"
        if path.endswith(".py"):
            more = nearest(path)
        elif os.path.isfile(f"{path}.py"):
            more = f"; did you mean {path}.py?"
        elif "=" not in path and "/" in path.rstrip("/") or os.path.isdir(path):
            more = key_of_folder(path, keys)
        return BadInput(f"there is no config file {path!r}{more}")
    if not path.endswith(".py") or str(error) == f"{path} is no config file":
        data = [key for key in ("prompts_path", "train_path", "prompts", "source") if key in keys]
        return BadInput(f"{path} is no config file, which ends in .py and sets keys, as seed = 2; "
                        f"to give data, type --{(data or ['KEY'])[0]}={path}")
    return BadInput(f"{path}, line {line_of(path, error)}: {first_line(error)}")


def key_of_folder(path, keys):
    """"; type --KEY=PATH": how a script or tool is given a folder, or a name on the hub."""
    path, key = path.rstrip("/"), next((key for key in (
        "runs", "run", "policy_path", "policies", "init_from", "source") if key in keys), "")
    if key not in ("runs", "run") and os.path.isdir(f"{path}/policy"):  # the folder of a run
        path += "/policy"
    return f"; to give this folder, type --{key}={path}" if key else ""


def file_of_key(path, key, others=""):
    """The text of a file that a key names, also with a byte order mark. Raises BadInput."""
    try:
        return Path(path).read_text("utf-8-sig")
    except OSError as e:
        raise BadInput(f"{key} = {path!r}: {e.strerror}{others or nearest(path)}") from e
    except UnicodeDecodeError as e:
        raise BadInput(f"{key} = {path!r}: this file is no UTF-8 text ({e.reason} at byte {e.start}"
                       "); save it as UTF-8") from e


def check_place(out_dir, resumes):
    """Raise BadInput where out_dir holds code, or all that is yours. resumes: it has a run."""
    top, found = os.path.realpath(out_dir), []
    program = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for folder in program, os.path.realpath(os.path.expanduser("~")), os.getcwd():
        if os.path.commonpath([top, folder]) == top and not (resumes and folder == os.getcwd()):
            found.append(f"is {folder}, or a folder above it")
    own = top.startswith(f"{program}/")  # beside a run of yours there may be a run.sh
    code = (*CODE, ".git", *[".md", ".sh", ".diff", ".jinja"] * own)
    found += [f"holds code, such as {name}" for name in sorted(os.listdir(top))
              if not resumes and name.endswith(code)]
    if not out_dir or found:
        raise BadInput(f"out_dir = {out_dir!r} {found[0] if out_dir else 'is empty'}, and would be "
                       "filled with checkpoints; choose another --out_dir, such as out/NAME")


def check_disk(out_dir):
    """
    A collective: raise BadInput, on all ranks, where one of them, on another machine, does not see
    what rank 0 writes in out_dir: it would load a checkpoint of its own, perhaps of an older run.
    """
    import parallel

    # a new name, because on another disk there may be an older run of the same name
    name = parallel.from_rank(secrets.token_hex(8))  # COLLECTIVE
    new = Path(out_dir, f".new-{name}")
    parallel.alone(new.touch)  # COLLECTIVE
    blind = parallel.ranks_where(not new.exists())  # COLLECTIVE
    parallel.alone(new.unlink)  # COLLECTIVE
    if blind:
        raise BadInput(f"on rank {blind[0]}: this rank does not see what rank 0 writes in out_dir "
                       f"{out_dir!r}; give a folder on a disk that all machines share")


# --------------------------------------------------------------------------------------------------
# rows of data

# a string such as '[{"role": "user", ...', perhaps in quotes, or with the content first
WRITTEN = r"""\s*["']?\s*(\[\s*\{\s*\\*["'](role|content|from|value)|\{\s*\\*["']role)\\*["']\s*:"""


def no_file(path):
    """Of a path of data where there is no file."""
    return BadInput(f"{path or 'the data'}: no such file in {os.getcwd()}{nearest_or_maker(path)}")


def check_text(row, field):
    """Raise BadInput where a field of a row is no text, or messages, written in JSON or Python."""
    from prompts import NO_UTF8  # it imports torch, and arguments are looked at before that

    if not isinstance(row, dict):
        raise BadInput(f"wanted an object such as {{\"prompt\": \"1+2=\"}}, found {shorten(row)}")
    value = row.get(field)
    if value is None:
        convert = "type python data/convert.py --source=FILE --out=new.jsonl"
        how = f'rename one by --fields="THEIRS>{field}", or {convert}'
        if {"chosen", "rejected"} <= row.keys():
            how = f"these are whole dialogues: {convert}"
        raise BadInput(f"field {field!r} is missing or null; the row has {', '.join(row)}; {how}")
    if not isinstance(value, str):
        raise BadInput(f"field {field!r} must be a string, or a list of {{\"role\", \"content\"}} "
                       f"messages of text, found {shorten(value)}")
    if not value or re.search(NO_UTF8, value):
        raise BadInput(f"field {field!r} is empty, or no UTF-8 text: {shorten(value)}")
    if re.match(WRITTEN, value):
        raise BadInput(f"field {field!r} is text that looks like messages, {shorten(value)}; it "
                       "would be learned letter by letter; give the list itself, in JSONL")


def of_rows(rows, path, encode, error):
    """Of rows that cannot be encoded: the first one that cannot."""
    for number, row in enumerate(rows, 1):
        try:
            list(encode([row]))
        except BadInput as e:
            return BadInput(f"{path}, row {number}: {e}")
    return error


def check_ties(pairs, path, train_path):
    """Say which pairs have the same ids twice. Raises BadInput where all to train on are such."""
    ties = [number for number, (chosen, rejected) in enumerate(pairs, 1) if chosen == rejected]
    text = (f"{path}: in {len(ties)} of {len(pairs)} pairs chosen and rejected are the same "
            f"tokens: row {', '.join(map(str, ties[:5]))}{', ...' * (len(ties) > 5)}")
    if len(ties) == len(pairs) and path == train_path:
        raise BadInput(f"{text}; if the rows differ, the chat template leaves the difference out; "
                       "type --chat_template=FILE")
    say(f"warning: {text}; they teach nothing")


# --------------------------------------------------------------------------------------------------
# folders of models and tokenizers


def no_folder(path):
    """Of a path that is neither a model's folder nor could be a name on the hub; or None."""
    for name in ("policy", "reward_model"):
        if os.path.isdir(os.path.join(path, name)):
            return BadInput(f"{path} is the folder of a run, not of a model; type {path}/{name}")
    configs = [os.path.join(path, f"{kind}config.json") for kind in ("", "adapter_")]
    if os.path.isdir(path) and not any(map(os.path.isfile, configs)):
        return BadInput(f"{path}: no config.json in this folder, it is not a saved model")
    if not os.path.isdir(path) and (path.count("/") != 1 or path.startswith((".", "/", "out/"))):
        hint = nearest_or_maker(path) or "; train it first, or prepare the data" * ("/" in path)
        return BadInput(f"{path!r}: no such folder, and no name on the hub, which is OWNER/NAME, "
                        f"as openai-community/gpt2{hint}")
    return None


def no_model(path, error):
    """Of a folder, or a name on the hub, from which transformers has read no model."""
    pickles = [name for ending in ("bin", "pt", "pth", "ckpt", "gguf")
               for name in glob.glob(f"{glob.escape(path)}/*.{ending}")
               if "training_args" not in name]
    if pickles and not glob.glob(f"{glob.escape(path)}/*.safetensors"):
        return BadInput(
            f"{path}: its weights are {os.path.basename(pickles[0])}, and only safetensors are read"
            + ("" if pickles[0].endswith("gguf") else
               " (a pickle can run code); if you trust it, type python -c 'from transformers "
               f"import AutoModelForCausalLM as M; M.from_pretrained(\"{path}\").save_pretrained("
               f"\"{path}-safe\")' and copy its tokenizer's files there; of a reward model "
               "AutoModelForSequenceClassification"))
    return no_folder(path) or BadInput(
        f"{path}: transformers cannot load this model: {first_line(error)}")


def no_tokenizer(path, error):
    """Of a folder, or a name on the hub, from which transformers has read no tokenizer."""
    kinds = "tokenizer.json", "*.model", "*.tiktoken", "vocab*", "*.vocab"
    what = f"no usable tokenizer ({first_line(error)[:300]})"
    if not any(glob.glob(os.path.join(glob.escape(path), kind)) for kind in kinds):
        if fault := no_folder(path):
            return fault
        if os.path.isdir(path):
            what = ("this folder has no tokenizer (tokenizer.json); copy the tokenizer's files "
                    "there from the model that it was made of")
    return BadInput(f"{path}: {what}")


def wrong_tensors(report, hf, head, path):
    """Of a file whose tensors, or whose head, are not those of the model `hf`. report: a load's."""
    from load import NEW_OR_UNUSED, plain_head

    missing, extra = ({name for name in report[f"{kind}_keys"]
                       if not re.fullmatch(NEW_OR_UNUSED[head], name)}
                      for kind in ("missing", "unexpected"))
    if head == "lm" and "score.weight" in extra:
        return BadInput(f"{path} is a reward model, no language model; type the policy's folder")
    if not plain_head(hf, head):
        # transformers 5 reads both, but its version 4 and vLLM, or a sharded model, only one
        fault = ("by tie_word_embeddings in its config.json the head is the table of embeddings, "
                 "but its weights have both, and they differ; write false")
        if head == "scalar":
            fault = f"the head of {type(hf).__name__} is no linear map to one score"
        return BadInput(f"{path}: {fault}")
    labels = [shape[0] for n, shape, _ in report["mismatched_keys"] if n == "score.weight"]
    if head == "scalar" and labels:
        return BadInput(f"{path}: its head has {labels[0]} labels (num_labels in config.json), "
                        "and a reward is one number; train a reward model with rm.py")
    shapes = [f"{n}, of shape {tuple(shape)} and not {tuple(wanted)}"
              for n, shape, wanted in report["mismatched_keys"]]
    what, names = next((what, names) for what, names in (
        ("lack", missing), ("have, of a wrong shape,", shapes),
        ("have, beside the model's,", extra)) if names)
    return BadInput(f"{path}: its weights {what} the tensor {min(names)} ({len(names)} such in "
                    "all); is the download complete?")


def say_marks(rows, fields, path, marks):
    """
    Say how many rows spell special tokens, the pattern marks, in these fields: mostly somebody has
    rendered a chat, or written an EOS behind a text. They are read as letters.
    """
    firsts = Counter()  # {mark: in how many rows it is the first}
    for row in rows:
        texts = [x["content"] if isinstance(x, dict) else x for field in fields
                 for x in (row[field] if isinstance(row[field], list) else [row[field]])]
        firsts.update([mark[0] for mark in map(marks.search, texts) if mark][:1])
    if firsts:
        say(f"warning: {path}: {firsts.total()} of {len(rows)} rows have special tokens in them "
            f"that are read as plain text, mostly {firsts.most_common(1)[0][0]}; give chats as "
            "messages, and texts without an EOS: the run writes such marks itself")


def no_reward(part, where, names, before):
    """Of a part of reward_functions that is no NUMBER*NAME, or has a name of a part before it."""
    if re.search(r"\w\s*[+;|&]\s*\w|\w:[\d.]", part):
        return BadInput(f"{where}: between rewards stand commas, and each weight in front of its "
                        "name; type --reward_functions=accuracy,0.5*format")
    weight, star, name = (text.strip() for text in part.rpartition("*"))
    try:
        if star and not abs(float(weight)) < float("inf"):
            raise ValueError
    except ValueError:
        return BadInput(f"{where}: {part!r} is no NUMBER*NAME, such as 0.5*accuracy")
    if name.rpartition(":")[2] in before:
        return BadInput(f"{where}: {name.rpartition(':')[2]!r} is given twice; keep one")
    if name.endswith(".py"):
        return BadInput(f"{where}: which function of the file? Type {name}:FUNCTION")
    near = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return BadInput(f"{where}: unknown reward {name!r}{hint} There are {', '.join(names)}, and "
                    "FILE.py:FUNCTION of your own")


def no_function(path, name, module, where):
    """Of a FILE.py:FUNCTION that is not there; the file is, if it has been read as a module."""
    if module is None:
        weight = "; each weight stands in front, as in 0.5*accuracy" * where.startswith("reward_f")
        return BadInput(f"{where}: there is no file {path!r}{nearest(path)}"
                        + weight * (not path.endswith(".py")))
    own = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"
           and getattr(value, "__module__", "") == module.__name__]
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(own[:8])}" * bool(own)
    return BadInput(f"{where}: {path} has no function {name!r}{hint}")


def no_form(name, where):
    """Of a function that is no reward."""
    return BadInput(f"{where}: {name} is no function of the form {name}(batch), or {name}(prompts, "
                    "completions, ...) with lists, as TRL's; to adapt verl's or OpenRLHF's, see "
                    "'A reward of your own' in docs/data.md")


def no_field(name, parameter, known, path):
    """Of a reward in TRL's form with a parameter that is no field of the rows."""
    if parameter == "queries":  # OpenRLHF's
        return no_form(name, "reward_functions")
    return BadInput(f"{path}: the reward {name!r} has a parameter {parameter!r}, and no row has "
                    f"such a field; the fields are {', '.join(map(repr, known))}")
