"""
Where models lie (models.py, options/shards.py): 16 bits, what stops runs with sharded models, the scale of float16, and
the keys. (That shards, ranks, adapters and offload change nothing in float64, test_knobs.py shows; and shards.here
needs a second device: tests/test_gpu.py has it.)
"""
import re

import pytest
import torch
from safetensors.torch import load_file

import checks
import models
import optimizers
import parallel
from errors import BadConfig, Stop
from options import shards
from tools.policies import plain
from trunk import OnTrunk

import tiny
from tiny import in_a_row, one_run


def ppo(world, code="", **keys):
    """A run of ppo.py on two ranks, small: minibatches of 3 and 2 rows. code: put in before it, on rank 1."""
    arguments = world.ppo("out", **dict(batch_size=5, ppo_epochs=1) | keys)
    return one_run("ppo.py", arguments, (arguments, code))


# ---------------------------------------------------------------------------------------------------------------------
# 16 bits: the reference is the policy, to the bit, until the first step

WATCH = """
import json, parallel
broadcast = parallel.broadcast_parameters
def watched(models):
    models = list(models)
    broadcast(models)
    with open("dtypes.json", "w") as f:
        json.dump([{name: str(p.dtype) for name, p in model.named_parameters()} for model in models], f)
parallel.broadcast_parameters = watched
"""
SHORT = {
    "bfloat16, sharded": dict(dtype="bfloat16", zero_stage="3", head_chunk=5),
    "pure, sharded": dict(dtype="bfloat16", master_weights=False, zero_stage="3"),
    "float16, lora": dict(dtype="float16", lora="4", zero_stage="3", gradient_checkpointing=True),
}


@pytest.fixture(scope="module")
def short(world, tmp_path_factory):
    cases = {name: ppo(world, WATCH, max_iters=1, num_minibatches=1, **keys) for name, keys in SHORT.items()}
    return in_a_row(tmp_path_factory.mktemp("short"), cases).succeeded()


@pytest.mark.parametrize("name", SHORT)
def test_in_16_bits_the_reference_is_the_policy_at_first(short, name):
    first, last = short.log(name)
    assert first["objective/kl"] == 0 == first["eval/kl"] and first["policy/ratio_gap"] == 0
    assert last["eval/kl"] != 0
    if "lora" not in SHORT[name]:
        wide = "torch.bfloat16" if "pure" in name else "torch.float32"
        policy, *frozen, _ = tiny.read_json(f"{short.folder}/{name}/dtypes.json")  # the reference, and the reward model
        assert set(policy.values()) == {wide} and len(frozen) == 2
        for model in frozen:  # matrices; but not the table of embeddings, whose rows autocast does not round, nor a scalar head
            assert model == {name: "torch.bfloat16" if re.search(r"\.c_\w+\.weight|lm_head", name) else wide for name in model}


SAME = {  # policy: the stages at which it samples the same texts in 16 bits
    "qwen": "0123", "mixtral": "03", "gpt_oss": "03", "ernie4_5_moe": "03"}
EXPERTS = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
               intermediate_size=48, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2, moe_num_experts=4,
               moe_k=2, moe_layer_start_index=1, moe_intermediate_size=16)


@pytest.fixture(scope="module")
def staged(world, tmp_path_factory):
    """Runs on two ranks in bfloat16: {(policy, stage): the log}. Among the policies are mixtures with odd parameters."""
    jobs = {}
    tiny.add_qwen(world)
    for name in list(SAME)[1:]:
        tiny.add_policy(world, name, name, noise=0.15, **EXPERTS)  # also of biases and sinks
    for name, stages in SAME.items():
        for stage in stages:
            keys = dict(policy_path=f"{world.root}/{name}", reward_functions="length", eval_path="", batch_size=6,
                        max_iters=1, num_minibatches=1, num_iterations=1, dtype="bfloat16", zero_stage=stage)
            jobs[name, stage] = one_run("grpo.py", *[world.grpo("out", **keys)] * 2)
    runs = in_a_row(tmp_path_factory.mktemp("staged"), {" ".join(name): job for name, job in jobs.items()}).succeeded()
    return {name: runs.log(" ".join(name))[0] for name in jobs}


