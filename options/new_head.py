"""
A newly drawn value head (value_init=policy, shared) has a unit: value = unit * linear. It follows
the scores, so that the head learns scores of 0.01 as fast as scores of 100.
"""
import math
import statistics

import torch


@torch.no_grad()
def update_unit(model, scores, state):
    """
    Give the value model the unit for a batch with these scores (B,), before its values are read.
    Returns the unit in which the batch's loss counts: that one, unless the batch is odd. state:
    run.state, which keeps the unit and what it follows.

    The unit is a power of two near the deviation of the scores. It changes when the deviation
    leaves [unit / 2, 2 * unit]. Then the head is divided by as much as the unit is multiplied by,
    so that no value jumps (PopArt, arXiv 1602.07714, 2.2). By a power of two that is exact in every
    dtype.

    PopArt follows a mean, too: here is none. And its moments are here the median of the last five
    batches' deviations, so that a single batch decides nothing. Until three deviations are there,
    each quarter of a batch gives one, so that a single score decides nothing, either. Equal scores
    have no deviation.

    The optimizer's state stays as it is. The loss counts in units, so the head's gradient is
    (value - return) / unit * state of the trunk. Its size does not depend on that of the scores,
    once the unit has followed them. So AdamW's mean of its squares, exp_avg_sq, still fits.

    One score of 1e4 among scores of 1 would spoil that mean for hundreds of steps: they would be
    too small to learn anything. So the loss of a batch whose deviation is above 16 units counts in
    this deviation: the batch teaches next to nothing, and does no harm.
    """
    deviations, unit = state.get("value_deviations", []), model.unit
    quarters = 1 if len(deviations) > 2 else min(4, len(scores) // 2) or 1
    found = [x.std(correction=0).item() for x in scores.double().tensor_split(quarters)]
    rounding = 1e-6 * scores.abs().max().item()
    deviations = (deviations + [x for x in found if x > rounding])[-5:]
    deviation = statistics.median_low(deviations) if len(deviations) > 2 else unit
    if not unit / 2 <= deviation <= unit * 2:
        model.unit = 2.0 ** round(math.log2(deviation))
        if "value_unit" in state:  # otherwise no value has been read: this is the first batch
            model.hf.score.weight.mul_(unit / model.unit)
    state |= dict(value_unit=model.unit, value_deviations=deviations)
    deviation = scores.double().std(correction=0).item()
    return deviation if deviation > 16 * model.unit else model.unit
