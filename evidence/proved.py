"""
What tools/prove.py finds: typical mistakes of people who change ppo.py, grpo.py, sft.py and rm.py,
each made in a copy; and right forks, which it must not accuse. Prints the tables of proved.md.

    python evidence/proved.py                  # all mistakes, each by the check that must find it
    python evidence/proved.py no_mask ref      # those whose names have one of these words
    python evidence/proved.py --forks          # the right forks, by all checks
"""
import glob
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [f"{HERE}/tools"]

import prove  # noqa: E402

A, R = 'batch["advantages"] = masked_whiten(advantages / unit, mask)', "rewards = -kl_coef * kl"
PG = "pg_loss = masked_sum(pg_losses, m) / token_count"
GROUP = "advantages = group_advantages(scores, group_size, scale_by, baseline)"
LOOP = "for iteration in run.iterations():"
MISTAKES = {  # its name: script, the check that finds it, a word that it must say, then edits:
    # file (the script's, if None), text, the text in its place
    "no_mask_whitened": ("ppo", "padding", "advantages", (None, A, (
        'batch["advantages"] = (advantages - advantages.mean()) / advantages.std()'))),
    "whitened_in_mb": ("ppo", "parts", "gradient", (None, '-mb["advantages"] * ratio\n', (
        '-(mb["advantages"] - (mb["advantages"] * m).sum() / m.sum().clamp(min=1)) * ratio\n'))),
    "mean_of_means": ("grpo", "parts", "gradient", (
        None, 'masked_sum(pg_losses * mb["weights"], m)', "pg_losses[m].sum() / (m.sum() + 1e-9)")),
    "last_column": ("ppo", "trained", "rewards", (
        None, 'rewards[batch["index"], last_real(mask)] += s', "rewards[:, -1] += s")),
    "no_detach": ("grpo", "trained", "exactly 0", (
        None, 'logprobs, mb["old_logprobs"], mb["adv', 'logprobs, logprobs, mb["adv')),
    "randn": ("ppo", "noise", "advantages", (None, A, f"{A} + torch.randn(mask.shape) * mask")),
    "randperm": ("ppo", "noise", "without a name", (
        None, 'permutation(batch_size, seed, "minibatches", iteration, epoch)',
        "torch.randperm(batch_size)")),
    "noise_of_mb": ("ppo", "parts", "micro-batch", (
        None, "ratio = (logprobs -", "ratio = (logprobs + 0.1 * torch.randn(m.shape, generator="
        "torch.Generator().manual_seed(iteration), dtype=logprobs.dtype) -")),
    "variable": ("grpo", "resume", "`ema`", (None, LOOP, f"ema = 0.0\n{LOOP}"), (
        None, GROUP, f"ema = 0.9 * ema + 0.1 * scores.mean().item()\n    {GROUP} * (1 + ema)")),
    "module_global": ("ppo", "resume", "formulas.MOMENTS", (
        "formulas.py", "def masked_whiten", "MOMENTS = []\n\n\ndef masked_whiten"), (
        "formulas.py", "    variance = masked", "    MOMENTS.append(mean.item())\n    mean = sum("
        "MOMENTS) / len(MOMENTS)\n    variance = masked")),
    "generator": ("grpo", "resume", "`drawn`", (
        None, LOOP, f"drawn = torch.Generator().manual_seed(seed)\n{LOOP}"), (
        None, GROUP, f"{GROUP} * torch.rand((), generator=drawn, dtype=torch.float64)")),
    "state_tensor": ("ppo", "trained", "run.state['mean']", (
        None, R, f"{R}\n    run.state['mean'] = scores.mean()")),
    "no_optimizer": ("ppo", "trained", "value_model", (
        None, "run = Run(", "mine = optimizers.pop('value_model')\nrun = Run(")),
    "optimizer_hides": ("ppo", "trained", "past", (None, "optimizers = dict(", (
        "class Mine(torch.optim.SGD):\n    def step(self):\n        self.past = [p + 0 for p in "
        "self.param_groups[0]['params']]\n        super().step()\n\n\noptimizers = dict(")), (
        None, "run = Run(", "optimizers['policy'] = Mine(policy.parameters(), lr=1e-2)\n"
        "run = Run(")),
    "groups_crossed": ("grpo", "order", "group_size", (
        "groups.py", "scores.double().view(-1, group_size)",
        "scores.double().view(group_size, -1).T.reshape(-1, group_size)")),
    "rows_crossed": ("ppo", "parts", "batch[...]", (
        None, '-mb["advantages"] * ratio\n',
        '-batch["advantages"][:len(m), :m.shape[1]] * ratio\n')),
    "kl_sign_grpo": ("grpo", "kl", "sign", (
        None, "pg_loss = pg_loss + kl_loss_coef", "pg_loss = pg_loss - kl_loss_coef")),
    "advantage_sign": ("grpo", "score", "sign", (None, GROUP, GROUP.replace("= g", "= -g"))),
    "score_overwritten": ("ppo", "score", "never reaches", (
        None, A, f"{A}\n    batch['advantages'] = masked_whiten(batch['old_logprobs'], mask)")),
    "length_from_ids": ("ppo", "ids", "pad_id", (
        None, "token_count = mask[index].sum()",
        'token_count = (batch["tokens"][index] != policy.tokenizer.pad_id).sum()')),
    "divided_by_T": ("ppo", "padding", "numel", (
        None, "token_count = mask[index].sum()", "token_count = mask[index].numel()")),
    "old_in_place": ("ppo", "ranks", "rank's rows", (
        None, "ratio = (logprobs", 'batch["old_logprobs"][mb["index"], :m.shape[1]] += 0.1 * m\n'
        + " " * 16 + "ratio = (logprobs")),
    "lone_collective": ("grpo", "ranks", "collective", (
        None, GROUP, f"{GROUP}\n    if parallel.rank_and_size()[0] == 0:\n"
        "        parallel.all_reduce_max(torch.zeros(()))")),
    "metric_of_one_rank": ("ppo", "ranks", "rank", (
        None, "record |= parallel.all_reduce", "if parallel.rank_and_size()[0] == 0:\n        sums["
        '"mine"] = torch.ones(2, dtype=torch.float64)\n    record |= parallel.all_reduce')),
    "set_order": ("ppo", "noise", "set", (
        None, A, f"{A} * (1 + list({{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}}).index('a'))")),
    "time_seed": ("grpo", "noise", "time of day", (
        None, GROUP, f"import time\n    {GROUP} * torch.rand((), generator=torch.Generator()"
        ".manual_seed(int(time.time())), dtype=torch.float64)")),
    "not_filled": ("ppo", "noise", "torch.empty", (
        None, A, f"{A}\n    spare = torch.empty(9999, dtype=torch.float64)\n    spare[:50] = 1\n"
        "    batch['advantages'] = batch['advantages'] * (1 + spare[:60].abs().clamp(max=9).sum())"
        )),
    "metric_mean_of_means": ("ppo", "parts", "mine/ratio", (
        None, "gaps.append(", "means = [*means, ratio[m].mean().item()] if steps else [0.0]\n"
        + " " * 16 + "gaps.append("), (
        None, "    # 5) metrics", "    record['mine/ratio'] = sum(means) / len(means)\n"
        "    # 5) metrics")),
    "evaluation_moves": ("ppo", "evaluation", "evaluate()", (
        None, "    if missing_eos_penalty > 0:", "    run.state['n'] = run.state.get('n', 0) + 1\n"
        "    scores = scores / run.state['n']\n    if missing_eos_penalty > 0:")),
    "clipped_too_early": ("ppo", "ranks", "clipped before", (
        None, "            parallel.all_reduce_gradients(", "            parallel.clip_gradients("
        "gradients['policy'], 0.01)\n            parallel.all_reduce_gradients(")),
    "reference_is_policy": ("ppo", "trained", "objective/kl", (
        None, "load_ref_policy(policy_path, policy, system, device)", "policy")),
    "mean_of_the_share": ("grpo", "ranks", "share", (
        "rewards.py", "if len(share) else [], dtype=torch.float64)",
        "if len(share) else [], dtype=torch.float64) + len(share)")),
    "gradients_stay": ("ppo", "ranks", "zero_gradients", (
        None, "            parallel.zero_gradients(gradients)\n            if", "            if")),
    "mask_too_late": ("ppo", "mask", "masked_sum", (None, PG, PG.replace("m)", "m.roll(1, 1))"))),
    "default_argument": ("ppo", "resume", "`shape_scores`", (
        None, "def shape_scores(batch):", "def shape_scores(batch, before=[]):"), (
        None, "    if missing_eos_penalty > 0:", "    before.append(scores.mean().item())\n"
        "    scores = scores - sum(before) / len(before)\n    if missing_eos_penalty > 0:")),
    "closure": ("grpo", "resume", "`smooth`", (
        None, LOOP, "def smoother():\n    level = 0.0\n\n    def smooth(x):\n        nonlocal level"
        "\n        level = 0.9 * level + 0.1 * x\n        return level\n\n    return smooth\n\n\n"
        f"smooth = smoother()\n{LOOP}"), (None, GROUP, (
            f"{GROUP} * (1 + smooth(scores.mean().item()))"))),
    "scheduler": ("ppo", "resume", "schedule", (
        None, LOOP, "schedule = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD("
        f"[torch.zeros(1)], 1.0), 0.5)\n{LOOP}"), (
        None, "norms = run.step(gradients, lrs,", "lrs = {name: lr * schedule.get_last_lr()[0] for "
        "name, lr in lrs.items()}\n            norms = run.step(gradients, lrs,"), (
        None, "    # 5) metrics", "    schedule.step()\n    # 5) metrics")),
    "numpy_entropy": ("grpo", "noise", "numpy", (
        None, GROUP, f"import numpy as np\n    {GROUP} * np.random.default_rng().random()")),
    "ids_in_the_loss": ("grpo", "ids", "read where", (
        None, "pg_loss = masked_sum(pg_losses * mb", "pg_loss = (1 + mb['tokens'].double().std())"
        " * masked_sum(pg_losses * mb")),
    "evaluation_draws": ("grpo", "evaluation", "share", (
        None, LOOP, f"drawn = torch.Generator().manual_seed(seed)\n{LOOP}"), (
        None, "    scores = batch[\"scores\"]\n", "    scores = batch[\"scores\"] + torch.rand((), "
        "generator=drawn, dtype=torch.float64)\n"), (
        None, GROUP, f"{GROUP} * torch.rand((), generator=drawn, dtype=torch.float64)")),
    "averaged": ("grpo", "ranks", "averaged", (
        None, "            norms = run.step(gradients, dict(policy=lr)",
        "            for b in gradients['policy']:\n                b /= parallel.rank_and_size()["
        "1]\n            norms = run.step(gradients, dict(policy=lr)")),
    "divided_by_texts": ("grpo", "mask", "token_weights", (
        None, "weights = token_weights(counted[index]", "weights = token_weights((torch.arange("
        "mask.shape[1]) < batch['lengths'][index][:, None])")),
    "never_stepped": ("ppo", "trained", "critic", (None, "run = Run(", (
        "models['critic'] = load_value_model('policy', policy, None, system, device, seed)\n"
        "optimizers['critic'] = make_optimizer(models['critic'], 'value', system, 1e-3, (beta1, "
        "beta2), adam_eps)\nrun = Run("))),
    "numpy_table": ("grpo", "resume", "`table`", (None, LOOP, f"table = np.zeros(5000)\n{LOOP}"), (
        None, "import torch\n\n", "import numpy as np\nimport torch\n\n"), (None, GROUP, (
            f"table[2000] += scores.mean().item()\n    {GROUP} * (1 + table[2000])"))),
    # with several turns alone
    "last_by_count": ("ppo", "turns", "rewards", (
        None, 'rewards[batch["index"], last_real(mask)] += s',
        'rewards[batch["index"], batch["begins"] + mask.sum(1) - 1] += s')),
    "mask_of_texts": ("ppo", "mask", "masked_whiten", (
        None, A, 'text = torch.arange(mask.shape[1]) < batch["lengths"][:, None]\n    '
        + A.replace("mask)", "text)"))),
    # the other scripts
    "mean_of_means_sft": ("sft", "parts", "gradient", (
        None, "loss / token_count", "loss / len(logprobs)")),
    "share_rm": ("rm", "ranks", "gradient", (
        None, "total / batch_size", "total / len(parallel.share(batch_size))")),
    # a formula that is wrong in the same way everywhere: none of its business
    "shifted": ("ppo", "", "", (None, A, f"{A}.roll(1, 1) * mask")),
    # nothing is wrong with these
    "mask_forgotten_in_a_sum": ("ppo", "", "", (None, PG, (
        "pg_loss = (pg_losses * m).sum() / token_count"))),
}


