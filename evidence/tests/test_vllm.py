"""
vLLM as the sampler (options/vllm.py). Everything but vLLM itself is tested with a stand-in for it,
which samples as we do: a run with it must be the run without it. (The real one:
evidence/needs/test_real_vllm.py.)
"""
import os
import re
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from model import Model
from rollout import decode
from tiny import assert_same_run, keys_of, read_jsonl, read_log, run, well
from transformers import AutoConfig, AutoModelForCausalLM


def stands_in(wrong="", rank=0):
    """
    For `before`: the stand-in takes vLLM's place, and does something wrong on this rank; or it is
    not there, or VLLM_PYTHON names an interpreter that is not.
    """
    def before(mine):
        import options.vllm

        plain = options.vllm.load
        options.vllm.load = lambda **given: plain(**given | dict(sleeps=True))  # as on a GPU
        if wrong == "no python":
            os.environ["VLLM_PYTHON"] = "/no/python"
        else:
            options.vllm.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=None)
        LLM.wrong = wrong if mine == rank else ""
        sys.modules["vllm._custom_ops"] = ModuleType("vllm._custom_ops")
        # None: an import of it fails
        sys.modules["vllm"] = None if wrong == "not there" else SimpleNamespace(
            LLM=LLM, SamplingParams=SimpleNamespace)

    return before


class Forked:
    """
    In the place of subprocess.Popen, for [interpreter, "-c", code]: a fork of the rank, which has
    imported everything already, runs the code.
    """

    def __init__(self, command, env, **_):
        self.pid = os.fork()
        if self.pid == 0:
            try:
                exec(command[-1], {})
            finally:
                os._exit(1)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class LLM:
    """vllm.LLM, with what options/vllm.py uses of it."""

    wrong = ""  # what it does wrong, and in which call of generate

    def __init__(self, folder, dtype, load_format, hf_overrides, skip_tokenizer_init, **settings):
        if self.wrong == "unknown":
            raise ValueError("1 error for ModelConfig\n  Architectures ['X'] are not supported")
        assert load_format == "dummy" and settings["logprobs_mode"] == "processed_logprobs"
        assert dtype == "float32"
        config = AutoConfig.from_pretrained(folder, **hf_overrides)
        self.model = Model(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        self.asked, self.gone = 0, set()

    @torch.no_grad()
    def sleep(self, level):
        """On a GPU its memory is gone, and at level 2 its content, too."""
        assert level == 2 and not self.gone
        self.gone = {"weights", "kv_cache"}
        for p in self.model.parameters():
            p.fill_(torch.nan)

    def wake_up(self, tags):
        assert set(tags) <= self.gone
        self.gone -= set(tags)

    @torch.no_grad()
    def collective_rpc(self, name, kwargs):
        assert name == "reload_weights" and "weights" not in self.gone
        own = dict(self.model.hf.named_parameters())
        for name, t in kwargs["weights_iterator"]:
            own[name].copy_(t)
        if self.wrong == "forgets":
            next(iter(own.values())).view(-1)[0] += 1

    def apply_model(self, function):
        return [function(self.model.hf)]

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, settings, use_tqdm):
        assert not self.gone
        self.asked += 1
        if self.wrong == f"dies {self.asked}":
            os._exit(7)
        if self.wrong == f"hangs {self.asked}":
            signal.pause()
        s = settings[0]
        if self.wrong == f"cuts {self.asked}":
            s.max_tokens, s.stop_token_ids = 1, []
        assert s.ignore_eos and s.logprobs == 0
        budgets = [one.max_tokens for one in settings]
        uniforms = torch.stack([torch.rand(
            max(budgets), generator=torch.Generator().manual_seed(one.seed), dtype=torch.float64)
            for one in settings])
        self.model.tokenizer = SimpleNamespace(
            eos_ids=set(s.stop_token_ids), pad_id=0, stop_strings=[],
            vocab_size=self.model.config.vocab_size)
        found = decode(self.model, [one["prompt_token_ids"] for one in prompts], uniforms,
                       s.temperature, budgets)
        return [SimpleNamespace(outputs=[SimpleNamespace(
            token_ids=ids[:n], finish_reason="stop" if finished else "length",
            logprobs=[{i: SimpleNamespace(logprob=x)}
                      for i, x in zip(ids[:n], logprobs[:n], strict=True)])])
            for ids, logprobs, n, finished in zip(*(x.tolist() for x in found), strict=True)]


