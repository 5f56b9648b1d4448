"""
Prompts -> sampled responses.

Every response owns its randomness: R uniforms from a generator seeded by what the response *is* (seed, iteration, prompt,
sample), and token t is the inverse of the CDF at uniform t. So neither the batch a response sits in, nor the rank that
decodes it, nor how many rows are still running can change what is sampled, and a resumed run needs no saved random state.
"""
import hashlib

import torch

import parallel
from engine import audit, launch
from engine.build import autocast, decoding_dtype
from engine.placement import decoding_copy
from errors import BadInput
from loss import logprobs_from_logits, scaled_logits
from model import KVCache, autocast_dtype


def response_uniforms(seed, purpose, iteration, slots, length, samples=None):
    """
    Uniforms in [0, 1) of the responses to the prompts at these slots of an iteration's batch, (len(slots), length) float64.
    purpose: "rollout", "eval", ...; samples: of each, which response to its prompt it is (None: the first).
    """
    rows = []
    for slot, sample in zip(slots, samples or [0] * len(slots), strict=True):
        digest = hashlib.blake2b(f"{seed} {purpose} {iteration} {slot} {sample}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))  # 32 bits: it ignores those above
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64)


def left_pad(prompts, pad_id, width=None):
    """Lists of token ids -> tokens (B, P) int64 padded on the left, attention_mask (B, P) bool, built from lengths."""
    width = max([len(p) for p in prompts], default=1) if width is None else width
    tokens = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise BadInput(f"prompt {row} is empty: there is nothing to predict the first token from")
        tokens[row, width - len(prompt):] = torch.as_tensor(prompt)
        mask[row, width - len(prompt):] = True
    return tokens, mask


@torch.no_grad()
def generate(policy, prompts, max_new_tokens, temperature=1.0, eos_ids=(), pad_id=0, vocab_size=None, uniforms=None,
             seed=0, batch_size=0, prompt_width=None, attention_mask=None, stop=None):
    """
    Sample one response to each prompt.

    prompts: lists of token ids (repeat a prompt for several samples), or a left-padded (B, P) tensor of them with its
    attention_mask (None: no padding). temperature: 0 = greedy. eos_ids: any of them ends a
    response and belongs to it; none given: all have max_new_tokens. vocab_size: ids from here on are never sampled.
    uniforms (B, max_new_tokens): the randomness; None draws it from `seed`. batch_size: how many responses decode at once
    (0 = all). prompt_width: pad prompts to this length (default: the longest). The last two cannot change a result.
    stop: asked before each token; when it says True, responses are left as they are, for a caller who has no use for them.

    Returns a dict: tokens (B, T = P + R) int64, prompt left-padded to P, response right-padded to R = max_new_tokens;
    attention_mask (B, T) bool; response_mask (B, R) bool, True on sampled tokens, the EOS included; sampler_logprobs (B, R)
    float32 (float64 of a float64 model), of the distribution sampled (greedy: of the unscaled one); finished (B,) bool,
    whether the response ended itself. Raises BadInput when a prompt is empty or does not fit the model's context.
    """
    device = policy.embed.weight.device
    if isinstance(prompts, torch.Tensor):
        real = torch.ones_like(prompts, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        prompts = [row[m].tolist() for row, m in zip(prompts, real, strict=True)]
    tokens, mask = left_pad(prompts, pad_id, prompt_width)  # (B, P)
    B, P = tokens.shape
    R = max_new_tokens
    if int(mask.sum(1).max() if B else 0) + R > policy.config.max_positions:
        raise BadInput(f"a prompt of {int(mask.sum(1).max())} tokens and max_new_tokens = {R} exceed the model's context of "
                       f"{policy.config.max_positions}; shorten one of them")
    if uniforms is None:
        uniforms = response_uniforms(seed, "generate", 0, range(B), R)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=device)
    parts = [decode(policy, tokens[i:i + (batch_size or B)].to(device), mask[i:i + (batch_size or B)].to(device),
                    uniforms[i:i + (batch_size or B)].to(device), R, temperature, eos, pad_id, vocab_size, stop)
             for i in range(0, B, batch_size or B)] if B else [decode_nothing(P, R, policy)]
    responses, logprobs, lengths, finished = (torch.cat(x) for x in zip(*parts, strict=True))
    response_mask = torch.arange(R, device=device) < lengths[:, None]  # from lengths, never from ids: pad may equal EOS
    return dict(
        tokens=torch.cat([tokens.to(device), responses], 1),
        attention_mask=torch.cat([mask.to(device), response_mask], 1),
        response_mask=response_mask,
        sampler_logprobs=logprobs,
        finished=finished,
    )


