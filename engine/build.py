"""
The four models, built as the keys want them: one function a model. What LoRA (`lora`), one trunk
for all (`share_base`), a value head on the policy (`value_init`) and shards (`zero_stage`) change
in the building is decided here, so that the scripts need no switch for it.
"""
import parallel
from errors import BadInput
from engine.adapters import Adapted, load_adapted, load_adapter
from engine.checks import uses_reward_model
from engine.encoded import encode_examples
from engine.optimizers import MovingAverage, make_optimizer
from engine.placement import load, placements, precisions
from engine.reading import reader_of
from engine.reward_mix import check_rows
from engine.tensor_parallel import check_split
from engine.tokenizers import check_tokenizer_fits, load_tokenizer
from formats import Rows, read_rows
from rows import prompt_row, ptx_row
from model import freeze


def autocast(config, device):
    """The context of a run's forwards: torch.autocast in 16 bits, otherwise nothing."""
    return precisions(config["dtype"], config["master_weights"], device)[0]


def decoding_dtype(config, device):
    """The dtype of the matrices while the policy decodes; None: that of its weights."""
    return precisions(config["dtype"], config["master_weights"], device)[2]


def places(config):
    """{policy, ref, reward, value: Place}. Raises BadConfig on keys that cannot go together."""
    trained = ("policy", "value") if "value_init" in config else ("policy",)
    return placements(trained, config["zero_stage"], config["offload"], config["lora"],
                      config["optim"], config["share_base"], config.get("value_init"))


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
    rules, first = [term for term in terms if term[1] != "reward_model"], 0
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
    longest = policy.config.max_positions
    return rows, *encode_examples(config, rows, path, tokenizer, ["completion"], longest,
                                  "ptx_max_tokens")


def load_policy(config, device):
    """
    The SFT model, trained, and its tokenizer. With LoRA an adapter on it is trained instead.
    """
    path = config["policy_path"]
    tokenizer = load_tokenizer(path, config)
    policy = load(path, places(config)["policy"], trained=True, **settings(config, device))
    check_tokenizer_fits(tokenizer, policy, path)
    check_split(policy.config, config["generate_tp"])
    return policy, tokenizer


def load_ref_policy(config, device, policy):
    """The SFT model, frozen. With LoRA that is the policy without its adapter: no second copy."""
    place = places(config)
    if place["policy"].lora:
        return policy.base
    return load(config["policy_path"], place["ref"], **settings(config, device))


def load_reward_model(config, device, policy, tokenizer, terms):
    """
    The reward model, frozen, and its tokenizer, or its Reader if others have trained it; None and
    the policy's tokenizer where the terms of reward_functions are rules alone. With share_base: an
    adapter and a head on the policy's trunk. Raises BadInput where reward_path is a plain language
    model, or its head gives 0 for all that it reads.
    """
    if not uses_reward_model(terms):
        return None, tokenizer
    path = config["reward_path"]
    if config["share_base"]:
        reward_model = freeze(load_adapted(policy.base, path, "scalar", config["policy_path"]))
    else:
        tokenizer = load_tokenizer(path, {"chat_date": config["chat_date"]})
        place = places(config)["reward"]
        reward_model = load(path, place, head="scalar", **settings(config, device))
    reader, said = reader_of(reward_model, tokenizer, config["reward_format"], path)
    if not reward_model.score.weight.any():
        raise BadInput(f"reward_path {path!r} has a score head of zeros, so every score is the "
                       "same; was it trained?")
    if said and parallel.rank_and_size()[0] == 0:
        print(said, flush=True)
    return reward_model, reader


def load_value_model(config, device, policy, tokenizer, reward_tokenizer):
    """
    The value model, trained: it starts as the reward model or as the policy with a new head
    (value_init), or it is a head on the policy itself (shared). Raises BadInput where it would
    start as a reward model that does not read the policy's tokens.
    """
    init, place = config["value_init"], places(config)["value"]
    if init == "reward" and reward_tokenizer.vocabulary != tokenizer.vocabulary:
        raise BadInput("the reward model has another tokenizer than the policy, so it cannot value "
                       "the policy's tokens; type --value_init=policy")
    if init == "shared":  # the policy's trunk runs once for both, and both losses train it
        value_model = Adapted(policy, "scalar", seed=config["seed"])
        policy.shared_trunk = value_model.shared_trunk = True
        return value_model
    if config["share_base"]:
        value_model = Adapted(policy.base, "scalar", **place.lora, seed=config["seed"])
        if init == "reward":
            load_adapter(value_model, config["reward_path"])
        return value_model
    path = config["reward_path"] if init == "reward" else config["policy_path"]
    return load(path, place, head="scalar", trained=True, **settings(config, device))


def optimizer_of(model, name, config, learning_rate):
    """The optimizer of a trained model. name: policy or value, as in the key zero_stage."""
    betas = config["beta1"], config["beta2"]
    return make_optimizer(model, places(config)[name], learning_rate, betas, config["adam_eps"],
                          config["weight_decay"])


def moving_average(policy, decay):
    """The policy's moving average; None where decay is 0."""
    return MovingAverage(policy, decay) if decay > 0 else None
