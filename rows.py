"""
Files -> rows. read_rows reads JSONL and gives each row to a function that checks it and brings it
into one form: prompt_row for the prompts of PPO and GRPO, and the functions of completions.py for
sft.py and rm.py. options/sources.py reads other files, and several files with weights.

    {"prompt": "1+2=", "answer": "3"}
    {"prompt": [{"role": "user", "content": "1+2=?"}], "answer": "3"}

A prompt is a string, or a list of messages {"role", "content"}. data/convert.py converts rows of
other layouts (ShareGPT, Alpaca, HH, verl, ...), once.
"""
import contextlib
import gzip
import json
import math
import os
import re
import zlib
from itertools import chain

from answers import final_answer
from errors import BadInput, shorten
from folders import prepare_hint, read_file


class Rows(list):
    """
    The rows of one or several sources, one source after the other.

    parts: [(source, weight, number of rows)]; weight: None where none is given. ids: the token ids
    of each row's prompt, in scripts that need them.
    """

    def __init__(self, rows=(), parts=()):
        super().__init__(rows)
        self.parts, self.ids = list(parts), []

    @property
    def mix(self):
        """n of prompts.batch_rows: len(rows), or with weights [(n, weight), ...]."""
        if all(weight is None for _, weight, _ in self.parts):
            return len(self)
        return [(count, 1.0 if weight is None else weight) for _, weight, count in self.parts]


def at_row(rows, path):
    """
    A function of a row's number, from 0, that makes a context: a BadInput that is raised in it,
    such as by a chat template, gets the row's source and its number there, from 1, in front. path:
    the source of rows without parts.
    """
    @contextlib.contextmanager
    def naming(number):
        try:
            yield
        except BadInput as e:
            source = path
            for part, _, count in getattr(rows, "parts", ()):
                if number < count:
                    source = part
                    break
                number -= count
            raise BadInput(f"{source}, row {number + 1}: {e}") from e

    return naming


def keep_rows(rows, numbers):
    """
    Keep only the rows of these numbers, which are in order. Raises BadInput where a source would
    have no row left.
    """
    if len(numbers) == len(rows):
        return
    parts, first = [], 0
    for source, weight, count in rows.parts:
        left = sum(first <= number < first + count for number in numbers)
        if left == 0:
            raise BadInput(f"{source}: no row is left; raise the limit of tokens")
        parts.append((source, weight, left))
        first += count
    rows[:], rows.parts = [rows[number] for number in numbers], parts


# --------------------------------------------------------------------------------------------------
# files -> dicts

# the functions that check a row, and the names of their rows in data/convert.py
KINDS = dict(prompt_row="prompts", sft_row="sft", ptx_row="sft", preference_row="preferences",
             scored_row="preferences")
ENDINGS = ".jsonl", ".json", ".csv", ".parquet"


def read_rows(spec, shape, fields=""):
    """
    The rows of a key such as prompts_path, as Rows.

    spec: a file, or more, see sources_of. shape: prompt_row, or another function that checks a row
    and returns it in its form. fields: see rename. Raises BadInput with the file, the row and the
    fault.
    """
    rows, names = Rows(), parse_fields(fields)
    for source, weight, files in sources_of(spec):
        before = len(rows)
        for where, row in chain.from_iterable(map(raw_rows, files)):
            try:
                rows.append(shape(rename(row, names)))
            except BadInput as e:
                kind = KINDS.get(shape.__name__)
                hint = kind and ("; for other layouts, or to leave such rows out, type python "
                                 f"data/convert.py --kind={kind} --source={source} "
                                 "--out=ours.jsonl")
                raise BadInput(f"{where}: {e}{hint or ''}") from e
        if len(rows) == before:
            raise BadInput(f"{source}: the file is empty{prepare_hint(source)}")
        rows.parts.append((source, weight, len(rows) - before))
    return rows


def sources_of(spec):
    """
    The sources of a key such as prompts_path, [(source, weight or None, its files), ...]: one file,
    several, with weights or without, or data sets of the hub. Raises BadInput.
    """
    if not spec:
        raise BadInput("no file to train on is named; type --prompts_path=FILE (sft.py and rm.py: "
                       "--train_path=FILE)")
    if os.path.exists(spec) or not re.search("[,*:]", spec):
        return [(spec, None, [spec])]
    from options.sources import several_sources

    return several_sources(spec)


