"""
The models are those of transformers. A Model holds one of them, and gives what quartet needs:
log-probs of the tokens of a text, one number for each token, and the next step of a decoding.

    policy = load_model("out/arithmetic_sft/policy")        # AutoModelForCausalLM
    reward_model = load_model("out/arithmetic_rm/reward_model", "scalar")
                                                            # AutoModelForSequenceClassification
    logprobs, entropy = policy.logprobs(tokens, target_mask)

How a log-prob is computed, for one text of T tokens:

    states = trunk(tokens)                            # (T, d): state t has read tokens 0 to t
    logits = head(states)                             # (T, V): row t is the guess of token t + 1
    logprobs = logits.log_softmax(-1)                 # (T, V)
    logprob of token t = logprobs[t - 1, tokens[t]]   # the shift by one: see states_before

Model.logprobs does that with many texts at a time, in rows that are padded on the right. A token
sees only the tokens before it, so padding behind a text changes nothing in the text, and no mask is
needed. There is no dropout: every model stays in eval mode, because a policy must give the same
token the same probability twice.

load.py loads a Model.

b rows, T tokens in the longest row, R in the longest response, n tokens that are read, V
vocabulary, d width of a state.
"""
import contextlib
import inspect

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from errors import BadInput


class Model(nn.Module):
    """A model of transformers, `hf`, with the head of a language model or of one scalar a token."""

    def __init__(self, hf, head="lm", path="", file_dtype=None):
        super().__init__()
        self.hf, self.head, self.path = hf.eval(), head, path
        self.file_dtype = file_dtype  # dtype of the weights in the model's file
        self.base, self.adapters = None, {}  # of a model on another model's trunk: see trunk.py
        self.processor = {}  # {name: content} of files for images and sound: see processor_files
        self.unread = ()  # names of parameters that no text reaches: see unread_parameters
        if head == "scalar":
            check_head(hf, path)
        # is added to every scalar; rm.py measures it and saves it in config.json
        self.score_shift = getattr(hf.config, "score_shift", 0.0)
        self.new_head = False  # True: the scalar head was not in the file, but is newly drawn
        self.__dict__["active"] = None  # the model whose adapters are in use: see reading_with
        self.recomputed = []  # layers that the backward pass computes again: see recompute
        self.compiled = None  # the trunk, compiled: see compile_trunk
        self.elsewhere = False  # True: split, or in the CPU's memory, see options/shards.py

    @property
    def config(self):
        """The settings of the language model, as transformers names them."""
        return self.hf.config.get_text_config()

    def states(self, tokens):
        """tokens (b, T) int64, padded on the right -> the states that the head reads, (b, T, d)."""
        trunk = self.hf.base_model if self.compiled is None else self.compiled
        for layer in self.recomputed:
            layer.training = torch.is_grad_enabled()  # the layer's own flag alone: see recompute
        return trunk(tokens, use_cache=False).last_hidden_state

    def logits(self, states):
        """The LM head: states (n, d) -> logits (n, V). `probe` compares it with the model's own."""
        logits = self.hf.get_output_embeddings()(states)
        c = self.config
        logits = logits * getattr(c, "logit_scale", 1.0)  # Cohere
        logits = logits / getattr(c, "logits_scaling", 1.0)  # Granite
        cap = getattr(c, "final_logit_softcapping", None)  # Gemma 2
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def logprobs(self, tokens, target_mask, temperature=1.0, vocab_size=None, chunk=0,
                 entropy=False):
        """
        Log-probs of n tokens, and the entropies of their distributions, (n,) float32 both (float64
        if the model is).

        tokens: (b, T), padded on the right. target_mask: (b, T) bool, True on the n tokens, never
        on the first of a row. temperature, vocab_size: see scaled_logits. entropy: False gives 0.
        chunk: how many tokens have logits at a time, 0 = all. With a chunk the backward pass
        computes the logits again, so the logits of all tokens, (n, V), never exist together. They
        are often the largest tensor of a run: 4.2 GB for 8 responses of 1,024 tokens with a
        vocabulary of 128,256.
        """
        def read(states, ids):
            logits = scaled_logits(self.logits(states), temperature, vocab_size)  # (., V)
            logprobs = logits.log_softmax(-1)  # (., V)
            of_tokens = logprobs.gather(-1, ids[:, None]).squeeze(-1)  # (.,)
            return of_tokens, entropy_of(logprobs) if entropy else torch.zeros_like(of_tokens)

        states, ids = states_before(self.states(tokens), target_mask), tokens[target_mask]
        if chunk == 0 or len(ids) <= chunk:
            return read(states, ids)
        parts = [checkpoint(read, *part, use_reentrant=False, preserve_rng_state=False)
                 for part in zip(states.split(chunk), ids.split(chunk), strict=True)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def values(self, tokens, target_mask):
        """
        The value of the state before each target token, (n,): of the moment when the token is not
        chosen yet. tokens, target_mask: as in `logprobs`.
        """
        return self.scalars(states_before(self.states(tokens), target_mask))

    def scores(self, tokens, last):
        """
        The score of each text, (b,), read at its last token. tokens: (b, T), padded on the right.
        last: (b,) int64, the index of each text's last token.
        """
        return self.scalars(self.states(tokens)[torch.arange(len(tokens)), last])

    def scalars(self, states):
        """
        The scalar head: states (n, d) -> (n,) in at least float32, also under autocast. bfloat16
        has 8 significant bits: scores around 5 would be multiples of 1/32, and many would be equal.
        """
        with torch.autocast(states.device.type, enabled=False):
            states, weight = (at_least_float32(x) for x in (states, self.hf.score.weight))
            return F.linear(states.to(weight.dtype), weight).squeeze(-1) + self.score_shift

    def last_logits(self, tokens, last):
        """The logits of the token that follows each text, (b, V); arguments as in `scores`."""
        return self.logits(self.states(tokens)[torch.arange(len(tokens)), last])

    def next_logits(self, tokens, cache, attention_mask=None, position_ids=None):
        """
        A step of a decoding: tokens (n, k) behind the tokens in the cache -> the logits of the next
        token, (n, V). attention_mask (n, all tokens so far), True on real tokens, and position_ids
        (n, k): None where no row is padded.
        """
        # transformers 5.24 has another name for the argument, and warns of the old one
        takes = inspect.signature(type(self.hf).forward).parameters
        name = "cache" if "cache" in takes else "past_key_values"
        out = self.hf(tokens, attention_mask=attention_mask, position_ids=position_ids,
                      use_cache=True, logits_to_keep=1, **{name: cache})
        return out.logits[:, -1]

    def layers(self):
        """The blocks of the trunk, which are sharded, or computed again, one at a time."""
        # GradientCheckpointingLayer: the class of blocks in families that do not name theirs
        kinds = set(self.hf._no_split_modules or ["GradientCheckpointingLayer"])
        # FSDP makes a subclass of the block's class
        return [m for m in self.hf.base_model.modules()
                if kinds & {kind.__name__ for kind in type(m).__mro__}]

    def recompute(self):
        """
        Gradient checkpointing, transformers' own: keep only each layer's input for the backward
        pass, which computes the layer again. A step takes a third longer, and far less memory.
        """
        settings = dict(use_reentrant=False)
        if self.compiled is None:  # torch.compile allows no context
            # the second time with the same adapters as the first time
            settings["context_fn"] = lambda: (contextlib.nullcontext(),
                                              self.reading_with(self.active))
        if not self.hf.supports_gradient_checkpointing:
            raise BadInput(f"{self.path}: a {type(self.hf).__name__} cannot compute its layers "
                           "again; leave gradient_checkpointing out")
        # transformers before 5.23 has another name for it
        enable = getattr(self.hf, "activation_checkpointing_enable",
                         self.hf.gradient_checkpointing_enable)
        enable(settings)
        # transformers does it where a layer's flag `training` is set. `states` sets the flag of
        # the layers alone: in the modules inside them it would switch dropout on
        self.recomputed = [m for m in self.layers() if getattr(m, "gradient_checkpointing", False)]
        for layer in self.recomputed:
            layer._gradient_checkpointing_func = without_dropout(
                layer, layer._gradient_checkpointing_func)

    def owner(self):
        """The Model that has the trunk: this one; see trunk.py for other cases."""
        return self

    def merged(self, name, W):
        """W, a whole tensor of self.hf with this name, plus its adapters, if it has some."""
        return W

    @contextlib.contextmanager
    def reading_with(self, adapted):
        """
        In this block the trunk computes with the adapters of `adapted`, a model on this trunk
        (options/lora.py); None: without adapters.
        """
        before, self.__dict__["active"] = self.active, adapted
        try:
            yield
        finally:
            self.__dict__["active"] = before

    def compile_trunk(self):
        """Reading and training use the trunk as torch.compile makes it; decoding does not."""
        # nn.Module must not register it: its parameters are registered already
        self.__dict__["compiled"] = torch.compile(self.hf.base_model, dynamic=True)
        if self.recomputed:
            self.recompute()

    @property
    def max_positions(self):
        """
        How many tokens fit into the context. With longrope (Phi-3) fewer do: a longer row would
        change the angles of the rows beside it, and of its own tokens in the cache.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # of layers
        shorter = [each["original_max_position_embeddings"] for each in kinds
                   if each.get("rope_type") == "longrope"]
        return min([getattr(self.config, "max_position_embeddings", None) or 2**20, *shorter])


def response_logprobs(policy, mb, temperature, vocab_size, chunk=0, entropy=True):
    """
    Log-prob and entropy of each response token, (b, R) both, in the distribution that is sampled:
    divided by the temperature, and without the ids from vocab_size on. 0 where the mask is False:
    other numbers could overflow in exp there, and a NaN would spread into the gradients.

    mb: a micro-batch of prompts.micro_batch. chunk and entropy: see Model.logprobs.
    """
    found = policy.logprobs(mb["tokens"], mb["target_mask"], temperature, vocab_size, chunk,
                            entropy)
    return tuple(in_rows(x, mb["response_mask"]) for x in found)


def response_values(value_model, mb):
    """The value of the state before each response token, (b, R); 0 where the mask is False."""
    return in_rows(value_model.values(mb["tokens"], mb["target_mask"]), mb["response_mask"])


def in_rows(x, mask):
    """x, n numbers, put in order where mask (b, R) is True (n times); 0 elsewhere."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def states_before(states, target_mask):
    """
    The states that choose the target tokens: states (b, T, d), target_mask (b, T) bool -> (n, d).

    The state of a token chooses the next token. Only here are states and tokens shifted against
    each other.
    """
    before = F.pad(target_mask[:, 1:], (0, 1))  # (b, T): one place to the left
    # flat, with row numbers: the backward pass of states[before] would add number by number
    return states.flatten(0, 1).index_select(0, before.flatten().nonzero().squeeze(1))


def scaled_logits(logits, temperature=1.0, vocab_size=None):
    """
    The logits of the distribution that is sampled, trained and compared: logits (..., V) /
    temperature, in at least float32. The sampler and all log-probs use this function, so they mean
    the same distribution. vocab_size: the tokenizer's; ids from this one on are padding of the
    model's vocabulary, and get the logit -inf, so they are impossible. None: there is no padding.
    """
    logits = at_least_float32(logits)
    if temperature != 1.0:
        logits = logits / temperature
    if vocab_size is not None and vocab_size < logits.shape[-1]:
        is_padding = torch.arange(logits.shape[-1], device=logits.device) >= vocab_size  # (V,)
        logits = logits.masked_fill(is_padding, -torch.inf)
    return logits


def entropy_of(logprobs):
    """Entropy in nats of each distribution: log-probs of all tokens (..., V) -> (...)."""
    # an impossible token (log-prob -inf) must add p log p = 0, but 0 * -inf is NaN
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)


