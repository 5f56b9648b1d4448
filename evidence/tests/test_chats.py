"""
Chats and texts in the tokenizers of models_of_the_world.py: messages become the very ids of
transformers' apply_chat_template, and of them SFT learns what the assistant says, exactly, or the
row is refused; text that spells a special token stays text; ends of responses.
"""
import inspect
import random
import re
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from unicodedata import normalize

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import chat_template_utils

import models_of_the_world as others
import tiny
from checkpoint import save_final
from configurator import read_json, read_keys, run_config_file, write_json
from demonstrations import dialogue, encode_learned
from errors import BadInput
from load import load
from options.chats import chats_of
from options.older_transformers import encode_chat
from test_model import CPU
from test_tokenizer import CHATML, assistant, turn, user
from tiny import assert_one_line, keys_of_system, run
from tokenizer import load_tokenizer

system = partial(turn, "system")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("others")
    return {name: others.make(root / name, name) for name in others.FAMILIES}


@pytest.fixture
def ours(folders):
    """A function: name, and keys -> our Tokenizer."""
    return lambda name, **keys: load_tokenizer(folders[name], keys_of_system(**keys))


@pytest.fixture(autouse=True)
def stop_clock(monkeypatch):
    """transformers' own clock, which its strftime_now reads, stands at the day of templates."""
    def stop_clock(*day):
        stopped = SimpleNamespace(now=lambda: datetime(*day))
        monkeypatch.setattr(chat_template_utils, "datetime", stopped)

    stop_clock(2024, 7, 26)
    return stop_clock


def spans(tokenizer, ids, trained):
    """The texts that are learned, each without a gap."""
    parts = groupby(zip(ids, trained, strict=True), lambda pair: pair[1])
    return [tokenizer.hf.decode([i for i, _ in part]) for learned, part in parts if learned]


# chats

THOUGHT = "<think>\n1+2\nis 3\n</think>\n\n3"
MORE = [assistant(THOUGHT), user("and 3?"), assistant(THOUGHT.replace("3", "6"))]
END_OF_TURN = {"llama3.2": "<|eot_id|>", "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>",
               "mistral": "</s>"}


def assert_as_transformers(t, name, prompt, completion):
    """The ids of a prompt, of a whole dialogue, and of a demonstration; what of it is learned."""
    ids, trained = encode_learned(t, prompt, completion)
    ids_of = partial(t.hf.apply_chat_template, return_dict=False)
    whole = ids_of(prompt + completion)
    assert t.encode_scored([prompt], [completion]) == [whole]
    assert t.encode_prompts([prompt]) == [ids_of(prompt, add_generation_prompt=True)]
    assert ids == whole[:len(ids)] and ids[-1] in t.eos_ids and not t.eos_ids & {*whole[len(ids):]}
    learned = spans(t, ids, trained)
    said = [m["content"] + END_OF_TURN[name] for m in completion[::2]]
    if name != "qwen2.5":  # many templates trim, and SentencePiece drops a first blank
        learned, said = (["".join(text.split()) for text in texts] for texts in (learned, said))
    learned, said = ([normalize("NFC", text) for text in texts] for texts in (learned, said))
    assert learned == said


PIECES = ["a", "Sure!", " ", "\n", "\n\n", "<think>", "</think>", "<", "assistant", "user",
          " Paris", "caf\u00e9", "\U0001f600", "1+2=3", "  ", "<tool_response>", "<|im_start",
          "[INST", "e\u0301", "\t", "It is", ".", "    return x", "\u4f60\u597d"]


def nonsense(name):
    """40 chats of a family, each with the number of an assistant's message."""
    rng = random.Random(5)
    for _ in range(40):
        chat = [system("".join(rng.choices(PIECES, k=3)))] * (
            name != "mistral" and rng.random() < 0.3)
        for _ in range(rng.randint(1, 3)):
            chat += [turn(role, "".join(rng.choices(PIECES, k=rng.randint(1, 7))))
                     for role in ("user", "assistant")]
        yield chat, rng.choice([i for i, m in enumerate(chat) if m["role"] == "assistant"])


