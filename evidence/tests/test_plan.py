"""tools/plan.py: its counts beside an independent one, its seconds by hand, what is typed wrong."""
import re
from types import SimpleNamespace

import models_of_the_world as others
import pytest
import rollout
import torch
import transformers
from evidence.bench import keys_of, make_models
from small_world import wrap
from tiny import ROOT, Started, jsonl, read_jsonl, said_by, typed, write
from tools import measure
from tools.memory import MOST, dry_run, read_run
from tools.work import depths_of, dry_run_by_lines, one_row, work_of
from torch.utils.flop_counter import FlopCounterMode

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=264, max_position_embeddings=64, bos_token_id=None, eos_token_id=258)


@pytest.mark.parametrize("family, more", [
    ("gpt2", {}), ("qwen3", dict(num_key_value_heads=2, head_dim=24)),
    ("mixtral", dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))])
def test_a_text_costs_what_torch_counts_of_a_real_model(family, more, tmp_path):
    """With eager attention, whose products torch counts: of all pairs of tokens, not of half."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SMALL | more)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    P, R = 8, 12
    with FlopCounterMode(display=False) as real:
        states = model.base_model(torch.randint(9, (1, P + R)), use_cache=False)[0]
        loss = model.get_output_embeddings()(states[:, P - 1:-1]).sum()
        forward = real.get_total_flops()
        loss.backward()
    _, keys = read_run(["grpo.py", *typed(dict(
        policy_path=tmp_path, reward_functions="accuracy", max_new_tokens=R, batch_size=4,
        group_size=2, kl_coef=0))])
    with dry_run("grpo", keys) as run:
        _, found, _ = run[2](**one_row("grpo", P, R))
    (_, read), (_, trained) = found["reading", "policy"], found["update", "policy"]
    width = 4 * config.head_dim if family == "qwen3" else 64  # of all heads
    attention = 2 * 4 * (P + R) ** 2 * width  # of two layers
    assert read.attention == attention * (P + R + 1) / (P + R) / 2
    assert read.flop + attention == pytest.approx(forward, rel=0.01)
    assert trained.flop + 3 * attention == pytest.approx(real.get_total_flops(), rel=0.01)


def test_deep_models_are_lines_through_shallow_ones(tmp_path):
    """Layers of two kinds in turns, two ranks, a deeper reward model: as the whole models are."""
    for name, layers in (("policy", 8), ("scores", 10)):
        transformers.Qwen2Config(
            **SMALL | dict(num_hidden_layers=layers), num_key_value_heads=2, num_labels=1,
            use_sliding_window=True, sliding_window=8, score_shift=0.0, layer_types=[
                "sliding_attention", "full_attention"] * (layers // 2)).save_pretrained(
                    tmp_path / name)
    script, config = read_run(["grpo.py", *typed(dict(
        policy_path=tmp_path / "policy", reward_path=tmp_path / "scores", batch_size=8,
        reward_functions="reward_model", max_new_tokens=12, max_prompt_tokens=8, kl_coef=0,
        world_size=2, gpu_gb=1, group_size=2))])
    with dry_run(script, config) as run:
        whole = [run[2](**keys) for keys in (one_row(script, 4, 6), MOST)]
    depths = depths_of(script, config)
    assert depths == (2, 4, dict(policy=8, reward_model=10))
    lines = dry_run_by_lines(script, config, depths, [one_row(script, 4, 6)])
    assert lines[:2] == run[:2]
    (_, found, cache), (_, found2, cache2) = lines[2](**one_row(script, 4, 6)), whole[0]
    assert cache == cache2 and found.keys() == found2.keys()
    for key, (_, count) in found.items():
        assert count == pytest.approx(found2[key][1]), key
    (rows, found, _), (rows2, found2, _) = lines[2](**MOST), whole[1]
    assert rows == rows2
    for phase in ("rollout", "reading", "update"):
        assert max(found[key][0] for key in found if key[0] == phase) == pytest.approx(
            max(found2[key][0] for key in found if key[0] == phase), rel=0.02), phase


def rows_of(text):
    """{name: the numbers of its row}, but for what bounds it."""
    return {name.strip(): [float(x) for x in re.findall(r"(?<![\w.])\d[\d.]*(?:e[-+]\d+)?", row)]
            for name, row in re.findall(r"^(\S.{23})(.*\d.*)$", text, re.M)}


def test_two_layers_of_an_8b_by_hand(tmp_path):
    """Of the width of Llama 3 8B: 32 of these layers and two tables have its 8.03e9 parameters."""
    d, f, V = 4096, 14336, 128256
    P, R, L = 100, 60, 40  # tokens of a prompt, of the longest response, of one on average
    layer, table, norms = 2 * d * d + 2 * d * d // 4 + 3 * d * f, V * d, 5 * d
    assert 32 * layer + 2 * table == pytest.approx(8.03e9, rel=1e-3)
    transformers.LlamaConfig(
        hidden_size=d, intermediate_size=f, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=V, tie_word_embeddings=False).save_pretrained(tmp_path)
    keys = dict(policy_path=tmp_path, reward_functions="accuracy", kl_coef=0, dtype="bfloat16",
                batch_size=64, group_size=4, micro_batch_size=2, max_new_tokens=R, max_iters=90,
                max_prompt_tokens=120, checkpoint_interval=10)
    said = said_by("tools/plan.py", tmp_path, [
        "grpo.py", *typed(keys), "--gpus=8xH100", "--price=2.5", f"--prompt={P}", f"--length={L}"])
    assert max(map(len, said.splitlines())) <= 110, said
    rows = rows_of(said)
    prompt = 4 * layer * P + 2 * 4 * P * (P + 1) / 2 * d + 2 * table
    tokens = 8 * (L - 1) * (4 * layer + 2 * table + 2 * 4 * (P + L / 2) * d)
    text, pairs = 4 * layer * (P + L) + L * 2 * table, 2 * (P + L) * (P + L + 1) / 2 * d
    weights, whole = 2 * layer + table + norms, 2 * layer + 2 * table + norms
    cache = 2 * 2 * 8 * 128 * 2  # bytes of a token: two layers, keys and values of 8 heads
    flop = dict(sampling=2 * prompt + tokens, reading=8 * (text + 4 * pairs),
                update=8 * (3 * text + 14 * pairs))
    # R steps read the weights; 4 micro-batches; AdamW reads and writes 3 numbers, and reads one
    nbytes = dict(sampling=R * weights * 2 + 8 * (L - 1) * (P + L / 2) * cache,
                  reading=4 * weights * 2,
                  update=4 * (2 * weights * 2 + 8 * whole) + (2 * 12 + 4) * whole)
    sent, total = 4 * whole * 2 * 7 / 8, 0.0
    for phase in flop:
        least = max(flop[phase] / 989e12, nbytes[phase] / 3350e9)
        assert rows[phase] == pytest.approx(
            [flop[phase] / 1e12, nbytes[phase] / 1e9, 0, least], rel=0.006), phase
        total += least
    assert rows["gradients"] == pytest.approx([0, 0, sent / 1e9, sent / 450e9], rel=0.006)
    assert rows["checkpoints"] == pytest.approx([0, 1.2 * whole / 1e9, 0, 1.2 * whole / 1e9], 0.006)
    total += sent / 450e9 + 1.2 * whole / 1e9
    seconds, run, money = rows[f"limit, {L} tokens"]
    assert seconds == pytest.approx(total, rel=0.006)
    loading = weights * 2 / 1e9
    assert run * 60 == pytest.approx(90 * total + loading, rel=0.006)
    assert money == pytest.approx((90 * total + loading) / 3600 * 8 * 2.5, rel=0.006)


TINY = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1)


def test_what_an_iteration_of_ppo_computes_by_hand(tmp_path):
    """4 responses of 4 tokens to prompts of 6; sampling is as GRPO's, of the 8B."""
    make_models(str(tmp_path), TINY, 6, 5, 0.0, SimpleNamespace(device_type="cpu"), ppo=True)
    layer, head, norms = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48, 32 * 64, 3 * 32
    pairs = 10 * 11 / 2 * 32  # a token and one that it sees, itself included, and their numbers

    def found(script, **more):
        keys = keys_of(script, str(tmp_path), dict(
            batch_size=4, micro_batch_size=2, max_new_tokens=5) | more)
        _, config = read_run([f"{script}.py", *typed(keys)])
        with dry_run(script, config) as run:
            return work_of(script, config, run, 6, 4)

    # two FLOP a weight and token; in attention twice two for each pair and number
    read = 2 * layer * 10 + 4 * pairs  # a whole text
    heads = 4 * 2 * head  # of its response
    # backward a product is two; attention is five, for the scores are computed again
    trained = 3 * 2 * layer * 10 + (4 + 10) * pairs
    flop = dict(scoring=4 * read, reading=4 * (3 * read + 2 * heads),
                update=3 * 4 * (2 * trained + 3 * heads))
    ppo = found("ppo", ppo_epochs=3)
    # some versions of transformers multiply matrices for the angles
    assert {phase: ppo[phase].flop for phase in flop} == pytest.approx(flop, rel=3e-3)
    assert ppo["update"].sent == ppo["gradients"].sent == 0
    # stage 3: policy and reference gather all weights for a text, the policy most of them
    # once more backward, and the gradients are added up in parts; a rollout has gathered once
    whole, split = layer + 2 * head + norms, found("grpo", group_size=2, world_size=4, zero_stage=3)
    assert split["scoring"].flop == split["gradients"].sent == 0
    for phase, numbers in (("sampling", whole), ("reading", 2 * whole),
                           ("update", 2 * whole + layer + head)):
        assert split[phase].sent == pytest.approx(3 / 4 * 4 * numbers, rel=0.01)
    both = found("grpo", group_size=2, world_size=2, num_minibatches=2)  # gradients, twice
    assert both["gradients"].sent == pytest.approx(2 * 2 * 1 / 2 * 4 * whole, rel=0.01)


