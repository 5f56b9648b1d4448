"""
GRPO for language models in one file: three models, any number of ranks, a run that can be killed.

torchrun --nproc_per_node=8 nano/grpo.py --policy_path=MODEL --reward_path=MODEL --prompts_path=FILE

It is nano/ppo.py without the value model: `diff nano/ppo.py nano/grpo.py` is the lesson. Each
prompt gets group_size responses, and an advantage is a score, compared with those of its group.
Nothing is imported from quartet; with equal keys it ends in the weights of grpo.py. grpo.py adds
what ppo.py adds, and GRPO's relatives: DAPO, Dr. GRPO, GSPO, CISPO, RLOO.

    policy         logprobs (B, T)         trained   starts as policy_path, an SFT model
    ref_policy     ref_logprobs (B, T)     frozen    the same; the KL to it keeps the policy near it
    reward_model   scores (B,)             frozen    reward_path, a model with one label

B responses in T columns: a row is a text from column 0 on: prompt, response, padding. A number that
belongs to a token stands in its column; response_mask is True on what the policy sampled. A
micro-batch is a few rows, cut to the longest, (b, W). All ranks have the whole batch, and each
samples and trains some rows. COLLECTIVE marks a line that all ranks must reach together.
"""
import functools
import hashlib
import inspect
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, rnn
from transformers import AutoModelForCausalLM as LM
from transformers import AutoModelForSequenceClassification as Scalar
from transformers import AutoTokenizer, DynamicCache

# keys, named as in ppo.py: typed as --key=value, or in a config file of such lines
out_dir = "out/nano_grpo"  # the checkpoint, and the finished models; the same command resumes
policy_path = "out/arithmetic_sft/policy"  # an SFT model: a folder, or a name on the hub
reward_path = "out/arithmetic_rm/reward_model"  # a model with one label
prompts_path = "data/arithmetic/rl_train.jsonl"  # a line for each prompt: {"prompt": "1+2="}
batch_size = 512  # B, responses an iteration, over all ranks; a multiple of group_size
group_size = 8  # G, responses to a prompt
max_new_tokens = 1024  # R, the longest response
temperature = 1.0  # of sampling, and so of every log-prob
missing_eos_penalty = 0.0  # the score of a response that never ends is minus this; 0 = its own
kl_coef = 0.04  # weight of the KL to the reference
num_iterations = 1  # passes over the batch
num_minibatches = 1  # optimizer steps a pass
micro_batch_size = 8  # most rows scored or trained at once; only memory depends on it
cliprange = 0.2  # no gain from a ratio below 1 - this
cliprange_high = 0.2  # nor above 1 + this
max_iters = 500  # iterations
learning_rate = 1e-6  # it stays
adam_eps = 1e-8  # AdamW's epsilon
grad_clip = 1.0  # largest gradient norm; 0 = any
seed = 1  # decides the order of the prompts, the sampling and the minibatches
checkpoint_interval = 50  # iterations
dtype = "float32"  # float64: for proofs
device_type = "cuda" if torch.cuda.is_available() else "cpu"

keys = {name: x for name, x in globals().items() if type(x) in (str, int, float) and name[0] != "_"}
for arg in sys.argv[1:]:
    name, _, text = arg.removeprefix("--").partition("=")
    assert name in keys or not arg.startswith("--"), f"no key {name}; there are {', '.join(keys)}"
    if name in keys:
        globals()[name] = type(keys[name])(text)
    else:
        exec(open(arg, encoding="utf-8-sig").read())  # a config file; nothing is evaluated here
keys = {name: globals()[name] for name in keys}

# set-up: the ranks, the four models, the optimizers, the prompts
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0)) * (device_type == "cuda"))
if size > 1:  # torchrun has started this process
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")  # COLLECTIVE

def load(kind, path, trained, **settings):
    """A model of transformers. eval: with dropout a token would have two probabilities."""
    model, report = kind.from_pretrained(path, dtype=getattr(torch, dtype), use_safetensors=True,
                                         output_loading_info=True, **settings)
    assert not report["missing_keys"], f"{path} has no {report['missing_keys']}"
    return model.eval().requires_grad_(trained).to(device)

policy, ref_policy = (load(LM, policy_path, x) for x in (True, False))
reward_model = load(Scalar, reward_path, False, num_labels=1)
trained = dict(policy=policy)
shift = getattr(reward_model.config, "score_shift", None)  # rm.py's; added to scores
optimizers = {name: torch.optim.AdamW(model.parameters(), eps=adam_eps, weight_decay=0.0)
              for name, model in trained.items()}
everything = [p for model in (policy, ref_policy, reward_model) for p in model.parameters()]
learned = [p for p in everything if p.requires_grad]

