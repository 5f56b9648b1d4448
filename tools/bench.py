r"""
How fast are sampling and PPO, and how much memory does PPO take? Measured on random models.

A 4-layer, 256-wide Llama on two CPU cores, with each thread pinned to a core:

OMP_NUM_THREADS=2 OMP_PROC_BIND=true OMP_PLACES=cores python tools/bench.py

A model of about 1B parameters on a GPU:

python tools/bench.py --d_model=2048 --n_layer=16 --n_head=32 --n_kv_head=8 --d_ff=8192 \
    --dtype=bfloat16

First, tokens/s of generate here and of transformers' generate, in turns, on the same weights and
prompts; every response has full length. Then the seconds of each phase of a PPO iteration, from a
run of ppo.py, and its peak memory: resident on a CPU, allocated on a GPU. All figures are medians.
Pin the threads on a CPU: threads that move between cores make the figures worthless.
"""
import contextlib
import json
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
from engine.checkpoint import save_model  # noqa: E402
from engine.pretrained import from_scratch  # noqa: E402
from engine.tokenizers import ByteTokenizer  # noqa: E402
from errors import BadConfig, Stop  # noqa: E402
from model import freeze  # noqa: E402
from rollout import generate  # noqa: E402


# --------------------------------------------------------------------------------------------------
d_model = 256  # width of the Llama [>= 2]
n_layer = 4  # its layers [>= 1]
n_head = 4  # its attention heads [>= 1]
n_kv_head = 4  # its key-value heads [>= 1]
d_ff = 688  # width of its gated MLP [>= 1]
vocab_size = 512  # its vocabulary, at least the 256 bytes and two [>= 258]
batch_size = 32  # responses [>= 1]
prompt_length = 32  # tokens of each prompt [>= 1]
max_new_tokens = 128  # tokens of each response [>= 1]
ppo_epochs = 4  # passes of the PPO update over the batch [>= 1]
micro_batch_size = 8  # rows scored or trained at once [>= 1]
repeats = 5  # timed runs of each, after one to warm up [>= 1]
transformers = True  # also time transformers' generate
ppo = True  # also time a PPO iteration
device_type = "auto"  # auto = a GPU if there is one [auto | cpu | cuda]
dtype = "float32"  # bfloat16: fp32 weights under autocast [float32 | bfloat16 | float64]
config = configure(globals())
# --------------------------------------------------------------------------------------------------

if d_model % (2 * n_head) or n_head % n_kv_head:
    raise BadConfig("d_model must be a multiple of 2 * n_head, and n_head of n_kv_head")
device = device_type
if device == "auto":
    device = "cuda" if torch.cuda.is_available() else "cpu"
weights_dtype = torch.float64 if dtype == "float64" else torch.float32
precision = contextlib.nullcontext()
if dtype == "bfloat16":
    precision = torch.autocast(device, torch.bfloat16)


def build(head):
    """
    A random Llama that in practice never samples EOS, so that all responses have full length: the
    logits of EOS and padding are 0, and the other logits are large.
    """
    model = from_scratch(dict(
        model_type="llama", vocab_size=vocab_size, hidden_size=d_model, intermediate_size=d_ff,
        num_hidden_layers=n_layer, num_attention_heads=n_head, num_key_value_heads=n_kv_head,
        max_position_embeddings=prompt_length + max_new_tokens, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None), head)
    with torch.no_grad():
        if head == "lm":
            model.lm_head.weight.mul_(8)
            model.lm_head.weight[-2:] = 0
    return model


def timed(run):
    """Seconds that run() takes, until the device has finished its work."""
    began = time.perf_counter()
    with torch.no_grad(), precision:
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def report(name, seconds, **more):
    """Print a line: the median of the seconds, the least, the most, and the tokens/s."""
    median = statistics.median(seconds)
    rate = batch_size * max_new_tokens / median
    print(f"{name:<28} {median:8.3f} s (min {min(seconds):.3f}, max {max(seconds):.3f}) "
          f"{rate:9.0f} tokens/s" + "".join(f"  {k} {v}" for k, v in more.items()), flush=True)


