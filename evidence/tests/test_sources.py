"""options/sources.py: rows of CSV, parquet, JSON, data sets of the hub; mixes, their shares."""
import gzip
import json
from collections import Counter
from statistics import fmean

import pytest
from tiny import jsonl, keys_of, read_jsonl, well, write

from errors import BadInput
from options.sources import files_in, name_sources, names_of
from prompts import Rows, batch_rows, encode_rows, prompt_row, read_rows

ROWS = [dict(prompt="a\nb", answer="02"), dict(prompt='é, "c"', answer="NA"),
        dict(prompt="x", answer="0.10")]


def test_tables_keep_their_texts(tmp_path):
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
    pairs = write(tmp_path / "pairs.csv", "prompt,chosen,rejected,margin,confidence\n"
                                          "a,2,1,0.5,1\na,b,c,,\n")
    assert read_rows(pairs, dict) == [
        dict(prompt="a", chosen="2", rejected="1", margin=0.5, confidence=1.0),
        dict(prompt="a", chosen="b", rejected="c", margin=None, confidence=None)]


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


def empty_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_data_sets_in_the_layout_of_the_hub(tmp_path):
    """A folder and a split that are asked for by name, whatever their names are."""
    empty_files(tmp_path, [f"{name}.jsonl" for name in (
        "main/train-00000-of-00002", "main/train-00001-of-00002", "main/test", "socratic/train",
        "main/train_sft-0", "a/train", "a/exam", "a/val", "dev/train", "dev/main_test")])
    for spec, names in (("main:train", "main/train-00000-of-00002 main/train-00001-of-00002"),
                        ("test", "main/test"), ("socratic:train", "socratic/train"),
                        ("train_sft", "main/train_sft-0"), ("a:train", "a/train"),
                        ("a:exam", "a/exam"), ("val", "a/val"), ("dev:train", "dev/train")):
        assert files_in(f"hf:{tmp_path}:{spec}") == [
            f"{tmp_path}/{name}.jsonl" for name in names.split()]
    for spec, word in (("train", "main"), ("main:dev", "dev"), ("a:b:c:d", "hf:NAME:SPLIT")):
        with pytest.raises(BadInput, match=word):
            files_in(f"hf:{tmp_path}:{spec}")


@pytest.mark.parametrize("held_out, names", [
    (1, "math.csv math_test.csv"), (1, "x.jsonl x-DEV2.jsonl"), (1, "p.jsonl p_held_out.jsonl.gz"),
    (1, "q.csv myTest.csv"), (1, "Train.jsonl Validation.jsonl"), (1, "q.jsonl testdata.jsonl"),
    (1, "train/a.jsonl train/dev.jsonl"), (1, "train.jsonl val-train.jsonl"), (1, "test.jsonl"),
    *((1, f"a.csv a_{word}.csv") for word in "val valid eval evaluation holdout testing".split()),
    (0, "my-eval/train-0.jsonl my-eval/train-1.jsonl"), (0, "latest.jsonl contest.jsonl"),
    (0, "data-00000-of-00002.csv data-00001-of-00002.csv"), (0, "my_train.jsonl"),
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


def test_rows_that_are_dropped_leave_the_mix(tmp_path):
    """
    The other rows of their source take their places. Each file has its share after every iteration,
    and its own rows come in whole epochs.
    """
    jsonl(tmp_path / "0.jsonl", [dict(prompt="long"), dict(prompt="a"), dict(prompt="b")])
    jsonl(tmp_path / "1.jsonl", [dict(prompt="c")])
    rows = read_rows(f"{tmp_path}/0.jsonl,3*{tmp_path}/1.jsonl", prompt_row)
    encode_rows(rows, lambda rows: [list(map(ord, r["prompt"])) for r in rows], 2, "drop",
                lambda ids: ids[:2])
    assert [row["prompt"] for row in rows] == ["a", "b", "c"]
    drawn = []
    for iteration in range(8):
        drawn += [rows[i]["prompt"] for i in batch_rows(5, iteration, 7, rows)]
        assert abs(drawn.count("c") - 0.75 * len(drawn)) < 2
    assert Counter(drawn) == dict(a=7, b=7, c=42)
    walk = [prompt for prompt in drawn if prompt != "c"]
    assert all({*pair} == {"a", "b"} for pair in zip(walk[::2], walk[1::2], strict=True))


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

def test_names_of_sources():
    """One word without a slash; rows without a name; two that would get one name."""
    def names(sources):
        rows = Rows(dict(prompt="x") | ({} if x is ... else dict(source=x)) for x in sources)
        name_sources(rows, "f")
        return list(rows.sources)

    assert names(["gsm8k", "a/b, c", " x ", "", None, ["x"], ..., "Ä数", 7, 0.5, "7", True]) == [
        "gsm8k", "a-b--c", "x", "other", "other", "other", "other", "Ä数", "7", "0.5", "7", "True"]
    first, second, third = names(["a" * 200 + "1", "a" * 200 + "2", "a" * 40 + "b" * 160])
    assert len({first, second, third}) == 3 and max(map(len, (first, second))) < 50
    assert names(["a b", "a/b", "\ud800"])[:2] == names(["a/b", "a b"])[::-1]  # in any order
    assert names([None, {}, ...]) == [] and names([...]) == []
    assert len(set(names(range(64)))) == 64 and names(range(65)) == []


@pytest.mark.parametrize("paths, wanted", [
    ("d/gsm8k/rl_train.jsonl d/math/rl_train.jsonl", "gsm8k math"),
    ("hard_val.jsonl easy_val.jsonl", "hard easy"), ("m.jsonl m_hard.jsonl", "m m_hard"),
    ("a.jsonl", "a"), ("a.jsonl a.json", "a.jsonl a.json"),
    ("hf:o/gsm8k:main:train hf:o/math:train", "gsm8k_main math")])
def test_sources_are_named_by_what_differs_in_their_paths(paths, wanted):
    assert names_of(paths.split()) == dict(zip(paths.split(), wanted.split(), strict=True))


def assert_figures(record, prefix, lines, source_of):
    """
    The figures by source of a record are the means of the lines of samples.jsonl, or of
    rollouts.jsonl, of its iteration.
    """
    found = {}
    for line in lines:
        if line["iteration"] == record["iteration"]:
            for name, x in (line["scores"] | dict(
                    length=line["length"], finished=line["finished"])).items():
                found.setdefault(f"{prefix}/{name}/{source_of(line['row'])}", []).append(x)
    assert {name: x for name, x in record.items() if name.startswith(f"{prefix}/")
            and name.count("/") == 2 + ("/reward/" in name)} == pytest.approx(
        {name: fmean(numbers) for name, numbers in found.items() if "/kl/" not in name}, abs=1e-9)


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
        assert_figures(record, "eval", samples, ("p", "é-f-g", "p", "other").__getitem__)
        assert_figures(record, prefix, rollouts, lambda row: "p" if row < 4 else "q")
        if "objective/length" in record:  # q has no answers
            assert "objective/accuracy/q" not in record
            assert ("objective/accuracy" in record) == ("objective/length/q" not in record)
    best = max(record["eval/length/é-f-g"] for record in log)
    about = json.loads((tmp_path / "out/best_policy/run.json").read_text())
    assert about["figures"]["eval/length/é-f-g"] == best
