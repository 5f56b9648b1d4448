"""The key keep_best: out_dir/best_policy is the policy of the best evaluation so far."""
from checkpoint import save_final
from errors import BadInput


def save_if_best(run, figures):
    """A collective: save the policy of a run if these figures are the best so far."""
    if is_best(figures, run.system.keep_best, run.state):
        save_final(  # COLLECTIVE
            run.out_dir, "best_policy", run.models["policy"], run.system.save_dtype)


def is_best(figures, by, state):
    """
    Whether an evaluation is the best so far, by one of its figures, {name: number}. state: the
    run's, which keeps the best one, and by which figure it is. Raises BadInput.
    """
    best = state.get("best_score") if state.get("best_by", by) == by else None
    if best is None and by not in figures:
        raise BadInput(f"keep_best = {by!r}: wanted {', '.join(figures)}")
    now = figures.get(by)  # None: no reward applied to a response of that source, this time
    better = now is not None and (best is None or now - best > 1e-6 * abs(best))
    if better:
        state |= dict(best_score=now, best_by=by)
    return better
