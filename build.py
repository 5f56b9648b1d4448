"""
The models of a run, built one by one: load_policy, load_ref_policy, load_reward_model, load_judge,
load_value_model. Where each model is held, and in which precision, the keys of keys.py say;
a Placement has what they say, so that the scripts need no switch for it.
"""
import os
import shutil

import parallel
from prompts import encode_examples
from errors import BadConfig, BadInput, say
import launch
from optimizers import make_optimizer
from placement import (Place, finish_placing, is_sharded, load_placed, place_of_one,
                              placements, precisions, shard)
from reward_mix import check_rows
from tokenizer import check_tokenizer_fits, load_reader, load_tokenizer
from model import freeze, from_scratch
from rows import Rows, prompt_row, ptx_row, read_rows
from trunk import OnTrunk


class Placement:
    """
    Where the models of a run are, and in which precision. To know it the ranks must meet first: so
    this is a collective, where a script joins them (launch.init). What is read of it:

        device     this rank's
        places     {policy, ref, reward, judge, value: Place}, see placement.py
        autocast   the context of a run's forwards: torch.autocast in 16 bits, otherwise nothing
        decoding   the dtype of the matrices while the policy decodes; None: that of its weights

    system: the keys of keys.py. seed: of new heads and adapters. trained: the names of the
    trained models. value_init: ppo.py's. alone: there is one model, which is trained, as in sft.py.
    device: of a tool, which is no rank of a run.
    """

    def __init__(self, system, seed, trained=(), value_init=None, alone=False, device=None):
        """A collective, unless a device is given."""
        if device is None:
            layout = "" if alone else system.roles
            _, _, device = launch.init(
                system.device_type, system.timeout, system.deterministic, layout)
            compiler = os.environ.get("CXX", "g++")
            if system.compile and device.type == "cpu" and not shutil.which(compiler):
                raise BadConfig(f"compile = True needs a C++ compiler, and {compiler!r} is not "
                                "there; install one, or leave the key out")
        if system.report_to:
            from options.trackers import names_in

            names_in(system.report_to)
        self.system, self.device, self.seed = system, device, seed
        self.autocast, self.dtype, self.decoding = precisions(
            system.dtype, system.master_weights, device)
        keys = system.zero_stage, system.offload, system.lora, system.optim
        if alone:
            self.places = {trained[0]: place_of_one(trained[0], *keys)}
        else:
            self.places = placements(trained, *keys, system.share_base, value_init,
                                     system.ref_path)
            for name, place in self.places.items():
                place.here = name in self.held_here()
        if system.quantize == "4bit":
            from options.four_bits import check_four_bits

            check_four_bits(system, self.places)
            for place in self.places.values():
                place.four_bits = True

    def held_here(self):
        """The models that this rank's role needs whole. LoRA's trunk is on all ranks."""
        frozen = ["ref", "reward", "judge"]
        needs = dict(train=["policy", "value"], generate=["policy"], score=frozen)
        if parallel.role in ("", "train") and "score" not in parallel.roles:
            return ["policy", "value", *frozen]
        return needs[parallel.role] + ["policy"] * bool(self.system.lora)

    def load(self, path, name, head="lm", trained=False, place=None):
        """The model of a folder or hub name, where the keys want it. Raises BadInput."""
        return load_placed(path, place or self.places[name], self.device, head, self.dtype,
                           self.decoding, self.seed, trained=trained,
                           recompute=self.system.gradient_checkpointing,
                           compiled=self.system.compile)

    def begin(self, architecture, name):
        """A new model, which is trained. architecture: what transformers' config class takes."""
        model = from_scratch(architecture, seed=self.seed, dtype=self.dtype, device=self.device)
        if self.system.gradient_checkpointing:
            model.recompute()
        if is_sharded(self.places[name], trained=True):
            shard(model, self.places[name], self.device)
        finish_placing(model, self.device, self.system.compile)
        return model


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


def read_ptx(path, policy, tokenizer, system):
    """
    For PPO-ptx: the rows of ptx_path, and (ids, trained) of each, see encode_examples; none, if it
    is "". Raises BadInput.
    """
    if not path:
        return Rows(), []
    rows = read_rows(path, ptx_row, system.fields)
    return rows, encode_examples(rows, path, tokenizer, policy.max_positions, 0, system.too_long)


