"""Kill it anywhere, get the same weights: a sample of the fault campaign; campaign.py says how."""
import campaign

JOBS = {"ppo": ("ppo.py", 2, dict(keep_best="score", ppo_epochs=1) | campaign.NEW_HEAD, 2),
        "grpo": ("grpo.py", 2, dict(roles="train=1,generate=1", staleness=1), 2)}
TRIALS = [  # the log is a line ahead of the checkpoint when the launcher dies; the generator alone
    ["ppo", ["line", "launcher", 3, ""]], ["grpo", ["call", 1, 99, "before"]],
    ["ppo", ["call", 0, 60, "behind"], ["call", 0, 40, "before"]]]


def test_killed_runs_end_in_the_same_bits(world, tmp_path):
    """Weights, optimizer states, metrics, and no other file than without the kill."""
    kills, problems = campaign.campaign(world, str(tmp_path), JOBS, only=TRIALS)
    assert kills == 4 and not problems, "\n".join(problems)
