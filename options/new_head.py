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
    state: run.state, which keeps the unit and what it follows.

    The unit is a power of two near the deviation of the scores, and changes where this leaves
    [unit / 2, 2 * unit]. Then the head is divided by as much as the unit is multiplied by, so that
    no value jumps (PopArt, arXiv 1602.07714, 2.2): by a power of two that is exact in every dtype.
    Here PopArt's mean is left out, and its moments are a median: of the deviations of five batches,
    so that one odd batch decides nothing. While fewer than three are known, each quarter of a batch
    is one: nor does one odd score. Equal scores have none.

    The optimizer's state stays as it is. The loss counts in units, so the head's gradient,
    (value - return) / unit * state of the trunk, is as large for scores of any size, once the unit
    has followed them: what AdamW has measured of it, exp_avg_sq, is right behind the change, too.
    And a step, exp_avg / sqrt(exp_avg_sq), is the same if the two are divided by x and x^2.
    """
    known, unit = state.get("value_deviations", []), model.unit
    parts = scores.double().tensor_split(1 if len(known) > 2 else min(4, len(scores) // 2) or 1)
    found = [part.std(correction=0).item() for part in parts]
    rounding = 1e-6 * scores.abs().max().item()
    known = (known + [x for x in found if x > rounding])[-5:]
    deviation = statistics.median_low(known) if len(known) > 2 else unit
    if not unit / 2 <= deviation <= unit * 2:
        model.unit = 2.0 ** round(math.log2(deviation))
        if "value_unit" in state:  # else this is the first batch, and no value is read yet
            model.hf.score.weight.mul_(unit / model.unit)
    state |= dict(value_unit=model.unit, value_deviations=known)
