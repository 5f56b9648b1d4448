"""options/sources.py: rows of CSV, parquet, JSON, data sets of the hub; mixes, their shares."""
import csv
import gzip
import json
import os
from collections import Counter

import pytest
import torch
from tiny import jsonl, keys_of, read_jsonl, well, write

from errors import BadInput
from options.sources import figures_by_source, files_in, name_sources
from prompts import Rows, batch_rows, encode_rows, prompt_row, read_rows

ROWS = [dict(prompt="a\nb", answer="02"), dict(prompt='é, "c"', answer="NA"),
        dict(prompt="x", answer="0.10")]


def test_tables_keep_their_texts(world, tmp_path):
    """
    02, NA and 0.10 stay as they are, and so do newlines, quotes and commas. Margins and confidences
    of pairs are numbers, an empty one is none.
    """
    (tmp_path / "a.csv").write_text(
        'prompt,answer\r\n"a\nb",02\r\n"é, ""c""",NA\r\nx,0.10\r\n', newline="")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "B.CSV").write_bytes((tmp_path / "a.csv").read_bytes())
    for name in ("a.csv", "B.CSV", "a.json", "a.jsonl.gz"):
        assert read_rows(f"{tmp_path}/{name}", prompt_row) == ROWS
    pairs = world.rows["pairs_train"]
    with open(tmp_path / "pairs.csv", "w", newline="", encoding="utf-8") as f:
        table = csv.DictWriter(f, ["prompt", "chosen", "rejected", "margin", "confidence"])
        table.writeheader()
        table.writerows(pairs)
    assert {len(row) for row in pairs} == {3, 5}
    assert [{name: x for name, x in row.items() if x is not None}
            for row in read_rows(f"{tmp_path}/pairs.csv", dict)] == pairs


