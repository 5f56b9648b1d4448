"""
Whole runs of ppo.py, grpo.py, sft.py and rm.py, as a user starts them, against by_hand.py: the same
runs worked out with transformers' models and plain loops. Their final weights must agree within
1e-9, and so must every figure that both log.

And on any number of ranks, with any shards, micro-batches and roles, stopped in the middle or not:
each case is run in one of these ways, and what must come out is always the one by hand.

Only the command line, the keys and what a run leaves are used here, so a script may be rewritten
from top to bottom. Together the runs take every branch of the losses; a test of its own sees to it.

Prompts, noise and minibatches are drawn by the hashes that the scripts promise to draw them by,
said again in by_hand.py. Any others would be as right. But a run that gave a response the noise of
another, or a step the rows of another, would sample other tokens or end in other weights.
"""
import functools
import math
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import transformers

import by_hand
import tiny
from by_hand import ENDS, EOS, MARKERS, PAD, VOCABULARY
from tiny import forked, in_a_row, one_run, write_byte_tokenizer

TOLERANCE = 1e-9

# --------------------------------------------------------------------------------------------------
# a world of two layers


def save_random(folder, kind, tokenizer, seed, shift=None, ends=True):
    """
    A random transformers model in float64, with a tokenizer beside it. kind: gpt2, or neox with the
    head tied to the embedding. shift: the score_shift of a sequence-classification model, "unsaid":
    it has none; None: a language model that says a few letters most of the time, and ends soon or never.
    """
    kwargs = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
    if shift is not None:
        kwargs |= dict(num_labels=1) | ({} if shift == "unsaid" else dict(score_shift=shift))
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_inner=24, n_positions=64,
                                         tie_word_embeddings=False, **kwargs)
    else:
        config = transformers.GPTNeoXConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=64, tie_word_embeddings=True, **kwargs)
    auto = (transformers.AutoModelForCausalLM if shift is None else
            transformers.AutoModelForSequenceClassification)
    model, generator = auto.from_config(config).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.empty(p.shape).normal_(0, 0.2, generator=generator))
            if p.dim() == 1 and name.endswith("weight"):  # of a norm
                p.add_(1.0)
        if shift is None:
            # one coordinate of the last state is always there, and some tokens look for it
            last_norm = "gpt_neox.final_layer_norm" if kind == "neox" else "transformer.ln_f"
            model.get_submodule(last_norm).bias[0] = 3.0
            likely = torch.zeros(VOCABULARY)
            likely[[*b"abcdxyz", 256, 257]], likely[EOS] = 1.3, 1.4
            if not ends:
                likely[list(ENDS)] = -4.0
            model.get_output_embeddings().weight[:, 0] = likely
            model.generation_config.eos_token_id = list(ENDS)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, MARKERS[tokenizer])

PROMPTS = ["a", "abc", "yes: ", "<think>", "dddd", "b c", "xyzzy!", "ab</think>cd", "z", "cab",
           "12", "é"]


