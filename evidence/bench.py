r"""
How fast are sampling, PPO and GRPO, and how much memory do they take? Measured on random Llamas.

On two CPU cores, with each thread pinned to a core, for threads that move make figures worthless:

OMP_NUM_THREADS=2 OMP_PROC_BIND=true OMP_PLACES=cores python evidence/bench.py

A model of about 1B parameters on a GPU:

python evidence/bench.py --d_model=2048 --n_layer=16 --n_head=32 --n_kv_head=8 --d_ff=8192 \
    --dtype=bfloat16

First sampling, in turns with transformers' own generate on the same weights and prompts, and with
--compile=True also by compiled steps; then, if --work names it, a training step; then runs of
ppo.py and grpo.py, with the seconds of each phase. Figures are medians. Of sampling and of the
training step it also prints the operations that take longest.

A share is that of the limit, the seconds that this machine needs at the least: for the products of
matrices at the speed of one large product, or for the bytes that it must read and write at the
speed of a copy, if that takes longer (tools/work.py).
"""
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

# Python looks for modules in this file's folder, evidence/; ours are in the folder above it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import configure  # noqa: E402  first: it must be imported before torch

import torch  # noqa: E402

from errors import BadInput, Stop  # noqa: E402
from load import auto_class, autocast, load  # noqa: E402
from ranks import choose_device  # noqa: E402
from rollout import decode, decoding_copy, response_uniforms  # noqa: E402
from run import make_optimizer  # noqa: E402
from tools.memory import dry_run, read_run  # noqa: E402
from tools.runs import read_records, typed  # noqa: E402
from tools.work import bandwidth, least_of, often, products, work_of  # noqa: E402

# -------------------------------------------------------------------------------------------------
work = "sampling,ppo,grpo"  # to be measured: these, or some of them, or update
d_model = 256  # width of the Llama [2..100000]
n_layer = 4  # its layers [1..10000]
n_head = 4  # its attention heads [1..10000]
n_kv_head = 4  # its key-value heads [1..10000]
d_ff = 688  # width of its gated MLP [1..1000000]
vocab_size = 512  # its vocabulary [8..800000]
batch_size = 32  # responses; GRPO: 4 to a prompt [4..100000]
prompt_length = 32  # tokens of each prompt [1..1000000]
max_new_tokens = 128  # tokens of the longest response [4..1000000]
lengths = "full"  # all responses have the longest, or end by themselves, after 43 % [full | real]
micro_batch_size = 8  # rows scored or trained at once [1..1000000]
repeats = 3  # timed runs and iterations of each, after one to warm up [1..10000]
run_keys = ""  # more keys of both scripts, as rollout_batch_size=8,head_chunk=64
# evidence/peers/table.py imports the functions, with arguments of its own
config, system = configure(globals(), "config/keys.py", argv=None if __name__ == "__main__" else [])
# -------------------------------------------------------------------------------------------------
# a rule for GRPO: any score that differs within a group
RULE = """def score(batch):
    return [sum(map(ord, text)) % 7 / 7 for text in batch["completions"]]
"""


def sizes_of_llama(V, d, layers, heads, key_value_heads, f):
    """The sizes of a Llama, as in its config.json. V: vocabulary; d: width; f: of the MLP."""
    return dict(vocab_size=V, hidden_size=d, intermediate_size=f, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=key_value_heads)


