"""Rewards that do not apply to some responses (None), and a reward that fails, in runs. (By hand: test_by_hand.py.)"""
import math

import tiny

MINE = """
import os

def sometimes(prompts, completions, **columns):  # every third length, and every prompt that begins with 1, has no score
    return [None if len(text) % 3 == 0 or prompt[0] == "1" else len(text) / 8 for prompt, text in zip(prompts, completions)]

calls = 0

def down(batch):  # the server is gone in the third call: the first evaluation and a rollout are over
    global calls
    calls += 1
    if calls > 2 and os.path.exists("../nobody-answers"):
        raise ConnectionRefusedError("nobody is there")
    return [len(text) / 8 for text in batch["completions"]]
"""


def test_runs(tmp_path):
    """Scores that are missing, in PPO. A grader that is down saves the run, which then goes on as if nothing was."""
    (tmp_path / "world").mkdir()
    world = tiny.build(str(tmp_path / "world"))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "nobody-answers").write_text("")
    mine = f"{tmp_path}/mine.py"
    down = world.grpo("out", reward_functions=f"{mine}:down", reward_timeout=1)
    jobs = {
        "ppo": tiny.one_run("ppo.py", world.ppo("out", reward_functions=f"{mine}:sometimes", value_init="policy",
                                                missing_eos_penalty=0, scale_scores="running")),
        "down": tiny.one_run("grpo.py", down),
    }
    done = {name: outcome for name, (outcome,) in tiny.in_a_row(tmp_path, jobs).items()}
    assert not done["ppo"]["kind"], done["ppo"]
    log = tiny.read_log(tmp_path / "ppo" / "out")
    assert all(math.isfinite(x) for record in log for x in record.values() if isinstance(x, float))
    assert tiny.distance(world.policy, f"{tmp_path}/ppo/out/policy") > 1e-4
    assert all(0 < record["objective/scored"] < 1 for record in log[:-1])
    assert "the reward 'sometimes' gives None for " in done["ppo"]["stdout"]
    said = done["down"]["message"]
    assert done["down"]["kind"] == "Stop" and said.startswith(f"reward 'down' failed at {mine}, line ")
    assert "nobody is there" in said
    assert (tmp_path / "down" / "out" / "checkpoint-000001").is_dir()

    (tmp_path / "nobody-answers").unlink()
    jobs = dict(again=tiny.one_run("grpo.py", down) | dict(folder="down"), steady=tiny.one_run("grpo.py", down))
    for name, (outcome,) in tiny.in_a_row(tmp_path, jobs).items():
        assert not outcome["kind"], (name, outcome)
    logs = [[tiny.measured(record) for record in tiny.read_log(tmp_path / name / "out")] for name in ("down", "steady")]
    assert logs[0] == logs[1] and len(logs[0]) == 4
    assert tiny.distance(f"{tmp_path}/down/out/policy", f"{tmp_path}/steady/out/policy") == 0
