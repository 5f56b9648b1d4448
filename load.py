"""
From a folder, or a hub name, to a Model: `load`. And the four models of ppo.py. No code in a folder
is run, and no pickle is read. Two things are checked on the way: the tensors are the model's, and
quartet can decode the family (`probe`).
"""
import contextlib
import os

import torch
import torch.nn as nn

import parallel
from configurator import of_model, read_json
from errors import BadInput, first_line, nearest
from model import Model, decoding_cache, has_any, no_grad_forwards, scaled_logits
from tokenizer import load_tokenizer

SHORT = dict(bfloat16=torch.bfloat16, float16=torch.float16)  # the dtypes of 16 bits
# the settings by which a model is a mixture of experts
EXPERTS = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]


def dtypes(system):
    """
    (dtype of trained weights, dtype of frozen matrices, or None where it is the same).

    In 16 bits the trained weights are kept in fp32, and autocast rounds each matrix when it is
    used, but no vectors. So frozen matrices can be stored rounded: the results are the same.
    master_weights=False: every weight is bfloat16, and there is no autocast. Raises BadInput.
    """
    if not system.master_weights and system.dtype != "bfloat16":
        raise BadInput("master_weights = False: the weights themselves are trained in 16 bits; "
                       "type --dtype=bfloat16")
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
    embeddings, the biases of experts, the decays of states (A_log), matrices that the family keeps
    in 32 bits (routers), a scalar head.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    wide = {id(p) for m in tables for p in m.parameters()}
    if model.head == "scalar":
        wide.add(id(model.hf.score.weight))
    kept = ("bias", "A_log", *(model.hf._keep_in_fp32_modules_strict or ()))
    return [p for name, p in model.named_parameters()
            if p.dim() >= 2 and id(p) not in wide and not any(part in name for part in kept)]


def load(path, name, system, device, head="lm", trained=False, tokenizer=None, seed=0):
    """
    The Model of a folder or hub name, on the device, trained or frozen. A collective where
    zero_stage splits it over the ranks. name: as in the keys, policy, ref, reward, value or judge.
    head: "lm"; or "scalar", of a reward or value model: then a plain language model gets a new
    scalar head, drawn from seed, and new_head is True. tokenizer: None: that of the folder. Raises
    BadInput.
    """
    check_folder(path)
    tokenizer = tokenizer or load_tokenizer(path, system)
    adapter = of_model(system.lora, name) if trained else ""
    has_weights = adapter or parallel.holds(name)
    if not has_weights:  # ranks of another role have them; this one has only the shapes
        model = outline(path, head, system).requires_grad_(trained)
    elif system.zero_stage or system.offload:
        from options.shards import load_split

        model = load_split(path, name, system, device, head, trained, adapter, seed)  # COLLECTIVE
    else:
        # a model that gets 4 bits is read to the CPU, and goes to the GPU matrix by matrix
        first = "cpu" if adapter and system.quantize == "4bit" else device
        model = read_model(path, head, system, first, seed)
        settle(model, system, trained, adapter)
    model.tokenizer = tokenizer
    tokenizer.fit(model, path)
    if trained and head == "lm":
        model.become_savable()
    if adapter and system.quantize == "4bit":
        from options.four_bits import quantize

        model = quantize(model, device, dtypes(system)[1] or dtypes(system)[0])
    if system.compile:
        model.compiled = torch.compile(model.trunk, dynamic=True)
    if head == "lm" and has_weights:
        with autocast(system, device), no_grad_forwards([model], device):
            probe(model)
    if adapter:
        from options.lora import adapt

        model = adapt(model, adapter, head, seed)
    return model


def check_folder(path):
    """Raise BadInput where a path is neither a model's folder nor could be a name on the hub."""
    for name in ("policy", "reward_model"):
        if os.path.isdir(os.path.join(path, name)):
            raise BadInput(f"{path} is the folder of a run, not of a model; type {path}/{name}")
    configs = [os.path.join(path, f"{kind}config.json") for kind in ("", "adapter_")]
    if os.path.isdir(path) and not any(map(os.path.isfile, configs)):
        raise BadInput(f"{path}: no config.json in this folder, it is not a saved model")
    if not os.path.isdir(path) and (path.count("/") != 1 or path.startswith((".", "/", "out/"))):
        hint = nearest(path) or "; train it first" * ("/" in path)
        raise BadInput(f"{path!r}: no such model folder, and no name on the hub, which is "
                       f"OWNER/NAME, as openai-community/gpt2{hint}")
    if not os.path.isdir(path):
        from options.hub import check_name

        check_name(path)