def test_measured_on_this_cpu_with_two_ranks(tmp_path):
    """
    Each phase is there, more than nothing, and the sum is that of the phases. As on a GPU, each
    decoding records a graph before its steps; here this takes 1000 s, which are no step's.
    """
    make_models(str(tmp_path), TINY, 6, 8, 0.0, SimpleNamespace(device_type="cpu"), ppo=True)
    keys = keys_of("ppo", str(tmp_path), dict(batch_size=8, micro_batch_size=2, max_new_tokens=8,
                                              zero_stage="policy=3"))

    def late(rank):
        spent, now = [], measure.Clock.now
        measure.Clock.now = lambda clock: now(clock) + 1000 * len(spent)
        wrap([rollout], "decode", lambda policy, prompts, uniforms, *_: (
            uniforms.shape[1] > 1 and spent.append(1)))

    said = said_by("tools/plan.py", tmp_path, [
        "ppo.py", *typed(keys), "--gpus=2xcpu", "--measure", "--length=8"], ranks=2, before=late)
    assert "prompts of 6 tokens (the mean of prompts_path)" in said
    rows = rows_of(said)
    phases = [rows[phase][4] for phase in ("sampling", "scoring", "reading", "update")]
    assert all(0 < seconds < 100 for seconds in phases), phases
    assert rows["measured"][0] == pytest.approx(sum(phases), rel=0.02)


