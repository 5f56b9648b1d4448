"""
Reward models of others are read as transformers reads them, and those of rm.py are read by transformers as by us, in batches.
The truth is AutoModelForSequenceClassification on what apply_chat_template writes, in tiny models of the world's families.
"""
import ast
import json
import os
import random
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engine.build import load_reward_models
from engine.reading import Reader, reader_of
from engine.tokenizers import HFTokenizer, load_tokenizer
from errors import BadInput
from model import freeze, load_model
from rewards import reward_model_scores, score_sequences

import models_of_the_world as world
from tiny import in_a_row, jsonl, one_run, run

WORDS = ["Paris", "is", "1+2=3", "the fox", "dog,", "It", "Sure!", "caf\u00e9", "\n", "  ", "helpful assistant", "user"]
rng = random.Random(0)


def some(n):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, n)))


PAIRS = [dict(prompt=some(9) + "?", chosen=some(30), rejected=some(12)) for _ in range(10)]


def as_chat(row):
    """A pair with messages in the place of its strings."""
    roles = dict(prompt="user", chosen="assistant", rejected="assistant")
    return {field: [dict(role=role, content=row[field])] for field, role in roles.items()}


def texts_of(tokenizer, pairs):
    """What a user of transformers writes of pairs, chosen and rejected in turn: the template's text; or all in a row, and EOS."""
    chats = [(as_chat(row), field) for row in pairs for field in ("chosen", "rejected")]
    if tokenizer.chat_template:
        return [tokenizer.apply_chat_template(row["prompt"] + row[field], tokenize=False) for row, field in chats]
    return [row["prompt"] + row[field] + tokenizer.eos_token for row in pairs for field in ("chosen", "rejected")]


def padded_scores(model, tokenizer, texts):
    """Scores by transformers of texts in a padded batch, as TRL does it: BOS is the template's, or the tokenizer's own."""
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt",
                      add_special_tokens=not tokenizer.chat_template)
    assert not batch["attention_mask"].bool().all()
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch).logits[:, 0]


def batch_of(pairs, chat=False):
    """The batch of a run whose responses are the chosen and the rejected ones, in turn."""
    rows = [(as_chat(row) if chat else row, row[field]) for row in pairs for field in ("chosen", "rejected")]
    return dict(rows=[dict(prompt=row["prompt"]) for row, _ in rows], completions=[text for _, text in rows],
                tokens=torch.zeros(len(rows), 1, dtype=torch.int64), finished=torch.ones(len(rows), dtype=torch.bool))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: a reward model of others'}"""
    root = tmp_path_factory.mktemp("world")
    return {name: world.make(root / name, name, head="scalar") for name in world.FAMILIES}


def edit(folder, file, **changes):
    path = os.path.join(folder, file)
    with open(path, encoding="utf-8") as f:
        value = json.load(f) | changes
    with open(path, "w", encoding="utf-8") as f:
        json.dump({k: x for k, x in value.items() if x is not None}, f)


def load(folder, reward_format="auto", dtype=torch.float32):
    reward_model, tokenizer = freeze(load_model(folder, "scalar", dtype)), load_tokenizer(folder)
    return reward_model, *reader_of(reward_model, tokenizer, reward_format, folder)


# others'