@torch.inference_mode()  # lighter than no_grad; what leaves generate is concatenated outside of it, so it may be trained on
def decode(policy, prompt, prompt_mask, uniforms, R, temperature, eos, pad_id, vocab_size, stop=None):
    """Responses (b, R), log-probs (b, R), lengths (b,), finished (b,) for prompts (b, P) that decode together."""
    b, P = prompt.shape
    device, float_dtype = prompt.device, torch.promote_types(policy.embed.weight.dtype, torch.float32)
    responses = torch.full((R, b), pad_id, dtype=torch.int64, device=device)  # a step writes one contiguous row
    logprobs = torch.zeros(R, b, dtype=float_dtype, device=device)
    lengths = torch.full((b,), R, dtype=torch.int64, device=device)
    finished = torch.zeros(b, dtype=torch.bool, device=device)

    rows = torch.arange(b, device=device)  # which response each row of the running batch is
    running = torch.ones(b, dtype=torch.bool, device=device)
    # without padding there is nothing to mask: every column of the cache is real for every running row
    mask = None if prompt_mask.all() else torch.cat([prompt_mask, prompt_mask.new_ones(b, R)], 1)  # (b, P + R)
    positions = prompt_mask.sum(1, keepdim=True)  # (b, 1): where the next token stands
    # the cache has the dtype in which keys come out of the model, which autocast may have lowered
    cache_dtype = autocast_dtype(policy.embed.weight) or policy.embed.weight.dtype
    cache = KVCache(policy.config, b, P + R - 1, cache_dtype, device)
    # the last state's alone: logits of the whole prompt, (b, P, V), would be the largest tensor of many a run
    logits = policy.output(policy.trunk(prompt, None if mask is None else mask[:, :P], cache=cache)[:, -1])  # (b, V)
    for t in range(R):
        token, logprob = sample(logits, uniforms[:, t], temperature, vocab_size)
        if len(eos):
            token, logprob = torch.where(running, token, pad_id), torch.where(running, logprob, 0)
        responses[t].index_copy_(0, rows, token)
        logprobs[t].index_copy_(0, rows, logprob)
        left = len(rows)
        if len(eos):
            ended = running & torch.isin(token, eos)
            lengths[rows[ended]] = t + 1
            finished[rows[ended]] = True
            running = running & ~ended
            left = int(running.sum())
        if left == 0 or t == R - 1 or stop and stop():
            break
        if 2 * left <= len(rows):  # half of the batch is done: drop it, so that it costs nothing more
            keep = running.nonzero().squeeze(1)
            rows, token, positions, uniforms, running = (x[keep] for x in (rows, token, positions, uniforms, running))
            mask = None if mask is None else mask[keep]
            cache.keep_rows(keep)
        seen = None if mask is None else mask[:, :P + t + 1]
        logits = policy(token[:, None], seen, cache=cache, positions=positions + t)[:, 0]  # (b, V)
    return responses.t(), logprobs.t(), lengths, finished


def decode_nothing(P, R, policy):
    """decode's result for no prompts, as on a rank that has none."""
    device, dtype = policy.embed.weight.device, torch.promote_types(policy.embed.weight.dtype, torch.float32)
    return (torch.empty(0, R, dtype=torch.int64, device=device), torch.empty(0, R, dtype=dtype, device=device),
            torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.bool, device=device))


