"""
Rows by which the toy's model learns to use a solution that stands before a prompt: it repeats it.
recipes/self_distillation.diff needs a model that can.

    python data/arithmetic/hints.py        # after prepare.py; writes sft_hints.jsonl beside itself
"""
import json
import os

HERE = os.path.dirname(os.path.abspath(__file__))

if __name__ == "__main__":
    with open(os.path.join(HERE, "sft_train.jsonl"), encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    rows = [row for row in rows if row["completion"].startswith("<think>")]  # these are right
    with open(os.path.join(HERE, "sft_hints.jsonl"), "w", encoding="utf-8") as f:
        for row in rows:
            row["prompt"] = f"{row['completion']}\n{row['prompt']}"
            f.write(json.dumps(row) + "\n")
    print(f"sft_hints.jsonl: {len(rows)} rows")
