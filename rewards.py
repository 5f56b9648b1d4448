"""
Responses -> one number each. Every reward is called alike, reward(batch) -> scores (B,), where the batch is a dict with the
tokens and masks of rollout.generate and, of each row, the `prompts` and `completions` as text and the data `rows`.
"""
import torch

from configurator import BadInput
from data import right_pad


def final_answer(completion):
    """What a completion answers: the text after its thinking, without blanks at the ends."""
    return completion.rpartition("</think>")[2].strip()


def accuracy(batch):
    """1.0 where the completion's final answer is the row's `answer`, else 0.0; NaN where the row has none. (B,)"""
    return torch.tensor([float(final_answer(c) == row["answer"].strip()) if "answer" in row else float("nan")
                         for c, row in zip(batch["completions"], batch["rows"], strict=True)])


def thinks(batch):
    """1.0 where the completion thinks out loud, between <think> and </think>, before it answers. (B,)"""
    return torch.tensor([float(0 <= c.find("<think>") < c.find("</think>")) for c in batch["completions"]])


def last_real(mask):
    """Index of the last True of each row of mask (B, T) -> (B,). Never found by looking for a pad id: pad may equal EOS."""
    return (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(1)


@torch.no_grad()
def score_sequences(reward_model, tokens, attention_mask, micro_batch_size):
    """The reward model's scalar at the last real token of each row, plus its score_shift: (B,) in at least float32."""
    dtype = torch.promote_types(reward_model.score.weight.dtype, torch.float32)
    scores = torch.zeros(len(tokens), dtype=dtype, device=tokens.device)
    order = attention_mask.sum(1).argsort(stable=True)  # like lengths meet: less padding
    for i in range(0, len(tokens), micro_batch_size):
        rows = order[i:i + micro_batch_size]
        mask = attention_mask[rows]
        used = mask.any(0)  # the columns that any of these rows uses
        mask = mask[:, used]
        scalars = reward_model(tokens[rows][:, used], mask)  # (b, T)
        scores[rows] = scalars.gather(1, last_real(mask)[:, None]).squeeze(1).to(dtype)
    return scores + reward_model.config.score_shift


def reward_model_scores(batch, reward_model, reward_tokenizer, policy_tokenizer, micro_batch_size):
    """
    Learned reward of each response, read at its last token (N+ detail 12). A reward model with the policy's tokenizer scores
    the very ids that were sampled; with another one it gets the text re-tokenized, EOS included where the policy ended.
    """
    if reward_tokenizer.fingerprint == policy_tokenizer.fingerprint:
        return score_sequences(reward_model, batch["tokens"], batch["attention_mask"], micro_batch_size)
    sequences = []
    for row, completion, finished in zip(batch["rows"], batch["completions"], batch["finished"].tolist(), strict=True):
        ids = reward_tokenizer.encode_prompt(row["prompt"]) + reward_tokenizer.encode_completion(completion)
        sequences.append(ids if finished else ids[:-1])
        if len(sequences[-1]) > reward_model.config.max_positions:
            raise BadInput(f"a response has {len(sequences[-1])} tokens in the reward model's tokenizer, more than its context "
                           f"of {reward_model.config.max_positions}; lower max_new_tokens")
    tokens, mask = right_pad(sequences, reward_tokenizer.pad_id)
    device = batch["tokens"].device
    return score_sequences(reward_model, tokens.to(device), mask.to(device), micro_batch_size)
