"""Tensor-parallel generation: several ranks decode together, and a run is what it is without."""
from types import SimpleNamespace

import pytest
import transformers

import parallel
import tiny
from options.roles import check_ahead
from options.tensor_parallel import check_split
from errors import BadConfig

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32)
RUNS = {  # run: ranks, keys; the first two must be the same
    "neox": (1, dict(dtype="float64")),
    "neox, tp, stage 3": (4, dict(dtype="float64", generate_tp=2, zero_stage="3", rollout_batch_size=3)),
    "llama, lora, tp": (2, dict(generate_tp=2, lora="4", zero_stage="3")),
    "qwen3": (1, {}), "qwen3, tp": (2, dict(generate_tp=2)),  # tied, as the llama is
}


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    tied = dict(num_key_value_heads=2, tie_word_embeddings=True)
    for name, kind, more in (("neox", "gpt_neox", {}), ("llama", "llama", tied), ("qwen3", "qwen3", tied)):
        tiny.add_policy(world, name, kind, initializer_range=0.2, **SIZES, **more)
    jobs = {}
    for name, (ranks, keys) in RUNS.items():
        keys = dict(policy_path=f"{world.root}/{name.partition(',')[0]}", reward_functions=world.rule("letters"),
                    batch_size=9, eval_path="", num_minibatches=1, max_iters=2) | keys
        jobs[name] = tiny.one_run("grpo.py", *[world.grpo("out", **keys)] * ranks)
    return tiny.in_a_row(tmp_path_factory.mktemp("split"), jobs).succeeded()


@pytest.mark.skipif(not hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans"), reason="transformers before 5.23")
def test_a_split_policy_samples_what_the_whole_one_samples_after_each_update(runs):
    whole, split, lora, *tied = map(runs.log, RUNS)
    assert [r.get("objective/texts") for r in split] == [r.get("objective/texts") for r in whole]
    assert all(r["policy/sampler_gap"] <= 1e-10 for r in split[:-1])
    assert tiny.distance(f"{runs.out('neox')}/policy", f"{runs.out('neox, tp, stage 3')}/policy") < 1e-9
    assert [r.get("objective/texts") for r in tied[0]] == [r.get("objective/texts") for r in tied[1]]
    assert tiny.distance(f"{runs.out('qwen3')}/policy", f"{runs.out('qwen3, tp')}/policy") < 1e-4
    # with adapters, the training forward says the same of the tokens; and they were moved
    assert all(r["policy/sampler_gap"] <= 1e-4 for r in lora[:-1] + tied[1][:-1]) and lora[1]["objective/kl"] != 0


def test_what_cannot_be_split_is_refused_in_a_line(monkeypatch):
    """Of GPT-2, for which transformers has no plan, see test_bad_input.py."""
    monkeypatch.setattr(parallel, "rank_and_size", lambda: (0, 3))
    with pytest.raises(BadConfig, match="generate_tp"):
        check_split(2)
    with pytest.raises(BadConfig, match="generate_tp"):
        check_ahead(SimpleNamespace(roles="train=2,generate=1", generate_tp=3, staleness=0))
