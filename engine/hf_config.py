"""
config.json of a Hugging Face model -> ModelConfig (model.py). parse_config is the way in; the
tables say what each family's fields may be. What quartet would get wrong is refused.
"""
from errors import BadInput, shorten
from kernels import ACTIVATIONS
from model import ModelConfig

FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma3_text")


# --------------------------------------------------------------------------------------------------
# what each field may be

# Its type, its smallest and its largest value. The bounds are far from any model of today. They are
# there so that a slip of a digit is an error, and does not fill the machine's memory.
SIZE, COUNT, LENGTH, SHARE = (int, 1, 10**7), (int, 1, 10**4), (int, 1, 10**9), (float, 0, 1)
WINDOW, POSITIVE, FINITE = (int, 0, 10**9), (float, 1e-3, 1e15), (float, -1e30, 1e30)
FLAG, NAME, OBJECT, LIST = (bool,), (str,), (dict,), (list,)

_SHARED = dict(
    vocab_size=SIZE, hidden_size=SIZE, num_hidden_layers=COUNT, intermediate_size=SIZE,
    num_attention_heads=COUNT, num_key_value_heads=COUNT, head_dim=SIZE, hidden_act=NAME,
    max_position_embeddings=LENGTH, tie_word_embeddings=FLAG, score_shift=FINITE,
    rope_parameters=OBJECT, rope_scaling=OBJECT, rope_theta=POSITIVE, partial_rotary_factor=SHARE,
    rotary_emb_base=POSITIVE, rotary_pct=SHARE)
_RMS = _SHARED | dict(rms_norm_eps=SHARE)
_QWEN = _RMS | dict(
    use_sliding_window=FLAG, sliding_window=WINDOW, max_window_layers=WINDOW, layer_types=LIST)
FIELDS = {
    "gpt2": dict(
        vocab_size=SIZE, n_embd=SIZE, n_layer=COUNT, n_head=COUNT, n_inner=SIZE, n_positions=LENGTH,
        layer_norm_epsilon=SHARE, activation_function=NAME, tie_word_embeddings=FLAG,
        scale_attn_weights=FLAG, score_shift=FINITE),
    "gpt_neox": _SHARED | dict(
        layer_norm_eps=SHARE, use_parallel_residual=FLAG, attention_bias=FLAG),
    "llama": _RMS | dict(attention_bias=FLAG, mlp_bias=FLAG),
    "mistral": _RMS | dict(sliding_window=WINDOW),
    "qwen2": _QWEN,
    "qwen3": _QWEN | dict(attention_bias=FLAG),
    "olmo2": _RMS | dict(attention_bias=FLAG),
    "gemma3_text": _RMS | dict(
        attention_bias=FLAG, hidden_activation=NAME, query_pre_attn_scalar=POSITIVE,
        sliding_window=WINDOW, sliding_window_pattern=COUNT, layer_types=LIST,
        rope_local_base_freq=POSITIVE),
}
ROPE_FIELDS = dict(
    rope_type=NAME, type=NAME, rope_theta=POSITIVE, partial_rotary_factor=SHARE, factor=POSITIVE,
    low_freq_factor=POSITIVE, high_freq_factor=POSITIVE, original_max_position_embeddings=LENGTH)
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ADAPTER_FIELDS = dict(  # of adapter_config.json
    r=(int, 0, 10**6), lora_alpha=(float, 1e-6, 1e6), target_modules=LIST,
    base_model_name_or_path=NAME, use_rslora=FLAG)

# In these fields null means "not given". In any other it is refused: transformers would not take
# null for the default there, but parse_config does.
NULL_IS_FINE = {
    "n_inner", "num_key_value_heads", "head_dim", "rope_parameters", "rope_scaling",
    "sliding_window", "max_window_layers", "layer_types", "target_modules",
    "base_model_name_or_path"}

# fields of newer or rarer models that would change the numbers, and that quartet does not know
UNSUPPORTED = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention",
               "quantization_config", "attn_logit_softcapping", "final_logit_softcapping",
               "use_bidirectional_attention")
# fields that say that a model is of another kind, whatever its model_type
KINDS = {
    "num_experts": "a Mixture of Experts", "num_local_experts": "a Mixture of Experts",
    "n_routed_experts": "a Mixture of Experts", "vision_config": "a model that reads images",
    "audio_config": "a model that hears", "text_config": "a model of several parts",
    "is_encoder_decoder": "an encoder and a decoder"}

IN_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string",
            dict: "an object", list: "a list"}


def check_fields(values, rules, where):
    """Raise BadInput unless each given value is what the rules, a table such as FIELDS, say."""
    for name, (kind, *bounds) in rules.items():
        value = values.get(name)
        if name not in values or value is None and name in NULL_IS_FINE:
            continue
        # type() and not isinstance, to which True is an integer
        right_type = type(value) is kind or kind is float and type(value) is int
        if not right_type or bounds and not bounds[0] <= value <= bounds[1]:
            span = f" from {bounds[0]:g} to {bounds[1]:g}" if bounds else ""
            raise BadInput(f"{where}: {name} = {shorten(value)}; wanted {IN_WORDS[kind]}{span}")


