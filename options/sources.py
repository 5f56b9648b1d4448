"""
Rows that are not simply those of one file of JSONL, or whose fields have other names:

    a.jsonl,0.3*b.jsonl        several sources, each with a weight if you like
    hf:openai/gsm8k:main:train a data set of the Hugging Face hub, or a folder in its layout
    a.csv, a.parquet           tables

And what the rows of each source score. Libraries for tables are not used, because they guess types:
they turn the answer "02" into 2 and "NA" into nothing.
"""
import contextlib
import csv
import gzip
import io
import json
import math
import os
import re
import shlex
from collections import Counter
from statistics import fmean
from zlib import crc32

from errors import BadInput, first_line, say, shorten
from options.failures import package
from options.mistakes import no_file
from prompts import Rows, permutation, prompt_row

# the name of a file of rows, and its endings
FILE = re.compile(r"(.*?)(\.(jsonl|json|csv|parquet)(?:\.gz)?)", re.I | re.S)
MOST = 64  # sources; of more there are no figures


# --------------------------------------------------------------------------------------------------
# several sources


def several_rows(spec, check_row, fields):
    """
    The Rows of a path that is not one file of JSONL; see prompts.read_rows. Of several sources a
    prompt without the field `source` gets the source's name there. Raises BadInput.
    """
    if not spec:
        raise no_file(spec)
    rows, sources, weights = Rows(path=spec), [], []
    source_of = []  # of each row the number of its source
    for number, part in enumerate([spec] if os.path.exists(spec) else spec.split(",")):
        weight, star, source = part.strip().rpartition("*")
        try:
            weights.append(float(weight) if star else None)
        except ValueError:
            weights.append(math.nan)
        if not source or star and not 0 < weights[-1] < 1e9:
            raise BadInput(f"{spec!r}: cannot read {part!r}; wanted FILE or WEIGHT*FILE, with "
                           "commas between several, such as a.jsonl,0.3*b.jsonl")
        sources.append(source)
        for file in files_in(source):
            for where, row in raw_rows(file):
                try:
                    row = rename(row, fields)
                    if re.search(r"(?i)\.csv(\.gz)?$", file):
                        row = numbers_of_pair(row)
                    rows.append(check_row(row))
                except BadInput as e:
                    said = str(e).replace("--source=FILE", f"--source={shlex.quote(source)}")
                    raise BadInput(f"{file}, {where}: {said}") from e
        if len(rows) == len(source_of):
            raise BadInput(f"{source}: the file is empty")
        source_of += [number] * (len(rows) - len(source_of))
    if len(sources) > 1 and check_row is prompt_row:
        names = names_of({*sources})
        for row, number in zip(rows, source_of, strict=True):
            row["source"] = named(row) or names[sources[number]]
    if any(weights):
        rows.mix = Mix(source_of, [weight or 1.0 for weight in weights])
    return rows


def renamed(check_row, fields):
    """check_row, behind a renaming of a row's fields by the key `fields`."""
    return lambda row: check_row(rename(row, fields))


def rename(row, fields):
    """A row with our names of the fields: "question>prompt,a.b>answer"; b stands inside a."""
    if not isinstance(row, dict):
        raise BadInput(f"wanted an object such as {{\"prompt\": \"1+2=\"}}, found {shorten(row)}")
    pairs = [part.split(">") for part in fields.split(",") if part]
    if any(len(pair) != 2 for pair in pairs):
        raise BadInput(f"fields = {fields!r}: wanted THEIRS>OURS, in quotes")
    renamed = {key: row[key] for key in row if key not in [pair[0].strip() for pair in pairs]}
    for theirs, ours in pairs:
        value = row
        for key in [theirs] if theirs in row else theirs.strip().split("."):
            if not isinstance(value, dict) or key not in value:
                raise BadInput(f"fields: {theirs!r} is missing; the row has {', '.join(row)}")
            value = value[key]
        renamed[ours.strip()] = value
    return renamed


