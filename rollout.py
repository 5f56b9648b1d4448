"""
Prompts -> a batch of sampled responses.

How one response is sampled:

    tokens, uniforms = prompt, R numbers from [0, 1)
    for t in range(R):
        logits = policy(tokens)[-1]                       # (V,)
        probs = (logits / temperature).softmax(-1)        # (V,)
        token = first one whose cumulated probability is above uniforms[t]
        tokens.append(token)
        if token in eos_ids: break

With the probabilities 0.2, 0.5, 0.3 of three tokens, uniforms below 0.2 give token 0, those from
0.2 to 0.7 token 1, the rest token 2. `decode` does this for many responses at once; a cache keeps
the states of the tokens so far.

The uniforms of a response come from a random generator of its own, with a seed made of the
response's name: (seed, purpose, iteration, slot in the batch, sample number). So the response does
not depend on the others, or on the rank that decodes it, and no random state is ever saved.

B responses, R = max_new_tokens, V ids in the vocabulary. The layout of a batch: batches.py.
"""
import contextlib
import functools

import torch
from torch.nn.utils.rnn import pad_sequence

import parallel
from batches import as_batch
from errors import BadInput
from load import autocast, dtypes
from model import decoding_cache, scaled_logits
from prompts import number_of
from ranks import this_rank


def response_uniforms(seed, purpose, iteration, slots, length, samples=None):
    """
    The uniforms in [0, 1) of some responses: (len(slots), length) float64. slots: for each
    response, the place of its prompt in the batch. samples: its number among the responses to its
    prompt; None: 0. 2 responses to each of 2 prompts: slots [0, 0, 1, 1], samples [0, 1, 0, 1].
    """
    uniforms = torch.empty(len(slots), length, dtype=torch.float64)
    for row, number in zip(
            uniforms, response_seeds(seed, purpose, iteration, slots, samples), strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(number))
    return uniforms


def response_seeds(seed, purpose, iteration, slots, samples=None):
    """The seed of each response's generator: 32 bits, because torch's ignores all further ones."""
    return [number_of(seed, purpose, iteration, slot, sample)
            for slot, sample in zip(slots, samples or [0] * len(slots), strict=True)]


def prefill(policy, prompts, cache):
    """
    Read n prompts into an empty cache. Each of the D different prompts is read once, even if it
    gets several responses; then each response has its own row of the cache. Returns the logits of
    the first tokens (n, V), the mask of the prompts (n, P), and the positions of the first tokens
    (n, 1).

    Here alone rows are padded on the left. So they all end in the same column, and the next token
    of each stands in the next column. The prompts [5, 6, 7] and [8]:

        tokens   5 6 7     mask   T T T
                 0 0 8            F F T
    """
    numbers = {ids: i for i, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
    texts, device = [torch.tensor(ids) for ids in numbers], policy.hf.device
    masks = [torch.ones_like(ids, dtype=torch.bool) for ids in texts]
    tokens, mask = (pad_sequence(x, batch_first=True, padding_side="left").to(device)
                    for x in (texts, masks))  # (D, P) each
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)  # (D, P)
    padding = (mask, positions) if len({*map(len, texts)}) > 1 else ()
    logits = policy.next_logits(tokens, cache, *padding)  # (D, V)
    # for each response the row of its prompt, (n,)
    row = torch.tensor([numbers[tuple(ids)] for ids in prompts], device=device)
    if len(numbers) < len(prompts):
        cache.batch_select_indices(row)
    return logits[row], mask[row], positions[row, -1:] + 1


