"""
quartet on the models of a folder: sampling, or iterations of ppo.py or grpo.py. One line of JSON.

python runs/peers/quartet.py decode FOLDER STEPS
python runs/peers/quartet.py ppo FOLDER STEPS [--key=value ...]

STEPS are counted after two to warm up. It prints the lengths of responses, and seconds by phase.
"""
import os
import runpy
import statistics
import sys
import tempfile

from stopwatch import Stopwatch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
WARM_UP, PROMPTS, NEW = 2, 32, 128

import engine  # noqa: E402, F401, before torch: it notes which CPUs this process may use


def decode(folder, steps):
    """Sample PROMPTS responses of NEW tokens."""
    import torch

    from model import freeze, load_model
    from rollout import generate

    policy = freeze(load_model(os.path.join(folder, "policy")))
    prompts = torch.randint(0, policy.config.vocab_size - 2, (PROMPTS, 32),
                            generator=torch.Generator().manual_seed(0)).tolist()
    watch = Stopwatch()
    watch.click()
    for _ in range(WARM_UP + steps):
        out = generate(policy, prompts, NEW)
        watch.click()
    watch.report(WARM_UP, length=out["response_mask"].sum(1).double().mean().item())


def iterations(script, folder, steps, more):
    """Run a script in this process, and click its stopwatch whenever it logs an iteration."""
    import engine.run

    watch, records, write_log = Stopwatch(), [], engine.run.write_log

    def write(out_dir, record):
        write_log(out_dir, record)
        records.append(record)
        watch.click()

    engine.run.write_log = write
    with tempfile.TemporaryDirectory() as scratch:
        rule = os.path.join(scratch, "rule.py")  # any score that differs within a group
        with open(rule, "w", encoding="utf-8") as f:
            f.write("def score(batch):\n    rows = zip(batch['tokens'], batch['response_mask'])\n"
                    f"    return [sum(t[-{NEW}:][m].tolist()) % 7 / 7 for t, m in rows]\n")
        keys = dict(
            out_dir=os.path.join(scratch, "run"), policy_path=os.path.join(folder, "policy"),
            reward_path=os.path.join(folder, "reward_model"),
            prompts_path=os.path.join(folder, "prompts.jsonl"), batch_size=PROMPTS,
            max_new_tokens=NEW, temperature=1.0, max_iters=WARM_UP + steps, learning_rate=1e-5,
            checkpoint_interval=0, device_type="cpu")
        keys |= {"ppo": dict(ppo_epochs=4, kl_coef=0.05),
                 "grpo": dict(group_size=4, kl_coef=0.04, reward_functions=f"{rule}:score")}[script]
        file = os.path.join(ROOT, f"{script}.py")
        sys.argv = [file, *(f"--{key}={value}" for key, value in keys.items()), *more]
        said, sys.stdout = sys.stdout, open(os.devnull, "w", encoding="utf-8")
        try:
            runpy.run_path(file, run_name="__main__")
        finally:
            sys.stdout = said
    records = records[:-1]  # the last one only evaluates
    watch.clicks.pop()
    phases = {phase: statistics.median(r[f"time/{phase}"] for r in records[WARM_UP:])
              for phase in ("rollout", "score", "update")}
    # an iteration ends with its record: the first click is the end of the first iteration
    length = statistics.mean(r["objective/length"] for r in records[WARM_UP:])
    watch.report(WARM_UP - 1, length=length, **phases)


if __name__ == "__main__":
    kind, models, count = sys.argv[1], os.path.abspath(sys.argv[2]), int(sys.argv[3])
    if kind == "decode":
        decode(models, count)
    else:
        iterations(kind, models, count, sys.argv[4:])