@pytest.mark.parametrize("name", world.FAMILIES)
def test_others_score_as_transformers(name, folders):
    """Prompts as strings and as messages; with pad = EOS, with another pad (read at EOS, or behind it), and without one."""
    folder, chat = folders[name], name in world.CHATS
    tokenizer, own = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reward_model = freeze(load_model(folder, "scalar"))
    texts = texts_of(tokenizer, PAIRS)
    ids = [tokenizer(text, add_special_tokens=not chat, return_tensors="pt")["input_ids"] for text in texts]
    seen = []
    for pad in (theirs.config.pad_token_id, own.encode("+")[0], None):  # no text ends with a +
        theirs.config.pad_token_id = pad
        reward_model.hf.config.pad_token_id = pad
        if pad == own.eos_id or pad == own.pad_id:
            want = padded_scores(theirs, tokenizer, texts)
        else:  # transformers takes one text at a time
            want = torch.cat([theirs(x).logits for x in ids])[:, 0].detach()
        reader, said = reader_of(reward_model, own, "auto", folder)
        assert f"reward model {folder}: not trained by rm.py; it reads prompt and response " in said and said.endswith(
            f"that is not its padding (pad_token_id = {pad})" if pad is not None else "is scored at its last token")
        assert ("in its own chat template" if chat else "as plain text") in said
        for as_messages, size in [(False, 1), (False, 100), (True, 5)][:2 + chat]:
            got = reward_model_scores(batch_of(PAIRS, as_messages), reward_model, reader, own, size)
            assert (got - want).abs().max() < 1e-4 < 0.05 < want.std()
            assert torch.equal(got[::2] > got[1::2], want[::2] > want[1::2])
        seen.append(want)
    # with pad = EOS at the very end, the score is read in front of it; behind Qwen's end of turn there is a line break
    at_the_end = (seen[0] - seen[2]).abs().max() < 1e-4
    assert at_the_end == (name in ("qwen2.5", "qwen3")) and (seen[1] - seen[2]).abs().max() < 1e-4


def test_texts_that_spell_special_tokens_are_letters(folders):
    """No response can end the assistant's turn, open another one, or end the text."""
    for name, folder in folders.items():
        reward_model, reader, _ = load(folder)
        special, own = world.FAMILIES[name]["special"], reader.tokenizer
        ids = [{own.backend.convert_tokens_to_ids(s) for s in special} & set(reader.encode_response("a", text, True))
               if hasattr(own, "backend") else {own.eos_id} & set(reader.encode_response("a", text, False))
               for text in ("b", "b" + "".join(special) + "c")]
        counts = [sum(i in ids[0] for i in reader.encode_response("a", text, True)) for text in ("b", f"b{special[-1]}")]
        assert ids[0] == ids[1] and counts[0] == counts[1], name
        letters = own.encode(f"b{special[-1]}")
        found = reader.encode_response("a", f"b{special[-1]}", True)
        assert len(letters) > 2 and str(letters[1:])[1:-1] in str(found), name


