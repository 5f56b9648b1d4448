"""
The models of a run, and how each is loaded: load_policy, load_ref_policy, load_reward_model,
load_value_model. `load` reads a model from its folder, puts it on the device, and makes it trained
or frozen. With the keys that save memory (LoRA, 4 bits, shards, offload) it calls their options.
"""
import contextlib

import torch
import torch.nn as nn

import parallel
from configurator import of_model
from errors import BadConfig, BadInput, first_line
from load import load_model, outline, probe, unread_parameters
from model import freeze, no_grad_forwards
from tokenizer import check_tokenizer_fits, load_reader, load_tokenizer
from trunk import OnTrunk

# --------------------------------------------------------------------------------------------------
# precision

SHORT = dict(bfloat16=torch.bfloat16, float16=torch.float16)  # 16 bits


def dtypes(system):
    """
    (dtype of trained weights, dtype of frozen matrices, or None where it is the same).

    In 16 bits the trained weights are kept in fp32, and autocast rounds each matrix when it is
    used. So frozen matrices can be stored rounded: the results are the same. Norms and biases are
    vectors, which autocast does not round. master_weights=False: every weight is bfloat16, and
    there is no autocast.
    """
    if system.dtype not in SHORT:
        return getattr(torch, system.dtype), None
    if not system.master_weights:
        return torch.bfloat16, None
    return torch.float32, SHORT[system.dtype]


def autocast(system, device):
    """The context of a run's forwards: torch.autocast in 16 bits, otherwise nothing."""
    _, matrices = dtypes(system)
    if matrices is None:
        return contextlib.nullcontext()
    # no cache: a forward uses every matrix once, and the cache would keep the casts of all layers
    return torch.autocast(device.type, matrices, cache_enabled=False)