def at_least_float32(x):
    """16 bits to float32: exp and log-softmax lose 0.07 nats in bfloat16. float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_linear(module):
    """Whether an adapter can be added to a module. GPT-2's Conv1D is a linear map, too."""
    kind = type(module).__name__  # classes with these ends are made from nn.Linear, and do more
    more = kind.endswith(("Router", "GroupedLinear"))
    return kind == "Conv1D" or isinstance(module, nn.Linear) and not more


def in_full(p):
    """A parameter as numbers; of one in 4 bits the numbers that its map uses, (out, in)."""
    if not hasattr(p, "quant_state"):
        return p.detach()
    from options.four_bits import rounded

    return rounded(p)


def without_dropout(layer, checkpointed):
    """
    The function `checkpointed`, by which transformers runs a layer that is computed again; but it
    takes back the layer's flag `training` first, for some layers have dropout of their own (OPT,
    Falcon).
    """
    def run(*args):
        layer.training = False
        return checkpointed(*args)

    return run


def freeze(model):
    """Switch a model's gradients off. Returns it."""
    return model.requires_grad_(False)


def check_head(hf, path):
    """Raise BadInput where a sequence classifier's head is not a linear map to one score."""
    score = getattr(hf, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1 or score.bias is not None:
        raise BadInput(f"{path}: the head of {type(hf).__name__} is not one linear map to one "
                       "score, without a bias; give another model")


@contextlib.contextmanager
def no_grad_forwards(models, device):
    """
    The block around every forward that has no backward pass: no gradients are recorded. `models`
    are all the models that the block calls; a model that the run does not have is None.
    """
    trunks = dict.fromkeys(model.owner() for model in models if model is not None)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for trunk in trunks:  # each once, even if several models stand on it
            if trunk.elsewhere:
                from options.shards import here

                stack.enter_context(here(trunk, device))
        yield
