"""
How long it takes to save a sharded model and to go on from it: not a test, but where docs/scale.md has its seconds from.

    python tests/saving_speed.py --folder=/dev/shm/x [--ranks=2] [--times=3]

A random Llama of 111 million parameters in float32 with AdamW's states, 1.3 GB, on ranks of one thread that are joined by
gloo. In turns, one rank writes (each model and each optimizer is one file), and all do (files of 50 MB). The least seconds.
"""
import argparse
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
SHAPE = dict(model_type="llama", vocab_size=4000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
             num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64, tie_word_embeddings=False)


def measure(folder, times):
    """On each rank: build, then save and look through what was saved. Rank 0 prints the seconds."""
    import torch

    from engine import checkpoint, disk, launch, optimizers, placement, together
    from engine.tokenizers import ByteTokenizer
    from model import from_scratch

    rank, ranks, device = launch.init("cpu", 300)
    os.chdir(folder)
    tokenizer = ByteTokenizer(dict(markers=[], eos="<eos>", pad="<pad>"))
    place = placement.Place(stage=3)
    model = from_scratch(SHAPE)
    placement.shard(model, place, device)
    optimizer = optimizers.make_optimizer(model, place, 1e-3, (0.9, 0.95), 1e-8, 0.0)
    for p in model.parameters():
        p.grad = p.detach() * 0.01
    optimizer.step()
    spent = {}

    def timed(owner, name, what):
        """Count the seconds of a function of ours."""
        function = getattr(owner, name)

        def call(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[what] = spent.get(what, 0.0) + time.perf_counter() - began

        setattr(owner, name, call)

    for owner in (disk, checkpoint):
        timed(owner, "whole_on", "put together")
    for name, what in (("save_file", "write"), ("sync", "write"), ("sha256", "hash")):
        timed(disk, name, what)
    size = 3 * 4 * sum(p.numel() for p in model.parameters())
    rows = {"one rank writes": [], "all ranks write": []}
    for _ in range(times):
        for row, limit in (("one rank writes", 10**12), ("all ranks write", 50 * 10**6)):
            disk.FILE_BYTES = limit
            together.from_rank(lambda: shutil.rmtree("out", ignore_errors=True))
            together.from_rank(lambda: os.mkdir("out"))
            together.from_rank(lambda: open("out/config.json", "w").close())
            spent.clear()
            began = time.perf_counter()
            checkpoint.save_checkpoint("out", 1, {"policy": model}, {"policy": optimizer}, {}, tokenizer, 1)
            saved = dict(spent, save=time.perf_counter() - began)
            together.from_rank(lambda: None)
            began = time.perf_counter()
            found, _ = checkpoint.find_checkpoint("out")
            saved["verify"] = time.perf_counter() - began
            began = time.perf_counter()
            checkpoint.load_checkpoint(found, {"policy": model}, {"policy": optimizer})
            saved["load"] = time.perf_counter() - began
            rows[row].append(saved)
    if rank == 0:
        print(f"{size / 1e6:.0f} MB, {ranks} ranks; seconds on rank 0, the least of {times}")
        for row, each in rows.items():
            best = {what: min(one[what] for one in each) for what in each[0]}
            print(f"{row}: " + ", ".join(f"{what} {seconds:.2f}" for what, seconds in best.items())
                  + f"; save {size / 1e6 / best['save']:.0f} MB/s, verify {size / 1e6 / best['verify']:.0f} MB/s")
        shutil.rmtree("out")
    torch.distributed.barrier()
    launch.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].strip())
    parser.add_argument("--folder", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=3)
    keys = parser.parse_args()
    if "RANK" in os.environ:
        measure(keys.folder, keys.times)
        return
    os.makedirs(keys.folder, exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={keys.ranks}"]
    sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv],
                            env=os.environ | dict(OMP_NUM_THREADS="1")).returncode)

if __name__ == "__main__":
    main()