class Mix:
    """Rows of several sources with weights. source_of: the number of each row's source."""

    def __init__(self, source_of, weights):
        self.source_of, self.weights = source_of, weights
        self.sizes = [source_of.count(n) for n in range(len(weights))]
        if 0 in self.sizes:
            raise BadInput("no row of a source is left; raise the limit of tokens")

    def keep(self, numbers):
        """The Mix of these rows alone."""
        return Mix([self.source_of[number] for number in numbers], self.weights)

    def range_of(self, row):
        """(the first row of a row's source, how many rows the source has): for options/refill.py"""
        source = self.source_of[row]
        return sum(self.sizes[:source]), self.sizes[source]

    def row_at(self, place, seed):
        """The number of the row at a place, counted over all epochs; each source has its own."""
        part, count = turn_of(place, self.weights)
        n = self.sizes[part]
        order = permutation(n, seed, "file", part, "epoch", count // n)
        return sum(self.sizes[:part]) + int(order[count % n])


def turn_of(place, weights):
    """
    (number of the source of a place in a mix, the number of its rows before this place).

    The first source gets the share s = weight / sum of all weights of the places: it gets a place
    if floor(s * place) grows there, and that number counts its rows before. The other places are
    dealt to the other sources in the same way. So at any place each source has had its share, up to
    fewer rows than there are sources. With the weights 1 and 2:  1 1 0  1 1 0  1 1 0 ...
    """
    for number, weight in enumerate(weights):
        share = weight / sum(weights[number:])  # of the places that the sources before have left
        before = int(share * place)
        if int(share * (place + 1)) > before:  # always true for the last source: its share is 1
            return number, before
        place -= before


# --------------------------------------------------------------------------------------------------
# figures by source


def names_of(paths):
    """
    {path: name} of some paths or hf:...: the words in which they differ. data/a/train.jsonl and
    data/b/train.jsonl are a and b, hard_val.csv and easy_val.csv are hard and easy.
    """
    words = {path: re.split("[/:_]+", re.sub(FILE, r"\1", path)) for path in paths}
    for end in (0, -1):
        while len({some[end] for some in words.values()}) == 1 < min(map(len, words.values())):
            for some in words.values():
                some.pop(end)
    names = {path: "_".join(some) for path, some in words.items()}
    return names if len(set(names.values())) == len(names) else {path: path for path in names}


def named(row):
    """The source that a row names, as text; "" if it names none: a list, for example, is none."""
    value = row.get("source")
    return str(value).strip() if isinstance(value, (str, int, float)) else ""


def name_sources(rows, path):
    """
    Give Rows of prompts rows.sources, the name of each row's source in metrics: one word of at most
    40 letters, without a slash; "other" where a row names none.
    """
    texts = [named(row) or "other" for row in rows]
    counts = Counter(texts)
    if len(counts) > MOST:
        say(f"{path}: {len(counts)} sources, of more than {MOST} there are no figures; rename the "
            "field 'source', if it means something else")
    elif any(map(named, rows)):
        names = {text: re.sub(r"[^\w.+:-]", "-", text)[:40] for text in counts}
        alike = Counter(names.values())  # names that are alike get the checksums of their texts
        names = {text: name + f"-{crc32(text.encode('utf-8', 'replace')):08x}" * (alike[name] > 1)
                 for text, name in names.items()}
        rows.sources = [names[text] for text in texts]
        listed = [f"{names[text]} ({count})" for text, count in counts.most_common(8)]
        say(f"{path}: sources {', '.join(listed)}{', ...' * (len(counts) > 8)}")


def figures_by_source(batch, rows, prefix, reward_names):
    """
    {"prefix/metric/source": the mean over the responses of a batch to prompts of this source}, of
    metrics.summarize's metrics. A response to which a reward does not apply, or whose row has no
    answer, does not count; without any that counts there is no figure.
    """
    columns = {name: batch[name] for name in ("scores", "accuracy", "finished") if name in batch}
    columns["length"] = batch["response_mask"].sum(1)
    if len(reward_names) > 1:
        columns |= {f"reward/{name}": batch[f"reward/{name}"] for name in reward_names}
    sources, known = [rows.sources[number] for number in batch["row"].tolist()], {}
    for name, column in columns.items():
        for source, x in zip(sources, column.tolist(), strict=True):
            if not math.isnan(x):
                known.setdefault(f"{prefix}/{name}/{source}", []).append(x)
    return {name: fmean(numbers) for name, numbers in sorted(known.items())}


# --------------------------------------------------------------------------------------------------
# files


def raw_rows(path):
    """Yield (where, row) of a file, the rows as they are. where: "line 3", or "row 3"."""
    if not os.path.isfile(path):
        raise no_file(path)
    if not (named := FILE.fullmatch(path)):
        raise BadInput(f"{path}: wanted a file of .jsonl, .json, .csv or .parquet, perhaps with "
                       ".gz behind it")
    yield from dict(csv=csv_rows, parquet=parquet_rows).get(named[3].lower(), json_rows)(path)


def json_rows(path):
    text = read_text(path)
    try:
        if text.lstrip().startswith("["):
            yield from ((f"row {number}", row) for number, row in enumerate(json.loads(text), 1))
            return
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"line {number}", json.loads(line)
    except json.JSONDecodeError as e:
        raise BadInput(f"{path}: not JSON ({e})") from e


def read_text(path):
    """The text of a file, unpacked if it ends in .gz."""
    with (gzip.open if path.lower().endswith(".gz") else open)(path, "rb") as f:
        try:
            return f.read().decode("utf-8-sig")
        except (UnicodeDecodeError, OSError, EOFError) as e:
            raise BadInput(f"{path}: cannot be read ({e})") from e


# --------------------------------------------------------------------------------------------------
# data sets of the hub


def files_in(source):
    """
    The files of a source: itself; or those of hf:NAME:SPLIT or hf:NAME:FOLDER:SPLIT, as
    hf:openai/gsm8k:main:train the files of main/ with the word `train` in their names. NAME is a
    local folder in the layout of the hub; or a name there: the hub's cache gets the files.
    """
    if not source.startswith("hf:"):
        return [source]
    match = re.fullmatch(r"hf:([^:]+):(?:([^:]*):)?([^:]+)", source)
    if not match:
        raise BadInput(f"{source!r}: wanted hf:NAME:SPLIT or hf:NAME:FOLDER:SPLIT, such as "
                       "hf:openai/gsm8k:main:train")
    name, folder, split = match.groups()
    if os.path.isdir(name):
        files = [os.path.relpath(os.path.join(place, file), name)
                 for place, _, inside in os.walk(name) for file in inside]
        return [os.path.join(name, file) for file in files_of_split(files, folder, split, source)]
    import huggingface_hub

    from options.hub import answers

    heard = answers()  # else the library tries for half a minute
    try:
        files = huggingface_hub.list_repo_files(name, repo_type="dataset")
        wanted = files_of_split(files, folder, split, source)
        copy = huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=wanted)
    except BadInput:
        raise
    except Exception as e:  # no network, no such set, no access: the library raises anything
        why = first_line(e)[:200] if heard else "no answer"
        raise BadInput(f"{source}: no such folder here, and the hub did not give it ({why}); where "
                       f"there is a network, type hf download {name} --repo-type=dataset "
                       "--local-dir=DIR, then give hf:DIR:SPLIT") from e
    return [os.path.join(copy, file) for file in wanted]


