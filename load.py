"""
From a folder to a Model, and the checks on the way: config.json, the tensors, whether quartet can
decode the family. No code in a folder is run.
"""
import os

import torch

from errors import BadInput, first_line, say, shorten
from folders import data_alone, model_folders, read_file
from model import Model, freeze, scaled_logits
from parallel import is_sharded


def load_model(path, head="lm", dtype=torch.float32, device="cpu", seed=0):
    """
    The Model in a Hugging Face folder, or of that name on the hub. Where it is an adapter: the
    model that it was trained on, with the adapter merged into its weights.

    head: "lm", or "scalar": a reward or value model. A plain language model gets a new scalar head,
    drawn from seed (new_head is then True). dtype: of the weights, also where the file has another.
    Raises BadInput where the folder is no such model, or a tensor is missing, unexpected, of
    another shape or not finite. Weights must be safetensors, and no code comes from the folder.
    """
    *adapters, folder = model_folders(path)
    model = read_model(folder, folder if adapters else path, head, dtype, seed)
    if adapters:
        from options.lora import merge

        for adapter in reversed(adapters):  # the model of an adapter may be an adapter, too
            merge(model, adapter)
    model.path = path
    return model.to(device)


def read_model(folder, path, head, dtype, seed):
    """load_model of a folder that is no adapter. path: its name in errors."""
    config = read_config(folder, path, head)
    file_dtype, settings = config.dtype, {}
    if dtype == torch.float64 and has_experts(config):
        settings["experts_implementation"] = "batched_mm"  # the usual kernel refuses float64
    with data_alone(folder, weights=True) as room:
        hf, found = auto_class(head).from_pretrained(
            room, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True, ignore_mismatched_sizes=True, **settings)
    check_tensors(found, hf, head, path)
    model = Model(hf, head, path, file_dtype)
    model.processor = processor_files(folder)
    if model.max_positions < (getattr(model.config, "max_position_embeddings", None) or 0):
        say(f"{path}: a text may have up to {model.max_positions} tokens: with longrope a longer "
            "one would change the numbers of the texts beside it")
    if head == "scalar" and "score.weight" in found["missing_keys"]:
        draw_score_head(model, seed)
    for name, p in model.hf.named_parameters():
        if not p.isfinite().all():
            raise BadInput(f"{path}: tensor {name!r} holds NaN or numbers that are not finite in "
                           f"{str(dtype).removeprefix('torch.')}; save or download the model again")
        if p.data_ptr() % 64:  # it lies in the mapped file: its products could differ in a bit
            p.data = p.data.clone()
    return model


def auto_class(head):
    """The class of transformers that finds a model's class; and keep transformers quiet."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, logging
    from transformers.integrations import moe

    logging.set_verbosity_error()  # it warns of padding without a mask, see model.py's header
    logging.disable_progress_bar()
    product = moe._grouped_mm  # the only matrix product that autocast does not round

    def rounded(x, weight, offs):
        if torch.is_autocast_enabled(x.device.type):
            weight = weight.to(torch.get_autocast_dtype(x.device.type))
        return product(x, weight, offs)  # this casts x to the dtype of weight

    if product.__module__ == moe.__name__:
        moe._grouped_mm = rounded
    return AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification


# settings of a config that quartet reads and transformers does not check
NUMBERS = dict.fromkeys(("sliding_window", "attention_chunk_size", "max_position_embeddings"), int)
NUMBERS |= dict.fromkeys(("score_shift", "logit_scale", "logits_scaling",
                          "final_logit_softcapping"), float)


def read_config(folder, path, head="lm"):
    """The config.json of a folder, as transformers reads it. Raises BadInput."""
    from transformers import AutoConfig

    with data_alone(folder) as room:
        config = AutoConfig.from_pretrained(room, trust_remote_code=False)
    text = config.get_text_config()
    if any(getattr(c, "quantization_config", None) for c in (config, text)):
        raise BadInput(f"{path}: its weights are quantized; get the model as it was before")
    for name, kind in NUMBERS.items():
        value = getattr(text, name, None)
        if value is not None and not (type(value) in (int, kind) and abs(value) < 1e18):
            raise BadInput(f"{path}: {name} = {shorten(value)} in its config.json cannot be right; "
                           "download the model again")
    if head == "scalar":
        want_one_score(config, path)
    return config


def shapes(config, head, path, dtype=torch.float32, **settings):
    """The model of transformers that a config describes, with new weights. Raises BadInput."""
    try:
        return auto_class(head).from_config(config, dtype=dtype, **settings)
    except Exception as e:  # transformers may raise anything
        raise BadInput(f"{path}: transformers cannot make it: {first_line(e)}") from e


def processor_files(folder):
    """{name: content} of a folder's files for images and sound: a saved model gets them again."""
    names = [name for name in os.listdir(folder) if name.endswith("processor_config.json")]
    return {name: read_file(os.path.join(folder, name)) for name in names}


