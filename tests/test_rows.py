"""rows.py: files of every kind, texts that must not change, how bad rows are named; several files, sets of the hub."""
import gzip
import json
import math
import re
from decimal import Decimal

import numpy as np
import pytest

import before_torch  # noqa: F401, numbers of any length
from completions import preference_row, sft_row
from errors import BadInput
from options.ptx import ptx_row
from rows import Rows, at_row, files_of, keep_rows, parse_fields, prompt_row, read_rows, rename, sources_of
from tiny import assistant, jsonl, system, user


S, U, A, B = system("s"), user("u"), assistant("a"), assistant("b")

# ---------------------------------------------------------------------------------------------------------------------
# texts arrive as they were written

TEXTS = ["02", "NA", "null", "nan", "2024-01-31", "314159265358979323846264338327", "1e5", "True", " x ", "0.10", "N/A",
         "a, \"b\"\né\u2028\U0001f600", "\\frac{1}{2}", "'", "1,000"]


def write_tables(folder, table):
    """The same rows of texts as files of every kind; returns their paths."""
    lines = "".join(json.dumps(row) + "\n" for row in table)
    (folder / "a.jsonl").write_text(lines)
    (folder / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(table[0]).encode() + b"\r\n\r\n" + "\r\n".join(
        json.dumps(row, ensure_ascii=False) for row in table[1:]).encode())
    (folder / "lines.json").write_text(lines)
    (folder / "list.json").write_text("\n" + json.dumps(table, indent=1))
    (folder / "A.JSONL.GZ").write_bytes(gzip.compress(lines.encode(), mtime=0))
    cells = [[*table[0]], *([row[key] for key in table[0]] for row in table)]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells]
    (folder / "a.csv").write_text("\ufeff" + "\r\n".join(quoted), newline="", encoding="utf-8")
    return sorted(folder.iterdir())


def test_texts_are_not_changed(tmp_path):
    table = [dict(prompt=f"{i}", answer=text) for i, text in enumerate(TEXTS)]
    paths = write_tables(tmp_path, table)
    assert len(paths) == 6
    for path in paths:
        assert read_rows(str(path), prompt_row) == table, path
    long = "9" * 5000  # Python by itself reads 4,300 digits
    for numbers, want in ([72.0, "72"], [-1e-9, "-1e-09"], [10**30 + 1, f"{10**30 + 1}"], [int(Decimal(long)), long]):
        jsonl(tmp_path / "n.jsonl", [dict(prompt="p", answer=numbers, n=numbers)])
        assert read_rows(str(tmp_path / "n.jsonl"), prompt_row) == [dict(prompt="p", answer=want, n=numbers)]


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = [dict(prompt=[U], answer=text, more=dict(n=1, none=None)) for text in TEXTS]
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    assert read_rows(str(tmp_path / "a.parquet"), prompt_row) == table
    # 32 and 16 bits: the shortest decimals that mean them, at the top and inside; 64 bits as they are
    numbers = [0.1, 0.2, 1 / 3, 16777216.0, 1e20, -0.0001, 5.0, None]
    texts = {"float32": ["0.1", "0.2", "0.33333334", "16777216", "1e+20", "-0.0001", "5", None],
             "float16": ["0.1", "0.2", "0.3333", None, None, "-0.0001", "5", None],
             "float64": ["0.1", "0.2", "0.3333333333333333", "16777216", "1e+20", "-0.0001", "5", None]}
    for kind, want in texts.items():
        given = [None if text is None else x for x, text in zip(numbers, want, strict=True)]
        array = pyarrow.array(np.array([x or 0 for x in given], kind), mask=np.array([x is None for x in given]))
        inside = pyarrow.StructArray.from_arrays([array], ["deep"])
        lists = pyarrow.ListArray.from_arrays(list(range(9)), array)
        parquet.write_table(pyarrow.table(dict(prompt=["?"] * 8, answer=array, more=inside, n=lists)), tmp_path / "a.parquet")
        rows = read_rows(str(tmp_path / "a.parquet"), prompt_row)
        assert [row["answer"] for row in rows] == want, kind
        as_floats = [None if text is None else float(text) for text in want]
        assert [row["more"]["deep"] for row in rows] == as_floats == [row["n"][0] for row in rows], kind
        assert read_rows(str(tmp_path / "a.parquet"), prompt_row, "more.deep>answer")[0]["answer"] == "0.1"
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match="a.parquet: not a parquet file"):
        read_rows(str(tmp_path / "a.parquet"), prompt_row)


# ---------------------------------------------------------------------------------------------------------------------
# rows of the three kinds