tokenizer, reward_tokenizer = map(AutoTokenizer.from_pretrained, (policy_path, reward_path))
ends = {tokenizer.eos_token_id}  # a response ends with any of them
for ids in (policy.config.eos_token_id, policy.generation_config.eos_token_id):
    ends |= {*(ids if isinstance(ids, list) else [ids])} - {None}
special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
unseen = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} | ends & special
vocab_size = max(tokenizer.get_vocab().values()) + 1  # a model may have logits for more ids

def encode(tokenizer, texts):
    """The ids of texts, behind the tokenizer's BOS, if it has one. "</s>" in a text is letters."""
    plain = dict(add_special_tokens=False, split_special_tokens=True)
    whole, bare = tokenizer("a1").input_ids, tokenizer("a1", **plain).input_ids
    return [whole[:whole.index(bare[0])] + ids for ids in tokenizer(texts, **plain).input_ids]

prompt_ids = encode(tokenizer, [json.loads(line)["prompt"] for line in open(
    prompts_path, encoding="utf-8-sig")])
assert max(map(len, prompt_ids)) + max_new_tokens <= policy.config.max_position_embeddings

# Nothing is random but by name: (seed, what for, iteration, place). So no random state is saved,
# and no response depends on the rank that samples it, or on the responses beside it.
def generator(*name):
    digest = hashlib.blake2b(" ".join(map(str, name)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))

@functools.lru_cache(8)
def permutation(n, *name):
    return torch.randperm(n, generator=generator(*name)).to(device)

def all_reduce(x, op=dist.ReduceOp.SUM):
    """A collective: x becomes the sum of the ranks' x."""
    if size > 1:
        dist.all_reduce(x, op)
    return x

# what the models read
def scaled(logits):
    """The logits of the distribution that is sampled, trained and compared, (..., V)."""
    column = torch.arange(logits.shape[-1], device=device)
    return (logits / temperature).masked_fill(column >= vocab_size, -torch.inf)

def logprobs_of(model, mb):
    """The log-prob of each response token, (b, W); 0 elsewhere."""
    mask = mb["response_mask"]  # the logits in the column before a token choose it
    logits = model(mb["tokens"], use_cache=False).logits[:, :-1][mask[:, 1:]]  # (n, V)
    logprobs = scaled(logits).log_softmax(-1).gather(-1, mb["tokens"][mask][:, None])  # (n, 1)
    return logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs)

def scalars(model, tokens):
    """What the scalar head says at each token, (b, W)."""
    return model.score(model.base_model(tokens, use_cache=False).last_hidden_state)[..., 0] + shift

def micro_batches(batch, rows):
    """This rank's part of some rows of a batch: dicts like the batch; similar lengths together."""
    own = rows[rank::size]
    for part in own[batch["lengths"][own].argsort(descending=True)].split(micro_batch_size):
        W = batch["lengths"][part].max()
        yield {name: x[part, :W] if x.dim() == 2 else x[part] for name, x in batch.items()}

