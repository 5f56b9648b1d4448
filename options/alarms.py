"""
What a run warns of when an iteration teaches little: a policy that is broken, what keeps most of a
batch from teaching, and a policy without a gradient.
"""
from errors import say


def say_what_is_wrong(record, state, iteration, batch=None):
    """
    Say it once, in one line. record: an iteration's figures. state: the run's; "run/finished" is
    the share of responses that ended at first.
    """
    broken, lost = how_broken(record, state["run/finished"]), what_is_lost(record)
    if batch and has_no_gradient(record, state, batch):
        lost["gradient"] = (
            "the policy's gradient is exactly 0, though responses have advantages: in a page that "
            "was changed, look for old_logprobs that are the policy's own of this step (they need "
            ".detach()), or for a loss that does not reach the policy")
    lost = {name: line for name, line in lost.items() if name not in state["run/said"]}
    # a policy that is broken loses the rest, too
    parts = [broken] if broken and not state["run/broken"] else [*lost.values()]
    state["run/broken"] = broken
    state["run/said"] = [*state["run/said"], *lost]
    warning, nothing = "warning: " * bool(parts), ""
    if record.get("policy/steps") == record.get("loss/policy") == 0:
        nothing = "nothing to learn: "
        flat, ends = record.get("objective/flat_groups", 0), record["objective/finished"]
        parts = parts or [f"{flat:.0%} of the groups have equal scores, {ends:.0%} of the "
                          "responses ended"]
    if parts:
        say(f"{warning}iteration {iteration}: {nothing}{'; '.join(parts)}")


def has_no_gradient(record, state, batch):
    """Whether the last gradient was 0 where trained tokens have advantages, and no clip took it."""
    if state["run/clean_steps"] < 0:  # a float16 gradient that overflowed has no norm
        return False
    figures = [record.get(f"policy/{name}", 1) for name in ("grad_norm", "clipfrac")]
    trained = batch.get("counted", batch["response_mask"]) & (batch.get("advantages", 0) != 0)
    return figures == [0, 0] and record.get("policy/steps", 0) > 0 and bool(trained.any())


def how_broken(record, finished):
    """
    "", or in words how the policy is broken: at most two thirds as many responses end as in the
    first iteration, `finished`; and it is 0.3 nats a token from the reference, or moved so far now.
    """
    kl, ends = record.get("objective/kl"), record["objective/finished"]
    moved = max((kl or 0) / max(record["objective/length"], 1),
                record.get("policy/approx_kl", 0))
    if not moved > 0.3 or ends > finished * 2 / 3:
        return ""
    far = f"its KL is {kl:.3g} nats, " if kl is not None else ""
    return (f"the policy is broken: {far}{ends:.0%} of its responses end, {finished:.0%} did at "
            "first. See 'KL runs away' in docs/diagnosis.md: mostly the learning rate is too large")


def what_is_lost(record):
    """{name: line} of what keeps more than half of an iteration's batch from teaching."""
    flat, scored = record.get("objective/flat_groups", 0.0), record.get("objective/scored", 1.0)
    right = record.get("objective/accuracy")  # near 1 the prompts are too easy, near 0 too hard
    figure = f"{right:.0%} of the answers are right; " if right is not None else ""
    if record.get("objective/score_std") == 0:
        figure = f"all scores of the batch are equal; {figure}"
    found = dict(
        cut=(1 - record["objective/finished"], "of the responses are cut at max_new_tokens, and "
             "teach where to stop nowhere: raise it, or see 'Responses grow to the limit' in "
             "docs/diagnosis.md"),
        # groups without rewards are flat, too
        flat=(flat * (scored > 0.5), f"of the groups have equal scores, and teach nothing: {figure}"
              "see 'Groups are flat' in docs/diagnosis.md"),
        unscored=(1 - scored, "of the responses have no reward: each reward function gave None"))
    return {name: f"{share:.0%} {line}" for name, (share, line) in found.items() if share > 0.5}