@pytest.mark.parametrize("argv, word", [
    ("--gpus=8xH300", "RTX4090"), ("", "8xH100"), ("--gpus=1xcpu", "--measure"),
    ("--gpus=1xL4 --length=99", "length"), ("--gpus=1xmine --card=card.json", "bandwidth"),
    ("--gpus=1xmine --card=none.json", "No such file"),
    ("--gpus=1xmine --card=small.json", "even with one row"),
    pytest.param("--gpus=2xL4 --measure", "1xcpu", marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="a GPU is here")),
    ("--gpus=8xL4 --world_size=4", "leave this out"), ("--gpus=8xL4 --gpu-gb=80", "leave this out"),
    ("--gpus=1xcpu --measure --device_type=cuda", "leave this out"),
    ("--gpus=1xL4 --prompts_path=bad.jsonl", "bad.jsonl, line 2"),
    ("--gpus=1xL4 --policy_path=no/where", "no/where")])
def test_what_is_typed_wrong(argv, word, world, tmp_path):
    jsonl(tmp_path / "bad.jsonl", [dict(prompt="a"), dict(question="b")])
    write(tmp_path / "card.json", '{"tflops": 1}')
    write(tmp_path / "small.json", '{"tflops": 1, "tflops32": 1, "gb": 0.0001, "bandwidth": 9, '
                                   '"link": 9, "host": 9}')
    keys = dict(policy_path=world.policy, reward_functions="accuracy", max_new_tokens=32,
                batch_size=8)
    out = Started("tools/plan.py", ["grpo.py", *typed(keys), *argv.split()], str(tmp_path)).wait()
    assert out.codes == [2] and word in out.err[0].splitlines()[-1], out


