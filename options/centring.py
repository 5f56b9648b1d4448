"""
A reward model that rm.py has not trained: its settings have no score_shift. rewards.center_scores
asks here for one.
"""
from errors import say
from ranks import this_rank


def center(state, reward_model, value_model, first_batch):
    """
    A collective: the responses of iteration 0 that ended (if none did, all) score 0 on average (N+
    detail 13). Training on pairs only fixes differences: a model of others may score 15 on average.
    Then the -1 of a response that never ends would be the worst by far, and a new value model begin
    15 too low. state keeps the shift, value_model gets it, too.
    """
    if this_rank.role != "train":
        return
    if state.get("score_shift") is None:
        batch = first_batch()  # COLLECTIVE
        scores, finished = batch["reward/reward_model"], batch["finished"]  # (B,) each
        mean = (scores[finished] if finished.any() else scores).double().mean().item()
        say(f"the reward model scores {mean:.3f} on average at first; this becomes 0")
        state["score_shift"] = -mean
    for model in filter(None, (reward_model, value_model)):
        model.score_shift = state["score_shift"]
