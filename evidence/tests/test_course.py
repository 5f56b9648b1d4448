"""course/: an empty exercise says what to do, right functions pass, each mistake is named."""
import copy
import importlib
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
from tiny import PROMPTS, ROOT, Started, jsonl, keys_of, of_copy, read_jsonl, well
from torch.func import grad

from errors import BadInput
from gae import compute_gae
from groups import group_advantages, token_weights
from formulas import kl_estimate
from model import scaled_logits

sys.path.insert(0, f"{ROOT}/course")
check, clinic = (importlib.import_module(name) for name in ("check", "clinic"))
assert transformers.GPT2LMHeadModel and pyplot  # imported once, before the forks
LESSONS = {n: importlib.import_module(f"checks.lesson{n}").CHECKS
           for n in range(1, check.LESSONS + 1)}
FUNCTIONS = [(n, name) for n, checks in LESSONS.items() for name in checks]


def clipped_loss(logprobs, old_logprobs, advantages, mask, cliprange):  # as in ppo.py
    ratio = (logprobs - old_logprobs).exp()
    losses = torch.max(-advantages * ratio,
                       -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))
    return torch.where(mask, losses, 0).sum() / mask.sum()


def advantages(scores, group_size, kind):
    if kind == "maxrl":
        means = scores.view(-1, group_size).mean(1).repeat_interleave(group_size)
        return group_advantages(scores, group_size, "none") / (means + 1e-4)
    return group_advantages(scores, group_size, "std" if kind == "grpo" else "none",
                            "others" if kind == "rloo" else "mean")


def weights(lengths, kind, max_length):
    names = {"grpo": "seq-mean-token-mean", "dapo": "token-mean",
             "dr_grpo": "seq-mean-token-sum-norm"}
    mask = torch.arange(max_length) < lengths[:, None]
    return token_weights(mask, names[kind], max_length)[:, 0]


RIGHT = dict(  # quartet's own formulas, and those of autograd
    logprobs=lambda logits, ids, temperature: scaled_logits(logits[:-1], temperature).log_softmax(
        -1).gather(-1, ids[1:, None]).squeeze(-1),
    exact_gradient=lambda logits, rewards: grad(
        lambda z: (z.softmax(0) * rewards).sum())(logits),
    sampled_gradient=lambda logits, words, rewards, baseline: grad(
        lambda z: ((rewards - baseline) * z.log_softmax(0)[words]).mean())(logits),
    gae=lambda r, v, mask, gamma, lam: compute_gae(
        r[None], v[None], mask[None], gamma, lam)[0][0],
    clipped_loss=clipped_loss, has_gradient=lambda ratio, advantages, cliprange: grad(
        lambda p: clipped_loss(p, 0, advantages, ratio > 0, cliprange))(ratio.log()) != 0,
    exact_kl=lambda logits, ref: torch.nn.functional.kl_div(
        ref.log_softmax(0), logits.log_softmax(0), reduction="sum", log_target=True),
    kl_estimates=lambda p, q: torch.stack([kl_estimate(p, q, k) for k in ("k1", "k2", "k3")]),
    pair_loss=lambda c, r: -torch.nn.functional.logsigmoid(c - r).mean(),  # as in rm.py
    score=lambda text: text.count(","), advantages=advantages, weights=weights)


@pytest.mark.parametrize("number, name", FUNCTIONS)
def test_right_functions_pass_and_each_mistake_is_named(number, name):
    checks = LESSONS[number][name]
    assert check.verdict(RIGHT[name], checks) == ""
    slips = getattr(checks, "MISTAKES", {}) | getattr(checks, "LARGE", [{}])[-1]
    assert len(slips) >= 3 or name == "score"
    for words, slip in slips.items():
        assert words in check.verdict(
            lambda *a, slip=slip: checks.right(*a, **slip), checks), words


