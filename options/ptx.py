"""
The key ptx_path, PPO-ptx: an SFT loss beside PPO's in every step (InstructGPT, arXiv 2203.02155,
equation 2), so that the policy forgets less of its demonstrations.
"""
import torch

import report
from completions import sft_row
from examples import (encode_examples, example_logprobs, micro_batches_of, tokens_of_example,
                      trained_tokens)
from rows import check_text, read_rows


def ptx_row(row):
    """
    {"prompt", "completion"} of a row for PPO-ptx. A row with the field `text` is plain text, and
    every token is learned: its prompt is "", which no demonstration has. All other rows are read by
    sft_row. Raises BadInput.
    """
    if row.get("text") is None or row.get("completion") is not None:
        return sft_row(row)
    check_text(row["text"], "field 'text'")
    return {"prompt": "", "completion": row["text"]}


class Ptx:
    """
    The demonstrations of ptx_path, or its texts. mix: of its rows, see rows.Rows. Raises BadInput.
    """

    def __init__(self, path, policy, tokenizer, system, device):
        rows = read_rows(path, ptx_row, system.fields)
        self.mix = rows.mix
        self.examples = encode_examples(rows, path, tokenizer, policy.max_positions, 0,
                                        system.too_long)
        self.policy, self.tokenizer, self.system, self.device = policy, tokenizer, system, device

    def add_gradients(self, row_numbers, weight, micro_batch_size, precision, sums):
        """
        A collective where the policy is sharded. The mean loss over the tokens of these examples,
        of all ranks, times `weight`, goes into the gradients; this rank's losses are added to
        sums["loss/ptx"], see report.add_up.
        """
        examples = [self.examples[i] for i in row_numbers]  # of all ranks
        for part in micro_batches_of(examples, tokens_of_example, micro_batch_size,
                                     self.system.micro_batch_tokens):
            with precision:
                losses = -example_logprobs(self.policy, part, self.tokenizer,
                                           self.system.head_chunk, self.device)  # (n,)
            loss = weight * losses.sum() / trained_tokens(examples)
            loss.backward()
            report.add_up(sums, torch.ones_like(losses, dtype=torch.bool), {"loss/ptx": losses})
