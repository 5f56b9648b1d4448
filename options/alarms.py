"""
What a run warns of when an iteration teaches little: a policy that is broken, and what keeps most
of a batch from teaching. run.py asks when responses do not end, have no reward, or groups are flat.
"""
from errors import say


def say_what_is_wrong(record, state, iteration):
    """
    Say it once, and of what is lost again where it has doubled; state keeps what has been said.
    record: an iteration's figures. state: "finished", the share of responses that ended at first.
    """
    if record.get("policy/steps") == record.get("loss/policy") == 0:
        flat, ends = record.get("objective/flat_groups", 0), record["objective/finished"]
        say(f"iteration {iteration}: nothing to learn: {flat:.0%} of the groups have equal scores, "
            f"{ends:.0%} of the responses ended")
    broken = how_broken(record, state["finished"])
    if broken and not state["broken"]:
        say(f"warning: iteration {iteration}: {broken}")
    state["broken"] = broken
    for name, (share, line) in what_is_lost(record).items():
        if share >= 2 * state["said"].get(name, 0.0):
            state["said"] |= {name: share}
            say(f"warning: iteration {iteration}: {line}")


def how_broken(record, finished):
    """
    "", or in words how the policy of an iteration is broken. Two things must be true: responses do
    not end any more (at most two thirds as many as in the first iteration, `finished`); and the
    policy is 0.3 nats a token away from the reference, or has moved so far in one update. A policy
    that learns does one of the two at most.
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
    """
    {name: (share, line)} of what keeps more than half of an iteration's batch from teaching, with
    the figure and the likely cause: responses that are cut, groups without a difference, responses
    without a reward.
    """
    right, ends = record.get("objective/accuracy"), record["objective/finished"]
    cause = "see 'Groups are flat' in docs/diagnosis.md"
    if right is not None:
        cause = f"{right:.0%} of the answers are right: the prompts are " + (
            "too easy now" if right > 0.5 else
            "too hard, or the reward does not read the answers")
    found = dict(
        cut=(1 - ends, "of the responses are cut at max_new_tokens, and teach where to stop "
             "nowhere: raise it, or see 'Responses grow to the limit' in docs/diagnosis.md"),
        flat=(record.get("objective/flat_groups", 0.0), f"of the groups have equal scores, and "
              f"teach nothing; {cause}"),
        unscored=(1 - record.get("objective/scored", 1.0), "of the responses have no reward: each "
                  "reward function gave None"))
    return {name: (share, f"{share:.0%} {line}") for name, (share, line) in found.items()
            if share > 0.5}