def has_experts(config):
    """Whether a model is a mixture of experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(config.get_text_config(), name, None) for name in names)


def want_one_score(config, path):
    """Make a config that of a model with one score a token. Raises BadInput if there is none."""
    config.num_labels = 1
    if type(config) not in auto_class("scalar")._model_mapping:
        raise BadInput(f"{path}: transformers has no sequence classifier of the family "
                       f"{config.model_type}, so it cannot be a reward or value model here; "
                       "grpo.py with rules trains it without one")


def check_tensors(found, hf, head, path):
    """
    Raise BadInput for tensors that are missing, of another shape, or not the model's. found: the
    report of transformers. The file of a scalar model may lack the head, which load_model then
    draws, and may have a language model's head.
    """
    missing, extra = found["missing_keys"], found["unexpected_keys"]
    if head == "scalar":
        missing = set(missing) - {"score.weight"}
        extra = [n for n in extra if not n.startswith(("lm_head.", "embed_out.", "output."))]
    if missing:
        raise BadInput(f"{path}: tensor {min(missing)!r} is missing from its weights ("
                       f"{len(missing)} in all); is the download complete?")
    if found["mismatched_keys"]:
        name, here, wanted = min(found["mismatched_keys"])
        raise BadInput(f"{path}: tensor {name!r} has the shape {here}, and config.json says "
                       f"{wanted}")
    if extra:
        raise BadInput(f"{path}: its weights have a tensor {min(extra)!r} ({len(extra)} such in "
                       f"all), which a {type(hf).__name__} does not have: this would not be the "
                       "model that was saved; give another one")
    if found.get("error_msgs"):
        raise BadInput(f"{path}: {shorten(found['error_msgs'][0])}")


def draw_score_head(model, seed):
    """A new scalar head: normal with std 1 / sqrt(d + 1) (N+ detail 11)."""
    weight = model.hf.score.weight
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(weight.shape).normal_(0, (weight.shape[1] + 1) ** -0.5, generator=generator)
    with torch.no_grad():
        weight.copy_(drawn)
    model.new_head = True


# --------------------------------------------------------------------------------------------------
# the probe


def unread_parameters(model):
    """
    The names of the parameters of model.hf that no text reaches, so no loss has a gradient for
    them: a vision part, a bias that only chooses experts. The graph of one forward pass has all
    others: the text is long enough for the blocks of compressed attention, and all experts are one
    tensor.
    """
    model.requires_grad_(True)
    text = torch.arange(min(256, model.max_positions)) % model.config.vocab_size
    try:
        with torch.enable_grad():
            states = model.states(text[None].to(model.hf.device))[0]  # (256, d)
            out = model.logits(states) if model.head == "lm" else model.scalars(states)
    except Exception as e:  # some families read in other ways
        raise BadInput(f"{model.path}: quartet cannot decode a model of the family "
                       f"{model.config.model_type}: {first_line(e)}") from e
    steps, seen, reached = [out.grad_fn], set(), set()
    while steps:
        step = steps.pop()
        if step is not None and step not in seen:
            seen.add(step)
            reached.add(id(getattr(step, "variable", None)))  # the parameter, if the step has one
            steps += [before for before, _ in step.next_functions]
    return [name for name, p in model.hf.named_parameters() if id(p) not in reached]


@torch.no_grad()
def probe(model):
    """
    Raise BadInput unless a language model can do what quartet needs: decode two texts of unequal
    length together, padded on the left, drop one of them from the cache, and give the other the
    same log-probs as reading it alone. The dropped text has positions at the end of the context,
    because a text's log-probs must not depend on the longest text beside it.
    """
    from decoding_cache import decoding_cache

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
        target_mask = torch.arange(5, device=device)[None] >= 2  # (1, 5): the text's last 3 tokens
        gap = (decoded - model.logprobs(text, target_mask)[0]).abs().max().item()
    except Exception as e:  # some families decode in other ways
        raise BadInput(f"{model.path}: quartet cannot decode a model of the family "
                       f"{model.config.model_type}: {first_line(e)}") from e
    in_16_bits = torch.is_autocast_enabled(device.type) or model.hf.dtype.itemsize == 2
    if not gap <= (0.3 if in_16_bits else 1e-3):
        raise BadInput(f"{model.path}: quartet cannot decode a model of the family "
                       f"{model.config.model_type}: read and decoded, a token's log-probs differ "
                       f"by {gap:.2g} nats")


def outline(path, head, dtype):
    """The model of a folder without its weights: only shapes and settings, without memory."""
    *adapters, folder = model_folders(path)
    config = read_config(folder, path, head)
    kinds, file_dtype = config.architectures, config.dtype  # from_config sets its own
    with torch.device("meta"):
        hf = shapes(config, head, path, dtype)
    model = freeze(Model(hf, head, path, file_dtype))
    model.processor = processor_files(folder)
    model.new_head = head == "scalar" and "ForSequenceClassification" not in str(kinds)
    return model


def load_like(model, folder):
    """load_model, with `model`'s head and dtype. Raises BadInput where their shapes differ."""
    read = load_model(folder, model.head, model.hf.dtype)
    shapes = [[p.shape for p in m.hf.parameters()] for m in (read, model)]
    if shapes[0] != shapes[1]:
        raise BadInput(f"{folder}: its tensors are not those of the model trained here; "
                       "resume with the model that saved it")
    return read


@torch.no_grad()
def fill_model(model, folder):
    """
    A collective if the model is sharded: give it the weights that are in a folder. Raises BadInput
    where they are another model's.
    """
    if is_sharded(model):
        from options.shards import fill_shards

        fill_shards(model, folder)  # COLLECTIVE
        return
    read = load_like(model, folder)
    for p, saved in zip(model.hf.parameters(), read.hf.parameters(), strict=True):
        p.data.copy_(saved)