def make_models(folder, sizes, prompt_length, longest, end_share, system, ppo):
    """
    Write folder/policy, for PPO reward_model, prompts.jsonl and rule.py: random Llamas of these
    sizes, as in config.json, a tokenizer with a token a character, prompts of one length, a reward.
    longest: tokens of the longest response. end_share: which share of the sampled tokens is EOS.
    With 0 every response has `longest` tokens; with 2 / longest 0.43 x longest on average.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    V, first = sizes["vocab_size"], 0x20000  # the first of 900,000 characters: the vocabulary
    vocabulary = {chr(first + i): i for i in range(V - 2)} | {"<eos>": V - 2, "<pad>": V - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(first)))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token=chr(first),
        padding_side="left", model_max_length=prompt_length + longest)
    settings = AutoConfig.for_model(
        "llama", **sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=V - 2,
        pad_token_id=V - 1, max_position_embeddings=prompt_length + longest,
        initializer_range=sizes["hidden_size"]**-0.5, num_labels=1,
        score_shift=0.0)  # or a run would begin with a search for its zero
    heads = dict(policy="lm", reward_model="scalar") if ppo else dict(policy="lm")
    for name, head in heads.items():
        with torch.device(choose_device(system.device_type)):
            hf = auto_class(head).from_config(settings)
        if head == "lm":
            end_sometimes(hf, end_share)
        hf.save_pretrained(os.path.join(folder, name))
        tokenizer.save_pretrained(os.path.join(folder, name))
    ids = torch.randint(0, V - 2, (512, prompt_length), generator=torch.Generator().manual_seed(0))
    with open(os.path.join(folder, "prompts.jsonl"), "w", encoding="utf-8") as f:
        for row in ids.tolist():
            f.write(json.dumps({"prompt": "".join(chr(first + i) for i in row)}) + "\n")
    with open(os.path.join(folder, "rule.py"), "w", encoding="utf-8") as f:
        f.write(RULE)


@torch.no_grad()
def end_sometimes(llama, end_share):
    """
    Change a random Llama so that this share of its tokens is EOS, the last but one of the
    vocabulary, and none is padding, the last. All other tokens are about equally likely.

    A Llama's head has no bias, so coordinate 0 of the residual stream becomes one: every embedding
    has a large number there, and no layer writes to it. The last norm makes sqrt(d) of it.
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


def sampling(folder, system, B, P, longest, repeats):
    """
    {"quartet", "compiled" (with the key compile) or "transformers": [(seconds, tokens), ...]}: how
    long each takes to answer B random prompts of P tokens, `repeats` times, in turns, so that a
    slow moment hits all. And a function that lets quartet do it once more.
    """
    device = choose_device(system.device_type)
    plain = SimpleNamespace(**vars(system) | dict(compile=False))  # the layers train nothing here
    policy = load(os.path.join(folder, "policy"), "policy", plain, device, trained=True)
    eos, pad = policy.tokenizer.eos_id, policy.tokenizer.pad_id
    prompts = torch.randint(0, eos, (B, P), generator=torch.Generator().manual_seed(0)).to(device)

    def quartet(decoder, graphs=system.cuda_graphs and device.type == "cuda"):
        uniforms = response_uniforms(0, "bench", 0, range(B), longest)
        _, _, lengths, _ = decode(decoder, prompts.tolist(), uniforms, graphs=graphs)
        return lengths.sum().item()

    def compiled(decoder):
        return quartet(decoder, "compiled")

    def transformers(decoder):
        from transformers import GenerationConfig

        settings = GenerationConfig(
            max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            eos_token_id=eos, pad_token_id=pad, disable_compile=True)
        out = decoder.hf.generate(prompts, attention_mask=torch.ones_like(prompts),
                                  generation_config=settings)[:, P:]
        return (out != pad).sum().item()  # padding follows the EOS, and is never sampled

    def timed(run):
        began = time.perf_counter()
        with torch.no_grad(), autocast(system, device), decoding_copy(
                policy, system, device) as decoder:
            tokens = run(decoder)  # an int: the device has finished
        return time.perf_counter() - began, tokens

    runners = (quartet, *((compiled,) if system.compile else ()), transformers)
    took = {run.__name__: [] for run in runners}
    for i, run in itertools.product(range(repeats + 1), runners):
        pair = timed(run)
        if i > 0:  # the first run is the warm-up
            took[run.__name__].append(pair)
    return took, lambda: timed(quartet)


