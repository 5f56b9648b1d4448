"""
dtype = "float16": it rounds gradients below 6e-8 to 0, so the loss is multiplied by a scale: it is
halved after an overflow, doubled after GROWTH steps without one (arXiv 1710.03740).
"""
from errors import say

GROWTH, MOST = 200, 20  # steps until the scale doubles; so many overflows in a row are an error


def overflowed(state, good, iteration):
    """
    Set the scale of the next step in the state of a run. good: this step's gradients are finite.
    Returns whether the step is to be skipped: it has overflowed, and not too often in a row.
    """
    # clean: steps in a row without an overflow; below 0, with one
    clean = state["clean_steps"]
    clean = max(clean, 0) + 1 if good else min(clean, 0) - 1
    factor = 0.5 if not good else 2.0 if clean % GROWTH == 0 else 1.0
    state |= dict(clean_steps=clean, loss_scale=min(state["loss_scale"] * factor, 2.0**24))
    if good or clean <= -MOST:
        return False
    say(f"iteration {iteration}: a float16 gradient overflowed; step skipped")
    return True
