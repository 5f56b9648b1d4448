"""
config.json of a Hugging Face model -> ModelConfig, with every field checked.
"""
from errors import BadInput, shorten
from model import ACTIVATIONS, ModelConfig

FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")


# What each field may be: its type, its smallest and its largest value. The bounds are far from any
# model of today. They are there so that a slip of a digit is an error, not a machine out of memory.
SIZE, COUNT, LENGTH, SHARE = (int, 1, 10**7), (int, 1, 10**4), (int, 1, 10**9), (float, 0, 1)
WINDOW, POSITIVE, FINITE = (int, 0, 10**9), (float, 1e-3, 1e15), (float, -1e30, 1e30)
FLAG, NAME, OBJECT, LIST = (bool,), (str,), (dict,), (list,)
_SHARED = dict(
    vocab_size=SIZE, hidden_size=SIZE, num_hidden_layers=COUNT, intermediate_size=SIZE,
    num_attention_heads=COUNT, num_key_value_heads=COUNT, head_dim=SIZE, hidden_act=NAME,
    max_position_embeddings=LENGTH, tie_word_embeddings=FLAG, score_shift=FINITE,
    rope_parameters=OBJECT, rope_scaling=OBJECT, rope_theta=POSITIVE, partial_rotary_factor=SHARE)
_RMS = _SHARED | dict(rms_norm_eps=SHARE)
_QWEN = _RMS | dict(
    use_sliding_window=FLAG, sliding_window=WINDOW, max_window_layers=WINDOW, layer_types=LIST)
FIELDS = {
    "gpt2": dict(
        vocab_size=SIZE, n_embd=SIZE, n_layer=COUNT, n_head=COUNT, n_inner=SIZE, n_positions=LENGTH,
        layer_norm_epsilon=SHARE, activation_function=NAME, tie_word_embeddings=FLAG,
        scale_attn_weights=FLAG, score_shift=FINITE),
    "gpt_neox": _SHARED | dict(
        layer_norm_eps=SHARE, use_parallel_residual=FLAG, attention_bias=FLAG, rotary_pct=SHARE,
        rotary_emb_base=POSITIVE),
    "llama": _RMS | dict(attention_bias=FLAG, mlp_bias=FLAG),
    "mistral": _RMS | dict(sliding_window=WINDOW),
    "qwen2": _QWEN,
    "qwen3": _QWEN | dict(attention_bias=FLAG),
}
ROPE_FIELDS = dict(
    rope_type=NAME, type=NAME, rope_theta=POSITIVE, partial_rotary_factor=SHARE, factor=POSITIVE,
    low_freq_factor=POSITIVE, high_freq_factor=POSITIVE, original_max_position_embeddings=LENGTH)
