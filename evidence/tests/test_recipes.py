"""
recipes/*.diff and the example in docs/fork.md: each applies to a copy of the files, and the copy
runs with nothing else of the repository, on two ranks, killed and resumed. What comes out is what
by_hand.py works out, with the functions of evidence/worked_out.py in the place of its own. And the
tables of recipes/README.md and docs/algorithms.md. (recipes/dpo.py: test_by_hand_options.py, too.)
"""
import glob
import os
import re
import runpy
import signal
import subprocess

import pytest
import torch

import by_hand
import test_by_hand
import test_by_hand_options as with_options
from by_hand import seen
from conftest import ROOT
from evidence.worked_out import GRPO_CASES, NUMBERS, PPO_CASES
from test_by_hand import GRPO, assert_agrees
from tiny import assert_one_line, at, jsonl, of_copy, read_jsonl, run, well

RECIPES = sorted(os.path.basename(path)[:-5] for path in glob.glob(f"{ROOT}/recipes/*.diff"))
CASES = GRPO_CASES | PPO_CASES


def diff_of(name):
    """The text of a recipe, or of the example in docs/fork.md."""
    path = "docs/fork.md" if name == "price of length" else f"recipes/{name}.diff"
    with open(f"{ROOT}/{path}", encoding="utf-8") as f:
        text = f.read()
    return text if path.endswith("diff") else re.search(r"```diff\n(.*?)```", text, re.DOTALL)[1]


def fork(folder, diffs):
    """A copy of the files in folder/mine, as docs/fork.md says, with these diffs: its folder."""
    os.makedirs(mine := f"{folder}/mine")
    subprocess.run(f"cp -r *.py config grading options {mine}", shell=True, cwd=ROOT, check=True)
    subprocess.run(["git", "init", "-q", folder], check=True)
    for words in diffs:
        text = diff_of(words)
        for old, new in NUMBERS.get(words, ()):
            text = text.replace(old, new)
        subprocess.run(["git", "apply", "--directory=mine", "-"], input=text, text=True, cwd=folder,
                       check=True)
    return mine


def diffs_of(case):
    return case.partition(";")[0].split(", ")


def run_fork(mine, script, folder, keys, also=()):
    def before(rank):
        for patch in (of_copy(mine), *also):
            patch(rank)

    return run(f"{mine}/{script}.py", folder, keys, ranks=2, before=before)


def wrong_sampler(rank):
    """For `before`: its log-probs are off by a function of the token and its place."""
    import rollout
    from run import Run

    right = rollout.sample_batch

    def sample_batch(*args, **more):
        batch = right(*args, **more)
        q, token = batch["sampler_logprobs"], batch["tokens"]
        t = torch.arange(q.shape[1]) - batch["begins"][:, None]  # the place in the response
        batch["sampler_logprobs"] = q + 0.9 * torch.sin((3 * token + t).to(q))
        return batch

    rollout.sample_batch, Run.sampler_gap = sample_batch, lambda self, batch: 0.0


world = with_options.world  # a fixture: tiny's world, and an environment


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_it_is_by_hand(world, tmp_path, monkeypatch, name):
    """A run on two ranks. If it keeps numbers in run.state, a rank is killed, and it goes on."""
    diffs, (keys, functions, branches) = diffs_of(name), CASES[name]
    script = "ppo" if name in PPO_CASES else "grpo"
    how = with_options if "turns" in keys else test_by_hand
    mine, folder = fork(f"{tmp_path}/fork", diffs), f"{tmp_path}/run"
    also = [wrong_sampler] if {"masked_importance", "deepseek_v32",
                              "response_weight"} & {*diffs} else []
    typed = how.typed_keys(world, keys, script, dict(out_dir="out", checkpoint_interval=1))
    if keeps := any("run.state" in diff_of(words) for words in diffs):
        killed = run_fork(mine, script, folder, typed, [*also, at(2, signal.SIGKILL, rank=1)])
        assert killed.codes[1] == -signal.SIGKILL and killed.codes[0] != 0, killed
    ended = run_fork(mine, script, folder, typed, also)
    assert ended.codes == [0, 0] and ("resuming from" in ended.out[0]) == keeps, ended
    for function, other in functions.items():
        monkeypatch.setattr(by_hand, function, other)
    seen.clear()
    assert_agrees(f"{folder}/out", *how.work_out(world, keys, script))
    assert not [branch for branch in branches if not seen[branch]], seen