def update(folder, system, b, T, repeats):
    """Median seconds of a training step of b rows with T tokens, and a function that does one."""
    device, drawn = choose_device(system.device_type), torch.Generator().manual_seed(0)
    policy = load(os.path.join(folder, "policy"), "policy", system, device, trained=True)
    optimizer = make_optimizer(policy, "policy", system, 1e-12, (0.9, 0.95), 1e-8)
    tokens = torch.randint(0, policy.tokenizer.eos_id, (b, T), generator=drawn).to(device)
    target_mask = torch.arange(T, device=device).expand(b, T) > 0

    def step():
        began = time.perf_counter()
        with autocast(system, device):
            found = policy.logprobs(tokens, target_mask, 1.0, system.head_chunk, entropy=True)
        sum(x.mean() for x in found).backward()
        optimizer.step()
        optimizer.zero_grad()
        found[0][0].item()  # waits for the device
        return time.perf_counter() - began

    return statistics.median([step() for _ in range(repeats + 1)][1:]), step  # the first warms up


def print_longest(work, device):
    """
    The ten operations that take longest in a call of `work`, and all together: on a GPU the rest of
    its seconds is waiting for Python.
    """
    from torch.profiler import profile

    with profile() as seen:
        work()
    kind = "device" if device.type == "cuda" else "cpu"
    took = [(getattr(event, f"self_{kind}_time_total") / 1000, event.count, event.key)
            for event in seen.key_averages()  # not what launches a kernel: it has the same time
            if event.device_type.name.lower() == device.type]
    for milliseconds, count, name in sorted(took, reverse=True)[:10]:
        print(f"    {milliseconds:.2f} ms in {count} {name[:80]}")
    milliseconds, count = (sum(one[i] for one in took) for i in (0, 1))  # 0, where none are seen
    print(f"    {milliseconds:.2f} ms in all {count}", flush=True)


def keys_of(script, folder, keys):
    """All keys of a run of ppo.py or grpo.py on the models of a folder."""
    keys = dict(
        policy_path=os.path.join(folder, "policy"), temperature=1.0, learning_rate=1e-12,
        reward_path=os.path.join(folder, "reward_model"), checkpoint_interval=0,
        prompts_path=os.path.join(folder, "prompts.jsonl")) | keys
    if script == "grpo":
        keys |= dict(reward_functions=os.path.join(folder, "rule.py:score"), reward_path="")
    return keys


def on_all_cores():
    """For a new process, as before torch: OpenMP may have pinned this one to a core."""
    os.sched_setaffinity(0, range(os.cpu_count()))