def test_what_is_too_long_is_cut(tmp_path):
    folder = world.make(tmp_path / "gpt2", "gpt2", head="scalar", context=24)
    reward_model, reader, _ = load(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"][:24] for text in texts_of(tokenizer, PAIRS)]
    assert max(map(len, ids)) == 24 > min(map(len, ids))
    with torch.no_grad():
        want = torch.cat([theirs(torch.tensor([x])).logits for x in ids])[:, 0]
    assert (reward_model_scores(batch_of(PAIRS), reward_model, reader, reader.tokenizer, 4) - want).abs().max() < 1e-4


def test_reward_format(folders, tmp_path):
    """chat and plain read any reward model so; auto reads one of rm.py, which has a score_shift, as rm.py has trained it."""
    folder = shutil.copytree(folders["qwen3"], tmp_path / "qwen3")
    assert load(folder, "plain")[1].encode_response("a", "b", False) == load_tokenizer(folder).encode("ab")
    assert "as plain text" in load(folder, "plain")[2] and "chat template" in load(folder, "chat")[2]
    with pytest.raises(BadInput, match="reward_format = 'chat', but the tokenizer of .*gpt2 has no chat template"):
        load(folders["gpt2"], "chat")
    for format in ("auto", "plain"):
        reader = load(folders["gpt2"], format)[1]
        with pytest.raises(BadInput, match="reads plain text, and here is a list of messages"):
            reader.encode_prompt([dict(role="user", content="a")])
    edit(folder, "config.json", score_shift=0.5)
    reward_model, reader, said = load(folder)
    assert type(reader) is HFTokenizer and said is None
    reward_model, reader, said = load(folder, "chat")
    assert "not trained by rm.py" not in said and type(reader) is Reader
    got = reward_model_scores(batch_of(PAIRS), reward_model, reader, reader.tokenizer, 9)
    other, other_reader, _ = load(folders["qwen3"])
    assert (got - reward_model_scores(batch_of(PAIRS), other, other_reader, other_reader.tokenizer, 9) - 0.5).abs().max() < 1e-6


def test_other_heads_are_named(folders, tmp_path):
    def spoilt(name, change, **config):
        folder = shutil.copytree(folders["qwen2.5"], tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})
        edit(folder, "config.json", **config)
        return str(folder)

    def several(tensors):
        tensors["score.weight"] = tensors["score.weight"].repeat(2, 1)

    def renamed(name):
        return lambda t: {name if n == "score.weight" else n: x for n, x in t.items()}

    cases = [
        (spoilt("two", several, id2label={"0": "bad", "1": "good"}), "two: its head gives 2 labels: it is a classifier; a "),
        (spoilt("one", lambda t: t.update({"score.weight": torch.ones(3, 32)})), "tensor 'score.weight' has the shape"),
        (spoilt("tokens", lambda t: t.update({"score.bias": torch.ones(1)}), architectures=["Qwen2ForTokenClassification"]),
         "tokens: it is a 'Qwen2ForTokenClassification', and a reward model gives one score"),
        (spoilt("bias", lambda t: t.update({"score.bias": torch.ones(1)})), "bias: its weights hold 'score.bias'"),
        (spoilt("nan", lambda t: t.update({"score.weight": torch.full((1, 32), torch.nan)})), "tensor 'score.weight' holds NaN"),
        (spoilt("plain", lambda t: {n: x for n, x in t.items() if n != "score.weight"}, architectures=["Qwen2ForCausalLM"]),
         "plain' has no score head, it is a plain language model")]
    cases += [(spoilt(name.split(".")[0], renamed(name)), f"its weights hold '{name}'")
              for name in ("v_head.summary.weight", "regression_head.weight", "reward_head.weight")]
    keys = dict(share_base=False, value_init="policy", seed=1, dtype="float32", master_weights=True,
                gradient_checkpointing=False,
                zero_stage="", offload="", lora="", optim="adamw", compile=False, reward_format="auto", chat_date="")
    for folder, message in cases:
        with pytest.raises(BadInput, match=message) as e:
            load_reward_models(keys | dict(reward_path=folder), torch.device("cpu"), None, None, [(1.0, "reward_model", None)])
        assert "\n" not in str(e.value) and folder in str(e.value)


@pytest.mark.parametrize("cls, pad", [("Gemma3Text", 0), ("Olmo2", 1)])
def test_a_padding_that_config_json_does_not_name(cls, pad, tmp_path):
    """transformers then takes the family's, and reads the score in front of it; null means that there is none."""
    folder = str(tmp_path)
    ids = world.make_tokenizer(folder, "llama3.2")
    config = getattr(transformers, f"{cls}Config")(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=ids["<|eot_id|>"], num_labels=1)
    torch.manual_seed(0)
    with torch.no_grad():
        model = getattr(transformers, f"{cls}ForSequenceClassification")(config)
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    model.save_pretrained(folder)
    assert model.config.pad_token_id == pad
    with open(f"{folder}/config.json", encoding="utf-8") as f:
        given = json.load(f)
    assert given.pop("pad_token_id") == pad
    text = [5, 9, 11, pad, pad]
    seen = []
    for more in ({}, dict(pad_token_id=None)):
        with open(f"{folder}/config.json", "w", encoding="utf-8") as f:
            json.dump(given | more, f)
        reward_model, reader, _ = load(folder, "plain")
        got = score_sequences(reward_model, torch.tensor([text]), torch.ones(1, 5).bool(), 1, skipped_id=reader.skipped_id)
        theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        with torch.no_grad():
            assert got.item() == pytest.approx(theirs(torch.tensor([text])).logits.item(), abs=1e-4)
        seen.append(got.item())
    assert abs(seen[0] - seen[1]) > 0.01


