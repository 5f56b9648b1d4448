"""
Every family that transformers has is one of quartet's, if it passes the probe. Here tiny random models of many families go
through sft.py, ppo.py and grpo.py as a user runs them, two iterations each, and the table of docs/scale.md says what came of it.

    python tests/test_families.py      # prints the table
"""
import os
import sys
import tempfile

import pytest
import torch

import tiny
from tiny import in_a_row, one_run

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
             max_position_embeddings=48)
EXPERTS = SIZES | dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=48)
DEEPSEEK = EXPERTS | dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4,
                          v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
YARN = dict(rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16))
DYNAMIC = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))
LONGROPE = dict(original_max_position_embeddings=40, rope_parameters=dict(
    rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.5, 4.0, 9.0, 16.0]))
FAMILIES = {  # name in the table: model_type, sizes
    "GPT-2": ("gpt2", GPT), "Pythia (GPT-NeoX)": ("gpt_neox", SIZES), "Llama": ("llama", SIZES),
    "Llama with yarn": ("llama", SIZES | YARN), "Llama with dynamic rope": ("llama", SIZES | DYNAMIC),
    "Mistral": ("mistral", SIZES | dict(sliding_window=8)), "Qwen2": ("qwen2", SIZES), "Qwen3": ("qwen3", SIZES),
    "Gemma": ("gemma", SIZES | dict(head_dim=8)), "Gemma 2": ("gemma2", SIZES | dict(head_dim=8, sliding_window=8)),
    "Gemma 3 (text)": ("gemma3_text", SIZES | dict(head_dim=8, sliding_window=8)), "Phi": ("phi", SIZES),
    "Phi-3": ("phi3", SIZES), "Phi-3 with longrope": ("phi3", SIZES | LONGROPE),
    "SmolLM3": ("smollm3", SIZES), "OLMo 2": ("olmo2", SIZES), "StarCoder2": ("starcoder2", SIZES),
    "GLM-4": ("glm4", SIZES | dict(head_dim=8)), "OPT": ("opt", SIZES | dict(ffn_dim=64, word_embed_proj_dim=32)),
    "Mixtral": ("mixtral", EXPERTS), "Qwen3 MoE": ("qwen3_moe", EXPERTS), "DeepSeek-V3": ("deepseek_v3", DEEPSEEK),
    "gpt-oss": ("gpt_oss", EXPERTS | dict(head_dim=8, sliding_window=8)),
    "Cohere": ("cohere", SIZES), "Granite": ("granite", SIZES), "OLMoE": ("olmoe", EXPERTS),
    "Mamba": ("mamba", SIZES), "Jamba": ("jamba", EXPERTS), "Qwen3-Next": ("qwen3_next", EXPERTS),
    "Falcon-H1": ("falcon_h1", SIZES), "RWKV": ("rwkv", SIZES | dict(attention_hidden_size=32)),
}


# in each run of the suite, and all others with pytest -m campaign
OFTEN = ("Llama with yarn", "Qwen3", "Gemma 3 (text)", "OPT", "Mixtral", "Cohere", "Mamba")


def make(world, name):
    """Save a random policy of a family in world.root/name."""
    kind, sizes = FAMILIES[name]
    tiny.add_policy(world, name, kind, seed=3, initializer_range=0.1, **sizes)


def jobs(world, name):
    policy = f"{world.root}/{name}"
    keys = dict(policy_path=policy, max_iters=2, eval_path="", prompts_path=world.rl_train, batch_size=6, max_new_tokens=6,
                num_minibatches=1, reward_functions=world.rule("letters"), micro_batch_size=4)
    return {
        f"{name}, sft": one_run("sft.py", world.sft("out", init_from=policy, max_iters=2, batch_size=4)),
        f"{name}, ppo": one_run("ppo.py", world.ppo("out", **keys | dict(value_init="policy"))),
        f"{name}, grpo": one_run("grpo.py", world.grpo("out", **keys | dict(group_size=3)))}


def run_some(folder, names):
    """The runs of these families, in a folder."""
    world = tiny.build(os.path.join(folder, "world"))
    for name in names:
        make(world, name)
    return in_a_row(folder, {k: v for name in names for k, v in jobs(world, name).items()})


def verdict(runs, name, script):
    """"yes", or why not, in the words of the table."""
    outcome, = runs[f"{name}, {script}"]
    if outcome["kind"] == "":
        return "yes"
    assert outcome["kind"] == "BadInput", outcome
    return {"cannot decode": "no: cannot be decoded", "no sequence classifier": "no: has no reward models"}[next(
        words for words in ("cannot decode", "no sequence classifier") if words in outcome["message"])]


def verdicts(runs, name):
    return " | ".join(verdict(runs, name, script) for script in ("sft", "ppo", "grpo"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function: name of a family -> the runs of some families, this one among them, made when first asked."""
    groups, done = [OFTEN[:4], OFTEN[4:]], {}
    groups += [(name,) for name in FAMILIES if name not in OFTEN]

    def of(name):
        group = next(group for group in groups if name in group)
        if group not in done:
            done[group] = run_some(str(tmp_path_factory.mktemp("families")), group)
        return done[group]

    return of


@pytest.mark.parametrize("name", [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.campaign) for name in FAMILIES])
def test_a_family_does_what_the_docs_say_and_transformers_loads_what_is_saved(runs, name):
    from transformers import AutoModelForCausalLM

    from load import load_model

    runs = runs(name)
    page = tiny.read_text(os.path.join(tiny.ROOT, "docs", "scale.md"))
    rows = [line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| ")]
    assert [said for names, said in rows if name in names.split(", ")] == [verdicts(runs, name)]
    for script in ("ppo", "grpo"):
        if verdict(runs, name, script) != "yes":
            continue
        out, first = runs.out(f"{name}, {script}"), runs.log(f"{name}, {script}")[0]
        assert first["policy/ratio_gap"] == 0 == first["objective/kl"], first
        assert first["policy/sampler_gap"] < 1e-4
        theirs = AutoModelForCausalLM.from_pretrained(f"{out}/policy", dtype=torch.float32).eval()
        ours, tokens = load_model(f"{out}/policy"), torch.tensor([[3, 50, 60, 70, 80]])
        with torch.no_grad():
            states = ours.states(tokens)
            torch.testing.assert_close(ours.logits(states), theirs(tokens).logits, rtol=0, atol=1e-5)
        before = AutoModelForCausalLM.from_pretrained(f"{runs.folder}/world/{name}", dtype=torch.float32)
        assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), theirs.parameters(), strict=True))


if __name__ == "__main__":
    sys.path.insert(0, tiny.ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        print("| families | sft.py | ppo.py | grpo.py |\n|---|---|---|---|")
        outcomes, alike = run_some(temporary, FAMILIES), {}
        for family in FAMILIES:
            alike.setdefault(verdicts(outcomes, family), []).append(family)
        for said, families in alike.items():
            print(f"| {', '.join(families)} | {said} |")
