"""Stop strings: against a loop that decodes the text anew after each token, and against cuts that are known on paper."""
import json
import random

import pytest
import torch

from engine.reading import Reader
from engine.text_ends import TextEnds, automaton, parse_stop_strings, read_pieces
from engine.tokenizers import add_ends, load_tokenizer
from errors import BadConfig, BadInput
from model import freeze, load_model
from rewards import reward_model_scores, score_sequences
from rollout import decode_responses, generate

import models_of_the_world
import tiny
from test_rollout import TableModel, random_table, script, uniforms
from tiny import arguments, forked, one_run

KINDS = ["qwen2.5", "llama3.2", "mistral", "pythia", "gpt2"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.build(str(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory, world):
    """name -> a new tokenizer: one of KINDS, or "bytes"."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in KINDS:
        models_of_the_world.make(folder / name, name)
    return lambda name: load_tokenizer(world.tokenizer if name == "bytes" else str(folder / name))


def ends_of(pieces, *strings):
    """TextEnds for tokens of these bytes."""
    return TextEnds(list(strings), pieces, pieces)


# which tokens complete a stop string


def test_the_table_of_the_header():
    steps = automaton((b"ab",))
    assert read_pieces(steps, [b"a", b"b", b"ca", b"cabs"]).tolist() == [[1, 0, 1, 2], [1, 2, 1, 2], [2, 2, 2, 2]]


def test_it_falls_back_to_what_may_still_become_a_stop_string():
    """Of "aab", the text "aaab" has all; of "abcd" and "bce", "abce" has the second one."""
    letters = [b"a", b"b", b"c", b"d", b"e"]
    for strings, text, at in ((["aab"], "aaab", 3), (["abcd", "bce"], "abce", 3), (["abcd", "bce"], "ababcd", 5),
                              (["ab", "abc"], "eabc", 2), (["aa"], "abababab", None)):
        ends = ends_of(letters, *strings)
        found, state = ends.follow(torch.zeros(1, dtype=torch.int64), torch.tensor([["abcde".index(ch) for ch in text]]))
        assert found[0].tolist() == [at is not None and i >= at for i in range(len(text))]
        assert (state.item() == ends.ended) == (at is not None)


@pytest.mark.parametrize("name", [*KINDS, "bytes"])
def test_the_pieces_of_a_tokenizer_make_its_texts(tokenizer_of, name):
    """What tokens add to a text, one behind the other, is what decode makes of them: also within characters, and first."""
    tokenizer, rng = tokenizer_of(name), random.Random(0)
    first, later = tokenizer.pieces()
    assert len(first) == len(later) == tokenizer.vocab_size
    texts = ["caf\u00e9 \u4f60\u597d \U0001f600", " two  blanks ", "\n\nQ: why?\n", "<think>3</think>", " \u00e9", "x"]
    sequences = [tokenizer.encode(text) for text in texts] + [[tokenizer.eos_id, *tokenizer.encode(" a")]]
    for _ in range(500):
        sequences.append([rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 5))])
    checked = 0
    for ids in sequences:
        shown = [i for i in ids if later[i] is not None]
        text = b"".join([first[i] if n == 0 else later[i] for n, i in enumerate(shown)])
        if name == "mistral" and b"\xef\xbf\xbd" in text.decode(errors="replace").encode():
            continue  # there decode spoils a whole row of bytes where one of them is no character
        assert text.decode(errors="replace") == tokenizer.decode(ids), ids
        checked += 1
    assert checked > 250
    if name == "mistral":  # SentencePiece's sign for a blank, which a text does not begin with
        differ = {(first[i], later[i]) for i in range(len(first)) if first[i] != later[i]}
        assert (b"a", b" a") in differ and all(b" " + a == b for a, b in differ)
    else:
        assert first == later


# sampling


def spell(tokenizer, responses, strings, R=12, **keys):
    """What a policy that continues prompts of 1, 2, ... tokens with these lists of ids is heard to say, with stop strings."""
    add_ends(tokenizer, "", json.dumps(strings), R)
    # each position has tokens of its own, so that no two paths cross: prompts of n tokens end with the token n
    longest = max(map(len, responses)) + len(responses)
    V = tokenizer.vocab_size
    outs = []
    for ids in responses:
        table = torch.full((longest + R + 1, V, V), -20.0, dtype=torch.float32)
        for t, (before, token) in enumerate(zip([1, *ids], ids, strict=False)):
            assert (table[t, before] == -20).all()
            table[t, before, token] = 20.0
        outs.append(generate(TableModel(table), [[1]], R, 0, tokenizer.eos_ids, tokenizer.pad_id, uniforms=uniforms(1, R),
                             text_ends=tokenizer.text_ends, **keys))
    return [(out["response_mask"].sum().item(), out["finished"].item(), decode_responses(tokenizer, out)[0]) for out in outs]


CUTS = [  # what is said; stop strings; how many tokens that has in a tokenizer of bytes; and the text
    ("ab</a>cdefghij", ["</a>"], 6, "ab</a>"),
    ("abcdefghijklmn", ["</a>"], None, "abcdefghijkl"),
    ("xyz\n\nQ: what", ["\n\nQ:", "Q: w"], 7, "xyz\n\nQ:"),
    ("xyz\n\nQ: what", ["Q: w", "z\n"], 4, "xyz\n"),
    ("a\u4f60\u597d!bcdefgh", ["\u597d"], 7, "a\u4f60\u597d"),
    ("abcabd", ["abd"], 6, "abcabd"),
]


@pytest.mark.parametrize("said, strings, length, text", CUTS)
def test_a_response_ends_with_its_stop_string(tokenizer_of, said, strings, length, text):
    """A token is a byte here: the strings are split over two and more tokens, and a character over three."""
    tokenizer = tokenizer_of("bytes")
    assert spell(tokenizer, [list(said.encode())], strings) == [(length or 12, length is not None, text)]


def test_before_the_eos_and_behind_it(tokenizer_of):
    """Of a stop string and an EOS in one lot of tokens, the first one counts; a special token between letters does not."""
    tokenizer = tokenizer_of("bytes")
    eos, pad = tokenizer.eos_id, tokenizer.pad_id
    a, b, c = b"abc"
    assert spell(tokenizer, [[a, b, eos, c], [a, eos, b, c], [a, pad, b, c, c], [c, c, c, b, a, b]], ["ab"], R=6) == [
        (2, True, "ab"), (2, True, "a"), (3, True, "ab"), (6, True, "cccbab")]


def test_a_token_may_go_on_behind_the_stop_string(tokenizer_of):
    """It belongs to the response, whole; the text ends with the stop string. A token may also hold all of one."""
    tokenizer = tokenizer_of("gpt2")
    pieces = tokenizer.pieces()[0]
    long = next(i for i, piece in enumerate(pieces) if piece and len(piece) > 3 and piece.isalpha())
    word, dot = tokenizer.decode([long]), pieces.index(b".")
    letters = [pieces.index(ch.encode()) for ch in word[:2]]
    assert word[1:3] not in word[:2]
    assert spell(tokenizer, [[dot, long, dot]], [word[1:3]], R=3) == [(2, True, "." + word[:3])]
    assert spell(tokenizer, [[letters[0], letters[1], dot]], [word[:2]], R=3) == [(2, True, word[:2])]


def test_the_blank_in_front_of_a_text_is_none(tokenizer_of):
    """SentencePiece's first token loses its blank: so " a" is not in the text of the first token, but in that of later ones."""
    tokenizer = tokenizer_of("mistral")
    later = tokenizer.pieces()[1]
    a, b = later.index(b" a"), later.index(b"b")
    assert spell(tokenizer, [[a, b, a, b]], [" a"], R=4) == [(3, True, "ab a")]


def test_what_the_prompt_ends_with_does_not_count():
    """The prompt ends with "a", the response begins with "b": it has no "ab"."""
    model, ends = script([[1, 2, 0, 1, 2, 2]], V=4), ends_of([b"a", b"b", b"c", b"d"], "ab")
    model.table[0, 0] = model.table[0, 1]
    out = generate(model, [[0]], 6, 0, uniforms=uniforms(1, 6), text_ends=ends)
    assert out["tokens"].tolist() == [[0, 1, 2, 0, 1, 0, 0]] and out["response_mask"].sum() == 4 and out["finished"].all()


PIECES = [b"a", b"b", b"ab", b"\xc3", b"\xa9", b"ba\xc3", b" ", None, b"a b"]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("strings", [["abab"], ["\u00e9"], ["a\u00e9", "b b"], ["bb ", "aaa", " a\u00e9"]])
def test_a_loop_that_looks_after_each_token_finds_the_same(strings, temperature):
    """Random texts: the cut, for any number of rows at once; tokens and log-probs up to it are those without stop strings."""
    B, R, V = 40, 30, len(PIECES)
    table, u = 0.5 * random_table(R + 2, V, seed=5), uniforms(B, R, seed=6)
    prompts = [[i % V] for i in range(B)]
    ends = ends_of(PIECES, *strings)
    free = generate(TableModel(table), prompts, R, temperature, uniforms=u)
    eos = generate(TableModel(table), prompts, R, temperature, uniforms=u, eos_ids=[8], pad_id=7)
    for ids, whole in (((), free), ((8,), eos)):
        lengths, finished = [], []
        for row in free["tokens"][:, 1:].tolist():
            read, n = b"", 0
            while n < R and not any(s.encode() in read for s in strings) and not (n and row[n - 1] in ids):
                read, n = read + (PIECES[row[n]] or b""), n + 1
            lengths.append(n)
            finished.append(any(s.encode() in read for s in strings) or row[n - 1] in ids)
        assert temperature == 0 or len(set(lengths)) > 5
        for batch_size in (0, 1, 2, 7):
            out = generate(TableModel(table), prompts, R, temperature, uniforms=u, batch_size=batch_size, text_ends=ends,
                           eos_ids=ids, pad_id=7)
            assert out["response_mask"].sum(1).tolist() == lengths
            assert out["finished"].tolist() == finished
            mask = out["response_mask"]
            assert torch.equal(out["tokens"][:, 1:][mask], whole["tokens"][:, 1:][mask])
            assert torch.equal(out["sampler_logprobs"][mask], whole["sampler_logprobs"][mask])
            assert (out["tokens"][:, 1:][~mask] == 7).all()


# what is refused


@pytest.mark.parametrize("text, want", {
    "": [], "</answer>": ["</answer>"], "a,b": ["a,b"], "['a', 'b c']": ["a", "b c"], "['\\n']": ["\n"], "['\n']": ["\n"],
    "\n\n": ["\n\n"], '["\\"", "]"]': ['"', "]"]}.items())
def test_how_stop_strings_are_written(text, want):
    assert parse_stop_strings(text) == want


@pytest.mark.parametrize("text", ["[", "[a]", "['a', 1]", "['a'", "['a'] + []", "[__import__('os')]", "['a', '']", "[" * 9999])
def test_what_is_no_list_of_texts(text):
    with pytest.raises(BadConfig, match="stop_strings = .*(wanted one text, or a list|is in every text)"):
        parse_stop_strings(text)


@pytest.mark.parametrize("name, strings, R, words", [
    ("bytes", ["a", "x<eos>"], 9, "'x<eos>' spells the special token '<eos>'"),
    ("bytes", ["<pad>"], 9, "spells the special token '<pad>'"),
    ("bytes", ["abc\u00e9"], 4, "has 5 tokens or more, so it can never occur within max_new_tokens = 4"),
    ("bytes", ["\udc80"], 4, "half a surrogate pair"),
    ("qwen2.5", ["<|im_end|>\n"], 9, "spells the special token '<|im_end|>'"),
    ("mistral", ["</s>"], 9, "spells the special token '</s>'")])
def test_a_stop_string_that_can_never_occur(tokenizer_of, name, strings, R, words):
    with pytest.raises(BadInput) as e:
        add_ends(tokenizer_of(name), "", repr(strings), R)
    assert words in str(e.value) and str(e.value).startswith("stop_strings: ")


def test_a_vocabulary_that_cannot_spell_it(tokenizer_of, monkeypatch):
    """Without the byte E9, "\\u9000" cannot be; with "." as an end of its own, neither can "a.b"."""
    tokenizer = tokenizer_of("bytes")
    pieces = [None if piece == b"\xe9" else piece for piece in tokenizer.pieces()[0]]
    monkeypatch.setattr(tokenizer, "pieces", lambda: (pieces, pieces))
    with pytest.raises(BadInput, match="can never occur: the tokenizer cannot spell it"):
        add_ends(tokenizer, "", "\u9000", 9)
    with pytest.raises(BadInput, match="'a.b' can never occur"):
        add_ends(tokenizer, str(ord(".")), "['a', 'a.b']", 9)
    tokenizer = tokenizer_of("bytes")
    add_ends(tokenizer, "", "['a', 'a.b']", 9)  # which is never the first one; that does no harm
    assert tokenizer.text_ends.strings == ["a", "a.b"]


# what the reward model reads


def test_the_reward_model_reads_an_eos_behind_a_stop_string(world):
    """By its own tokens and by the text: a row with a stop string, one with EOS, one cut off, one that fills the context."""
    tokenizer = load_tokenizer(world.policy)
    add_ends(tokenizer, "33", "['ab', ';']", 8)  # "!" is an end, too
    model = freeze(load_model(world.reward, head="scalar", dtype=torch.float64))
    eos = tokenizer.eos_id
    said = [[*b"cab"], [*b"3", eos], [*b"12345678"], [*b"1234567;"], [*b"12!"], [eos]]
    finished = [True, True, False, True, True, True]
    prompt, R, B = [*b"1+2="], 8, len(said)
    tokens = torch.full((B, 4 + R), tokenizer.pad_id)
    mask = torch.zeros(B, R, dtype=torch.bool)
    for i, ids in enumerate(said):
        tokens[i, :4], tokens[i, 4:4 + len(ids)], mask[i, :len(ids)] = torch.tensor(prompt), torch.tensor(ids), True
    batch = dict(tokens=tokens, attention_mask=torch.cat([torch.ones(B, 4, dtype=torch.bool), mask], 1), response_mask=mask,
                 finished=torch.tensor(finished), rows=[dict(prompt="1+2=")] * B,
                 completions=[tokenizer.decode_response(ids) for ids in said])
    read = [[*b"cab", eos], [*b"3", eos], [*b"12345678"], [*b"1234567;", eos], [*b"12!"], [eos]]

    def scores(rows):
        return torch.cat([score_sequences(model, torch.tensor([prompt + ids]), torch.ones(1, 4 + len(ids), dtype=torch.bool), 1)
                          for ids in rows])

    got = reward_model_scores(batch, model, tokenizer, tokenizer, 2)
    assert (got - scores(read)).abs().max() < 1e-12
    plain = reward_model_scores(batch, model, Reader(tokenizer, False, None), tokenizer, 2)
    read[4] = [*b"12!", eos]  # in the text every end becomes EOS
    assert (plain - scores(read)).abs().max() < 1e-12
    model.config.max_position_embeddings = 12  # a response that fills it is read as it is
    assert (reward_model_scores(batch, model, tokenizer, tokenizer, 2)[3] - scores([[*b"1234567;"]])[0]).abs() < 1e-12
    tokenizer.text_ends = None
    assert (reward_model_scores(batch, model, tokenizer, tokenizer, 2) - scores(said)).abs().max() < 1e-12


def test_the_end_behind_a_turn_is_that_of_the_chat(tokenizer_of):
    """Qwen2.5's base model ends with another token than the template's turns."""
    tokenizer = tokenizer_of("qwen2.5")
    ends = [tokenizer.end_of(prompt) for prompt in ([dict(role="user", content="x")], "x")]
    assert tokenizer.backend.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer_of("pythia").end_of([dict(role="user", content="x")]) == tokenizer_of("pythia").eos_id


# from end to end

STOPS = [*"abcdefghijklmnopqrstuvwxyz", "12", "\u00e9"]


@pytest.fixture(scope="module")
def done(tmp_path_factory, world):
    folder = str(tmp_path_factory.mktemp("runs"))
    more = dict(stop_strings=repr(STOPS), max_iters=2, dtype="float64", eval_interval=1, eval_size=12, samples_to_log=12)
    sampled = dict(policy_path=world.policy, prompts=world.rl_val, samples=4, max_new_tokens=8, device_type="cpu")
    judged = dict(policies=world.policy, prompts_path=world.rl_val, samples=4, max_new_tokens=8, device_type="cpu", out="eval")
    labels = dict(policy_path=world.policy, prompts_path=world.rl_train, out="labels.jsonl", device_type="cpu", max_new_tokens=8,
                  **{key: value for key, value in world.judged().items() if key != "reward_functions"})
    runs = {f"{script}{ends}": [one_run(f"{script}.py", *[getattr(world, script)("out", **keys)] * ranks)]
            for script in ("ppo", "grpo")
            for ends, keys, ranks in (("", more | dict(rollout_batch_size=5), 1), (" of two", more, 2),
                                      (" with roles", more | dict(roles="train=1,generate=1"), 2))}
    for name, file, keys in (("sample", "tools/sample.py", sampled), ("eval", "tools/eval.py", judged),
                             ("label", "data/label.py", labels)):
        runs[name] = [one_run(file, arguments(keys | dict(stop_strings=repr(STOPS))))]
    runs["never"] = [one_run("ppo.py", world.ppo("out", stop_strings="<eos>"))]
    return folder, forked(folder, runs)


def ended(text):
    """Whether a text ends with a stop string, and has no other one."""
    return text.endswith(tuple(STOPS)) and not any(s in text[:-1] for s in STOPS)


@pytest.mark.parametrize("script", ["ppo", "grpo"])
def test_training_with_stop_strings(done, script):
    """The sampler agrees with the trainer, responses end where they should, and neither ranks nor roles change a text."""
    folder, results = done
    logs = {}
    for name in (script, f"{script} of two", f"{script} with roles"):
        (result,) = results[name]
        assert set(result["codes"]) == {0}, result
        logs[name] = tiny.read_log(f"{folder}/{name}/out")
        with open(f"{folder}/{name}/out/samples.jsonl", encoding="utf-8") as f:
            samples = [json.loads(line) for line in f]
        assert len(samples) == 36
        stopped = [s for s in samples if ended(s["text"])]
        assert len(stopped) > 3 and all(s["finished"] for s in stopped)
        assert all(ended(s["text"]) or not any(x in s["text"] for x in STOPS) for s in samples)
        for record in logs[name][:-1]:
            assert record["policy/sampler_gap"] < 1e-10 and record["policy/ratio_gap"] < 1e-10
    texts = [[record.get("objective/texts") for record in log] for log in logs.values()]
    assert texts[0] == texts[1] == texts[2]


def test_tools_with_stop_strings(done, world):
    folder, results = done
    for name in ("sample", "eval", "label"):
        assert results[name][0]["codes"] == [0], results[name]
    with open(f"{folder}/eval/eval.jsonl", encoding="utf-8") as f:
        records = [json.loads(line) for line in f]
    assert sum(ended(r["text"]) for r in records) > 5
    assert all(r["finished"] for r in records if ended(r["text"]))
    shown = results["sample"][0]["stdout"][0]
    for r in records:  # the same samples of the same policy, where a text fits on a line
        if r["mode"] == "sampled" and ended(r["text"]):
            assert r["text"] + "\n" in shown
    with open(f"{folder}/label/labels.jsonl", encoding="utf-8") as f:
        pairs = [json.loads(line) for line in f]
    assert any(ended(pair["chosen"]) or ended(pair["rejected"]) for pair in pairs)


def test_a_run_says_so_in_one_line(done):
    (result,) = done[1]["never"]
    assert result["codes"] == [2] and len(result["stderr"][0].splitlines()) == 1
    assert "stop_strings: '<eos>' spells the special token" in result["stderr"][0]
