"""
recipes/*.diff: each is applied by tools/fork.py, and runs in the folder that this leaves, with nothing else of the repository, on
two ranks; stopped in the middle and resumed it ends in the same bits; and what comes out is what by_hand.py works out.
"""
import ast
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import test_by_hand
import tiny
from conftest import ROOT
from test_by_hand import GRPO, PPO, command, differences, worked_out
from tiny import forked, one_run

sys.path.append(os.path.join(ROOT, "tools"))

import fork  # noqa: E402
from errors import BadInput  # noqa: E402

REINFORCE_HAS_NOT = ["ppo_epochs", "num_minibatches", "lam", "cliprange", "cliprange_value", "importance_cap", "target_kl"]

# The runs: {name: (recipes, script, keys of by_hand.py)}; what a recipe is without is the key's value there. BRANCHES: what each
# must have seen.
CASES = {
    "scores": ("scale_scores,reward_clip,kl_controller", "ppo.py", PPO | dict(
        scale_scores="running", missing_eos_penalty=2.0, reward_clip=1.5, kl_coef_target=0.9, lr_decay="linear",
        value_warmup_iters=2, max_iters=3, eval_interval=1, eval_size=0, keep_best=True)),
    # some responses have no score
    "some scores": ("scale_scores", "ppo.py", PPO | dict(
        mix=[(1.0, "some"), (0.0, "letters")], value_init="policy", scale_scores="running", missing_eos_penalty=0.7,
        max_new_tokens=8, keep_best=True, eval_interval=1, eval_size=0, seed=5, batch_size=4, max_iters=4)),
    "one score": ("scale_scores", "ppo.py", PPO | dict(  # and so a deviation of 0
        batch_size=1, max_new_tokens=1, num_minibatches=1, scale_scores="running")),
    "early": ("target_kl,kl_controller", "ppo.py", PPO | dict(
        kl_estimator="k2", kl_coef_target=0.4, reward_model="other", value_init="shared", gamma=0.9, lam=0.8,
        cliprange_value=0.0, grad_clip=0.5, vf_coef=0.5, entropy_coef=0.05, temperature=1.2, weight_decay=0.1, warmup_iters=2,
        target_kl=0.1, value_lr_decay="cosine", batch_size=6, num_minibatches=2, ppo_epochs=3, max_iters=3)),
    "waits": ("whiten_rewards,critic_warmup", "ppo.py", PPO | dict(
        missing_eos_penalty=1.0, whiten_rewards="keep-mean", critic_warmup_iters=1, ema_decay=0.8)),
    "all": ("scale_scores,reward_clip,kl_controller,whiten_rewards,critic_warmup,target_kl,dual_clip", "ppo.py", PPO | dict(
        scale_scores="running", reward_clip=1.0, kl_coef_target=2.0, whiten_rewards="zero-mean", critic_warmup_iters=1,
        target_kl=0.3, dual_clip=1.1, num_minibatches=5, max_iters=3, grad_clip=1.0)),
    "grpo": ("reward_clip,dual_clip,target_kl", "grpo.py", GRPO | dict(
        mix=[(0.5, "reward_model"), (1.0, "letters")], missing_eos_penalty=0.9, reward_clip=0.6, dual_clip=1.3, target_kl=0.2,
        num_minibatches=5, group_size=3, seed=8, max_iters=3)),
    "length": ("length,scale_scores", "ppo.py", PPO | dict(length_coef=0.3, scale_scores="running")),
    "text_metric": ("text_metric", "ppo.py", PPO | dict(mix=[(1.0, "reward_model"), (0.0, "distinct")])),
    "kl_penalty": ("kl_penalty", "ppo.py", PPO | dict(penalty=1.5, penalty_target=0.02, gone=["cliprange"], max_iters=4)),
    "dppo": ("dppo", "ppo.py", PPO | dict(shift_limit=0.02, gone=["cliprange"], max_iters=3)),
    "dppo, grpo": ("dppo", "grpo.py", GRPO | dict(
        shift_limit=0.01, gone=["cliprange", "cliprange_high", "loss_type"], num_minibatches=2, max_iters=3)),
    "vapo_lambda": ("vapo_lambda", "ppo.py", PPO | dict(lam=1.0, lam_alpha=0.5)),
    "reinforce": ("reinforce", "ppo.py", PPO | dict(
        recipe="reinforce", gone=REINFORCE_HAS_NOT, ppo_epochs=1, num_minibatches=1, lam=1.0, cliprange_value=0.0,
        entropy_coef=0.05, grad_clip=0.5, ema_decay=0.6, ptx="texts", ptx_coef=0.5)),
    "reinforce_pp": ("reinforce_pp", "grpo.py", GRPO | dict(
        recipe="reinforce_pp", gone=["scale_by"], scale_by="none", kl_estimator="k2")),
    "gdpo": ("gdpo", "grpo.py", GRPO | dict(
        recipe="gdpo", mix=[(1.0, "letters"), (0.5, "length")], batch_size=9, max_new_tokens=5)),
    "maxrl": ("maxrl", "grpo.py", GRPO | dict(recipe="maxrl", gone=["scale_by"], scale_by="none", num_minibatches=1)),
    # batches of an older policy, whose tokens, or whole responses, are left out where they do not fit to the policy of now
    "masked_importance": ("masked_importance", "ppo.py", PPO | dict(
        recipe="masked_importance", staleness=1, importance_cap=1.2, importance_floor=0.8, importance_level="token",
        importance_outside="drop", max_iters=3)),
    "masked_importance, deepseek_v32": ("masked_importance,deepseek_v32", "grpo.py", GRPO | dict(
        recipe="masked_importance", staleness=1, importance_cap=1.3, importance_floor=0.5, importance_level="sequence",
        importance_outside="drop", off_policy_limit=0.02, kl_correction=True, max_iters=3, num_minibatches=1, gaps=True,
        max_new_tokens=8)),
    "deepseek_v32": ("deepseek_v32", "grpo.py", GRPO | dict(  # the ratio of the KL is each token's, also where the clip's is not
        importance="sequence", cliprange=0.02, cliprange_high=0.05, kl_estimator="k1", kl_correction=True,
        off_policy_limit=0.0, truncated="mask", aggregation="seq-mean-token-mean", batch_size=8, group_size=4,
        num_minibatches=3, seed=1)),
    "turn_credit": ("turn_credit", "grpo.py", GRPO | dict(
        recipe="turn_credit", turns=True, max_turns=4, mix=[(0.7, "environment"), (0.5, "letters")], missing_eos_penalty=0.3,
        batch_size=12, group_size=4, max_new_tokens=14, max_iters=3)),
    "turn_credit, one turn": ("turn_credit", "grpo.py", GRPO | dict(kl_in="reward", kl_estimator="k1")),  # it is GRPO
}
BRANCHES = {
    "scores": ["score clipped above", "score clipped below", "best not raw", "kl_coef down"],
    "some scores": ["no score", "best not anew"],
    "early": ["early stop", "kl_coef up"],
    "waits": ["policy waits"],
    "all": ["policy waits", "dual", "early stop"],
    "grpo": ["dual", "early stop", "score clipped above", "score clipped below"],
    "kl_penalty": ["penalty up", "penalty down"],
    "dppo": ["risen", "fallen"],
    "dppo, grpo": ["risen", "fallen"],
    "masked_importance": ["dropped"],
    "masked_importance, deepseek_v32": ["dropped", "left out, off-policy", "gap"],
    "turn_credit": ["turn alone", "turn of some", "turn credited"],
}

