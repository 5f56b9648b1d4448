"""
The table and the picture of runs/ensembles.sh, from the logs that it has left: the true accuracy
against the KL, which is how far the policy has gone from the reward models' pairs.

    python runs/ensembles.py [folder of the runs] [picture]
"""
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from engine.curves import empty_picture, read_records, save_picture  # noqa: E402
from errors import BadInput, report_and_exit  # noqa: E402

KINDS = {"one": "one reward model", "mean": "three: mean", "min": "three: min",
         "penalised": "three: mean - std"}

sys.excepthook = report_and_exit
folder, picture = (sys.argv[1:] + ["out/ensembles", "out/ensembles.png"][len(sys.argv) - 1:])[:2]


def evaluations(kind, seed):
    """(KL, accuracy, learned score, spread of the models) of each evaluation of a run."""
    records = read_records(os.path.join(folder, f"{kind}_{seed}", "log.jsonl"))
    return [(r["eval/kl"], r["eval/accuracy"], r["eval/scores"], r.get("eval/reward_model_std"))
            for r in records if "eval/kl" in r]


# the seeds of which all runs are there
found = os.listdir(folder) if os.path.isdir(folder) else []
seeds = sorted(name.removeprefix("one_") for name in found if name.startswith("one_"))
seeds = [seed for seed in seeds
         if all(os.path.isdir(os.path.join(folder, f"{kind}_{seed}", "policy")) for kind in KINDS)]
if not seeds:
    raise BadInput(f"{folder} has no finished runs; first: bash runs/ensembles.sh")
print(f"seeds: {', '.join(seeds)}")
runs = {kind: [evaluations(kind, seed) for seed in seeds] for kind in KINDS}
print("| what counts | best accuracy | at the end | KL there | learned score | models apart |")
print("|---|---|---|---|---|---|")
for kind, title in KINDS.items():
    best = [max(accuracy for _, accuracy, _, _ in run) for run in runs[kind]]
    kl, end, score, apart = zip(*(run[-1] for run in runs[kind]), strict=True)
    each = [", ".join(f"{x:.1%}" for x in xs) for xs in (best, end)]
    spread = "-" if apart[0] is None else f"{statistics.mean(apart):.2f}"
    print(f"| {title} | **{statistics.mean(best):.1%}** ({each[0]}) | {statistics.mean(end):.1%} "
          f"({each[1]}) | {statistics.mean(kl):.1f} | {statistics.mean(score):.2f} | {spread} |")

if picture:
    figure, axes = empty_picture(1, 1, 6.4, 4.0)
    axis = axes[0, 0]
    for number, (kind, title) in enumerate(KINDS.items()):
        for seed, run in zip(seeds, runs[kind], strict=True):
            axis.plot([kl for kl, *_ in run], [100 * accuracy for _, accuracy, *_ in run],
                      color=f"C{number}", marker="o", markersize=3, linewidth=1.5, alpha=0.8,
                      label=title if seed == seeds[0] else None)
    axis.set_xlabel("KL to the SFT model (nats a response)")
    axis.set_ylabel("true accuracy (%)")
    axis.legend(fontsize=9, frameon=False)
    save_picture(figure, axes, picture)
    print(f"saved {picture}")