@pytest.mark.parametrize("shape, row, want", [
    (sft_row, {"prompt": [S, U], "completion": [A, U, B], "label": 1}, {"prompt": [S, U], "completion": [A, U, B]}),
    (sft_row, {"prompt": [U, assistant("so")], "completion": [B | {"name": None, "thinking": "hm"}], "tools": []},
     {"prompt": [U, assistant("so")], "completion": [B | {"thinking": "hm"}]}),
    (ptx_row, {"text": "t"}, {"prompt": "", "completion": "t"}),
    (preference_row, {"prompt": "p", "chosen": "c", "rejected": "r", "margin": "0.5", "confidence": None},
     {"prompt": "p", "chosen": "c", "rejected": "r", "margin": 0.5}),
    (preference_row, {"prompt": "p", "chosen": "c", "rejected": "r", "margin": 0, "confidence": 1},
     {"prompt": "p", "chosen": "c", "rejected": "r", "margin": 0.0, "confidence": 1.0}),
    (prompt_row, {"prompt": "p", "tests": [{"fn": "f"}], "n": [1, None]},
     {"prompt": "p", "tests": [{"fn": "f"}], "n": [1, None]}),
    (prompt_row, {"prompt": [U | {"name": None}], "completion": "c", "answer": None},
     {"prompt": [U], "completion": "c", "answer": None})])
def test_good_rows(shape, row, want):
    before = json.dumps(row)
    assert shape(row) == want and json.dumps(row) == before


PAIR = dict(prompt="p", chosen="c", rejected="r")
BAD = [  # (kind, row or line, what the message must name beside the file and the row)
    (prompt_row, '{"prompt": "a"', "not JSON"), (prompt_row, '{"a":' * 200_000, "not JSON"),
    (prompt_row, b'{"prompt": "\xff"}', "UTF-8"), (prompt_row, {"Prompt": "a"}, "'prompt'.*'Prompt'"),
    (prompt_row, {"prompt": [U, S]}, "'prompt', message 2"), (prompt_row, {"prompt": "a\ud83d"}, "'prompt'"),
    (prompt_row, {"prompt": [U, "x"]}, "'prompt'"),
    (prompt_row, {"prompt": [{"role": "user", "contents": "a"}]}, "'prompt', message 1: the content"),
    (prompt_row, {"prompt": [user([{"type": "image"}, {"type": "text", "text": "x"}])]}, "images"),
    (sft_row, {"prompt": [U], "completion": [A | {"tool_calls": [{"name": "f"}]}]}, "'completion', message 1.*tool"),
    # what would be learned as something else
    (sft_row, {"prompt": "p", "completion": "c", "label": False}, "'label'"),
    (sft_row, {"prompt": [U], "completion": [A, U]}, "'completion'"),
    (preference_row, PAIR | dict(confidence=1.01), "'confidence'"), (preference_row, PAIR | dict(margin=-1), "'margin'"),
    (preference_row, PAIR | dict(margin=10**400), "'margin'"),
    # layouts of others
    (sft_row, {"messages": [U, A]}, "'prompt'.*convert.py --kind=sft --source=.*rows.jsonl"),
    *((prompt_row, {"prompt": "p", "answer": x}, "field 'answer'")
      for x in ("", " ", "\n\t", "\u200b\ufeff", "\\boxed{}", "<answer> </answer>", True, [72], {}, math.inf)),
    (prompt_row, {"prompt": [U], "reward_model": {"ground_truth": "4"}}, "'answer'.*convert.py --kind=prompts"),
]


def test_bad_rows_are_named_by_file_row_and_field(tmp_path):
    good = json.dumps(dict(prompt="p", completion="c", chosen="c", rejected="r", text="t")).encode()
    for shape, row, named in BAD:
        line = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
        (tmp_path / "rows.jsonl").write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
        with pytest.raises(BadInput, match=named) as caught:
            read_rows(str(tmp_path / "rows.jsonl"), shape)
        said = str(caught.value)
        assert said.startswith(f"{tmp_path}/rows.jsonl, line 3: ") and "\n" not in said and len(said) < 700


DAMAGED = [
    ("a.json", b"[1]", "a.json, row 1: "), ("a.json", b"[{]", "a.json: "), ("a.jsonl", b" \n\r\n\t\n", "a.jsonl: "),
    ("a.csv", b"prompt,answer\na,b\na\n", "a.csv, row 2: "), ("a.csv", b"prompt\n\n\xff", "a.csv, line 3: "),
    ("a.csv", b"prompt,answer\na,1\n,2\n", "a.csv, row 2: field 'prompt'"), ("a.jsonl.gz", b"no", "a.jsonl.gz: "),
    ("a.jsonl.gz", gzip.compress(b"{}" * 1000, mtime=0)[:-9], "a.jsonl.gz: "), ("rows.txt", b"{}", "rows.txt: ")]


def test_damaged_files_are_one_line(tmp_path):
    for name, content, said in DAMAGED:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput) as caught:
            read_rows(str(tmp_path / name), prompt_row)
        assert str(caught.value).startswith(f"{tmp_path}/{said}") and "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# several files, names of fields


