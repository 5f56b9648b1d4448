r"""
How fast are sampling, PPO and GRPO, and how much memory do they take? Measured on random models.

A 4-layer, 256-wide Llama on two CPU cores, with each thread pinned to a core, in 2 minutes:

OMP_NUM_THREADS=2 OMP_PROC_BIND=true OMP_PLACES=cores python tools/bench.py

A model of about 1B parameters on a GPU:

python tools/bench.py --d_model=2048 --n_layer=16 --n_head=32 --n_kv_head=8 --d_ff=8192 \
    --dtype=bfloat16

First sampling, in turns with transformers' own generate on the same weights and prompts; then runs
of ppo.py and grpo.py, with the seconds of each phase. Figures are medians. Pin the threads on a
CPU: threads that move between cores make the figures worthless.

To compare with the limits of a GPU: GB/s of sampling counts, at each token, all weights and the KV
cache once; TFLOP/s of the update counts 6 operations a weight and token of a pass, and neither
attention nor what is computed twice.
"""
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

# Python looks for modules in this file's folder, tools/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import configure  # noqa: E402
from launch import choose_device  # noqa: E402
from models import autocast, dtypes, load  # noqa: E402
from errors import BadConfig, Stop  # noqa: E402
from scratch import from_scratch  # noqa: E402
from rollout import decoding_copy, generate  # noqa: E402
from tools.policies import plain  # noqa: E402


# --------------------------------------------------------------------------------------------------
work = "sampling,ppo,grpo"  # what is measured: these, or some of them
d_model = 256  # width of the Llama [2..100000]
n_layer = 4  # its layers [1..10000]
n_head = 4  # its attention heads [1..10000]
n_kv_head = 4  # its key-value heads [1..10000]
d_ff = 688  # width of its gated MLP [1..1000000]
vocab_size = 512  # its vocabulary [8..800000]
batch_size = 32  # responses [1..100000]
group_size = 4  # GRPO: responses to a prompt [2..100000]
prompt_length = 32  # tokens of each prompt [1..1000000]
max_new_tokens = 128  # tokens of the longest response [4..1000000]
lengths = "full"  # all responses have the longest, or end by themselves, after 43 % [full | real]
micro_batch_size = 8  # rows scored or trained at once [1..1000000]
repeats = 3  # timed runs and iterations of each, after one to warm up [1..10000]
run_keys = ""  # more keys of both scripts, as rollout_batch_size=8,head_chunk=64
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
dtype = "float32"  # bfloat16: fp32 weights under autocast [float32 | bfloat16 | float64]
# runs/peers/table.py imports the functions alone
config, _ = configure(globals()) if __name__ == "__main__" else ({}, None)
# --------------------------------------------------------------------------------------------------
# any score that differs within a group
RULE = """def score(batch):
    return [sum(map(ord, text)) % 7 / 7 for text in batch["completions"]]
"""


