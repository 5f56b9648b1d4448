"""What a run shows of itself: samples.jsonl, trackers; and tools/plot.py: table, picture, page."""
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot  # noqa: F401  once, before the forks
import pytest
import torch
from tiny import Started, jsonl, keys_of, read_jsonl, said_by, well, write

from errors import BadInput
from options.cards import hub_name, not_as_trained
from options.keep_best import save_if_best
from options.trackers import names_in, run_id
from tools.runs import read_records, read_samples

HOSTILE = "</script><script>document.title = 'hacked'</script><!--<b>5 & 6</b>"


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    """{name: out_dir} of runs that look at themselves often."""
    folder = tmp_path_factory.mktemp("seeing")
    often = dict(eval_interval=1, eval_size=3, max_iters=2, save_rollouts=2)
    return dict(
        ppo=well("ppo.py", folder / "ppo", keys_of(world, "ppo.py", **often)),
        grpo=well("grpo.py", folder / "grpo", keys_of(
            world, "grpo.py", **often, reward_path=world.reward,
            reward_functions=f"{world.rules}:letters,0.5*reward_model")))


def test_samples_and_rollouts(done, world):
    """Of all held-out prompts at each evaluation; all responses of every second iteration."""
    answers = {row["answer"] for part in ("train", "val") for row in world.rows[f"rl_{part}"]}
    for name, size in (("ppo", 5), ("grpo", 6)):
        samples, rollouts, log = (read_jsonl(f"{done[name]}/{kind}.jsonl")
                                  for kind in ("samples", "rollouts", "log"))
        assert [(s["iteration"], s["row"], s["prompt"]) for s in samples] == [
            (i, row, world.rows["rl_val"][row]["prompt"]) for i in range(3) for row in range(3)]
        assert [line["iteration"] for line in rollouts] == [0] * size
        for lines, figure in ((samples[:3], "eval/scores"), (rollouts, "objective/scores")):
            mean = statistics.fmean(line["scores"]["scores"] for line in lines)
            assert mean == pytest.approx(log[0][figure], abs=1e-6)
        for line in samples + rollouts:
            assert 1 <= line["length"] <= 6 and (line["finished"] or line["length"] == 6)
            assert line["answer"] in answers
            letters = sum(c in "abcd" for c in line["text"]) / 4
            assert line["scores"].get("reward/letters", letters) == pytest.approx(letters)
    assert [s["scores"]["kl"] for s in samples[:3]] == [0, 0, 0] != samples[-1]["scores"]["kl"]


