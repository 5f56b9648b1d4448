"""grpo.py's key max_refills: other prompts in the place of those whose groups teach nothing."""
import torch

from groups import summarize_groups
from metrics import summarize
from prompts import number_of


def refill(batch, flat, find_flat, shape_scores, group_size, rows, row_numbers, rollout, seed,
           iteration, attempts, pad_id, reward_names):
    """
    A collective: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). A group is flat if all of
    its scores are equal: its advantages are 0, and it teaches nothing. The group of another prompt
    takes its place, up to so many attempts.

    flat: (B / G,) bool, which groups of the batch are flat. row_numbers: of the rows in the batch.
    find_flat, shape_scores, rollout: grpo.py's. Returns the batch; which of its groups are still
    flat; and the figures of the batch before, for the log.
    """
    before = summarize(batch, "objective", reward_names, rows=rows)
    before.pop("objective/entropy", None)  # that of the batch that is trained, as the KL
    before |= summarize_groups(shape_scores(batch), flat)
    for attempt in range(attempts):
        slots = flat.nonzero().flatten().tolist()
        if not slots:
            break
        for slot in slots:
            row_numbers[slot] = other_row(
                row_numbers[slot], rows, seed, "refill", iteration, attempt, slot)
        fresh = rollout(f"refill {attempt}", iteration, rows,  # COLLECTIVE
                        [row_numbers[slot] for slot in slots], slots=slots)
        index = batch["index"]
        places = torch.tensor(slots)[:, None] * group_size + torch.arange(group_size)  # (slots, G)
        batch = replace_rows(batch, places.flatten().to(index.device), fresh, pad_id)
        batch["index"] = index
        flat = find_flat(batch)
    return batch, flat, before


def other_row(row, rows, *key):
    """The number of another row of the same file, if there is one, as a function of the key."""
    first, n = rows.mix.range_of(row) if rows.mix else (0, len(rows))
    return first + (row - first + 1 + number_of(*key, size=8) % max(n - 1, 1)) % n


def replace_rows(batch, rows, fresh, pad_id):
    """
    The batch with row i of fresh, a batch, in the place of row rows[i]; rows: a tensor. Where the T
    of the two differ, the narrower one gets columns of padding. With pad_id 0, row 1 is replaced:

        batch["tokens"]   5 6 7 8      fresh["tokens"]   1 2 3 4 9      result   5 6 7 8 0
                          5 9 9 0                                                1 2 3 4 9
    """
    T = max(batch["tokens"].shape[1], fresh["tokens"].shape[1])  # the wider one's
    replaced = {}
    for name, old in batch.items():
        new = fresh[name]
        if old.shape[1:] != new.shape[1:]:
            fill = pad_id if name == "tokens" else 0
            old, new = (torch.nn.functional.pad(x, (0, T - x.shape[1]), value=fill)
                        for x in (old, new))
        replaced[name] = old.index_copy(0, rows, new)
    return replaced
