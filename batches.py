"""
A batch: the sampled responses of one iteration, and all that is known of them. It is a dict of
tensors, its columns, with a row for each response.

A row is a text, from column 0 on: prompt, response, padding. A number that belongs to a token
stands in the token's column, and one mask says which tokens the policy sampled. The prompt
"123+456=" and the response "579", in the toy's tokenizer (a token for each byte, EOS is 258, pad is
259), with max_new_tokens = 6, beside a prompt of 9 tokens:

    tokens         49 50 51 43 52 53 54 61   53 55 57 258 259 259 259    (B, T)
    response_mask   F  F  F  F  F  F  F  F    T  T  T   T   F   F   F    (B, T)
    begins          8, the column in which the response begins           (B,)
    lengths        12, the tokens of prompt and response                 (B,)

B responses, R = max_new_tokens, T = R + the tokens of the batch's longest prompt. A micro-batch is
b of the rows and the W columns that these use. float is the dtype of the log-probs: float32, or
float64. The columns, in the order in which an iteration writes them:

    column            shape   dtype  written by               read by
    tokens            (B, T)  int64  as_batch                 texts_of, model.response_logprobs
    begins            (B,)    int64  as_batch                 texts_of, rewards.score_batch
    lengths           (B,)    int64  as_batch                 texts_of, micro_batches
    response_mask     (B, T)  bool   as_batch                 ppo, grpo, model.response_logprobs
    finished          (B,)    bool   as_batch                 ppo, grpo, rewards.model_scores
    sampler_logprobs  (B, T)  float  as_batch                 formulas.importance_weights
    turn_rewards      (B, T)  float  environment.converse     environment.reward_of_turns
    failed_calls      (B,)    float  environment.converse     environment.figures_of_turns
    index             (B,)    int64  rollout.sample_batch     ppo, grpo, forward_batch
    row               (B,)    int64  rollout.sample_batch     texts_of, run.samples
    slot              (B,)    int64  rollout.sample_batch     rewards.same_score_for_same_text
    age               (B,)    int64  ahead.rollout            ppo, grpo, run.sampler_gap
    reward/NAME       (B,)    float  rewards.score_batch      rewards.add_scores
    token_rewards     (B, T)  float  rewards.score_batch      ppo
    accuracy          (B,)    float  rewards.score_batch      metrics.summarize
    thinks            (B,)    float  rewards.score_batch      metrics.summarize
    scores            (B,)    float  rewards.add_scores       ppo, grpo, metrics.summarize
    old_logprobs      (B, T)  float  forward_batch            ppo, grpo, run.sampler_gap
    ref_logprobs      (B, T)  float  forward_batch            ppo, grpo, metrics.summarize
    values            (B, T)  float  forward_batch            ppo
    returns           (B, T)  float  ppo                      ppo
    advantages        (B, T)  float  ppo, grpo                ppo, grpo
    counted           (B, T)  bool   grpo                     grpo
    weights           (B, T)  float  grpo                     grpo

index: the number of the row, 0 to B - 1. row: that of the data row whose prompt it answers.
slot: the place of that data row in the iteration. turn_rewards: what an environment pays for a
turn, at its last token. age: how many updates the policy has made since it sampled the batch.
token_rewards: the part of the scores that stands at single tokens. counted: what GRPO trains on.
"""
import torch

import parallel
from model import no_grad_forwards


def as_batch(prompts, responses, logprobs, lengths, finished, width, pad_id, sampled=None, **more):
    """
    The first columns of a batch, of b prompts and their responses.

    prompts: lists of token ids. responses, ..., finished: as `rollout.decode` returns them. width:
    the tokens of the longest prompt of all ranks, so that all have the same T = width + R.
    sampled: (b, R) bool, the tokens that the policy sampled; None: all. more: {column: (b, R)}.
    """
    (b, R), device = responses.shape, responses.device
    begins = torch.tensor([len(ids) for ids in prompts], dtype=torch.int64, device=device)  # (b,)
    t = torch.arange(R, device=device)
    # The mask is made from lengths. Made from ids it could be wrong: pad may be the EOS.
    sampled = t < lengths[:, None] if sampled is None else sampled
    column = begins[:, None] + t  # (b, R): where each token of a response stands

    def in_columns(x):
        return torch.zeros(b, width + R, dtype=x.dtype, device=device).scatter_(1, column, x)

    tokens = torch.full((b, width + R), pad_id, dtype=torch.int64)
    for row, ids in enumerate(prompts):
        tokens[row, :len(ids)] = torch.as_tensor(ids)
    return dict(
        tokens=tokens.to(device).scatter_(1, column, responses),
        begins=begins,
        lengths=begins + lengths,
        response_mask=in_columns(sampled),
        finished=finished.clone(),
        **{name: in_columns(x) for name, x in dict(more, sampler_logprobs=logprobs).items()})