ROPE_NEEDS = {"default": (), "linear": ("factor",), "llama3": (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
ADAPTER_FIELDS = dict(
    r=(int, 0, 10**6), lora_alpha=(float, 1e-6, 1e6), target_modules=LIST, base_model_name_or_path=NAME)


# In these null means "not given". In any other field it is refused: transformers would not take it
# for the default, as we would.
NULL_IS_FINE = {
    "n_inner", "num_key_value_heads", "head_dim", "rope_parameters", "rope_scaling", "sliding_window",
    "max_window_layers", "layer_types", "target_modules", "base_model_name_or_path"}
IN_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string",
            dict: "an object", list: "a list"}


def check_fields(values, rules, where):
    """Raise BadInput unless each value that is given is what a table such as FIELDS says of it."""
    for name, (kind, *bounds) in rules.items():
        value = values.get(name)
        if name not in values or value is None and name in NULL_IS_FINE:
            continue
        # by type(), for to isinstance True is an integer
        right_type = type(value) is kind or kind is float and type(value) is int
        if not right_type or bounds and not bounds[0] <= value <= bounds[1]:
            span = f" from {bounds[0]:g} to {bounds[1]:g}" if bounds else ""
            raise BadInput(f"{where}: {name} = {shorten(value)}; wanted {IN_WORDS[kind]}{span}")


def parse_config(hf, where="config.json"):
    """ModelConfig from the dict of a Hugging Face config.json. Raises BadInput on what we could only get wrong."""
    as_read, family = hf, hf.get("model_type")
    if family not in FAMILIES:
        raise BadInput(f"{where}: model_type {shorten(family)} is not supported; quartet knows {', '.join(FAMILIES)}")
    check_fields(hf, FIELDS[family], where)
    hf = {name: value for name, value in hf.items() if value is not None}
    get = hf.get
    # what a newer or rarer config could ask for, and we would silently not do
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention", "quantization_config"):
        if get(key):
            raise BadInput(f"{where}: {key} = {shorten(get(key))} is not supported")
    if family == "gpt2" and not get("scale_attn_weights", True):
        raise BadInput(f"{where}: scale_attn_weights = false is not supported")
    try:
        if family == "gpt2":
            c = ModelConfig(
                family, hf["vocab_size"], hf["n_embd"], hf["n_layer"], hf["n_head"], hf["n_head"],
                hf["n_embd"] // hf["n_head"], get("n_inner") or 4 * hf["n_embd"], hf["n_positions"],
                get("layer_norm_epsilon", 1e-5), get("activation_function", "gelu_new"), get("tie_word_embeddings", True),
                rms_norm=False, gated_mlp=False, learned_positions=True, qkv_bias=True, o_bias=True, mlp_bias=True)
        else:
            head_dim = get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
            c = ModelConfig(
                family, hf["vocab_size"], hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"],
                get("num_key_value_heads") or hf["num_attention_heads"], head_dim, hf["intermediate_size"],
                hf["max_position_embeddings"], get("rms_norm_eps", 1e-6), get("hidden_act", "silu"),
                get("tie_word_embeddings", False), rotary_dim=head_dim, rope=parse_rope(hf, where))
    except KeyError as e:
        raise BadInput(f"{where}: {e.args[0]!r} is missing") from e
    if c.d_model % c.n_heads and not get("head_dim"):
        raise BadInput(f"{where}: a width of {c.d_model} does not split into {c.n_heads} attention heads")
    if c.n_heads % c.n_kv_heads or family == "gpt_neox" and c.n_heads != c.n_kv_heads:
        raise BadInput(f"{where}: {c.n_heads} attention heads cannot share {c.n_kv_heads} keys and values")
    if family == "gpt_neox":
        c.norm_eps, c.activation = get("layer_norm_eps", 1e-5), get("hidden_act", "gelu")
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
        c.qk_norm = True
    if c.rope:
        c.rotary_dim = int(head_dim * c.rope.get("partial_rotary_factor", 1.0))
        if c.rotary_dim < 2 or c.rotary_dim % 2:
            raise BadInput(f"{where}: {c.rotary_dim} of a head's {head_dim} coordinates would rotate; wanted "
                           "an even number of them")
    c.windows = parse_windows(hf, c, where)
    c.score_shift = float(get("score_shift", 0.0))
    c.hf = as_read
    if c.activation not in ACTIVATIONS:
        raise BadInput(f"{where}: activation {shorten(c.activation)} is not supported; one of {', '.join(ACTIVATIONS)}")
    return c


def parse_rope(hf, where):
    """Rotary settings: transformers 5 writes one `rope_parameters`; hub configs have `rope_theta` and `rope_scaling`."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    check_fields(rope, ROPE_FIELDS, f"{where}: rotary embedding")
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", hf.get("rope_theta", hf.get("rotary_emb_base", 10000.0)))
    factor = hf.get("partial_rotary_factor", hf.get("rotary_pct", 0.25 if hf["model_type"] == "gpt_neox" else 1.0))
    rope.setdefault("partial_rotary_factor", factor)
    kind = rope["rope_type"]
    by_layer = any(isinstance(value, dict) for value in rope.values())  # one rotation for each kind of layer
    if kind not in ROPE_NEEDS or by_layer:
        raise BadInput(f"{where}: rope type {shorten(kind)} is not supported{' by kind of layer' * by_layer}; "
                       f"one of {', '.join(ROPE_NEEDS)}, the same in all layers")
    missing = [name for name in ROPE_NEEDS[kind] if name not in rope]
    if missing or kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise BadInput(f"{where}: rope type {kind!r} needs "
                       f"{' and '.join(missing) or 'low_freq_factor below high_freq_factor'}")
    return rope


def parse_windows(hf, c, where):
    """The sliding window of each layer (0 = none): Mistral slides everywhere, Qwen from layer max_window_layers on."""
    window = hf.get("sliding_window") or 0
    if c.family not in ("mistral", "qwen2", "qwen3") or (c.family != "mistral" and not hf.get("use_sliding_window")):
        window = 0
    if c.family == "mistral":
        types = ["sliding_attention"] * c.n_layers
    else:
        full = hf.get("max_window_layers", 28)
        types = hf.get("layer_types") or ["full_attention" if i < full else "sliding_attention" for i in range(c.n_layers)]
        known = ("full_attention", "sliding_attention")
        fits = len(types) == c.n_layers and all(t in known for t in types)
        if c.family in ("qwen2", "qwen3") and not fits:
            raise BadInput(f"{where}: layer_types = {shorten(types)}; wanted {' or '.join(known)} for "
                           f"each of {c.n_layers} layers")
    return tuple(window if t == "sliding_attention" else 0 for t in types)
