"""
Some thirty families of transformers, tiny and random, against transformers: what is read, trained,
scored, saved; the scripts as a user runs them; models that are split, or in 16 bits; the probe.

    python tests/long/test_families.py      # prints the table of docs/scale.md
"""
import json
import os
import re
import runpy
import sys
import tempfile
from types import SimpleNamespace

if __name__ == "__main__":
    sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    import conftest  # noqa: F401  the path, and one thread

import pytest
import torch
import transformers

import tiny
from byte_tokenizer import write_byte_tokenizer
from checkpoint import save_final
from errors import BadInput
from load import autocast, load, probe, unread_parameters
from model import Model
from prompts import right_pad
from rollout import decoding_copy, generate
from test_model import CPU, TEXTS, alone
from tiny import EOS, PAD, ROOT, Started, keys_of_system, read_log, read_weights, typed

BASE = dict(vocab_size=264, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
SIZES = BASE | dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64)
GPT = BASE | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
HEADS = SIZES | dict(head_dim=10)
EXPERTS = SIZES | dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2,
                       moe_intermediate_size=16)
ERNIE = SIZES | dict(moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_intermediate_size=16)
DEEPSEEK = EXPERTS | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4,
    v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1,
    n_shared_experts=1)


def rope(kind, **settings):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=500.0, **settings))


LONGROPE = rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.5, 4.0, 9.0, 16.0])
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
FAMILIES = {  # name in the table: model_type, settings that change what is computed
    "GPT-2": ("gpt2", GPT | dict(tie_word_embeddings=False, n_inner=40)),
    "Pythia (GPT-NeoX)": ("gpt_neox", SIZES),
    "Llama": ("llama", SIZES | LLAMA3 | dict(tie_word_embeddings=True)),
    "Llama with yarn": ("llama", SIZES | rope("yarn", factor=4.0,
                                              original_max_position_embeddings=16)),
    "Llama with dynamic rope": ("llama", SIZES | rope("dynamic", factor=2.0)),
    "Mistral": ("mistral", SIZES | dict(num_key_value_heads=1, sliding_window=5)),
    "Qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True, use_sliding_window=True,
                                    sliding_window=4, max_window_layers=1)),
    "Qwen3": ("qwen3", HEADS), "Gemma": ("gemma", HEADS),
    "Gemma 2": ("gemma2", HEADS | dict(sliding_window=5, final_logit_softcapping=3.0)),
    "Gemma 3 (text)": ("gemma3_text", HEADS | dict(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"])),
    "Phi": ("phi", SIZES), "Phi-3": ("phi3", SIZES),
    "Phi-3 with longrope": ("phi3", SIZES | dict(original_max_position_embeddings=40) | LONGROPE),
    "SmolLM3": ("smollm3", SIZES), "OLMo 2": ("olmo2", SIZES | dict(attention_bias=True)),
    "StarCoder2": ("starcoder2", SIZES), "GLM-4": ("glm4", SIZES | dict(head_dim=8)),
    "OPT": ("opt", SIZES | dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.4)),
    "Falcon": ("falcon", SIZES | dict(hidden_dropout=0.4, attention_dropout=0.4,
                                      new_decoder_architecture=False, parallel_attn=False)),
    "Mixtral": ("mixtral", EXPERTS), "Qwen3 MoE": ("qwen3_moe", EXPERTS),
    "DeepSeek-V3": ("deepseek_v3", DEEPSEEK),
    "gpt-oss": ("gpt_oss", EXPERTS | dict(head_dim=8, sliding_window=8)),
    "Cohere": ("cohere", SIZES | dict(logit_scale=0.3)),
    "Granite": ("granite", SIZES | dict(logits_scaling=3.0, embedding_multiplier=2.0)),
    "OLMoE": ("olmoe", EXPERTS),
    "Mamba": ("mamba", SIZES), "Jamba": ("jamba", EXPERTS), "Qwen3-Next": ("qwen3_next", EXPERTS),
    "Falcon-H1": ("falcon_h1", SIZES),
    "RWKV": ("rwkv", SIZES | dict(attention_hidden_size=32)),
}
NO_CACHE = ["Mamba", "Jamba", "Qwen3-Next", "Falcon-H1", "RWKV"]
NO_SCORES = ["Cohere", "Granite", "OLMoE"]  # transformers has no such class
READ = [name for name in FAMILIES if name not in NO_CACHE]
RUN = ["Llama with yarn", "Gemma 2", "OPT", "Mixtral", "Cohere", "Mamba"]  # by all three scripts


