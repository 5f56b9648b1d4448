"""
How well a newly drawn value head predicts scores whose size changes: explained variances of ppo.py
with value_init=policy, on a random model with a width of 16, while the policy stands still.

python evidence/value_unit.py                     # all cases: two minutes on one core
python evidence/value_unit.py "first 0.02" --cliprange_value=0
python evidence/value_unit.py --unit=1            # the same with a unit that is 1 for ever
python evidence/value_unit.py search sums         # whole runs, whose policy learns

A prompt says its score: those with an a in them score 1, the others 0; and in a case's first
iterations the scores are others. "n" is the number of an iteration, "i" that of a response. The
whole runs begin where `bash runs/search.sh` and `CPU=1 bash runs/smollm2.sh` have done their SFT.
"""
import os
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a tiny model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, f"{ROOT}/tests", f"{ROOT}/data"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHOWN = 1, 3, 10, 24  # iterations
CASES = {  # name: the score of a response, where known is 0 or 1
    "typical": "known",
    "times 0.01": "known * 0.01",
    "times 100": "known * 100",
    "first 0.02": "known if n else 0.02 * (i == 5)",
    "first 0": "1000 * known if n > 2 else 0",
    "rare 100": "100 * known * (n > 4 or i == 5)",
    "8 to 96 %": "1.0 * (share < 0.08 + 0.88 * n / 24)",
    "outlier first": "1e4 if n == 0 and i == 5 else 2 * known - 1",
    "outlier first, 0 or 1": "1e4 if n == 0 and i == 5 else known",
    "outlier among ones": "1e4 if n == 0 and i == 5 else known if n else 1",
    "outlier later": "1e4 if n == 14 and i == 5 else known"}
REWARD = """
import zlib

n = -1

def reward(batch):
    global n
    n += 1
    scores = []
    for i, row in enumerate(batch["rows"]):
        known = float("a" in row["prompt"])
        share = (ord(row["prompt"][-1]) - ord("a")) / 26
        scores.append(float(CASE))
    return scores
"""
RUNS = {  # name: a config of whole runs, and the keys that differ
    "search": ("search_ppo", dict()),
    "sums": ("smollm2_ppo", dict(
        policy_path="out/sums_sft/policy", prompts_path="data/sums/rl_train.jsonl", batch_size=64,
        max_new_tokens=48, ppo_epochs=1, num_minibatches=4, micro_batch_tokens=1024, lora=16,
        kl_coef=0.01, learning_rate=1e-4, warmup_iters=2, value_learning_rate=1e-3,
        dtype="float32"))}
KEYS = dict(
    device_type="cpu", dtype="float32", batch_size=64, micro_batch_size=64, max_new_tokens=2,
    max_iters=25, kl_coef=0, missing_eos_penalty=0, learning_rate=1e-12, value_init="policy",
    value_learning_rate=3e-3, value_lr_decay="constant", checkpoint_interval=0)


def typed_for(case, folder):
    """What is typed for a case; what it needs is written into the folder."""
    from tiny import jsonl, save_random, typed, write

    if case in RUNS:
        config, keys = RUNS[case]
        keys = keys | dict(eval_path="", checkpoint_interval=0, max_iters=25)
        return [f"config/{config}.py", *typed(keys)]
    save_random(f"{folder}/policy")
    rows = [dict(prompt=f"{start}{letter}") for letter in LETTERS for start in ("ac", "bd")]
    reward = write(f"{folder}/reward.py", REWARD.replace("CASE", CASES[case]))
    return typed(KEYS | dict(policy_path=f"{folder}/policy", reward_functions=f"{reward}:reward",
                             prompts_path=jsonl(f"{folder}/prompts.jsonl", rows * 9)))


def run(case, more, unit_1):
    """The records of a run's log. unit_1: the unit of its value model stays 1."""
    from tiny import Started, read_jsonl

    def before(rank):
        from model import Model

        os.chdir(ROOT)  # the whole runs' paths begin there
        if unit_1:
            Model.update_unit = lambda self, scores, state: self.unit

    with tempfile.TemporaryDirectory() as folder:
        argv = [*typed_for(case, folder), *more, f"--out_dir={folder}/out"]
        result = Started("ppo.py", argv, folder, before=before).wait(3 * 3600)
        if result.codes != [0]:
            sys.exit(f"{case}: {result.err[0]}")
        return read_jsonl(f"{folder}/out/log.jsonl")


if __name__ == "__main__":
    named = [a for a in sys.argv[1:] if not a.startswith("--")] or CASES
    more = [a for a in sys.argv[1:] if a.startswith("--") and a != "--unit=1"]
    print(f"{'explained variance at':<22}" + "".join(f"{n:>9}" for n in SHOWN) + "   units")
    for case in named:
        log = [record for record in run(case, more, "--unit=1" in sys.argv) if "val/unit" in record]
        shown = [log[n]["val/explained_variance"] for n in SHOWN if n < len(log)]
        units = [record["val/unit"] for record in log]
        print(f"{case:<22}" + "".join(f"{x:9.2f}" for x in shown) + "   "
              + " ".join(f"{n}:{u:g}" for n, u in enumerate(units)
                         if n == 0 or u != units[n - 1]), flush=True)
