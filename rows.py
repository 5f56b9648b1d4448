"""
Files -> rows. read_rows reads JSONL, JSON, CSV, parquet and data sets of the Hugging Face hub,
several of them with weights if need be, and gives each row to a function of the second half of this
file, which makes one of three kinds of it:

    supervised fine-tuning   {"prompt": ..., "completion": ...}                  sft_row
    preference pairs         {"prompt": ..., "chosen": ..., "rejected": ...}     preference_row
    prompts for PPO, GRPO    {"prompt": ..., "answer": ..., "tests": ..., ...}   prompt_row

and for PPO-ptx, beside demonstrations, text without a prompt: ptx_row.

A prompt and its completions are either all strings or all lists of messages {"role", "content"}.
The list of a completion goes on where that of the prompt ends. It begins and ends with the
assistant, and may hold several turns. If the prompt ends with the assistant, too, the completion
goes on with that very message.

Rows that look otherwise (ShareGPT, Alpaca, HH, verl, ...) are converted once, by data/convert.py.
"""
import gzip
import json
import math
import os
import re
import zlib

from answers import final_answer
from errors import BadInput, shorten
from folders import read_file

# --------------------------------------------------------------------------------------------------
# sources: one file, several, or a data set of the hub


class Rows(list):
    """
    The rows of one or several sources, one after the other.

    parts: [(source, weight, number of rows)]. A weight is None where none is given.
    """

    def __init__(self, rows=(), parts=()):
        super().__init__(rows)
        self.parts = list(parts)

    @property
    def mix(self):
        """What prompts.batch_rows wants to know: len(rows), or with weights [(n, weight), ...]."""
        if all(weight is None for _, weight, _ in self.parts):
            return len(self)
        return [(count, 1.0 if weight is None else weight) for _, weight, count in self.parts]

    def keep(self, numbers):
        """Keep the rows of these numbers alone, which are in order. Raises BadInput: none left."""
        parts, first = [], 0
        for source, weight, count in self.parts:
            left = sum(first <= number < first + count for number in numbers)
            if left == 0:
                raise BadInput(f"{source}: no row is left; raise the limit of tokens")
            parts.append((source, weight, left))
            first += count
        self[:], self.parts = [self[number] for number in numbers], parts


def where_is(rows, path, number):
    """("b.jsonl", 3): where row `number`, from 0, is from. path: for rows that have no parts."""
    for part, _, count in getattr(rows, "parts", ()):
        if number < count:
            return part, number + 1
        number -= count
    return path, number + 1


def read_rows(spec, shape, fields=""):
    """
    The rows of a key such as train_path, as Rows.

    spec: one source, or several with commas, each with a weight if you like: "a.jsonl,0.3*b.jsonl".
    shape: sft_row, preference_row, prompt_row, ptx_row, or another function of a row. fields: see
    rename. Raises BadInput with the file, the row and what is wrong there.
    """
    rows, names = Rows(), parse_fields(fields)
    for source, weight in sources_of(spec):
        before = len(rows)
        for where, row in raw_rows(source):
            try:
                rows.append(shape(rename(row, names)))
            except BadInput as e:
                raise BadInput(f"{where}: {e}{convert_it(source, shape)}") from e
        if len(rows) == before:
            raise BadInput(f"{source}: the file is empty; prepare the data first "
                           "(data/*/prepare.py)")
        rows.parts.append((source, weight, len(rows) - before))
    return rows


def convert_it(source, shape):
    """The end of the message about a row that does not suit one of our own shapes."""
    if shape not in KINDS:
        return ""
    return ("; for other layouts, or to leave such rows out, type python data/convert.py "
            f"--kind={KINDS[shape]} --source={source} --out=ours.jsonl")


def sources_of(spec):
    """ "a.jsonl,0.3*b.jsonl" -> [("a.jsonl", None), ("b.jsonl", 0.3)]. Raises BadInput."""
    if os.path.exists(spec):
        return [(spec, None)]  # one file, even if there is a comma in its name
    if not spec:
        raise BadInput("no file to train on is named; type --prompts_path=FILE (sft.py and rm.py: "
                       "--train_path=FILE)")
    found = []
    for part in spec.split(","):
        weight, star, source = part.strip().rpartition("*")
        try:
            number = float(weight) if star else None
        except ValueError:
            number = math.nan
        if not source or number is not None and not 0 < number < 1e9:
            raise BadInput(f"{spec!r}: cannot read {part!r}; wanted FILE or WEIGHT*FILE, with "
                           "commas between several, such as a.jsonl,0.3*b.jsonl")
        found.append((source, number))
    return found


def files_of(source):
    """The files of a source, in order: its own name, or those of a data set of the hub."""
    if not source.startswith("hf:"):
        return [source]
    from options.sources import hub_files

    return hub_files(source)


# --------------------------------------------------------------------------------------------------
# files -> dicts