def test_an_empty_exercise_says_what_to_do(tmp_path):
    """As a student runs it, before anything is written."""
    done = Started("course/check.py", ["3"], str(tmp_path)).wait()
    assert done.codes == [1] and "gae in exercise3.py is empty" in done.out[0], done


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
    for patient in (1, 2):
        room = folder / f"patient_{patient}"
        assert {*os.listdir(room)} == {"log.jsonl", "samples.jsonl"}
        assert not any("/lr" in key for record in read_jsonl(room / "log.jsonl") for key in record)
        assert all({*x["scores"]} == {"reward/score", "accuracy", "scores", "kl"}
                   for x in read_jsonl(room / "samples.jsonl"))
    page = (folder / "clinic.html").read_text()
    data = json.loads(re.search("(?m)^const .* = (.*);$", page)[1])
    assert [*data["letters"]] == [*clinic.FAULTS] and data["faults"] == 2
    for patient, row in enumerate(data["patients"], 1):
        log = [x for x in read_jsonl(folder / f"patient_{patient}" / "log.jsonl")
               if "objective/scores" in x]
        assert row["curves"]["objective/kl"] == [x["objective/kl"] for x in log]
        assert len(row["samples"]) == 12
    assert "answers.txt" in call("check.py", "8")[1]
    wrong = "A" if letters[1] != "A" else "B"
    (folder / "answers.txt").write_text(f"1 {letters[0]}\n2 {wrong}\n")
    code, said = call("check.py", "8")
    assert code == 1 and "1 of 2" in said and "not mended" in said
    assert not re.search(r"patient [12]\b.*(wrong|right)", said)
    patient = json.loads((folder / "key.json").read_text())["patient"]
    file = next(clinic.FAULTS[x][-1][0] for x in letters[patient - 1] if clinic.FAULTS[x][-1])
    shutil.copy(f"{ROOT}/{file}", folder / "program" / file)
    (folder / "answers.txt").write_text(f"1 {letters[0][::-1].lower()}\n2 {letters[1].lower()}")
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
    file = tmp_path / "answers.txt"
    for slip in ("1A", "1 A lr", "1: A", "A 1", "3 A", "1 Z", "1", "A", "1,A", "patient 1 A", "0 A",
                 "1 A\n1 B", "1 AB"):
        file.write_text(f"2 B\n\n{slip}\n")
        with pytest.raises(BadInput, match=f"line {4 if chr(10) in slip else 3}: .*"):
            clinic.read_answers(str(file), {"1": "", "2": ""})
    for slip in ("1 CFB", "1 C F", "1 CZ", "1CF"):
        file.write_text(f"{slip}\n")
        with pytest.raises(BadInput, match="line 1: .*"):
            clinic.read_answers(str(file), {"1": "", "2": ""}, 2)
    file.write_text("1 fc\n2 B")
    assert clinic.read_answers(str(file), {"1": "", "2": ""}, 2) == {"1": "CF", "2": "B"}
    file.write_text("\n 2   b \n1\tA\n\n")
    assert clinic.read_answers(str(file), {"1": "", "2": ""}) == {"1": "A", "2": "B"}


def test_seeds_1_to_50():
    """What is drawn: patients that differ, a line to mend, faults of other sizes, both scripts."""
    with open(f"{ROOT}/course/lesson8.md", encoding="utf-8") as f:
        assert re.findall(r"(?m)^\| ([A-Z]) \|", f.read()) == [*clinic.FAULTS]
    healthy, rates = [], set()
    for number in range(1, 51):
        for faults in (1, 2):
            patients = clinic.patients_of(number, 6, faults)
            assert len({*patients}) == 6 and max(map(len, patients)) == faults
            assert any(clinic.FAULTS[letter][-1] for letters in patients for letter in letters)
            for patient, letters in enumerate(patients, 1):
                rewards, lines = ([x for x in column if x not in ("right", None)] for column in
                                  zip(*(clinic.FAULTS[x][2:] for x in letters), strict=True))
                assert len(rewards) <= 1 and len(lines) <= 1
                draws = clinic.runs_of(number, patient, letters)
                keys, again = next(draws), next(draws)
                assert keys != again and keys["script"] in ("ppo.py", "grpo.py")
                assert next(clinic.runs_of(number, patient, letters)) == keys
                if letters == "A":
                    healthy.append(keys["script"])
                if "B" in letters:
                    assert 0.15 <= keys["learning_rate"] <= 0.6
                    rates.add(keys["learning_rate"])
                if "C" in letters:
                    assert 1.5e-6 <= keys["learning_rate"] <= 6e-6
    assert {*healthy} == {"ppo.py", "grpo.py"} and len(rates) > 10


