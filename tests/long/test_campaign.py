"""Kill it anywhere, get the same weights: a sample of the fault campaign; campaign.py says how."""
import campaign

JOBS = {"ppo": ("ppo.py", 2, dict(keep_best=True, max_iters=2), 1),
        "grpo": ("grpo.py", 2, dict(roles="train=1,generate=1", staleness=1, max_iters=2), 1)}


def test_killed_runs_end_in_the_same_bits(world, tmp_path):
    """Weights, optimizer states, metrics, and no other file than without the kill."""
    kills, problems = campaign.campaign(world, str(tmp_path), JOBS, kills=4, seed=4)
    assert kills >= 4 and not problems, "\n".join(problems)