# --------------------------------------------------------------------------------------------------
# the configuration


def parse_config(hf, where="config.json"):
    """
    ModelConfig from the dict of a Hugging Face config.json. where: what the errors call the file.
    Raises BadInput.
    """
    family = hf.get("model_type")
    kind = next((text for key, text in KINDS.items() if hf.get(key)), "")
    if family not in FAMILIES or kind:
        raise BadInput(f"{where}: model_type {shorten(family)} is not supported"
                       f"{f', it is {kind}' * bool(kind)}; quartet knows {', '.join(FAMILIES)}")
    check_fields(hf, FIELDS[family], where)
    given = {name: value for name, value in hf.items() if value is not None}
    for key in UNSUPPORTED:
        if given.get(key):
            raise BadInput(f"{where}: {key} = {shorten(given[key])} is not supported")
    if family == "gpt2" and not given.get("scale_attn_weights", True):
        raise BadInput(f"{where}: scale_attn_weights = false is not supported")
    try:
        c = parse_gpt2(given) if family == "gpt2" else parse_rotary(given, where)
    except KeyError as e:
        raise BadInput(f"{where}: {e.args[0]!r} is missing") from e
    if c.d_model % c.n_heads and not given.get("head_dim"):
        raise BadInput(f"{where}: a width of {c.d_model} does not split into {c.n_heads} attention "
                       "heads")
    if c.n_heads % c.n_kv_heads or family == "gpt_neox" and c.n_heads != c.n_kv_heads:
        raise BadInput(f"{where}: {c.n_heads} attention heads cannot share {c.n_kv_heads} keys and "
                       "values")
    if c.rope and (c.rotary_dim < 2 or c.rotary_dim % 2):
        raise BadInput(f"{where}: {c.rotary_dim} of a head's {c.head_dim} coordinates would "
                       "rotate; wanted an even number of them")
    c.windows = parse_windows(given, c, where)
    c.score_shift = float(given.get("score_shift", 0.0))
    c.hf = hf
    if c.activation not in ACTIVATIONS:
        raise BadInput(f"{where}: activation {shorten(c.activation)} is not supported; one of "
                       f"{', '.join(ACTIVATIONS)}")
    return c


def pad_token_id(hf):
    """
    The padding token of a model: a reward model's score is read in front of it. Where config.json
    does not say it, it is the one that transformers takes for the family; None: there is none.
    """
    return hf.get("pad_token_id", dict(olmo2=1, gemma3_text=0).get(hf["model_type"]))


def parse_gpt2(hf):
    """GPT-2's ModelConfig. Raises KeyError where a field is missing."""
    return ModelConfig(
        family="gpt2",
        vocab_size=hf["vocab_size"],
        d_model=hf["n_embd"],
        n_layers=hf["n_layer"],
        n_heads=hf["n_head"],
        n_kv_heads=hf["n_head"],
        head_dim=hf["n_embd"] // hf["n_head"],
        d_ff=hf.get("n_inner") or 4 * hf["n_embd"],
        max_positions=hf["n_positions"],
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation=hf.get("activation_function", "gelu_new"),
        tied=hf.get("tie_word_embeddings", True),
        rms_norm=False, gated_mlp=False, learned_positions=True,
        qkv_bias=True, o_bias=True, mlp_bias=True)


def parse_rotary(hf, where):
    """
    The ModelConfig of all other families, which have rotary positions and almost the same fields.
    Raises KeyError where a field is missing, and BadInput.
    """
    get, family = hf.get, hf["model_type"]
    head_dim = get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    c = ModelConfig(
        family=family,
        vocab_size=hf["vocab_size"],
        d_model=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=head_dim,
        d_ff=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"],
        norm_eps=get("rms_norm_eps", 1e-6),
        activation=get("hidden_act", "silu"),
        tied=get("tie_word_embeddings", False),
        rope=parse_rope(hf, where))
    if family == "gemma3_text":
        parse_gemma(c, hf, where)
    c.rotary_dim = int(c.head_dim * c.rope["partial_rotary_factor"])
    if family == "gpt_neox":
        c.norm_eps = get("layer_norm_eps", 1e-5)
        c.activation = get("hidden_act", "gelu")
        c.rms_norm = c.gated_mlp = False
        c.parallel_residual = get("use_parallel_residual", True)
        c.qkv_bias = c.o_bias = get("attention_bias", True)
        c.mlp_bias = True
    if family == "llama":
        c.qkv_bias = c.o_bias = get("attention_bias", False)
        c.mlp_bias = get("mlp_bias", False)
    if family == "qwen2":
        c.qkv_bias = True
    if family == "qwen3":
        c.qkv_bias = c.o_bias = get("attention_bias", False)
        c.qk_norm = "head"
    if family == "olmo2":
        c.norm_eps = get("rms_norm_eps", 1e-5)
        c.qkv_bias = c.o_bias = get("attention_bias", False)
        c.qk_norm, c.norm_before, c.norm_after = "width", False, True
    return c


