"""
The models are those of transformers. A Model holds one of them, and gives what quartet needs:
log-probs of the tokens of a text, one number for each token, and the next step of a decoding.

    policy = load("out/arithmetic_sft/policy", "policy", system, device, trained=True)
    logprobs, entropy = policy.logprobs(tokens, target_mask)

How a log-prob is computed, for one text of T tokens:

    states = trunk(tokens)                            # (T, d): state t has read tokens 0 to t
    logits = head(states)                             # (T, V): row t is the guess of token t + 1
    logprobs = logits.log_softmax(-1)                 # (T, V)
    logprob of token t = logprobs[t - 1, tokens[t]]   # the shift by one: see states_before

Many texts at a time are rows that are padded on the right. A token sees only the tokens before it,
so padding behind a text changes nothing, and no mask is needed. There is no dropout: every model
stays in eval mode, because a policy must give the same token the same probability twice.

b rows, W tokens in the longest row, n tokens that are asked for, V ids, d width of a state.
"""
import contextlib
import functools
import inspect

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from errors import optional


class Model(nn.Module):
    """A model of transformers, `hf`, with the head of a language model or of one scalar a token."""

    base = None  # the Model on whose trunk this one stands, see OnTrunk; None: it has its own
    must_fetch = False  # True: its weights are split, or in the CPU's memory: options/shards.py
    compiled = None  # `trunk` as torch.compile makes it
    unit = 1.0  # a scalar is unit * the head's output: see update_unit

    def __init__(self, hf, head="lm", path="", tokenizer=None):
        super().__init__()
        self.hf, self.head, self.path, self.tokenizer = hf.eval(), head, path, tokenizer
        # a number that is added to every scalar; rm.py measures it and saves it in config.json
        self.score_shift = float(getattr(hf.config, "score_shift", 0.0))
        self.new_head = False  # True: the scalar head was not in the file, but is newly drawn
        self.recomputed = []  # layers that the backward pass computes again
        # transformers 5.24 has a new name for it, and warns of the old one
        takes = inspect.signature(type(hf).forward).parameters
        self.cache_argument = "cache" if "cache" in takes else "past_key_values"

    @property
    def config(self):
        """The settings of the language model, as transformers names them."""
        return self.hf.config.get_text_config()

    def states(self, tokens):
        """tokens (b, W), padded on the right -> the states for the head, (b, W, d)."""
        trunk = self.compiled or self.trunk
        if self.recomputed and torch.is_grad_enabled():
            from options.recompute import in_training

            trunk = in_training(self.recomputed, trunk)
        return trunk(tokens)

    def trunk(self, tokens):
        """transformers' model without its head: tokens (b, W) -> states (b, W, d)."""
        return self.hf.base_model(tokens, use_cache=False).last_hidden_state

    def logits(self, states):
        """The LM head: states (n, d) -> logits (n, V). `probe` compares it with the model's own."""
        logits = self.hf.get_output_embeddings()(states)
        if has_any(self.hf.config, ["logit_scale", "logits_scaling", "final_logit_softcapping",
                                    "lm_head_multiplier"]):  # Cohere, Granite, Gemma 2, Falcon-H1
            from options.families import rescaled

            logits = rescaled(logits, self.config)
        return logits

    def logprobs(self, tokens, target_mask, temperature=1.0, chunk=0, entropy=False):
        """
        Log-probs of n tokens, and the entropies of their distributions, (n,) in at least float32.
        tokens: (b, W), padded on the right. target_mask: (b, W) bool, True on the n tokens, never
        on the first of a row. entropy: False gives 0. chunk: how many tokens have logits at a time,
        0 = all; the backward pass computes them again. The logits of all tokens, (n, V), are often
        the largest tensor of a run: 4.2 GB for 8 responses of 1,024 tokens and 128,256 ids.
        """
        def of_states(states, ids):
            logits = scaled_logits(self.logits(states), temperature, self.tokenizer)  # (., V)
            logprobs = logits.log_softmax(-1)  # (., V)
            of_tokens = logprobs.gather(-1, ids[:, None]).squeeze(-1)  # (.,)
            return of_tokens, entropy_of(logprobs) if entropy else torch.zeros_like(of_tokens)

        states, ids = states_before(self.states(tokens), target_mask), tokens[target_mask]
        if chunk == 0 or len(ids) <= chunk:
            return of_states(states, ids)
        parts = [checkpoint(of_states, *part, use_reentrant=False, preserve_rng_state=False)
                 for part in zip(states.split(chunk), ids.split(chunk), strict=True)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def scores(self, tokens, last):
        """The score of each text, (b,), read at its last token, which has the index last, (b,)."""
        return self.scalars(self.states(tokens)[torch.arange(len(tokens)), last])

    def scalars(self, states):
        """
        The scalar head: states (n, d) -> (n,) in at least float32, also under autocast: in bfloat16
        scores around 5 would be multiples of 1/32.
        """
        with torch.autocast(states.device.type, enabled=False):
            states, weight = (at_least_float32(x) for x in (states, self.hf.score.weight))
            linear = F.linear(states.to(weight.dtype), weight).squeeze(-1)
            return self.unit * linear + self.score_shift

    def update_unit(self, scores, state):
        """The unit of the loss for these scores (B,): 1, but for a newly drawn value head."""
        if not self.new_head:
            return 1.0
        from options.new_head import update_unit

        return update_unit(self, scores, state)

    def next_logits(self, tokens, cache, attention_mask=None, position_ids=None):
        """
        A step of a decoding: tokens (n, k), which stand behind those in the cache -> the logits of
        the next token, (n, V). attention_mask (n, tokens so far, the padding included) and
        position_ids (n, k): None where there is no padding.
        """
        out = self.hf(tokens, attention_mask=attention_mask, position_ids=position_ids,
                      use_cache=True, logits_to_keep=1, **{self.cache_argument: cache})
        return out.logits[:, -1]

    def as_saved(self, name, W):
        """W, the whole tensor `name` of self.hf, as others load it: with the unit, and LoRA."""
        return W * self.unit if name == "score.weight" else W

    def save_settings(self, folder):
        """Write config.json and the tokenizer's files, with the model's ends and its shift."""
        hf, tokenizer = self.hf, self.tokenizer
        if self.head == "scalar":
            hf.config.score_shift = self.score_shift
            hf.config.update(tokenizer.chats.keys if tokenizer.chats else {})
            if tokenizer.skipped_id is not None:  # of a reward model in training
                hf.config.pad_token_id = tokenizer.skipped_id
        else:
            hf.generation_config.eos_token_id = sorted(tokenizer.eos_ids)
            hf.generation_config.pad_token_id = tokenizer.pad_id
            # not save_pretrained, which refuses some settings that transformers has read
            hf.generation_config.to_json_file(f"{folder}/generation_config.json")
        hf.config.save_pretrained(folder)
        if has_any(hf.config, ["rope_parameters", "num_local_experts"]):
            optional("older_readers.add_older_names")(folder)
        tokenizer.save(folder)

    @property
    def max_positions(self):
        """How many tokens, prompt and response together, fit into the context."""
        longest = getattr(self.config, "max_position_embeddings", None) or 2**20
        if "longrope" in str(rope := getattr(self.config, "rope_parameters", None)):
            from options.families import longest_of_longrope

            return min(longest, longest_of_longrope(rope))
        return longest


def response_logprobs(policy, mb, temperature, chunk=0, entropy=True):
    """
    Log-prob and entropy of each token that the policy sampled, (b, W) both, in the distribution
    that is sampled. 0 where the mask is False: other numbers could overflow in exp there, and a NaN
    would spread into the gradients. chunk, entropy: see Model.logprobs.
    """
    both = policy.logprobs(mb["tokens"], mb["response_mask"], temperature, chunk, entropy)  # (n,)
    return tuple(in_rows(x, mb["response_mask"]) for x in both)


def response_values(value_model, mb):
    """The value of the state before each sampled token, (b, W); 0 where the mask is False."""
    states = states_before(value_model.states(mb["tokens"]), mb["response_mask"])  # (n, d)
    return in_rows(value_model.scalars(states), mb["response_mask"])


def in_rows(x, mask):
    """x (n,) -> (b, W): its numbers in order where the mask is True, n times; 0 elsewhere."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def states_before(states, target_mask):
    """
    The states that choose the target tokens: states (b, W, d), target_mask (b, W) bool -> (n, d).
    The state of a token chooses the next one: only here are the two shifted against each other.
    """
    before = F.pad(target_mask[:, 1:], (0, 1))  # (b, W): one place to the left
    # flat, with row numbers: the backward pass of states[before] would add number by number
    return states.flatten(0, 1).index_select(0, before.flatten().nonzero().squeeze(1))


def scaled_logits(logits, temperature=1.0, tokenizer=None):
    """
    The logits of the distribution that is sampled, trained and compared: logits (..., V) /
    temperature, in at least float32; -inf from the tokenizer's vocab_size on. The sampler and all
    log-probs use this function, so they mean the same distribution. Temperature 0 counts as 1.
    """
    logits = at_least_float32(logits)
    if torch.is_tensor(temperature) and temperature.ndim:
        raise TypeError(f"temperature must be one number, not a tensor {tuple(temperature.shape)}")
    if temperature not in (0, 1):
        logits = logits / temperature
    if tokenizer is not None and tokenizer.vocab_size < logits.shape[-1]:
        column = torch.arange(logits.shape[-1], device=logits.device)  # (V,)
        logits = logits.masked_fill(column >= tokenizer.vocab_size, -torch.inf)
    return logits


def entropy_of(logprobs):
    """Entropy in nats of each distribution: log-probs of all tokens (..., V) -> (...)."""
    # an impossible token (log-prob -inf) must add p log p = 0, but 0 * -inf is NaN
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)


def at_least_float32(x):
    """16 bits to float32: exp and log-softmax lose 0.07 nats in bfloat16. float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def has_any(config, names):
    """Whether a config of transformers has any of these settings for its texts."""
    return any(getattr(config.get_text_config(), name, None) for name in names)


@contextlib.contextmanager
def no_grad_forwards(models, device):
    """The block around every forward of these models without a backward pass; some may be None."""
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for model in models:
            if model is not None and model.must_fetch:
                from options.shards import fetched

                stack.enter_context(fetched(model, device))
        yield


# -------------------------------------------------------------------------------------------------
# The keys and values of the tokens so far, while a policy decodes: transformers' cache with one
# change. Its DynamicLayer copies all columns to append one. Here a layer has spare columns, and the
# keys and values of a token are written into the next one.

SPARE = 64  # columns


def decoding_cache(config):
    """An empty cache for a model of transformers. Layers of other kinds are transformers' own."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=config)
    if any(hasattr(layer, "conv_states") for layer in cache.layers):
        from options.families import HybridCache

        cache = HybridCache(config=config)
    cache.layers = [roomy_layer()() if type(layer) is DynamicLayer else layer
                    for layer in cache.layers]
    return cache


@functools.cache
def roomy_layer():
    """The class of a layer that sees all tokens. In a function: transformers is slow to import."""
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):
        """
        buffers: its keys and its values, (rows, heads, columns, width) each, with spare columns
        behind the used ones; self.keys and self.values are views of them.
        """

        def update(self, key_states, value_states, *args, **kwargs):
            """Append (rows, heads, k, width) of k new tokens. Returns all keys and all values."""
            new = key_states, value_states
            device = key_states.device.type
            if torch.is_autocast_enabled(device):
                # rotary tables are fp32, and so are the keys; attention would round all of them to
                # 16 bits at every token
                new = [x.to(torch.get_autocast_dtype(device)) for x in new]
            if not self.is_initialized:
                self.lazy_initialization(*new)
            begin = self.get_seq_length()
            end = begin + key_states.shape[-2]
            if begin == 0 or end > self.buffers[0].shape[-2]:
                self.buffers = [F.pad(torch.cat([old, x], -2), (0, 0, 0, SPARE))
                              for old, x in zip((self.keys, self.values), new, strict=True)]
            else:
                for buffer, x in zip(self.buffers, new, strict=True):
                    buffer[:, :, begin:end] = x
            self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
            return self.keys, self.values

        def batch_select_indices(self, indices):
            """Keep only these rows, in this order; a row may come several times."""
            used = self.get_seq_length()
            if used:
                self.buffers = [buffer[indices] for buffer in self.buffers]
                self.keys, self.values = (buffer[:, :, :used] for buffer in self.buffers)

    return RoomyLayer
