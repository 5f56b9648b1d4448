"""What a run shows of itself: samples.jsonl, trackers, speed; and tools/plot.py and tools/page.py, the page also in a browser."""
import html
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import tiny
from conftest import ROOT
from prompts import batch_rows
from tiny import arguments, forked, in_a_row, is_one_line, one_run, read_json, read_jsonl, read_text

KILL = """
import os, prompts
batch_rows = prompts.batch_rows
def killed(seed, iteration, *rest):
    if iteration == 3:
        os._exit(9)
    return batch_rows(seed, iteration, *rest)
prompts.batch_rows = killed
"""
# wandb and trackio that note how they are called; wandb is out of order from step FAILS on
FAKES = """
import json, sys, types
def fake(name):
    def note(what):
        def noted(*args, **kwargs):
            with open(f"{name}.jsonl", "a") as f:
                print(json.dumps([what, *args, kwargs]), file=f)
            if name == "wandb" and kwargs.get("step", -1) >= FAILS:
                raise OSError("no route to host")
        return noted
    sys.modules[name] = types.SimpleNamespace(init=note("init"), log=note("log"), finish=note("finish"))
fake("wandb"), fake("trackio")
"""
HOSTILE = "</script><script>document.title = 'hacked'</script><!--<b>5 & 6</b>"
# a GPU of so many operations a second
PEAK = """
import run, torch
import gpu
gpu.peak_flops = lambda *_: 1e9
speed = run.Run.speed
def on_gpu(self, *args):
    here, self.device = self.device, torch.device("cuda")
    figures = speed(self, *args)
    self.device = here
    return figures
run.Run.speed = on_gpu
"""


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    often = dict(eval_interval=1, eval_size=3, max_iters=4, checkpoint_interval=2, save_rollouts=2)
    ppo = world.ppo("out", **often)
    short, long = (world.sft("out", max_iters=n, lr_decay="constant", checkpoint_interval=1, report_to="wandb, trackio")
                   for n in (2, 4))
    return forked(tmp_path_factory.mktemp("seeing"), {
        "whole": [one_run("ppo.py", (ppo, PEAK))],
        "killed": [one_run("ppo.py", (ppo, KILL)), one_run("ppo.py", ppo)],
        "grpo": [one_run("grpo.py", *[world.grpo("out", **often)] * 2)],
        "sft": [one_run("sft.py", (short, f"FAILS = 99{FAKES}")), one_run("sft.py", (long, f"FAILS = 3{FAKES}"))],
        "missing": [one_run("rm.py", (world.rm("out", report_to="wandb"), "import sys\nsys.modules['wandb'] = None"))],
        "unknown": [one_run("ppo.py", world.ppo("out", report_to="tensorbored"))]})


# samples.jsonl

@pytest.mark.parametrize("file", ["rollouts.jsonl", "samples.jsonl"])
def test_a_run_that_was_killed_has_each_line_once(done, file):
    assert [result["codes"] for result in done["killed"]] == [[9], [0]]
    assert read_text(f"{done.out('whole')}/{file}") == read_text(f"{done.out('killed')}/{file}") != ""


def test_rollouts(done, world):
    """They are all responses of every second iteration."""
    rows = read_jsonl(world.rl_train)
    for name, size in (("whole", 7), ("grpo", 15)):
        found, log = read_jsonl(f"{done.out(name)}/rollouts.jsonl"), done.log(name)
        assert [line["iteration"] for line in found] == [0] * size + [2] * size
        assert all(line["prompt"] == rows[line["row"]]["prompt"] for line in found)
        for i in (0, 2):
            scores = [line["scores"]["scores"] for line in found if line["iteration"] == i]
            assert sum(scores) / size == pytest.approx(log[i]["objective/scores"], abs=1e-6)
    for first in range(0, 30, 3):  # what is above the mean of its group is as much as what is below
        group = [line["scores"] for line in found[first:first + 3]]
        assert sum(one["advantage"] for one in group) == pytest.approx(0, abs=1e-5)
        assert sorted(group, key=lambda one: one["scores"]) == sorted(group, key=lambda one: one["advantage"])


