"""
recipes/*.diff and the example in docs/fork.md: each applies to a copy of the files, and the copy
runs with nothing else of the repository, on two ranks, killed and resumed. What comes out is what
by_hand.py works out, with the functions of evidence/worked_out.py in the place of its own. And
recipes/dpo.py, worked out here; the tables of recipes/README.md and docs/algorithms.md.
"""
import glob
import math
import os
import re
import runpy
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch

import by_hand
import test_by_hand
import test_by_hand_options as with_options
from by_hand import seen
from configurator import read_arguments, read_keys
from conftest import ROOT
from evidence.worked_out import CASES
from test_by_hand import GRPO, assert_agrees
from tiny import assert_one_line, at, jsonl, of_copy, read_jsonl, run, well

RECIPES = sorted(os.path.basename(path)[:-5] for path in glob.glob(f"{ROOT}/recipes/*.diff"))


def diff_of(name):
    """The text of a recipe, or of the example in docs/fork.md."""
    path = "docs/fork.md" if name == "price of length" else f"recipes/{name}.diff"
    with open(f"{ROOT}/{path}", encoding="utf-8") as f:
        text = f.read()
    return text if path.endswith("diff") else re.search(r"```diff\n(.*?)```", text, re.DOTALL)[1]


def fork(folder, diffs, numbers=()):
    """
    A copy of the files in folder/mine, as docs/fork.md says, with these diffs; of the numbers
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
    assert names["top_k_kl"](p[None, :2], p[None, :2]).item() == 0
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
    used = {name for diffs, *_ in CASES.values() for name in diffs}
    assert used == {*RECIPES, "price of length"}


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


# recipes/dpo.py: equation 7 of arXiv 2305.18290, one pair and one token at a time

DPO = "recipes/dpo.py"
DPO_KEYS = dict(
    beta=0.3, label_smoothing=0.1, max_iters=3, batch_size=7, micro_batch_size=3, warmup_iters=1,
    learning_rate=3e-3, eval_interval=2, eval_size=3, lr_decay="cosine", beta1=0.9, beta2=0.95,
    adam_eps=1e-8, grad_clip=1.0, seed=1, weight_decay=0.1)


def dpo_keys(world, **changed):
    return DPO_KEYS | dict(dtype="float64", device_type="cpu", timeout=60, policy_path=world.policy,
                       train_path=world.pairs_train, val_path=world.pairs_val) | changed


def dpo_by_hand(world, keys, lora=None):
    """(log, models) by hand. lora: rank and alpha."""
    c = SimpleNamespace(**DPO_KEYS | keys)
    policy, reference = (by_hand.language_model(world.policy) for _ in range(2))
    adapters = by_hand.Adapters(policy.base_model, *lora, c.seed) if lora else None
    trained = (adapters or policy).parameters()

    def reward(row, side):
        text = by_hand.encode(row["prompt"]), by_hand.encode(row[side]) + [by_hand.EOS]
        ours, theirs = (by_hand.logprobs_of(model, *text)[0] for model in (policy, reference))
        return c.beta * sum(p - q.detach() for p, q in zip(ours, theirs, strict=True))

    def compare(rows, wrong):
        """The loss of pairs, of which a share has the wrong label; and the means of figures."""
        losses, figures = [], []
        for row in rows:
            good, bad = reward(row, "chosen"), reward(row, "rejected")
            p = 1 / (1 + torch.exp(bad - good))  # Bradley-Terry
            losses.append(-(1 - wrong) * torch.log(p) - wrong * torch.log(1 - p))
            x, y = good.item(), bad.item()
            tie = x == y or row["chosen"] == row["rejected"]
            figures.append(dict(accuracy=0.5 if tie else float(x > y), margin=x - y,
                                chosen_reward=x, rejected_reward=y))
        loss = sum(losses) / len(losses)
        return loss, {name: by_hand.mean([one[name] for one in figures]) for name in figures[0]}

    def evaluate():
        loss, figures = compare(by_hand.held_out_of(c, world.rows["pairs_val"]), 0.0)
        return {"eval/loss": loss.item()} | {f"eval/{name}": x for name, x in figures.items()}

    def learn(picked):
        loss, figures = compare([world.rows["pairs_train"][i] for i in picked], c.label_smoothing)
        return loss, {"loss/preference": loss.item()} | {
            f"train/{name}": x for name, x in figures.items()}

    log = by_hand.train_on(c, by_hand.AdamW(trained, c), "policy", evaluate, learn,
                           len(world.rows["pairs_train"]))
    if lora:
        adapters.merge()
    return log, dict(policy=policy)


def test_dpo_killed_and_resumed_is_the_run_by_hand(world, tmp_path):
    keys = dpo_keys(world, checkpoint_interval=1)
    killed = run(DPO, tmp_path, keys, ranks=2, before=at(2, signal.SIGKILL, rank=1))
    assert killed.codes[1] == -signal.SIGKILL and killed.codes[0] != 0
    log, models = dpo_by_hand(world, {})
    assert log[0]["train/margin"] == 0 and abs(log[0]["loss/preference"] - math.log(2)) < 1e-12
    assert abs(log[-1]["eval/margin"]) > 1e-3  # it has learned something
    assert_agrees(well(DPO, tmp_path, keys | dict(zero_stage="3", micro_batch_size=1), ranks=2),
                  log, models)


def test_dpo_with_an_adapter(world, tmp_path):
    out = well(DPO, tmp_path, dpo_keys(world, head_chunk=4, lora="2:6", label_smoothing=0.0))
    assert_agrees(out, *dpo_by_hand(world, dict(label_smoothing=0.0), (2, 6)))


def test_equal_texts_are_a_tie_and_long_pairs_go_as_a_whole(world, tmp_path):
    """Ties also when the policy has moved, and the two have last bits of their own."""
    ties = jsonl(f"{tmp_path}/ties.jsonl", [
        dict(prompt="abc", chosen=f"{i}" * (1 + i % 4), rejected=f"{i}" * (1 + i % 4))
        for i in range(20)])
    pair = dict(prompt="1=", chosen="2", rejected="3")
    long = jsonl(f"{tmp_path}/long.jsonl", [pair, pair | dict(rejected="1" * 70)])
    out = well(DPO, f"{tmp_path}/a", dpo_keys(world, val_path=ties, eval_size=0, max_iters=2))
    last = read_jsonl(f"{out}/log.jsonl")[-1]
    assert last["eval/accuracy"] == 0.5
    assert last["eval/chosen_reward"] == last["eval/rejected_reward"] != 0
    keys = dpo_keys(world, train_path=long, max_iters=1, val_path="")
    assert_one_line(run(DPO, f"{tmp_path}/b", keys), "dpo.py", "long.jsonl", "row 2")
    dropped = run(DPO, f"{tmp_path}/b", keys | dict(too_long="drop"))
    assert dropped.codes == [0] and "\npairs: 1;" in dropped.out[0]
    assert_one_line(run(DPO, f"{tmp_path}/b", keys | dict(too_long="cut")), "dpo.py", "too_long")


def test_the_config_of_dpo_sets_its_keys():
    keys = read_keys(f"{ROOT}/{DPO}") | read_keys(f"{ROOT}/config/keys.py")
    config = read_arguments(keys, [f"{ROOT}/config/arithmetic_dpo.py"])
    assert config["train_path"][0].endswith("pairs_train.jsonl") and keys["beta"].default == 0.1
