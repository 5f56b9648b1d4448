"""A stand-in for vLLM, with what engine/vllm_sampler.py uses of it. It samples as we do: a run with it is the run without it."""
import os
import sys
import types
from types import SimpleNamespace

import torch

from model import Model
from rollout import generate

__version__ = "0.0"


class SamplingParams(SimpleNamespace):
    pass


class GPUModelRunner:
    def reload_weights(self, weights_iterator=None):
        pass


class LLM:
    def __init__(self, folder, dtype, load_format, hf_overrides, skip_tokenizer_init, logits_processors, **settings):
        from transformers import AutoConfig, AutoModelForCausalLM

        if os.environ.get("STAND_IN") == "unknown":
            raise ValueError("Model architectures ['Unknown'] are not supported for now.\nSee the list.")
        assert load_format == "dummy" and settings["logprobs_mode"] == "processed_logprobs" and dtype == "float32"
        config = AutoConfig.from_pretrained(folder)
        if hf_overrides:
            config.tie_word_embeddings = False
        self.model = Model(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        self.without_padding = logits_processors[0](None, None, None)
        forward = self.model.next_logits
        self.model.next_logits = lambda *args: self.without_padding.apply(forward(*args).clone())
        self.asked = 0

    @torch.no_grad()
    def collective_rpc(self, name, kwargs):
        assert name == "reload_weights"
        own = dict(self.model.hf.named_parameters())
        for name, t in kwargs["weights_iterator"]:
            own[name].copy_(t)
        if os.environ.get("STAND_IN") == "forgets":
            next(iter(own.values())).view(-1)[0] += 1

    def apply_model(self, function):
        return [function(self.model.hf)]

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, settings, use_tqdm):
        self.asked += 1
        if os.environ.get("STAND_IN") == f"dies {self.asked}":
            os._exit(7)
        if os.environ.get("STAND_IN") == f"hangs {self.asked}":
            torch.multiprocessing.Event().wait()
        s = settings[0]
        assert s.ignore_eos and s.logprobs == 0
        noise = [torch.Generator().manual_seed(one.seed) for one in settings]
        out = generate(self.model, [one["prompt_token_ids"] for one in prompts], s.max_tokens, s.temperature, s.stop_token_ids,
                       uniforms=torch.stack([torch.rand(s.max_tokens, generator=g, dtype=torch.float64) for g in noise]))
        results = []
        for ids, mask, logprobs, finished in zip(out["tokens"][:, -s.max_tokens:], out["response_mask"], out["sampler_logprobs"],
                                                 out["finished"], strict=True):
            ids = ids[mask].tolist()
            said = [{i: SimpleNamespace(logprob=x)} for i, x in zip(ids, logprobs[mask].tolist(), strict=True)]
            results.append(SimpleNamespace(outputs=[SimpleNamespace(
                token_ids=ids, logprobs=said, finish_reason="stop" if finished else "length")]))
        return results


for module, names in {"vllm.v1": {}, "vllm.v1.worker": {}, "vllm.v1.sample": {}, "vllm._custom_ops": {},
                      "vllm.v1.worker.gpu_model_runner": dict(GPUModelRunner=GPUModelRunner),
                      "vllm.v1.sample.logits_processor": dict(LogitsProcessor=object)}.items():
    sys.modules[module] = types.ModuleType(module)
    sys.modules[module].__dict__.update(names)
