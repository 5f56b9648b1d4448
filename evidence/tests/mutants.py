"""
Slips of the pen in the root and in the sandbox, and the tests that must notice them, by hand:

    python evidence/tests/mutants.py              all of them, one after the other
    python evidence/tests/mutants.py gae.py 7     those of a file, or of these numbers

Each is made in a copy of the repository, in which only the tests run that are named with it, up to
the first that fails. test_mutants.py sees to it that each line is still there to be changed.
"""
import os
import shutil
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
IGNORED = shutil.ignore_patterns(".git", "__pycache__", "out", ".venv*")
MUTANTS = [  # file, old text, new text, test file, pytest -k
    # the room's own tests
    ("gae.py", "delta = r + gamma * v[:, 1:]", "delta = r + v[:, 1:]", "test_gae", "loop"),
    ("gae.py", "torch.where(response_mask, values.to(dtype), 0))", "values.to(dtype))",
     "test_gae", "masked"),
    ("formulas.py", "variance = masked_mean((x - mean) ** 2, mask)", "variance = x[mask].var()",
     "test_formulas", "reductions"),
    ("metrics.py", "/ min(temperature, 1.0)", "* min(temperature, 1.0)", "test_formulas", "gaps"),
    ("formulas.py", ".exp().clamp(max=cap)", ".exp().clamp(min=cap)",
     "test_formulas", "importance"),
    ("groups.py", "advantages * n / (n - 1)", "advantages * (n - 1) / n", "test_formulas", "group"),
    ("groups.py", "return weights / weights.sum().clamp(min=1)", "return weights / mask.numel()",
     "test_formulas", "weights"),
    ("model.py", "F.pad(target_mask[:, 1:], (0, 1))", "target_mask", "test_model", "gpt2"),
    ("model.py", "logprobs.masked_fill(logprobs == -torch.inf, 0)", "logprobs", "test_formulas",
     "impossible"),
    ("model.py", "[torch.arange(len(tokens)), last])", "[torch.arange(len(tokens)), last - 1])",
     "test_rewards", "read"),
    ("prompts.py", "range(iteration * batch_size, (iteration + 1) * batch_size)",
     "range(iteration, iteration + batch_size)", "test_prompts", "epochs"),
    ("batches.py", "(order[number::size] for", "(order[number * len(order) // size:] for",
     "test_batches", "cards"),
    ("batches.py", "max([lengths[i] for i in part], default=2)", "lengths[part[-1]] if part else 2",
     "test_batches", "micro"),
    ("tokenizer.py", "[self.eos_id] * end\n", "[self.eos_id]\n", "test_tokenizer", "toys"),
    ("tokenizer.py", "self.vocab_size = min(self.vocab_size, embeddings)",
     "self.vocab_size = embeddings", "test_rollout", "loop"),
    ("tokenizer.py", "text.index(s) + len(s) for s", "text.index(s) for s", "test_tokenizer",
     "stop"),
    ("rollout.py", "uniform.double() * cdf[:, -1]", "uniform.double() * 2.0**40", "test_rollout",
     "extreme"),
    ("rollout.py", "positions[row, -1:] + 1", "positions[row, -1:]", "test_rollout", "loop"),
    ("batches.py", "lengths=begins + lengths", "lengths=lengths", "test_rollout", "loop"),
    ("rollout.py", "(budgets[live] > t + 1)", "(budgets[live] > t)", "test_rollout", "leave"),
    ("rewards.py", "sum(weight * torch.where", "sum(torch.where", "test_rewards", "sum"),
    ("grading/answers.py", "text[last.end():]", "text[marks[0][1].end():]", "test_rewards",
     "pairs"),
    ("grading/answers.py", "% 2 and mark.end() == len(ending)", "% 2", "test_rewards", "begun"),
    ("grading/sandbox.py", '(*LIBRARY, "builtins")', "LIBRARY", "test_programs", "leetcode"),
    ("parallel.py", "flat.mul_(1 / scale)", "flat.div_(scale * rank_and_size()[1])",
     "test_parallel", "exchange"),
    ("parallel.py", "chunk.long() * (i * 2 + 1)", "chunk.long() * i * 2", "test_parallel",
     "checksum"),
    ("parallel.py", "        first += len(chunk)\n", "", "test_parallel", "chunks"),
    ("configurator.py", "if not equals or model == name", "if model == name",
     "test_configurator", "one_model"),
    ("configurator.py", "[arg for arg in argv if arg not in typed]",
     "reversed([arg for arg in argv if arg not in typed])", "test_configurator", "wins"),
    ("load.py", "(0.3 if in_16_bits else 1e-3)", "0.3e3", "test_rollout", "refused"),
    # runs that are stopped, killed, or wrong
    ("ranks.py", "first, this_rank.stop = not this_rank.stop, True", "first = not this_rank.stop",
     "test_scripts", "bits and sft"),
    ("errors.py", "os._exit(code or 1)", "os._exit(1)", "test_scripts", "typo"),
    ("prompts.py", "repr(tuple(ids)).encode()", "repr(len(ids)).encode()", "test_scripts",
     "another"),
    ("run.py", "if last or interval and", "if interval and", "test_scripts", "in_the_folder"),
    ("checkpoint.py", 'state, "iteration": iteration}', 'state, "iteration": iteration + 1}',
     "test_scripts", "bits and sft"),
    ("checkpoint.py", "<= iteration][-keep:]", "<= iteration][:keep]", "test_checkpoint", "kills"),
    ("checkpoint.py", "manifest[name] != present[name]", "False",
     "test_checkpoint", "damaged"),
    ("options/ema.py", "parallel.copy_into(t, saved[name])", "pass", "test_options", "whole"),
    # what is computed
    ("groups.py", "log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)",
     "log_ratio.sum(1, keepdim=True)",
     "test_by_hand", "gspo"),
    ("run.py", 'group["lr"] = lr\n', "pass\n", "test_by_hand", "sft"),
    ("load.py", "tokenizer=policy.tokenizer, seed=seed)", "tokenizer=policy.tokenizer)",
     "test_by_hand", "rules"),
    ("ppo.py", "rewards[batch[\"index\"], last_real(mask)] += scores", "rewards[:, -1] += scores",
     "test_by_hand", "learned"),
    ("ppo.py", "0.5 * torch.max(vf_losses1, vf_losses2)", "0.5 * torch.min(vf_losses1, vf_losses2)",
     "test_by_hand", "learned"),
    ("ppo.py", "vf_losses2) / unit**2", "vf_losses2) / unit", "test_by_hand", "shared"),
    ("ppo.py", "(cliprange_value or torch.inf) * unit", "(cliprange_value or torch.inf)",
     "test_by_hand", "mixed"),
    ("ppo.py", 'run.state.get("value_unit", 1.0)', "1.0", "test_campaign", "bits"),
    ("model.py", "W * self.unit if name", "W if name", "test_model", "unit"),
    ("ppo.py", 'scores - batch["token_rewards"].sum(1)', "scores",
     "test_by_hand_options", "ppo and turns"),
    ("groups.py", "clipped_ratio.detach() * logprobs", "clipped_ratio * logprobs", "test_by_hand",
     "cispo"),
    ("grpo.py", "scores - kl_coef * kl.sum(1)", "scores - kl_coef * kl.mean(1)", "test_by_hand",
     "rloo"),
    ("grpo.py", "if not teaches[index].any():", "if not counted[index].any():",
     "test_by_hand", "dr"),
    ("rm.py", "(1 - confidence) * (1 - label_smoothing) + confidence * label_smoothing",
     "(1 - confidence) + label_smoothing", "test_by_hand", "again"),
    # faults, ranks, reliability
    ("checkpoint.py", "not os.path.lexists(final):  # killed", "False:  # killed",
     "test_checkpoint", "while"),
    ("checkpoint.py", "wide = torch.promote_types(own[key].dtype, torch.float32)",
     "wide = t.dtype", "test_checkpoint", "dtype"),
    ("run.py", "with parallel.patient(), parallel.in_step():", "with parallel.in_step():",
     "test_reliability", "slow"),
    ("ranks.py", "        alarm.start()", "        pass", "test_reliability", "nobody"),
    ("run.py", "if parallel.from_rank(self.settings) != self.settings:", "if False:",
     "test_reliability", "start_with"),
    ("parallel.py", "2 * values.count(x) <= len(values)", "x != values[0]",
     "test_parallel", "three"),
    ("load.py", "parts = hf.get_decoder(), hf.get", "parts = hf, hf.get",
     "test_zero", "vision"),
    ("grpo.py", "            if not teaches[index].any():\n                continue",
     "            if False:\n                continue", "test_steps", "nothing"),
    ("run.py", "if not worst <= (self.gap_limit if checked else math.inf):",
     "if not worst <= math.inf:", "test_scripts", "first_step"),
    ("run.py", "        if not good:\n            from options",
     "        if False:\n            from options", "test_scripts", "first_step"),
    ("ppo.py", "if num_minibatches > batch_size:", "if num_minibatches > 9 * batch_size:",
     "test_scripts", "empty"),
    ("configurator.py", "if equals and model not in MODELS:", "if False:", "test_configurator",
     "one_model"),
    ("ranks.py", "[device.index] if gpu else None", "None", "test_device", "nccl"),
    ("run.py", 'sums["policy/off_policy_kl"] = sums["policy/approx_kl"]',
     'sums["policy/off_policy_kl"] = sums["policy/clipfrac"]', "test_by_hand_options",
     "ppo and stale and three"),
    ("checkpoint.py", 'if state["iteration"] > max_iters:', "if False:", "test_bad_input",
     "000002"),
    ("checkpoint.py", "              if name not in trained}", "              }",
     "test_reliability", "other_models"),
    ("tokenizer.py", "if self.pad_id in self.eos_ids:", "if False:", "test_reward_models",
     "rm_py"),
    ("tokenizer.py", "== self.skipped_id:", "is None:", "test_reward_models", "others"),
    ("grading/sandbox.py", '"--unshare-ipc", ', "", "test_sandbox", "host_sees"),
    ("grading/sandbox.py", "echo 1000 >", "echo 100 >", "test_sandbox", "host_sees"),
    ("grading/sandbox.py", '"--remount-ro", "/", ', "", "test_sandbox", "written"),
    ("grading/sandbox.py", "NEWER = 424", "NEWER = 999", "test_sandbox", "filter"),
    ("grading/sandbox.py", "{14: EPERM, 25", "{25", "test_sandbox", "filter"),
    ("grading/sandbox.py", "6: 0, 7: 0,", "6: 0,", "test_sandbox", "filter"),
    ("grading/sandbox.py", "> limit + 1:", "> 2**40:", "test_sandbox", "verdicts"),
]


def path_of(tests):
    """Where this file of tests stands: two of one name there are not."""
    return next(path for path in (f"tests/{tests}.py", f"evidence/tests/{tests}.py")
                if os.path.exists(os.path.join(ROOT, path)))


def trial(folder, file, old, new, tests, chosen):
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
        for number, mutant in enumerate(MUTANTS):
            if wanted and mutant[0] not in wanted and str(number) not in wanted:
                continue
            code = trial(folder, *mutant)
            said = {0: "SURVIVED", 1: "noticed"}.get(code, f"no test has run (code {code})")
            survived += [number] * (code != 1)
            print(f"{number:3} {said}: {mutant[0]}: {mutant[2].strip()!r} by {mutant[3]}, "
                  f"{mutant[4]}", flush=True)
    print(f"not noticed: {survived}")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: F401  so that each fork has it; and nothing that a mutant is in
    import transformers  # noqa: F401

    main(sys.argv[1:])
