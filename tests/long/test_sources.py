"""options/sources.py: rows of CSV, parquet, JSON, data sets of the hub; mixes, their shares."""
import gzip
import json
import os
from collections import Counter

import pytest
from tiny import jsonl

from errors import BadInput
from prompts import batch_rows, encode_rows, prompt_row, read_rows

ROWS = [dict(prompt="a\nb", answer="02"), dict(prompt='é, "c"', answer="NA"),
        dict(prompt="x", answer="0.10")]


def test_tables_keep_their_texts(tmp_path):
    """02, NA and 0.10 stay as they are, and so do newlines, quotes and commas."""
    (tmp_path / "a.csv").write_text(
        'prompt,answer\r\n"a\nb",02\r\n"é, ""c""",NA\r\nx,0.10\r\n', newline="")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in ROWS)
    for name in ("a.csv", "a.json", "a.jsonl.gz"):
        assert read_rows(f"{tmp_path}/{name}", prompt_row) == ROWS


def test_parquet(tmp_path):
    """Nested fields; floats of 32 bits have the digits that were written."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({
        "q": ["a", "b"], "more": [{"result": "02"}, {"result": "3"}],
        "score": pyarrow.array([0.1, 2.5], pyarrow.float32())})
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = read_rows(f"{tmp_path}/a.parquet", prompt_row, "q>prompt,more.result>answer")
    assert [(row["prompt"], row["answer"], row["score"]) for row in rows] == [
        ("a", "02", 0.1), ("b", "3", 2.5)]


def test_data_sets_in_the_layout_of_the_hub(tmp_path):
    for place in ("main/train-00000-of-00002", "main/train-00001-of-00002", "main/test",
                  "socratic/train", "main/train_sft-0"):
        os.makedirs((tmp_path / place).parent, exist_ok=True)
        jsonl(f"{tmp_path}/{place}.jsonl", [dict(prompt=place)])

    def prompts(spec):
        return [row["prompt"] for row in read_rows(f"hf:{tmp_path}:{spec}", prompt_row)]

    assert prompts("main:train") == ["main/train-00000-of-00002", "main/train-00001-of-00002"]
    assert prompts("test") == ["main/test"] and prompts("socratic:train") == ["socratic/train"]
    assert prompts("train_sft") == ["main/train_sft-0"]
    for spec, word in (("train", "main"), ("main:dev", "dev"), ("a:b:c:d", "hf:NAME:SPLIT")):
        with pytest.raises(BadInput, match=word):
            prompts(spec)


def drawn(rows, places):
    """The numbers of the rows at the first places, in batches of 7."""
    return [i for iteration in range(places // 7) for i in batch_rows(5, iteration, 7, rows)]


def test_rows_that_are_dropped_leave_the_mix(tmp_path):
    """The other rows of their source take their places."""
    jsonl(tmp_path / "0.jsonl", [dict(prompt="long"), dict(prompt="a"), dict(prompt="b")])
    jsonl(tmp_path / "1.jsonl", [dict(prompt="c")])
    rows = read_rows(f"{tmp_path}/0.jsonl,3*{tmp_path}/1.jsonl", prompt_row)
    encode_rows(rows, "f", lambda rows: [list(map(ord, r["prompt"])) for r in rows], 2, "drop",
                lambda ids: ids[:2])
    assert [row["prompt"] for row in rows] == ["a", "b", "c"]
    assert Counter(rows[i]["prompt"] for i in drawn(rows, 56)) == dict(a=7, b=7, c=42)


def test_bad_files_name_the_place(tmp_path):
    for name, text, words in (
            ("a.csv", 'prompt,answer\n"1+1",2\n"1+2",3,4\n', "row 2"),
            ("b.csv", 'prompt\n"open\n', "table"), ("c.json", '[{"prompt": ', "not JSON"),
            ("d.jsonl.gz", "plain", "cannot be read"), ("e.json", '[{"answer": 1}]', "row 1"),
            ("f.csv", "prompt\n", "empty")):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInput, match=words):
            read_rows(f"{tmp_path}/{name}", prompt_row)
    for spec in ("0*a.csv", "x*a.csv,b.csv", "nowhere.csv,b.csv"):
        with pytest.raises(BadInput):
            read_rows(spec, prompt_row)