def test_several_files_and_their_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = [dict(prompt=f"{i}") for i in range(3)]
    jsonl("a.jsonl", table[:2])
    jsonl("b.jsonl", table[2:])
    jsonl("x,y.jsonl", table[:1])
    both = read_rows("a.jsonl, 0.5*b.jsonl", prompt_row)
    assert both == table and both.parts == [("a.jsonl", None, 2), ("b.jsonl", 0.5, 1)] and both.mix == [(2, 1.0), (1, 0.5)]
    assert read_rows("a.jsonl,b.jsonl", prompt_row).mix == 3 and len(read_rows("x,y.jsonl", prompt_row)) == 1
    places = [(both, 0, "a.jsonl, row 1"), (both, 1, "a.jsonl, row 2"), (both, 2, "b.jsonl, row 1"),
              ([], 2, "?, row 3"), (Rows(), 2, "?, row 3")]
    for rows, number, place in places:
        with pytest.raises(BadInput, match=f"^{re.escape(place)}: so$"), at_row(rows, "?")(number):
            raise BadInput("so")
    keep_rows(both, [1, 2])
    assert both == table[1:] and both.parts == [("a.jsonl", None, 1), ("b.jsonl", 0.5, 1)]
    with pytest.raises(BadInput, match="^a.jsonl: no row is left"):
        keep_rows(Rows(both, both.parts), [1])
    for wrong in ("a.jsonl,", "0*a.jsonl", "nan*a.jsonl", ""):
        with pytest.raises(BadInput):
            sources_of(wrong)
    (tmp_path / "b.jsonl").write_text('{"prompt": 1}')
    with pytest.raises(BadInput, match="^b.jsonl, line 1: field 'prompt'"):
        read_rows("a.jsonl,2*b.jsonl", prompt_row)


def test_fields(tmp_path):
    row = {"question": "q", "more": {"deep": {"er": 5}}, "answer": "a", "x.y": 1}
    assert rename(row, []) == row and rename(row, parse_fields("question>prompt, more.deep.er>answer")) == {
        "prompt": "q", "more": {"deep": {"er": 5}}, "answer": 5, "x.y": 1}
    assert rename(row, parse_fields("question>answer,answer>question,x.y>z")) == {
        "question": "a", "answer": "q", "more": {"deep": {"er": 5}}, "z": 1}
    with pytest.raises(BadInput, match="question"):
        parse_fields("question")
    jsonl(tmp_path / "a.jsonl", [row])
    assert read_rows(f"{tmp_path}/a.jsonl", sft_row, "question>prompt,answer>completion") == [{"prompt": "q", "completion": "a"}]
    for theirs in ("nothing", "more.nothing", "question.deep"):
        with pytest.raises(BadInput, match=f"line 1: field '{theirs}' "):
            read_rows(f"{tmp_path}/a.jsonl", prompt_row, f"question>prompt,{theirs}>answer")


# ---------------------------------------------------------------------------------------------------------------------
# data sets of the hub


def test_which_files_of_a_folder_are_a_split(tmp_path):
    def files(name, folder, *there):
        for path in there:
            (tmp_path / folder / path).parent.mkdir(parents=True, exist_ok=True)
            jsonl(tmp_path / folder / path, [dict(prompt=path)])
        source = f"hf:{tmp_path}/{folder}:{name}"
        try:
            found = [row["prompt"] for row in read_rows(source, prompt_row)]
            assert files_of(source) == [f"{tmp_path}/{folder}/{path}" for path in found]
            return found
        except BadInput as e:
            return str(e)

    gsm = [f"{config}/{split}-00000-of-00001.jsonl" for config in ("main", "socratic") for split in ("train", "test")]
    assert files("main:train", "gsm", *gsm, "README.md", ".cache/huggingface/train.jsonl") == gsm[:1]
    assert files("socratic:test", "gsm") == gsm[3:]
    assert "'main', 'socratic'" in files("train", "gsm") and "'dev'" in files("main:dev", "gsm")
    ultra = ["data/train_prefs-00000-of-00002-8c2f.jsonl", "data/train_prefs-00001-of-00002-11aa.jsonl",
             "data/train_sft-00000-of-00001.jsonl"]
    assert files("train_prefs", "ultra", *ultra) == ultra[:2] and "'train'" in files("train", "ultra")
    assert files("train", "parts", "train_1.jsonl", "train_2.jsonl", "test_1.jsonl") == ["train_1.jsonl", "train_2.jsonl"]
    assert files("train", "one", "data/dapo-math-17k.jsonl") == ["data/dapo-math-17k.jsonl"]
    with pytest.raises(BadInput, match=f"hf:{tmp_path}/gsm:train"):
        read_rows(f"{tmp_path}/gsm", prompt_row)