def read_model(path, head, system, device="cpu", seed=0):
    """The Model of a folder as it is, with transformers. The other arguments: see load."""
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        from options.lora import read_merged

        return read_merged(path, head, system, device, seed)
    try:
        config, how = settings_of(path, head, system)
        check_index(path, config)
        hf, report = auto_class(head).from_pretrained(
            path, config=config, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True, ignore_mismatched_sizes=True, **how)
    except BadInput:
        raise
    except Exception as e:  # for bad words and numbers transformers raises anything
        raise BadInput(f"{path}: transformers cannot load this model: {first_line(e)}") from e
    check_tensors(report, hf, head, path)
    model = Model(hf, head, path)
    if head == "scalar" and "score.weight" in report["missing_keys"]:
        draw_score_head(model, seed)
    for name, p in hf.named_parameters():
        if not p.isfinite().all():
            raise BadInput(f"{path}: tensor {name!r} is not finite in {system.dtype}")
        if p.data_ptr() % 64:  # it lies in the mapped file: its products could differ in a bit
            p.data = p.data.clone()
    return model.to(device)


def outline(path, head, system):
    """The Model of a folder without its weights: only shapes and settings, without memory."""
    from transformers import GenerationConfig

    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        from options.lora import lowest_base

        path = lowest_base(path)
    config, how = settings_of(path, head, system)
    with torch.device("meta"):
        hf = auto_class(head).from_config(config, **how)
    with contextlib.suppress(OSError):  # a folder may have none; read_model's has it, too
        hf.generation_config = GenerationConfig.from_pretrained(path)
    return Model(hf, head, path)


def settings_of(path, head, system):
    """
    The config of a folder, and more arguments for transformers: the dtype, the kernels of attention
    (always ours: a config.json may name kernels on the hub) and of experts.
    """
    from transformers import AutoConfig

    config, (dtype, _) = AutoConfig.from_pretrained(path, trust_remote_code=False), dtypes(system)
    config.num_labels = 1 if head == "scalar" else config.num_labels
    attention, kind = system.attn_implementation, class_of(path, config, head)
    if attention == "sdpa" and not kind._supports_sdpa:
        attention = "eager"
    if attention == "eager" and dtype == torch.float64:
        raise BadInput(f"{path}: its attention is transformers' eager one, which rounds to float32;"
                       " dtype = 'float64' needs attn_implementation = 'sdpa', in a family with it")
    how = dict(dtype=dtype, attn_implementation=attention)
    if has_any(config, EXPERTS):
        from options.families import settings_of_experts

        how |= settings_of_experts(dtype)
    if has_any(config, ["linear_key_head_dim"]):
        from options.families import keep_delta_rule_wide

        keep_delta_rule_wide(kind)
    return config, how


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


def check_index(path, config):
    """
    Raise BadInput where the list of a model's files of weights names others than safetensors in its
    own folder: transformers would read a pickle, or a file of another folder.
    """
    from transformers.utils import cached_file

    for name in "model.safetensors.index.json", getattr(config, "transformers_weights", None) or "":
        file = name.endswith(".json") and cached_file(
            path, name, _raise_exceptions_for_missing_entries=False)
        for part in set(read_json(file)["weight_map"].values()) if file else ():
            if not part.endswith(".safetensors") or os.path.isabs(part) or ".." in part.split("/"):
                raise BadInput(f"{file} names {part!r}, which is no file of safetensors in its "
                               "folder; convert the model with save_pretrained")