with tempfile.TemporaryDirectory() as folder:
    # a policy and a reward model on disk, for transformers and ppo.py
    markers = [f"<x{i}>" for i in range(vocab_size - 258)]  # they fill up the vocabulary
    tokenizer = ByteTokenizer({"markers": markers, "eos": "<eos>", "pad": "<pad>"})
    policy = build("lm")
    for name, model in (("policy", policy), ("reward_model", build("scalar"))):
        save_model(os.path.join(folder, name), model, tokenizer)
    n_params = sum(p.numel() for p in policy.parameters())
    print(f"{n_params / 1e6:.1f}M parameters, {dtype}, {device}, {torch.get_num_threads()} CPU "
          f"threads; batch {batch_size}, prompt {prompt_length}, new {max_new_tokens}")

    # 1) generate, ours and theirs in turns, so that a slow moment of the machine hits both
    policy = freeze(policy.to(device, weights_dtype))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (batch_size, prompt_length), generator=generator)
    contestants = {"generate": lambda: generate(policy, prompts.tolist(), max_new_tokens)}
    if transformers:
        import transformers as hf

        hf.logging.set_verbosity_error()
        saved = os.path.join(folder, "policy")
        theirs = hf.AutoModelForCausalLM.from_pretrained(saved, dtype=weights_dtype)
        theirs = theirs.to(device).eval()
        settings = hf.GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=None, pad_token_id=0, disable_compile=True)
        on_device = prompts.to(device)
        contestants["transformers generate"] = lambda: theirs.generate(
            on_device, attention_mask=torch.ones_like(on_device), generation_config=settings)
    seconds = {name: [] for name in contestants}
    for i in range(repeats + 1):
        for name, run in contestants.items():
            t = timed(run)
            if i > 0:  # the first run is the warm-up
                seconds[name].append(t)
    for name, times in seconds.items():
        report(name, times)
    if transformers:
        pairs = zip(seconds["generate"], seconds["transformers generate"], strict=True)
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"generate is {ratio:.2f} times as fast as transformers' (median of {repeats} pairs)")
        del theirs

    # 2) PPO: a run of ppo.py, two iterations longer, to warm up
    if ppo:
        with open(os.path.join(folder, "prompts.jsonl"), "w", encoding="utf-8") as f:
            for row in (prompts % 26 + 97).tolist():
                f.write(json.dumps({"prompt": bytes(row).decode()}) + "\n")
        path = {name: os.path.join(folder, name)
                for name in ("policy", "reward_model", "prompts.jsonl", "run")}
        keys = dict(
            out_dir=path["run"], policy_path=path["policy"], reward_path=path["reward_model"],
            prompts_path=path["prompts.jsonl"], eval_path=path["prompts.jsonl"], eval_size=1,
            eval_interval=10**6, batch_size=batch_size, micro_batch_size=micro_batch_size,
            max_new_tokens=max_new_tokens, temperature=1.0, ppo_epochs=ppo_epochs,
            max_iters=repeats + 2, learning_rate=1e-5, device_type=device, dtype=dtype)
        command = [sys.executable, os.path.join(ROOT, "ppo.py")]
        command += [f"--{k}={v}" for k, v in keys.items()]
        # OpenMP may have pinned this thread to one core, and the new process would inherit that
        unpin = None  # macOS pins nothing
        if hasattr(os, "sched_setaffinity"):
            unpin = lambda: os.sched_setaffinity(0, range(os.cpu_count()))  # noqa: E731
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=unpin)
        if done.returncode:
            raise Stop(f"ppo.py failed: {done.stderr.strip().splitlines()[-1]}")
        with open(os.path.join(path["run"], "log.jsonl"), encoding="utf-8") as f:
            # without the two of the warm-up, and the last, which only evaluates
            records = [json.loads(line) for line in f][2:-1]
        if any(r["objective/length"] != max_new_tokens for r in records):
            raise Stop("some responses ended early, so the work was not what it should be")
        phases = {p: f"{statistics.median(r[f'time/{p}'] for r in records):.3f}"
                  for p in ("rollout", "score", "update")}
        report("PPO iteration", [r["time/iteration"] for r in records], **phases)
        print(f"PPO peak memory: {max(r['mem/peak_mib'] for r in records):.0f} MiB")