def course_of_a_tiny_run(world, folder):
    """A copy of the repository in a folder, with a tiny run in the place of the toy's."""
    for name in os.listdir(ROOT):
        if name not in ("out", ".git", ".venv", "course"):
            os.symlink(f"{ROOT}/{name}", folder / name)
    shutil.copytree(f"{ROOT}/course", folder / "course")
    well("ppo.py", folder / "done", keys_of(world, "ppo.py", max_iters=2))
    os.makedirs(folder / "out" / "arithmetic_sft")
    os.symlink(folder / "done" / "out", folder / "out" / "arithmetic_ppo")
    os.symlink(world.policy, folder / "out" / "arithmetic_sft" / "policy")


def test_the_notebook(world, tmp_path, monkeypatch):
    """What is in the repository; and a run of it, in its own folder, as Jupyter does it."""
    notebook = importlib.import_module("notebook")
    made = notebook.first_hour()
    cells = copy.deepcopy(made["cells"])
    code = [c["outputs"] for c in cells if c["cell_type"] == "code"]
    assert code[1][0]["text"] == "the models are there\n" and all(code[1:])
    assert "rows are shifted by one" in code[-1][0]["text"] and "this notebook" in str(code[-1])
    assert any("image/png" in output.get("data", {}) for outputs in code for output in outputs)
    for number in range(1, check.LESSONS + 3):  # of each lesson; that they are Python
        for cell in notebook.notebook(notebook.lesson(str(number)))["cells"]:
            if cell["cell_type"] == "code":
                compile(re.sub("(?m)^ *[!%].*", "pass", cell["source"]), "cell", "exec")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    course_of_a_tiny_run(world, tmp_path)
    for cell in made["cells"]:
        cell["source"] = cell["source"].replace("123+456=", world.rows["rl_train"][0]["prompt"])
    monkeypatch.setattr(notebook, "HERE", str(tmp_path / "course"))
    ran = [c.outputs for c in notebook.run(made).cells if c.cell_type == "code"]
    assert [[o.output_type for o in outputs] for outputs in ran] == [
        [o["output_type"] for o in outputs] for outputs in code]
    assert "rror" not in str([[o.get("text") for o in outputs] for outputs in ran])
    assert ran[-1] == code[-1]


def test_the_commands_of_the_lessons(world, tmp_path):
    """Each is typed as it stands there; the models, prompts and batches are tiny."""
    course_of_a_tiny_run(world, tmp_path)
    os.unlink(tmp_path / "data")
    shutil.copytree(f"{ROOT}/data", tmp_path / "data", ignore=shutil.ignore_patterns("*.jsonl"))
    for name in ("rl_train", "rl_val"):
        jsonl(tmp_path / "data" / "arithmetic" / f"{name}.jsonl", world.rows["rl_train"])
    for name in ("pairs_train", "pairs_val"):
        shutil.copy(getattr(world, name), tmp_path / "data" / "arithmetic" / f"{name}.jsonl")
    os.makedirs(tmp_path / "out" / "arithmetic_rm")
    os.symlink(world.reward, tmp_path / "out" / "arithmetic_rm" / "reward_model")
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
            line = re.sub(r'--prompt="[^"]*"', f"--prompt={PROMPTS[0]}", line)
            words = shlex.split(line)
            if words[0] != "python":
                subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
            elif words[1] not in ("-", "course/check.py", "course/mine.py"):
                more = [x for x in tiny if "max_iters" not in x or "--max_iters" in line]
                more = tiny_dpo if words[1] == "recipes/dpo.py" else more
                done = Started(f"{tmp_path}/{words[1]}", words[2:] + more * (
                    words[1] in ("ppo.py", "grpo.py", "recipes/dpo.py")), str(tmp_path)).wait()
                assert done.codes == [0], (line, done.err)
                typed.append(words[1])
    assert len(typed) >= 18 and {"ppo.py", "grpo.py", "tools/explain.py"} <= {*typed}


