"""
generate of transformers, or of vLLM's CPU build, on the policy of a folder: 32 responses of 128
tokens to prompts of 32, sampled at temperature 1. One line of JSON.

python runs/peers/generate.py transformers|compiled|vllm FOLDER STEPS

compiled: transformers with a static cache and its compiled forward. STEPS are counted after two to
warm up.
"""
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", VLLM_LOGGING_LEVEL="ERROR",
                  VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
WARM_UP, PROMPTS, LENGTH, NEW = 2, 32, 32, 128


def of_transformers(folder, compiled):
    """A function that samples once and returns the number of tokens; and a name with a version."""
    import torch
    import transformers as hf

    policy = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    more = dict(disable_compile=True)
    if compiled:
        compiling = hf.CompileConfig(fullgraph=False, dynamic=False, mode="default")
        compiling._compile_all_devices = True  # transformers compiles on GPUs alone otherwise
        more = dict(cache_implementation="static", compile_config=compiling)
    settings = hf.GenerationConfig(
        max_new_tokens=NEW, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None,
        pad_token_id=0, **more)
    ids = random_ids(policy.config.vocab_size)

    def sample():
        with torch.inference_mode():
            out = policy.generate(ids, attention_mask=torch.ones_like(ids),
                                  generation_config=settings)
        return out[:, LENGTH:].numel()

    return sample, f"transformers {hf.__version__}{', compiled' * compiled}"


def of_vllm(folder):
    """The same of vLLM."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND",
                          f"0-{int(os.environ.get('OMP_NUM_THREADS', 2)) - 1}")
    import vllm

    engine = vllm.LLM(model=folder, dtype="float32", max_model_len=LENGTH + NEW,
                      max_num_seqs=PROMPTS, skip_tokenizer_init=True, disable_log_stats=True)
    vocab_size = engine.llm_engine.model_config.get_vocab_size()
    prompts = [{"prompt_token_ids": row} for row in random_ids(vocab_size).tolist()]
    settings = vllm.SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True, logprobs=0,
                                   detokenize=False)

    def sample():
        out = engine.generate(prompts, settings, use_tqdm=False)
        return sum(len(response.outputs[0].token_ids) for response in out)

    return sample, f"vLLM {vllm.__version__}"


def random_ids(vocab_size):
    """Prompts of tokens that are neither EOS nor padding, (PROMPTS, LENGTH)."""
    import torch

    return torch.randint(0, vocab_size - 2, (PROMPTS, LENGTH),
                         generator=torch.Generator().manual_seed(0))


def main(kind, folder, steps):
    from stopwatch import Stopwatch

    folder = os.path.join(folder, "policy")
    sample, version = of_vllm(folder) if kind == "vllm" else of_transformers(
        folder, kind == "compiled")
    watch = Stopwatch()
    watch.click()
    for _ in range(WARM_UP + steps):
        tokens = sample()
        watch.click()
    watch.report(WARM_UP, length=tokens / PROMPTS, version=version)


if __name__ == "__main__":  # vLLM starts processes of its own
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
