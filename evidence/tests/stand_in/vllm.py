"""
A stand-in for vLLM, with what options/vllm.py uses of it. It samples as we do: a run with it is the
run without it. Its process is a fork of the rank, which has imported everything already.
"""
import os
import signal
import sys
import types
from types import SimpleNamespace

import torch

from model import Model
from rollout import decode

__version_tuple__ = 0, 32
wrong = ""  # what it does wrong, and in which call of generate


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, folder, dtype, load_format, hf_overrides, skip_tokenizer_init, **settings):
        from transformers import AutoConfig, AutoModelForCausalLM

        if wrong == "unknown":
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
        if wrong == "forgets":
            next(iter(own.values())).view(-1)[0] += 1

    def apply_model(self, function):
        return [function(self.model.hf)]

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, settings, use_tqdm):
        assert not self.gone
        self.asked += 1
        if wrong == f"dies {self.asked}":
            os._exit(7)
        if wrong == f"hangs {self.asked}":
            signal.pause()
        s = settings[0]
        if wrong == f"cuts {self.asked}":
            s.max_tokens, s.stop_token_ids = 1, []
        assert s.ignore_eos and s.logprobs == 0
        noise = [torch.Generator().manual_seed(one.seed) for one in settings]
        budgets = [one.max_tokens for one in settings]
        uniforms = torch.stack([torch.rand(max(budgets), generator=drawn, dtype=torch.float64)
                                for drawn in noise])
        self.model.tokenizer = SimpleNamespace(
            eos_ids=set(s.stop_token_ids), pad_id=0, stop_strings=[],
            vocab_size=self.model.config.vocab_size)
        found = decode(self.model, [one["prompt_token_ids"] for one in prompts], uniforms,
                       s.temperature, budgets)
        results = []
        for ids, logprobs, n, finished in zip(*(x.tolist() for x in found), strict=True):
            said = [{i: SimpleNamespace(logprob=x)}
                    for i, x in zip(ids[:n], logprobs[:n], strict=True)]
            results.append(SimpleNamespace(outputs=[SimpleNamespace(
                token_ids=ids[:n], logprobs=said,
                finish_reason="stop" if finished else "length")]))
        return results


sys.modules["vllm._custom_ops"] = types.ModuleType("vllm._custom_ops")


class Forked:
    """In the place of subprocess.Popen, for [interpreter, "-c", code]: a fork runs the code."""

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