def random_model(kind, settings, scalar=False, noise=0.15):
    """A model of transformers with large weights, also of norms and biases, so all are visible."""
    config, auto = transformers.AutoConfig.for_model(kind, **settings), transformers
    auto = auto.AutoModelForSequenceClassification if scalar else auto.AutoModelForCausalLM
    if scalar:
        config.num_labels = 1
    torch.manual_seed(0)
    model, drawn = auto.from_config(config).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty(p.shape).normal_(0, noise, generator=drawn))
    return model


def save(folder, name, scalar=False):
    """The random model of a family, saved with its tokenizer; and transformers' model."""
    theirs = random_model(*FAMILIES.get(name, (name, None)), scalar)
    theirs.save_pretrained(folder)
    write_byte_tokenizer(folder, tiny.MARKERS)
    return theirs


def rows_of_texts():
    """TEXTS as tokens (4, 12), and where each token but the first of a row is (4, 12)."""
    tokens, mask = right_pad(TEXTS, PAD)
    mask[:, 0] = False
    return tokens, mask


def assert_same_gradients(model, theirs, limit=3e-4):
    for name, p in theirs.named_parameters():
        mine = model.hf.get_parameter(name)
        if p.grad is None or not mine.requires_grad:  # that of a choice of experts, for example
            assert not mine.requires_grad and (p.grad is None or not p.grad.any()), name
        else:
            assert (mine.grad - p.grad).abs().max() < limit * max(1, p.grad.abs().max()), name


@pytest.mark.parametrize("name", READ)
def test_a_family_is_read_trained_and_saved(name, tmp_path):
    """Log-probs, entropies and gradients; transformers' logits of what is saved are ours."""
    theirs = save(tmp_path / "theirs", name)
    before = json.load(open(tmp_path / "theirs" / "config.json"))
    model = load(f"{tmp_path}/theirs", "policy", keys_of_system(gradient_checkpointing=True), CPU,
                 trained=True)
    model.tokenizer.vocab_size = 260  # transformers' class for Qwen2 adds a token of its own
    tokens, mask = rows_of_texts()
    got, want = model.logprobs(tokens, mask, 0.8, 7, entropy=True), alone(theirs, 0.8)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 2e-4
    for logprobs, entropies in (got, want):
        (logprobs.mean() + 0.3 * entropies.mean()).backward()
    assert_same_gradients(model, theirs)
    with torch.no_grad():
        for p in (*model.parameters(), *theirs.parameters()):
            p.mul_(1.25)
        save_final(str(tmp_path), "ours", model)
        back, found = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(found.values())
        assert (back(tokens[:1]).logits - theirs(tokens[:1]).logits).abs().max() < 1e-5
    after = json.load(open(tmp_path / "ours" / "config.json"))
    assert after | before == after  # beside it are names for transformers 4: test_saving.py


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_values_and_scores_are_those_of_beginnings(name, tmp_path):
    """transformers scores a text at its last token: a value is the score of the tokens before."""
    if name in NO_SCORES:
        save(tmp_path, name)
        with pytest.raises(BadInput, match=FAMILIES[name][0]):
            load(str(tmp_path), "reward", keys_of_system(), CPU, "scalar")
        return
    theirs = save(tmp_path, name, scalar=True)
    model = load(str(tmp_path), "reward", keys_of_system(), CPU, "scalar")
    model.score_shift, (tokens, mask) = -1.25, rows_of_texts()

    def score(row, n):
        return theirs(tokens[row:row + 1, :n]).logits.item() - 1.25

    want = torch.tensor([score(row, t) for row, t in mask.nonzero().tolist()])
    assert (model.values(tokens, mask) - want).abs().max() < 1e-4 < 0.02 < want.std()
    want = torch.tensor([score(row, len(ids)) for row, ids in enumerate(TEXTS)])
    last = torch.tensor([len(ids) - 1 for ids in TEXTS])
    assert (model.scores(tokens, last) - want).abs().max() < 1e-4 and not model.new_head


# --------------------------------------------------------------------------------------------------
# the scripts


def in_a_row(folder, jobs, ranks=1):
    """
    Runs {name: (script, keys)} in one process, with the out_dir folder/name: {name: the line of the
    error that ended it, or ""}.
    """
    def run_all(rank):
        ended = {}
        for name, (script, keys) in jobs.items():
            sys.argv = [f"{ROOT}/{script}", *typed(dict(out_dir=f"{folder}/{name}") | keys)]
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
                ended[name] = ""
            except BadInput as e:
                ended[name] = str(e)
        with open(f"{folder}/ended.json", "w") as f:
            json.dump(ended, f)
        os._exit(0)

    done = Started("", [], folder, before=run_all).wait(600)
    assert done.codes == [0], done
    return json.load(open(f"{folder}/ended.json"))