def test_samples(done, world):
    """They are of all three held-out prompts of each evaluation."""
    assert done["grpo"][0]["codes"] == [0, 0]
    prompts = [row["prompt"] for row in read_jsonl(world.rl_val)]
    for name in ("whole", "grpo"):
        samples = read_jsonl(f"{done.out(name)}/samples.jsonl")
        rows = [s["row"] for s in samples[:3]]
        assert [row // (len(prompts) // 3) for row in rows] == [0, 1, 2]  # from all over the file
        assert [(s["iteration"], s["row"], s["prompt"]) for s in samples] == [
            (iteration, row, prompts[row]) for iteration in range(5) for row in rows]
    for sample in samples:  # of grpo, which has two rewards
        scores = sample["scores"]
        letters = sum(ch.isascii() for ch in sample["text"]) / 8
        assert scores["reward/letters"] == pytest.approx(letters)
        assert scores["scores"] == pytest.approx(letters + 0.5 * scores["reward/reward_model"])
        assert 1 <= sample["length"] <= 8 and (sample["finished"] or sample["length"] == 8)
    first = [s["scores"]["kl"] for s in samples[:3]]
    assert first == pytest.approx([0, 0, 0], abs=1e-5) and abs(samples[-1]["scores"]["kl"]) > 1e-3


# what a run warns of, once. PPO with accuracies, scores and KLs of our own; 12 held-out prompts

SEEN = """
import report
summarize = report.summarize
def told(batch, prefix, *rest):
    figures = summarize(batch, prefix, *rest)
    figures.pop("eval/accuracy", None)
    if prefix == "eval" and ACCURACIES:
        figures["eval/accuracy"] = ACCURACIES.pop(0)
    if prefix == "objective" and KLS:
        figures["objective/kl"] = KLS.pop(0)
    return figures
report.summarize = told
with open("mine.py", "w") as f:
    f.write(f"scores = {SCORES}\\ndef given(batch):\\n    return [scores.pop(0)] * len(batch['completions'])\\n")
"""
CLIMB, FALL = [0, 0, 1, 1, 2, 2, 3], [3, 3, 2, 2, 1, 1, 0]  # of the evaluation and the rollout of each iteration
WARNED = {  # accuracies at iterations 0 to 3, scores, KLs of iterations 0 to 2, what is said
    "hacked": ([0.8, 0.8, 0.2, 0.1], CLIMB, [0, 1, 2], ["accuracy"]),
    "first up, then down": ([0.6, 0.9, 0.1, 0.9], CLIMB, [0, 1, 2], ["accuracy"]),
    "chance": ([0.8, 0.7, 0.65, 0.7], CLIMB, [0, 1, 2], []),
    "both fall": ([0.8, 0.5, 0.2, 0.1], FALL, [0, 1, 2], []),
    "never right": ([0.0, 0.0, 0.0, 0.0], CLIMB, [0, 1, 2], []),
    "no answers": ([], CLIMB, [0, 1, 2], []),
    "far": ([0.3, 0.5, 0.8, 0.9], CLIMB, [0, 45, 300], ["nats"]),
    "not so far": ([0.3] * 4, CLIMB, [0, 8, 15], []),
    "all of it": ([0.9, 0.9, 0.1, 0.1], CLIMB, [0, 99, 99], ["nats", "accuracy"]),
}


@pytest.fixture(scope="module")
def warned(world, tmp_path_factory):
    jobs = {}
    for name, (accuracies, scores, kls, _) in WARNED.items():
        keys = dict(reward_functions="mine.py:given", value_init="policy", eval_interval=1, eval_size=0, ppo_epochs=1)
        for part, (iterations, first) in enumerate([(3, 0)] if name != "hacked" else [(3, 0), (5, 3)]):  # and once more, resumed
            code = f"ACCURACIES, SCORES, KLS = {accuracies[first:] * 3}, {scores[2 * first:] * 5}, {kls * 2}\n{SEEN}"
            jobs[f"{name} {part}"] = one_run("ppo.py", (world.ppo("out", max_iters=iterations, **keys), code)) | dict(folder=name)
    return tiny.in_a_row(str(tmp_path_factory.mktemp("warned")), jobs)


@pytest.mark.parametrize("name", WARNED)
def test_an_accuracy_that_falls_and_a_large_kl_are_said_once(warned, name):
    parts = [warned[key][0] for key in (f"{name} 0", f"{name} 1") if key in warned]
    assert {part["kind"] for part in parts} == {""}, parts
    lines = [line for part in parts for line in part["stdout"].splitlines() if line.startswith("warning: ")]
    lines = [line for line in lines if "mine.py" not in line]  # the second part of a run has another one
    assert [word in line for word, line in zip(WARNED[name][-1], lines, strict=True)] == [True] * len(lines), lines


# trackers

def test_trackers_get_the_log_and_go_on_with_the_same_run(done):
    """One that is missing ends the run with one line."""
    assert [result["codes"] for result in done["sft"]] == [[0], [0]], done["sft"]
    log = done.log("sft")
    for name in ("wandb", "trackio"):
        calls = read_jsonl(f"{done.folder}/sft/{name}.jsonl")
        inits = [call[-1] for call in calls if call[0] == "init"]
        assert len(inits) == 2 and inits[0]["name"] == inits[1]["name"] and inits[0]["name"].startswith("out-")
        assert inits[1]["resume"] == "allow" and inits[1]["config"]["max_iters"] == 4 and inits[1]["project"] == "quartet"
        assert [call[0] for call in calls if call[0] != "log"] == ["init", "finish", "init"] + ["finish"] * (name == "trackio")
        sent = {call[2]["step"]: call[1] for call in calls if call[0] == "log"}
        assert list(sent) == [0, 1, 2, 3, 4][:4 if name == "wandb" else 5]
        for record in log:
            if record["iteration"] in sent and record["iteration"] != 2:  # 2 was also the end of the first run
                assert sent[record["iteration"]] == {k: v for k, v in record.items() if k != "iteration"}
    assert "wandb has failed (OSError: no route to host)" in done["sft"][1]["stdout"][0]
    assert [record["iteration"] for record in log] == [0, 1, 2, 3, 4]
    for name, script, words in (("missing", "rm.py", "wandb"), ("unknown", "ppo.py", "tensorboard")):
        is_one_line(done[name][0], script, [words])
        file = f"{done.out(name)}/log.jsonl"  # nothing was begun
        assert not os.path.exists(file) or os.path.getsize(file) == 0


# speed

def test_share_of_peak(done, world):
    """Of an iteration of PPO: from the log back to its tokens."""
    n, v = (sum(t.numel() for key, t in tiny.read_weights(f"{done.out('whole')}/{name}").items()
                if "wte" not in key and "wpe" not in key) for name in ("policy", "value_model"))
    prompts = [row["prompt"] for row in read_jsonl(world.rl_train)]
    for record in done.log("whole")[:-1]:
        sampled = 7 * record["objective/length"]
        read = sampled + sum(len(prompts[i]) for i in batch_rows(1, record["iteration"], 7, 40))
        seconds = record["time/iteration"] - record["time/eval"] - record.get("time/checkpoint", 0)
        assert record["time/tokens_per_second"] == pytest.approx(sampled / seconds)
        # the policy samples; reference, reward model and value model read; two passes train policy and value model
        flops = read * (2 * (n + n + v + v) + 2 * 6 * (n + v))
        assert record["time/mfu"] == pytest.approx(flops / seconds / 1e9)


# curves, plot.py

DRAWN = """
import json
from matplotlib.figure import Figure
def savefig(figure, *args, **kwargs):
    panels = [dict(title=axis.get_title(), curves=[[list(map(float, x)) for x in line.get_data()] for line in axis.lines],
                   legend=[t.get_text() for t in axis.get_legend().get_texts()] if axis.get_legend() else [])
              for axis in figure.axes if axis.get_visible()]
    json.dump(panels, open("drawn.json", "w"))
Figure.savefig = savefig
"""


def test_two_runs_of_one_name_are_both_drawn(done):
    args = arguments(dict(runs=f"{done.out('whole')},{done.out('grpo')}", metrics="policy/lr,eval/k*"))
    outcome, = in_a_row(done.folder, {"plot": one_run("tools/plot.py", (args, DRAWN))}).succeeded()["plot"]
    panels = read_json(f"{done.folder}/plot/drawn.json")
    named = [line.split()[0] for line in outcome["stdout"].splitlines() if re.match(r"\w+/out ", line)]
    assert named == ["whole/out"] * 2 + ["grpo/out"] * 2
    assert [panel["title"] for panel in panels] == ["policy/lr", "eval/kl"] and panels[0]["legend"] == ["whole/out", "grpo/out"]
    for name, curve in zip(("whole", "grpo"), panels[1]["curves"], strict=True):
        assert curve == [[0, 1, 2, 3, 4], [record["eval/kl"] for record in done.log(name)]]


def test_curves_are_drawn_over_another_metric(tmp_path):
    """Also where the one falls and where a record has only one of the two; the table has all evaluations."""
    records = [{"eval/kl": 0.0, "eval/accuracy": 0.25}, {"objective/kl": 1.0}, {"eval/kl": 3.0, "eval/accuracy": 0.75},
               {"eval/kl": 2.0}, {"eval/kl": 2.5, "eval/accuracy": 0.5}]
    (tmp_path / "run").mkdir()
    tiny.jsonl(tmp_path / "run" / "log.jsonl", [dict(iteration=i) | record for i, record in enumerate(records)])
    given = dict(runs="../run", metrics="eval/accuracy", against="eval/kl")
    jobs = {"plot": one_run("tools/plot.py", (arguments(given), DRAWN)),
            "no": one_run("tools/plot.py", (arguments(given | dict(against="kl")), DRAWN))}
    (drawn,), (refused,) = in_a_row(str(tmp_path), jobs).values()
    panel, = read_json(tmp_path / "plot" / "drawn.json")
    assert drawn["kind"] == "" and panel["curves"][0] == [[0.0, 3.0, 2.5], [0.25, 0.75, 0.5]]
    assert re.findall(r"^run +(\d) ", drawn["stdout"], re.MULTILINE) == ["0", "2", "3", "4"]
    assert refused["kind"] == "BadConfig" and "eval/kl" in refused["message"]


# page.py

@pytest.fixture(scope="module")
def page(done, tmp_path_factory):
    """The path of a page of two runs, made as a user makes it; one has a hostile prompt and response, and a hostile key."""
    run = tmp_path_factory.mktemp("page") / "a<b>&c"
    shutil.copytree(done.out("whole"), run)
    samples = read_jsonl(run / "samples.jsonl")
    samples[0] |= dict(text=HOSTILE, prompt=[dict(role="user", content=HOSTILE)])
    tiny.jsonl(run / "samples.jsonl", samples)
    records = [record | {"constructor": 0.5, "__proto__": 1.0} for record in read_jsonl(run / "log.jsonl")]  # as objects have
    tiny.jsonl(run / "log.jsonl", records)
    with open(run / "log.jsonl", "a") as f:
        f.write('{"iteration": 5, "eval/k')  # a run that is writing a line
    made = one_run("tools/page.py", [f"--run={run},{done.out('grpo')}", f"--out={run}.html"])
    in_a_row(str(run.parent), {"page": made}).succeeded()
    return f"{run}.html"


def test_a_page_that_watches_is_written_until_the_run_is_over(done, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(done.out("whole"), run)
    records = read_jsonl(run / "log.jsonl")
    tiny.jsonl(run / "log.jsonl", records[:1])
    command = [sys.executable, "tools/page.py", f"--run={run}", f"--out={run}.html", "--watch=True"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tool:
        next(line for line in tool.stdout if "saved" in line)
        assert 'http-equiv="refresh"' in (tmp_path / "run.html").read_text()
        tiny.jsonl(run / "log.jsonl", records)
        assert tool.wait(60) == 0
    assert 'http-equiv="refresh"' not in (tmp_path / "run.html").read_text()


def test_the_page_holds_the_runs_and_nothing_of_the_network(done, page):
    source = read_text(page)
    assert HOSTILE not in source and source.count("<script") == 2
    assert re.search(r'"facts": \{"status".*?"commit": ".*?", "command": "[^"]*(ppo|grpo)\.py ', source)  # how to make it again
    assert set(re.findall(r"\w+://[\w.]+", source)) <= {"http://www.w3.org"}  # the name of SVG's elements, which is never fetched
    assert not re.search(r"@import|url\(|fetch\(|import\(|XMLHttp", source)
    first, second = json.loads(re.search(r"<script[^>]*>(.*?)</script>", source, re.DOTALL)[1])
    assert first["samples"][0]["text"] == HOSTILE and first["config"]["batch_size"] == 7
    kls = [record["eval/kl"] for record in done.log("grpo")]
    assert [y for _, y in second["curves"]["eval/kl"]] == pytest.approx(kls, rel=1e-5)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


# A user: points at the middle of the first chart; then chooses all prompts and sorts by the score. Leaves what is shown.
USER = """
<script>
const left = [document.getElementById("runs").textContent];
left.push([...document.querySelectorAll("svg")].map(svg => svg.getAttribute("aria-label")).join(" "));
left.push(document.getElementById("cards").outerHTML);
const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 20}));
left.push(document.querySelector("figcaption").textContent);
for (const [id, value] of [["prompt", ""], ["sort", "scores"], ["smooth", "0.9"], ["which", "kl"]]) {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("input"));
}
left.push(document.getElementById("cards").outerHTML);
document.getElementById("beside").checked = true;
document.getElementById("beside").dispatchEvent(new Event("input"));
left.push(document.getElementById("cards").outerHTML);
left.push(document.title);
for (const text of left) document.body.append(Object.assign(document.createElement("output"), {textContent: text}));
</script>
"""


@pytest.mark.skipif(not BROWSER, reason="no chromium here")
def test_the_page_in_a_browser(done, page, tmp_path):
    """Charts, samples and hostile text show as they should, and the console has no error."""
    (tmp_path / "page.html").write_text(read_text(page) + USER)
    shown = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user",
                            "--enable-logging=stderr", "--dump-dom", f"file://{tmp_path}/page.html"],
                           capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    table, charts, first, pointed, by_score, beside, title = map(
        html.unescape, re.findall("<output>(.*?)</output>", shown.stdout, re.DOTALL))
    assert "/a<b>&c, " in title and title.strip().endswith("/grpo/out")  # and not "hacked"
    assert re.findall('aria-label="(.*?)"', shown.stdout) == ["kl", "loss/kl", "policy/approx_kl"]
    said = html.unescape(beside)  # a line for each prompt: iterations from left to right, those of both runs
    assert said.count('class="beside"') == 4 and said.count("<article") == 30
    for line in said.split('class="beside"')[1:]:
        iterations = [int(x) for x in re.findall(r"iteration (\d+)<", line)]
        assert iterations == sorted(iterations)
    assert "constructor" in charts.split() and "finished" in table and "5 of 4" not in table

    card = re.compile(r'<article class="card".*?</article>', re.DOTALL)
    assert len(card.findall(first)) == 1  # the hostile prompt has one sample
    assert html.unescape(re.search("<pre>(.*?)</pre>", first, re.DOTALL)[1]) == HOSTILE
    log = [done.log(name)[2] for name in ("whole", "grpo")]
    assert pointed.startswith("scoresat 2:")
    for number in re.findall(r"held-out (-?[\d.]+)", pointed):
        assert any(abs(record["eval/scores"] - float(number)) < 5e-3 for record in log), pointed
    scores = [float(x) for x in re.findall(r"score (-?[\d.]+)", by_score)]
    assert len(scores) == len(card.findall(by_score)) == 30 and scores == sorted(scores, reverse=True)


BAD = {  # tool, arguments -> what is said
    "plot --runs=../plain": "line 1", "page --run=..": "samples.jsonl, line 1",
    # its samples cannot be read: even without the check nothing would be written
    f"page --run=.. --out={ROOT}/tools/page.html": "page.html", "page --run=.. --out=../old.html": "old.html",
    "plot --runs=.. --out=..": ".png"}


def test_bad_folders_are_one_line(tmp_path):
    kept = {"log.jsonl": '{"iteration": 0, "a": 1}\n', "samples.jsonl": '{"iteration": 0, "text": ""}\n',
            "plain/log.jsonl": "[1]\n", "null/log.jsonl": '{"iteration": 0, "a": 1, "eval/kl": null}\n',
            "old.html": "<!DOCTYPE html>theirs"}
    for name, text in kept.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # what was not finite is left out, and a picture of its own is replaced
    good = [f"plot --runs=../null --out=../null.png --metrics={metrics}" for metrics in ("", "a")]
    calls = {f"call {i}": call.split() for i, call in enumerate([*BAD, *good])}
    done = in_a_row(str(tmp_path), {name: one_run(f"tools/{tool}.py", given) for name, (tool, *given) in calls.items()})
    *bad, first, second = [outcome for outcome, in done.values()]
    for outcome, words in zip(bad, BAD.values(), strict=True):
        assert outcome["kind"] in ("BadInput", "BadConfig") and words in outcome["message"], outcome
        assert "\n" not in outcome["message"], outcome
    assert first["kind"] == second["kind"] == "", (first, second)
    assert {name: (tmp_path / name).read_text() for name in kept} == kept
    command = [sys.executable, f"{ROOT}/tools/plot.py", "--runs=plain"]  # as a user types it
    typed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert typed.returncode == 2 and typed.stderr.count("\n") == 1, typed