# runs with it

CASES = {  # name: script, ranks, keys; all in float32, which is vLLM's
    "adapters": ("ppo.py", 1, dict(lora="2", value_init="shared")),
    "shards, stop strings": ("grpo.py", 2, dict(
        zero_stage="policy=3", stop_strings="b", num_minibatches=1)),
    "roles": ("grpo.py", 2, dict(roles="train=1,generate=1", staleness=1, importance_cap=2))}


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_another_sampler_is_the_same_run(world, tmp_path, name):
    script, ranks, more = CASES[name]
    keys = keys_of(world, script, dtype="float32", max_iters=2, **more)
    own = well(script, tmp_path / "own", keys, ranks=ranks)
    other = well(script, tmp_path, keys | dict(sampler="vllm"), ranks=ranks, before=stands_in())
    # its log-probs are rounded in other groups of rows
    assert_same_run(own, other, tolerance=1e-4)
    assert all(a["objective/texts"] == b["objective/texts"] for a, b in zip(
        read_log(own)[:-1], read_log(other)[:-1], strict=True))


def test_several_turns(world, tmp_path):
    """Each turn has a noise of its own; the policy reads what the environment has said."""
    keys = keys_of(world, "grpo.py", environment=f"{world.rules}:talks", max_turns=3,
                   max_new_tokens=14, save_rollouts=1, dtype="float32", max_iters=1, sampler="vllm")
    out = well("grpo.py", tmp_path, keys, before=stands_in())
    texts = [[m["content"] for m in row["messages"]] for row in read_jsonl(f"{out}/rollouts.jsonl")]
    assert all(said[1::2] == ["x", "y"][:len(said) // 2] for said in texts)
    assert read_log(out)[0]["policy/sampler_gap"] < 1e-4
    assert len({said[2] for said in texts if len(said) > 2}) > 1


BAD = [  # what the last rank's stand-in does wrong, keys, ranks, what is said, the exit code
    ("no cap", dict(staleness=1), 1, "--importance_cap=2", 2),
    ("no python", {}, 1, "/no/python", 2), ("not there", {}, 1, "install it", 2),
    ("unknown", {}, 1, r"not supported; type --sampler=own", 2),
    ("forgets", {}, 2, "not taken all weights .*; type --sampler=own", 2),
    ("dies 3", dict(roles="train=1,generate=1"), 2, "vLLM has ended, with exit code 7", 1),
    ("hangs 2", dict(timeout=4, reward_timeout=3), 1, "not answered for timeout = 4", 1),
    ("cuts 2", {}, 1, "no room for a prompt of .*; raise vllm_cache", 1)]


@pytest.mark.parametrize("wrong, more, ranks, said, code", BAD)
def test_what_vllm_does_wrong_ends_a_run_in_a_line(world, tmp_path, wrong, more, ranks, said, code):
    keys = keys_of(world, "grpo.py", **dict(dtype="float32", sampler="vllm", eval_path="") | more)
    result = run("grpo.py", tmp_path, keys, ranks=ranks, before=stands_in(wrong, ranks - 1))
    lines = [line for text in result.err for line in text.splitlines()]
    assert all(line.startswith("grpo.py: error") for line in lines), result
    assert any(re.search(said, line) for line in lines) and code in result.codes, result
    assert 0 not in result.codes and len(lines) <= ranks, result