# faster than no_grad; as_batch makes tensors from the results that training may use
@torch.inference_mode()
def decode(policy, prompts, uniforms, temperature=1.0, budgets=None, stop=lambda: False,
           graphs=False, at_once=0):
    """
    Sample one response to each of n prompts: it ends with any of the tokenizer's eos_ids, or a stop
    string, and this token belongs to it.

    prompts: lists of token ids. uniforms: (n, R), R is the longest response. temperature: 0 =
    always the most likely token. budgets: how many tokens each response may have; None: R. stop: a
    function that is called before each token; if it returns True, the responses stay incomplete,
    because the caller is about to leave. graphs: True: on an NVIDIA GPU the steps are CUDA graphs;
    "compiled": graphs of the kernels that torch.compile makes. at_once: how many responses decode
    together, 0 = all; only memory depends on it.

    Returns responses (n, R) int64, padded on the right; the log-probs of their tokens (n, R), in at
    least float32; their lengths (n,); and finished (n,) bool, whether a response ended with an EOS
    or a stop string. Raises BadInput where a prompt is empty or does not fit.
    """
    n, R = uniforms.shape
    if n > at_once > 0:
        starts = range(0, n, at_once)
        parts = [decode(policy, prompts[i:i + at_once], uniforms[i:i + at_once], temperature,
                        budgets and budgets[i:i + at_once], stop, graphs) for i in starts]
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    budgets, tokenizer, device = budgets or [R] * n, policy.tokenizer, policy.hf.device
    for row, (ids, budget) in enumerate(zip(prompts, budgets, strict=True)):
        if not 0 < len(ids) <= policy.max_positions - budget:
            raise BadInput(f"prompt {row} has {len(ids)} tokens: it is empty, or does not fit with "
                           f"max_new_tokens = {budget} into the model's context of "
                           f"{policy.max_positions}")
    responses = torch.full((n, R), tokenizer.pad_id, dtype=torch.int64, device=device)
    dtype = torch.promote_types(policy.hf.dtype, torch.float32)
    logprobs = torch.zeros(n, R, dtype=dtype, device=device)
    lengths, finished = responses.new_zeros(n), responses.new_zeros(n).bool()
    if n == 0:  # there are more ranks than responses
        return responses, logprobs, lengths, finished

    uniforms, budgets = uniforms.to(device), torch.tensor(budgets, device=device)  # (n, R), (n,)
    eos = torch.tensor(sorted(tokenizer.eos_ids), dtype=torch.int64, device=device)
    cache, graph_step = decoding_cache(policy.hf.config), None
    if graphs:
        from options.decoding_graph import steps_of

        cache, graph_step = steps_of(
            policy, cache, max(map(len, prompts)) + R, temperature, graphs == "compiled")
    logits, mask, next_position = prefill(policy, prompts, cache)  # (n, V), (n, P), (n, 1)
    padded = len({*map(len, prompts)}) > 1  # without padding transformers is faster without a mask

    def step(token, uniform, mask, position):
        padding = (mask, position) if padded else ()
        return draw(policy.next_logits(token, cache, *padding), uniform, temperature, tokenizer)

    # Row r of the cache samples response number live[r]. A response that has ended stays in the
    # cache until a quarter of the rows have ended; its further tokens are dropped. With CUDA graphs
    # half must have ended, because each smaller cache needs a new graph; and two rows stay, because
    # torch.compile would compile a single row separately
    live = going = torch.arange(n, device=device)  # going: the rows that go on
    token, logprob = draw(logits, uniforms[:, 0], temperature, tokenizer)  # (rows,) each
    del logits  # (n, V)
    for t in range(R):
        i = live[going]  # the numbers of their responses
        responses[i, t], logprobs[i, t], lengths[i] = token[going], logprob[going], t + 1
        ends = torch.isin(token, eos)  # (rows,)
        if tokenizer.stop_strings:
            stopped = [tokenizer.has_stop(ids) for ids in responses[i, :t + 1].tolist()]
            ends[going] |= torch.tensor(stopped, device=device)
        finished[i] |= ends[going]
        goes_on = ~finished[live] & (budgets[live] > t + 1)  # (rows,)
        going = goes_on.nonzero().squeeze(1)  # waits for the device
        if len(going) == 0 or stop():
            break
        most = 0.5 * (len(going) > 1) if graph_step else 0.75  # the cache shrinks at this share
        if len(going) <= most * len(live):
            cache.batch_select_indices(going)
            live, token, mask = live[going], token[going], mask[going]
            next_position, going = next_position[going], torch.arange(len(going), device=device)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)  # (rows, P + t + 1)
        token, logprob = (graph_step or step)(
            token[:, None], uniforms[live, t + 1], mask, next_position)  # (rows,) each
        next_position = next_position + 1
    return responses, logprobs, lengths, finished


def draw(logits, uniform, temperature, tokenizer=None):
    """
    One token for each row by inverse CDF: logits (B, V), uniform (B,) in [0, 1) -> tokens (B,) and
    their log-probs (B,). Temperature 0 takes the most likely one; its log-prob is of temperature 1.
    """
    logprobs = scaled_logits(logits, temperature, tokenizer).log_softmax(-1)  # (B, V)
    token = logprobs.argmax(-1) if temperature == 0 else choose(logprobs.exp(), uniform)  # (B,)
    return token, logprobs.gather(-1, token[:, None]).squeeze(-1)