def build(folder):
    """Models, rules and data in a folder: a namespace of their paths, and of the `rows`."""
    world = SimpleNamespace(root=folder, rules=os.path.join(folder, "rules.py"), rows={})
    for seed, (name, *what) in enumerate([
            ("policy", "gpt2", "tokenizer"), ("tied", "neox", "tokenizer"),
            ("reward", "gpt2", "tokenizer"), ("other", "neox", "other_tokenizer"),
            ("uncentered", "gpt2", "tokenizer"), ("older", "gpt2", "tokenizer"),
            ("second", "neox", "tokenizer"), ("third", "gpt2", "tokenizer"),
            ("endless", "gpt2", "tokenizer")], 1):
        setattr(world, name, os.path.join(folder, name))
        shifts = dict(reward=0.25, other=-0.5, uncentered="unsaid", second=0.1, third=-0.3)
        save_random(getattr(world, name), *what, seed, shifts.get(name), ends=name != "endless")
    world.teachers = f"{world.other},{world.third}"
    with open(world.rules, "w", encoding="utf-8") as f:
        f.write(by_hand.FILE)
    texts = [dict(text=text) for text in PROMPTS[1:6]]
    world.rows["texts"] = [*texts, dict(prompt="ab", completion="dd"), dict(text="q")]
    tiny.jsonl(os.path.join(folder, "texts.jsonl"), world.rows["texts"])
    world.rows["alike"] = [dict(prompt="cab", answer=letter) for letter in "abcdx"]  # the same question, other answers
    tiny.jsonl(os.path.join(folder, "alike.jsonl"), world.rows["alike"])
    kinds = dict(rl=[], sft=[], pairs=[])
    for i, prompt in enumerate(PROMPTS):
        right = PROMPTS[5 * i % len(PROMPTS)]
        wrong = PROMPTS[(7 * i + 3) % len(PROMPTS)] * (1 + i % 2)
        kinds["rl"].append(dict(prompt=prompt))
        kinds["sft"].append(dict(prompt=prompt, completion=right * (1 + i % 2)))
        kinds["pairs"].append(dict(prompt=prompt, chosen=right, rejected=wrong))
        if i % 3:  # some pairs have a margin
            kinds["pairs"][-1]["margin"] = i / 5
        if i % 2:  # and some a confidence
            kinds["pairs"][-1]["confidence"] = 0.5 + i / 40
    kinds["pairs"].append(dict(prompt="tie", chosen="ab", rejected="ab"))
    for kind, rows in kinds.items():
        for part, some in (("train", rows[:9]), ("val", rows[9:])):
            world.rows[f"{kind}_{part}"] = some
            tiny.jsonl(os.path.join(folder, f"{kind}_{part}.jsonl"), some)
    return world


# --------------------------------------------------------------------------------------------------
# the runs: all keys that have a say are given, whatever their defaults are

# way: its layout, below. What is stopped, is stopped by a signal before the update of iteration 1, and resumed by the same
# command. (Stops of all other runs: test_knobs.py.)
ADAM = dict(way="alone", weight_decay=0.0, beta1=0.9, beta2=0.99, adam_eps=1e-5, grad_clip=0.0,
            learning_rate=1e-2, warmup_iters=0, lr_decay="constant")
SAMPLED = ADAM | dict(
    seed=3, max_iters=2, eval_interval=2, eval_size=2, policy_model="policy", reward_model="reward",
    max_new_tokens=6, temperature=0.8, micro_batch_size=2, missing_eos_penalty=0.0,
    ref_path="", staleness=0,
    importance_cap=0.0, gaps=False, turns=False, lora="",
    cliprange=0.2, entropy_coef=0.0, ema_decay=0.0, keep_best=False)
PPO = SAMPLED | dict(
    batch_size=5, mix=[(1.0, "reward_model")], value_init="reward", kl_coef=0.3, kl_estimator="k1", gamma=1.0, lam=0.95,
    ppo_epochs=2, num_minibatches=2, cliprange_value=0.2, vf_coef=0.1,
    value_learning_rate=2e-2, value_warmup_iters=0,
    value_lr_decay="constant", ptx="")
GRPO = SAMPLED | dict(
    batch_size=6, group_size=3, mix=[(1.0, "letters")], max_refills=0, baseline="mean", scale_by="std",
    loss_type="clip", importance="token", aggregation="token-mean", truncated="keep", kl_coef=0.2,
    kl_in="loss", kl_estimator="k3", num_iterations=2, num_minibatches=2,
    cliprange_high=0.3, refill_by="")
TUNED = ADAM | dict(seed=5, max_iters=4, eval_interval=2, eval_size=0, batch_size=5,
                    micro_batch_size=2)
PAIRS = TUNED | dict(margin_coef=0.0, label_smoothing=0.0, centre_coef=0.0, use_confidence=False, teacher="", lora="",
                     score_coef=1.0, preference_coef=1.0)
