"""
Slips of the pen in the root and in the sandbox, and the tests that must notice them, by hand:

    python evidence/tests/mutants.py              all of them, one after the other
    python evidence/tests/mutants.py gae.py 7     those of a file, or of these numbers

Each is made in a copy of the repository, in which only the tests run that are named with it, up to
the first that fails. test_house.py sees to it that each line is still there to be changed.
"""
import os
import shutil
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
IGNORED = shutil.ignore_patterns(".git", "__pycache__", "out", ".venv*")
MUTANTS = {  # {test file: [(file, old text, new text, pytest -k), ...]}
    # the room's own tests
    "test_gae": [
        ("gae.py", "delta = r + gamma * v[:, 1:]", "delta = r + v[:, 1:]", "loop"),
        ("gae.py", "torch.where(response_mask, values, 0)", "values", "masked")],
    "test_formulas": [
        ("formulas.py", "masked_mean((x - mean) ** 2, mask)", "x[mask].var()", "reductions"),
        ("metrics.py", "/ min(temperature, 1.0)", "* min(temperature, 1.0)", "gaps"),
        ("groups.py", "advantages * n / (n - 1)", "advantages * (n - 1) / n", "group"),
        ("groups.py", "weights.sum().clamp(min=1)", "mask.numel()", "weights"),
        ("model.py", "logprobs.masked_fill(logprobs == -torch.inf, 0)", "logprobs", "impossible")],
    "test_model": [
        ("model.py", "F.pad(target_mask[:, 1:], (0, 1))", "target_mask", "gpt2")],
    "test_rewards": [
        ("model.py", "torch.arange(len(tokens)), last]", "torch.arange(len(tokens)), last - 1]",
         "read"),
        ("grading/answers.py", "% 2 and mark.end() == len(ending)", "% 2", "begun")],
    "test_prompts": [
        ("prompts.py", "range(iteration * batch_size, (iteration + 1) * batch_size)",
         "range(iteration, iteration + batch_size)", "epochs")],
    "test_batches": [
        ("batches.py", "order[number::size]", "order[number * len(order) // size:]", "cards"),
        ("batches.py", "max([lengths[i] for i in part], default=2)",
         "lengths[part[-1]] if part else 2", "micro")],
    "test_tokenizer": [
        ("tokenizer.py", "[self.eos_id] * end\n", "[self.eos_id]\n", "toys"),
        ("tokenizer.py", "text.index(s) + len(s) for s", "text.index(s) for s", "stop")],
    "test_rollout": [
        ("tokenizer.py", "min(self.vocab_size, embeddings)", "embeddings", "loop"),
        ("rollout.py", "uniform.double() * cdf[:, -1]", "uniform.double() * 2.0**40", "extreme"),
        ("rollout.py", "positions[row, -1:] + 1", "positions[row, -1:]", "loop"),
        ("rollout.py", "(budgets[live] > t + 1)", "(budgets[live] > t)", "leave"),
        ("load.py", "(0.3 if in_16_bits else 1e-3)", "0.3e3", "refused")],
    "test_parallel": [
        ("parallel.py", "mul_(1 / scale)", "div_(scale * rank_and_size()[1])", "exchange"),
        ("parallel.py", "chunk.long() * (i * 2 + 1)", "chunk.long() * i * 2", "checksum"),
        ("parallel.py", "2 * alike <= len(sums)", "sums != sums[0]", "three")],
    "test_configurator": [
        ("configurator.py", "if not equals or model == name", "if model == name", "one_model"),
        ("configurator.py", "[arg for arg in argv if arg not in typed]",
         "reversed([arg for arg in argv if arg not in typed])", "wins")],
    # runs that are stopped, killed, or wrong
    "test_scripts": [
        ("ranks.py", "= not this_rank.stop, True", "= not this_rank.stop, False", "bits and sft"),
        ("errors.py", "os._exit(code or 1)", "os._exit(1)", "typo"),
        ("prompts.py", "repr(tuple(ids)).encode()", "repr(len(ids)).encode()", "another"),
        ("checkpoint.py", '"iteration": iteration}', '"iteration": iteration + 1}', "bits and sft"),
        ("run.py", "(self.gap_limit if checked else math.inf)", "math.inf", "first_step"),
        ("ppo.py", "if num_minibatches > batch_size:", "if False:", "empty")],
    "test_checkpoint": [
        ("checkpoint.py", "<= iteration][-keep:]", "<= iteration][:keep]", "kills"),
        ("checkpoint.py", "manifest[name] != present[name]", "False", "damaged"),
        ("checkpoint.py", "not os.path.lexists(final):  # killed", "False:  # killed", "while"),
        ("checkpoint.py", "torch.promote_types(own[key].dtype, torch.float32)", "t.dtype",
         "dtype")],
    "test_campaign": [
        ("ppo.py", 'run.state.get("value_unit", 1.0)', "1.0", "bits")],
    # what is computed
    "test_by_hand": [
        ("model.py", "W * self.unit if name", "W if name", "mixed"),
        ("groups.py", " / mask.sum(1, keepdim=True).clamp(min=1)", "", "gspo"),
        ("run.py", 'group["lr"] = lr\n', "pass\n", "sft"),
        ("load.py", "policy.tokenizer, seed=seed)", "policy.tokenizer)", "rules"),
        ("ppo.py", '[batch["index"], last_real(mask)] +=', "[:, -1] +=", "learned"),
        ("ppo.py", "torch.max(vf_losses1", "torch.min(vf_losses1", "learned"),
        ("ppo.py", "vf_losses2) / unit**2", "vf_losses2) / unit", "shared"),
        ("groups.py", "clipped_ratio.detach() * logprobs", "clipped_ratio * logprobs", "cispo"),
        ("grpo.py", "scores - kl_coef * kl.sum(1)", "scores - kl_coef * kl.mean(1)", "rloo"),
        ("grpo.py", "if not teaches[index].any():", "if not counted[index].any():", "dr"),
        ("rm.py", "(1 - confidence) * (1 - label_smoothing)", "(1 - confidence)", "again")],
    "test_by_hand_options": [
        ("options/ema.py", "parallel.copy_into(t, saved[name])", "pass", "ppo and stale and three"),
        ("ppo.py", 'scores - batch["token_rewards"].sum(1)', "scores", "ppo and turns"),
        ("run.py", '= sums["policy/approx_kl"]', '= sums["policy/clipfrac"]',
         "ppo and stale and three")],
    # faults, ranks, reliability
    "test_reliability": [
        ("run.py", "with parallel.patient(), parallel", "with parallel", "slow"),
        ("ranks.py", "        alarm.start()", "        pass", "nobody"),
        ("run.py", "if parallel.from_rank(self.settings) != self.settings:", "if 0:", "start_with"),
        ("checkpoint.py", "   if name not in trained}", "   }", "other_models")],
    "test_zero": [
        ("load.py", "parts = hf.get_decoder(), hf.get", "parts = hf, hf.get", "vision")],
    "test_knobs": [
        ("ranks.py", "[device.index] if gpu else None", "None", "ppo and roles")],
    "test_reward_models": [
        ("tokenizer.py", "if self.pad_id in self.eos_ids:", "if False:", "rm_py"),
        ("tokenizer.py", "== self.skipped_id:", "is None:", "others")],
    "test_sandbox": [
        ("grading/sandbox.py", '"--unshare-ipc", ', "", "host_sees"),
        ("grading/sandbox.py", '"--remount-ro", "/", ', "", "attack"),
        ("grading/sandbox.py", "NEWER = 424", "NEWER = 999", "filter"),
        ("grading/sandbox.py", "> limit + 1:", "> 2**40:", "verdicts")]}


