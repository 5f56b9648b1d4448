"""
From a folder, or a hub name, to a Model: `load`. And the four models of ppo.py. No code in a folder
is run, and no pickle is read. Two things are checked on the way: the tensors are the model's, and
quartet can decode the family (`probe`).
"""
import os
import re

import torch
import torch.nn as nn

from configurator import for_model
from errors import BadInput, first_line, mistake
from model import Model, decoding_cache, has_any, no_grad_forwards, scaled_logits
from tokenizer import load_tokenizer

# the key dtype -> dtype of trained weights, and of frozen matrices (None: the same)
DTYPES = dict(
    float64=(torch.float64, None), float32=(torch.float32, None),
    bfloat16=(torch.float32, torch.bfloat16), float16=(torch.float32, torch.float16))
# tensors that may be missing or superfluous in a file: the two kinds of heads, for a scalar model
NEW_OR_UNUSED = dict(lm="$", scalar=r"score\.weight|(lm_head|embed_out|output)\..*")
# settings of mixtures of experts; and of all families that need options/families.py
EXPERTS = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]
FAMILIES = [*EXPERTS, "linear_key_head_dim", "add_cross_attention"]


def dtypes(system):
    """
    (dtype of trained weights, dtype of frozen matrices or None), see DTYPES. In 16 bits the trained
    weights are kept in fp32, and autocast rounds each matrix when it is used, but no vectors. So
    frozen matrices can be stored rounded: the results are the same.
    """
    if not system.master_weights:
        from options.sixteen_bits import weights_of_16_bits

        return weights_of_16_bits(system)
    return DTYPES[system.dtype]


def autocast(system, device):
    """The context of a run's forwards: torch.autocast in 16 bits, switched off in others."""
    matrices = dtypes(system)[1]
    # no cache: a forward uses every matrix once, and the cache would keep the casts of all layers
    return torch.autocast(device.type, matrices, enabled=matrices is not None, cache_enabled=False)


def load(path, name, system, device, head="lm", trained=False, tokenizer=None, seed=0):
    """
    The Model of a folder or hub name, on the device, trained or frozen. A collective where
    zero_stage splits it over the ranks. name: as in the keys, policy, ref, reward, value or judge.
    head: "lm"; or "scalar", of a reward or value model: then a plain language model gets a new
    scalar head, drawn from seed (new_head). tokenizer: None: that of the folder. Raises BadInput.
    """
    tokenizer = tokenizer or load_tokenizer(
        path, system if trained or name not in ("reward", "judge") else None)
    adapter = trained and for_model(system.lora, name)
    if system.zero_stage or system.offload or system.roles or system.quantize != "none":
        from options.parts import load_part

        model = load_part(path, name, system, device, head, trained, adapter, seed)  # COLLECTIVE
    else:
        model = read_model(path, head, system, device, seed)
        freeze_or_train(model, system, trained, adapter)
    model.tokenizer = tokenizer
    tokenizer.match_model(model, path)
    if system.compile:
        model.compiled = torch.compile(model.trunk, dynamic=True)
    if head == "lm" and model.hf.device.type != "meta":  # else another rank has the weights
        with autocast(system, device), no_grad_forwards([model], device):
            probe(model, device)
    if adapter:
        from options.lora import adapt

        model = adapt(model, adapter, head, seed)
    return model


def read_model(path, head, system, device="cpu", seed=0):
    """The Model of a folder as it is, with transformers. The other arguments: see load."""
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        from options.lora import read_merged

        return read_merged(path, head, system, device, seed)
    try:
        config, arguments = config_and_arguments(path, head, system)
        if not os.path.isfile(os.path.join(path, "model.safetensors")) or (
                getattr(config, "transformers_weights", None)):
            from options.folders import check_index

            check_index(path, config)
        hf, report = auto_class(head).from_pretrained(
            path, config=config, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True, ignore_mismatched_sizes=True, **arguments)
    except BadInput:
        raise
    except Exception as e:  # for bad words and numbers transformers raises anything
        raise mistake("no_model", path, e) from e
    wrong = [name for name in [*report["missing_keys"], *report["unexpected_keys"]]
             if not re.fullmatch(NEW_OR_UNUSED[head], name)]
    if wrong or report["mismatched_keys"] or not plain_head(hf, head):
        raise mistake("wrong_tensors", report, hf, head, path)
    model = Model(hf, head, path)
    if "score.weight" in report["missing_keys"]:
        draw_score_head(model, seed)
    for name, p in [*hf.named_parameters(), ("score_shift", torch.tensor(model.score_shift))]:
        if not p.isfinite().all():
            raise BadInput(f"{path}: tensor {name!r} is not finite in {system.dtype}")
        if p.data_ptr() % 64:  # in the mapped file, unaligned: a product's last bit could differ
            p.data = p.data.clone()
    return model.to(device)


