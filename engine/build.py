"""
The four models, built as the keys want them: one function a model. What value_init and the
place of each model (zero_stage, offload, roles) change in the building is decided here, so that the
scripts need no switch for it.
"""
from data import encode_examples
from errors import BadInput, say
from engine import roles
from engine.adapters import Adapted, fill_adapter, load_adapted
from engine.checks import uses_reward_model
from engine.judging import Judge, judged_by_reference
from engine.optimizers import MovingAverage, make_optimizer
from engine.placement import load_placed
from engine.places import Place, placements, precisions
from engine.reward_mix import check_rows
from engine.tensor_parallel import check_split
from engine.tokenizers import check_tokenizer_fits, load_reader, load_tokenizer
from model import freeze
from rows import Rows, prompt_row, ptx_row, read_rows


def autocast(config, device):
    """The context of a run's forwards: torch.autocast in 16 bits, otherwise nothing."""
    return precisions(config["dtype"], config["master_weights"], device)[0]


def decoding_dtype(config, device):
    """The dtype of the matrices while the policy decodes; None: that of its weights."""
    return precisions(config["dtype"], config["master_weights"], device)[2]


def places(config):
    """{policy, ref, reward, value: Place}. Raises BadConfig on keys that cannot go together."""
    trained = ("policy", "value") if "value_init" in config else ("policy",)
    found = placements(trained, config["zero_stage"], config["offload"], config["lora"],
                       config["optim"], config["share_base"], config.get("value_init"))
    for name, place in found.items():
        place.here = name in holds(config)
    return found


def holds(config):
    """The models that this rank's role needs whole. LoRA's trunk is the policy's on all ranks."""
    frozen = ["ref", "reward", "judge"]
    needs = dict(train=["policy", "value"], generate=["policy"], score=frozen)
    if roles.role in ("", "train") and "score" not in roles.ranks:
        return ["policy", "value", *frozen]
    return needs[roles.role] + ["policy"] * bool(config["lora"])


def settings(config, device):
    """The arguments of `load` that are the same for all models of a run."""
    _, weights_dtype, frozen_dtype = precisions(config["dtype"], config["master_weights"], device)
    return dict(device=device, dtype=weights_dtype, matrices=frozen_dtype, seed=config["seed"],
                recompute=config["gradient_checkpointing"], compiled=config["compile"])


def read_prompts(path, terms, fields=""):
    """
    The rows of a file of prompts, which have what the rewards need; none, if path is "". Raises
    BadInput.
    """
    rows = read_rows(path, prompt_row, fields) if path else Rows()
    rules, first = [term for term in terms if term[2]], 0
    for file, _, count in rows.parts:
        check_rows(rules, rows[first:first + count], file)
        first += count
    return rows


def read_ptx(config, policy, tokenizer):
    """
    For PPO-ptx: the rows of ptx_path, and (ids, trained) of each, see encode_examples; none, if it
    is "". Raises BadInput.
    """
    path = config["ptx_path"]
    if not path:
        return Rows(), []
    rows = read_rows(path, ptx_row, config["fields"])
    return rows, encode_examples(rows, path, tokenizer, policy.max_positions, 0,
                                 config["too_long"])


def load_policy(config, device):
    """
    The SFT model, trained, and its tokenizer. With LoRA an adapter on it is trained instead. On
    ranks that generate it is a copy that gets its weights from those that train.
    """
    path, place = config["policy_path"], places(config)["policy"]
    if config["generate_tp"] > 1:
        check_split(config["generate_tp"], config["roles"])
    tokenizer = load_tokenizer(path, config["chat_template"], config["template_kwargs"],
                               config["system_prompt"], config["stop_strings"])
    trained = roles.role in ("", "train") or place.lora is not None
    if not trained:  # a generator's copy: whole
        place = Place(here=place.here)
    policy = load_placed(path, place, trained=trained, **settings(config, device))
    check_tokenizer_fits(tokenizer, policy, path)
    return policy, tokenizer