def jobs_of(world, folder, name):
    """The three scripts with a policy of a family, two iterations each."""
    save(f"{folder}/{name}", name)
    keys = dict(policy_path=f"{folder}/{name}", max_iters=2, eval_path="", dtype="float32",
                num_minibatches=1, reward_functions=f"{world.rules}:letters", micro_batch_size=4)
    small = dict(init_from=f"{folder}/{name}", max_iters=2, val_path="", dtype="float32")
    return {f"{name}, sft": ("sft.py", tiny.keys_of(world, "sft.py", **small)),
            f"{name}, ppo": ("ppo.py", tiny.keys_of(
                world, "ppo.py", value_init="policy", reward_path="", ppo_epochs=1, **keys)),
            f"{name}, grpo": ("grpo.py", tiny.keys_of(world, "grpo.py", **keys))}


def verdict(line):
    """The words of the table."""
    if not line:
        return "yes"
    words = {"cannot decode": "no: cannot be decoded",
             "ModelForSequenceClassification": "no: has no reward models"}
    return [said for part, said in words.items() if part in line][0]


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """The folder of the runs of RUN's families, and how each has ended."""
    folder, jobs = str(tmp_path_factory.mktemp("runs")), {}
    for name in RUN:
        jobs |= jobs_of(world, folder, name)
    return SimpleNamespace(folder=folder, ended=in_a_row(folder, jobs))


def rows_of_table():
    page = open(f"{ROOT}/docs/scale.md", encoding="utf-8").read()
    rows = [line.strip("| ").split(" | ", 1) for line in page.splitlines()
            if line.count(" | ") == 3]
    return {name: said for names, said in rows for name in names.split(", ")}


@pytest.mark.parametrize("name", RUN)
def test_a_family_does_what_the_docs_say(runs, name):
    ended = [runs.ended[f"{name}, {script}"] for script in ("sft", "ppo", "grpo")]
    assert " | ".join(map(verdict, ended)) == rows_of_table()[name]
    before = read_weights(f"{runs.folder}/{name}")
    for script in [s for s in ("sft", "ppo", "grpo") if runs.ended[f"{name}, {s}"] == ""]:
        out = f"{runs.folder}/{name}, {script}"
        trained = transformers.AutoModelForCausalLM.from_pretrained(f"{out}/policy").state_dict()
        if script == "sft":
            assert any(not torch.equal(trained[n], before[n]) for n in before.keys() & {*trained})
            continue
        first = read_log(out)[0]
        assert first["policy/ratio_gap"] == 0 == first["objective/kl"], first
        assert first["policy/sampler_gap"] < 1e-4


def test_the_table_names_all_families():
    assert set(FAMILIES) == rows_of_table().keys() & FAMILIES.keys()


# --------------------------------------------------------------------------------------------------
# split over the ranks, and in 16 bits

SPLIT = ["GPT-2", "Gemma 2", "Cohere", "Mixtral", "gpt-oss"]


def on_two_ranks(folder, check):
    """check(), in two processes that have met."""
    def before(rank):
        import ranks

        ranks.init(keys_of_system(device_type="cpu", timeout=60))
        check()
        ranks.leave()
        os._exit(0)

    done = Started("", [], folder, ranks=2, before=before).wait()
    assert done.codes == [0, 0], done


def test_split_models_compute_the_same(tmp_path):
    """At stage 3, with layers that are computed again, and 2: also eager attention, mixtures."""
    for name in SPLIT:
        save(tmp_path / name, name)

    def check():
        tokens, mask = rows_of_texts()
        for name in SPLIT:
            found = []
            for stage in ("", "3", "2")[:3 if name == "Gemma 2" else 2]:
                system = keys_of_system(zero_stage=stage, gradient_checkpointing=stage == "3")
                model = load(f"{tmp_path}/{name}", "policy", system, CPU, trained=True)
                assert model.elsewhere == bool(stage)
                logprobs, _ = model.logprobs(tokens, mask)
                logprobs.square().mean().backward()
                gradients = {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
                             for n, p in model.named_parameters() if p.requires_grad}
                found.append(dict(logprobs=logprobs.detach()) | gradients)
            for other in found[1:]:
                assert other.keys() == found[0].keys()
                for n, t in found[0].items():
                    assert (t - other[n]).abs().max() < 1e-5 * max(1, t.abs().max()), (name, n)

    on_two_ranks(str(tmp_path), check)


SHORT = {name: FAMILIES[name] for name in ("Qwen2", "Mixtral", "gpt-oss")} | {
    "Ernie": ("ernie4_5_moe", ERNIE)}


