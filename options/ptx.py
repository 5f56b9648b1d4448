"""
The key ptx_path, PPO-ptx: an SFT loss beside PPO's in every step (InstructGPT, arXiv 2203.02155,
equation 2), so that the policy forgets less of its demonstrations.
"""
import torch

from batches import deal_rows, right_pad
from demonstrations import dialogue, encode_demonstrations
from errors import BadInput
from load import autocast
from metrics import add_up
from prompts import batch_rows, read_rows


def ptx_row(row):
    """
    {"prompt", "completion"} of a row: sft.py's; or of one with the field `text`, of which every
    token is learned: its prompt is "", which no demonstration has.
    """
    if row.get("text") is None or row.get("completion") is not None:
        return dialogue(row, "completion")
    if not isinstance(row["text"], str) or not row["text"]:
        raise BadInput("field 'text' must be a string that is not empty")
    return {"prompt": "", "completion": row["text"]}


class Ptx:
    """The demonstrations of ptx_path, or its texts. config: all keys of ppo.py."""

    def __init__(self, policy, config, system, device):
        path, limit = config["ptx_path"], policy.max_positions
        self.rows = encode_demonstrations(read_rows(path, ptx_row, system.fields),
                                          policy.tokenizer, limit, system.too_long)
        for _, trained in self.rows.ids:
            trained[0] = False  # nothing predicts a text's first token
        self.policy, self.config, self.system, self.device = policy, config, system, device

    def add_gradients(self, scale, iteration, steps, sums):
        """
        A collective where the policy is sharded. scale * ptx_coef * the mean loss over the tokens
        of a step's examples, as many as it has responses, goes into the gradients; this rank's
        losses are added to sums["loss/ptx"]. steps: made in this iteration.
        """
        config = self.config
        step = iteration * config["ppo_epochs"] * config["num_minibatches"] + steps
        count = config["batch_size"] // config["num_minibatches"]
        rows = batch_rows(config["seed"], step, count, self.rows)
        examples = [self.rows.ids[i] for i in rows]
        tokens = sum(sum(trained) for _, trained in examples)
        for part in deal_rows([len(ids) for ids, _ in examples], config["micro_batch_size"],
                              self.system.micro_batch_tokens):
            ids = right_pad([examples[i][0] for i in part], self.policy.tokenizer.pad_id)
            trained = right_pad([examples[i][1] for i in part], 0)
            with autocast(self.system, self.device):
                losses = -self.policy.logprobs(
                    ids.to(self.device), trained.bool().to(self.device),
                    chunk=self.system.head_chunk)[0]  # (n,)
            (scale * config["ptx_coef"] * losses.sum() / tokens).backward()
            add_up(sums, torch.ones_like(losses, dtype=torch.bool), {"loss/ptx": losses})