def config_and_arguments(path, head, system):
    """
    The config of a folder, and the other arguments for transformers: dtype, and attention's
    kernels. These are never the folder's: a config.json may name some on the hub.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    config.num_labels = 1 if head == "scalar" else config.num_labels
    kind, attention = class_of(path, config, head), system.attn_implementation
    arguments = dict(dtype=dtypes(system)[0], attn_implementation=attention)
    if has_any(config, FAMILIES) or not kind._supports_sdpa or attention == "eager":
        from options.families import settings_of_family

        arguments |= settings_of_family(path, config, kind, arguments)
    return config, arguments


def auto_class(head):
    """The class of transformers that finds a model's class; and keep transformers quiet."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()  # it warns of padding without a mask, see model.py's header
    logging.disable_progress_bar()
    return AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification


def class_of(path, config, head):
    """transformers' class for the config of the model at path. Raises BadInput."""
    classes = auto_class(head)._model_mapping
    if type(config) not in classes:
        raise BadInput(f"{path}: {config.model_type} has no class {auto_class(head).__name__[4:]}")
    return classes[type(config)]


def plain_head(hf, head):
    """Whether a scalar head is one linear map, to a number; or an LM head tied as config says."""
    if head == "scalar":
        score = getattr(hf, "score", None)
        return isinstance(score, nn.Linear) and score.out_features == 1 and score.bias is None
    out, tied = hf.get_output_embeddings(), getattr(hf.config, "tie_word_embeddings", False)
    return not (out and tied) or out.weight is hf.get_input_embeddings().weight