def printed(command, folder, **more):
    """What a process prints, which runs in a folder. more: for Popen. Raises Stop."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder,
                          preexec_fn=on_all_cores, **more)
    if done.returncode:
        raise Stop(f"{command[0]}: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return done.stdout


def iterations(script, folder, keys):
    """
    The log of a run of ppo.py or grpo.py on the models of a folder, without the iteration that
    warms up. The learning rate is so small that the lengths of the responses stay as they are.
    """
    keys = keys_of(script, folder, keys)
    torch.cuda.empty_cache()  # the run needs what this process keeps
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, os.path.join(ROOT, f"{script}.py"), f"--out_dir={out}/run"]
        run = subprocess.Popen(command + typed(keys), stdout=subprocess.DEVNULL, stderr=errors,
                               preexec_fn=on_all_cores)
        records = []
        while run.poll() is None and len(records) < keys["max_iters"]:
            time.sleep(0.2)
            if os.path.isfile(f"{out}/run/log.jsonl"):
                records = read_records(f"{out}/run/log.jsonl")
        run.kill()  # it would only save its models now
        run.wait()
        if len(records) < keys["max_iters"]:
            errors.seek(0)
            raise Stop(f"{script}.py failed: {(errors.read().strip() or '?').splitlines()[-1]}")
        return records[1:keys["max_iters"]]


def limits(script, keys, P, mean, device):
    """
    Of an iteration with these keys, {key: value}, on the device that is there: {phase: the least
    seconds}, as the log has its phases, and the Counts of work_of.
    """
    _, config = read_run([script, *typed(keys)])
    with contextlib.redirect_stdout(None), dry_run(script, config) as run:
        counts = work_of(script, config, run, P, mean)
    dtype, steps = getattr(torch, config["dtype"]), often(script, config, P, mean).steps + 1
    card = dict(flop=products(device, dtype), link=math.inf,
                bandwidth=bandwidth(device, counts["sampling"].nbytes / steps))
    least = {phase: seconds for phase, (seconds, _) in least_of(counts, card).items()}
    found = dict(rollout=least["sampling"], update=least["update"],
                 score=least.get("scoring", 0) + least["reading"])
    return found | dict(iteration=sum(found.values())), counts


if __name__ == "__main__":
    if not set(work.split(",")) <= {"sampling", "update", "ppo", "grpo"}:
        raise BadInput(f"work = {work!r}: wanted sampling,update,ppo,grpo or some of them")
    if d_model % (2 * n_head) or n_head % n_kv_head:
        raise BadInput(f"d_model = {d_model}, n_head = {n_head}, n_kv_head = {n_kv_head}: each "
                       "must be a multiple of the next, d_model an even one")
    if not all("=" in pair for pair in run_keys.split(",") if pair):
        raise BadInput(f"run_keys = {run_keys!r}: wanted key=value, with commas between several")
    device = choose_device(system.device_type)
    speed = products(device, getattr(torch, system.dtype))
    print(f"{device.type}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}, "
          f"{speed / 1e12:.3g} TFLOP/s in a large product; {batch_size} responses of up to "
          f"{max_new_tokens} tokens to prompts of {prompt_length}")
    P, R = prompt_length, max_new_tokens
    plain = dict(batch_size=batch_size, micro_batch_size=micro_batch_size, max_new_tokens=R,
                 dtype=system.dtype, head_chunk=system.head_chunk)

    def needs(script, mean, P=P, **keys):
        """{phase: its limit in seconds}, {phase: its Count} of these responses; see limits."""
        return limits(script, keys_of(script, folder, plain | keys), P, round(mean), device)

    with tempfile.TemporaryDirectory() as folder:
        sizes = sizes_of_llama(vocab_size, d_model, n_layer, n_head, n_kv_head, d_ff)
        make_models(folder, sizes, P, R, 2 / R if lengths == "real" else 0.0, system, "ppo" in work)
        if "sampling" in work:
            took, again = sampling(folder, system, batch_size, P, R, repeats)
            for name, runs in took.items():
                seconds, tokens = map(statistics.median, zip(*runs, strict=True))
                least, phases = needs(
                    "ppo", tokens / batch_size, value_init="policy", reward_path="",
                    reward_functions=os.path.join(folder, "rule.py:score"))
                print(f"  {name}: {seconds:.3f} s ({least['rollout'] / seconds:.0%}), "
                      f"{tokens / seconds:.0f} tokens/s, {1000 * seconds / R:.2f} ms a step, "
                      f"{phases['sampling'].nbytes / seconds / 1e9:.0f} GB/s", flush=True)
            print_longest(again, device)
        if "update" in work:
            seconds, again = update(folder, system, micro_batch_size, P + R, repeats)
            # each token behind the first one is a target; two such steps, because grpo.py wants
            # groups of two at least
            T = P + R
            least, phases = needs("grpo", T - 1, P=1, max_new_tokens=T - 1, group_size=2,
                                  batch_size=2 * micro_batch_size, num_minibatches=2)
            print(f"  update: {seconds:.3f} s ({least['update'] / 2 / seconds:.0%}), "
                  f"{phases['update'].flop / 2 / seconds / 1e12:.2f} TFLOP/s", flush=True)
            print_longest(again, device)
        for script in [script for script in ("ppo", "grpo") if script in work.split(",")]:
            keys = plain | dict(max_iters=repeats + 1, device_type=system.device_type,
                                compile=system.compile)
            keys |= dict(group_size=4) if script == "grpo" else {}
            keys |= dict(pair.split("=", 1) for pair in run_keys.split(",") if pair)
            records = iterations(script, folder, keys)
            length = statistics.mean(r["objective/length"] for r in records)
            least, _ = needs(script, length, **keys)
            seconds = {phase: statistics.median(r[f"time/{phase}"] for r in records)
                       for phase in ("rollout", "score", "update", "iteration")}
            phases = [f"{phase} {took:.3f} s ({least[phase] / took:.0%})"
                      for phase, took in seconds.items()]
            print(f"  {script}.py: {', '.join(phases)}; {length:.0f} tokens a response, "
                  f"peak {max(r['mem/peak_mib'] for r in records):.0f} MiB", flush=True)