def test_a_reward_model_is_no_policy_and_code_of_its_own_is_named(folders, tmp_path, capsys):
    folder = shutil.copytree(folders["qwen2.5"], tmp_path / "tied")
    edit(folder, "config.json", tie_word_embeddings=True)  # so that nothing is missing
    with pytest.raises(BadInput, match="tied: its weights hold 'score.weight'"):
        load_model(str(folder))
    load(folder)
    assert "auto_map" not in capsys.readouterr().out
    edit(folder, "config.json", auto_map={"AutoModelForSequenceClassification": "modeling_mine.RewardModel"})
    load(folder)
    assert "warning: " in (said := capsys.readouterr().out) and "code of its own (auto_map), which is not run" in said


# those of rm.py


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """
    {name: (the folder that rm.py leaves, the policy that it began with)}. "small" is GPT-2 without an embedding to spare; its
    reward model is used by a run of ppo.py.
    """
    root = tmp_path_factory.mktemp("trained")
    jobs, found = {}, {}
    for chat in (False, True):
        rows = [as_chat(row) if chat else row for row in PAIRS]
        jsonl(root / f"pairs{chat}.jsonl", rows)
        jsonl(root / f"demos{chat}.jsonl", [dict(prompt=row["prompt"], completion=row["chosen"]) for row in rows])
    for name in [*world.FAMILIES, "small"]:
        policy, chat = world.make(root / f"{name}-policy", name if name != "small" else "gpt2"), name in world.CHATS
        if name == "small":
            tensors = load_file(f"{policy}/model.safetensors")
            tensors = {n: t[:401] if n.endswith("wte.weight") else t for n, t in tensors.items()}
            save_file(tensors, f"{policy}/model.safetensors", metadata={"format": "pt"})
            edit(policy, "config.json", vocab_size=401)
        found[name] = f"{root}/{name}/rm/reward_model", policy
        keys = ["--batch_size=5", "--micro_batch_size=5", "--device_type=cpu"]
        pairs, demos = (f"{root}/{kind}{chat}.jsonl" for kind in ("pairs", "demos"))
        jobs[name] = one_run("rm.py", [
            f"--init_from={policy}", "--out_dir=rm", f"--train_path={pairs}", f"--val_path={pairs}", "--max_iters=3",
            f"--demonstrations_path={demos}", "--learning_rate=3e-3", *keys])
    jobs["ppo"] = one_run("ppo.py", [
        f"--policy_path={policy}", f"--reward_path={found['small'][0]}", "--out_dir=ppo", f"--prompts_path={demos}",
        f"--eval_path={demos}", "--max_iters=1", "--max_new_tokens=6", "--eval_size=3", "--value_init=reward", *keys])
    others = world.make(root / "others-reward", "mistral", head="scalar")
    jobs["again"] = one_run("rm.py", [
        f"--init_from={others}", "--out_dir=rm", f"--train_path={root}/pairsTrue.jsonl", f"--val_path={root}/pairsTrue.jsonl",
        f"--demonstrations_path={root}/demosTrue.jsonl", "--max_iters=1", "--checkpoint_interval=1", *keys])
    found["again"] = f"{root}/again/rm/reward_model", others
    for name, (done,) in in_a_row(root, jobs).items():
        assert not done["kind"], (name, done)
    return found