# right forks: their script, what is typed, and edits; a recipe's diff is applied, too
FORKS = {
    "ppo.py": ("ppo", []), "grpo.py": ("grpo", []), "sft.py": ("sft", []), "rm.py": ("rm", []),
    "dpo.py": ("recipes/dpo", []),
    "dapo": ("grpo", [f"{HERE}/config/dapo.py", "--max_refills=1"]),
    "dr_grpo": ("grpo", [f"{HERE}/config/dr_grpo.py", "--kl_in=reward", "--kl_coef=0.1"]),
    "gspo": ("grpo", [f"{HERE}/config/gspo.py"]), "cispo": ("grpo", [f"{HERE}/config/cispo.py"]),
    "rloo": ("grpo", [f"{HERE}/config/rloo.py"]),
    "shared": ("ppo", [f"{HERE}/config/arithmetic_shared.py", "--ema_decay=0.9"]),
    "entropy": ("ppo", ["--entropy_coef=0.01", "--kl_estimator=k3", "--value_init=policy"]),
    "stale": ("grpo", ["--staleness=1", "--importance_cap=2"]),
    "turns": ("grpo", [f"{HERE}/config/calculator_grpo.py"]),
    "lora": ("ppo", ["--lora=2", "--gradient_checkpointing=True"]),
    "adafactor": ("grpo", ["--optim=adafactor"]),
    # recipes that take other keys in a small run; SMALL is the folder of its world
    "trees": ("grpo", ["--group_size=4", "--trunk=2"]), "vapo": ("ppo", ["--lam_alpha=0.5"]),
    "process_supervision": ("grpo", ["--reward_functions=accuracy,SMALL/rules.py:steps"]),
    "self_distillation": ("grpo", ["--ref_path=SMALL/policy", "--kl_in=reward", "--kl_coef=1",
                                   "--kl_estimator=k1"]),
    # what no recipe has: a temperature of each iteration, a second frozen model, a loss with a
    # count of its own, a baseline in the page's own words, a number that is kept where it survives
    "heat": ("grpo", [], (None, "    record = {}\n", (
        "    record, temperature = {}, 1 + 0.1 * iteration\n"))),
    "anchor": ("grpo", [], (None, "reward_model = None\n", (
        "models['anchor'] = anchor = load_ref_policy(policy_path, policy, system, device)\n"
        "reward_model = None\n")), (None, "ref_logprobs=ref_policy)", (
            "ref_logprobs=ref_policy, anchor_logprobs=anchor)")), (None, GROUP, (
                "scores = same_score_for_same_text(scores - 0.1 * (batch['old_logprobs'] - batch["
                f"'anchor_logprobs']).square().sum(1), batch)\n    {GROUP}"))),
    "auxiliary": ("grpo", [], (None, "            gaps = []", (
        "            batch['worse'] = mask & (batch['advantages'] < 0)\n"
        "            worse_count = batch['worse'][index].sum().clamp(min=1)\n"
        "            gaps = []")), (None, "                (run.loss_scale * pg_loss).backward()", (
            "                pg_loss = pg_loss + 0.1 * masked_sum(logprobs.exp(), mb['worse']) / "
            "worse_count\n                (run.loss_scale * pg_loss).backward()"))),
    "leave_one_out": ("grpo", [], (None, GROUP, (
        "groups = scores.view(-1, group_size)\n    others = (groups.sum(1, keepdim=True) - groups)"
        " / (group_size - 1)\n    advantages = (groups - others).flatten()"))),
    "running_mean": ("ppo", [], (None, R, (
        "run.state['mean'] = mean = 0.9 * run.state.get('mean', 0.0) + 0.1 * scores.mean().item()\n"
        f"    scores = scores - mean\n    {R}"))),
}