def choose(probs, uniform):
    """
    One of V outcomes for each row: probs (B, V), uniform (B,) float64 in [0, 1) -> (B,) int64, the
    first outcome whose cumulated probability is above the uniform.

    Probabilities are rounded down to multiples of 2^-40: sums of integers are the same in any
    order. A GPU's sums of floats may even fall, and then an outcome of probability 0 be chosen.
    """
    cdf = (probs * 2.0**40).long().cumsum(1)  # (B, V)
    point = (uniform.double() * cdf[:, -1]).long()  # (B,), below the last entry
    i = torch.searchsorted(cdf, point[:, None], right=True).squeeze(1)  # (B,): the first above it
    # with NaN it is V, behind the last index; the checks find the NaN later, and stop the run
    return i.clamp(max=probs.shape[1] - 1)


def sample_batch(policy, rows, row_numbers, noise, max_new_tokens, temperature, system, device,
                 samples=1, slots=None):
    """
    A collective: sample a batch, the same on all ranks; each rank samples its share. rows: the
    data's. row_numbers: of the rows that get `samples` responses each. slots: the places of these
    rows in the batch; None: 0, 1, ... noise: (seed, purpose, iteration); with its slot and sample
    it decides a response's uniforms. Returns the columns down to `slot`, see batches.py.
    """
    if "sample" not in this_rank.does:  # ranks of another role have sampled it
        from options.roles import received

        return received.pop()
    slots = range(len(row_numbers)) if slots is None else slots
    # for each of the B responses: the number of its data row, its slot, its sample
    row = [number for number in row_numbers for _ in range(samples)]
    slot = [place for place in slots for _ in range(samples)]
    sample = list(range(samples)) * len(row_numbers)
    width = max(len(rows.ids[number]) for number in row_numbers)  # the same T on all ranks
    B, tp, (rank, size) = len(row), system.generate_tp, parallel.rank_and_size()
    share = parallel.share(B)  # the numbers of this rank's responses
    numbers = parallel.share(B, rank // tp, size // tp)  # those that tp ranks decode together
    ids = [rows.ids[row[i]] for i in numbers]
    names = [slot[i] for i in numbers], [sample[i] for i in numbers]
    uniforms = response_uniforms(*noise, names[0], max_new_tokens, names[1])  # (b, R)
    seeds = response_seeds(*noise, *names)
    with sampling(policy, temperature, seeds, system, device) as respond:  # COLLECTIVE
        if system.environment or system.tools:  # something answers the policy, in several turns
            from options.environment import environment_of

            with parallel.in_step():  # COLLECTIVE: a failure on one rank ends all
                own = environment_of(system, policy.tokenizer).converse(
                    [rows[row[i]] for i in numbers], ids, uniforms, width, respond, noise, names)
        else:
            own = as_batch(ids, *respond(ids, uniforms), width, policy.tokenizer.pad_id)
    own = {name: t[share.start - numbers.start:][:len(share)] for name, t in own.items()}
    batch = parallel.gather_rows(own, B)  # COLLECTIVE
    for name, column in dict(index=range(B), row=row, slot=slot).items():
        batch[name] = torch.tensor(column, device=device)
    return batch


@contextlib.contextmanager
def sampling(policy, temperature, seeds, system, device):
    """
    A collective: the block in which the policy samples. It gives a function, respond(prompts,
    uniforms, budgets=None), which returns what `decode` returns. The policy decodes, or a copy of
    it (decoding_copy), or another engine, whose noise has one seed for each response.
    """
    if system.sampler == "vllm":
        from options.vllm import responder

        yield responder(policy, system, device, temperature, seeds)  # COLLECTIVE
        return
    together = system.generate_tp > 1  # several ranks decode together: they take the same steps
    graphs = system.cuda_graphs and device.type == "cuda" and not (together or policy.must_fetch)
    with autocast(system, device), decoding_copy(policy, system, device) as decoder:  # COLLECTIVE
        yield functools.partial(
            decode, decoder, temperature=temperature, at_once=system.rollout_batch_size,
            stop=lambda: this_rank.stop and not together,
            graphs=graphs and ("compiled" if system.compile else True))


def decoding_copy(policy, system, device):
    """
    A collective: the block in which the policy decodes. It gives the model that decodes. This is
    the policy itself; in 16 bits a copy with rounded matrices, which autocast would round at every
    token; or, of a sharded policy, the whole one, gathered once.
    """
    matrices = dtypes(system)[1]
    if system.generate_tp > 1:
        from options.tensor_parallel import split_copy

        return contextlib.nullcontext(  # COLLECTIVE
            split_copy(policy, matrices, device, system.generate_tp))
    if policy.must_fetch:  # sharded
        from options.shards import gathered

        return gathered(policy)  # COLLECTIVE
    # an adapter's trunk is frozen, and has its matrices in that dtype already
    if matrices not in (None, policy.hf.dtype) and policy.base is None:
        from options.sixteen_bits import rounded_copy

        policy = rounded_copy(policy, matrices)
    return contextlib.nullcontext(policy)