# In a process that has our modules already: those of the folder take their place, and the repository cannot be imported
ANEW = """
import sys
import campaign
for name in ["before_torch", "decoding_cache", "options", "grading", *campaign.OURS]:
    sys.modules.pop(name, None)
sys.path[:] = [HOME] + [path for path in sys.path if path != ROOT]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """{name: (out_dir of the whole run, that of the one that was stopped, the run by hand)} of the cases that are asked for."""
    folder = str(tmp_path_factory.mktemp("recipes"))
    world = test_by_hand.build(folder)
    asked = {value for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
             for value in item.callspec.params.values() if isinstance(value, str)}
    cases = {}
    for name in asked & CASES.keys():
        recipe, script, keys = CASES[name]
        home = f"{folder}/home of {name}"
        scripts, _ = fork.fork(recipe, home, ["foreign_rewards", "ptx", "environment", "roles", "ema"])
        new = next(new for new, old in scripts.items() if old == script)
        code = f"HOME, ROOT = {home!r}, {ROOT!r}\n{ANEW}" + (test_by_hand.GAPS if keys["gaps"] else "")
        arguments = [argument.replace("HOME", home) for argument in command(world, script, keys)]
        cases[f"{name}, whole"] = [one_run(f"{home}/{new}", *[(arguments, code)] * 2)]
        cases[f"{name}, stopped"] = [one_run(f"{home}/{new}", *[(arguments, code + more)] * 2) for more in (tiny.stops(1), "")]
    for name, results in forked(folder, cases, at_once=4).items():
        assert {code for result in results for code in result["codes"]} == {0}, (name, results)
        if len(results) > 1:
            assert "stopped before the update" in results[0]["stdout"][0], (name, results[0])
    return {name: (f"{folder}/{name}, whole/out", f"{folder}/{name}, stopped/out", worked_out(world, *CASES[name][1:]))
            for name in asked & CASES.keys()}


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_is_what_it_is_by_hand(runs, name):
    whole, _, expected = runs[name]
    assert not differences(whole, expected)
    assert not [branch for branch in BRANCHES.get(name, ()) if not expected.seen[branch]], expected.seen


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_resumes_to_the_bit(runs, name):
    whole, stopped, expected = runs[name]
    for model in expected.models:
        assert tiny.distance(f"{whole}/{model}", f"{stopped}/{model}") == 0
    one, other = (list(map(tiny.measured, tiny.read_log(out))) for out in (whole, stopped))
    assert one == other


def test_another_kl_coef_counts_and_then_what_it_was_adapted_to(tmp_path):
    world, home = tiny.build(str(tmp_path)), f"{tmp_path}/home"
    fork.fork("kl_controller", home, [])
    code = f"HOME, ROOT = {home!r}, {ROOT!r}\n{ANEW}"
    keys = dict(checkpoint_interval=1, max_new_tokens=2, kl_coef_target=3.0)  # a KL of less than 2.4
    stages = dict(kl_coef=0.0, max_iters=1), dict(kl_coef=0.5, max_iters=2), dict(kl_coef=0.7, max_iters=3)
    forked(str(tmp_path), {"stages": [one_run(f"{home}/ppo.py", (world.ppo("out", **keys | more), code)) for more in stages]})
    factor = 1 - 0.2 * 7 / 10_000
    assert [record["objective/kl_coef"] for record in tiny.read_log(f"{tmp_path}/stages/out")[:3]] == pytest.approx(
        [0.0, 0.5, 0.7 * factor], rel=1e-12)


@pytest.mark.parametrize("recipe, script, keys, words", [
    ("dual_clip", "grpo", dict(dual_clip=1.0), ["dual_clip = 1.0", "> 1"]),
    ("dual_clip", "grpo", dict(loss_type="cispo"), ["dual_clip", "loss_type = 'clip'"]),
    ("target_kl", "ppo", dict(staleness=1), ["target_kl", "staleness", "--importance_cap=2"]),
    ("masked_importance", "ppo", dict(importance_cap=0.0), ["importance_cap = 0.0", "> 0"]),
    ("masked_importance", "grpo", dict(importance_cap=0.4, importance_floor=0.5), ["importance_floor = 0.5", "0.4"]),
    ("deepseek_v32", "grpo", dict(kl_in="reward"), ["kl_correction", "--kl_correction=False"]),
    ("deepseek_v32", "grpo", dict(kl_estimator="k2"), ["kl_correction", "--kl_correction=False"]),
    ("deepseek_v32", "grpo", dict(kl_estimator="k1", kl_correction=False, reward_functions="length"), ["--kl_estimator=k2"])])
def test_what_does_not_go_with_a_recipe_is_one_line(tmp_path, recipe, script, keys, words):
    world, home = tiny.World(str(tmp_path)), f"{tmp_path}/home"
    fork.fork(recipe, home, [])
    code = f"HOME, ROOT = {home!r}, {ROOT!r}\n{ANEW}"
    run = one_run(f"{home}/{script}.py", (getattr(world, script)("out", **keys), code))
    (result,), = forked(str(tmp_path), {"refused": [run]}).values()
    (said,) = result["stderr"]
    assert result["codes"] == [2] and said.count("\n") == 1 and all(word in said for word in words), result


def functions_of(recipe, *names, **keys):
    """Functions that a recipe adds to the first file that it names; keys: of the script, that they read."""
    old, _, hunks = fork.read_recipe(recipe)[1][0]
    new_file = old == "/dev/null"
    source = "".join(f"{line[1:]}\n" for line in hunks[0]) if new_file else fork.apply(hunks, fork.read(f"{ROOT}/{old}"), recipe)
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if getattr(node, "name", "") in names or "KL_HORIZON" in ast.unparse(node)[:10]]
    found = dict(torch=torch, **keys)
    exec(compile(tree, recipe, "exec"), found)
    return [found[name] for name in names]


def test_moments_are_those_of_all_numbers_so_far():
    """Also far from 0, where naive sums of squares lose all digits; 1 where there is no deviation."""
    update_moments, standard_deviation = functions_of("scale_scores", "update_moments", "standard_deviation")
    assert standard_deviation([0, 0.0, 0.0]) == standard_deviation(update_moments([0, 0.0, 0.0], torch.full((4,), 7.0))) == 1.0
    rng = np.random.default_rng(0)
    for shift in (0.0, 1e7):
        batches, moments = [rng.normal(shift, 0.3, size=n) for n in (1, 5, 2, 64, 7)], [0, 0.0, 0.0]
        for batch in batches:
            moments = update_moments(moments, torch.tensor(batch))
        everything = np.concatenate(batches)
        assert moments[0] == len(everything) and moments[1] == pytest.approx(everything.mean(), rel=1e-14)
        assert standard_deviation(moments) == pytest.approx(everything.std(), rel=1e-7)
        assert [type(x) for x in moments] == [int, float, float]  # which JSON keeps to the last bit


@pytest.mark.parametrize("kl, responses, factor", [
    (12.0, 512, 1.01024), (0.0, 512, 0.98976), (6.6, 1000, 1.01), (60.0, 10**6, 1.2), (6.0, 5000, 1.0)])
def test_a_kl_coef_that_adapts(kl, responses, factor):
    """The target is 6 nats: at most 20 % in 10,000 responses, and never more at once."""
    (adapt_kl_coef,) = functions_of("kl_controller", "adapt_kl_coef")
    assert adapt_kl_coef(0.1, kl, 6.0, responses) == pytest.approx(0.1 * factor, rel=1e-12)


# p / q is 1.5, 0.8 in row 0, so the product 1.2; 2, 2 in row 1, behind a token that the policy did not sample; 0.25 in row 2
Q = [[0.2, 0.5, 0.1], [0.1, 0.25, 0.2], [0.8, 0.5, 0.5]]
P = [[0.3, 0.4, 0.9], [0.9, 0.5, 0.4], [0.2, 0.1, 0.1]]
SAMPLED = [[True, True, False], [False, True, True], [True, False, False]]


@pytest.mark.parametrize("cap, floor, level, outside, want", [
    (1.3, 0.0, "token", "clip", [1.3, 0.8, 1.3, 1.3, 0.25]),
    (1.3, 0.9, "token", "clip", [1.3, 0.9, 1.3, 1.3, 0.9]),
    (1.3, 0.5, "token", "drop", [0, 0.8, 0, 0, 0]),
    (2.5, 0.0, "token", "drop", [1.5, 0.8, 2, 2, 0.25]),
    (1.3, 0.0, "sequence", "clip", [1.2, 1.2, 1.3, 1.3, 0.25]),
    (3.0, 0.0, "sequence", "drop", [1.2, 1.2, 0, 0, 0.25]),
    (5.0, 0.5, "sequence", "drop", [1.2, 1.2, 4, 4, 0])])
def test_weights_of_tokens_and_of_responses(cap, floor, level, outside, want):
    (masked_weights,) = functions_of("masked_importance", "masked_weights")
    p, q, mask = torch.tensor(P, dtype=torch.float64), torch.tensor(Q, dtype=torch.float64), torch.tensor(SAMPLED)
    p[~mask] = torch.nan  # what stands there has no say
    mb = dict(old_logprobs=p.log().requires_grad_(), sampler_logprobs=q.log(), response_mask=mask)
    weights = masked_weights(mb, cap, floor, level, outside)
    assert not weights.requires_grad
    assert torch.allclose(weights[mask], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_weights_of_a_long_response_do_not_overflow():
    (masked_weights,) = functions_of("masked_importance", "masked_weights")
    mb = dict(old_logprobs=torch.full((1, 4000), -0.1), sampler_logprobs=torch.full((1, 4000), -1.0),
              response_mask=torch.ones(1, 4000, dtype=torch.bool))
    assert (masked_weights(mb, 2.0, 0.0, "sequence", "clip") == 2).all()
    assert (masked_weights(mb, 2.0, 0.0, "sequence", "drop") == 0).all()


def test_responses_that_are_left_out_as_off_policy():
    # log(q / p): log 2 and 0 over two tokens; the third token is not the policy's
    q, p = (torch.tensor([x], dtype=torch.float64).log() for x in ([0.5, 0.4, 0.9], [0.25, 0.4, 0.1]))
    mask = torch.tensor([[True, True, False]])

    def left_out(advantage, p, q, mask, limit):
        (is_off_policy,) = functions_of("deepseek_v32", "is_off_policy", off_policy_limit=limit)
        mb = dict(advantages=torch.full((1, 3), advantage), sampler_logprobs=q, response_mask=mask)
        return is_off_policy(mb, p).tolist()

    for advantage, limit, want in ((-1.0, 0.3465, True), (-1.0, 0.3466, False), (1.0, 0.3465, False), (0.0, 0.1, False),
                                   (-1.0, 0.0, False)):  # 0: none is left out
        assert left_out(advantage, p, q, mask, limit) == [[want]]
    assert left_out(-1.0, q, p, mask, 0.01) == [[False]]  # likelier now
    assert left_out(-1.0, p, q, mask & False, 0.01) == [[False]]  # nothing was sampled


def test_each_recipe_is_run_and_says_what_it_is():
    run = {recipe for recipes, *_ in CASES.values() for recipe in recipes.split(",")}
    files = {file.removesuffix(".diff") for file in os.listdir(fork.RECIPES) if file.endswith(".diff")}
    assert files == run
    for name in files:
        head, changes = fork.read_recipe(name)
        assert re.search(r"\barXiv\s\d{4}\.\d{4,5}\b", head) and "What changes in a run" in head, name
        for _, _, hunks in changes:  # as few lines as can be: what stays is named to find a place, and for nothing else
            assert all(sum(line[:1] in (" ", "") for line in hunk) <= 1 for hunk in hunks), name
            assert max(len(line) for hunk in hunks for line in hunk if line.startswith("+")) <= 101, name


def test_a_changed_script_has_no_dead_key():
    for name in {recipe for recipes, *_ in CASES.values() for recipe in recipes.split(",")}:
        for old, _, hunks in fork.read_recipe(name)[1]:
            if old not in fork.SCRIPTS:
                continue
            above, below = fork.apply(hunks, fork.read(f"{ROOT}/{old}"), name).split("\nconfig, system = configure(")
            keys = re.findall(r"^([a-z]\w*) = ", above, re.MULTILINE)
            dead = {key for key in keys if not re.search(rf"\b{key}\b", below)}
            assert len(keys) > 30 and not dead, (name, dead)


# ---------------------------------------------------------------------------------------------------------------------
# tools/fork.py


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A repository of one script of three lines, with a recipe for it; returns a function that writes a recipe's hunks."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "ppo.py").write_text("a = 1\nif a:\n    b = 2\n    c = 3\n")
    monkeypatch.setattr(fork, "ROOT", str(tmp_path))
    monkeypatch.setattr(fork, "RECIPES", str(tmp_path / "recipes"))
    return lambda body: (tmp_path / "recipes" / "more.diff").write_text(f"Why.\n--- ppo.py\n+++ mine.py\n{body}")


def applied():
    (_, _, hunks), = fork.read_recipe("more")[1]
    return fork.apply(hunks, fork.read(f"{fork.ROOT}/ppo.py"), "here")


def test_hunks_are_found_by_their_text(book):
    book("@@\n     b = 2\n+    d = 4\n@@\n-a = 1\n+a = 5\n")
    assert applied() == "a = 5\nif a:\n    b = 2\n    d = 4\n    c = 3\n"
    book("@@\n-if a:\n-...\n-    c = 3\n+e = 6\n")
    assert applied() == "a = 1\ne = 6\n"


@pytest.mark.parametrize("body, words", [
    ("@@\n x = 1\n+y = 2\n", "no line 'x = 1'"), ("@@\n-    b = 2\n-if a:\n+y = 2\n", "0 places"),
    ("@@\n-a = 1\n+a = 2\n@@\n-a = 1\n+a = 3\n", "no line 'a = 1'")])
def test_a_hunk_that_has_not_one_place_is_refused(book, body, words):
    book(body)
    with pytest.raises(BadInput, match=words):
        applied()


def test_a_fork_reads_chats_and_its_name_needs_no_ending(tmp_path):
    """sft.py learns the assistant's messages by options/assistant.py, and no key of a run asks for that file."""
    for name in ("sft", "sft.py"):
        assert fork.fork(name, str(tmp_path / name), [])[0] == {"sft.py": "sft.py"}
        assert sorted(os.listdir(tmp_path / name / "options")) == ["assistant.py"]
    with pytest.raises(BadInput, match="recipes/reinforce.diff after kl_penalty: ppo.py has no line"):
        fork.fork("kl_penalty,reinforce", str(tmp_path / "both"), [])