def test_each_model_has_a_card(world, tmp_path):
    """Its base's licence, the command, and the figures of its own weights: ema_policy has none."""
    base = shutil.copytree(world.policy, tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: a/b\n---\n# A base\n")
    publishers = dict(top_k=20, repetition_penalty=1.1, temperature=0.6, top_p=1.0, do_sample=True)
    settings = json.loads((base / "generation_config.json").read_text())
    write(base / "generation_config.json", json.dumps(settings | publishers))
    out = well("ppo.py", tmp_path / "ppo", keys_of(
        world, "ppo.py", policy_path=base, eval_interval=1, max_iters=2, ema_decay=0.5,
        keep_best="-eval/kl", value_init="policy", lora="2", seed=2))
    last = [record["eval/kl"] for record in read_jsonl(f"{out}/log.jsonl")][-1]
    least = min(record["eval/kl"] for record in read_jsonl(f"{out}/log.jsonl"))
    assert least < last
    shown = dict(policy=last, policy_adapter=last, value_model=last, value_model_adapter=last,
                 best_policy=least, best_policy_adapter=least, ema_policy=None)
    for name, figure in shown.items():
        card = Path(f"{out}/{name}/README.md").read_text()
        head = card.split("---\n")[1]
        assert card.startswith("---\n") and "license: apache-2.0\n" in head and str(base) in card
        assert "base_model" not in head  # a hub refuses a folder, and a/b is the base's own base
        assert ("library_name: peft" in head) == name.endswith("_adapter")
        assert "python ppo.py " in card
        found = re.findall(r"eval/kl +(\S+)\n", card)
        assert found == ([] if figure is None else [format(figure, ".4g")]), name
        kept = Path(f"{out}/{name}/generation_config.json")
        if name in ("policy", "best_policy", "ema_policy"):
            assert publishers.items() <= json.loads(kept.read_text()).items()
        assert card.count("publisher") == kept.exists(), name
    # it is told on the terminal as well
    (said,) = re.findall(".*publisher.*", Path(f"{tmp_path}/ppo/stdout-0").read_text())
    assert said.split(f"{out[-3:]}/policy: ")[1] in Path(f"{out}/policy/README.md").read_text()


@pytest.mark.parametrize("settings, theirs, more", [
    (dict(top_p=1, top_k=None, num_beams=1, temperature=0.8, suppress_tokens=[]), "", ""),
    (dict(do_sample=False), "do_sample=False", ""),
    (dict(suppress_tokens=[7], guidance_scale=1.5), "suppress_tokens=[7], guidance_scale=1.5",
     ", suppress_tokens=None, guidance_scale=1.0"),
    (dict(top_k=20, repetition_penalty=1.1, do_sample=True, temperature=0.6, eos_token_id=[1, 2]),
     "top_k=20, repetition_penalty=1.1, temperature=0.6", ", repetition_penalty=1.0")])
def test_what_samples_another_policy(tmp_path, settings, theirs, more):
    """What differs from training, and how to sample as in training."""
    write(tmp_path / "generation_config.json", json.dumps(settings))
    said = not_as_trained(tmp_path, 0.8)
    assert bool(said) == bool(theirs) and (not said or f"publisher's, with {theirs}: " in said)
    assert not said or said.endswith(f": do_sample=True, temperature=0.8, top_k=0{more}")


def test_what_keep_best_does_not_keep(tmp_path):
    """An evaluation without scores, which is no 0; and figures that it cannot go by."""
    run = SimpleNamespace(out_dir=tmp_path, iteration=0, system=SimpleNamespace(keep_best="score"))
    save_if_best(run, {"score": 0.0}, dict(scores=torch.tensor([math.nan] * 2)))  # it saves nothing
    for by, said in (("accuracy", "eval/length"), ("eval/kl", "-eval/kl"), ("-kl", "score")):
        run.system = SimpleNamespace(keep_best=by)
        with pytest.raises(BadInput, match=f"keep_best = '{by}'.*{said}"):
            save_if_best(run, {"score": 1.0, "eval/length": 1.0, "eval/kl": 1.0}, {})


def test_a_card_names_the_model_on_the_hub_from_which_it_comes(tmp_path, monkeypatch):
    """By our own card; a card of others names another model as its base."""
    monkeypatch.chdir(tmp_path)
    heads = dict(
        first='tags: [quartet, sft]\nbase_model: "Owner/Model-0.5B"', foreign="base_model: a/b",
        scratch="tags: [quartet, sft]", none="",
        older='tags: [quartet, ppo]\nbase_model: "/gone/from/here"')
    for name, head in heads.items():
        os.makedirs(name)
        write(f"{name}/README.md", f"---\n{head}\n---\n# x\nbase_model: c/d\n")
    os.remove("none/README.md")
    model = "Owner/Model-0.5B"
    assert {path: hub_name(path) for path in (*heads, model, "gpt2", "")} == dict.fromkeys(
        [*heads, ""], "") | {"first": model, model: model, "gpt2": "gpt2"}


# trackers


def fakes(fails):
    """wandb and trackio that note how they are called; wandb is out of order from a step on."""
    def before(rank):
        def note(name, what, /, *args, **kwargs):
            with open(f"{name}.jsonl", "a") as f:
                print(json.dumps([what, *args, kwargs]), file=f)
            if name == "wandb" and kwargs.get("step", -1) >= fails:
                raise OSError("no route to host")

        for name in ("wandb", "trackio"):
            sys.modules[name] = SimpleNamespace(
                **{what: partial(note, name, what) for what in ("init", "log", "finish")})

    return before


def test_trackers_get_the_log_and_go_on_with_the_same_run(world, tmp_path, monkeypatch):
    keys = keys_of(world, "sft.py", lr_decay="constant", checkpoint_interval=1,
                   report_to="wandb, trackio")
    for iterations, fails in ((2, 99), (4, 3)):
        out = well("sft.py", tmp_path, keys | dict(max_iters=iterations), before=fakes(fails))
    log = {record.pop("iteration"): record for record in read_jsonl(f"{out}/log.jsonl")}
    for name, last in (("wandb", 3), ("trackio", 4)):
        calls = read_jsonl(tmp_path / f"{name}.jsonl")
        first, second = (call[-1] for call in calls if call[0] == "init")
        assert first["name"] == second["name"] and second["resume"] == "allow"
        sent = {call[2]["step"]: call[1] for call in calls if call[0] == "log"}
        assert list(sent) == list(range(last + 1))
        for i in set(sent) - {2}:  # both runs had a 2
            assert {key: x for key, x in log[i].items() if type(x) is not str} == sent[i]
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(BadInput, match="pip install trackio"):
        names_in("trackio")


def test_a_link_in_the_place_of_the_name_is_not_followed(tmp_path):
    """At the start, and when a run resumes: the name is the run's own, the file stays."""
    mine, file = tmp_path / "mine", tmp_path / "report_id.txt"
    mine.write_text("x")
    for iteration in (0, 3):
        os.symlink(mine, file)
        name = run_id(str(tmp_path), iteration)
        assert name.startswith(tmp_path.name) and not file.is_symlink()
        assert run_id(str(tmp_path), 5) == name and mine.read_text() == "x"
        file.unlink()


# plot.py


def plot(folder, **keys):
    """(a page that plot.py writes, the data in it, what it prints)."""
    said = said_by("tools/plot.py", folder, dict(out="page.html") | keys)
    page = (folder / "page.html").read_text()
    return page, json.loads(re.search(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)[1]), said


def test_a_picture_of_two_runs(done, tmp_path):
    def before(rank):
        """The title and the curves of each panel are also written as JSON."""
        from matplotlib.figure import Figure

        def drawn(figure, *args, **kwargs):
            write("drawn.json", json.dumps({
                axis.get_title(): [[[*map(float, x)] for x in line.get_data()]
                                   for line in axis.lines]
                for axis in figure.axes if axis.get_visible()}))
            savefig(figure, *args, **kwargs)

        savefig, Figure.savefig = Figure.savefig, drawn

    said_by("tools/plot.py", tmp_path, dict(
        runs=f"{done['ppo']},{done['grpo']}", out="deep/a.png", metrics="policy/lr,eval/k*"),
        before=before)
    assert (tmp_path / "deep/a.png").read_bytes()[:4] == b"\x89PNG"
    panels = json.loads((tmp_path / "drawn.json").read_text())
    assert list(panels) == ["policy/lr", "eval/kl"]
    assert panels["eval/kl"] == [
        [[0, 1, 2], [record["eval/kl"] for record in read_jsonl(f"{done[name]}/log.jsonl")]]
        for name in ("ppo", "grpo")]
    os.makedirs(tmp_path / "mine")  # none of the panels' metrics
    jsonl(tmp_path / "mine/log.jsonl", [dict(iteration=0, mine=1.0)])
    said_by("tools/plot.py", tmp_path, dict(runs="mine", out="a.png"), before=before)
    assert json.loads((tmp_path / "drawn.json").read_text()) == {"mine": [[[0], [1]]]}


def test_curves_over_another_metric_and_smoothed(tmp_path):
    """Also where the one falls, and where a record has only one of the two; a mean of the past."""
    records = [{"eval/kl": 0.0, "eval/accuracy": 0.25, "a": 1.0}, {"objective/kl": 1.0, "a": 4.0},
               {"eval/kl": 3.0, "eval/accuracy": 0.75, "a": None}, {"eval/kl": 2.0},
               {"eval/kl": 2.5, "eval/accuracy": 0.5, "a": 1.0}]
    os.makedirs(tmp_path / "run")
    jsonl(tmp_path / "run" / "log.jsonl",
          [dict(iteration=i) | record for i, record in enumerate(records)])
    _, data, said = plot(tmp_path, runs="run", metrics="eval/accuracy", against="eval/kl")
    assert data["runs"][0]["curves"] == {"eval/accuracy": [[0, 0.25], [3, 0.75], [2.5, 0.5]]}
    assert re.findall(r"(?m)^run +(\d) ", said) == ["0", "2", "3", "4"]
    _, data, _ = plot(tmp_path, runs="run", metrics="a", smooth=0.5)
    # weights 1/2, 1/4, 1/8 of the last ones, over their sum
    assert data["runs"][0]["curves"]["a"] == [
        [0, 1], [1, (2 + 0.25) / 0.75], [4, pytest.approx((0.5 + 1 + 0.125) / 0.875)]]


GOOD = dict(iteration=0, prompt="a", text="b", scores={"x": 1.0}, finished=True, length=3)


def test_an_odd_record_is_a_line_and_no_traceback(tmp_path):
    """Each in the place of the second record, or sample, of a run that is good otherwise."""
    folder, log = tmp_path / "run", [{"iteration": 0, "eval/kl": 0.5}]
    os.makedirs(folder)
    for each in ("null", '"0"', "[1]", "true", "NaN"):
        jsonl(folder / "log.jsonl", log)
        with open(folder / "log.jsonl", "a") as f:
            f.write(f'{{"iteration": {each}, "eval/kl": 0.5}}\n')
        with pytest.raises(BadInput, match=r"log\.jsonl, line 2"):
            read_records(str(folder / "log.jsonl"))
    for changed in (dict(scores=None), dict(scores=[1]), dict(messages=[dict(role="user")])):
        jsonl(folder / "samples.jsonl", [GOOD, GOOD | changed])
        with pytest.raises(BadInput, match=r"samples\.jsonl, line 2"):
            read_samples(str(folder / "samples.jsonl"))
    # what is no number is not drawn; the figures beside it are
    odd = ['"x"', "[1]", "{}", "NaN", "Infinity", "-Infinity"]
    write(folder / "log.jsonl", "".join(
        f'{{"iteration": {i}, "eval/kl": {x}, "eval/loss": 0.25}}\n' for i, x in enumerate(
            ["0.5", *odd])))
    jsonl(folder / "samples.jsonl", [GOOD | dict(scores={"x": math.nan, "y": 2.0})])
    write(folder / "config.json", '{"script": "ppo.py", "kl_coef": NaN}')
    (found,) = plot(tmp_path, runs="run")[1]["runs"]
    assert found["curves"] == {"eval/kl": [[0, 0.5]], "eval/loss": [[i, 0.25] for i in range(7)]}
    assert found["samples"][0]["scores"] == {"y": 2.0} and found["config"]["kl_coef"] is None


def test_a_page_waits_for_its_run_and_is_written_again_while_it_goes_on(tmp_path):
    page, argv = tmp_path / "page.html", ["--runs=run", "--out=page.html", "--watch=0.1"]
    watch, log = Started("tools/plot.py", argv, str(tmp_path)), []
    for text, path, kl in (("waiting for run/log.jsonl", tmp_path / "stdout-0", 0.25),
                           ("0.25", page, 0.875), ("0.875", page, 1.0)):
        until = time.monotonic() + 60
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.makedirs(tmp_path / "run", exist_ok=True)
        log.append({"iteration": len(log), "eval/kl": kl})
        jsonl(tmp_path / "run/log.jsonl", log)
    os.kill(watch.pids[0], signal.SIGINT)
    ended = watch.wait()
    assert ended.err[0].count("\n") == 1 and ended.codes == [130]


@pytest.fixture(scope="module")
def page(done, tmp_path_factory):
    """
    A page of two runs, and its data; one has a hostile prompt, response and name, and is writing a
    line.
    """
    folder = tmp_path_factory.mktemp("page")
    hostile = folder / "a<b>&c"
    shutil.copytree(done["ppo"], hostile)
    samples = read_jsonl(hostile / "samples.jsonl")
    samples[0] |= dict(text=HOSTILE, prompt=[dict(role="user", content=HOSTILE)])
    samples[1] |= dict(messages=[dict(role="assistant", content="x "), dict(role="user",
                                 content="why?"), dict(role="assistant", content="so")])
    jsonl(hostile / "samples.jsonl", samples)
    odd = "constructor", "__proto__"  # names that objects of JavaScript have
    jsonl(hostile / "log.jsonl", [r | dict.fromkeys(odd, r["iteration"] / 2)
                                  for r in read_jsonl(hostile / "log.jsonl")])
    with open(hostile / "log.jsonl", "a") as f:
        f.write('{"iteration": 5, "eval/k')
    return plot(folder, runs=f"{hostile},{done['grpo']}")[:2]


def test_the_page_holds_the_runs_and_nothing_of_the_network(page, done):
    page, data = page
    assert HOSTILE not in page and page.count("<script") == 2 and "a<b>" not in page
    # the name of SVG's elements is never fetched
    assert set(re.findall(r"\w+://[\w.]+", page)) <= {"http://www.w3.org"}
    assert not re.search(r"@import|url\(|fetch\(|import\(|XMLHttp", page)
    first, second = data["runs"]
    assert "max_iters" in first["changed"] and "gamma" not in first["changed"]
    assert "fraction of responses that ended" in data["meanings"]["objective/finished"]
    assert first["samples"][0]["text"] == HOSTILE and first["config"]["batch_size"] == 5
    assert first["samples"][1]["text"] == "x [user: why?] so"
    assert sum(s["trained"] for s in second["samples"]) == 6
    kls = [record["eval/kl"] for record in read_jsonl(f"{done['grpo']}/log.jsonl")]
    assert second["curves"]["eval/kl"] == [[0, kls[0]], [1, kls[1]], [2, kls[2]]]


# enough of a browser for the page: it prints how many parts each element has, and its text
DOM = r"""
const source = require("fs").readFileSync(0, "utf8"), ids = {};
class Element {
  constructor(tag) { Object.assign(this, {tag, children: [], listeners: {}, value: ""}); }
  setAttribute(name, value) { if (name === "value") this.value = String(value); }
  append(...children) {
    this.children.push(...children);
    if (this.tag === "select") this.value = this.children[0].value;
  }
  replaceChildren(...children) { this.children = children; }
  addEventListener(name, f) { this.listeners[name] = f; }
  get textContent() {
    return this.children.map(c => typeof c === "string" ? c : c.textContent).join(" ");
  }
  set textContent(text) { this.children = [String(text)]; }
}
for (const [, tag, id] of source.matchAll(/<(\w+)[^>]*? id="(\w+)"/g)) ids[id] = new Element(tag);
ids.kind.value = "evaluations";
ids.data.textContent = source.match(/<script[^>]*id="data">(.*?)<\/script>/s)[1];
global.document = {getElementById: id => ids[id], createElement: tag => new Element(tag),
                   createElementNS: (_, tag) => new Element(tag)};
eval(source.match(/<script>(.*)<\/script>/s)[1]);
const show = () => Object.fromEntries(["charts", "count", "asked", "cards", "final", "sources"].map(
  id => [id, ids[id].textContent.trim().replace(/\s+/g, " ")]));
const first = show();
[ids.prompt.value, ids.sort.value] = ["", "scores"];
ids.sort.listeners.input();
console.log(JSON.stringify([first, show()]));
"""
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no node here")


def shown_by(page):
    """{part: its text} of a page, and after the samples of all prompts are sorted by score."""
    shown = subprocess.run(["node", "-e", DOM], input=page, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


@needs_node
def test_the_page_shows_samples_by_their_scores(page):
    first, by_score = shown_by(page[0])
    assert HOSTILE in first["cards"] and first["sources"] == "" and " -> " in first["final"]
    for word in ("constructor", "What is sampled", "eval/kl at 2"):
        assert word in first["charts"]
    # the prompt that is chosen stands once, above the cards; each card says whose it is
    assert first["asked"].count(HOSTILE) == 1 and by_score["asked"] == ""
    assert "a<b>&c | iteration 0 |" in first["cards"]
    assert by_score["count"].startswith("18 samples")
    for samples, count in ((first, 1), (by_score, 18)):  # first those of one prompt alone
        scores = [float(x) for x in re.findall(r"\bscores (-?[\d.e-]+)", samples["cards"])]
        assert len(scores) == count and scores == sorted(scores, reverse=True)


@needs_node
def test_the_page_has_a_table_by_source(tmp_path):
    """Of held-out prompts, or else of training; their curves are apart from those of all."""
    for name, sources in (("one", ["b", "accuracy"]), ("two", ["s"])):
        os.makedirs(tmp_path / name)
        jsonl(tmp_path / name / "log.jsonl", [dict(iteration=i) | {
            "objective/reward/u": 0.5 * i, "eval/accuracy": 0.25 * i} | {
            f"{metric}/{source}": i + 7 for source in sources
            for metric in ("objective/accuracy", "objective/reward/u", "eval/accuracy")} | {
            "eval/accuracy/b": 0.125 * i} for i in range(3)])
    shown, _ = shown_by(plot(tmp_path, runs="one,two")[0])
    assert "by source (3) first -> last accuracy reward/u accuracy, one 7 -> 9 7 -> 9 accuracy," \
        " two - - b, one 0 -> 0.25 7 -> 9" in shown["sources"]
    of_all, rest = shown["charts"].split("By source: accuracy")
    assert "accuracy/" not in of_all and "reward/u" in of_all and "By source: reward/u" in rest
