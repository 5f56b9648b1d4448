"""Tensor-parallel generation: several ranks decode together, and a run is what it is without; on 2 and 4 ranks, also sharded."""
import pytest

import parallel
import tiny
from engine.tensor_parallel import check_split
from errors import BadConfig

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32)
RUNS = {  # run: of which it must be the same, ranks, keys
    "neox": (None, 1, dict(dtype="float64")),
    "neox, tp, stage 3": ("neox", 4, dict(dtype="float64", generate_tp=2, zero_stage="3", rollout_batch_size=3)),
    "llama, lora": (None, 1, dict(lora="4")),
    "llama, lora, tp": ("llama, lora", 2, dict(generate_tp=2, lora="4", zero_stage="3")),
    "llama, bf16, tp": (None, 2, dict(generate_tp=2, dtype="bfloat16")),
    "gpt2, tp": (None, 2, dict(generate_tp=2)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    from engine.checkpoint import save_model
    from engine.tokenizers import load_tokenizer
    from model import from_scratch

    folder = str(tmp_path_factory.mktemp("split"))
    world = tiny.build(f"{folder}/world")
    tokenizer = load_tokenizer(world.tokenizer)
    ids = dict(vocab_size=264, bos_token_id=None, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
               initializer_range=0.2)
    for name, kind, more in (("neox", "gpt_neox", {}), ("llama", "llama", dict(num_key_value_heads=2))):
        save_model(f"{folder}/world/{name}", from_scratch(dict(model_type=kind, **SIZES, **ids, **more), seed=1), tokenizer)
    jobs = {}
    for name, (_, ranks, keys) in RUNS.items():
        policy = world.policy if name.startswith("gpt2") else f"{folder}/world/{name.partition(',')[0]}"
        keys = dict(policy_path=policy, reward_functions=world.rule("letters"), num_minibatches=1, max_iters=2) | keys
        jobs[name] = tiny.one_run("grpo.py", *[world.grpo("out", **keys)] * ranks)
    return folder, tiny.in_a_row(folder, jobs)


@pytest.mark.parametrize("name", [name for name, (of, *_) in RUNS.items() if of])
def test_a_split_policy_samples_what_the_whole_one_samples_after_each_update(runs, name):
    folder, results = runs
    of = RUNS[name][0]
    assert {each["kind"] for each in results[name]} == {""}, results[name]
    records, wanted = ([tiny.measured(r) for r in tiny.read_log(f"{folder}/{run}/out")] for run in (name, of))
    exact = of == "neox"
    assert [r.get("objective/texts") for r in records] == [r.get("objective/texts") for r in wanted]
    assert all(r["policy/sampler_gap"] <= (1e-10 if exact else 1e-4) for r in records[:-1])
    assert tiny.distance(f"{folder}/{of}/out/policy", f"{folder}/{name}/out/policy") < (1e-9 if exact else 1e-4)


def test_in_16_bits_it_runs_and_says_its_gap(runs):
    folder, results = runs
    assert {each["kind"] for each in results["llama, bf16, tp"]} == {""}, results["llama, bf16, tp"]
    assert tiny.read_log(f"{folder}/llama, bf16, tp/out")[0]["policy/sampler_gap"] < 0.05


def test_what_cannot_be_split_is_refused_in_a_line(runs, monkeypatch):
    """transformers has no plan for GPT-2."""
    each = runs[1]["gpt2, tp"]
    assert {outcome["kind"] for outcome in each} == {"BadConfig"} and "generate_tp" in each[0]["message"], each
    monkeypatch.setattr(parallel, "rank_and_size", lambda: (0, 3))
    for n, roles in ((2, ""), (3, "train=2,generate=1")):
        with pytest.raises(BadConfig, match="generate_tp"):
            check_split(n, roles)