def sample(logits, uniform, temperature, vocab_size=None):
    """
    One token a row by inverse CDF: logits (B, V), uniform (B,) in [0, 1) -> tokens (B,), their log-probs (B,).
    temperature = 0 takes the most likely token.
    """
    logits = scaled_logits(logits, temperature or 1.0, vocab_size)  # (B, V)
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        probs = logits.softmax(-1)
        cdf = probs.cumsum(-1)
        # In float32 a CDF ends a little beside 1: scale by its last entry, and stay below it, or the search returns V. The
        # first entry *above* the point belongs to a token of positive probability: impossible ids stay impossible.
        last = cdf[:, -1]
        point = torch.minimum(uniform.to(cdf.dtype) * last, torch.nextafter(last, torch.zeros_like(last)))
        token = torch.searchsorted(cdf, point[:, None], right=True).clamp(max=(vocab_size or logits.shape[-1]) - 1)  # (B, 1)
        return token.squeeze(1), probs.gather(1, token).squeeze(1).log()
    return token, logprobs_from_logits(logits[:, None], token[:, None]).squeeze(1)


# ---------------------------------------------------------------------------------------------------------------------
# a whole batch, over all ranks


def sample_and_score(run, policy, scorer, config, rows, prompts, purpose, iteration, slots=None,
                     group_size=1):
    """
    Sample group_size responses to each of some prompts, and score them. Every rank does its share and
    gets everyone's, so that from here on all ranks compute on the same numbers.

    rows, prompts: the data rows and their prompts' token ids. purpose ("rollout", "eval", ...),
    iteration and slots (the prompts' places in the batch; None: 0, 1, 2, ...) decide the noise.
    scorer: rewards.Scorer.

    Returns a dict of tensors with B = len(rows) * group_size rows, a prompt's responses side by side:
    what `generate` returns; scores (B,); reward/NAME (B,) for each reward; accuracy, thinks (B,);
    index (B,), the number of the row.
    """
    run.enter(purpose)
    tokenizer, R = scorer.tokenizer, config["max_new_tokens"]
    slots = range(len(rows)) if slots is None else slots
    wanted = [(row, prompt, slot, sample) for row, prompt, slot in zip(rows, prompts, slots, strict=True)
              for sample in range(group_size)]
    width = max(map(len, prompts))  # one P for all ranks
    share = parallel.my_share(wanted)
    at_once = config["rollout_batch_size"] or max(len(share), 1)

    parts, pending, texts = [], [], dict(rows=[], prompts=[], completions=[])
    decoder = decoding_copy(policy, decoding_dtype(config, run.device), run.device)
    for i in range(0, max(len(share), 1), at_once):  # once even on a rank without prompts
        part = share[i:i + at_once]
        ids = [prompt for _, prompt, _, _ in part]
        uniforms = response_uniforms(config["seed"], purpose, iteration, [slot for _, _, slot, _ in part],
                                     R, [sample for _, _, _, sample in part])
        with autocast(config, run.device):
            parts.append(generate(
                decoder, ids, R, config["temperature"], tokenizer.eos_ids, tokenizer.pad_id,
                tokenizer.vocab_size, uniforms, prompt_width=width, stop=launch.stop_asked))
        said = dict(rows=[row for row, _, _, _ in part], prompts=[tokenizer.decode(x) for x in ids],
                    completions=decode_responses(tokenizer, parts[-1]))
        for name in texts:
            texts[name] += said[name]
        # the rules work on this part while the next one is sampled
        pending.append(scorer.start(parts[-1] | said, len(part) / max(len(share), 1)))
    mine = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    del decoder, parts  # a gathered copy of sharded weights is only for the rollout
    run.leave_if_asked()

    if purpose == "rollout":
        run.enter("score")
    mine |= scorer.score(mine | texts, pending, len(wanted))
    run.leave_if_asked()
    batch = parallel.gather_rows(mine, len(wanted))  # COLLECTIVE: b rows of this rank -> all B
    batch["index"] = torch.arange(len(wanted), device=run.device)
    scorer.add_up(batch)
    audit.check_finite({name: batch[name] for name in ("sampler_logprobs", "scores")}, iteration)
    return batch


def decode_responses(tokenizer, part):
    """The texts of the responses that `generate` gave."""
    R = part["response_mask"].shape[1]
    return [tokenizer.decode(tokens[-R:][mask].tolist())
            for tokens, mask in zip(part["tokens"], part["response_mask"], strict=True)]