@pytest.mark.parametrize("name", SAME)
def test_in_16_bits_all_stages_sample_the_same_texts(staged, name):
    """The copy that samples is rounded where autocast rounds, and the gathered layers, too: so is the reference."""
    records = [record for (of, _), record in staged.items() if of == name]
    assert len({record["objective/texts"] for record in records}) == 1
    for record in records:
        assert record["objective/kl"] == 0 and record["policy/sampler_gap"] < 1e-5, record


# ---------------------------------------------------------------------------------------------------------------------
# what no text reaches stays as it is

SEEING = {  # name: ranks, keys
    "adamw": (1, {}), "adafactor, stage 1": (2, dict(optim="adafactor", zero_stage="1")),
    "16 bits, stage 3": (2, dict(dtype="bfloat16", zero_stage="3")), "16 bits, lora": (1, dict(dtype="bfloat16", lora="2"))}


PROCESSOR = {"processor_config.json": '{"processor_class": "Gemma3Processor"}',
             "preprocessor_config.json": '{"image_processor_type": "Gemma3ImageProcessor",\n "size": 28}\n'}


def add_vision(world):
    """world.seeing: a policy as Gemma 3 4B is, with a vision part that no text reaches, and files of its processor."""
    text = dict(model_type="gemma3_text", vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, intermediate_size=48, max_position_embeddings=64, sliding_window=8,
                eos_token_id=258, pad_token_id=259, bos_token_id=None)
    vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                  num_attention_heads=2, image_size=28, patch_size=14)
    # without noise the norms' scales and the biases would be 0, which no decay moves
    tiny.add_policy(world, "seeing", "gemma3", noise=0.1, text_config=text, vision_config=vision, mm_tokens_per_image=4,
                    image_token_index=260, boi_token_index=261, eoi_token_index=262, initializer_range=0.2)
    for name, content in PROCESSOR.items():
        with open(f"{world.root}/seeing/{name}", "w", encoding="utf-8") as f:
            f.write(content)


@pytest.fixture(scope="module")
def seeing(world, tmp_path_factory):
    add_vision(world)
    keys = dict(policy_path=f"{world.root}/seeing", reward_functions="length", eval_path="", batch_size=6, max_iters=2,
                num_minibatches=1, num_iterations=1, weight_decay=0.3, ema_decay=0.5, sync_check_interval=1)
    return in_a_row(tmp_path_factory.mktemp("seeing"), {
        name: one_run("grpo.py", *[world.grpo("out", **keys | more)] * ranks)
        for name, (ranks, more) in SEEING.items()}).succeeded()


@pytest.mark.parametrize("name", SEEING)
def test_a_vision_part_stays_bit_for_bit_and_its_processor_is_saved(seeing, world, name):
    before, out = tiny.read_weights(f"{world.root}/seeing"), seeing.out(name)
    vision = {n for n in before if "vision_tower" in n or "projector" in n}
    for product in ("policy", "ema_policy"):
        after = tiny.read_weights(f"{out}/{product}")
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert len(vision) == 50 and before.keys() == after.keys() and not moved & vision
        assert moved == before.keys() - vision or "lora" in name and len(moved) >= 14
        for file, content in PROCESSOR.items():
            assert tiny.read_text(f"{out}/{product}/{file}") == content
    if "lora" in name:
        adapters = load_file(f"{out}/policy_adapter/adapter_model.safetensors")
        assert len(adapters) == 2 * 14 and not any("vision" in n for n in adapters)


# ---------------------------------------------------------------------------------------------------------------------
# float16's scale of the loss: what one rank has stops all, of a sharded model too

SKIPS = {  # name -> (the step, counted from 1, in which rank 1 overflows, keys)
    "the only step, of a shard": (1, dict(max_iters=1, num_minibatches=1, zero_stage="3")),
    "one of many": (4, dict(zero_stage="policy=3,value=1", batch_size=7))}