ENDINGS = ".jsonl", ".json", ".csv", ".parquet"


def raw_rows(source):
    """
    Yield (where, row) of a source, the rows as they are: dicts. where: "FILE, line 3" of JSONL,
    "FILE, row 3" of all others. Raises BadInput.
    """
    for path in files_of(source):
        if not os.path.isfile(path):  # a pipe could not be read twice, a device might never end
            hint = f"; for a folder as the hub has them, type hf:{path}:train"
            raise BadInput(f"{path}: no such file{hint * os.path.isdir(path)}; prepare the data "
                           "first (data/*/prepare.py)")
        ending = os.path.splitext(path.lower().removesuffix(".gz"))[1]
        if ending not in ENDINGS:
            raise BadInput(f"{path}: wanted a file of {', '.join(ENDINGS)}, perhaps with .gz "
                           "behind it")
        read = json_rows
        if ending in (".csv", ".parquet"):
            from options.sources import csv_rows, parquet_rows

            read = csv_rows if ending == ".csv" else parquet_rows
        for where, row in read(path):
            if not isinstance(row, dict):
                raise BadInput(f"{path}, {where}: wanted an object such as "
                               f"{{\"prompt\": \"1+2=\"}}, found {type(row).__name__}")
            yield f"{path}, {where}", row