def texts_of(batch, rows, tokenizer):
    """
    The texts of a batch, as rewards read them; see rewards.py. rows: the data's. Returns a dict of
    lists, an entry a response: rows, prompts, completions; of several turns, dialogues, too.
    """
    tokens, mask = batch["tokens"].cpu(), batch["response_mask"].cpu()
    numbers = batch["row"].tolist()
    texts = dict(rows=[rows[number] for number in numbers],
                 prompts=[tokenizer.decode(rows.ids[number]) for number in numbers])
    texts["completions"] = [
        tokenizer.decode_response(ids[m].tolist(), row["prompt"])
        for row, ids, m in zip(texts["rows"], tokens, mask, strict=True)]
    if tokenizer.messages_of:
        spans = zip(batch["begins"].tolist(), batch["lengths"].tolist(), strict=True)
        texts["dialogues"] = [
            tokenizer.messages_of(ids[i:j].tolist(), m[i:j].tolist(), row["prompt"])
            for row, ids, m, (i, j) in zip(texts["rows"], tokens, mask, spans, strict=True)]
        texts["completions"] = [messages[-1]["content"] for messages in texts["dialogues"]]
    return texts


def forward_batch(batch, models, forward, micro_batches, device):
    """
    A collective: forward passes before an update. What a model gives at the response tokens becomes
    a column of the batch. models: {column: model}; a model that is None, and a column that the
    batch has already, are left out. forward: a function of (model, micro-batch), which gives
    (b, W), or a tuple that begins with it. micro_batches: this rank's. They must be the ones in
    which the update trains: then equal weights give equal bits, and the first ratio is exactly 1.
    """
    models = {name: model for name, model in models.items()
              if model is not None and name not in batch}
    # (B, T) each; 0 in the rows of other ranks, and outside the W columns of a micro-batch
    columns = {name: torch.zeros_like(batch["sampler_logprobs"]) for name in models}
    with no_grad_forwards(models.values(), device):
        for mb in micro_batches:
            for name, model in models.items():
                output = forward(model, mb)
                output = output if torch.is_tensor(output) else output[0]  # (b, W)
                columns[name][mb["index"], :output.shape[1]] = output
    batch |= parallel.all_reduce_sum(columns)  # COLLECTIVE
    parallel.check_finite({name: batch[name] for name in columns})


# -------------------------------------------------------------------------------------------------
# micro-batches

MAX_PADDING = 256  # tokens: more would take longer than another micro-batch


def deal_rows(lengths, micro_batch_size, micro_batch_tokens=0):
    """
    This rank's micro-batches of the rows of all ranks: lists of row numbers. All ranks have equally
    many, some of them empty, because a forward of a sharded model is a collective. A micro-batch
    has at most micro_batch_size rows; or, with micro_batch_tokens, at most that many tokens,
    padding included. Its padding is at most MAX_PADDING, or an eighth of micro_batch_tokens.

    lengths: the tokens of each row. The rows are sorted, the longest first, and dealt to the ranks
    like cards: so all have about equally many tokens. With lengths of 5, 2, 3, 4 on two ranks,
    rank 0 gets the rows 0 and 2, and rank 1 the rows 3 and 1.
    """
    rank, size = parallel.rank_and_size()
    # micro_batch_tokens is for GPUs, where launching a micro-batch's kernels takes longer
    padding = max(MAX_PADDING, micro_batch_tokens // 8)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    dealt = []  # for each rank its micro-batches
    for hand in (order[number::size] for number in range(size)):  # the rows of one rank
        parts = [[]]
        for i in hand:
            part = [*parts[-1], i]
            tokens = lengths[part[0]] * len(part)  # with padding
            full = (tokens > micro_batch_tokens if micro_batch_tokens
                    else len(part) > micro_batch_size)
            if parts[-1] and (full or tokens - sum(lengths[j] for j in part) > padding):
                parts.append([i])
            else:
                parts[-1] = part
        dealt.append(parts)
    return dealt[rank] + [[]] * (max(map(len, dealt)) - len(dealt[rank]))


def micro_batches(batch, index, micro_batch_size, micro_batch_tokens=0):
    """
    This rank's micro-batches of the rows `index` of a batch: dicts like the batch. All ranks have
    equally many, some without rows: what is computed with these adds 0. Rows of about the same
    length come together, cut to the W columns of the longest. Rows [0, 1, 2] on one rank, with
    micro_batch_size = 2, T = 6 and padding as a dot:

        batch["tokens"]   5 6 7 8 9 .    of 5 tokens
                          1 2 . . . .       2
                          3 4 5 . . .       3

        the first:        5 6 7 8 9      row 0, W = 5
                          3 4 5 . .      row 2
        the second:       1 2            row 1, W = 2
    """
    (_, T), lengths = batch["tokens"].shape, batch["lengths"][index].tolist()
    found = []  # to cut one, the CPU waits for a GPU: so all are cut before the training begins
    for part in deal_rows(lengths, micro_batch_size, micro_batch_tokens):
        rows = index[torch.tensor(part, dtype=torch.int64, device=index.device)]
        W = max([lengths[i] for i in part], default=2)
        mb = {name: x[rows, :W] if x.shape[1:] == (T,) else x[rows] for name, x in batch.items()}
        if not part:  # one text without a response: a sharded model needs a forward on every rank
            mb |= {name: mb[name].new_zeros(1, W) for name in ("tokens", "response_mask")}
        found.append(mb)
    return found


def right_pad(sequences, pad_id):
    """
    Lists of token ids -> tokens (b, W) int64, padded on the right to the longest. Without any: a
    row of zeros, because a sharded model needs a forward on every rank.
    """
    rows = [torch.tensor(ids, dtype=torch.int64) for ids in sequences or [[0, 0]]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