def make_models(folder, sizes, prompt_length, longest, end_share, prompts=512, reward=True):
    """
    Write folder/policy, with `reward` folder/reward_model, folder/prompts.jsonl and folder/rule.py:
    random Llamas, a tokenizer with one token a character, prompts of one length, and a reward.
    Returns how many weights a token is multiplied with: all of the policy's but its embeddings.

    sizes: those of the Llama, as config.json names them. longest: tokens of the longest response.
    end_share: which share of the sampled tokens is EOS. With 0 every response has `longest` tokens.
    With 2 / longest a response ends by itself after 0.43 x longest tokens on average.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    V, first = sizes["vocab_size"], 0x20000  # the first of 900,000 characters: the vocabulary
    vocabulary = {chr(first + i): i for i in range(V - 2)} | {"<eos>": V - 2, "<pad>": V - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(first)))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token=chr(first),
        padding_side="left", model_max_length=prompt_length + longest)
    settings = dict(sizes, model_type="llama", tie_word_embeddings=False, bos_token_id=None,
                    max_position_embeddings=prompt_length + longest, eos_token_id=V - 2,
                    pad_token_id=V - 1, initializer_range=sizes["hidden_size"]**-0.5)
    for name, head in (("policy", "lm"), ("reward_model", "scalar"))[:1 + reward]:
        hf = from_scratch(settings, head).hf
        if head == "lm":
            end_sometimes(hf, end_share)
            weights = hf.num_parameters() - hf.get_input_embeddings().weight.numel()
        else:
            hf.config.score_shift = 0.0  # or a run would begin with a search for its zero
        hf.save_pretrained(os.path.join(folder, name))
        tokenizer.save_pretrained(os.path.join(folder, name))
    ids = torch.randint(0, V - 2, (prompts, prompt_length),
                        generator=torch.Generator().manual_seed(0))
    with open(os.path.join(folder, "prompts.jsonl"), "w", encoding="utf-8") as f:
        for row in ids.tolist():
            f.write(json.dumps({"prompt": "".join(chr(first + i) for i in row)}) + "\n")
    with open(os.path.join(folder, "rule.py"), "w", encoding="utf-8") as f:
        f.write(RULE)
    return weights


@torch.no_grad()
def end_sometimes(llama, end_share):
    """
    Change a random Llama so that this share of its tokens is EOS, the last but one of the
    vocabulary, and none is padding, the last. All other tokens are about equally likely.

    A Llama's head has no bias, so coordinate 0 of the residual stream becomes one: every embedding
    has a large number there, and no layer writes to it. The last norm divides by the root of the
    mean square of all d coordinates, most of which is this one: it makes sqrt(d) of it.
    """
    head = llama.lm_head.weight  # (V, d)
    V, d = head.shape
    odds = end_share * (V - 2) / (1 - end_share)  # of EOS against one of the V - 2 other tokens
    llama.get_input_embeddings().weight[:, 0] = 100.0
    for layer in llama.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    head[:, 0] = 0.0
    head[-2:] = 0.0
    head[-2, 0] = (math.log(odds) if odds else -50.0) / math.sqrt(d)
    head[-1, 0] = -50.0 / math.sqrt(d)


def sampling(folder, device, dtype, B, P, longest, repeats):
    """
    {"quartet" or "transformers": [(seconds, tokens), ...]}: how long each takes to answer B random
    prompts of P tokens, `repeats` times, in turns, so that a slow moment hits both.
    """
    system = plain(dtype)
    policy = load(os.path.join(folder, "policy"), "policy", system, device, trained=True)
    V = policy.config.vocab_size
    prompts = torch.randint(0, V - 2, (B, P), generator=torch.Generator().manual_seed(0)).to(device)

    def quartet(decoder):
        return generate(decoder, prompts.tolist(), longest, eos_ids=[V - 2], pad_id=V - 1,
                        graphs=device.type == "cuda")["response_mask"].sum().item()

    def transformers(decoder):
        from transformers import GenerationConfig

        settings = GenerationConfig(
            max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=V - 2, pad_token_id=V - 1, disable_compile=True)
        out = decoder.hf.generate(prompts, attention_mask=torch.ones_like(prompts),
                                  generation_config=settings)[:, prompts.shape[1]:]
        return (out != V - 1).sum().item()  # padding follows the EOS, and is never sampled

    took = dict(quartet=[], transformers=[])
    for i, run in itertools.product(range(repeats + 1), (quartet, transformers)):
        began = time.perf_counter()
        with torch.no_grad(), autocast(system, device), decoding_copy(
                policy, dtypes(system)[1], device) as decoder:
            tokens = run(decoder)  # an int: the device has finished
        if i > 0:  # the first run is the warm-up
            took[run.__name__].append((time.perf_counter() - began, tokens))
    return took


def unpin():
    """
    For a process that is about to start: all cores, as before torch. OpenMP may have pinned this
    process's thread to one core, which the new one would inherit.
    """
    if hasattr(os, "sched_setaffinity"):  # macOS pins nothing
        os.sched_setaffinity(0, range(os.cpu_count()))


def iterations(script, folder, keys):
    """
    The log of a run of ppo.py or grpo.py on the models of a folder, without the iteration that
    warms up. keys: those of the run that are not defaults.
    The learning rate is so small that the lengths of the responses stay as they are.
    """
    keys = dict(
        policy_path=os.path.join(folder, "policy"), temperature=1.0, learning_rate=1e-12,
        reward_path=os.path.join(folder, "reward_model"), checkpoint_interval=0,
        prompts_path=os.path.join(folder, "prompts.jsonl")) | keys
    if script == "grpo":
        keys |= dict(reward_functions=os.path.join(folder, "rule.py:score"), reward_path="")
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, os.path.join(ROOT, f"{script}.py"), f"--out_dir={out}/run"]
        run = subprocess.Popen(command + [f"--{key}={value}" for key, value in keys.items()],
                               stdout=subprocess.DEVNULL, stderr=errors, preexec_fn=unpin)
        records = []
        while run.poll() is None and len(records) < keys["max_iters"]:
            time.sleep(0.2)
            if os.path.exists(f"{out}/run/log.jsonl"):
                with open(f"{out}/run/log.jsonl", encoding="utf-8") as f:
                    records = [json.loads(line) for line in f if line.endswith("\n")]
        run.kill()  # what it would still do is to save its models
        run.wait()
        if len(records) < keys["max_iters"]:
            errors.seek(0)
            raise Stop(f"{script}.py failed: {(errors.read().strip() or '?').splitlines()[-1]}")
        return records[1:keys["max_iters"]]


if __name__ == "__main__":
    wanted = [word.strip() for word in work.split(",")]
    if not set(wanted) <= {"sampling", "ppo", "grpo"}:
        raise BadConfig(f"work = {work!r}: wanted sampling, ppo, grpo, or some of them")
    device = torch.device(choose_device(device_type))
    print(f"{device.type}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}; "
          f"{batch_size} responses of up to {max_new_tokens} tokens to prompts of {prompt_length}")
    with tempfile.TemporaryDirectory() as folder:
        sizes = dict(vocab_size=vocab_size, hidden_size=d_model, intermediate_size=d_ff,
                     num_hidden_layers=n_layer, num_attention_heads=n_head,
                     num_key_value_heads=n_kv_head)
        weights = make_models(folder, sizes, prompt_length, max_new_tokens,
                              2 / max_new_tokens if lengths == "real" else 0.0,
                              reward="ppo" in wanted)
        if "sampling" in wanted:
            took = sampling(folder, device, dtype, batch_size, prompt_length, max_new_tokens,
                            repeats)
            for name, runs in took.items():
                seconds = statistics.median(s for s, _ in runs)
                rate = statistics.median(n / s for s, n in runs)
                moved = ""
                if lengths == "full":  # else rows leave, and fewer are read at later steps
                    width = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
                    cached = 2 * n_layer * d_model // n_head * n_kv_head  # numbers a token
                    tokens = batch_size * (prompt_length + max_new_tokens / 2)
                    gb = width * (weights + cached * tokens) * max_new_tokens / 1e9
                    moved = f", {gb / seconds:.0f} GB/s"
                print(f"  {name}: {seconds:.3f} s, {rate:.0f} tokens/s{moved}", flush=True)
        for script in [script for script in ("ppo", "grpo") if script in wanted]:
            keys = dict(batch_size=batch_size, micro_batch_size=micro_batch_size,
                        max_new_tokens=max_new_tokens, max_iters=repeats + 1, dtype=dtype,
                        device_type=device.type)
            keys |= dict(group_size=group_size) if script == "grpo" else {}
            keys |= dict(pair.partition("=")[::2] for pair in run_keys.split(",") if pair)
            records = iterations(script, folder, keys)
            phases = [f"{phase} {statistics.median(r[f'time/{phase}'] for r in records):.3f} s"
                      for phase in ("rollout", "score", "update", "iteration")]
            length = statistics.mean(r["objective/length"] for r in records)
            peak = max(r["mem/peak_mib"] for r in records)
            passes = 4 * 2 if script == "ppo" else 1  # epochs; the policy and the value model
            tflop = 6 * weights * batch_size * (prompt_length + length) * passes / 1e12
            rate = tflop / statistics.median(r["time/update"] for r in records)
            print(f"  {script}.py: {', '.join(phases)}; {length:.0f} tokens a response, "
                  f"update {rate:.3g} TFLOP/s, peak {peak:.0f} MiB", flush=True)