# what recipes change, as it is without them: keys of by_hand.py, and of a script that has the recipe (test_recipes.py)
PLAIN = dict(whiten_rewards="none", scale_scores="none", reward_clip=0.0, kl_coef_target=0.0, target_kl=0.0,
             critic_warmup_iters=0, dual_clip=0.0, shift_limit=0.0, recipe="", gone=(), length_coef=0.0, lam_alpha=0.0,
             penalty=0.0, penalty_target=0.0, importance_floor=0.0, importance_level="token", importance_outside="clip",
             kl_correction=False, off_policy_limit=0.0)
SMALL = dict(rollout_batch_size=3, head_chunk=4, gradient_checkpointing=True)  # the memory's knobs
CASES = {
    # a learned reward; k1 in the reward; the value model starts as the reward model
    "ppo, learned": ("ppo.py", PPO | dict(
        way="two scorers", missing_eos_penalty=2.0, lr_decay="linear", value_warmup_iters=2, max_iters=3,
        eval_interval=1, eval_size=0, keep_best=True)),
    # k2, long gradients; the value model is a head on the policy's trunk;
    # the reward model reads other tokens
    "ppo, shared": ("ppo.py", PPO | dict(
        way="stage 2", kl_estimator="k2", reward_model="other",
        value_init="shared", gamma=0.9, lam=0.8, cliprange_value=0.0, grad_clip=0.5, vf_coef=0.5,
        entropy_coef=0.05, temperature=1.2, weight_decay=0.1, warmup_iters=2,
        value_lr_decay="cosine", batch_size=6, num_minibatches=2, ppo_epochs=3, max_iters=3)),
    # k3 in the reward, several rewards; the value model starts as the policy
    "ppo, mixed": ("ppo.py", PPO | SMALL | dict(
        way="three", kl_estimator="k3", mix=[(0.7, "reward_model"), (-0.5, "letters"), (1.0, "length")],
        policy_model="tied", value_init="policy", temperature=1.0, num_minibatches=1, value_learning_rate=0.0,
        value_warmup_iters=1, lr_decay="cosine", value_lr_decay="linear", ema_decay=0.7,
        eval_size=0, max_new_tokens=5)),
    # PPO-ptx: texts and demonstrations, also where both heads stand on one trunk;
    # and a reference that is not the policy of the start
    "ppo, ptx": ("ppo.py", PPO | dict(
        way="stage 3", value_init="policy", ptx="texts", ptx_coef=2.5, grad_clip=2.0,
        missing_eos_penalty=1.0, ref_model="older")),
    "ppo, shared, ptx": ("ppo.py", PPO | SMALL | dict(
        way="tokens", mix=[(1.0, "letters")], value_init="shared", policy_model="tied", ptx="sft_train",
        ptx_coef=0.4)),
    # scores as the hub's models give them: the zero is found, a missing EOS costs
    "ppo, uncentered": ("ppo.py", PPO | dict(
        way="two", reward_model="uncentered", mix=[(0.6, "reward_model"), (0.4, "letters")],
        missing_eos_penalty=1.0, ema_decay=0.8)),
    # adapters on the policy, and on the reward model for the values, which keep its zero
    "ppo, adapters": ("ppo.py", PPO | dict(way="two", lora="2:5", weight_decay=0.1, vf_coef=0.5, learning_rate=5e-2)),
    # one response of one token: nothing to whiten by
    "ppo, one token": ("ppo.py", PPO | dict(
        way="two", batch_size=1, max_new_tokens=1, num_minibatches=1)),
    # no response ends: the reward model's zero is that of all of them
    "ppo, endless": ("ppo.py", PPO | dict(
        policy_model="endless", reward_model="uncentered", missing_eos_penalty=1.0, max_iters=1,
        max_new_tokens=4)),
    # batches of policies that are one and two updates old
    "ppo, stale": ("ppo.py", PPO | dict(way="roles, stopped", staleness=2, max_iters=4)),
    # and where the ratio is to the policy of now, each token counts more or less
    "ppo, stale, capped": ("ppo.py", PPO | dict(
        way="generate", staleness=1, importance_cap=1.1, max_iters=3, num_minibatches=2, value_init="shared",
        kl_estimator="k2")),
    "grpo, stale, capped": ("grpo.py", GRPO | dict(
        way="three roles, stopped", staleness=2, importance_cap=1.3, num_minibatches=1, kl_in="reward", kl_estimator="k1",
        max_iters=4, mix=[(1.0, "sometimes"), (0.5, "length")], max_refills=2, max_new_tokens=5)),
    # the ratio is to the policy that has sampled, and some responses have no score: a reward that
    # applies to them has the weight 0
    "grpo, stale": ("grpo.py", GRPO | dict(
        way="two", staleness=1, max_iters=3, mix=[(-1.0, "some"), (0.0, "letters")], max_refills=1, batch_size=9, seed=6,
        keep_best=True, eval_interval=1, eval_size=0)),
    # one question with several answers: equal texts have other scores
    "grpo, alike": ("grpo.py", GRPO | dict(
        way="two", mix=[(1.0, "answer")], files=dict(prompts_path="alike", eval_path="alike"), kl_in="reward", kl_estimator="k1",
        batch_size=12, max_new_tokens=2, num_minibatches=1, scale_by="batch", seed=6)),
    # what an environment writes between, and behind, the policy's own tokens counts nowhere
    "ppo, gaps": ("ppo.py", PPO | dict(
        way="three", gaps=True, mix=[(1.0, "some"), (0.0, "letters")], value_init="policy", gamma=0.9,
        missing_eos_penalty=0.7, entropy_coef=0.05,
        max_new_tokens=8, keep_best=True, eval_interval=1, eval_size=0, seed=1)),
    "grpo, gaps": ("grpo.py", GRPO | dict(
        way="two", gaps=True, mix=[(1.0, "letters"), (0.5, "length")], importance="sequence", cliprange=0.02,
        cliprange_high=0.05, aggregation="seq-mean-token-mean", kl_in="reward", kl_estimator="k1",
        max_new_tokens=8)),
    # an environment answers: its words count nowhere, and what it pays for a turn counts from there on
    "ppo, turns": ("ppo.py", PPO | dict(
        way="three", turns=True, max_turns=3, mix=[(0.7, "environment"), (1.0, "letters"), (0.4, "reward_model")],
        value_init="policy", gamma=0.9, lam=0.8, missing_eos_penalty=0.7, max_new_tokens=12, max_iters=3, seed=1)),
    "grpo, turns": ("grpo.py", GRPO | dict(
        way="generate", turns=True, max_turns=4, mix=[(1.0, "environment"), (0.5, "length")], staleness=1, max_refills=1,
        max_new_tokens=14, max_iters=3)),
    "grpo, one token": ("grpo.py", GRPO | dict(
        way="two", batch_size=2, group_size=2, max_new_tokens=1, num_minibatches=1,
        mix=[(1.0, "reward_model")])),
    "grpo, endless": ("grpo.py", GRPO | dict(
        policy_model="endless", truncated="mask", max_new_tokens=4, max_iters=1)),
    "grpo": ("grpo.py", GRPO | dict(
        way="two", mix=[(0.5, "reward_model"), (1.0, "letters")], aggregation="seq-mean-token-mean",
        missing_eos_penalty=0.9, lr_decay="linear", entropy_coef=0.02,
        grad_clip=1.0, keep_best=True, eval_interval=1, eval_size=0, seed=8, max_iters=3)),
    "dapo": ("grpo.py", GRPO | dict(
        way="stage 3", mix=[(1.0, "sometimes"), (0.5, "length")], max_refills=2, missing_eos_penalty=0.5,
        batch_size=8, group_size=2, kl_coef=0.0, grad_clip=0.3, temperature=1.1,
        num_minibatches=4, policy_model="tied", ema_decay=0.6, eval_size=0, max_new_tokens=5,
        seed=2, max_iters=3, keep_best=True, eval_interval=1)),
    "dr. grpo": ("grpo.py", GRPO | SMALL | dict(
        mix=[(1.0, "sometimes")], scale_by="none", aggregation="seq-mean-token-sum-norm",
        num_minibatches=5, kl_estimator="k2", weight_decay=0.1, temperature=1.0,
        warmup_iters=2, lr_decay="cosine", seed=6, max_new_tokens=10, max_iters=3)),
    "gspo": ("grpo.py", GRPO | dict(
        importance="sequence", scale_by="batch", truncated="mask", aggregation="seq-mean-token-mean",
        cliprange=0.02, cliprange_high=0.05, batch_size=8, group_size=4,
        num_minibatches=5, reward_model="other", mix=[(1.0, "reward_model")], seed=1)),
    "cispo, rloo": ("grpo.py", GRPO | dict(
        way="three", loss_type="cispo", baseline="others", scale_by="none", kl_estimator="k2",
        num_minibatches=1, reward_model="uncentered", mix=[(1.0, "reward_model")],
        missing_eos_penalty=1.0, seed=1)),
    # the KL in the score; groups are refilled by one reward of two, and some stay flat by it
    "rloo": ("grpo.py", GRPO | dict(
        way="two", baseline="others", scale_by="none", aggregation="token-mean", kl_in="reward",
        kl_estimator="k1", kl_coef=0.4, mix=[(1.0, "sometimes"), (0.7, "reward_model")],
        max_refills=1, refill_by="sometimes", batch_size=8, group_size=2, num_minibatches=2, ref_model="older")),
    "sft": ("sft.py", TUNED | dict(
        way="tuned, stage 3", init="policy", warmup_iters=2, lr_decay="cosine", weight_decay=0.1, grad_clip=2.5)),
    "sft, plain": ("sft.py", TUNED | dict(
        way="stage 1", init="tied", micro_batch_size=3, eval_size=2, head_chunk=3, max_iters=3)),
    "rm": ("rm.py", PAIRS | dict(
        way="two", init="policy", new_head=True, warmup_iters=2, lr_decay="linear", weight_decay=0.1,
        grad_clip=2.0)),
    # without demonstrations the chosen answers of the held-out pairs score 0
    "rm, again": ("rm.py", PAIRS | dict(
        way="tuned, stage 3", init="reward", new_head=False, micro_batch_size=3, eval_size=2, max_iters=3,
        files=dict(demonstrations_path=""),
        margin_coef=0.7, label_smoothing=0.15, centre_coef=0.05, use_confidence=True)),
    # adapters, and a head that is drawn
    "rm, adapter": ("rm.py", PAIRS | dict(
        way="two", init="policy", new_head=True, lora="2:5", weight_decay=0.1, max_iters=3, eval_size=2)),
    # two teachers, of which one reads the text in its own tokens; pairs, and single responses
    "rm, taught": ("rm.py", PAIRS | dict(
        way="stage 2", init="tied", new_head=True, teacher_model="teachers", score_coef=0.7, preference_coef=1.3,
        micro_batch_size=3, max_iters=3)),
    "rm, responses": ("rm.py", PAIRS | dict(
        way="two", init="policy", new_head=True, teacher_model="third", score_coef=0.5, eval_size=2,
        max_iters=3, grad_clip=0.5, files=dict(train_path="sft_train"))),
}


