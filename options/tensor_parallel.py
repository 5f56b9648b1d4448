"""
Tensor-parallel generation, the key generate_tp: n neighbouring ranks share the policy while it
samples. Each has some heads of every attention, and some of the width of every MLP, by
transformers' plan for the family (the model's tp_plan). They decode the same responses in step, and
exchange numbers in every layer.

The copy that decodes is split and stays in memory; each rank has 1 / n of it. Before each rollout
it gets the policy's new weights, a tensor at a time, so no rank ever needs memory for all of them.
"""
import copy
import functools

import torch
import torch.distributed as dist

import parallel
from errors import BadInput, first_line
from load import auto_class
from model import Model
from options.sixteen_bits import matrices_of
from parallel import copy_into, is_shard


def check_ranks(system):
    others = system.roles, system.sampler == "vllm", system.environment, system.tools
    if parallel.rank_and_size()[1] % system.generate_tp or any(others):
        raise BadInput(f"generate_tp = {system.generate_tp}: it must divide the number of ranks, "
                       "and goes with no roles, sampler = 'vllm', environment or tools")


@torch.no_grad()
def split_copy(policy, dtype, device, n):
    """
    A collective: the split copy of a policy, made at the first call, with the policy's present
    weights, which it gets a tensor at a time. dtype: of its matrices; None: the policy's.
    """
    split = make_split(policy, dtype or policy.hf.dtype, device, n)  # COLLECTIVE
    for name, part in split.hf.named_parameters():
        p = policy.hf.get_parameter(name)
        W = p.to(device).full_tensor() if is_shard(p) else p.detach()  # COLLECTIVE
        copy_into(part, policy.as_saved(name, W).to(part.dtype))
    return split


@functools.cache  # for each policy, by its identity
def make_split(policy, dtype, device, n):
    """A collective: a Model like the policy over n ranks, without weights. Raises BadInput."""
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = copy.deepcopy(policy.hf.config)
    # the table of embeddings and the head are split in different ways, so they cannot be tied
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    heads = getattr(config.get_text_config(), "num_key_value_heads", None)
    if heads is not None and heads % n:
        raise BadInput(f"generate_tp = {n} does not divide the {heads} heads of keys and values "
                        f"of {policy.path}; take a divisor")
    with torch.device("meta"):  # no memory yet
        hf = auto_class("lm").from_config(config, dtype=dtype)
    rounded = set(map(id, matrices_of(Model(hf))))
    for p in (p for p in hf.parameters() if id(p) not in rounded):
        p.data = p.data.to(policy.hf.dtype)

    def by_transformers(function):
        try:
            return function()
        except (ValueError, RuntimeError, AttributeError, KeyError) as e:
            raise BadInput(f"generate_tp = {n}: transformers cannot split {policy.path} over so "
                            f"many ranks: {first_line(e)}; leave generate_tp out") from e

    plan, *_ = by_transformers(lambda: hf._resolve_parallel_plans(DistributedConfig(tp_size=n)))
    # not earlier: a rank that refuses must not leave while others still connect
    rank, size = parallel.rank_and_size()
    groups = [dist.new_group(range(first, first + n)) for first in range(0, size, n)]  # COLLECTIVE
    mesh = DeviceMesh.from_group(groups[rank // n], device.type, mesh_dim_names=("tp",))
    by_transformers(lambda: apply_tensor_parallelism(hf, mesh, plan))
    hf.to_empty(device=device)
    for mine, theirs in zip(hf.buffers(), policy.hf.buffers(), strict=True):
        mine.copy_(theirs)
    return Model(hf, path=policy.path, tokenizer=policy.tokenizer).requires_grad_(False)
