"""
Rewards -> advantages, without a Python loop over time.

Generalised advantage estimation (Schulman et al., arXiv 1506.02438, equation 16) is the recurrence

    delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}

run backwards. The usual loop takes T steps of tiny operations. But with c = gamma lam constant, A = delta @ L where
L[j, i] = c^(j-i) for j >= i: a triangular matrix product, done here in blocks, for the whole L would be T x T.
"""
import torch

BLOCK = 64  # steps in a block: the triangular product costs BLOCK multiplications a step, the recursion runs log_BLOCK(T) deep


@torch.no_grad()  # advantages and returns are targets: nothing flows back through them
def compute_gae(rewards, values, response_mask, gamma, lam):
    """
    Advantages and returns of a batch of responses.

    rewards, values: (B, R) float; values[:, t] is V of the state before token t was chosen. response_mask: (B, R) bool, True
    where the policy sampled the token. gamma: discount a token; lam: the lambda of GAE; both in [0, 1].
    Returns advantages, returns = advantages + values, both (B, R), 0 where the mask is False.

    The episode is the sequence of True positions: its last one is terminal (V after it is 0), and a gap (a tool's output,
    say) is skipped: the value and advantage of the next sampled token carry over it, undiscounted. Nothing under the mask
    can matter, not even NaN. Half precision is computed in float32.
    """
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    B, R = rewards.shape
    # squeeze the gaps out: sampled token number n of a row moves to column n, everything else to the spare column R
    number = response_mask.long().cumsum(1) - 1  # (B, R)
    column = number.masked_fill(~response_mask, R)
    squeezed = torch.zeros(2, B, R + 1, dtype=dtype, device=rewards.device)
    squeezed[0].scatter_(1, column, torch.where(response_mask, rewards.to(dtype), 0))
    squeezed[1].scatter_(1, column, torch.where(response_mask, values.to(dtype), 0))
    r, v = squeezed[0, :, :R], squeezed[1]  # the spare column holds zeros: V after the last token is 0
    delta = r + gamma * v[:, 1:] - v[:, :R]
    advantages = reverse_discounted_sum(delta, gamma * lam)
    advantages = torch.where(response_mask, advantages.gather(1, number.clamp(min=0)), 0)
    return advantages, torch.where(response_mask, advantages + values.to(dtype), 0)


def reverse_discounted_sum(x, c):
    """y_t = x_t + c y_{t+1} along the last dimension of x (B, T), for a constant c in [0, 1]."""
    B, T = x.shape
    if T <= BLOCK:
        return x @ discount_matrix(T, c, x)
    blocks = -(-T // BLOCK)
    x = torch.nn.functional.pad(x, (0, blocks * BLOCK - T)).view(B, blocks, BLOCK)
    y = x @ discount_matrix(BLOCK, c, x)  # (B, blocks, BLOCK): right within each block
    # What flows into a block is c^k times the first entry of the next one, which follows the same recurrence a level up.
    heads = reverse_discounted_sum(y[:, :, 0], c**BLOCK)  # (B, blocks): the true first entries
    inflow = torch.nn.functional.pad(heads[:, 1:], (0, 1))  # (B, blocks)
    distance = torch.arange(BLOCK, 0, -1, device=x.device, dtype=x.dtype)
    y = torch.addcmul(y, inflow[:, :, None], torch.pow(c, distance))
    return y.view(B, blocks * BLOCK)[:, :T]


def discount_matrix(n, c, like):
    """L (n, n) with L[j, i] = c^(j - i) for j >= i, else 0. Only powers >= 0: c^-4096 would overflow."""
    i = torch.arange(n, device=like.device, dtype=like.dtype)
    power = i[:, None] - i[None, :]
    return torch.where(power >= 0, torch.pow(c, power.clamp(min=0)), 0)