@pytest.mark.parametrize("name", [*world.FAMILIES, "small"])
def test_ours_score_the_same_in_transformers_batches(name, trained):
    """With a padding token that ends nothing; the ids are those that rm.py trained on, score_shift is left out there."""
    folder, policy = trained[name]
    reward_model, reader, said = load(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer, before = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(policy)
    chosen = dict(qwen3="<|endoftext|>", pythia="<|padding|>", mistral="<unk>").get(name, "[PAD]")
    assert tokenizer.pad_token == chosen and tokenizer.pad_token_id == theirs.config.pad_token_id
    assert json.load(open(f"{folder}/tokenizer_config.json"))["pad_token"] == chosen  # no class's own, of some version
    assert said is None and reader.fingerprint == load_tokenizer(policy).fingerprint
    assert theirs.config.pad_token_id not in (tokenizer.eos_token_id, getattr(reader, "turn_end", None))

    rows = [as_chat(row) if name in world.CHATS else row for row in PAIRS]
    ids = [reader.encode_response(row["prompt"], row[field]) for row in rows for field in ("chosen", "rejected")]
    alone = torch.cat([score_sequences(reward_model, torch.tensor([x]), torch.ones(1, len(x)).bool(), 1) for x in ids])
    batch = tokenizer.pad(dict(input_ids=ids), padding_side="right", return_tensors="pt")
    with torch.no_grad():
        got = theirs(**batch).logits[:, 0]
    assert (got - (alone - reward_model.score_shift)).abs().max() < 1e-4 < 0.01 < alone.std()
    if name in world.CHATS:  # the text up to the end of the turn has these ids in transformers
        texts = [tokenizer.apply_chat_template(row["prompt"] + row["chosen"], tokenize=False) for row in rows]
        assert [tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"] for text in texts] == ids[::2]
    for text in ["caf\u00e9 [PADDING] it's", *[row["chosen"] for row in PAIRS]]:  # all ids are as they were
        assert tokenizer(text)["input_ids"] == before(text)["input_ids"]


def test_what_rm_py_has_trained_is_its_own(trained):
    """Also where it began with a reward model of others: its head went on, and it is read as rm.py has trained it."""
    folder, others = trained["again"]
    assert load(others)[2] is not None and load(folder)[2] is None
    assert "score_shift" in json.load(open(f"{os.path.dirname(folder)}/checkpoint-000001/reward_model/config.json"))
    heads = [load_file(f"{path}/model.safetensors")["score.weight"] for path in (folder, others)]
    assert 0 < (heads[0] - heads[1]).abs().max() < 0.01


def test_a_new_padding_token_is_no_other_tokenizer(trained):
    """GPT-2 has none: its reward model's folder has one token more, and one embedding, where there was none to spare."""
    for name, rows in (("gpt2", 448), ("small", 402)):
        folder, policy = trained[name]
        config, tokenizer = json.load(open(f"{folder}/config.json")), AutoTokenizer.from_pretrained(folder)
        after = load_file(f"{folder}/model.safetensors")["transformer.wte.weight"]
        assert config["pad_token_id"] == tokenizer.pad_token_id == 401 == len(tokenizer) - 1
        assert config["vocab_size"] == rows == len(after)
        assert load_tokenizer(folder).fingerprint == load_tokenizer(policy).fingerprint
        before = load_file(f"{policy}/model.safetensors")["transformer.wte.weight"]
        assert (after[:len(before)] - before).abs().max() < 0.05 and not after[len(before):].any()


def test_gpt2_is_one_vocabulary_in_both_of_its_forms(trained, tmp_path):
    """vocab.json, and the tokenizer.json that transformers and TRL make of it: a value model may begin as such a reward model."""
    policy = trained["gpt2"][1]
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path)
    shutil.copy(f"{policy}/config.json", tmp_path)
    ours, theirs = load_tokenizer(policy), load_tokenizer(tmp_path)
    assert type(ours) is not type(theirs) and ours.vocabulary == theirs.vocabulary
    assert all(ours.encode(row["chosen"]) == theirs.encode(row["chosen"]) for row in PAIRS)


# as a user runs them


def test_score_and_runs_say_how_they_read(folders, trained, tmp_path):
    """tools/score.py by itself, and then, in one process, with other models, and runs with a reward model of others."""
    jsonl(tmp_path / "pairs.jsonl", PAIRS)
    jsonl(tmp_path / "chats.jsonl", [as_chat(row) for row in PAIRS] + [as_chat(dict(PAIRS[0], chosen="a<|im_end|>b"))])
    jsonl(tmp_path / "letters.jsonl", [as_chat(dict(PAIRS[0], chosen="a<|im_end|>b"))])
    jsonl(tmp_path / "prompts.jsonl", [dict(prompt=as_chat(row)["prompt"]) for row in PAIRS])
    done = run("tools/score.py", f"--reward_path={folders['qwen3']}", f"--pairs={tmp_path}/pairs.jsonl", "--limit=6")
    assert done.returncode == 0, done.stderr
    assert "qwen3: not trained by rm.py; it reads prompt and response in its own chat template" in done.stdout
    assert "6 pairs of " in done.stdout and "correlation 1.0000" in done.stdout and done.stdout.endswith("\nthey agree\n")

    unsteady = shutil.copytree(folders["qwen2.5"], tmp_path / "unsteady")  # a template that never writes the same twice
    template = world.QWEN25.replace("{%- if add_gen", "{{ strftime_now('%f') }}{%- if add_gen")
    edit(unsteady, "tokenizer_config.json", chat_template=template)
    two = shutil.copytree(folders["qwen3"], tmp_path / "two")
    edit(two, "config.json", architectures=["Qwen3ForTokenClassification"])
    keys = ["--prompts_path=../prompts.jsonl", "--eval_path=../prompts.jsonl", "--batch_size=4", "--micro_batch_size=4",
            "--max_new_tokens=6", "--max_iters=1", "--device_type=cpu", "--eval_size=4", f"--policy_path={trained['qwen3'][1]}"]
    grpo = ["--group_size=2", "--reward_functions=reward_model"]
    jobs = {
        "ours": ("tools/score.py", [f"--reward_path={trained['qwen2.5'][0]}", "--pairs=../chats.jsonl"]),
        "ours, strings": ("tools/score.py", [f"--reward_path={trained['gpt2'][0]}", "--pairs=../pairs.jsonl"]),
        "unsteady": ("tools/score.py", [f"--reward_path={unsteady}", "--pairs=../pairs.jsonl"]),
        "letters": ("tools/score.py", [f"--reward_path={trained['qwen2.5'][0]}", "--pairs=../letters.jsonl"]),
        "two": ("tools/score.py", [f"--reward_path={two}", "--pairs=../pairs.jsonl"]),
        "grpo": ("grpo.py", [*keys, *grpo, f"--reward_path={folders['llama3.2']}", "--center_scores=never"]),
        "ppo": ("ppo.py", [*keys, f"--reward_path={folders['qwen3']}", "--value_init=reward"]),
        "refused": ("grpo.py", [*keys, *grpo, f"--reward_path={folders['gpt2']}"]),
    }
    done = {name: x for name, (x,) in in_a_row(tmp_path, {
        name: one_run(script, [*args, "--out_dir=out"][:None if script != "tools/score.py" else -1])
        for name, (script, args) in jobs.items()}).items()}
    for name in ("ours", "ours, strings"):
        assert done[name]["message"] == "0" and "they agree" in done[name]["stdout"], done[name]
        assert "trained by rm.py; its score is read at the end of the response, and score_shift = " in done[name]["stdout"]
    assert "1 pairs spell special tokens, which quartet reads as letters" in done["ours"]["stdout"]
    assert done["unsteady"]["message"] == "1" and "they do not agree: row " in done["unsteady"]["stdout"]
    assert "which reads other tokens there" in done["unsteady"]["stdout"]
    assert done["two"]["kind"] == "BadInput" and "it is a 'Qwen3ForTokenClassification'" in done["two"]["message"]
    assert done["letters"]["kind"] == "BadInput" and "nothing can be compared" in done["letters"]["message"]
    for name, model in (("grpo", "llama3.2"), ("ppo", "qwen3")):
        assert not done[name]["kind"], done[name]
        assert f"{model}: not trained by rm.py; it reads prompt and response in its own chat" in done[name]["stdout"]
    assert done["refused"]["kind"] == "BadInput" and "row 1: this reward model reads plain text" in done["refused"]["message"]
    # the logged score of the evaluation is transformers', of the texts that it printed
    theirs = AutoModelForSequenceClassification.from_pretrained(folders["llama3.2"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders["llama3.2"])
    said = [line.strip().partition(" -> ") for line in done["grpo"]["stdout"].splitlines() if line.startswith("    [{")]
    assert len(said) >= 2
    for prompt, _, rest in said:
        completion, _, score = rest.rpartition("  score ")
        messages = [*ast.literal_eval(prompt), dict(role="assistant", content=ast.literal_eval(completion))]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert abs(padded_scores(theirs, tokenizer, [text, text + "a"])[0].item() - float(score)) < 0.006
