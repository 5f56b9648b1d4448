"""
dtype = "bfloat16" and "float16": the weights are kept in 32 bits, and autocast rounds each matrix
when it is used. What is used often is rounded once. And the scale of the loss in float16, which
rounds gradients below 6e-8 to 0: it is halved after an overflow, doubled after GROWTH steps without
one (arXiv 1710.03740).
"""
import copy

import torch
import torch.nn as nn

from errors import BadInput, say

GROWTH, MOST = 200, 20  # steps until the scale doubles; so many overflows in a row are an error


def weights_of_16_bits(system):
    """load.dtypes with master_weights = False: all bfloat16, and no autocast. Raises BadInput."""
    if system.dtype != "bfloat16":
        raise BadInput("master_weights = False: the weights themselves are trained in 16 bits; "
                       "type --dtype=bfloat16")
    return torch.bfloat16, None


def matrices_of(model):
    """
    The parameters that autocast rounds wherever they are used: the matrices, but not the table of
    embeddings, the biases of experts, the decays of states (A_log), matrices that the family keeps
    in 32 bits (routers), a scalar head.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    wide = {id(p) for m in tables for p in m.parameters()}
    if model.head == "scalar":
        wide.add(id(model.hf.score.weight))
    kept = ("bias", "A_log", *(model.hf._keep_in_fp32_modules_strict or ()))
    return [p for name, p in model.named_parameters()
            if p.dim() >= 2 and id(p) not in wide and not any(part in name for part in kept)]


def round_matrices(model, dtype):
    """Round the matrices of a model that is frozen: the results are the same, in less memory."""
    for p in matrices_of(model):
        p.data = p.data.to(dtype)


def rounded_copy(policy, dtype):
    """A copy of a policy, with rounded matrices: autocast would round them at every token."""
    # deepcopy copies the modules; their buffers and parameters it takes from `memo`
    memo, rounded = {id(t): t for t in policy.buffers()}, {id(p) for p in matrices_of(policy)}
    memo[id(policy.tokenizer)] = policy.tokenizer
    for p in policy.parameters():
        t = p.detach().to(dtype if id(p) in rounded else p.dtype)
        memo[id(p)] = nn.Parameter(t, requires_grad=False)
    decoder = copy.deepcopy(policy, memo)
    head = decoder.hf.get_output_embeddings()
    if head.weight is decoder.hf.get_input_embeddings().weight:  # tied: only the head is rounded
        head.weight = nn.Parameter(head.weight.to(dtype), requires_grad=False)
    return decoder


def overflowed(run, good):
    """
    Set the scale of a run's next step. good: this step's gradients are finite. Returns whether the
    step is to be skipped: it has overflowed, and not too often in a row.
    """
    state = run.state
    # clean: steps in a row without an overflow; below 0, with one
    clean = state["run/clean_steps"]
    clean = max(clean, 0) + 1 if good else min(clean, 0) - 1
    factor = 0.5 if not good else 2.0 if clean % GROWTH == 0 else 1.0
    scale = min(state["run/loss_scale"] * factor, 2.0**24)
    state |= {"run/clean_steps": clean, "run/loss_scale": scale}
    if good or clean <= -MOST:
        return False
    say(f"iteration {run.iteration}: a float16 gradient overflowed; step skipped")
    return True
