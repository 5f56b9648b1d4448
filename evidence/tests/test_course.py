"""course/: the clinic, the notebooks, and each command of the lessons; the 60 lines; mine.py."""
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import transformers
from matplotlib import pyplot
from tiny import ROOT, Started, jsonl, of_copy, read_jsonl, typed, well, write

from errors import BadInput
from gae import compute_gae
from formulas import kl_estimate
from model import scaled_logits

sys.path.insert(0, f"{ROOT}/course")
check, clinic = (importlib.import_module(name) for name in ("check", "clinic"))
assert transformers.GPT2LMHeadModel and pyplot  # imported once, before the forks


def test_the_clinic(tmp_path):
    """
    Two patients, one with two faults; how many are right, and not which; a program that is mended,
    and one not; the page. The models and batches are smaller: no symptom is waited for.
    """
    def forks(rank):
        """Its runs are forks, which have torch already."""
        small = {"--max_iters=150": "--max_iters=20", "--batch_size=64": "--batch_size=16",
                 "--max_iters=4": "--max_iters=2", "--max_iters=3": "--max_iters=2"}

        def run(command, **how):
            if command[0] != sys.executable:  # what a record says of the machine
                return plain(command, **how)
            _, script, *argv = command
            argv = [small.get(x, x) for x in argv]
            done = Started(script, argv, how["cwd"], before=of_copy(os.path.dirname(script))).wait()
            return SimpleNamespace(returncode=done.codes[0], stdout=done.out[0] + done.err[0])

        plain, subprocess.run = subprocess.run, run

    def call(program, *argv):
        done = Started(f"course/{program}", argv, str(tmp_path), before=forks).wait()
        return done.codes[0], done.out[0] + done.err[0]

    assert "clinic.py" in call("check.py", "8")[1]
    letters = clinic.patients_of(3, 2, 2)
    code, said = call("clinic.py", "--patients=2", "--seed=3", "--faults=2", "--tries=1")
    assert code == 0, said
    folder = tmp_path / "out" / "clinic"
    data = json.loads(re.search("(?m)^const .* = (.*);$", (folder / "clinic.html").read_text())[1])
    assert [*data["letters"]] == [*clinic.FAULTS] and data["faults"] == 2
    for patient, row in enumerate(data["patients"], 1):
        room = folder / f"patient_{patient}"
        assert {*os.listdir(room)} == {"log.jsonl", "samples.jsonl"}
        log, samples = (read_jsonl(room / f"{name}.jsonl") for name in ("log", "samples"))
        assert not any("/lr" in key for record in log for key in record)
        assert all({*x["scores"]} == {"reward/score", "accuracy", "scores", "kl"} for x in samples)
        assert row["curves"]["objective/kl"] == [
            record["objective/kl"] for record in log if "objective/kl" in record]
        assert len(row["samples"]) == 12
    assert "answers.txt" in call("check.py", "8")[1]
    wrong = "A" if letters[1] != "A" else "B"
    write(folder / "answers.txt", f"1 {letters[0]}\n2 {wrong}\n")
    code, said = call("check.py", "8")
    assert code == 1 and "1 of 2" in said and "not mended" in said
    assert not re.search(r"patient [12]\b.*(wrong|right)", said)
    patient = json.loads((folder / "key.json").read_text())["patient"]
    file = next(clinic.FAULTS[x][-1][0] for x in letters[patient - 1] if clinic.FAULTS[x][-1])
    shutil.copy(f"{ROOT}/{file}", folder / "program" / file)
    write(folder / "answers.txt", f"1 {letters[0][::-1].lower()}\n2 {letters[1].lower()}")
    code, said = call("check.py", "8")
    assert code == 0 and "2 of 2" in said, said


def test_the_slides_have_each_command_of_the_hour():
    pages = [open(f"{ROOT}/course/{name}", encoding="utf-8").read()
             for name in ("README.md", "slides.html")]
    plan = re.findall(r"(?m)^\| \d+ \|.*", pages[0])
    commands = [x for row in plan for x in re.findall("`(python [^`]+)`", row)]
    assert len(commands) == 5 and all(x in pages[1] for x in commands)
    for path in re.findall(r'(?:src|href)="([^"#]+)"', pages[1]):
        assert os.path.exists(f"{ROOT}/course/{path}"), path


def test_answers_with_a_slip(tmp_path):
    """The line is told; capitals, empty lines and spaces do not matter."""
    def answers(text, faults=1):
        file = write(tmp_path / "answers.txt", text)
        return clinic.read_answers(file, {"1": "", "2": ""}, faults)

    for faults, slips in ((1, ["1A", "1 A lr", "1: A", "A 1", "3 A", "1 Z", "1", "A", "1,A", "0 A",
                               "patient 1 A", "1 AB", "2 A"]), (2, ["1 CFB", "1 C F", "1 CZ"])):
        for slip in slips:
            with pytest.raises(BadInput, match="line 3: "):
                answers(f"2 B\n\n{slip}\n", faults)
    assert answers("1 fc\n2 B", 2) == {"1": "CF", "2": "B"}
    assert answers("\n 2   b \n1\tA\n\n") == {"1": "A", "2": "B"}