def test_60_lines_have_the_figures_of_ppo_and_mine_has_those_of_the_60_lines(tmp_path, monkeypatch):
    """Of two iterations, with small models and batches in the place of the toy's."""
    clinic.write_toy(str(tmp_path))
    common = dict(device_type="cpu", dtype="float64", checkpoint_interval=0)
    well("sft.py", tmp_path, clinic.SFT | dict(out_dir="out/arithmetic_sft", max_iters=40))
    rows = read_jsonl(tmp_path / "rl.jsonl")
    pairs = jsonl(tmp_path / "pairs.jsonl", [
        dict(prompt=row["prompt"], chosen=row["answer"], rejected="8") for row in rows])
    well("rm.py", tmp_path, common | dict(
        init_from="out/arithmetic_sft/policy", train_path=pairs, val_path="", max_iters=5,
        batch_size=8, micro_batch_size=8, learning_rate=1e-2, out_dir="out/arithmetic_rm"))
    os.makedirs(tmp_path / "data" / "arithmetic")
    train = jsonl(tmp_path / "data" / "arithmetic" / "rl_train.jsonl", rows)
    well("ppo.py", tmp_path, common | dict(
        policy_path="out/arithmetic_sft/policy", reward_path="out/arithmetic_rm/reward_model",
        prompts_path=train, eval_path="", batch_size=8, max_new_tokens=9, temperature=1.0,
        kl_coef=1.0, ppo_epochs=2, num_minibatches=2, micro_batch_size=5, max_iters=2,
        learning_rate=1e-4, value_learning_rate=3e-4, vf_coef=1.0, out_dir="out/ppo"))
    with open(f"{ROOT}/course/ppo_in_60_lines.py", encoding="utf-8") as f:
        source = f.read()
    for old, new in (("SEED, ITERATIONS = 256, 48,", "SEED, ITERATIONS = 8, 9,"),
                     (" 1, 20\n", " 1, 2\n"),
                     ("os.path.abspath(__file__)", repr(f"{ROOT}/course/x.py"))):
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "sixty.py").write_text(source)
    names = "score", "kl", "accuracy", "policy loss", "value loss"
    said = Started(f"{tmp_path}/sixty.py", [], str(tmp_path)).wait()
    assert said.codes == [0], said.err
    found = [[float(re.search(name + r" (-?\d+\.\d+)", line)[1])
              for name in names] for line in said.out[0].splitlines()]
    wanted = [[r[name] for name in ("objective/scores", "objective/kl", "objective/accuracy",
                                    "loss/policy", "loss/value")]
              for r in read_jsonl(tmp_path / "out/ppo/log.jsonl")[:-1]]
    assert len(found) == len(wanted) == 2 and wanted[1][1] != 0
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads = torch.get_num_threads()
    mine = importlib.import_module("mine")
    torch.set_num_threads(threads)
    mine.ppo.MAX_NEW = 9
    mine.ppo.ITERATIONS = 2
    right = dict(RIGHT, gae=lambda *a: RIGHT["gae"](*a).clone())
    def figures(functions):
        return {(it, name): x for it, found in enumerate(mine.figures(functions, 8))
                for name, x in found.items()}

    ours = figures({})
    assert [[ours[it, name] for name in names] for it in (0, 1)] == [
        pytest.approx(x, abs=1e-6) for x in found]
    assert figures(mine.in_place(SimpleNamespace(**right))) == pytest.approx(ours, abs=1e-9)

    def changes_values(rewards, values, *rest):
        advantages = right["gae"](rewards, values, *rest)
        values.add_(1.0)
        return advantages

    no_gradient = dict(clipped_loss=lambda n, *rest: right["clipped_loss"](
        n.detach(), *rest) + 0 * n.sum())
    for differs, wrong in ((0, "policy loss"), no_gradient), *{
            (0, "old"): dict(logprobs=lambda z, i, c: z[1:].log_softmax(-1).gather(
                -1, i[1:, None])[:, 0]),
            (1, "kl"): dict(kl_estimates=lambda p, q: (q - p)[None]),
            (0, "advantages"): dict(gae=lambda r, v, m, g, lam: r - v),
            (0, "value loss"): dict(gae=changes_values),
            (0, "policy loss"): dict(clipped_loss=lambda n, o, a, m, c: -(a * n)[m].mean())
    }.items():
        others = figures(mine.in_place(SimpleNamespace(**right | wrong)))
        assert next(name for name in ours if abs(others[name] - ours[name]) > 1e-6) == differs
