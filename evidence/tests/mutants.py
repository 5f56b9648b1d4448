"""
Slips of the pen in the files, and the tests that must notice them. A campaign by hand:

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
    ("options/too_long.py", "enumerate(lengths) if n > limit", "enumerate(lengths) if n >= limit",
     "test_prompts", "too_long"),
    ("batches.py", "max([lengths[i] for i in part], default=2)", "lengths[part[-1]] if part else 2",
     "test_batches", "micro"),
    ("tokenizer.py", "[self.eos_id] * end\n", "[self.eos_id]\n", "test_tokenizer", "toys"),
    ("tokenizer.py", "self.vocab_size = min(self.vocab_size, embeddings)",
     "self.vocab_size = embeddings", "test_rollout", "loop"),
    ("options/chats.py", "trained += [False] * (len(open_ids) - len(trained))",
     "trained += [False] * len(open_ids)", "test_tokenizer", "chat"),
    ("tokenizer.py", "text.index(s) + len(s) for s", "text.index(s) for s", "test_tokenizer",
     "stop"),
    ("rollout.py", "uniform.double() * cdf[:, -1]", "uniform.double() * 2.0**40", "test_rollout",
     "extreme"),
    ("rollout.py", "positions[row, -1:] + 1", "positions[row, -1:]", "test_rollout", "loop"),
    ("batches.py", "lengths=begins + lengths", "lengths=lengths", "test_rollout", "loop"),
    ("rollout.py", "(budgets[live] > t + 1)", "(budgets[live] > t)", "test_rollout", "leave"),
    ("rewards.py", "sum(weight * torch.where", "sum(torch.where", "test_rewards", "sum"),
    ("options/centring.py", "models.append(run.models[\"value_model\"])", "pass",
     "test_rewards", "zero"),
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
    ("checkpoint.py", "more[name].fill(dict(read_tensors(folder, name)))", "pass", "test_options",
     "whole"),
    # what is computed
    ("groups.py", "log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)",
     "log_ratio.sum(1, keepdim=True)",
     "test_by_hand", "gspo"),
    ("run.py", 'group["lr"] = lr\n', "pass\n", "test_by_hand", "sft"),
    ("options/keep_best.py", "(now - best) > 1e-6 * abs(best)", "(best - now) > 0",
     "test_by_hand_options", "ppo and centred"),
    ("load.py", "tokenizer=policy.tokenizer, seed=seed)", "tokenizer=policy.tokenizer)",
     "test_by_hand", "rules"),
    ("ppo.py", "rewards[batch[\"index\"], last_real(mask)] += scores", "rewards[:, -1] += scores",
     "test_by_hand", "learned"),
    ("ppo.py", "0.5 * torch.max(vf_losses1, vf_losses2)", "0.5 * torch.min(vf_losses1, vf_losses2)",
     "test_by_hand", "learned"),
    ("options/ptx.py", 'config["num_minibatches"] + steps', 'config["num_minibatches"]',
     "test_by_hand_options", "ppo and capped"),
    ("ppo.py", "vf_losses2) / unit**2", "vf_losses2) / unit", "test_by_hand", "shared"),
    ("ppo.py", "(cliprange_value or torch.inf) * unit", "(cliprange_value or torch.inf)",
     "test_by_hand", "mixed"),
    ("ppo.py", 'run.state.get("value_unit", 1.0)', "1.0", "test_campaign", "bits"),
    ("model.py", "W * self.unit if name", "W if name", "test_model", "unit"),
    ("options/new_head.py", "mul_(unit / model.unit)", "mul_(1.0)", "test_model", "unit"),
    ("options/new_head.py", 'if "value_unit" in state:', "if True:", "test_model", "unit"),
    ("options/new_head.py", "1 if len(deviations) > 2 else", "", "test_model", "unit"),
    ("options/lora.py", ".detach().cpu() * self.unit", ".detach().cpu()", "test_lora", "trunk"),
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
    ("options/refill.py", "(row - first + 1 + hashed_row(", "(row - first + hashed_row(",
     "test_by_hand_options", "refills"),
    ("options/lora.py", "LoRA(linear, rank, alpha / rank, generator)",
     "LoRA(linear, rank, alpha, generator)", "test_by_hand_options", "ppo and lora and two"),
    ("options/teachers.py", "(scores - scores.mean()) / len(paths)", "scores / len(paths)",
     "test_by_hand_options", "taught"),
    # faults, ranks, reliability
    ("checkpoint.py", "not os.path.lexists(final):  # between", "False:  # between",
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
    ("options/ahead.py", "if self.version[k] < now <= k", "if self.version[k] < now < k",
     "test_roles", "stopped"),
    ("options/roles.py",
     "                    parallel.copy_into(own[name], t)  # COLLECTIVE where it is sharded",
     "                    pass", "test_knobs", "roles"),
    ("options/shards.py", "    if not whole:  # a trained", "    if True:  # a trained",
     "test_zero", "first"),
    ("load.py", "parts = hf.get_decoder(), hf.get", "parts = hf, hf.get",
     "test_zero", "vision"),
    ("options/sixteen_bits.py", "factor = 0.5 if not good else 2.0",
     "factor = 1.0 if not good else 2.0", "test_zero", "scale"),
    ("grpo.py", "            if not teaches[index].any():\n                continue",
     "            if False:\n                continue", "test_steps", "nothing"),
    ("run.py", "if not worst <= (self.gap_limit if checked else math.inf):",
     "if not worst <= math.inf:", "test_scripts", "first_step"),
    ("run.py", "        if not good:\n            from options",
     "        if False:\n            from options", "test_scripts", "first_step"),
    ("options/vllm.py", "W = policy.merged(name, parallel.whole(p))  # COLLECTIVE",
     "W = parallel.whole(p)", "test_vllm", "adapters"),
    ("options/vllm.py", 'if self.ask("hold", dict(tensors=tensors)) != sent:',
     'if self.ask("hold", dict(tensors=tensors)) is None:', "test_vllm", "forgets"),
    ("ppo.py", "if num_minibatches > batch_size:", "if num_minibatches > 9 * batch_size:",
     "test_scripts", "empty"),
    ("configurator.py", "if equals and model not in MODELS:", "if False:", "test_configurator",
     "one_model"),
    ("options/decoding_graph.py", "last and last.pool()", "None", "test_device", "same"),
    ("options/decoding_graph.py", "torch.cuda.empty_cache()", "raise",
     "test_device", "same"),
    ("options/decoding_graph.py", '"default" if self.compiled else "error"', '"default"',
     "test_device", "recorded"),
    ("options/decoding_graph.py", "self.column -= 1", "pass", "test_device", "same"),
    ("options/vllm.py", "if llm.asleep:  # since", "if False:  # since", "test_vllm", "turns"),
    ("ranks.py", "[device.index] if gpu else None", "None", "test_device", "nccl"),
    # rooms of options, forms, tools and data
    ("options/chats.py", "if text.count(mark) < after - before:", "if False:", "test_chats",
     "leaves"),
    ("options/chats.py", "message.get(key) not in (None, 1)}", "message.get(key) is not None}",
     "test_convert", "Orca"),
    ("options/chats.py", 'learned.rstrip().endswith(wanted.rstrip())', "True", "test_chats",
     "apply_chat"),
    ("options/environment.py", "own[i] += [False] * len(extra)", "own[i] += [True] * len(extra)",
     "test_by_hand_options", "ppo and turns"),
    ("options/environment.py", "paid[i][-1] = reward", "paid[i][0] = reward",
     "test_by_hand_options", "ppo and turns"),
    ("options/environment.py", "if len(replies) == 1 and", "if False and", "test_turns",
     "no_good"),
    ("options/environment.py", "self.env(copy.deepcopy(dialogue), row", "self.env(dialogue, row",
     "test_turns", "spoiled"),
    ("options/tools.py", "results[n - first] = good, text", "results[n - first] = True, text",
     "test_turns", "faults"),
    ("options/tools.py", "                calls.clear()", "                pass", "test_turns",
     "drafts"),
    ("options/tools.py", "text[:LONGEST].encode", "text.encode", "test_turns", "answered"),
    ("options/families.py", 'for name in ("conv_bias", "mamba_proj_bias")', "for name in ()",
     "test_hybrids", "refused"),
    ("options/families.py", "logits = logits / getattr", "logits = logits * getattr",
     "test_families", "read_trained and Granite"),
    ("options/foreign_names.py", """any(f".{name}".endswith(f".{key}") for""",
     "any(name == key for", "test_configurator", "right_one"),
    ("options/foreign_rewards.py", '"content": begun + completion}]', '"content": completion}]',
     "test_foreign_rewards", "trl"),
    ("options/foreign_rewards.py", "math.nan if value is None else", "0.0 if value is None else",
     "test_foreign_rewards", "none"),
    ("options/judging.py", "torch.linspace(1, 0,", "torch.linspace(0, 1,", "test_judge",
     "as_transformers"),
    ("options/judging.py", "as_text(dialogues[0][:-1])", "as_text(row['prompt'])",
     "test_judge", "dialogues"),
    ("options/lora.py", "alpha *= rank**0.5", "pass", "test_lora", "formula"),
    ("options/lora.py", "fits - routers or fits", "fits", "test_lora", "which_maps"),
    ("options/lora.py", "not os.path.samefile(trained_on, base.path)", "False", "test_lora",
     "refused"),
    ("options/optimizers.py", "min(p.shape) > 1 and p not in apart)", "min(p.shape) > 1)",
     "test_muon", "by_hand"),
    ("options/optimizers.py", "exp_avg_sq=torch.zeros_like(p.grad))",
     "exp_avg_sq=torch.zeros_like(p))", "test_knobs", "steps_of"),
    ("options/ema.py", "to(average.dtype), 1 - self.decay)", "to(average.dtype), self.decay)",
     "test_options", "ema"),
    ("options/ema.py", "return self.begin()", "return None", "test_knobs", "begins"),
    ("options/older_readers.py", 'OLDER_NAMES_OF_NEOX if kind == "gpt_neox" else OLDER_NAMES',
     "OLDER_NAMES", "test_saving", "transformers_4"),
    ("options/generation_config.py", "2 * [*vars(given)]", "[*vars(given)]", "test_saving",
     "does_not_save"),
    ("options/tokenizer_kinds.py", "if own is None:", "if False:", "test_tiktoken", "mistral"),
    ("options/user_code.py", "found if fromlist else", "found if True else",
     "test_foreign_rewards", "helper"),
    ("options/trackers.py", 'resume="allow"', 'resume="never"', "test_seeing", "trackers"),
    ("options/sources.py", "self.source_of[number] for number in numbers", "0 for _ in numbers",
     "test_sources", "dropped"),
    ("options/sources.py", '"float": numpy.float32, ', "", "test_sources", "parquet"),
    ("options/importance.py", 'kl_estimate(batch["sampler_logprobs"], batch["old_logprobs"], "k3")',
     'kl_estimate(batch["old_logprobs"], batch["sampler_logprobs"], "k3")', "test_by_hand_options",
     "ppo and capped"),
    ("run.py", 'sums["policy/off_policy_kl"] = sums["policy/approx_kl"]',
     'sums["policy/off_policy_kl"] = sums["policy/clipfrac"]', "test_by_hand_options",
     "ppo and stale and three"),
    ("grading/expressions.py", 'clash = ("=" in given) != ("=" in truth)', "clash = False",
     "test_math", "two_answers"),
    ("grading/forms.py", "found = max(found, (begin, mark.start()))",
     "found = found if found[1] else (begin, mark.start())", "test_rewards", "accuracy"),
    ("grading/forms.py", "size = int(match[2] or 0) + Fraction", "size = Fraction", "test_rewards",
     "accuracy"),
    ("grading/forms.py", "if whole and len(tags) == 2 else", "if whole else", "test_thoughts",
     "family"),
    ("grading/programs.py", 'last.get("python", last.get("", lines))',
     'last.get("", last.get("python", lines))', "test_programs", "found"),
    ("grading/programs.py", "good = same(one, one) and same(want, want)", "good = True",
     "test_programs", "refused"),
    ("tools/eval.py", "math.comb(below + len(tied), k) - math.comb(below, k)",
     "math.comb(below + len(tied), k)", "test_eval", "enumeration"),
    ("tools/eval.py", "(a > b) + 0.5 * (a == b)", "float(a > b)", "test_eval", "enumeration"),
    ("tools/eval.py", 'record["scores"] = known.setdefault(said, record["scores"])',
     "known.setdefault(said, 0)", "test_eval", "equal_responses"),
    ("tools/runs.py", 'if not trusted and (key in', 'if False and (key in',
     "test_eval", "unless"),
    ("tools/explain.py", "passes: steps + 1,", "passes: steps,", "test_explain", "numbers"),
    ("data/convert.py", 'text.replace(",", "") if thousands else text', 'text.replace(",", "")',
     "test_convert", "thousands"),
    ("data/convert.py", "2**64 < args.val]", "2**64 > args.val]", "test_convert", "held_out"),
    ("data/label.py", "margin = (f - b) / 2 if compares", "margin = f - b if compares",
     "test_label", "pairs"),
    ("data/arithmetic/prepare.py", "        carry = total // 10\n", "", "test_data",
     "arithmetic"),
    ("data/search/reward.py", 're.split("[?!]", response)', 're.split("[?]", response)',
     "test_data", "rules_of_search"),
    ("options/tensor_parallel.py", "policy.merged(name, W).to(part.dtype)", "W.to(part.dtype)",
     "test_knobs", "tensor"),
    ("checkpoint.py", 'if state["iteration"] > max_iters:', "if False:", "test_bad_input",
     "000002"),
    ("checkpoint.py", "              if name not in trained}", "              }",
     "test_reliability", "other_models"),
    ("options/ema.py", "Parameter(like(average, p))", "Parameter(like(average.to(p.dtype), p))",
     "test_knobs", "resumed_to"),
    ("options/sources.py", "if not math.isnan(x):", "if True:", "test_sources", "by_hand"),
    ("options/chats.py", " or whole[:len(ids)] != ids", "", "test_chats", "odd"),
    ("options/chats.py", "if strings and chats:", "if False:", "test_chats", "strings_for"),
    ("options/chats.py", "_tokens=True,", "_tokens=False,", "test_chats", "letters"),
    ("options/mistakes.py", "if mark][:1])", "if mark])", "test_chats", "are_said"),
    ("options/tokenizer_kinds.py", '"pre_tokenizer", ', "", "test_chats", "cut_as"),
    ("tokenizer.py", "if self.pad_id in self.eos_ids:", "if False:", "test_reward_models",
     "rm_py"),
    ("tokenizer.py", "== self.skipped_id:", "is None:", "test_reward_models", "others"),
    ("options/tools.py", 'schema.get("type") != "string"', "True", "test_turns", "fit"),
    ("options/tools.py", "map(BEGUN.search, begun or [])", "[]", "test_turns", "drafts"),
    ("options/tools.py", "if waiting:", "if False:", "test_turns", "hangs"),
    ("options/environment.py", "[-1] + ended:", "[-1] + 1:", "test_turns", "stop_string"),
    ("options/environment.py", '("why") < 2', '("why") < 0', "test_turns", "keep"),
    ("options/families.py", "layer.reorder_cache(indices)", "pass", "test_hybrids", "beside"),
    ("options/families.py", "[rope, *(", "[rope] or [*(", "test_families", "longest"),
    ("options/decoding_graph.py", "check_alike(logits, want)", "1", "test_device", "never"),
    ("grading/sandbox.py", '"--unshare-ipc", ', "", "test_sandbox", "host_sees"),
    ("grading/sandbox.py", "echo 1000 >", "echo 100 >", "test_sandbox", "host_sees"),
    ("grading/sandbox.py", '"--remount-ro", "/", ', "", "test_sandbox", "written"),
    ("grading/sandbox.py", "NEWER = 424", "NEWER = 999", "test_sandbox", "filter"),
    ("grading/sandbox.py", "{14: EPERM, 25", "{25", "test_sandbox", "filter"),
    ("grading/sandbox.py", "6: 0, 7: 0,", "6: 0,", "test_sandbox", "filter"),
    ("grading/sandbox.py", "> limit + 1:", "> 2**40:", "test_sandbox", "verdicts"),
    ("tools/plot.py", "(x, mean / weight)", "(x, mean)", "test_seeing", "smoothed"),
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
