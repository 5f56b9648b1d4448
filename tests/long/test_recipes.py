"""
recipes/*.diff and the diffs in docs/algorithms.md: each applies to a copy of the files, and the
copy runs with nothing else of the repository, on two ranks, killed and resumed. What comes out is
what by_hand.py works out, with the functions of recipes/worked_out.py in the place of its own.
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
from recipes.worked_out import CASES
from test_by_hand import GRPO, assert_agrees
from tiny import at, of_copy, run

with open(f"{ROOT}/docs/algorithms.md", encoding="utf-8") as f:
    BLOCKS = re.findall(r"((?:[^\n]+\n)+)```diff\n(.*?)```", f.read(), re.DOTALL)


def diff_of(words):
    """The text of a recipe, or of the block in the docs behind a paragraph with these words."""
    if os.path.exists(f"{ROOT}/recipes/{words}.diff"):
        with open(f"{ROOT}/recipes/{words}.diff", encoding="utf-8") as f:
            return f.read()
    (block,) = [block for paragraph, block in BLOCKS if words in paragraph]
    return block


def fork(folder, diffs, numbers=()):
    """
    A copy of the files in folder/mine, as docs/algorithms.md says, with these diffs; of the numbers
    in it, pairs (old, new) of text are changed. Returns the copy's folder.
    """
    os.makedirs(mine := f"{folder}/mine")
    subprocess.run(f"cp -r *.py config grading options {mine}", shell=True, cwd=ROOT, check=True)
    subprocess.run(["git", "init", "-q", folder], check=True)
    for words in diffs:
        text = diff_of(words)
        for old, new in numbers:
            text = text.replace(old, new)
        subprocess.run(["git", "apply", "--directory=mine", "-"], input=text, text=True, cwd=folder,
                       check=True)
    return mine


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
    diffs, numbers, script, keys, functions, branches = CASES[name]
    if "ref_path" in keys:
        keys = keys | dict(ref_path=",".join(getattr(world, x) for x in keys["ref_path"].split()))
    how = with_options if "turns" in keys else test_by_hand
    mine, folder = fork(f"{tmp_path}/fork", diffs, numbers), f"{tmp_path}/run"
    also = [wrong_sampler] if {"masked_importance", "deepseek_v32",
                              "One weight for a response"} & {*diffs} else []
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
    loss = runpy.run_path(f"{fork(tmp_path, ['masked_importance'])}/loss.py")
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
    assert names["top_k_kl"](p[None, :2], p[None, :2]).item() == 0
    certain = torch.tensor([[1.0, 1e-20]]).log().requires_grad_()  # the others: 1 - sum = 0
    kl = names["top_k_kl"](certain, torch.tensor([[0.5, 0.25]]).log()).sum()
    kl.backward()
    assert kl.isfinite() and certain.grad.isfinite().all()


def test_gdpo_refuses_what_is_no_reward(world, tmp_path):
    keys = GRPO | dict(missing_eos_penalty=1.0)
    ended = run_fork(fork(tmp_path / "fork", ["GDPO"]), "grpo", f"{tmp_path}/run",
                     test_by_hand.typed_keys(world, keys, "grpo", {}))
    assert ended.codes == [2, 2] and "--missing_eos_penalty=0" in "".join(ended.err), ended


def test_each_diff_has_a_case():
    recipes = {os.path.basename(path)[:-5] for path in glob.glob(f"{ROOT}/recipes/*.diff")}
    used = {diff_of(words) for diffs, *_ in CASES.values() for words in diffs}
    assert used == {diff_of(name) for name in recipes} | {block for _, block in BLOCKS}