def test_the_config_of_an_8b_starts_on_eight_ranks(tmp_path):
    """A tiny model of the family, one iteration; memory and template are as the configs say."""
    rows = [dict(prompt=[dict(role="user", content=f"{i}+{i}=")], answer=str(2 * i))
            for i in range(16)]
    configs = [f"{ROOT}/config/{name}_grpo.py" for name in ("gsm8k", "qwen3_8b")]
    said_by("grpo.py", tmp_path, [*configs, *typed(dict(
        policy_path=others.make(tmp_path / "policy", "qwen3"), eval_path="", system_prompt="",
        prompts_path=jsonl(tmp_path / "prompts.jsonl", rows), batch_size=32, group_size=4,
        max_new_tokens=8, max_prompt_tokens=64, max_iters=1, out_dir="out", device_type="cpu",
        timeout=200, reward_timeout=100))], ranks=8)
    first = read_jsonl(tmp_path / "out/log.jsonl")[0]
    assert first["objective/length"] > 0 and first["time/update"] > 0


def test_keys_that_the_script_refuses_are_not_proposed(world, tmp_path):
    """Adafactor is at stage 1 at most."""
    said = said_by("tools/plan.py", tmp_path, ["grpo.py", *typed(dict(
        policy_path=world.policy, reward_functions="accuracy", max_new_tokens=32, batch_size=16,
        rollout_batch_size=2, optim="adafactor")), "--gpus=2xL4", "--prompt=9"])
    proposed = said.partition("with other keys")[2]
    assert " s   --rollout_batch_size=8\n" in proposed and "--zero_stage" not in proposed, said


# what a script refuses before it loads a model, or while it does
REFUSED = """
grpo.py --batch_size=12
grpo.py --reward_functions=acuracy
grpo.py --max_new_tokens=64
grpo.py --offload=policy=params
grpo.py --optim=adafactor --offload=optimizer
grpo.py --chat_template=nowhere.jinja
ppo.py --value_init=reward
rm.py --too_long=cut
rm.py --teacher=policy --label_smoothing=0.1
"""


@pytest.mark.parametrize("command", REFUSED.strip().split("\n"))
def test_what_a_script_refuses(command, world, tmp_path):
    """plan.py and memory.py refuse it with the same line."""
    script, *more = command.split()
    keys = dict(init_from=world.policy, batch_size=8, device_type="cpu")
    if script in ("ppo.py", "grpo.py"):
        keys = dict(policy_path=world.policy, prompts_path=world.rl_train, max_new_tokens=4,
                    batch_size=8, reward_functions="accuracy", device_type="cpu")
    keys |= dict(arg[2:].split("=", 1) for arg in more)
    said = []
    for program, argv in ((script, []), ("tools/memory.py", [script]),
                          ("tools/plan.py", [script, "--gpus=1xcpu", "--measure"])):
        out = Started(program, [*argv, *typed(keys)], str(tmp_path)).wait()
        assert out.codes == [2], out
        said.append(out.err[0].splitlines()[-1].partition(": error: ")[2])
    assert said[0] and said[1:] == said[:1] * 2