@pytest.mark.parametrize("name", others.CHATS)
def test_rows_equal_apply_chat_template_or_are_refused(ours, name):
    """Blanks before a text are learned, or the row is refused; later thoughts, or the row is."""
    t, asked = ours(name), [user("1+2?")]
    rows = [(asked, MORE[:1], True), (asked, MORE, name != "qwen3")]
    if name != "qwen3":  # it writes thoughts that nobody said
        # a first line break would be one token with that of Qwen2.5's header; others trim
        kept = dict.fromkeys(others.CHATS, r"\S") | {"qwen2.5": "[^\n]", "mistral": r" {0,2}\S"}
        rows += [(chat[:n], chat[n:], all(re.match(rf"{kept[name]}|\s*\Z", m["content"])
                                          for m in chat[n::2])) for chat, n in nonsense(name)]
    for prompt, completion, learned in rows:
        with nullcontext() if learned else pytest.raises(BadInput, match=name):
            assert_as_transformers(t, name, prompt, completion)
    # a prompt that the response continues: one message, of which only what is new is learned
    prompt, whole = ([user("1+2?"), assistant(text)] for text in ("Sure! It", "Sure! It is 3."))
    ids_of = partial(t.hf.apply_chat_template, return_dict=False)
    assert t.encode_prompts([prompt]) == [ids_of(prompt, continue_final_message=True)]
    ids, trained = encode_learned(t, prompt, [assistant(" is 3.")])
    assert ids == ids_of(whole)[:len(ids)]
    # a blank at the beginning of a text is lost in SentencePiece's manner
    assert [x.strip() for x in spans(t, ids, trained)] == ["is 3." + t.hf.decode(ids[-1:])]
    if name not in ("qwen2.5", "qwen3"):
        with pytest.raises(BadInput, match="changes"):
            t.encode_prompts([[user("a"), assistant("    return")]])
    if name == "qwen3":  # its empty thoughts are then the prompt's
        t = ours(name, template_kwargs="enable_thinking=False")
        assert spans(t, *encode_learned(t, [user("a")], [assistant("b")])) == ["b<|im_end|>"]
        assert t.encode_prompts([[user("a")]]) == [
            ids_of([user("a")], add_generation_prompt=True, enable_thinking=False)]


ODD = {  # a template: whether one answer, and two answers, are learned
    CHATML: (True, True), CHATML.replace("<|im_end|>\n", "\n"): (False, False),  # no end
    "{{ messages | length }}" + CHATML: (False, False),  # earlier ids become others
    CHATML.replace("<|im_end|>\n", '" + ("" if message.role == "assistant" and not loop.last else '
                   '"<|im_end|>") + "\n'): (True, False),  # earlier ones have no end
    CHATML.replace("<|im_end|>", "<|im_end|><|endoftext|>"): (True, True)}


def test_odd_templates_are_learned_exactly_or_refused(ours, tmp_path):
    answers = [assistant("b"), user("c"), assistant("d")]
    for template, wanted in ODD.items():
        t = ours("qwen2.5", chat_template=tiny.write(tmp_path / "my.jinja", template))
        for count, learned in zip((1, 2), wanted, strict=True):
            with nullcontext() if learned else pytest.raises(BadInput):
                assert spans(t, *encode_learned(t, [user("a")], answers[:2 * count - 1])) == [
                    "b<|im_end|>", "d<|im_end|>"][:count], template


def written_as(content, which="true"):
    """A template that writes these messages so."""
    return f"{{% for m in messages if {which} %}}{{{{ {content} }}}}{{% endfor %}}"


SHORT = [system("s"), user("u"), assistant("a")]
NO_SYSTEM = written_as("m.role + m.content", "m.role != 'system'")
LEAVES_OUT = [  # a template, messages, the role whose text it leaves out
    (NO_SYSTEM, SHORT, "system"), (NO_SYSTEM, [user("u"), system("u"), user("u")], "system"),
    (written_as("m.content", "m.role != 'assistant'"), SHORT, "assistant"),
    ("{{ 'suu' + messages[-1].content }}", [user("u"), SHORT[2], user("v")], "user"),
    (written_as("m.content[:30]"), [user("long " * 9)], "user"),
    (written_as("m.content[-30:]"), [user("long " * 9)], "user"),
    (written_as(r"m.content | trim | replace('\n\n', '\n')"),
     [user(" a\n\nb \n"), assistant("\n"), user("")], None),
    (written_as("m.content.split('</think>')[-1].strip()"),
     [user("1+2?"), assistant(THOUGHT), user("u"), assistant("<think>[[3]]</think>")], None),
    ("{{ messages | tojson }}", [system('"'), user("caf\u00e9\n")], None)]


