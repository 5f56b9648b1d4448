"""data/tldr/prepare.py on tiny made-up files of OpenAI's layout, with a tokenizer whose tokens are the words."""
import json
import os

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from conftest import ROOT

SCRIPT = os.path.join(ROOT, "data", "tldr", "prepare.py")
LINE_SEPARATOR = "\u2028"  # ends a line for str.splitlines, not in JSONL


def post(text, summary, title="Help", subreddit="cats"):
    return {"id": "t3_1", "subreddit": subreddit, "title": title, "post": text, "summary": summary}


def comparison(first, second, choice, split, text="My cat sleeps."):
    summaries = [{"text": text, "policy": "sup2", "note": None} for text in (first, second)]
    return {"info": {"id": "t3_1", "post": text, "title": "Help", "subreddit": "cats"}, "summaries": summaries,
            "choice": choice, "worker": "w", "batch": "batch3", "split": split, "extra": {}}


def prompt(text):
    """Six words and those of the text."""
    return f"SUBREDDIT: r/cats\n\nTITLE: Help\n\nPOST: {text}\n\nTL;DR:"


def words(n):
    return " ".join(["w"] * n)

TRAIN_POSTS = [
    post("My cat sleeps.\nA lot.", "cat sleeps"),
    post("one two\n" + words(504), "exactly 512 tokens"),
    post("one two\n" + words(300) + "\n" + words(300), "cut once"),
    post("one two\n" + words(600) + "\nthe end", "cut twice"),
    post(words(506) + " last", "no newline"),
    post("long", words(52)),  # 53 tokens with the EOS
    post("too long", words(53)),
    post("too long", words(54)),
    post("nothing to say", " "),
    post("hopeless", "long title", title=words(508)),
]
SFT_TRAIN = [
    (prompt("My cat sleeps.\nA lot."), " cat sleeps"),
    (prompt("one two\n" + words(504)), " exactly 512 tokens"),
    (prompt("one two\n" + words(300)), " cut once"),
    (prompt("one two"), " cut twice"),
    (prompt(words(506) + " "), " no newline"),
    (prompt("long"), " " + words(52)),
]
VALID_POSTS = [post(f"é{LINE_SEPARATOR}x", " has a space already")]
SFT_VAL = [(prompt(f"é{LINE_SEPARATOR}x"), " has a space already")]

COMPARISONS = {
    "batch3": [
        comparison(" good", " bad", 0, "train"),
        comparison(" bad", " good", 1, "valid1"),
        comparison(" bad", "good", 1, "valid2"),
        comparison(words(169), " fine", 1, "train"),
        comparison(" fine", words(169), 1, "valid1"),
    ],
    "batch22": [comparison(" " + words(168), " short", 0, "train", text="one two\n" + words(600))],
    "edit_b2_eval_test": [comparison("a", "b", 1, "valid2")],
    "cnndm0": [{"info": {"article": "news, not Reddit"}}],  # never to be asked for
}
PREFS_TRAIN = [(prompt("My cat sleeps."), " good", " bad"), (prompt("one two"), " " + words(168), " short")]
PREFS_VAL = [(prompt("My cat sleeps."), " good", " bad"), (prompt("My cat sleeps."), " good", " bad"),
             (prompt("My cat sleeps."), " b", " a")]

REPORT = """\
sft_train.jsonl: 6 rows; dropped 2: completion over 53 tokens; dropped 1: empty completion; \
dropped 1: query over 512 tokens even without its post
sft_val.jsonl: 1 rows
prompts_train.jsonl: 6 rows
prompts_val.jsonl: 1 rows
prefs_train.jsonl: 2 rows; dropped 1: completion over 169 tokens
prefs_val.jsonl: 3 rows; dropped 1: completion over 169 tokens
"""


def write_source(folder):
    """The made-up files, all batches that the script reads among them, most of them empty."""
    posts, comparisons = folder / "datasets" / "tldr_3_filtered", folder / "dataset" / "comparisons"
    posts.mkdir(parents=True)
    comparisons.mkdir(parents=True)
    files = {posts / "train.jsonl": TRAIN_POSTS, posts / "valid.jsonl": VALID_POSTS}
    for i in [*range(3, 21), 22]:
        files[comparisons / f"batch{i}.json"] = []
    files |= {comparisons / f"{name}.json": rows for name, rows in COMPARISONS.items()}
    for path, rows in files.items():
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def arguments(source, out, tokenizer, *options):
    return [SCRIPT, f"--source={source}", f"--out={out}", f"--tokenizer={tokenizer}", *options]


@pytest.fixture
def prepare_here(run_here):
    """The same in this process, for the many small cases: exit code, stdout, stderr."""
    return lambda *args: run_here(*arguments(*args))


def read(path):
    """The values of each row, in the order written; and the keys, which are all alike."""
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert len({tuple(row) for row in rows}) == 1
    return [tuple(row.values()) for row in rows], tuple(rows[0])


def test_good_files(tmp_path, tokenizer, prepare_here):
    out = tmp_path / "out"
    code, stdout, stderr = prepare_here(write_source(tmp_path / "source"), out, tokenizer)
    assert code == 0 and stderr == "", stderr
    assert stdout.endswith(REPORT)
    assert read(out / "sft_train.jsonl") == (SFT_TRAIN, ("prompt", "completion"))
    assert read(out / "sft_val.jsonl") == (SFT_VAL, ("prompt", "completion"))
    assert read(out / "prompts_train.jsonl") == ([row[:1] for row in SFT_TRAIN], ("prompt",))
    assert read(out / "prefs_train.jsonl") == (PREFS_TRAIN, ("prompt", "chosen", "rejected"))
    assert read(out / "prefs_val.jsonl") == (PREFS_VAL, ("prompt", "chosen", "rejected"))
    assert not list(out.rglob("*.part")) and (out / "raw" / "batch22.json").exists()


def test_bad_row_is_one_line(tmp_path, tokenizer, prepare_here):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    path = next(source.rglob("batch3.json"))
    first, second, *rest = path.read_text(encoding="utf-8").split("\n")
    path.write_text("\n".join([first, json.dumps(json.loads(second) | {"choice": 2}), *rest]), encoding="utf-8")
    code, _, stderr = prepare_here(source, out, tokenizer)
    assert code == 2 and stderr.count("\n") == 1
    assert stderr.startswith(f"prepare.py: error: {out / 'raw' / 'batch3.json'}, line 2: summaries.2.text: ")
    assert not list(out.glob("*.jsonl"))  # nothing half-written that a trainer could take for the whole