def copy_of(folder, edits=(), diffs=(), script=""):
    """A copy of the files in a folder, with edits of (file, old, new), and with diffs."""
    os.makedirs(folder)
    # a diff may change one of the options
    subprocess.run(["cp", "-r", "--parents", "options", "recipes/dpo.py", *glob.glob(
        "*.py", root_dir=HERE), folder], cwd=HERE, check=True)
    for name in ("config", "grading", "data"):
        os.symlink(f"{HERE}/{name}", f"{folder}/{name}")
    for file, old, new in edits:
        path = f"{folder}/{file or f'{script}.py'}"
        with open(path, encoding="utf-8") as f:
            text = f.read()
        assert text.count(old) == 1, (path, old, text.count(old))
        with open(path, "w", encoding="utf-8") as f:
            f.write(text.replace(old, new))
    for diff in diffs:
        subprocess.run(["git", "apply", f"{HERE}/recipes/{diff}.diff"], cwd=folder, check=True)
    return folder


def typed(script, more=()):
    """The command's arguments, behind the script."""
    return [f"{HERE}/config/arithmetic_{os.path.basename(script)}.py", *more]


def proof_of(folder, script, more, edits, diffs=(), only=""):
    """prove's Proof of a copy with these changes, by one check or by all. Raises CannotRun."""
    copy_of(f"{folder}/copy", edits, diffs, script)
    proof = prove.Proof(f"{folder}/copy/{script}.py", typed(script, more), f"{folder}/runs",
                        say=lambda text: None)
    proof.of(only)
    return proof


