"""
Slips of the pen in the rooms, and the tests that must notice them. A campaign by hand:

    python tests/long/mutants.py              all of them, one after the other
    python tests/long/mutants.py gae.py 7     those of a file, or of these numbers

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
    ("loss.py", "variance = masked_mean((x - mean) ** 2, mask)", "variance = x[mask].var()",
     "test_loss", "reductions"),
    ("loss.py", "/ min(temperature, 1.0)", "* min(temperature, 1.0)", "test_loss", "gaps"),
    ("loss.py", ".exp().clamp(max=cap)", ".exp().clamp(min=cap)", "test_loss", "importance"),
    ("groups.py", "advantages * n / (n - 1)", "advantages * (n - 1) / n", "test_loss", "group"),
    ("groups.py", "return weights / weights.sum().clamp(min=1)", "return weights / mask.numel()",
     "test_loss", "weights"),
    ("model.py", "F.pad(target_mask[:, 1:], (0, 1))", "target_mask", "test_model", "gpt2"),
    ("model.py", "logprobs.masked_fill(logprobs == -torch.inf, 0)", "logprobs", "test_loss",
     "impossible"),
    ("model.py", "[torch.arange(len(tokens)), last])", "[torch.arange(len(tokens)), last - 1])",
     "test_rewards", "read"),
    ("prompts.py", "range(iteration * batch_size, (iteration + 1) * batch_size)",
     "range(iteration, iteration + batch_size)", "test_prompts", "epochs"),
    ("prompts.py", "(order[number::size] for", "(order[number * len(order) // size:] for",
     "test_prompts", "cards"),
    ("prompts.py", "enumerate(lengths) if n > limit", "enumerate(lengths) if n >= limit",
     "test_prompts", "too_long"),
    ("prompts.py", "max([lengths[i] for i in part], default=2)", "lengths[part[-1]] if part else 2",
     "test_prompts", "micro"),
    ("tokenizer.py", "[self.eos_id] * end\n", "[self.eos_id]\n", "test_tokenizer", "toys"),
    ("tokenizer.py", "self.vocab_size = min(self.vocab_size, embeddings)",
     "self.vocab_size = embeddings", "test_rollout", "loop"),
    ("options/chats.py", "trained += [False] * (len(open_ids) - len(trained))",
     "trained += [False] * len(open_ids)", "test_tokenizer", "chat"),
    ("tokenizer.py", "text.index(s) + len(s) for s", "text.index(s) for s", "test_tokenizer",
     "stop"),
    ("rollout.py", "uniform.double() * cdf[:, -1]", "uniform.double() * 2.0**40", "test_rollout",
     "extreme"),
    ("rollout.py", "positions[which, -1:] + 1", "positions[which, -1:]", "test_rollout", "loop"),
    ("rollout.py", "lengths=begins + lengths", "lengths=lengths", "test_rollout", "loop"),
    ("rollout.py", "(budgets[live] > t + 1)", "(budgets[live] > t)", "test_rollout", "leave"),
    ("rewards.py", "sum(weight * torch.where", "sum(torch.where", "test_rewards", "sum"),
    ("rewards.py", "filter(None, (reward_model, value_model))", "[reward_model]", "test_rewards",
     "zero"),
    ("answers.py", "text[last.end():]", "text[marks[0][1].end():]", "long/test_thoughts", "pairs"),
    ("answers.py", "% 2 and mark.end() == len(ending)", "% 2", "long/test_thoughts", "begun"),
    ("grading/sandbox.py", '(*LIBRARY, "builtins")', "LIBRARY", "long/test_programs", "leetcode"),
    ("parallel.py", "flat.mul_(1 / scale)", "flat.div_(scale * rank_and_size()[1])",
     "test_parallel", "exchange"),
    ("parallel.py", "chunk.long() * (i * 2 + 1)", "chunk.long() * i * 2", "test_parallel",
     "checksum"),
    ("parallel.py", "        first += len(chunk)\n", "", "test_parallel", "chunks"),
    ("configurator.py", "if not equals or model == name", "if model == name",
     "test_configurator", "one_model"),
    ("configurator.py", 'sorted(argv, key=lambda arg: arg.startswith("--"))', "argv",
     "test_configurator", "wins"),
    ("load.py", "(0.3 if in_16_bits else 1e-3)", "0.3e3", "test_rollout", "refused"),
    # runs that are stopped, killed, or wrong
    ("ranks.py", "first, this_rank.stop = not this_rank.stop, True", "first = not this_rank.stop",
     "test_scripts", "bits and sft"),
    ("errors.py", "os._exit(1 if code is None else code)", "os._exit(1)", "test_scripts", "typo"),
    ("prompts.py", "repr(tuple(ids)).encode()", "repr(len(ids)).encode()", "test_scripts",
     "another"),
    ("run.py", "if last or interval and", "if interval and", "long/test_knobs", "adapter"),
    ("checkpoint.py", 'state, "iteration": iteration}', 'state, "iteration": iteration + 1}',
     "test_scripts", "bits and sft"),
    ("checkpoint.py", "<= iteration][-keep:]", "<= iteration][:keep]", "test_checkpoint", "kills"),
    ("checkpoint.py", "manifest[name] != present.get(name)", "name not in found",
     "test_checkpoint", "damaged"),
    ("checkpoint.py", 'ema.fill(dict(read_tensors(folder, "ema")))', "pass", "test_options",
     "whole"),
    # what is computed
    ("groups.py", "log_ratio.sum(1, keepdim=True) / lengths", "log_ratio.sum(1, keepdim=True)",
     "test_by_hand", "gspo"),
    ("run.py", 'group["lr"] = lr\n', "pass\n", "test_by_hand", "sft"),
    ("run.py", "now - best > 1e-6 * abs(best)", "now < best", "test_by_hand_options",
     "ppo and centred"),
    ("load.py", "tokenizer=policy.tokenizer, seed=seed)", "tokenizer=policy.tokenizer)",
     "test_by_hand", "rules"),
    ("ppo.py", "rewards[batch[\"index\"], last_real(mask)] += scores", "rewards[:, -1] += scores",
     "test_by_hand", "learned"),
    ("ppo.py", "0.5 * torch.max(vf_losses1, vf_losses2)", "0.5 * torch.min(vf_losses1, vf_losses2)",
     "test_by_hand", "learned"),
    ("options/ptx.py", 'config["num_minibatches"] + steps', 'config["num_minibatches"]',
     "test_by_hand_options", "ppo and capped"),
    ("ppo.py", 'last_real(mask)] -= batch["turn_rewards"].sum(1)', "last_real(mask)] -= 0",
     "test_by_hand_options", "ppo and turns"),
    ("grpo.py", "clipped_ratio.detach() * logprobs", "clipped_ratio * logprobs", "test_by_hand",
     "cispo"),
    ("grpo.py", "scores - kl_coef * kl.sum(1)", "scores - kl_coef * kl.mean(1)", "test_by_hand",
     "rloo"),
    ("grpo.py", "if not learns[rows].any():", "if not counted[rows].any():", "test_by_hand", "dr"),
    ("rm.py", "(1 - confidence) * (1 - label_smoothing) + confidence * label_smoothing",
     "(1 - confidence) + label_smoothing", "test_by_hand", "again"),
    ("options/refill.py", "(row - first + 1 + hashed_row(", "(row - first + hashed_row(",
     "test_by_hand_options", "refills"),
    ("options/lora.py", "LoRA(linear, rank, alpha / rank, generator)",
     "LoRA(linear, rank, alpha, generator)", "test_options", "lora and whole"),
    ("options/teachers.py", "(scores - scores.mean()) / len(paths)", "scores / len(paths)",
     "test_by_hand_options", "taught"),
    # faults, ranks, reliability
    ("checkpoint.py", "not os.path.lexists(final):  # between", "False:  # between",
     "long/test_saving", "while"),
    ("checkpoint.py", "            t = t.to(torch.promote_types(p.dtype, torch.float32))",
     "            pass", "long/test_saving", "dtype"),
    ("run.py", "with parallel.patient(), parallel.in_step():", "with parallel.in_step():",
     "long/test_reliability", "slow"),
    ("ranks.py", "        alarm.start()", "        pass", "long/test_reliability", "nobody"),
    ("run.py", "if parallel.from_rank(self.settings) != self.settings:", "if False:",
     "long/test_reliability", "start_with"),
    ("parallel.py", "common = max(values, key=values.count) if column == 0 else 0",
     "common = values[0] if column == 0 else 0", "test_parallel", "three"),
    ("options/ahead.py", "if self.version[k] < now <= k", "if self.version[k] < now < k",
     "long/test_roles", "stopped"),
    ("options/roles.py",
     "                    parallel.fill(own[name], t)  # COLLECTIVE where it is sharded",
     "                    pass", "long/test_roles", "change"),
    ("options/shards.py", "    if not whole:  # a trained", "    if True:  # a trained",
     "long/test_zero", "first"),
    ("load.py", "parts = hf.get_decoder(), hf.get", "parts = hf, hf.get",
     "long/test_zero", "vision"),
    ("run.py", "factor = 0.5 if not good else 2.0", "factor = 1.0 if not good else 2.0",
     "long/test_zero", "scale"),
    ("grpo.py", "            if not learns[rows].any():\n                continue",
     "            if False:\n                continue", "long/test_grpo_steps", "nothing"),
    ("grpo.py", 'mb["old_logprobs"] = logprobs.detach()',
     'mb["old_logprobs"] = mb["sampler_logprobs"].to(logprobs)', "long/test_grpo_steps", "grpo"),
    ("run.py", "if not worst <= (self.gap_limit if checked else math.inf):",
     "if not worst <= math.inf:", "long/test_sabotage", "sampler or forward"),
    ("run.py", "        if not good:\n            name = next",
     "        if False:\n            name = next", "long/test_sabotage", "gradient"),
    ("options/vllm.py", "W = policy.merged(name, parallel.whole(p))  # COLLECTIVE",
     "W = parallel.whole(p)", "long/test_vllm", "adapters"),
    ("options/vllm.py", 'if self.ask("hold", dict(tensors=tensors)) != sent:',
     'if self.ask("hold", dict(tensors=tensors)) is None:', "long/test_vllm", "forgets"),
    ("ppo.py", "if num_minibatches > batch_size:", "if num_minibatches > 9 * batch_size:",
     "long/test_bad_input", "minibatches"),
    ("configurator.py", "if equals and model not in MODELS:", "if False:", "long/test_zero",
     "there_is_not"),
    ("options/decoding_graph.py", "last and last.pool()", "None", "long/test_device", "same"),
    ("options/decoding_graph.py", "torch.cuda.empty_cache()", "raise",
     "long/test_device", "same"),
    ("options/decoding_graph.py", '"default" if self.compiled else "error"', '"default"',
     "long/test_device", "recorded"),
    ("options/decoding_graph.py", "self.column -= 1", "pass", "long/test_device", "same"),
    ("options/vllm.py", "if llm.asleep:  # since", "if False:  # since", "long/test_vllm", "turns"),
    ("ranks.py", "None if device.index is None else [device.index]", "None", "long/test_device",
     "nccl"),
]


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
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        import pytest

        os._exit(pytest.main(["-qx", "-p", "no:cacheprovider", f"tests/{tests}.py", "-k", chosen]))
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