@torch.no_grad()
def sample(prompts, uniforms):
    """Responses to n prompts, by uniforms (n, R): tokens, log-probs (n, R), lengths, ended (n,)."""
    P = max(map(len, prompts))  # they are padded on the left, so all end in the same column
    tokens = torch.tensor([[0] * (P - len(ids)) + ids for ids in prompts], device=device)
    mask = torch.tensor([[0] * (P - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    position, cache = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(config=policy.config)
    argument = {"cache", "past_key_values"} & inspect.signature(policy.forward).parameters.keys()
    responses, logprobs = torch.zeros_like(uniforms).long(), torch.zeros_like(uniforms)
    lengths, ended = torch.zeros(2, len(prompts), dtype=torch.int64, device=device)
    for t in range(max_new_tokens):
        logits = policy(tokens, attention_mask=mask, position_ids=position, use_cache=True,
                        logits_to_keep=1, **{min(argument): cache}).logits[:, -1]
        log_probs = scaled(logits).log_softmax(-1)  # (n, V), of all tokens
        # the first token whose cumulated probability, in whole numbers, is above the uniform
        cdf = (log_probs.exp() * 2.0**40).long().cumsum(1)
        tokens = torch.searchsorted(cdf, (uniforms[:, t] * cdf[:, -1]).long()[:, None], right=True)
        going = ended == 0  # a response that has ended goes on beside the others, and is not kept
        responses[going, t] = tokens[going, 0]
        logprobs[going, t] = log_probs.gather(1, tokens)[going, 0].to(logprobs)
        lengths[going] = t + 1
        ended |= torch.isin(tokens[:, 0], torch.tensor(sorted(ends), device=device))
        if ended.all():
            break
        mask, position = F.pad(mask, (0, 1), value=1), position[:, -1:] + 1
    return responses, logprobs, lengths, ended

@torch.no_grad()
def score(texts, ended):
    """The reward model's score of each text, prompt and response, at its last token: (n,)."""
    scores, sequences, config = [], [], reward_model.config
    for ids, end in zip(encode(reward_tokenizer, texts), ended, strict=True):
        ids = (ids + [reward_tokenizer.eos_token_id] * end)[:config.max_position_embeddings]
        while len(ids) > 1 and ids[-1] == config.pad_token_id:
            ids.pop()  # as in transformers: it is read at the last token that is no padding
        sequences.append(torch.tensor(ids, device=device))
    for i in range(0, len(texts), micro_batch_size):
        part = sequences[i:i + micro_batch_size]
        rows = scalars(reward_model, rnn.pad_sequence(part, batch_first=True))  # (b, W)
        scores += [row[len(ids) - 1] for row, ids in zip(rows, part, strict=True)]
    return torch.stack(scores)

def rollout(iteration):
    """A collective: the batch of an iteration, on all ranks: each samples and scores its rows."""
    B, n, G = batch_size, len(prompt_ids), group_size  # each epoch has an order of its own
    rows = [int(permutation(n, seed, "epoch", place // n)[place % n])
            for place in range(iteration * B // G, (iteration + 1) * B // G) for _ in range(G)]
    begins = torch.tensor([len(prompt_ids[row]) for row in rows], device=device)  # (B,)
    T, own = int(begins.max()) + max_new_tokens, range(rank, B, size)  # own: this rank's rows
    asked = [prompt_ids[rows[i]] for i in own]
    noise = [torch.rand(max_new_tokens, dtype=torch.float64, generator=generator(
        seed, "rollout", iteration, i // G, i % G)) for i in own]
    responses, logprobs, lengths, ended = sample(asked, torch.stack(noise).to(device))
    texts = [tokenizer.decode([token for token in ids + said[:n] if token not in unseen],
                              clean_up_tokenization_spaces=False) for ids, said, n in zip(
        asked, responses.tolist(), lengths.tolist(), strict=True)]
    column = begins[own][:, None] + torch.arange(max_new_tokens, device=device)
    tokens = torch.tensor([ids + [0] * (T - len(ids)) for ids in asked], device=device)
    part = dict(tokens=tokens.scatter(1, column, responses), lengths=begins[own] + lengths,
                sampler_logprobs=logprobs.new_zeros(tokens.shape).scatter(1, column, logprobs),
                ended=ended, scores=score(texts, ended.tolist()))
    batch, column = dict(index=torch.arange(B, device=device)), torch.arange(T, device=device)
    for name, x in part.items():
        batch[name] = x.new_zeros(B, *x.shape[1:])  # 0 in other ranks' rows
        batch[name][own] = x
        all_reduce(batch[name])  # COLLECTIVE
    # equal responses score the same to the last bit, whatever stood beside them
    first, texts = {}, [str(row[:n]) for row, n in zip(
        batch["tokens"].tolist(), batch["lengths"].tolist(), strict=True)]
    batch["scores"] = batch["scores"][[first.setdefault(x, i) for i, x in enumerate(texts)]]
    batch["response_mask"] = (begins[:, None] <= column) & (column < batch["lengths"][:, None])
    return batch

def group_advantages(scores):
    """(B,) -> (B,): a score minus its group's mean, over the deviation; 0 where all are equal."""
    groups = scores.double().view(-1, group_size)  # (B / G, G)
    advantages = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.masked_fill((groups == groups[:, :1]).all(1, True), 0).flatten().to(scores)

# the audit, and the checkpoint: one file, complete or not there
def audit():
    """A collective: all ranks have the same finite weights, and those of frozen models stay."""
    norms = torch.stack([p.detach().double().norm() for p in everything])
    both = [all_reduce(norms.clone(), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)]
    assert all((x == norms).all() for x in both), "a weight is not finite, or not another rank's"
    now = norms[len(learned):].tolist()  # of the frozen models
    assert frozen_norms in ([], now), "a frozen model has changed"
    frozen_norms[:] = now  # of the first audit

def save(iteration):
    """A collective: an audit; then rank 0 replaces the checkpoint as a whole."""
    audit()  # COLLECTIVE
    if rank == 0:
        os.makedirs(out_dir, exist_ok=True)
        with open(f"{file}.new", "wb") as f:
            torch.save(dict(iteration=iteration, shift=shift, keys=keys, parts={
                name: (model.state_dict(), optimizers[name].state_dict())
                for name, model in trained.items()}), f)
            os.fsync(f.fileno())  # it is on the disk, before it gets its name
        os.replace(f"{file}.new", file)

file, start, frozen_norms = f"{out_dir}/checkpoint.pt", 0, []
if os.path.exists(file):
    saved = torch.load(file, map_location="cpu", weights_only=True)  # no code in it is run
    start, shift = saved["iteration"], saved["shift"]
    for name in ("seed", "batch_size", "policy_path", "reward_path", "prompts_path", "dtype"):
        assert saved["keys"][name] == keys[name], f"{out_dir} has a run with another {name}"
    for name, (weights, moments) in saved["parts"].items():
        trained[name].load_state_dict(weights)
        optimizers[name].load_state_dict(moments)
elif shift is None:  # a reward model of others: its first scores become 0 on average
    shift = 0.0
    batch = rollout(0)  # COLLECTIVE
    counted = batch["ended"] > 0 if batch["ended"].any() else batch["ended"] == 0
    shift = -batch["scores"][counted].double().mean().item()
audit()  # COLLECTIVE

for iteration in range(start, max_iters):
    # 1) rollout: the policy answers. The same call begins 2) score: the answers get scores
    batch = rollout(iteration)  # COLLECTIVE
    mask = batch["response_mask"]  # (B, T)

    # 2) score, before any update: the log-probs of policy and reference
    sources = dict(old_logprobs=(logprobs_of, policy), ref_logprobs=(logprobs_of, ref_policy))
    columns = {x: torch.zeros(mask.shape, dtype=policy.dtype, device=device) for x in sources}
    with torch.no_grad():
        for mb in micro_batches(batch, batch["index"]):
            for name, (forward, model) in sources.items():
                columns[name][mb["index"], :mb["tokens"].shape[1]] = forward(model, mb)
    batch |= {name: all_reduce(x) for name, x in columns.items()}  # COLLECTIVE
    gap = (batch["sampler_logprobs"] - batch["old_logprobs"]).abs().max().item()
    limit = (1e-10 if dtype == "float64" else 5e-4) / min(temperature, 1)
    assert gap <= limit, f"sampled and read, log-probs differ by {gap:.1g} nats: a mask? dropout?"

    # 3) advantages: a score is compared with those of its group; one number for all its tokens
    scores = torch.where(batch["ended"] > 0, batch["scores"], -missing_eos_penalty)  # (B,)
    scores = scores if missing_eos_penalty > 0 else batch["scores"]
    batch["advantages"] = group_advantages(scores)[:, None].expand(mask.shape)  # (B, T)
    kl = batch["old_logprobs"] - batch["ref_logprobs"]  # (B, T)

    # 4) update: a few clipped steps on the policy
    for epoch in range(num_iterations):
        order = permutation(batch_size, seed, "minibatches", iteration, epoch)
        for rows in order.tensor_split(num_minibatches):
            if not batch["advantages"][rows].any():
                continue  # only momentum and the KL would move the policy
            # each response weighs the same, and so do its tokens: of all micro-batches and ranks
            batch["weights"] = mask.to(policy.dtype) / mask.sum(1, keepdim=True) / len(rows)
            for p in learned:
                p.grad = torch.zeros_like(p)
            for mb in micro_batches(batch, rows):
                # the policy: how much likelier is each token now, and is that good?
                logprobs = logprobs_of(policy, mb)  # (b, W)
                ratio = (logprobs - mb["old_logprobs"]).exp()
                pg_losses1 = -mb["advantages"] * ratio
                pg_losses2 = -mb["advantages"] * ratio.clamp(1 - cliprange, 1 + cliprange_high)
                # the KL to the reference: q/p - 1 - log(q/p), k3, is never negative
                q_p = mb["ref_logprobs"] - logprobs
                losses = torch.max(pg_losses1, pg_losses2) + kl_coef * (q_p.expm1() - q_p)
                (losses * mb["weights"]).sum().backward()
            for p in learned:
                all_reduce(p.grad)  # COLLECTIVE: from here on it is the same on all ranks
            for name, optimizer in optimizers.items():
                norm = clip_grad_norm_(trained[name].parameters(), grad_clip or torch.inf)
                assert norm.isfinite(), f"iteration {iteration}: a gradient is not finite"
                optimizer.param_groups[0]["lr"] = learning_rate
                optimizer.step()

    # 5) metrics, of the batch of all ranks
    record = dict(iteration=iteration, score=batch["scores"].mean().item(), gap=gap,
                  kl=kl.sum().item() / batch_size, length=mask.sum().item() / batch_size)
    if rank == 0:
        print(json.dumps(record), flush=True)
    if (iteration + 1) % checkpoint_interval == 0 or iteration + 1 == max_iters:
        save(iteration + 1)  # COLLECTIVE

for name, model in trained.items() if rank == 0 else ():
    model.save_pretrained(f"{out_dir}/{name}")
    tokenizer.save_pretrained(f"{out_dir}/{name}")