def load_ref_policy(config, device, policy, tokenizer):
    """
    The SFT model, frozen: that of ref_path, or the policy's. With LoRA the latter is the policy
    without its adapter: no second copy. Raises BadInput where ref_path is another architecture, or
    reads other tokens.
    """
    place, path = places(config), config["ref_path"] or config["policy_path"]
    if place["policy"].lora and not config["ref_path"]:
        return policy.base
    ref_policy = load_placed(path, place["ref"], **settings(config, device))
    shapes, wanted = ([tuple(p.shape) for p in model.parameters()]
                      for model in (ref_policy.hf, policy.hf))
    if type(ref_policy.hf) is not type(policy.hf) or shapes != wanted:
        raise BadInput(f"ref_path {path!r} is not of the policy's architecture, so the two cannot "
                       "be compared as one model that has moved; give the model that policy_path "
                       "began as")
    if load_tokenizer(path).vocabulary != tokenizer.vocabulary:
        raise BadInput(f"ref_path {path!r} has another tokenizer than the policy, so its log-probs "
                       "would be of other tokens; give the model that policy_path began as")
    return ref_policy


def load_reward_model(config, device, policy, tokenizer, terms):
    """
    The reward model, frozen, and its tokenizer, which reads the run's chats, with its
    system_prompt, in the reward model's own template. With share_base: an adapter and a head on the
    policy's trunk. None and the policy's tokenizer where the terms of reward_functions are rules
    alone. Raises BadInput where it is a plain language model, or its head gives 0 for all texts.
    """
    if not uses_reward_model(terms):
        return None, tokenizer
    path = config["reward_path"]
    if config["share_base"]:
        reward_model = freeze(load_adapted(policy.base, path, "scalar", config["policy_path"]))
    else:
        place = places(config)["reward"]
        reward_model = load_placed(path, place, head="scalar", **settings(config, device))
    reader = load_reader(path, reward_model, tokenizer)
    weight = reward_model.hf.score.weight
    if not weight.is_meta and not weight.any():
        raise BadInput(f"reward_path {path!r} has a score head of zeros, so every score is the "
                       "same; was it trained?")
    return reward_model, reader


def load_judge(config, device, policy, ref_policy, terms):
    """
    The judge, frozen, a Judge; None where no reward is called so. Where its folder is the frozen
    reference's it is that model: no second copy. Raises BadInput.
    """
    if "judge" not in [name for _, name, _ in terms]:
        return None
    path, model = config["judge_path"], None
    if judged_by_reference(config):
        if policy is None:  # a tool, which has no reference
            raise BadInput("judge_path = 'ref_policy' is for training; give the judge's folder")
        path = config["ref_path"] or config["policy_path"]
        model = ref_policy or getattr(policy, "base", None)
    tokenizer = load_tokenizer(path)
    if model is None:
        model = load_placed(path, places(config)["judge"], **settings(config, device))
    check_tokenizer_fits(tokenizer, model, path)
    judge = Judge(model, tokenizer, path, config["judge_template"])
    say(judge.in_words)
    return judge


def load_value_model(config, device, policy, tokenizer, reward_tokenizer):
    """
    The value model, trained: it starts as the reward model or as the policy with a new head
    (value_init), or it is a head on the policy's own trunk (shared). Raises BadInput where it would
    start as a reward model that does not read the policy's tokens.
    """
    init, place = config["value_init"], places(config)["value"]
    reward_path = config["reward_path"]
    if init == "reward" and reward_tokenizer.vocabulary != tokenizer.vocabulary:
        raise BadInput("the reward model has another tokenizer than the policy, so it cannot value "
                       "the policy's tokens; type --value_init=policy")
    if not place.here:
        return None
    if config["share_base"] and init != "shared":
        value_model = Adapted(policy.base, "scalar", **place.lora, seed=config["seed"])
        if init == "reward":
            fill_adapter(value_model, reward_path)
        return value_model
    if init == "shared":  # both losses train the policy's trunk
        return Adapted(policy, "scalar", seed=config["seed"])
    path = reward_path if init == "reward" else config["policy_path"]
    return load_placed(path, place, head="scalar", trained=True, **settings(config, device))


def optimizer_of(model, name, config, learning_rate):
    """The optimizer of a trained model. name: policy or value, as in the key zero_stage."""
    betas = config["beta1"], config["beta2"]
    return make_optimizer(model, places(config)[name], learning_rate, betas, config["adam_eps"],
                          config["weight_decay"])


def moving_average(policy, decay):
    """The policy's moving average; None where decay is 0."""
    return MovingAverage(policy, decay) if decay > 0 else None
