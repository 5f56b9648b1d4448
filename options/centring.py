"""
A reward model that rm.py has not trained: its settings have no score_shift. options/ahead.py asks
here for one before the run's first evaluation or rollout.
"""
from errors import say
from rewards import add_scores


def center(ahead):
    """
    A collective of the ranks that train: give the reward model a score_shift. The responses of
    iteration 0 that ended (if none did, all) score 0 on average (N+ detail 13). Training on pairs
    only fixes differences: a model of others may score 15 on average. Then the -1 of a response
    that never ends would be the worst by far, and a value model that starts as the reward model
    would begin 15 too high; so it gets the shift, too. run.state keeps it.

    The batch of iteration 0 is sampled and scored for this. ahead: an Ahead, which hands it out
    when its turn comes. With roles, too, it is the trainers' own, also where a run resumes.
    """
    run = ahead.run
    models = [run.models["reward_model"]]
    if ahead.config.get("value_init") == "reward":
        models.append(run.models["value_model"])
    shift = run.state.get("score_shift")  # a run that resumes knows it

    def set_shift(shift):
        for model in models:
            model.score_shift = shift
        run.state["score_shift"] = models[0].hf.config.score_shift = shift

    if shift is not None:
        set_shift(shift)
    if run.iteration == 0:
        batch = ahead.rollout_now("rollout", 0, ahead.rows, ahead.rows_of(0))  # COLLECTIVE
        ahead.batches[0], ahead.version[0] = batch, 0
    if shift is None:
        scores, finished = batch["reward/reward_model"], batch["finished"]  # (B,) each
        mean = (scores[finished] if finished.any() else scores).double().mean().item()
        say(f"the reward model scores {mean:.3f} on average at first; this becomes 0")
        set_shift(-mean)
        batch["reward/reward_model"] = scores - mean
        add_scores(batch, ahead.terms)