def files_of_split(files, folder, split, source):
    """The files of a split, sorted. files: all of the data set, by paths in it. Raises BadInput."""
    files = sorted(file for file in files if FILE.fullmatch(file) and file[0] != ".")
    inside = [file for file in files if not folder or file.startswith(f"{folder}/")]
    # a word of the path: `train` is one in data/train-00000.parquet, and none in train_sft.jsonl
    begins = rf"(?={re.escape(split)}(?:[-_]?\d|[/.-]))"
    wanted = [file for file in inside if re.match(f"(?:.*[/-])?{begins}", file)]
    if split == "train" and not any(re.search("(^|[/-])train", file) for file in inside):
        wanted = inside  # a set without splits
    # HumanEval/train.jsonl is the train split of a set; train/dev.jsonl and val-train.jsonl are not
    odd = [] if held_out(split) else [
        file for file in wanted
        if held_out(re.sub(f"^(?:.*/)?{begins}", "", file[len(folder or ""):]))]
    fault, clear = "held out by name", [file for file in wanted if file not in odd]
    first = {}  # data.jsonl and data.csv.gz, train-00000-of-00001.parquet and train.json
    for file in [] if odd else wanted:
        name, ending, _ = FILE.fullmatch(file.lower()).groups()
        other, its = first.setdefault(re.sub(r"-\d+-of-\d+$", "", name), (file, ending))
        if its != ending:
            fault, odd, clear = "one name in two formats", [other, file], wanted
    if odd:
        name = source.split(":")[1]
        place, get = (name, "") if os.path.isdir(name) else (
            "DIR", f" (after hf download {name} --repo-type=dataset --local-dir=DIR)")
        raise BadInput(f"{source} would read {', '.join(odd[:4])}, {fault}; type the file itself, "
                       f"{os.path.join(place, (clear or odd)[0])}{get}, or several with commas")
    folders = {os.path.dirname(file) for file in wanted}
    if not wanted or len(folders) > 1 and not folder:
        found = f"it is in the folders {sorted(folders)}" if wanted else f"there are {files}"
        raise BadInput(f"{source}: cannot tell which files are {split!r}, {found[:300]}; wanted "
                       "hf:NAME:SPLIT or hf:NAME:FOLDER:SPLIT")
    return wanted