def test_a_template_that_leaves_a_message_out(ours, tmp_path):
    """However short the message is; blanks around it and the assistant's thoughts may go."""
    for template, messages, role in LEAVES_OUT:
        path = tiny.write(tmp_path / "my.jinja", template)
        chats = [(ours("qwen2.5", chat_template=path), messages)]
        if messages[0]["role"] == "system":
            chats += [(ours("qwen2.5", chat_template=path, system_prompt="s"), messages[1:])]
        for t, chat in chats:
            refused = pytest.raises(BadInput, match=f"{role}'s .*--chat_template")
            with refused if role else nullcontext():
                assert t.chats.ids_of(chat)


def test_pairs_that_become_the_same_tokens(folders, tmp_path):
    """By NFC, and by an unknown field: counted, with their rows' numbers; refused if all are."""
    said = [("c", "d" * 600), ("b", "c"), ("b", "b "), ("caf\u00e9", "cafe\u0301"), ("b", "b")]
    rows = [dict(prompt=[user("a")], chosen=[assistant(a)], rejected=[assistant(b)])
            for a, b in said]  # the first one is too long, and dropped
    rows[-1]["chosen"][0]["name"] = "x"
    keys = dict(init_from=folders["qwen2.5"], train_path=tiny.jsonl(tmp_path / "a.jsonl", rows),
                too_long="drop", device_type="cpu", batch_size=2, max_iters=1)
    result = run("rm.py", tmp_path, keys)
    (line,) = [line for line in result.out[0].splitlines() if "warning" in line]
    assert result.codes == [0] and "2 of 5 pairs" in line, result
    assert re.findall(r"\d+", line.split(" row ")[1]) == ["4", "5"]
    keys["train_path"] = tiny.jsonl(tmp_path / "same.jsonl", rows[3:])
    assert_one_line(run("rm.py", tmp_path / "same", keys), "rm.py", "2 of 2", "--chat_template")


def test_a_byte_order_mark_is_no_letter_of_a_persons_file(ours, tmp_path):
    """As some editors on Windows write it: in a template, a config file, JSON."""
    def marked(text):
        return tiny.write(tmp_path / "file.py", "\ufeff" + text)

    assert ours("qwen2.5", chat_template=marked(CHATML)).hf.chat_template == CHATML
    keys = read_keys(f"{tiny.ROOT}/config/keys.py")
    assert run_config_file(marked("timeout = 7\n"), keys) == dict(timeout=7)
    assert read_json(marked('{"a": 1}')) == dict(a=1)


# how templates write the date: an expression
DATES = ["strftime_now ('%d %b %Y') if strftime_now is defined else 'never'",
         'strftime_now( format="%Y-%m-%d")',
         "strftime_now('%A, %B %d, %Y, %H:%M:%S %p %j %U %%d%%%%')", "strftime_now('%Y') | int + 1",
         "date_string if date_string is defined else strftime_now('%D')"]


def test_no_template_reads_the_clock(ours, tmp_path, stop_clock, capsys):
    """
    Ids are those of transformers on 26 July 2024, or on the day that is typed, whatever day it is,
    and a line says so; what is saved has the publisher's template.
    """
    template = "".join("{{ " + date + " }}\n" for date in DATES) + CHATML
    file = tiny.write(tmp_path / "t.jinja", template)
    chat = [user("a"), assistant("b"), user("c")]
    for typed, day in (("", (2024, 7, 26)), ("strftime_now='2031-01-05'", (2031, 1, 5))):
        stop_clock(*day)
        wanted = ours("qwen2.5").hf.apply_chat_template(
            chat, chat_template=template, return_dict=False, add_generation_prompt=True)
        stop_clock(2026, 11, 29, 23, 59, 59, 7)
        capsys.readouterr()
        t = ours("qwen2.5", chat_template=file, template_kwargs=typed)
        assert "strftime_now=" in capsys.readouterr().out
        assert t.encode_prompts([chat]) == [wanted]
    t.save(str(tmp_path / "saved"))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == template
    dated = ours("llama3.2", template_kwargs="date_string='1 May, 1999'")
    assert "Today Date: 1 May, 1999\n" in dated.decode(dated.encode_prompts([chat])[0])


def test_a_clock_that_cannot_be_stopped_is_refused(ours):
    hf = ours("qwen2.5").hf
    for asks in ("{% macro day(f) %}{{ strftime_now(f) }}{% endmacro %}",
                 "{% set now = strftime_now %}", "{{ strftime_now ('%d' ~ '%m') }}"):
        for template in (asks, dict(default=CHATML, tool_use=asks)):
            hf.chat_template = template
            with pytest.raises(BadInput, match="clock"):
                chats_of(hf, "x", keys_of_system())
    with pytest.raises(BadInput, match="strftime_now"):
        ours("qwen2.5", template_kwargs="strftime_now='2025-02-30'")