def path_of(tests):
    """Where this file of tests stands: two of one name there are not."""
    return next(path for path in (f"tests/{tests}.py", f"evidence/tests/{tests}.py")
                if os.path.exists(os.path.join(ROOT, path)))


def trial(folder, tests, file, old, new, chosen):
    """pytest's exit code in the copy, with a mutant in its file; the file is as it was behind."""
    path = os.path.join(folder, file)
    with open(path, encoding="utf-8") as f:
        whole = f.read()
    assert whole.count(old) == 1, (file, old)
    with open(path, "w", encoding="utf-8") as f:
        f.write(whole.replace(old, new))
    pid = os.fork()  # torch is there already
    if pid == 0:
        torch.set_num_threads(torch.get_num_threads())  # why: tests/small_world.py
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        import pytest

        os._exit(pytest.main(["-qx", "-p", "no:cacheprovider", path_of(tests), "-k", chosen]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(path, "w", encoding="utf-8") as f:
        f.write(whole)
    return code


def main(wanted):
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    survived = []
    with tempfile.TemporaryDirectory() as parent:
        folder = shutil.copytree(ROOT, os.path.join(parent, "copy"), ignore=IGNORED)
        # not all below ROOT: the environment may be there
        sys.path[:] = [path for path in sys.path if path not in (ROOT, os.path.dirname(__file__))]
        every = [(tests, *slip) for tests, slips in MUTANTS.items() for slip in slips]
        for number, (tests, file, old, new, chosen) in enumerate(every):
            if wanted and file not in wanted and str(number) not in wanted:
                continue
            code = trial(folder, tests, file, old, new, chosen)
            said = {0: "SURVIVED", 1: "noticed"}.get(code, f"no test has run (code {code})")
            survived += [number] * (code != 1)
            print(f"{number:3} {said}: {file}: {new.strip()!r} by {tests}, {chosen}", flush=True)
    print(f"not noticed: {survived}")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: F401  so that each fork has it; and nothing that a mutant is in
    import transformers  # noqa: F401

    main(sys.argv[1:])
