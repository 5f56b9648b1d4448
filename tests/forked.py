"""
Runs of scripts, described in a JSON file, in forked children: 0.2 s each instead of 4. Not a test, but what tests start, once
for all of them (tiny.forked): each line of stdin is ["cases.json", "results.json", ranks at once], and is answered by a line.

    echo '["cases.json", "results.json", 2]' | python tests/forked.py

A case is {"folder", "runs": [{"script", "ranks": [{"args": [...], "code": "Python to run before the script"}, ...]}, ...]}: runs
one after the other in that folder, each on as many ranks as have an entry. The result of a run is {"codes", "seconds",
"stdout", "stderr"}, with an entry for each rank; that of a case is the list of them. A line may also be the keywords of
campaign.campaign, and "report", the file for what it returns.
"""
import json
import os
import shutil
import signal
import sys

import campaign


def trial(case):
    """For campaign.schedule: the runs of a case, and their results."""
    results = []
    for number, job in enumerate(case["runs"]):
        run = yield campaign.Run((job["script"], len(job["ranks"])), job["ranks"], case["folder"])
        ranks = sorted(run.codes)
        result = dict(codes=[run.codes[r] for r in ranks], seconds=[run.ended[r] - run.began for r in ranks])
        for name in ("stdout", "stderr"):
            result[name] = []
            for rank in ranks:
                file = os.path.join(case["folder"], f"{name}-{rank}")
                with open(file, encoding="utf-8") as f:
                    result[name].append(f.read())
                shutil.move(file, f"{file}-of-run-{number}")
        results.append(result)
    return case["folder"], results


def answer(cases_path, results_path, at_once):
    with open(cases_path, encoding="utf-8") as f:
        cases = json.load(f)
    trials = [(max(len(job["ranks"]) for job in case["runs"]), trial(case)) for case in cases]
    done = dict(campaign.schedule(trials, max([at_once, *(ranks for ranks, _ in trials)])))
    with open(results_path, "w", encoding="utf-8") as f:
        json.dump([done[case["folder"]] for case in cases], f)


def kill_runs(report, **options):
    with open(report, "w", encoding="utf-8") as f:
        json.dump(campaign.campaign(**options), f)


def main():
    campaign.warm()
    os.fsync = lambda fd: None  # the disk itself matters only when the power fails; test_checkpoint.py has the real one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the runs' stdin
    try:
        for line in iter(asked.readline, ""):
            asked_for = json.loads(line)
            kill_runs(**asked_for) if isinstance(asked_for, dict) else answer(*asked_for)
            print("done", flush=True)
    finally:
        for pid in list(campaign.LIVE):
            campaign.end(pid)

if __name__ == "__main__":
    main()