@pytest.fixture(scope="module")
def stopped(world, tmp_path_factory):
    audited = dict(sync_check_interval=1, timeout=20, batch_size=4)
    return in_a_row(tmp_path_factory.mktemp("stopped"), {
        name: ppo(world, code=tiny.overflow(f"steps == {step}"), dtype="float16", **audited | keys)
        for name, (step, keys) in SKIPS.items()}).succeeded()  # the audit says that the ranks' weights are finite and the same


def test_twenty_overflows_are_skipped_and_one_more_stops():
    state = dict(loss_scale=2.0**16, clean_steps=5, skipped=0)
    good, bad = torch.tensor(1.0), torch.tensor(torch.inf)
    assert not optimizers.overflowed(state, (good, good), 0) and state == dict(loss_scale=2.0**16, clean_steps=6, skipped=0)
    for i in range(20):
        assert optimizers.overflowed(state, (good, bad if i % 2 else bad * 0), 3)
    assert state["loss_scale"] == 1.0 and state["skipped"] == 20  # 2**16 has been halved to 1, and stays there
    with pytest.raises(Stop):
        optimizers.overflowed(state, (bad, good), 3)
    assert not optimizers.overflowed(state, (good,), 0) and state["skipped"] == 0
    state["clean_steps"] = 199  # after 200 good ones, it is doubled
    assert not optimizers.overflowed(state, (good,), 0) and state == dict(loss_scale=2.0, clean_steps=0, skipped=0)


@pytest.mark.parametrize("name", SKIPS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stopped, world, name):
    step, keys = SKIPS[name]
    out, records = stopped.out(name), stopped.log(name)[:-1]
    state = tiny.read_json(f"{out}/checkpoint-{len(records):06d}/state.json")
    total = keys.get("num_minibatches", 2) * len(records)
    assert state["loss_scale"] == 2.0**15 and state["clean_steps"] == total - step and state["skipped"] == 0 ** (total - step)
    assert sum(r["policy/steps"] for r in records) == total - 1, "policy/steps counts steps that were taken"
    moved = tiny.distance(world.policy, f"{out}/policy")
    assert moved == 0 if step == total else moved > 1e-4  # all that there was to step was skipped, or not
    assert not re.search("Infinity|NaN", tiny.read_text(f"{out}/log.jsonl")), "log.jsonl is JSON, which has no such numbers"


