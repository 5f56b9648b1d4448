"""
Where the time of an iteration of PPO goes: torch's profiler looks at the third one, from begin to
end. Prints how long the GPU was busy and the kernels that took longest, and leaves a trace for
chrome://tracing in OUT/trace.json.

    python runs/gpu_profile.py --out=out/gpu/profile                     # 125M parameters in bf16
    python runs/gpu_profile.py --out=out/p grpo.py config/mine.py  # or any run of ppo.py, grpo.py

On a CPU the operations of torch stand in the place of the kernels.
"""
import json
import os
import runpy
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import errors  # noqa: E402
from engine import run  # noqa: E402
from engine.checkpoint import save_model  # noqa: E402
from engine.tokenizers import ByteTokenizer  # noqa: E402
from model import from_scratch  # noqa: E402

LOOKED_AT = 2  # the number of the iteration that is profiled; those before it warm up


def model_of_125m(folder):
    """A policy, a reward model and prompts in this folder; returns the arguments of ppo.py."""
    tokenizer = ByteTokenizer(dict(markers=[], eos="<eos>", pad="<pad>"))
    shape = dict(model_type="llama", vocab_size=32000, hidden_size=768, intermediate_size=2048,
                 num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
                 max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
                 eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
                 initializer_range=768**-0.5)
    for name, head in (("policy", "lm"), ("reward_model", "scalar")):
        save_model(os.path.join(folder, name), from_scratch(shape, head), tokenizer)
    with open(os.path.join(folder, "prompts.jsonl"), "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"prompt": "x" * (64 + i % 64)}) + "\n" for i in range(256))
    keys = dict(policy_path=f"{folder}/policy", reward_path=f"{folder}/reward_model",
                prompts_path=f"{folder}/prompts.jsonl", out_dir=f"{folder}/run", batch_size=256,
                max_new_tokens=128, micro_batch_size=64, num_minibatches=2, dtype="bfloat16",
                temperature=1.0, missing_eos_penalty=0.0, checkpoint_interval=0,
                max_iters=LOOKED_AT + 2)
    return ["ppo.py", *(f"--{key}={value}" for key, value in keys.items())]


def busy_seconds(spans):
    """How long at least one of these spans (begin, end) lasted: kernels of two streams overlap."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return busy


def report(profiler, seconds, out):
    """Print the busy share and the longest kernels, and leave the share as a figure."""
    on_gpu = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if on_gpu:
        busy = busy_seconds((e.time_range.start, e.time_range.end) for e in on_gpu) / 1e6
        print(f"the GPU was busy for {busy:.3f} of {seconds:.3f} s: {busy / seconds:.1%}")
        leave_figure("gpu busy", 100 * busy / seconds, "%")
    column = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=column, row_limit=25, max_name_column_width=60))
    profiler.export_chrome_trace(os.path.join(out, "trace.json"))


def leave_figure(name, value, unit=""):
    """A line in the file of runs/gpu.py, if that has started this process."""
    if "QUARTET_FIGURES" in os.environ:
        with open(os.environ["QUARTET_FIGURES"], "a", encoding="utf-8") as f:
            f.write(json.dumps(dict(name=name, value=value, unit=unit)) + "\n")


def profiled(begin, out):
    """Run.begin, with a profiler that is started and stopped as an iteration begins."""
    state = {}

    def begin_and_look(self, iteration):
        if "profiler" in state:
            seconds = sum(self.times.values())
            state["profiler"].stop()
            report(state.pop("profiler"), seconds, out)
        begin(self, iteration)
        if iteration == LOOKED_AT:
            cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            state["profiler"] = profile(activities=[ProfilerActivity.CPU, *cuda])
            state["profiler"].start()

    return begin_and_look


def main(arguments):
    sys.excepthook = errors.report_and_exit
    out = next((x.partition("=")[2] for x in arguments if x.startswith("--out=")), "out/profile")
    os.makedirs(out, exist_ok=True)
    command = [x for x in arguments if not x.startswith("--out=")] or model_of_125m(out)
    run.Run.begin = profiled(run.Run.begin, out)
    sys.argv = [os.path.join(ROOT, command[0]), *command[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