def files_of(spec):
    """All files of a key such as prompts_path, in order."""
    return [file for _, _, files in sources_of(spec) for file in files]


def raw_rows(path):
    """
    Yield (where, row) of a file, the rows as they are: dicts. where: "FILE, line 3" of JSONL,
    "FILE, row 3" of all others. Raises BadInput.
    """
    if not os.path.isfile(path):  # a pipe could not be read twice, a device might never end
        hint = f"; for a folder as the hub has them, type hf:{path}:train"
        raise BadInput(f"{path}: no such file{hint * os.path.isdir(path)}{prepare_hint(path)}; "
                       f"the current folder is {os.getcwd()}")
    ending = os.path.splitext(path.lower().removesuffix(".gz"))[1]
    if ending not in ENDINGS:
        raise BadInput(f"{path}: wanted a file of {', '.join(ENDINGS)}, perhaps with .gz behind it")
    found = json_rows(path)
    if ending in (".csv", ".parquet"):
        from options.sources import csv_rows, parquet_rows

        found = csv_rows(path) if ending == ".csv" else parquet_rows(path)
    for where, row in found:
        if not isinstance(row, dict):
            raise BadInput(f"{path}, {where}: wanted an object such as {{\"prompt\": \"1+2=\"}}, "
                           f"found {type(row).__name__}")
        yield f"{path}, {where}", row


def json_rows(path):
    """One list of objects, or an object in each line; the file's name does not matter."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        for number, row in enumerate(parse_json(text, path), 1):
            yield f"row {number}", row
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", parse_json(line, f"{path}, line {number}")


def parse_json(text, where):
    """The value of a JSON text. Raises BadInput."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{where}: not JSON ({e}); wanted an object in each line, or one list of "
                       "objects") from e