# ---------------------------------------------------------------------------------------------------------------------
# an optimizer without a run


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_adafactors_learning_rate_is_not_relative_to_the_weights(size):
    """
    Adafactor, 1804.04235, algorithms 4 and 5 without the relative step of section 8, in a loop:
    whatever the weights' size, a step's is the learning rate's. Decay is AdamW's, of the matrix alone.
    """
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, size, generator=generator)
    optimizer = optimizers.make_optimizer(model, "policy", plain(optim="adafactor", weight_decay=0.1), 0.01,
                                          (0.5, 0.9), 1e-5)
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows, columns, vector = (torch.zeros(n, dtype=torch.float64) for n in (3, 4, 3))
    for t, lr in enumerate((0.01, 0.02, 0.005, 0.0), 1):
        decay = 1 - t**-0.8
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10.0 ** -t
            square = p.grad**2
            if name == "weight":
                rows = decay * rows + (1 - decay) * square.mean(1)
                columns = decay * columns + (1 - decay) * square.mean(0)
                variance = torch.outer(rows, columns) / rows.mean()
            else:
                variance = vector = decay * vector + (1 - decay) * square
            update = p.grad / variance.sqrt()
            update /= max(1.0, update.square().mean().sqrt().item())
            want[name] = want[name] * (1 - 0.1 * lr * (name == "weight")) - lr * update
        optimizers.step(optimizer, lr)
        for name, p in model.named_parameters():
            assert torch.allclose(p, want[name], rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------------------------------------------------------------
# the keys

TRAINED, FROZEN = ("policy", "value"), ("ref", "reward", "judge")
PLACES = [  # zero_stage, offload -> {model: (stage, what is on the CPU)} where that is not (0, none)
    (("", ""), {}),
    (("policy=3", ""), dict(policy=(3, "none"), ref=(3, "none"))),  # the reference follows
    (("policy=3,ref=0", ""), dict(policy=(3, "none"))), (("ref=3", ""), dict(ref=(3, "none"))),
    ((" 1 , value = 2 ", ""), dict.fromkeys(TRAINED + FROZEN, (1, "none")) | dict(value=(2, "none"))),
    (("", "policy=optimizer,reward=params"), dict(policy=(0, "optimizer"), reward=(0, "params"))),
    (("", "optimizer"), dict.fromkeys(TRAINED, (0, "optimizer"))),
]


@pytest.mark.parametrize("keys, places", PLACES, ids=str)
def test_places_by_hand(keys, places):
    system = plain(zero_stage=keys[0], offload=keys[1])
    for name in TRAINED + FROZEN:
        stage, offload = shards.stage_of(system, name), shards.offload_of(system, name, name in TRAINED)
        assert (stage, offload) == places.get(name, (0, "none")), name


def test_a_head_on_the_policy_is_not_offloaded(world):
    """value_init="shared" with offload="optimizer": what is offloaded is the policy's alone."""
    system = plain(offload="optimizer", optim="adamw", weight_decay=0.0)
    policy = models.load(world.policy, "policy", system, torch.device("cpu"), trained=True)
    made = [optimizers.make_optimizer(model, name, system, 1e-3, (0.9, 0.999), 1e-8)
            for model, name in ((policy, "policy"), (OnTrunk(policy), "value"))]
    assert [type(optimizer) for optimizer in made] == [shards.OffloadedAdamW, torch.optim.AdamW]


@pytest.mark.parametrize("lora, trained", [("", False), ("value=4", False), ("policy=4", True)])
def test_a_generator_trains_nothing_but_has_the_adapter(world, monkeypatch, lora, trained):
    """Its policy is a frozen copy, whatever the value model has; with an adapter on the policy it is an adapted one."""
    monkeypatch.setattr(parallel, "role", "generate")
    monkeypatch.setattr(parallel, "roles", dict(train=range(1), generate=range(1, 2)))
    chats = dict.fromkeys(("chat_template", "template_kwargs", "system_prompt", "stop_strings"), "")
    policy, _ = models.load_policy(world.policy, plain(lora=lora, **chats), torch.device("cpu"))
    assert any(p.requires_grad for p in policy.parameters()) == bool(policy.adapters) == trained


def check(zero_stage="", offload="", lora="", optim="adamw", share_base=False, value_init="reward", ref_path=""):
    """What a start says of these keys."""
    system = plain(zero_stage=zero_stage, offload=offload, lora=lora, optim=optim, share_base=share_base,
                   ref_path=ref_path, report_to="")
    checks.check_system(system, torch.device("cpu"), TRAINED, FROZEN, value_init)


def test_a_reference_of_its_own_can_be_moved_beside_lora():
    check(offload="ref=params", lora="4", ref_path="another")


CONFLICTS = [  # as above -> the key that is named; the last six of them parse
    (("4", "", "", "adamw"), "zero_stage"), (("critic=3", "", "", "adamw"), "zero_stage"),
    (("", "params=policy", "", "adamw"), "offload"), (("", "", "4:0", "adamw"), "lora"),
    (("", "ref=optimizer", "", "adamw"), "offload"), (("policy=2", "", "", "adafactor"), "optim"),
    (("3", "value=params", "value=4", "adamw"), "offload"), (("", "", "value=4", "adamw", False, "shared"), "value_init"),
    (("", "", "", "adamw", True, "policy"), "share_base"), (("", "ref=params", "4", "adamw"), "offload")]


@pytest.mark.parametrize("keys, named", CONFLICTS, ids=str)
def test_what_cannot_be_is_one_line(keys, named):
    with pytest.raises(BadConfig) as e:
        check(*keys)
    message = str(e.value)
    assert message.startswith(named) and len(message) < 300 and "\n" not in message, message