def test_masked_weights_of_responses(tmp_path):
    """The example in the recipe's head; a token that was not sampled has no say in the product."""
    loss = runpy.run_path(f"{fork(tmp_path, ['masked_importance'])}/formulas.py")
    loss["importance_weights"].__globals__.update(MASKED="sequence", LOWEST=0.9)
    q, p = torch.tensor([[0.2, 0.5, 1], [0.8, 0.5, 1]]), torch.tensor([[0.3, 0.4, 9], [0.2, 1, 9]])
    mb = dict(old_logprobs=p.log().requires_grad_(), sampler_logprobs=q.log(),
              response_mask=torch.tensor([[1, 1, 0]] * 2).bool())
    found = loss["importance_weights"](mb, 1.3)[:, :2].flatten()
    assert not found.requires_grad and found.tolist() == pytest.approx([1.2, 1.2, 0, 0])


def test_the_kl_of_the_top_k():
    """The example in the recipe's head, of three tokens; and a policy that is certain."""
    text = diff_of("top_k_distillation")
    (code,) = re.findall(r"^\+(OTHERS = .*?)^ def minibatches", text, re.DOTALL | re.MULTILINE)
    exec(re.sub(r"^\+", "", code, flags=re.MULTILINE), names := dict(torch=torch))
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], dtype=torch.float64).log()
    for k, wanted in ((1, 0.0204), (2, 0.0475)):
        kl = names["top_k_kl"](p[None, :k], q[None, :k]).item()
        assert round(kl, 4) == wanted and str(wanted) in text
    certain = torch.tensor([[1.0, 1e-20]]).log().requires_grad_()  # the others: 1 - sum = 0
    kl = names["top_k_kl"](certain, torch.tensor([[0.5, 0.25]]).log()).sum()
    kl.backward()
    assert kl.isfinite() and certain.grad.isfinite().all()


def test_gdpo_refuses_what_is_no_reward(world, tmp_path):
    keys = GRPO | dict(missing_eos_penalty=1.0)
    ended = run_fork(fork(tmp_path / "fork", ["gdpo"]), "grpo", f"{tmp_path}/run",
                     test_by_hand.typed_keys(world, keys, "grpo", {}))
    assert ended.codes == [2, 2] and "--missing_eos_penalty=0" in "".join(ended.err), ended


def test_each_diff_has_a_case():
    assert {name for case in CASES for name in diffs_of(case)} == {*RECIPES, "price of length"}


def test_the_tables_have_each_diff():
    """recipes/README.md: its papers and its lines, which git counts. docs/algorithms.md: a link."""
    with open(f"{ROOT}/recipes/README.md", encoding="utf-8") as f:
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in f
                if line.startswith("| [")]
    found = {re.search(r"\((\w+)\.diff\)", row[0])[1]: row[1:] for row in rows if ".diff" in row[0]}
    with open(f"{ROOT}/docs/algorithms.md", encoding="utf-8") as f:
        linked = re.findall(r"\(\.\./recipes/(\w+)\.diff\)", f.read())
    assert sorted(found) == RECIPES and set(linked) == set(RECIPES)
    for name, (_, papers, lines) in found.items():
        head, _ = diff_of(name).split("\n--- a/", 1)
        assert all(paper in head for paper in re.findall(r"[\d.]{10}", papers)), name
        counted = subprocess.run(["git", "apply", "--numstat", f"recipes/{name}.diff"], cwd=ROOT,
                                 capture_output=True, text=True, check=True).stdout.split()
        more, fewer = (sum(map(int, counted[n::3])) for n in (0, 1))
        assert lines == f"+{more} -{fewer}", (name, more, fewer)


def test_dpo_has_ties_and_long_pairs_go_as_a_whole(world, tmp_path):
    """Ties also when the policy has moved, and the two have last bits of their own."""
    script, keys = "recipes/dpo.py", with_options.typed_keys(
        world, with_options.DPO, "recipes/dpo", dict(eval_size=0, max_iters=2))
    ties = jsonl(f"{tmp_path}/ties.jsonl", [
        dict(prompt="abc", chosen=f"{i}" * (1 + i % 4), rejected=f"{i}" * (1 + i % 4))
        for i in range(20)])
    pair = dict(prompt="1=", chosen="2", rejected="3")
    long = jsonl(f"{tmp_path}/long.jsonl", [pair, pair | dict(rejected="1" * 70)])
    out = well(script, f"{tmp_path}/a", keys | dict(val_path=ties))
    last = read_jsonl(f"{out}/log.jsonl")[-1]
    assert last["eval/accuracy"] == 0.5
    assert last["eval/chosen_reward"] == last["eval/rejected_reward"] != 0
    keys |= dict(train_path=long, val_path="")
    assert_one_line(run(script, f"{tmp_path}/b", keys), "dpo.py", "long.jsonl", "row 2")
    dropped = run(script, f"{tmp_path}/b", keys | dict(too_long="drop"))
    assert dropped.codes == [0] and "\npairs: 1;" in dropped.out[0]
    assert_one_line(run(script, f"{tmp_path}/b", keys | dict(too_long="cut")), "dpo.py", "too_long")