def load_policy(path, placement):
    """
    The SFT model, trained, and its tokenizer. With LoRA an adapter on it is trained instead. On
    ranks that generate it is a copy that gets its weights from those that train.
    """
    system, place = placement.system, placement.places["policy"]
    if system.generate_tp > 1:
        from options.tensor_parallel import check_split

        check_split(system.generate_tp)
    tokenizer = load_tokenizer(path, system.chat_template, system.template_kwargs,
                               system.system_prompt, system.stop_strings)
    trained = parallel.role in ("", "train") or place.lora is not None
    if not trained:  # a generator's copy: whole
        place = Place(here=place.here)
    policy = placement.load(path, "policy", trained=trained, place=place)
    check_tokenizer_fits(tokenizer, policy, path)
    return policy, tokenizer


def load_ref_policy(policy_path, placement, policy, tokenizer):
    """
    The SFT model, frozen: that of the key ref_path, or the policy's. With LoRA the latter is the
    policy without its adapter: no second copy. Raises BadInput where ref_path is another
    architecture, or reads other tokens.
    """
    ref_path = placement.system.ref_path
    if placement.places["policy"].lora and not ref_path:
        return policy.base
    ref_policy = placement.load(ref_path or policy_path, "ref")
    if not ref_path:
        return ref_policy
    shapes, wanted = ([tuple(p.shape) for p in model.parameters()]
                      for model in (ref_policy.hf, policy.hf))
    if type(ref_policy.hf) is not type(policy.hf) or shapes != wanted:
        raise BadInput(f"ref_path {ref_path!r} is not of the policy's architecture, so the two "
                       "cannot be compared as one model that has moved; give the model that "
                       "policy_path began as")
    if load_tokenizer(ref_path).vocabulary != tokenizer.vocabulary:
        raise BadInput(f"ref_path {ref_path!r} has another tokenizer than the policy, so its "
                       "log-probs would be of other tokens; give the model that policy_path began "
                       "as")
    return ref_policy


def begin_sampler(policy, tokenizer, placement):
    """
    A collective: the engine that samples in the place of the policy, where the key sampler says so;
    else None.
    """
    if placement.system.sampler == "own":
        return None
    from options.vllm import begin_vllm

    return begin_vllm(policy, tokenizer, placement.system, placement.device)  # COLLECTIVE


def load_reward_model(path, placement, policy, tokenizer, terms):
    """
    The reward model, frozen, and its tokenizer, which reads the run's chats, with its
    system_prompt, in the reward model's own template. With share_base: an adapter and a head on the
    policy's trunk. None and None where the terms of reward_functions do not name it. Raises
    BadInput where it is a plain language model, or its head gives 0 for all texts.
    """
    if "reward_model" not in [name for _, name, _ in terms]:
        return None, None
    if placement.system.share_base:
        from options.lora import load_adapted

        reward_model = freeze(load_adapted(policy.base, path, "scalar", policy.path))
    else:
        reward_model = placement.load(path, "reward", head="scalar")
    reader = load_reader(path, reward_model, tokenizer)
    weight = reward_model.hf.score.weight
    if not weight.is_meta and not weight.any():
        raise BadInput(f"reward_path {path!r} has a score head of zeros, so every score is the "
                       "same; was it trained?")
    return reward_model, reader


def load_judge(policy_path, placement, policy, ref_policy, terms):
    """
    The judge of the key judge_path, frozen, a judging.Judge; None where the terms of
    reward_functions do not name it. Where its folder is the frozen reference's it is that model: no
    second copy. Raises BadConfig or BadInput.
    """
    if "judge" not in [name for _, name, _ in terms]:
        return None
    from options.judging import Judge, judged_by_reference

    system = placement.system
    path, model = system.judge_path, None
    if judged_by_reference(path, system.ref_path, policy_path):
        path = system.ref_path or policy_path
        model = ref_policy or getattr(policy, "base", None)
        if model is None and system.judge_path == "ref_policy":
            raise BadConfig("judge_path = 'ref_policy', but with kl_coef = 0 there is no "
                            "reference; give its folder, or type --kl_coef=1e-9")
    tokenizer = load_tokenizer(path)
    if model is None:
        model = placement.load(path, "judge")
    check_tokenizer_fits(tokenizer, model, path)
    judge = Judge(model, tokenizer, path, system.judge_template)
    say(judge.in_words)
    return judge