def check_tensors(report, hf, head, path):
    """
    Raise BadInput for tensors that are missing, of another shape, or not the model's, but for the
    heads of a scalar model; or for a head that the settings deny. report: transformers', of a load.
    """
    missing, extra = set(report["missing_keys"]), set(report["unexpected_keys"])
    if head == "lm" and "score.weight" in extra:
        raise BadInput(f"{path} is a reward model, no language model; type the policy's folder")
    if head == "scalar":
        score = getattr(hf, "score", None)
        if not isinstance(score, nn.Linear) or score.out_features != 1 or score.bias is not None:
            raise BadInput(f"{path}: the head of {type(hf).__name__} is no linear map to one score")
        missing -= {"score.weight"}
        extra = {n for n in extra if not n.startswith(("lm_head.", "embed_out.", "output."))}
    shapes = [f"{n}, of shape {tuple(shape)} and not {tuple(wanted)}"
              for n, shape, wanted in report["mismatched_keys"]]
    for what, names in (("lack", missing), ("have, of a wrong shape,", shapes),
                        ("have, beside the model's,", extra)):
        if names:
            raise BadInput(f"{path}: its weights {what} the tensor {min(names)} ({len(names)} such "
                           "in all); is the download complete?")
    out = hf.get_output_embeddings()
    if out and getattr(hf.config, "tie_word_embeddings", False) and (
            out.weight is not hf.get_input_embeddings().weight):
        from options.families import refuse_untied

        refuse_untied(path)


def draw_score_head(model, seed):
    """A new scalar head (1, d): normal with std 1 / sqrt(d + 1) (N+ detail 11)."""
    weight = model.hf.score.weight
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(weight.shape).normal_(0, (weight.shape[1] + 1) ** -0.5, generator=generator)
    weight.data.copy_(drawn)
    model.new_head = True


def settle(model, system, trained, adapter=""):
    """
    Decide requires_grad of each parameter: it says which are stepped and saved. A parameter that no
    text reaches stays frozen. The matrices of a frozen model get autocast's dtype.
    """
    read = read_by_texts(model.hf) if trained and not adapter else set()
    for p in model.parameters():
        p.requires_grad_(p in read)
    if trained and system.gradient_checkpointing:
        model.recompute()
    matrices = dtypes(system)[1]
    if matrices and (adapter or not trained):
        for p in matrices_of(model):
            p.data = p.data.to(matrices)


def read_by_texts(hf):
    """The parameters that a text reaches: not those of a vision part, for example."""
    parts = hf.get_decoder(), hf.get_output_embeddings(), getattr(hf, "score", None)
    read = {p for part in parts if part is not None for p in part.parameters()}
    if has_any(hf.config, [*EXPERTS, "add_cross_attention"]):
        from options.families import unread

        read -= unread(hf)
    return read


def probe(model):
    """
    Raise BadInput unless a language model can decode two texts of unequal length together, drop one
    from the cache, and give the other the same log-probs as reading it alone. The dropped one has
    positions at the end of the context: a text must not depend on the longest text beside it.
    """
    device = model.hf.device
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


def load_policy(path, system, device, seed=0):
    """The SFT model, trained. With LoRA an adapter on it is trained instead."""
    return load(path, "policy", system, device, trained=True, seed=seed)


def load_ref_policy(path, policy, system, device):
    """The frozen reference: of ref_path, or the SFT model; with LoRA the policy's frozen base."""
    if policy.base is not None and not system.ref_path:
        return policy.base
    if not system.ref_path:
        return load(path, "ref", system, device, tokenizer=policy.tokenizer)
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
    if not path:
        raise BadInput("reward_functions names reward_model; say which by --reward_path=FOLDER, or "
                       "by a config file")
    if system.share_base:
        from options.lora import load_adapted

        reward_model = load_adapted(policy.base, path, "scalar").requires_grad_(False)
        reward_model.tokenizer = load_tokenizer(path, system)
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
    head is a fifth of N+'s: its first values are noise, and shall be small beside the scores.
    """
    if value_init == "reward":
        if reward_model is None:
            raise BadInput("value_init = 'reward' without a reward model; type --value_init=policy")
    start = dict(reward=reward_model, policy=policy, shared=policy).get(value_init)
    path = start.path if start else value_init
    tokenizer = start.tokenizer if start else load_tokenizer(path, system)
    if tokenizer.vocabulary != policy.tokenizer.vocabulary:
        raise BadInput(f"{path} has another tokenizer than the policy, so no value model can start "
                       "as it; type --value_init=policy")
    if value_init == "shared":  # both losses train the policy's trunk
        from options.trunk import OnTrunk

        value_model = OnTrunk(policy, seed=seed)
    elif system.share_base:
        from options.lora import value_on_trunk

        value_model = value_on_trunk(policy, reward_model, value_init, system, seed)
    else:
        value_model = load(path, "value", system, device, head="scalar", trained=True,
                           tokenizer=policy.tokenizer, seed=seed)
    if value_model.new_head:
        value_model.hf.score.weight.data *= 0.2
    return value_model