# strings and special tokens

BEHIND = [("1+2=", "3"), ("def f():\n", "    return 1"), ("a ", "b"), ("a", "\n\n b"),
          ("caf", "\u00e9 \u4f60"), ("a", "")]


@pytest.mark.parametrize("name", others.FAMILIES)
def test_strings_are_as_they_are_and_special_tokens_in_them_stay_letters(ours, name):
    """A completion stands right behind its prompt, also in SentencePiece's manner."""
    t = ours(name)
    for prompt, completion in BEHIND:
        ids, trained = encode_learned(t, prompt, completion)
        start = trained.index(True)
        assert ids[:start] == t.encode_prompts([prompt])[0] and all(trained[start:])
        assert t.decode(ids[len(t.bos_ids):]) == prompt + completion and ids[-1] == t.eos_id
        for asked in (prompt, [user("?"), assistant(prompt)]):
            assert t.decode_response(ids[start:], asked) == completion, (prompt, completion)
    special = set(t.specials.values())
    for text in t.specials:
        assert not special & {*t.encode_texts([f"a {text}{text} b"])[0]}
        assert t.decode(t.encode_texts([f"a {text} b"])[0]) == f"a {text} b"
        if t.chats:  # in everybody's messages
            plain, evil = (
                [[i for i in ids if i in special] for ids in (
                    t.encode_scored([[user(a)]], [[assistant(b)]]) + t.encode_prompts([[user(a)]]))]
                for a, b in (("a", "b"), (f"a {text} b ", f"{text}\n{text}")))
            assert evil == plain


def test_texts_are_cut_as_tokenizer_json_says(ours, folders, tmp_path):
    """As SmolLM2's, whose class has other rules for line breaks, digits and blanks."""
    folder, saved = str(tmp_path), str(tmp_path / "saved")
    others.make_tokenizer(folder, "llama3.2")
    texts = ["a\n\n12", "e\u0301 ", " A1b\n\n\n", "it\t3.5?", "x 1234", "it's"]
    plain = partial(Tokenizer.encode, add_special_tokens=False)
    wanted = [plain(Tokenizer.from_file(f"{folder}/tokenizer.json"), text).ids for text in texts]
    for kind, family in (("GPT2Tokenizer", "llama"), ("LlamaTokenizerFast", "deepseek_v3"),
                         ("PreTrainedTokenizerFast", "qwen2")):
        write_json(f"{folder}/config.json", dict(model_type=family))
        write_json(f"{folder}/tokenizer_config.json",
                   dict(tokenizer_class=kind, eos_token="<|eot_id|>"))
        t = load_tokenizer(folder, keys_of_system())
        t.save(saved)
        again = load_tokenizer(saved, keys_of_system())
        assert t.encode_texts(texts) == again.encode_texts(texts) == wanted, kind
        assert list(map(t.text_of, wanted)) == texts
    # blanks before each piece between special tokens, and to a blank, too; version 5 has others
    hf, backend = ours("mistral").hf, Tokenizer.from_file(f"{folders['mistral']}/tokenizer.json")
    for text in ("a</s>a", "a</s>\na", " a", "[INST] a [/INST]a</s>[INST] a"):
        assert hf.encode(text, add_special_tokens=False) == plain(backend, text).ids, text


@pytest.mark.parametrize("name", others.CHATS)
def test_older_transformers_write_the_same_ids(name, folders):
    """options/older_transformers.py, beside transformers' own sanitize_control_tokens."""
    hf = AutoTokenizer.from_pretrained(folders[name])
    hf.chat_control_tokens = []
    specials = {t.content: i for i, t in hf.added_tokens_decoder.items() if t.special}
    sanitizes = "sanitize_control_tokens" in inspect.signature(hf.apply_chat_template).parameters
    ids_of = partial(hf.apply_chat_template, return_dict=False, add_generation_prompt=True)
    bare = [i for i in ids_of([user("o?"), assistant("o"), user("o")]) if i in specials.values()]
    for text in ("", " a  b", "no <|im_end|", *specials, *(f"a {x}{x} b\n" for x in specials)):
        chat = [user(f"{text}?"), assistant(text or "x"), user(text or "y")]
        got = encode_chat(hf, chat, specials, partial(hf.apply_chat_template, tokenize=False),
                          add_generation_prompt=True)
        assert not sanitizes or got == ids_of(chat, sanitize_control_tokens=True)
        assert [i for i in got if i in specials.values()] == bare, text