def test_in_16_bits_all_copies_round_alike(tmp_path):
    """
    The policy under autocast, the copy of it that samples, the frozen reference, the shards: read
    in the same rows they have the same bits, and sample the same texts. How far the sampler's
    log-probs are from these depends on the CPU: the attention of torch gives other bits where there
    is padding on the left, by AVX2 already in these short rows.
    """
    for name in SHORT:
        random_model(*SHORT[name]).save_pretrained(tmp_path / name)
        write_byte_tokenizer(tmp_path / name, tiny.MARKERS)
    tokens, mask = rows_of_texts()

    def check():
        for name in SHORT:
            read, texts = [], []
            for stage in ("", "3"):
                system = keys_of_system(dtype="bfloat16", zero_stage=stage)
                models = [load(f"{tmp_path}/{name}", kind, system, CPU, trained=kind == "policy")
                          for kind in ("policy", "ref")]
                trained, frozen = ({p.dtype for p in model.parameters()} for model in models)
                assert trained == {torch.float32} and torch.bfloat16 in frozen
                with autocast(system, CPU), torch.no_grad():
                    read += [model.logprobs(tokens, mask)[0] for model in models]
                    with decoding_copy(models[0], system, CPU) as decoder:
                        texts.append(generate(decoder, TEXTS, 8, seed=3)["sampler_logprobs"])
                        read.append(decoder.logprobs(tokens, mask)[0])
            assert all(torch.equal(x, read[0]) for x in read), name
            assert all(torch.equal(x, texts[0]) for x in texts), name
            assert read[0].dtype == torch.float32  # in the values of bfloat16 they would be equal

    on_two_ranks(str(tmp_path), check)


# --------------------------------------------------------------------------------------------------
# parameters that no text reaches


def add_vision(folder):
    """A policy as Gemma 3 4B is, with a vision part."""
    text = HEADS | dict(model_type="gemma3_text", sliding_window=8)
    vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=24,
                  num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    random_model("gemma3", dict(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=260,
        boi_token_index=261, eoi_token_index=262, **BASE)).save_pretrained(folder)
    write_byte_tokenizer(folder, tiny.MARKERS)


@pytest.mark.parametrize("ranks, more", [
    (1, {}), (2, dict(dtype="bfloat16", zero_stage="3"))], ids=["whole", "16 bits, stage 3"])
def test_a_vision_part_stays_bit_for_bit(world, tmp_path, ranks, more):
    """It does not decay either, and is saved with the rest."""
    add_vision(f"{tmp_path}/seeing")
    keys = tiny.keys_of(world, "grpo.py", policy_path=f"{tmp_path}/seeing", eval_path="",
                        max_iters=1, num_minibatches=1, weight_decay=0.3, ema_decay=0.5,
                        **dict(dtype="float32") | more)
    out = tiny.well("grpo.py", tmp_path, keys, ranks=ranks)
    before = read_weights(f"{tmp_path}/seeing")
    vision = {n for n in before if "vision_tower" in n or "projector" in n}
    for product in ("policy", "ema_policy"):
        after = read_weights(f"{out}/{product}")
        assert before.keys() == after.keys() and len(vision) > 30
        assert {n for n in before if not torch.equal(before[n], after[n])} == {*before} - vision


@pytest.mark.parametrize("kind, settings, unread", [
    ("gpt2", GPT | dict(add_cross_attention=True), "crossattention|ln_cross_attn"),
    ("ernie4_5_moe", ERNIE, "e_score_correction_bias"),
    ("mixtral", EXPERTS | dict(num_local_experts=64, num_experts_per_tok=1), None)])
def test_parameters_that_no_text_reaches(kind, settings, unread):
    model = Model(random_model(kind, settings, noise=0))
    names = {id(p): n for n, p in model.hf.named_parameters()}
    assert [names[id(p)] for p in unread_parameters(model)] == [
        n for n in names.values() if unread and re.search(unread, n)]


# --------------------------------------------------------------------------------------------------
# the probe, and what is refused


def test_the_probe_refuses_wrong_logits(monkeypatch):
    """A family with something between states and logits that Model.logits does not know of."""
    model, right = Model(random_model("qwen3", HEADS)), Model.logits
    with torch.no_grad():
        probe(model)
        for wrong in (lambda model, states: 1.05 * right(model, states),
                      lambda model, states: right(model, states.roll(1, -1))):
            monkeypatch.setattr(Model, "logits", wrong)
            with pytest.raises(BadInput, match="cannot decode .*family qwen3"):
                probe(model)