def parse_gemma(c, hf, where):
    """What is Gemma 3's own, into its ModelConfig. Raises BadInput."""
    get = hf.get
    c.head_dim = get("head_dim", 256)
    c.activation = get("hidden_activation", "gelu_pytorch_tanh")
    c.tied = get("tie_word_embeddings", True)
    c.norm_offset = c.norm_after = True
    c.qkv_bias = c.o_bias = get("attention_bias", False)
    c.qk_norm = "head"
    c.attention_scale = get("query_pre_attn_scalar", 256) ** -0.5
    c.embed_scale = c.d_model**0.5
    local = dict(rope_theta=get("rope_local_base_freq", 10000.0))
    local = (get("rope_parameters") or {}).get("sliding_attention") or local
    c.local_rope = parse_rope(dict(model_type="gemma3_text", rope_parameters=local), where)


def parse_rope(hf, where):
    """
    The rotary settings {rope_type, rope_theta, partial_rotary_factor, ...}. transformers 5 writes
    them into one object, rope_parameters; older files have rope_theta beside rope_scaling, and
    GPT-NeoX rotary_emb_base and rotary_pct. Raises BadInput.
    """
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if hf["model_type"] == "gemma3_text":  # one for each kind of layer; local_rope is the other
        check_fields(rope, dict(full_attention=OBJECT, sliding_attention=OBJECT), where)
        rope = rope.get("full_attention", rope)
        hf = {"rope_theta": 1e6} | hf
    rope = dict(rope)
    check_fields(rope, ROPE_FIELDS, f"{where}: rotary embedding")
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", hf.get("rope_theta", hf.get("rotary_emb_base", 10000.0)))
    share = hf.get("rotary_pct", 0.25 if hf["model_type"] == "gpt_neox" else 1.0)
    rope.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor", share))
    kind = rope["rope_type"]
    by_layer = any(isinstance(x, dict) for x in rope.values())  # a rotation for each kind of layer
    if kind not in ROPE_NEEDS or by_layer:
        raise BadInput(f"{where}: rope type {shorten(kind)} is not supported"
                       f"{' by kind of layer' * by_layer}; one of {', '.join(ROPE_NEEDS)}, the "
                       "same in all layers")
    missing = [name for name in ROPE_NEEDS[kind] if name not in rope]
    if missing or kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise BadInput(f"{where}: rope type {kind!r} needs "
                       f"{' and '.join(missing) or 'low_freq_factor below high_freq_factor'}")
    return rope


def older_rope_names(hf):
    """
    The rotary settings of a config.json under the names of transformers 4, which does not know
    rope_parameters, and would silently take its defaults: {} where hf does not have those, either.
    """
    rope = hf.get("rope_parameters") or {}
    names = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
    theta, share = names.get(hf["model_type"], ("rope_theta", "partial_rotary_factor"))
    older = {}
    if "sliding_attention" in rope:  # Gemma 3: one for each kind of layer
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        older[theta] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        older[share] = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {name: value for name, value in rope.items()
                                 if name not in ("rope_theta", "partial_rotary_factor")}
    return older


def parse_windows(hf, c, where):
    """
    The sliding window of each layer, 0 = none. All of Mistral's layers slide; Qwen's from layer
    max_window_layers on; Gemma's but for each sixth; or those that layer_types names. Raises
    BadInput.
    """
    window = hf.get("sliding_window") or 0
    if c.family == "mistral":
        return (window,) * c.n_layers
    if c.family not in ("qwen2", "qwen3", "gemma3_text"):
        return (0,) * c.n_layers
    if c.family == "gemma3_text":  # five of six layers slide
        window, every = hf.get("sliding_window", 4096), hf.get("sliding_window_pattern", 6)
        slides = [(i + 1) % every > 0 for i in range(c.n_layers)]
    else:
        slides = [i >= hf.get("max_window_layers", 28) for i in range(c.n_layers)]
    types = hf.get("layer_types") or [
        "sliding_attention" if slide else "full_attention" for slide in slides]
    known = ("full_attention", "sliding_attention")
    if len(types) != c.n_layers or not all(t in known for t in types):
        raise BadInput(f"{where}: layer_types = {shorten(types)}; wanted {' or '.join(known)} for "
                       f"each of {c.n_layers} layers")
    if c.family != "gemma3_text" and not hf.get("use_sliding_window"):
        return (0,) * c.n_layers
    return tuple(window if t == "sliding_attention" else 0 for t in types)