def test_seeds_1_to_50():
    """What is drawn: patients that differ, a line to mend, faults of other sizes, both scripts."""
    with open(f"{ROOT}/course/lesson8.md", encoding="utf-8") as f:
        assert re.findall(r"(?m)^\| ([A-Z]) \|", f.read()) == [*clinic.FAULTS]
    healthy, rates = set(), set()
    for number, faults in itertools.product(range(1, 51), (1, 2)):
        patients = clinic.patients_of(number, 6, faults)
        assert len({*patients}) == 6 and max(map(len, patients)) == faults
        assert any(clinic.FAULTS[letter][-1] for letter in "".join(patients))
        for patient, letters in enumerate(patients, 1):
            rewards, lines = ([x for x in column if x not in ("right", None)] for column in
                              zip(*(clinic.FAULTS[x][2:] for x in letters), strict=True))
            assert len(rewards) <= 1 and len(lines) <= 1
            draws = clinic.runs_of(number, patient, letters)
            keys, again = next(draws), next(draws)
            assert keys != again and next(clinic.runs_of(number, patient, letters)) == keys
            if letters == "A":
                healthy.add(keys["script"])
            if "B" in letters:
                assert 0.15 <= keys["learning_rate"] <= 0.6
                rates.add(keys["learning_rate"])
            if "C" in letters:
                assert 1.5e-6 <= keys["learning_rate"] <= 6e-6
    assert healthy == {"ppo.py", "grpo.py"} and len(rates) > 10


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the repository in which the small toy of the clinic stands for the large one."""
    folder = tmp_path_factory.mktemp("repository")
    for name in os.listdir(ROOT):
        if name not in ("out", ".git", ".venv", "course", "data"):
            os.symlink(f"{ROOT}/{name}", folder / name)
    for name in ("course", "data"):
        shutil.copytree(f"{ROOT}/{name}", folder / name, ignore=shutil.ignore_patterns("*.jsonl"))
    clinic.write_toy(str(folder))
    rows = read_jsonl(folder / "rl.jsonl")
    pairs = [dict(prompt=row["prompt"], chosen=row["answer"], rejected="9") for row in rows]
    for kind, some in dict(rl=rows, pairs=pairs).items():
        for part in ("train", "val"):
            jsonl(folder / f"data/arithmetic/{kind}_{part}.jsonl", some)
    well("sft.py", folder, clinic.SFT | dict(
        out_dir="out/arithmetic_sft", max_iters=40, context=64))
    for script, keys in (
            ("rm", dict(val_path="", demonstrations_path="", max_iters=5, micro_batch_size=8,
                        learning_rate=1e-2)),
            ("ppo", dict(eval_interval=1, eval_size=4, max_new_tokens=9, micro_batch_size=5,
                         max_iters=2))):
        small = dict(device_type="cpu", dtype="float64", batch_size=8) | keys
        run = Started(f"{script}.py", [f"config/arithmetic_{script}.py", *typed(small)],
                      str(folder)).wait()
        assert run.codes == [0], run.err
    return folder


def test_the_notebook(repository):
    """What is in the repository; and a run of it, in its own folder, as Jupyter does it."""
    notebook = importlib.import_module("notebook")
    made = notebook.first_hour()
    code = [c["outputs"] for c in made["cells"] if c["cell_type"] == "code"]
    assert code[1][0]["text"] == "the models are there\n" and all(code[1:])
    assert "rows are shifted by one" in code[-1][0]["text"] and "this notebook" in str(code[-1])
    assert any("image/png" in output.get("data", {}) for outputs in code for output in outputs)
    for number in range(1, check.LESSONS + 3):  # of each lesson; that they are Python
        for cell in notebook.notebook(notebook.lesson(str(number)))["cells"]:
            if cell["cell_type"] == "code":
                compile(re.sub("(?m)^ *[!%].*", "pass", cell["source"]), "cell", "exec")
    nbclient, nbformat, _ = map(pytest.importorskip, ("nbclient", "nbformat", "ipykernel"))
    for cell in made["cells"]:
        cell["source"] = cell["source"].replace("123+456=", "1+2=")
    book = nbformat.from_dict(made)
    nbclient.NotebookClient(book, timeout=1200, kernel_name="python3", coalesce_streams=True,
                            resources=dict(metadata=dict(path=f"{repository}/course"))).execute()
    ran = [c.outputs for c in book.cells if c.cell_type == "code"]
    assert [[o.output_type for o in outputs] for outputs in ran] == [
        [o["output_type"] for o in outputs] for outputs in code]
    assert "rror" not in str([[o.get("text") for o in outputs] for outputs in ran])
    assert ran[-1] == code[-1]


def test_the_commands_of_the_lessons(repository):
    """Each is typed as it stands there; the models, prompts and batches are small."""
    tiny = ["--batch_size=8", "--micro_batch_size=8", "--max_new_tokens=6", "--max_iters=3",
            "--eval_interval=1", "--eval_size=4", "--dtype=float64"]
    tiny_dpo = ["--batch_size=4", "--micro_batch_size=4", "--max_iters=2", "--dtype=float64"]
    typed = []
    for number in (*range(1, check.LESSONS + 1), 9):  # the eighth is the clinic
        with open(f"{ROOT}/course/lesson{number}.md", encoding="utf-8") as f:
            page = f.read()
        for program in re.findall(r"(?s)<<'PYTHON'\n(.*?)\n    PYTHON", page):
            exec(textwrap.dedent(program), {})
        for line in re.findall("(?m)^    ((?:python|head|tail) .*)", page):
            words = shlex.split(line.replace("123+456=", "1+2="))
            if words[0] != "python":
                subprocess.run(words, cwd=repository, check=True, stdout=subprocess.DEVNULL)
            elif words[1] not in ("-", "course/check.py", "course/mine.py"):
                more = tiny_dpo if words[1] == "recipes/dpo.py" else [
                    x for x in tiny if "max_iters" not in x or "--max_iters" in line]
                done = Started(f"{repository}/{words[1]}", words[2:] + more * (
                    words[1] in ("ppo.py", "grpo.py", "recipes/dpo.py")), str(repository)).wait()
                assert done.codes == [0], (line, done.err)
                typed.append(words[1])
    assert len(typed) >= 18 and {"ppo.py", "grpo.py", "tools/explain.py"} <= {*typed}


RIGHT = dict(  # quartet's own functions, as a student's
    logprobs=lambda logits, ids, temperature: scaled_logits(logits[:-1], temperature).log_softmax(
        -1).gather(-1, ids[1:, None])[:, 0],
    kl_estimates=lambda p, q: torch.stack([kl_estimate(p, q, k) for k in ("k1", "k2", "k3")]),
    gae=lambda r, v, mask, gamma, lam: compute_gae(
        r[None], v[None], mask[None], gamma, lam)[0][0].clone(),
    clipped_loss=lambda new, old, a, mask, clip: torch.max(
        -a * (new - old).exp(), -a * (new - old).exp().clamp(1 - clip, 1 + clip))[mask].mean())
WRONG = [  # the first figure that differs: one function that is wrong
    (0, "old", dict(logprobs=lambda z, i, c: z[1:].log_softmax(-1).gather(-1, i[1:, None])[:, 0])),
    (1, "kl", dict(kl_estimates=lambda p, q: (q - p)[None])),
    (0, "advantages", dict(gae=lambda r, v, *_: r - v)),
    (0, "value loss", dict(gae=lambda r, v, *rest: (  # it changes the values
        RIGHT["gae"](r, v, *rest), v.add_(1.0))[0])),
    (0, "policy loss", dict(clipped_loss=lambda new, *rest: 0 * new.sum() + RIGHT["clipped_loss"](
        new.detach(), *rest)))]


def test_60_lines_have_the_figures_of_ppo_and_mine_has_those_of_the_60_lines(
        repository, tmp_path, monkeypatch):
    """Of two iterations, with small models and batches in the place of the toy's."""
    with open(f"{ROOT}/course/ppo_in_60_lines.py", encoding="utf-8") as f:
        source = f.read()
    for old, new in (("SEED, ITERATIONS = 256, 48,", "SEED, ITERATIONS = 8, 9,"),
                     (" 1, 20\n", " 1, 2\n"),
                     ("os.path.abspath(__file__)", repr(f"{ROOT}/course/x.py"))):
        assert old in source
        source = source.replace(old, new)
    said = Started(write(tmp_path / "sixty.py", source), [], str(repository)).wait()
    assert said.codes == [0], said.err
    names = {"score": "objective/scores", "kl": "objective/kl", "accuracy": "objective/accuracy",
             "policy loss": "loss/policy", "value loss": "loss/value"}
    found = [{name: float(re.search(rf"{name} (-?\d+\.\d+)", line)[1]) for name in names}
             for line in said.out[0].splitlines()]
    wanted = [{name: record[metric] for name, metric in names.items()}
              for record in read_jsonl(repository / "out/arithmetic_ppo/log.jsonl")[:2]]
    assert len(found) == 2 and wanted[1]["kl"] != 0
    assert found == [pytest.approx(figures, abs=1e-6) for figures in wanted]
    monkeypatch.chdir(repository)
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads = torch.get_num_threads()
    mine = importlib.import_module("mine")
    torch.set_num_threads(threads)
    mine.ppo.MAX_NEW, mine.ppo.ITERATIONS = 9, 2

    def figures(functions):
        return {(it, name): x for it, found in enumerate(mine.figures(functions, 8))
                for name, x in found.items()}

    def of_student(**changed):
        return figures(mine.in_place(SimpleNamespace(**RIGHT | changed)))

    right = figures({})
    for it, line in enumerate(found):
        assert {name: right[it, name] for name in names} == pytest.approx(line, abs=1e-6)
    assert of_student() == pytest.approx(right, abs=1e-9)
    for *differs, wrong in WRONG:
        others = of_student(**wrong)
        assert next(key for key in right if abs(others[key] - right[key]) > 1e-6) == (*differs,)