def test_an_option_that_a_fork_lacks_is_one_line(tmp_path):
    """Whether the folder options/ is there or not, and in both ways to import a file of it."""
    for name in ("errors.py", "status.py"):
        shutil.copy(os.path.join(ROOT, name), tmp_path)

    def run(line):
        (tmp_path / "mine.py").write_text(f"from errors import report_errors\nreport_errors()\nif True:\n    {line}\n")
        return subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True)

    for there in (False, True):
        if there:
            (tmp_path / "options").mkdir()
            (tmp_path / "options" / "ptx.py").write_text("")
        for line in ("from options.roles import Ahead", "from options import roles"):
            done = run(line)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "options/roles.py" in done.stderr, done.stderr
    done = run("from options.ptx import Ptx")  # this file is there, and has a fault
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_refresh_mends_what_moved_and_names_what_is_gone(book, tmp_path):
    book("@@\n     b = 2\n+    d = 4\n@@\n a = 1\n-if a:\n+if not a:\n")
    assert fork.refresh() == ([], False)
    (tmp_path / "ppo.py").write_text("c = 3\na = 1\n\nif a:\n    while c:\n        b = 2\n")
    lines, broken = fork.refresh()
    assert lines == ["recipes/more.diff is mended"] and not broken
    assert applied() == "c = 3\na = 1\n\nif not a:\n    while c:\n        b = 2\n        d = 4\n"
    assert fork.refresh() == ([], False) and fork.read_recipe("more")[0] == "Why.\n"
    (tmp_path / "ppo.py").write_text("a = 1\nif a > 0:\n    b = 2\n")
    (line,), broken = fork.refresh()
    assert broken and "more.diff" in line and "ppo.py" in line and "'if a:'" in line


def test_all_recipes_are_in_step(tmp_path, monkeypatch):
    """If not: python tools/fork.py --refresh."""
    shutil.copytree(fork.RECIPES, tmp_path / "recipes")
    monkeypatch.setattr(fork, "RECIPES", str(tmp_path / "recipes"))
    assert fork.refresh() == ([], False)


def test_a_fork_has_what_its_script_needs_and_no_more(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fork.py", "grpo.py", str(tmp_path / "mine"), "lora"])
    fork.main()
    assert "config/arithmetic_grpo.py" in capsys.readouterr().out
    files = {os.path.relpath(os.path.join(parent, file), tmp_path / "mine")
             for parent, _, names in os.walk(tmp_path / "mine") for file in names}
    assert {"grpo.py", "keys.py", "rl_keys.py", "options/lora.py", "relatives.py", "decoding_cache.py", "gpu.py",
            "decoding_graph.py", "config/arithmetic_grpo.py"} <= files
    assert not files & {"ppo.py", "gae.py", "options/roles.py"} and len(files) < 45
    for what, where, more in (("grpo.py", "mine", []), ("grpo.py", "new", ["nothing"]), ("nothing", "new", [])):
        with pytest.raises(BadInput):
            fork.fork(what, str(tmp_path / where), more)