def try_mistake(name, folder, more=()):
    """By its one check; by all, if none can find it."""
    script, check, _, *edits = MISTAKES[name]
    return proof_of(folder, script, more, edits, only=check)


def try_fork(name, folder, only=""):
    diff = f"{HERE}/recipes/{name}.diff"
    recipe = open(diff, encoding="utf-8").read() if os.path.exists(diff) else ""
    script, more, *edits = FORKS.get(name) or ("ppo" if "+++ b/ppo.py" in recipe else "grpo", [])
    more = [arg.replace("SMALL", f"{folder}/runs/world") for arg in more]
    return proof_of(folder, script, more, edits, [name] if recipe else [], only)


def broken(proof):
    """({check: how it is broken} of promises, the same of notes)."""
    found = {name: x for name, x in proof.found.items() if x}
    return ({name: x for name, x in found.items() if not x["note"]},
            {name: x for name, x in found.items() if x["note"]})


def main(argv):
    os.chdir(HERE)
    words, began = [word for word in argv if not word.startswith("--")], time.time()
    recipes = [os.path.basename(path)[:-5] for path in sorted(glob.glob(f"{HERE}/recipes/*.diff"))]
    names = dict.fromkeys([*FORKS, *recipes]) if "--forks" in argv else MISTAKES
    right = 0
    print("| | broken | notes | seconds | names it |\n|---|---|---|---|---|")
    for name in names:
        if words and not any(word in name for word in words):
            continue
        start, word = time.time(), "" if "--forks" in argv else MISTAKES[name][2]
        with tempfile.TemporaryDirectory() as folder:
            try:
                proof = (try_fork if "--forks" in argv else try_mistake)(name, folder)
            except prove.CannotRun as e:
                print(f"| {name} | cannot be run: {e} | | | |")
                continue
        hard, notes = broken(proof)
        said = str([x["lines"] for x in [*hard.values(), *notes.values()]])
        named = ("yes" if word in said else "no") if word else "accused" if hard else "-"
        right += named in ("yes", "-")
        print(f"| {name} | {', '.join(hard)} | {', '.join(notes)} | "
              f"{time.time() - start:.0f} | {named} |", flush=True)
    print(f"\n{right} as it should be; {time.time() - began:.0f} seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