def test_parquet(tmp_path):
    """With nested fields; texts stay texts; floats of 32 bits have the digits that were written."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({
        "q": ["a", "b"], "more": [{"result": "02"}, {"result": "3"}], "score": [0.1, 2.5],
        "margin": pyarrow.array([0.1, None], pyarrow.float32())}), tmp_path / "a.parquet")
    rows = read_rows(f"{tmp_path}/a.parquet", prompt_row, "q>prompt,more.result>answer")
    assert [(row["prompt"], row["answer"], row["score"], row["margin"]) for row in rows] == [
        ("a", "02", 0.1, 0.1), ("b", "3", 2.5, None)]


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


def empty_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


@pytest.mark.parametrize("held_out, names", [
    (1, "data.jsonl val.jsonl"), (1, "math.csv math_test.csv"), (1, "x.jsonl x-DEV2.jsonl"),
    (1, "data.jsonl data.valid.jsonl"), (1, "p.jsonl p_held_out.jsonl.gz"),
    (1, "q.csv myTest.csv"), (1, "Train.jsonl Validation.jsonl"), (1, "test.jsonl"),
    (1, "train/a.jsonl train/dev.jsonl"), (1, "q.jsonl testdata.jsonl"), (0, "my_train.jsonl"),
    (1, "train.jsonl val-train.jsonl"), (1, "hard-test-train-0.jsonl"), (0, "val/train.jsonl"),
    (0, "my-eval/train-0.jsonl my-eval/train-1.jsonl"), (0, "latest.jsonl contest.jsonl"),
    (0, "devil.jsonl evaluated.jsonl"), (0, "data-00000-of-00002.csv data-00001-of-00002.csv"),
    (2, "data.jsonl data.csv"), (2, "train-00000-of-00001.jsonl train.json")])
def test_a_set_without_splits_has_no_held_out_file(tmp_path, held_out, names):
    """0: all are read. 1: refused with the file that is held out by name. 2: one name twice."""
    names = names.split()
    empty_files(tmp_path, names)
    if not held_out:
        assert files_in(f"hf:{tmp_path}:train") == [f"{tmp_path}/{name}" for name in sorted(names)]
        return
    with pytest.raises(BadInput) as error:
        files_in(f"hf:{tmp_path}:train")
    told, _, typed = str(error.value).partition(";")
    first = min(names) if held_out == 2 else names[0]
    assert f"{tmp_path}/{first}" in typed and names[-1] in told
    assert all((f" {name}" in told) == (held_out == 2) for name in names[:-1])


def test_what_is_asked_for_by_name_is_read(tmp_path):
    """Of train and test beside each other the one that is asked for; a folder that is named."""
    empty_files(tmp_path, ["a/train.json", "a/test.json", "a/val.csv", "dev/train.jsonl",
                           "dev/main_test.json"])
    for split, name in (("a:train", "a/train.json"), ("a:test", "a/test.json"),
                        ("val", "a/val.csv"), ("dev:train", "dev/train.jsonl")):
        assert files_in(f"hf:{tmp_path}:{split}") == [f"{tmp_path}/{name}"]


def drawn(rows, places):
    """The rows at the first places, in batches of 7; how often each is there."""
    return Counter(rows[i]["prompt"] for iteration in range(places // 7)
                   for i in batch_rows(5, iteration, 7, rows))


def test_rows_that_are_dropped_leave_the_mix(tmp_path):
    """The other rows of their source take their places."""
    jsonl(tmp_path / "0.jsonl", [dict(prompt="long"), dict(prompt="a"), dict(prompt="b")])
    jsonl(tmp_path / "1.jsonl", [dict(prompt="c")])
    rows = read_rows(f"{tmp_path}/0.jsonl,3*{tmp_path}/1.jsonl", prompt_row)
    encode_rows(rows, lambda rows: [list(map(ord, r["prompt"])) for r in rows], 2, "drop",
                lambda ids: ids[:2])
    assert [row["prompt"] for row in rows] == ["a", "b", "c"]
    assert drawn(rows, 56) == dict(a=7, b=7, c=42)


def test_bad_files_name_the_place(tmp_path):
    for name, text, words in (
            ("a.csv", 'prompt,answer\n"1+1",2\n"1+2",3,4\n', "row 2"),
            ("b.csv", 'prompt\n"open\n', "table"), ("c.json", '[{"prompt": ', "not JSON"),
            ("d.jsonl.gz", "plain", "cannot be read"), ("e.csv", "prompt\n", "empty")):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInput, match=words):
            read_rows(f"{tmp_path}/{name}", prompt_row)
    for spec in ("0*a.csv", "x*a.csv,b.csv", "nowhere.csv,b.csv"):
        with pytest.raises(BadInput):
            read_rows(spec, prompt_row)


# figures by source

NAN = float("nan")


def test_figures_by_source_by_hand():
    """Of five responses; c has no response, d has nothing but a length and an end."""
    rows = Rows(dict(prompt="x", source=name) for name in "abcd")
    name_sources(rows, "f")
    batch = dict(
        row=torch.tensor([1, 0, 1, 3, 1]), scores=torch.tensor([1.0, -2, NAN, NAN, 4]),
        accuracy=torch.tensor([1.0, 0, 0, NAN, 0]), finished=torch.tensor([1, 0, 1, 1, 0]).bool(),
        response_mask=torch.arange(4) < torch.tensor([[1], [4], [2], [2], [3]]),
        **{"reward/u": torch.tensor([2.0, 1, NAN, NAN, 3]), "reward/v": torch.full((5,), NAN)})
    wanted = {"x/scores/a": -2, "x/scores/b": 2.5, "x/accuracy/a": 0, "x/accuracy/b": 1 / 3,
              "x/finished/a": 0, "x/finished/b": 2 / 3, "x/finished/d": 1,
              "x/length/a": 4, "x/length/b": 2, "x/length/d": 2}
    assert figures_by_source(batch, rows, "x", ["u"]) == pytest.approx(wanted)
    assert figures_by_source(batch, rows, "x", ["u", "v"]) == pytest.approx(
        wanted | {"x/reward/u/a": 1, "x/reward/u/b": 2.5})


def names(sources):
    rows = Rows(dict(prompt="x") | ({} if x is ... else dict(source=x)) for x in sources)
    name_sources(rows, "f")
    return list(rows.sources)


def test_names_of_sources():
    """One word without a slash; rows without a name; two that would get one name."""
    assert names(["gsm8k", "a/b, c", " x ", "", None, ["x"], ..., "Ä数", 7, 0.5, "7", True]) == [
        "gsm8k", "a-b--c", "x", "other", "other", "other", "other", "Ä数", "7", "0.5", "7", "True"]
    first, second, third = names(["a" * 200 + "1", "a" * 200 + "2", "a" * 40 + "b" * 160])
    assert len({first, second, third}) == 3 and max(map(len, (first, second))) < 50
    assert names(["a b", "a/b", "\ud800"])[:2] == names(["a/b", "a b"])[::-1]  # in any order
    assert names([None, {}, ...]) == [] and names([...]) == []
    assert len(set(names(range(64)))) == 64 and names(range(65)) == []


@pytest.mark.parametrize("paths, wanted", [
    ("d/gsm8k/rl_train.jsonl,d/math/rl_train.jsonl", "gsm8k math"),
    ("hard_val.jsonl,0.5*easy_val.jsonl", "hard easy"), ("m.jsonl,m_hard.jsonl", "m m_hard"),
    ("a.jsonl,a.jsonl", "a a"), ("a.jsonl,a.json", "a.jsonl a.json"),
    ("hf:o/gsm8k:main:train,hf:o/math:train", "gsm8k_main math"), ("a.jsonl", "")])
def test_sources_are_named_by_what_differs_in_their_paths(tmp_path, monkeypatch, paths, wanted):
    monkeypatch.chdir(tmp_path)
    for path in paths.split(","):
        path = path.rpartition("*")[2]
        if path.startswith("hf:"):
            path = path[3:].replace(":", "/") + ".jsonl"
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write(path, '[{"prompt": "x"}]' if path.endswith(".json") else '{"prompt": "x"}')
    assert [row.get("source", "") for row in read_rows(paths, prompt_row)] == wanted.split(" ")


def grouped(lines, source_of):
    """{"metric/source": mean} of the lines of samples.jsonl or rollouts.jsonl of an iteration."""
    found = {}
    for line in lines:
        for name, x in (line["scores"] | dict(
                length=line["length"], finished=line["finished"])).items():
            if name != "kl":
                found.setdefault(f"{name}/{source_of(line['row'])}", []).append(x)
    return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}


def by_source(record, prefix):
    """The figures by source of a record."""
    return {name.removeprefix(f"{prefix}/"): x for name, x in record.items()
            if name.startswith(f"{prefix}/") and name.count("/") == 2 + ("/reward/" in name)}


@pytest.mark.parametrize("script, more", [
    ("ppo.py", dict(roles="train=1,generate=1", value_init="policy", reward_path="")),
    ("grpo.py", dict(max_refills=2))])
def test_a_run_logs_figures_by_source(world, tmp_path, script, more):
    """
    A mix of two files to train on, where one has answers; one with the field, held out. On two
    ranks the figures are of all responses, and so are the lines.
    """
    train, rest = [tmp_path / f"{name}_train.jsonl" for name in ("p", "q")]
    rows = world.rows["rl_train"]
    jsonl(train, rows[:4])
    jsonl(rest, [dict(prompt=row["prompt"]) for row in rows[4:]])
    held = [row | dict(source=name) for row, name in zip(
        [*world.rows["rl_val"], rows[0]], ["p", "é f/g", "p", None], strict=True)]
    mine = f"{world.rules}:letters,0.5*{world.rules}:sometimes,{world.rules}:some"
    keys = keys_of(
        world, script, prompts_path=f"{train},0.5*{rest}", eval_size=0, save_rollouts=1,
        eval_path=jsonl(tmp_path / "held.jsonl", held), reward_functions=mine, eval_interval=1,
        keep_best="eval/length/é-f-g", **more)
    out = well(script, tmp_path, keys, ranks=2)
    log = read_jsonl(f"{out}/log.jsonl")
    samples, rollouts = (read_jsonl(f"{out}/{kind}.jsonl") for kind in ("samples", "rollouts"))
    prefix = "trained" if "max_refills" in more else "objective"
    for record in log:
        lines = [[line for line in all_lines if line["iteration"] == record["iteration"]]
                 for all_lines in (samples, rollouts)]
        assert by_source(record, "eval") == pytest.approx(grouped(
            lines[0], lambda row: ("p", "é-f-g", "p", "other")[row]), abs=1e-9)
        assert by_source(record, prefix) == pytest.approx(grouped(
            lines[1], lambda row: "p" if row < 4 else "q"), abs=1e-9)
        if lines[1]:  # q has no answers
            assert "objective/accuracy/q" not in record
            assert ("objective/accuracy" in record) == ("objective/length/q" not in record)
    best = max(record["eval/length/é-f-g"] for record in log)
    about = json.loads((tmp_path / "out/best_policy/run.json").read_text())
    assert about["figures"]["eval/length/é-f-g"] == best