SPELLED = [  # a family, rows of a file; how many of them are counted, and a mark of the first
    ("qwen2.5", [dict(prompt="<|im_start|>user\nhi<|im_end|>"), dict(prompt="a"),
                 dict(prompt="<start_of_turn>user")], 2, "<|im_start|>"),  # also of other families
    ("mistral", [dict(prompt="a", chosen="b", rejected="c</s>")], 1, "</s>"),
    ("qwen3", [dict(prompt=[user("a")], completion=[assistant("yes<|im_end|>")])], 1, ""),
    ("qwen3", [dict(prompt="<think>", completion="a <| b |>"),
               dict(prompt="</s> [INST]", completion="")], 0, "")]


def test_special_tokens_in_a_text_are_said(ours, capsys):
    """They stay plain text; once a file, with the number of rows; not tokens such as <think>."""
    for name, rows, count, mark in SPELLED:
        ours(name).say_marks(rows, list(rows[0]), "my.jsonl")
        said = capsys.readouterr().out
        assert mark in said
        assert f"my.jsonl: {count} of {len(rows)} rows" in said if count else not said


def test_strings_for_a_model_with_a_template(ours, capsys):
    """All strings: said; strings beside messages: refused; whose system message is it: said."""
    chat, led = dict(prompt=[user("a")]), dict(prompt=[system("s"), user("a")])
    chats = ours("qwen2.5", system_prompt="be kind").chats
    for rows, words in ([dict(prompt="a")] * 3, "strings"), ([chat] * 3, ""), (
            [led, chat, led], "2 of 3 rows"):
        chats.check_kinds(rows, "my.jsonl")
        said = capsys.readouterr().out
        assert words in said and bool(said) == bool(words)
    for rows in ([chat, chat, dict(prompt="a")], [dict(prompt="a"), led]):
        with pytest.raises(BadInput, match=r"my.jsonl: .*row [13] .*row [12]"):
            chats.check_kinds(rows, "my.jsonl")


def test_messages_written_as_text_are_refused():
    """A table of CSV has them: they would be learned letter by letter."""
    as_text = ['[{"role": "user", "content": "a"}]', "  [ {'content' :'a'}]",
               '[{"from": "human"}]', "[\n  {\n    'role': 'user'"]
    for text in [*as_text, "[1, 2]", '{"content": "a"} in French?', "a [{'role': 'user'}]", "[{"]:
        for field in ("prompt", "completion"):
            row = dict(prompt="a", completion="b") | {field: text}
            with pytest.raises(BadInput, match=field) if text in as_text else nullcontext():
                assert dialogue(row, "completion") == row


# ends of responses

QWEN = ["<|endoftext|>", "<|im_end|>"]
ENDS = {"llama3.2": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "qwen2.5": QWEN,
        "mistral": ["</s>"], "pythia": QWEN[:1]}


@pytest.mark.parametrize("name", ENDS)
def test_all_ends_of_a_saved_policy(folders, tmp_path, name):
    """Of generation_config.json, config.json, tokenizer, template."""
    model = load(folders[name], "policy", keys_of_system(), CPU)
    save_final(str(tmp_path), name, model)
    theirs, saved = AutoTokenizer.from_pretrained(tmp_path / name), str(tmp_path / name)
    wanted = sorted(theirs.convert_tokens_to_ids(ENDS[name]))
    assert sorted(model.tokenizer.eos_ids) == wanted
    assert load(saved, "policy", keys_of_system(), CPU).tokenizer.eos_ids == set(wanted)
    assert GenerationConfig.from_pretrained(saved).eos_token_id == wanted
    text = "caf\u00e9 it's <b> \U0001f600 two  blanks \n"
    assert theirs(text)["input_ids"] == AutoTokenizer.from_pretrained(
        folders[name])(text)["input_ids"]


def test_a_tokenizer_that_has_more_tokens_than_the_model(folders, tmp_path):
    """Gemma 3 1B has a token for images without an embedding: no text becomes it."""
    model = load(folders["pythia"], "policy", keys_of_system(), CPU)
    theirs = AutoTokenizer.from_pretrained(folders["pythia"])
    size = model.hf.config.vocab_size = len(theirs)
    theirs.add_tokens(["<image>"], special_tokens=True)
    theirs.save_pretrained(tmp_path)
    t = load_tokenizer(str(tmp_path), keys_of_system())
    t.match_model(model, "some/path")
    assert t.vocab_size == size
    model.hf.config.vocab_size = size - 1
    with pytest.raises(BadInput, match="some/path"):
        t.match_model(model, "some/path")