def held_out(name):
    """Whether val, test, held_out ... is a word of a name: of myTest.csv, not of latest.jsonl."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[\W\d_]+", " ", name).lower()
    return re.search(r"\b((val|valid|validation|dev|test|testing|eval|evaluation) ?(set|data)?"
                     r"|(held|hold) ?out)\b", words)


# --------------------------------------------------------------------------------------------------
# tables


def csv_rows(path):
    """
    The first line names the columns, with commas between them, or without any comma semicolons or
    tabs; a value in quotes may have newlines. All are text.
    """
    csv.field_size_limit(2**30)
    text = io.StringIO(read_text(path), newline="")
    try:
        first = text.getvalue().partition("\n")[0]  # Excel writes semicolons in many countries
        comma = next((sign for sign in ",;\t" if sign in first), ",")
        for number, row in enumerate(csv.DictReader(text, strict=True, delimiter=comma), 1):
            if None in row or None in row.values():
                raise BadInput(f"{path}, row {number}: not as many columns as in the first line; "
                               "is a quote or a comma missing?")
            yield f"row {number}", row
    except csv.Error as e:
        raise BadInput(f"{path}: not a table ({e})") from e


def numbers_of_pair(row):
    """A row of csv_rows with a pair's margin and confidence as numbers; an empty one is none."""
    for name in {"margin", "confidence"} & row.keys() if "chosen" in row else ():
        with contextlib.suppress(ValueError):  # rm.py says of any other text that it is no number
            row[name] = float(row[name]) if row[name].strip() else None
    return row


def parquet_rows(path):
    pyarrow, parquet = (package("pyarrow", path, name) for name in ("pyarrow", "pyarrow.parquet"))
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            # of 32 bits: the digits that were written, 0.1 and not 0.10000000149
            digits = {field.name: batch.column(field.name).cast(pyarrow.string()).to_pylist()
                      for field in batch.schema if field.type == pyarrow.float32()}
            for i, row in enumerate(batch.to_pylist()):
                number += 1
                row |= {name: texts[i] and float(texts[i]) for name, texts in digits.items()}
                yield f"row {number}", row
    except (OSError, ValueError, pyarrow.ArrowException) as e:
        raise BadInput(f"{path}: not a parquet file that can be read ({first_line(e)})") from e