def draw_score_head(model, seed):
    """A new scalar head (1, d): normal with std 1 / sqrt(d + 1) (N+ detail 11)."""
    weight = model.hf.score.weight
    drawn = torch.empty(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    weight.data.copy_(drawn.normal_(0, (weight.shape[1] + 1) ** -0.5, generator=generator))
    model.new_head = True


def freeze_or_train(model, system, trained, adapter=""):
    """Decide requires_grad of each parameter: those with True are stepped and saved."""
    used = used_by_texts(model.hf) if trained and not adapter else set()
    for p in model.parameters():
        p.requires_grad_(p in used)
    if trained and system.gradient_checkpointing:
        from options.recompute import recompute

        recompute(model)
    matrices = dtypes(system)[1]
    if matrices and (adapter or not trained):
        from options.sixteen_bits import round_matrices

        round_matrices(model, matrices)


def used_by_texts(hf):
    """The parameters that a text reaches: not those of a vision part, for example."""
    parts = hf.get_decoder(), hf.get_output_embeddings(), getattr(hf, "score", None)
    used = {p for part in parts if part is not None for p in part.parameters()}
    if has_any(hf.config, FAMILIES):
        from options.families import unread

        used -= unread(hf)
    return used


def probe(model, device):
    """
    Raise BadInput unless a language model can decode two texts of unequal length together, drop one
    from the cache, and give the other the same log-probs as reading it alone. The dropped one has
    positions at the end of the context: a text must not depend on the longest text beside it.
    """
    tokens = torch.arange(2, 18, device=device).view(2, 8) * 7 % model.config.vocab_size  # (2, 8)
    # row 1 has 3 tokens of padding, and then a text of 5
    mask = torch.arange(8, device=device) >= torch.tensor([[0], [3]], device=device)  # (2, 8)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)  # (2, 8)
    positions[0] += max(model.max_positions - 5, 0)  # 5 tokens of row 0 are read
    text = tokens[1:, 3:]
    try:
        cache = decoding_cache(model.hf.config)
        # the text's first 2 tokens beside 5 of row 0; then its others, one by one, alone
        logits = [model.next_logits(tokens[:, :5], cache, mask[:, :5], positions[:, :5])[1]]  # (V,)
        cache.batch_select_indices(torch.tensor([1], device=device))
        for t in (5, 6):
            logits.append(model.next_logits(tokens[1:, t:t + 1], cache, mask[1:, :t + 1],
                                            positions[1:, t:t + 1])[0])  # (V,)
        decoded = scaled_logits(torch.stack(logits)).log_softmax(-1)  # (3, V)
        decoded = decoded.gather(-1, text[0, 2:, None]).squeeze(-1)  # (3,)
        read = scaled_logits(model.logits(model.states(text)[0, 1:-1])).log_softmax(-1)  # (3, V)
        gap = (decoded - read.gather(-1, text[0, 2:, None]).squeeze(-1)).abs().max().item()
        in_16_bits = torch.is_autocast_enabled(device.type) or model.hf.dtype.itemsize == 2
        if not gap <= (0.3 if in_16_bits else 1e-3):
            raise ValueError(f"read and decoded, a token's log-probs differ by {gap:.2g} nats")
    except Exception as e:  # transformers raises anything
        raise BadInput(f"{model.path}: quartet cannot decode a model of the family "
                       f"{model.config.model_type}: {first_line(e)}") from e


def load_ref_policy(path, policy, system, device):
    """The frozen reference: of ref_path, or the SFT model; with LoRA the policy's frozen base."""
    if not system.ref_path:
        return policy.base or load(path, "ref", system, device, tokenizer=policy.tokenizer)
    ref_policy = load(system.ref_path, "ref", system, device)
    if ref_policy.tokenizer.vocabulary != policy.tokenizer.vocabulary:
        raise BadInput(f"ref_path {system.ref_path!r} has another tokenizer than the policy; give "
                       "the model from which the policy's training began")
    return ref_policy


def load_reward_model(path, policy, system, device):
    """
    The reward model, frozen, with its own tokenizer and chat template. With share_base: an adapter
    and a head on the policy's trunk. Raises BadInput where it is a plain language model.
    """
    if system.share_base:
        from options.lora import load_adapted

        reward_model = load_adapted(policy.base, path, "scalar").requires_grad_(False)
        reward_model.tokenizer = load_tokenizer(path, None)
    else:
        reward_model = load(path, "reward", system, device, head="scalar")
    reward_model.tokenizer.set_padding_apart()
    reward_model.tokenizer.skipped_id = reward_model.hf.config.pad_token_id
    weight = reward_model.hf.score.weight
    if reward_model.new_head or not weight.is_meta and not weight.any():
        raise BadInput(f"{path} has no trained score head; train a reward model with rm.py")
    return reward_model


def load_value_model(value_init, policy, reward_model, system, device, seed=0):
    """
    The trained value model: see the key value_init. shared: a head on the policy's own trunk. A new
    head is a fifth of N+'s, because its first values are noise: small beside the scores.
    """
    if value_init == "reward" and reward_model is None:
        raise BadInput("value_init = 'reward' without a reward model; type --value_init=policy")
    start = dict(reward=reward_model, policy=policy, shared=policy).get(value_init)
    path, tokenizer = (start.path, start.tokenizer) if start else (
        value_init, load_tokenizer(value_init, system))
    if tokenizer.vocabulary != policy.tokenizer.vocabulary:
        raise BadInput(f"{path} has another tokenizer than the policy, so no value model can start "
                       "as it; type --value_init=policy")
    if value_init == "shared" or system.share_base:
        from options.trunk import value_on_trunk

        value_model = value_on_trunk(policy, reward_model, value_init, system, seed)
    else:
        value_model = load(path, "value", system, device, head="scalar", trained=True,
                           tokenizer=policy.tokenizer, seed=seed)
    if value_model.new_head:
        value_model.hf.score.weight.data *= 0.2
    return value_model