LONG = dict(LONGROPE["rope_parameters"], original_max_position_embeddings=12)
ROPES = {  # how long a row may be; a length at which the probe finds that other rows change
    "llama, longrope": ("llama", SIZES | dict(head_dim=8, rope_parameters=LONG), 12, 64),
    "one kind of layers": ("gemma3_text", SIZES | dict(
        head_dim=8, layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
            full_attention=LONG, **{"sliding_attention": dict(
                rope_type="default", rope_theta=500.0)})), 12, 64),
    "dynamic": ("llama", SIZES | rope("dynamic", factor=2.0), 64, 256),
    "yarn": ("llama", SIZES | rope("yarn", factor=4.0, original_max_position_embeddings=16),
             64, None)}


@pytest.mark.parametrize("name", ROPES)
@torch.no_grad()
def test_the_longest_row_changes_no_other(name, monkeypatch):
    """Rows as long as may be stand beside a text without changing it; longer ones are found."""
    kind, settings, longest, far = ROPES[name]
    model = Model(random_model(kind, settings, noise=0.3))
    assert model.max_positions == longest
    tokens = torch.arange(2, 2 + 2 * longest).view(2, longest) % 97
    chosen = torch.zeros_like(tokens).bool()
    chosen[0, 1:8] = True
    together = model.logprobs(tokens, chosen)[0]
    assert (together - model.logprobs(tokens[:1, :8], chosen[:1, :8])[0]).abs().max() < 1e-4
    probe(model)
    if far:
        monkeypatch.setattr(Model, "max_positions", far)
        with pytest.raises(BadInput, match="differ"):
            probe(model)


def test_what_is_no_reward_model_is_refused(tmp_path):
    save(tmp_path / "policy", "Qwen3", scalar=True)
    with pytest.raises(BadInput, match="lm_head|score.weight"):  # no language model either
        load(f"{tmp_path}/policy", "policy", keys_of_system(), CPU)
    two = transformers.AutoConfig.for_model("qwen3", **HEADS, num_labels=2)
    # BERT's head is called "classifier", and has a bias
    bert = transformers.BertConfig(vocab_size=264, hidden_size=32, num_hidden_layers=1,
                                   num_attention_heads=2, num_labels=1, eos_token_id=EOS)
    for config, word in ((two, "score.weight"), (bert, "linear map")):
        folder = tmp_path / config.model_type
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        write_byte_tokenizer(folder, tiny.MARKERS)
        with pytest.raises(BadInput, match=word):
            load(str(folder), "reward", keys_of_system(), CPU, "scalar")


@torch.no_grad()
def test_a_file_in_16_bits_is_trained_in_32_and_saved_in_16(tmp_path):
    theirs = random_model("qwen3", HEADS).bfloat16()
    theirs.save_pretrained(tmp_path / "theirs")
    write_byte_tokenizer(tmp_path / "theirs", tiny.MARKERS)
    model = load(f"{tmp_path}/theirs", "policy", keys_of_system(), CPU, trained=True)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(p, q.float())
        p.mul_(1 + 2.0**-12)  # less than half a step of bfloat16
    save_final(str(tmp_path), "ours", model)
    ours, source = read_weights(tmp_path / "ours"), read_weights(tmp_path / "theirs")
    assert {t.dtype for t in ours.values()} == {torch.bfloat16}
    assert all(torch.equal(t, ours[n]) for n, t in source.items())
    assert transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="auto").dtype == torch.bfloat16


@torch.no_grad()
def test_scores_are_float32_under_autocast(tmp_path):
    """Scores around 100 in steps of much less than 1/2, which would be those of bfloat16."""
    save(tmp_path, "Llama", scalar=True)
    model = load(str(tmp_path), "reward", keys_of_system(dtype="bfloat16"), CPU, "scalar")
    model.score_shift = 100.0
    with torch.autocast("cpu", torch.bfloat16):
        values = model.values(*rows_of_texts())
    assert values.dtype == torch.float32 and (values % 0.5 != 0).any()


def print_table():
    with tempfile.TemporaryDirectory() as folder:
        world, jobs, alike = tiny.build(f"{folder}"), {}, {}
        for name in FAMILIES:
            jobs |= jobs_of(world, folder, name)
        ended = in_a_row(folder, jobs)
        for name in FAMILIES:
            said = " | ".join(verdict(ended[f"{name}, {script}"])
                              for script in ("sft", "ppo", "grpo"))
            alike.setdefault(said, []).append(name)
    print("| families | sft.py | ppo.py | grpo.py |\n|---|---|---|---|")
    for said, names in alike.items():
        print(f"| {', '.join(names)} | {said} |")


if __name__ == "__main__":
    print_table()