def drawn(script, seed):
    """A case whose every switch is drawn: what no one would think of together."""
    rng = random.Random(f"{seed} of {script}")
    keys = dict(
        temperature=(0.8, 1.2), missing_eos_penalty=(0.0, 1.0), grad_clip=(0.0, 0.5),
        staleness=(0, 0, 1), importance_cap=(0.0, 1.1), cliprange=(0.2, 0.03), entropy_coef=(0.0, 0.05),
        ema_decay=(0.0, 0.7), keep_best=(False, True), policy_model=("policy", "tied"),
        kl_estimator=("k1", "k2", "k3"), kl_coef=(0.3, 0.3, 0.0), weight_decay=(0.0, 0.1),
        lr_decay=("constant", "linear", "cosine"), warmup_iters=(0, 2), max_new_tokens=(4, 5), seed=range(9),
        num_minibatches=(1, 2, 3), reward_model=("reward", "other", "uncentered"),
        mix=([(1.0, "reward_model")], [(0.6, "reward_model"), (1.0, "sometimes")],
             [(1.0, "letters"), (0.5, "length")]))
    if script == "ppo.py":
        keys |= dict(
            gamma=(1.0, 0.9), lam=(0.95, 0.0, 1.0),
            ppo_epochs=(1, 2), cliprange_value=(0.0, 0.2), vf_coef=(0.1, 0.5), batch_size=(4, 5, 7),
            value_init=("policy", "shared", "reward"), ptx=("", "", "texts"), ptx_coef=(1.0, 2.5))
    else:
        keys |= dict(
            group_size=(2, 3), num_iterations=(1, 2), max_refills=(0, 1), baseline=("mean", "others"),
            scale_by=("std", "batch", "none"), loss_type=("clip", "clip", "cispo"),
            importance=("token", "sequence"), truncated=("keep", "mask"), kl_in=("loss", "reward"),
            cliprange_high=(0.3, 0.04), batch_size=(6, 12),
            aggregation=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"))
    keys = {key: rng.choice(values) for key, values in keys.items()}
    if script == "grpo.py":  # what is refused
        if keys["loss_type"] == "cispo":
            keys["importance"] = "token"
        if keys["kl_in"] == "loss" and keys["kl_estimator"] == "k1":
            keys["kl_estimator"] = "k3"
    elif keys["reward_model"] == "other" or keys["mix"][0][1] == "letters":
        keys["value_init"] = "policy" if keys["value_init"] == "reward" else keys["value_init"]
    given = PPO if script == "ppo.py" else GRPO
    keys |= dict(max_iters=2, way="two" if seed else "alone")
    return script, given | {k: x for k, x in keys.items() if k in given or k == "ptx_coef"}

CASES |= {f"{script[:-3]}, drawn {i}": drawn(script, i) for script in ("ppo.py", "grpo.py") for i in range(2)}

# how a run is laid out: on how many ranks, and with which keys
LAYOUTS = {
    "alone": (1, {}),
    "two": (2, {}),
    "three": (3, dict(rollout_batch_size=3, head_chunk=4)),
    "tokens": (2, dict(micro_batch_tokens=30)),
    "stage 1": (2, dict(zero_stage="1")),
    "stage 2": (2, dict(zero_stage="2", gradient_checkpointing=True, micro_batch_size=64)),
    "stage 3": (2, dict(zero_stage="3", offload="policy=params", micro_batch_size=1)),
    "tuned, stage 3": (2, dict(zero_stage="3", offload="optimizer")),
    "generate": (2, dict(roles="train=1,generate=1")),
    "two scorers": (3, dict(roles="train=1,score=2")),
    "three roles": (3, dict(roles="train=1,generate=1,score=1")),
    "roles": (4, dict(roles="train=2,generate=1,score=1")),
}
# every id has its script's name: pytest -k grpo
IDS = [f"{name if script[:-3] in name else f'{script[:-3]}, {name}'}: {keys['way']}" for name, (script, keys) in CASES.items()]

# The tokens that by_hand.py leaves to a tool: the policy has read them, and not sampled them
GAPS = """
import torch
import rollout
whole = rollout.generate
def generate(*args, **kwargs):
    batch = whole(*args, **kwargs)
    mask = batch["response_mask"]
    t = torch.arange(mask.shape[1])
    mask &= (t == 0) | ((batch["tokens"][:, -len(t):] + t) % 3 > 0)
    batch["sampler_logprobs"] *= mask
    return batch
rollout.generate = generate
"""
FILES = {"ppo.py": dict(prompts_path="rl_train", eval_path="rl_val"),
         "sft.py": dict(train_path="sft_train", val_path="sft_val"),
         "rm.py": dict(train_path="pairs_train", val_path="pairs_val",
                       demonstrations_path="sft_val")}
FILES["grpo.py"] = FILES["ppo.py"]
FOLDERS = dict(policy_path="policy_model", reward_path="reward_model", init_from="init",
               ref_path="ref_model", teacher="teacher_model")
# said in other words there
NO_KEYS = ("way", "mix", "policy_model", "reward_model", "ref_model", "init", "new_head", "teacher_model",
           "files", "ptx", "ref_path", "gaps", "turns", "scale_scores", "recipe", "gone")


def command(world, script, keys):
    """The arguments of a case's run."""
    given = dict(out_dir="out", checkpoint_interval=0, device_type="cpu", dtype="float64", timeout=300)
    files = FILES[script] | keys.get("files", {})
    given |= {key: os.path.join(world.root, f"{file}.jsonl") if file else "" for key, file in files.items()}
    if "mix" in keys:
        where = {"distinct": "HOME/distinct.py:distinct"}  # of a recipe, in its folder
        where |= {name: f"{world.rules}:{name}" for name in ("letters", "sometimes", "some", "answer")}
        rewards = [f"{weight}*{where.get(name, name)}" for weight, name in keys["mix"]]
        given |= dict(reward_functions=",".join(rewards), reward_timeout=50)
        if "reward_model" not in [name for _, name in keys["mix"]]:
            keys = {key: value for key, value in keys.items() if key != "reward_model"}
    if keys.get("turns"):
        given["environment"] = f"{world.rules}:answered"
    if keys.get("ptx"):
        given["ptx_path"] = os.path.join(world.root, f"{keys['ptx']}.jsonl")
    given |= {key: value for key, value in keys.items() if key not in (*NO_KEYS, *keys.get("gone", ()))}
    given |= {key: getattr(world, keys[name]) for key, name in FOLDERS.items() if name in keys}
    return [f"--{key}={value}" for key, value in given.items()]


def worked_out(world, script, keys):
    """The same by hand."""
    c = SimpleNamespace(**PLAIN | keys)
    for key, name in FOLDERS.items():
        if name in keys:
            setattr(c, key, getattr(world, keys[name]))
    read = dict(other="other_tokenizer", uncentered="text")
    c.reward_tokenizer = read.get(keys.get("reward_model"), "tokenizer")
    files = FILES[script] | keys.get("files", {})
    train, val = list(files.values())[:2]
    data = SimpleNamespace(train=world.rows[train], val=world.rows[val],
                           ptx=world.rows.get(keys.get("ptx")),
                           demonstrations=world.rows.get(files.get("demonstrations_path")))
    return getattr(by_hand, script.removesuffix(".py"))(c, data)


def way_of(name):
    """(ranks, keys of the layout, whether the run is stopped and resumed)."""
    layout, stopped, _ = CASES[name][1]["way"].partition(", stopped")
    return *LAYOUTS[layout], bool(stopped)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """
    A function: name of a case -> its part of made(...). Those of a script, with roles or without,
    are made together, when one of them is first asked for; of them what this session will ask for.
    """
    folder = str(tmp_path_factory.mktemp("by_hand"))
    world = build(folder)
    asked = [item.callspec.params for item in request.session.items if item.path == request.path]
    asked = {value for params in asked for value in params.values()}

    def group_of(name):
        return CASES[name][0], "roles" in way_of(name)[1]

    @functools.cache
    def of_group(group):
        return made(folder, world, [name for name in CASES if {name, CASES[name][0]} & asked and group_of(name) == group])

    return lambda name: of_group(group_of(name))[name]


def made(folder, world, names):
    """{name: (out_dir of its run, what the run said, the run by hand)}."""
    in_rows, with_roles = {}, {}
    for name in names:
        script, keys = CASES[name]
        ranks, layout, stopped = way_of(name)
        arguments = command(world, script, keys | layout)
        run = one_run(script, *[(arguments, GAPS if keys.get("gaps") else "")] * ranks)
        if "roles" in layout:
            with_roles[name] = [one_run(script, *[(arguments, tiny.stops(1))] * ranks)] * stopped + [run]
        else:
            in_rows[name] = run
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(in_a_row, folder, in_rows)
        roles = pool.submit(forked, folder, with_roles, at_once=4)
        expected = {name: worked_out(world, *CASES[name]) for name in names}
    said = {name: "".join(each["kind"] + each["message"] for each in result) for name, result in rows.result().items()}
    for name, parts in roles.result().items():
        said[name] = "".join("".join(part["stderr"]) for part in parts if any(part["codes"]))
        if len(parts) > 1 and "stopped before the update" not in parts[0]["stdout"][0]:
            said[name] = f"not stopped: {parts[0]}"
    return {name: (os.path.join(folder, name, "out"), said[name], expected[name]) for name in names}


@pytest.mark.parametrize("name", CASES, ids=IDS)
def test_a_run_agrees_with_one_by_hand(runs, name):
    out, said, expected = runs(name)
    assert said == ""
    assert not differences(out, expected)


def differences(out, expected):
    """In what the run in out_dir differs from the one by hand: lines of text."""
    records, wrong = tiny.read_log(out), []
    if [record["iteration"] for record in records] != list(range(len(expected.log))):
        return [f"{len(records)} records, by hand {len(expected.log)}"]
    for i, (record, figures) in enumerate(zip(records, expected.log, strict=True)):
        for key, x in figures.items():
            if not abs(record.get(key, math.inf) - x) <= TOLERANCE * max(1, abs(x)):
                wrong.append(f"{key} of iteration {i} is {record.get(key)}, by hand {x}")
    for model_name, model in expected.models.items():
        folder = os.path.join(out, model_name)
        scalar = isinstance(model, SimpleNamespace)
        left = by_hand.scalar_model(folder) if scalar else by_hand.language_model(folder)
        if scalar and not abs(left.shift - model.shift) <= TOLERANCE:
            wrong.append(f"the shift of {model_name} is {left.shift}, by hand {model.shift}")
        if not scalar and left.generation_config.eos_token_id != sorted(ENDS):
            wrong.append(f"{model_name} ends with {left.generation_config.eos_token_id}, by hand {sorted(ENDS)}")
        parameters = model if isinstance(model, dict) else by_hand.parameters_of(model)
        found = by_hand.parameters_of(left)
        assert parameters.keys() == found.keys()
        far = {key: (p - parameters[key]).abs().max().item() for key, p in found.items()}
        worst = max(far, key=far.get)
        if not far[worst] <= TOLERANCE:
            wrong.append(f"weights of {model_name} differ, {worst} by {far[worst]:.2g}")
    return wrong


BRANCHES = {
    "ppo.py": ["below", "above", "value clipped", "no end", "centered, some end", "centered, none end",
               "best first", "best not raw", "gap", "gap at the end", "no score",
               "long gradient", "short gradient", "capped", "counts less"],
    "grpo.py": ["below", "above", "weight below", "weight above",
                "no end", "centered, some end", "best later", "best by a little", "best below 0", "best not raw",
                "gap", "gap at the end", "no score", "other answers",
                "flat by a rule",
                "refill 0 behind a full slot", "refill 1 behind a full slot",
                "flat minibatch", "masked response", "masked minibatch", "left out",
                "all end early", "capped", "counts less", "long gradient", "short gradient"],
    "sft.py": ["long gradient", "short gradient"],
    "rm.py": ["long gradient", "short gradient", "margin", "no margin", "confidence", "no confidence", "full bin", "empty bin",
              "teacher, tokenizer", "teacher, other_tokenizer", "agrees", "disagrees", "tie"],
}


@pytest.mark.parametrize("script", BRANCHES)
def test_these_runs_take_every_branch(runs, script):
    seen = sum((runs(name)[2].seen for name in CASES if CASES[name][0] == script), Counter())
    assert not [branch for branch in BRANCHES[script] if not seen[branch]], seen