def read_text(path):
    """The text of a file, unpacked if it ends in .gz. Raises BadInput."""
    content = read_file(path)
    try:
        if path.lower().endswith(".gz"):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")  # sig: without the mark that Windows puts in front
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise BadInput(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from e
    except (OSError, EOFError, zlib.error) as e:
        raise BadInput(f"{path}: cannot be unpacked ({e}); download it again") from e


def json_rows(path):
    """One list of objects, or an object in each line; whatever the file is called."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        for number, row in enumerate(parse_json(text, path), 1):
            yield f"row {number}", row
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", parse_json(line, f"{path}, line {number}")


def parse_json(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{where}: not JSON ({e}); wanted an object in each line, or one list of "
                       "objects") from e


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
    A row whose fields have our names. names: [(theirs, ours)]. A dot leads into a nested field:
    reward_model.ground_truth>answer. Raises BadInput where the row has no such field.
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
# the kinds of rows. Fields that are not named here are ignored, but for a prompt, whose reward may
# read any of them

PAIR = "chosen", "rejected"  # the fields of a pair
ROLES = "system", "user", "assistant"
THEIRS = dict(prompt=("question", "problem", "instruction", "query", "task"),
              completion=("response", "output", "answer"))  # what others call these fields


def sft_row(row):
    """{"prompt", "completion"} of a row that demonstrates something. Raises BadInput."""
    if isinstance(row.get("label"), bool):
        raise BadInput("field 'label': a completion with a thumb up or down (KTO) is not learned "
                       "here; wanted pairs of chosen and rejected, or demonstrations alone")
    return dialogue(row, "completion")


def ptx_row(row):
    """
    {"prompt", "completion"} of a row for PPO-ptx. A row with the field `text` is plain text, of
    which every token is learned: its prompt is "", which no demonstration has. Any other row is one
    of sft_row. Raises BadInput.
    """
    if row.get("text") is None or row.get("completion") is not None:
        return sft_row(row)
    check_text(row["text"], "field 'text'")
    return {"prompt": "", "completion": row["text"]}


def preference_row(row):
    """
    {"prompt", "chosen", "rejected"} of a row that compares. Raises BadInput. Two numbers beside
    them are kept: `margin`, by how much the chosen one is better, from 0 on; and `confidence`, the
    probability that it is the better one.
    """
    made = dialogue(row, *PAIR)
    for name, largest in (("margin", 1e30), ("confidence", 1.0)):
        if row.get(name) in (None, ""):
            continue
        try:
            made[name] = float(row[name])  # CSV has text
        except (ValueError, TypeError, OverflowError):
            made[name] = math.nan
        if not 0 <= made[name] <= largest:
            raise BadInput(f"field {name!r} must be a number from 0 to {largest:g}, found "
                           f"{shorten(row[name])}")
    return made


def scored_row(row):
    """A row that a teacher scores: a preference_row if it has `chosen`, else an sft_row."""
    return preference_row(row) if row.get("chosen") is not None else sft_row(row)


def completions_of(rows, path):
    """
    The fields of rows of scored_row with a completion: PAIR, or ("completion",). Raises BadInput
    where some rows are pairs and some are not.
    """
    pairs = sum("chosen" in row for row in rows)
    if 0 < pairs < len(rows):
        raise BadInput(f"{path} has {pairs} pairs and {len(rows) - pairs} single responses; a run "
                       "learns from the one or the other: give one of them alone")
    return PAIR if pairs else ("completion",)


def prompt_row(row):
    """
    A row to sample responses to: its prompt, its answer as text if there is one, and all other
    fields as they are, for rewards. Raises BadInput.
    """
    row = row | dialogue(row)
    answer = row.get("answer")
    if answer is None and isinstance(row.get("reward_model"), dict):  # verl, DAPO, Skywork-OR1
        raise BadInput("field 'answer' is missing, and there is a 'reward_model'")
    if type(answer) is int or type(answer) is float and math.isfinite(answer):
        row["answer"] = repr(answer).removesuffix(".0")
    elif answer is not None:
        check_text(answer, "field 'answer', where it is no number,", may_be_empty=True)
        # plain words and numbers need no closer look, and there may be a million rows
        if not re.fullmatch(r"[ ,./+-]*\w[\w ,./+-]*", answer) and not any(
                map(str.isprintable, final_answer(answer))):
            raise BadInput(f"field 'answer' is {shorten(answer)}, which is no answer; where a row "
                           "has none, leave the field out, or write null")
    return row


KINDS = {sft_row: "sft", ptx_row: "sft", preference_row: "preferences",
         scored_row: "preferences", prompt_row: "prompts"}  # what data/convert.py calls them


def dialogue(row, *completions):
    """
    {"prompt": ..., and each of the fields `completions`}: all strings, or all lists of messages
    whose roles make a dialogue. Raises BadInput.
    """
    for name in ("tools", "image", "images"):
        if row.get(name) and row[name] not in ("[]", "{}"):
            raise BadInput(f"field {name!r}: rows with tools or images are not read; only text is")
    made = {}
    for field in ("prompt", *completions):
        if row.get(field) is None:
            theirs = next((x for x in THEIRS.get(field, ()) if x in row), "THEIRS")
            raise BadInput(f"field {field!r} is missing; {has(row)}; rename one by "
                           f'--fields="{theirs}>{field}"')
        made[field] = text_or_messages(row[field], field)
        if type(made[field]) is not type(made["prompt"]):
            raise BadInput(f"one of the fields 'prompt' and {field!r} is a string and one a list "
                           "of messages; wanted both alike")
    if isinstance(made["prompt"], str):
        return made
    if all(message["role"] != "user" for message in made["prompt"]):
        raise BadInput("field 'prompt' has no message of the user, so there is nothing to answer")
    for field in completions:
        roles = [message["role"] for message in made[field]]
        if roles[0] != "assistant" or roles[-1] != "assistant" or "system" in roles:
            raise BadInput(f"field {field!r} has the roles {', '.join(roles)}; a completion begins "
                           "and ends with the assistant, and has no system message")
    return made


def text_or_messages(value, field):
    """
    The value of a field, checked: a string that is not empty, or a list of messages, from which the
    None are taken that tables put where a message has no such field. Raises BadInput.
    """
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
        if not thoughts_of(message):  # blank, or the content's, which a template may write twice
            for name in THOUGHTS:
                message.pop(name, None)
    return messages


THOUGHTS = "reasoning_content", "reasoning", "thinking"  # fields of a message beside its content
# fields that say whether a message is learned, as trainers spell them: what a true value says.
# None: in some data the one, in some the other
FLAGS = dict.fromkeys("""weight train training trainable train_on_turn learn supervised loss
    loss_mask loss_weight loss_scale train_detail training_detail""".split(), True)
FLAGS |= dict(masked=False, ignore=False, ignore_loss=False, mask=None)


def is_learned(message):
    """Whether a message may be learned, by its FLAGS. Raises BadInput where one cannot be read."""
    learned = True
    for name in FLAGS.keys() & message.keys():
        value = str(message[name]).lower()
        if value in ("none", "", "[]"):
            continue
        if FLAGS[name] is None or value not in ("0", "0.0", "false", "1", "1.0", "true"):
            raise BadInput(f"a message has {name!r}: {shorten(value)}, which does not say whether "
                           'it is learned as a whole; write "train": true or false')
        learned &= FLAGS[name] == (value in ("1", "1.0", "true"))
    return learned


def thoughts_of(message):
    """The thoughts that a message has in one of THOUGHTS, and its content has not; or ""."""
    thoughts = next((message[name].strip() for name in THOUGHTS if message.get(name)), "")
    begins = re.match(rf"\s*(<think>)?\s*{re.escape(thoughts)}\s*</think>", message["content"])
    return "" if begins else thoughts


def check_text(text, where, may_be_empty=False):
    """
    Raise BadInput for what is no string, for an empty one, and for half a surrogate pair (the
    escape "\\ud83d" without its other half), which UTF-8 cannot hold. An empty `completion` is
    fine: EOS alone is learned.
    """
    if not isinstance(text, str):
        raise BadInput(f"{where} must be a string, found {type(text).__name__}")
    if not text and not may_be_empty:
        raise BadInput(f"{where} is empty")
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise BadInput(f"{where} holds half a surrogate pair, which is not text")