def load_value_model(value_init, placement, policy, tokenizer, reward_path, reward_tokenizer):
    """
    The value model, trained: it starts as the reward model or as the policy with a new head
    (value_init), or it is a head on the policy's own trunk (shared). reward_tokenizer: None where
    there is no reward model. Raises BadInput where it would start as none, or as one that does not
    read the policy's tokens.
    """
    place = placement.places["value"]
    if value_init == "reward" and reward_tokenizer is None:
        raise BadConfig("value_init = 'reward', but reward_functions does not use reward_model; "
                        "type --value_init=policy")
    if value_init == "reward" and reward_tokenizer.vocabulary != tokenizer.vocabulary:
        raise BadInput("the reward model has another tokenizer than the policy, so it cannot value "
                       "the policy's tokens; type --value_init=policy")
    if not place.here:
        return None
    if placement.system.share_base and value_init != "shared":
        from options.lora import Adapted

        value_model = Adapted(policy.base, "scalar", **place.lora, seed=placement.seed)
        if value_init == "reward":
            value_model.fill_own(reward_path)
        return value_model
    if value_init == "shared":  # both losses train the policy's trunk
        return OnTrunk(policy, seed=placement.seed)
    path = reward_path if value_init == "reward" else policy.path
    return placement.load(path, "value", head="scalar", trained=True)


def optimizer_of(model, name, placement, learning_rate, betas, eps):
    """The optimizer of a trained model. name: policy, value or reward, as in the key zero_stage."""
    return make_optimizer(model, placement.places[name], learning_rate, betas, eps,
                          placement.system.weight_decay)


# --------------------------------------------------------------------------------------------------
# keys of ppo.py and grpo.py that contradict each other, refused before anything is loaded. What one
# key alone may be, the range behind its comment says, and configurator.py checks it


def check_rl(system, terms, reward_path, kl_coef, batch_size, num_minibatches, importance_cap,
             eval_path):
    """Raise BadConfig. system: the keys of the engine; terms: [(weight, name, function)]."""
    names = [name for _, name, _ in terms]
    for key, path, name in (("reward_path", reward_path, "reward_model"),
                            ("judge_path", system.judge_path, "judge")):
        if path and name not in names:
            raise BadConfig(f"{key} = {path!r}, but reward_functions does not use {name}; type "
                            f"--reward_functions={name}, or leave {key} out (--{key}=)")
        if name in names and not path:
            raise BadConfig(f"reward_functions names {name}; say which by --{key}=FOLDER")
    if system.ref_path and kl_coef == 0:
        raise BadConfig(f"ref_path = {system.ref_path!r} with kl_coef = 0: there is no reference "
                        "then; type --kl_coef=0.05, or leave it out")
    # options are imported here, before the ranks compare their code
    if system.roles or system.staleness > 0:
        from options.roles import check_ahead

        check_ahead(system)
    if system.sampler == "vllm":
        from options.vllm import check_vllm

        check_vllm(system, importance_cap)
    if num_minibatches > batch_size:
        raise BadConfig(f"num_minibatches = {num_minibatches} would leave minibatches of "
                        f"batch_size = {batch_size} empty; lower it")
    if system.keep_best and not eval_path:
        raise BadConfig("keep_best needs held-out prompts to find the best policy by; give an "
                        "eval_path")
    if any(function for *_, function in terms) and system.reward_timeout >= system.timeout:
        raise BadConfig(f"reward_timeout = {system.reward_timeout} must be below timeout = "
                        f"{system.timeout}, or ranks that wait give up first")


def check_grpo(terms, batch_size, group_size, loss_type, importance, kl_coef, kl_in, kl_estimator,
               kl_correction, refill_by):
    """Raise BadConfig where keys of grpo.py do not go together."""
    names = [name for _, name, _ in terms]
    if refill_by and refill_by not in names:
        raise BadConfig(f"refill_by = {refill_by!r} is none of the rewards, {', '.join(names)}")
    if batch_size % group_size:
        raise BadConfig(f"batch_size = {batch_size} is not a multiple of group_size = "
                        f"{group_size}; it counts responses, not prompts")
    if loss_type == "cispo" and importance == "sequence":
        raise BadConfig("loss_type = 'cispo' has a weight a token; leave importance = 'token'")
    if kl_coef > 0 and kl_in == "loss" and kl_estimator == "k1" and not kl_correction:
        raise BadConfig("kl_in = 'loss' with kl_estimator = 'k1' is no penalty: the gradient of "
                        "k1 is 0 on average in the first step and not the KL's in any other; "
                        "type --kl_estimator=k2 or --kl_correction=True")
    if kl_correction and (kl_in == "reward" or kl_estimator == "k2"):
        raise BadConfig("kl_correction is for k1 and k3 in the loss: with kl_in = 'reward' there "
                        "is no gradient, and times the ratio k2's is not the KL's any more; leave "
                        "it False")
