"""The key keep_best: out_dir/best_policy is the policy of the best evaluation so far."""
import os

from errors import BadInput
import options.cards  # noqa: F401  it writes the figure of the best policy beside it
from options.again import about_model
from parallel import alone


def save_if_best(run, figures, batch):
    """A collective: save the policy if figures are better than the folder's. Raises BadInput."""
    by = run.system.keep_best
    name = by.removeprefix("-")
    if by.startswith(("eval/kl", "eval/failed_calls", "eval/environment_share")):
        raise BadInput(f"keep_best = {by!r} would keep the policy with the most of it; type "
                       f"--keep_best=-{by}, which keeps the one with the least")
    folder, best = os.path.join(run.out_dir, "best_policy"), None
    if run.iteration > 0:
        best = alone(lambda: about_model(folder).get("figures", {})).get(name)  # COLLECTIVE
    now = figures.get(name)
    if best is None and name not in figures:
        raise BadInput(f"keep_best = {by!r}: wanted {', '.join(figures)}; of those with a - in "
                       "front the least")
    # of a reward that did not apply to any response this time there is no figure
    column = "scores" if name == "score" else name.removeprefix("eval/")
    if now is None or column in batch and batch[column].isnan().all():
        return
    sign = -1 if by != name else 1
    if best is None or sign * (now - best) > 1e-6 * abs(best):
        run.save_model("best_policy", run.models["policy"], figures)  # COLLECTIVE