def read_text(path):
    """The text of a file, unpacked if it ends in .gz. Raises BadInput."""
    content = read_file(path)
    try:
        if path.lower().endswith(".gz"):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")  # sig: without the mark of Windows at the beginning
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise BadInput(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from e
    except (OSError, EOFError, zlib.error) as e:
        raise BadInput(f"{path}: cannot be unpacked ({e}); download it again") from e


# --------------------------------------------------------------------------------------------------
# names of fields


def parse_fields(fields):
    """ "question>prompt,a.b>answer" -> [("question", "prompt"), ("a.b", "answer")]."""
    pairs = [tuple(name.strip() for name in part.split(">")) for part in fields.split(",") if part]
    for pair in pairs:
        if len(pair) != 2 or not all(pair):
            raise BadInput(f"fields = {fields!r}: cannot read {'>'.join(pair)!r}; wanted "
                           "THEIRS>OURS, such as question>prompt,solution>answer")
    return pairs


def rename(row, names):
    """
    A row with quartet's names of the fields. names: [(theirs, ours)]. A dot leads into a nested
    field: reward_model.ground_truth>answer. Raises BadInput where the row has no such field.
    """
    given, row = row, {key: row[key] for key in row if key not in [theirs for theirs, _ in names]}
    for theirs, ours in names:
        value = given
        for key in [theirs] if theirs in given else theirs.split("."):
            if not isinstance(value, dict) or key not in value:
                raise BadInput(f"field {theirs!r} is missing, which fields names; {has(given)}")
            value = value[key]
        row[ours] = value
    return row


def has(row):
    return f"the row has {shorten(list(row), 200)}"


# --------------------------------------------------------------------------------------------------
# a row of prompts, checked

ROLES = "system", "user", "assistant"
THEIRS = dict(prompt=("question", "problem", "instruction", "query", "task"),
              completion=("response", "output", "answer"))  # names of these fields in other data
THOUGHTS = "reasoning_content", "reasoning", "thinking"  # fields of a message beside its content


def prompt_row(row):
    """
    A row with a prompt to answer: its prompt, its answer as text if there is one, and all other
    fields as they are, for rewards. Raises BadInput.
    """
    row = row | {"prompt": prompt_of(row)}
    answer = row.get("answer")
    if answer is None and isinstance(row.get("reward_model"), dict):  # verl, DAPO, Skywork-OR1
        raise BadInput("field 'answer' is missing, and there is a 'reward_model'")
    if type(answer) is int or type(answer) is float and math.isfinite(answer):
        row["answer"] = repr(answer).removesuffix(".0")
    elif answer is not None:
        check_text(answer, "field 'answer', where it is no number,", may_be_empty=True)
        # plain words and numbers are right: this is fast, and there may be a million rows
        if not re.fullmatch(r"[ ,./+-]*\w[\w ,./+-]*", answer) and not any(
                map(str.isprintable, final_answer(answer))):
            raise BadInput(f"field 'answer' is {shorten(answer)}, which is no answer; where a row "
                           "has none, leave the field out, or write null")
    return row


def prompt_of(row):
    """The prompt of a row, checked: a string, or messages, one from the user. Raises BadInput."""
    for name in ("tools", "image", "images"):
        if row.get(name) and row[name] not in ("[]", "{}"):
            raise BadInput(f"field {name!r}: rows with tools or images are not read; only text is")
    prompt = text_or_messages(row, "prompt")
    if not isinstance(prompt, str) and all(message["role"] != "user" for message in prompt):
        raise BadInput("field 'prompt' has no message of the user, so there is nothing to answer")
    return prompt


def text_or_messages(row, field):
    """
    A field of a row, checked: a string that is not empty, or a list of messages. Message fields
    that are None are dropped: tables have them where a message has no such field. Raises BadInput.
    """
    value = row.get(field)
    if value is None:
        theirs = next((x for x in THEIRS.get(field, ()) if x in row), "THEIRS")
        raise BadInput(f"field {field!r} is missing; {has(row)}; rename one by "
                       f'--fields="{theirs}>{field}"')
    if isinstance(value, str):
        if re.match(r"""\s*\[\s*\{\s*["'](role|content|from)["']\s*:""", value):
            raise BadInput(f"field {field!r} is a list of messages, written as a string; write "
                           "JSONL with the list itself")
        check_text(value, f"field {field!r}", may_be_empty=field == "completion")
        return value
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise BadInput(f"field {field!r} must be a string or a list of {{\"role\", \"content\"}} "
                       f"messages, found {shorten(value)}")
    messages = [{key: given for key, given in m.items() if given is not None} for m in value]
    for number, message in enumerate(messages, 1):
        where, role = f"field {field!r}, message {number}", message.get("role")
        if role not in ROLES or role == "system" and number > 1:
            raise BadInput(f"{where}: the role is {shorten(role)}; wanted {', '.join(ROLES)}, and "
                           "system only in front")
        if message.get("tool_calls") or message.get("function_call"):
            raise BadInput(f"{where}: it calls a tool, and dialogues with tools are not read")
        if isinstance(message.get("content"), list):
            raise BadInput(f"{where}: the content is a list of parts; images are not read, only "
                           "a string is")
        check_text(message.get("content"), f"{where}: the content",
                   may_be_empty=field == "completion" or role == "system")
        for name in THOUGHTS:
            check_text(message.get(name, ""), f"{where}: {name}", may_be_empty=True)
        if not thoughts_of(message):  # empty, or also in the content: a template may write it twice
            for name in THOUGHTS:
                message.pop(name, None)
    return messages


def thoughts_of(message):
    """The thoughts in one of the fields THOUGHTS that the content does not have, too; or ""."""
    thoughts = next((message[name].strip() for name in THOUGHTS if message.get(name)), "")
    begins = re.match(rf"\s*(<think>)?\s*{re.escape(thoughts)}\s*</think>", message["content"])
    return "" if begins else thoughts


def check_text(text, where, may_be_empty=False):
    """
    Raise BadInput for a value that is no string, for an empty string, and for half a surrogate pair
    (the escape "\\ud83d" without its other half), which UTF-8 does not have. An empty `completion`
    is allowed: only EOS is learned.
    """
    if not isinstance(text, str):
        raise BadInput(f"{where} must be a string, found {type(text).__name__}")
    if not text and not may_be_empty:
        raise BadInput(f"{where} is empty")
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise BadInput(f"{where} holds half a surrogate pair, which is not text")