def matrices_of(model):
    """
    The parameters that autocast rounds wherever they are used: the matrices, but not the table of
    embeddings (rows are only looked up), not the biases of many experts (they are only added), not
    the parameters that the family keeps in 32 bits (some routers), and not a scalar head.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    wide = {id(p) for m in tables for p in m.parameters()}
    if model.head == "scalar":
        wide.add(id(model.hf.score.weight))
    kept = ("bias", *(model.hf._keep_in_fp32_modules_strict or ()))
    return [p for name, p in model.named_parameters()
            if p.dim() >= 2 and id(p) not in wide and not any(part in name for part in kept)]


# --------------------------------------------------------------------------------------------------
# one model


def load(path, name, system, device, head="lm", trained=False, seed=0):
    """
    The model of a folder or hub name, on the device, trained or frozen. A collective where
    zero_stage splits it over the ranks. With LoRA the model is frozen, and an adapter on it is
    trained. Ranks that do not need it (the key roles) get its shapes, without memory.

    name: of the model in the keys: policy, ref, reward, judge or value. head: see load_model. seed:
    of a new head or adapter. Raises BadInput.
    """
    dtype, matrices = dtypes(system)
    if parallel.roles:
        from options.messages import needs

        if not needs(name, system):
            return outline(path, head, dtype)
    adapter = of_model(system.lora, name) if trained else ""
    quantized = adapter and system.quantize == "4bit"
    settings = dict(head=head, dtype=dtype, matrices=matrices, trained=trained, adapted=adapter,
                    recompute=trained and system.gradient_checkpointing, seed=seed)
    copied = name == "policy" and not trained  # a generator's, which is whole
    if (system.zero_stage or system.offload) and not copied:
        from options.shards import load_split

        model = load_split(path, name, system, device, **settings)  # COLLECTIVE
    else:
        model = load_here(path, "cpu" if quantized else device, **settings)
    if quantized:
        from options.four_bits import quantize

        quantize(model, device, matrices or dtype)
        model.to(device)
    attend_by(model, system.attn_implementation)
    if system.compile:
        model.compile_trunk()
    if head == "lm":  # with autocast as in the run: some matrices are in 16 bits already
        with autocast(system, device), no_grad_forwards([model], device):
            probe(model)
    if not adapter:
        return model
    from options.lora import adapt

    return adapt(model, adapter, head, seed)


def load_here(path, device, head="lm", dtype=torch.float32, matrices=None, trained=False,
              adapted=False, recompute=False, seed=0):
    """
    A whole model on a device. dtype: of its weights; matrices: of its matrices, if it is frozen.
    adapted: it stays frozen, and an adapter on it is trained. recompute: the backward pass computes
    the layers again. Raises BadInput.
    """
    model = load_model(path, head, dtype, device, seed)
    unread = unread_parameters(model) if trained else ()
    settle(model, trained and not adapted, matrices, recompute, unread)
    return model


def settle(model, trained, matrices=None, recompute=False, unread=()):
    """
    Make a model trained or frozen; the matrices of a frozen one get the dtype `matrices`, if there
    is one. recompute: the backward pass computes the layers again. unread: the names of parameters
    that no text reaches (load.unread_parameters); they never change.
    """
    model.requires_grad_(trained)
    model.unread = unread
    kept = {model.hf.get_parameter(name).requires_grad_(False) for name in unread}
    if recompute:
        model.recompute()
    if matrices and not trained:
        for p in (p for p in matrices_of(model) if p not in kept):
            p.data = p.data.to(matrices)


def attend_by(model, kind):
    """
    Let a model compute its attention by this kind of transformers' kernels. sdpa: torch's own, or
    the family's in their place. The probe tests each kind. Raises BadInput.
    """
    if kind == "sdpa":
        return
    try:
        model.hf.set_attn_implementation(kind)
    except Exception as e:  # no such package, or not for this family: transformers raises anything
        raise BadInput(f"attn_implementation = {kind!r}: {model.path} cannot use it "
                       f"({first_line(e)}); leave the key out") from e


# --------------------------------------------------------------------------------------------------
# the models of ppo.py and grpo.py


def load_policy(path, system, device, seed=0):
    """
    The SFT model, trained, and its tokenizer. With LoRA an adapter on it is trained instead. On
    ranks that generate it is a copy, which gets its weights from the ranks that train.
    """
    tokenizer = load_tokenizer(path, system.chat_template, system.template_kwargs,
                               system.system_prompt, system.stop_strings)
    # False: a copy that only samples
    trained = parallel.role in ("", "train") or bool(of_model(system.lora, "policy"))
    policy = load(path, "policy", system, device, trained=trained, seed=seed)
    check_tokenizer_fits(tokenizer, policy, path)
    return policy, tokenizer


def load_ref_policy(policy_path, policy, tokenizer, system, device):
    """
    The frozen reference: the model of the key ref_path, or the policy's SFT model. With LoRA the
    latter is the policy without its adapter: no second copy. Raises BadInput where ref_path has
    another architecture or another vocabulary.
    """
    ref_path = system.ref_path
    if policy.adapters and not ref_path:
        return policy.base
    ref_policy = load(ref_path or policy_path, "ref", system, device)
    if not ref_path:
        return ref_policy
    shapes, wanted = ([tuple(p.shape) for p in model.parameters()]
                      for model in (ref_policy.hf, policy.hf))
    if type(ref_policy.hf) is not type(policy.hf) or shapes != wanted:
        raise BadInput(f"ref_path {ref_path!r} has another architecture than the policy; give the "
                       "model from which the policy's training began")
    if load_tokenizer(ref_path).vocabulary != tokenizer.vocabulary:
        raise BadInput(f"ref_path {ref_path!r} has another tokenizer than the policy, so its "
                       "log-probs would be of other tokens; give the model from which the policy's "
                       "training began")
    return ref_policy


def load_reward_model(path, policy, tokenizer, system, device):
    """
    The reward model, frozen, and its tokenizer, which puts the run's chats and system_prompt into
    the reward model's own template. With share_base: an adapter and a head on the policy's trunk.
    Raises BadInput where it is a plain language model, or its head gives 0 for all texts.
    """
    if system.share_base:
        from options.lora import load_adapted

        reward_model = freeze(load_adapted(policy.base, path, "scalar", policy.path))
    else:
        reward_model = load(path, "reward", system, device, head="scalar")
    reader = load_reader(path, reward_model, tokenizer)
    weight = reward_model.hf.score.weight
    if not weight.is_meta and not weight.any():
        raise BadInput(f"reward_path {path!r} has a score head of zeros, so every score is the "
                       "same; was it trained?")
    return reward_model, reader


def load_value_model(value_init, policy, tokenizer, reward_path, reward_tokenizer, system, device,
                     seed=0):
    """
    The value model, trained: it starts as the reward model or as the policy with a new head
    (value_init), or it is a head on the policy's own trunk (shared). reward_tokenizer: None where
    there is no reward model. Returns None on ranks that do not train (the key roles). Raises
    BadConfig or BadInput where it should start as a reward model that is not there, or that has
    another vocabulary than the policy.
    """
    if value_init == "reward" and reward_tokenizer is None:
        raise BadConfig("value_init = 'reward', but reward_functions does not use reward_model; "
                        "type --value_init=policy")
    if value_init == "reward" and reward_tokenizer.vocabulary != tokenizer.vocabulary:
        raise BadInput("the reward model has another tokenizer than the policy, so it cannot value "
                       "the policy's tokens; type --value_init=policy")
    if parallel.role not in ("", "train"):
        return None
    if value_init == "shared":  # both losses train the policy's trunk
        return OnTrunk(policy, seed=seed)
    path = reward_path if value_init == "reward" else policy.path
    if system.share_base:
        from options.lora import adapt

        value_model = adapt(policy.base, of_model(system.lora, "value"), "scalar", seed)
        if value_init == "reward":
            value_model.fill_own(path)
        return value_model
    return load(path, "value", system, device, head="scalar", trained=True, seed=seed)


# --------------------------------------------------------------------------------------------------
# questions about several models


def in_memory(**models):
    """
    {name: model} of all models with memory of their own: the given ones that are not None, each
    under its first name; and, under the name "NAME's trunk", the trunks that are not given
    themselves.
    """
    found = {}
    for name, model in models.items():
        if model is not None and model not in found.values():
            found[name] = model
    for name, model in list(found.items()):
        if model.owner() not in found.values():
            found[f"{name}'s trunk"] = model.owner()
    return found


def has_weights(model):
    """Whether the run has this model (not None), and this rank has its weights, not only shapes."""
    return model is not None and not next(model.parameters()).is_meta


def present(models):
    """{name: model} of the models whose weights this rank has."""
    return {name: model for name, model in models.items() if has_weights(model)}
