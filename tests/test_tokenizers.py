"""
The tokenizer room: messages become the very ids of transformers' apply_chat_template, for every kind of row, in the
templates of models_of_the_world.py; of them SFT trains what the assistant says, ends of turn included; text that spells a
special token stays text; and the built-in tokenizer's ids, by hand.
"""
import json
import os
import random
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from examples import encode_examples, encode_scored
from prompts import encode_prompts
from answers import whole_responses
from rollout import texts_of
from tokenizer import Tokenizer, check_tokenizer_fits, load_tokenizer
from errors import BadInput
from completions import sft_row

import models_of_the_world as world
import tiny
from tiny import assistant, system, user


@pytest.fixture(scope="module")
def tokenizers(families):
    """{name: (ours, transformers')}"""
    return {name: (load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)) for name, folder in families.items()}


def encoded(tokenizer, prompt, completion):
    """(ids, trained) of one row; a text behind messages is the assistant's."""
    if isinstance(completion, str) and not isinstance(prompt, str):
        completion = [assistant(completion)]
    (ids, trained), = encode_examples([dict(prompt=prompt, completion=completion)], "f", tokenizer, 10**6)
    return ids.tolist(), trained.tolist()


def opened(tokenizer, prompt):
    return tokenizer.encode_prompts([prompt])[0]


def spans(tokenizer, ids, trained):
    """The texts that are trained, each without a gap."""
    found = []
    for i, one, before in zip(ids, trained, [False, *trained], strict=False):
        if one:
            found += [] if before else [[]]
            found[-1].append(i)
    return [tokenizer.hf.decode(span) for span in found]


# ---------------------------------------------------------------------------------------------------------------------
# the built-in tokenizer

TRICKY = ["", " ", "Hello  world \n\n\t \r\n", "caf\u00e9 \u4f60\u597d\uff0c", "\x00\x01\x7f\x85\u200b", "<eos><pad>",
          "\ufffd\ufeff", "<thi<think>nk>", "<think> a </think>b", "".join(map(chr, range(0x3000)))]


def by_hand(text):
    """The ids of the byte tokenizer: markers are 256 and 257, everything else is its bytes."""
    pieces = re.split("(<think>|</think>)", text)
    return [i for piece in pieces for i in {"<think>": [256], "</think>": [257]}.get(piece, piece.encode())]


def test_the_toys_ids(tmp_path):
    """Also as transformers reads what we save, and broken characters come back as Python shows them."""
    ours = tiny.byte_tokenizer()
    ours.save(tmp_path)
    again, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.vocab_size, ours.eos_id, ours.pad_id, ours.eos_ids, ours.bos_ids) == (260, 258, 259, {258}, [])
    assert again.fingerprint == ours.fingerprint != tiny.byte_tokenizer([]).fingerprint
    for tokenizer in (ours, again):
        assert tokenizer.encode_texts(TRICKY) == [by_hand(text) for text in TRICKY]
        assert [tokenizer.decode(by_hand(text)) for text in TRICKY] == TRICKY
    assert all(theirs.encode(text, split_special_tokens=True) == by_hand(text) for text in TRICKY)
    rng = random.Random(0)
    for _ in range(300):
        broken = bytes(rng.choices(range(256), k=12))
        assert ours.decode([*broken, 258]) == broken.decode(errors="replace")
    assert ours.decode([256, *b"7<eos>", 257, 258, 259]) == "<think>7<eos></think>"
    assert encoded(ours, "1+", "2") == ([49, 43, 50, 258], [False, False, True, True])
    assert ours.encode_scored(["1+"] * 2, ["2"] * 2, [True, False]) == [[49, 43, 50, 258], [49, 43, 50]]
    assert ours.encode_scored(["1+"], ["2"], longest=2) == [[49, 43]]
    with pytest.raises(BadInput, match="template"):
        opened(ours, [user("hi")])


# ---------------------------------------------------------------------------------------------------------------------
# chats

THOUGHT = "<think>\n1+2\nis 3\n</think>\n\n3"
ROWS = {  # name: (prompt, completion, which families take it)
    "system": ([system("Be brief. "), user("What?")], [assistant("Paris")], ["llama3.2", "qwen2.5", "qwen3"]),
    "several answers": ([user("What is 1+2?")],
                        [assistant("3"), user("sure?"), assistant("Sure!"), user("why"), assistant("it is")], world.CHATS),
    "blanks": ([user("  two  spaces \n")], [assistant("\n\n  Sure!\n "), user("\t"), assistant(" user\n")], world.CHATS),
    "unicode": ([user("caf\u00e9 \u4f60\u597d")], [assistant("\U0001f600e\u0301 na\u00efve")], world.CHATS),
    "thoughts": ([user("1+2?")], [assistant(THOUGHT)], world.CHATS),
    "more thoughts": ([user("1+2?")], [assistant(THOUGHT), user("and 3?"), assistant(THOUGHT.replace("3", "6"))],
                      [name for name in world.CHATS if name != "qwen3"]),
}
OPENS, ENDS = '{{- "<|im_start|>assistant\\n" }}', '{{- "<|im_end|>\\n" }}'  # of an assistant's turn in Qwen3's template,
SPOKEN = world.QWEN3.split(OPENS)[1].split(ENDS)[0]  # and what it writes between them
# a family's turn in its template; the same in pieces: the header, what the assistant says with its end, what is behind it
GENERATED = {
    "qwen3": (OPENS + SPOKEN + ENDS, OPENS, SPOKEN + '{{- "<|im_end|>" }}', '{{- "\\n" }}'),
    "llama3.2": ('{{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" + message["content"] | trim + "<|eot_id|>" }}',
                 '{{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" }}',
                 '{{- message["content"] | trim + "<|eot_id|>" }}', ''),
    "qwen2.5": ('{{- "<|im_start|>" + message["role"] + "\\n" + message["content"] + "<|im_end|>\\n" }}',
                '{{- "<|im_start|>" + message["role"] + "\\n" }}', '{{- message["content"] + "<|im_end|>" }}', '{{- "\\n" }}'),
    "mistral": ('{{- " " + message["content"] | trim + eos_token }}',
                '', '{{- " " + message["content"] | trim + eos_token }}', ''),
    "gemma": ('{{- "<start_of_turn>" + role + "\\n" + message["content"] | trim + "<end_of_turn>\\n" }}',
              '{{- "<start_of_turn>" + role + "\\n" }}', '{{- message["content"] | trim + "<end_of_turn>" }}', '{{- "\\n" }}')}


def marked(name):
    """A family's template that marks {% generation %}, which tells transformers the tokens that are the assistant's."""
    turn, head, text, behind = GENERATED[name]
    assert world.FAMILIES[name]["template"].count(turn) == 1
    return world.FAMILIES[name]["template"].replace(turn, (
        head + "{%- if message['role'] == 'assistant' %}{%- generation -%}" + text + "{%- endgeneration -%}{%- else %}"
        + text + "{%- endif %}" + behind))


def is_as_transformers_has_it(tokenizers, name, prompt, completion):
    """Prompts, whole dialogues as reward models read them, and demonstrations up to the last end of turn, with their mask."""
    ours, theirs = tokenizers[name]
    ids, trained = encoded(ours, prompt, completion)
    want = theirs.apply_chat_template(prompt + completion, chat_template=marked(name), return_dict=True,
                                      return_assistant_tokens_mask=True)
    whole = want["input_ids"]
    assert whole == theirs.apply_chat_template(prompt + completion, return_dict=False)
    assert ours.encode_scored([prompt], [completion]) == [whole]
    assert ids == whole[:len(ids)] and ids[-1] in ours.eos_ids and not ours.eos_ids & {*whole[len(ids):]}
    # without the turns of the prompt
    skip, turns = sum(m["role"] == "assistant" for m in prompt), 0
    for one, before, mine in zip(want["assistant_masks"], [0, *want["assistant_masks"]], trained, strict=False):
        turns += one > before
        assert mine == (one == 1 and turns > skip), (prompt, completion)
    before = opened(ours, prompt)
    assert before == theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    return ids[:len(before)] == before  # what RL begins with is their beginning


@pytest.mark.parametrize("name", world.CHATS)
def test_rows_equal_apply_chat_template(tokenizers, name):
    for row, (prompt, completion, families) in ROWS.items():
        if name in families:
            assert is_as_transformers_has_it(tokenizers, name, prompt, completion) or row == "blanks"


PIECES = ["a", "Sure!", " ", "\n", "\n\n", "<think>", "</think>", "<", "assistant", "user", " Paris", "caf\u00e9", "\U0001f600",
          "1+2=3", "  ", "<tool_response>", "<|im_start", "[INST", "e\u0301", "\t", "It is", "."]


@pytest.mark.parametrize("name", ["llama3.2", "qwen2.5", "mistral", "gemma"])
def test_nonsense_equals_apply_chat_template(tokenizers, name):
    rng = random.Random(5)
    for _ in range(60):
        chat = [system("".join(rng.choices(PIECES, k=3)))] * (name not in ("mistral", "gemma") and rng.random() < 0.3)
        for _ in range(rng.randint(1, 3)):
            chat += [dict(role=role, content="".join(rng.choices(PIECES, k=rng.randint(1, 7)))) for role in ("user", "assistant")]
        first = rng.choice([i for i, m in enumerate(chat) if m["role"] == "assistant"])
        is_as_transformers_has_it(tokenizers, name, chat[:first], chat[first:])


@pytest.mark.parametrize("name", world.CHATS)
def test_a_prefill(tokenizers, name):
    """A completion goes on with the prompt's last message: they are one message, and only what is new is trained."""
    ours, theirs = tokenizers[name]
    prompt, whole = [user("1+2?"), assistant("Sure! It")], [user("1+2?"), assistant("Sure! It is 3.")]
    assert opened(ours, prompt) == theirs.apply_chat_template(prompt, continue_final_message=True, return_dict=False)
    for completion in (" is 3.", [assistant(" is 3.")]):
        ids, trained = encoded(ours, prompt, completion)
        assert ids == theirs.apply_chat_template(whole, return_dict=False)[:len(ids)] and ids[-1] in ours.eos_ids
        # transformers drops a blank at the beginning of a text, if the tokenizer is in SentencePiece's manner
        assert [span.strip() for span in spans(ours, ids, trained)] == ["is 3." + theirs.decode(ids[-1:])]


BEHIND = [("Q: 1+2? A:", " 3"), ("1+2=", "3"), ("def f():\n", "    return 1"), ("a ", "b"), ("a", "\n\n b"),
          ("caf", "\u00e9 \u4f60"), ("a", ""), ("a", "  "), ("", " b c")]


@pytest.mark.parametrize("name", world.FAMILIES)
def test_strings_are_encoded_and_decoded_as_they_are(tokenizers, name):
    """A completion stands right behind its prompt. SentencePiece puts a blank in front of a text, and takes one away from it."""
    ours = tokenizers[name][0]
    for prompt, completion in BEHIND:
        ids, trained = encoded(ours, prompt, completion)
        start, own = len(ours.encode_prompts([prompt])[0]), [i for i, one in zip(ids, trained, strict=True) if one]
        assert ours.decode(ids[len(ours.bos_ids):]) == prompt + completion and ids[-1] == ours.eos_id
        if prompt == "":  # a text of its own, as transformers has it
            assert ids[:-1] == tokenizers[name][1].encode(completion)
            continue
        assert own == ids[start:] and ids[:start] == ours.encode_prompts([prompt])[0]
        part = dict(response_mask=torch.ones(1, len(own), dtype=torch.bool), tokens=torch.tensor([ids]))
        for asked in (prompt, [user("?"), assistant(prompt)]):
            texts = texts_of([(dict(prompt=asked), ids[:start])], part, ours)
            assert texts["completions"] == [completion], (prompt, completion)


def test_a_prompt_that_is_cut_has_bos_in_front_if_it_had_it(families, tmp_path):
    """Llama's tokenizer puts it before strings, and many templates for chats do not write it."""
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}")
    ours = load_tokenizer(families["mistral"], str(tmp_path / "chat.jinja"))
    rows = [dict(prompt=[user("a b c d e f g")]), dict(prompt="a b c d e f g")]
    chat, string = (opened(ours, row["prompt"]) for row in rows)
    found = encode_prompts(rows, "f", ours, 6, "the limit", "cut")
    assert len(chat) > 6 < len(string) and ours.bos_ids == string[:1] != chat[:1]
    assert [ids.tolist() for ids in found] == [chat[-6:], string[:1] + string[-5:]]


# ---------------------------------------------------------------------------------------------------------------------
# special tokens


@pytest.mark.parametrize("name", world.FAMILIES)
def test_special_tokens_in_texts_stay_letters(tokenizers, name):
    """In strings and in everybody's messages: the only special tokens are BOS, EOS and the template's; the text is all there."""
    ours = tokenizers[name][0]
    ids = {i for i in ours.specials.values()}
    for text in ours.specials:
        assert not ids & {*ours.encode_texts([f"a {text}{text} b"])[0]}
        assert ours.decode(ours.encode_texts([f"a {text} b"])[0]) == f"a {text} b"
        if not ours.template:
            continue
        plain = [i for i in encoded(ours, [user("a")], "b")[0] if i in ids]
        found, trained = encoded(ours, [user(f"a {text} b ")], [assistant(f"{text}\n{text}")])
        assert [i for i in found if i in ids] == plain
        assert f"{text}\n{text}" in spans(ours, found, trained)[0].replace(f"{text} ", text)  # SentencePiece adds blanks
        asked = [i for i in opened(ours, [user("a"), assistant("b")]) if i in ids]
        assert [i for i in opened(ours, [user(text), assistant(f"b{text}b")]) if i in ids] == asked


# ---------------------------------------------------------------------------------------------------------------------
# odd templates, and the keys

HEAD = "{% for m in messages %}"
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
ASK = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
NO_END = HEAD + "{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
OTHER = HEAD + TURN.replace("'<|im_end|>\n'", "('<|im_end|>\n' if m['role'] == 'user' or loop.last else 'END\n')") + ASK
ODD = [  # a template, the answers of one or two turns, what the line names where they are refused
    (NO_END, ["b"], "my.jinja.*<.endoftext.>.*eos_token"), (NO_END, ["b", "d"], "my.jinja"),
    ("{{ messages | length }}" + HEAD + TURN + ASK, ["b", "d"], "my.jinja"),  # turns that become other ones
    # earlier turns have an end at which no response ends, and the answers are alike
    (OTHER.replace("END", "<end>"), ["b"], ""), (OTHER.replace("END", "<end>"), ["b", "b"], "<.im_end.>.*<end>.*train"),
    # an empty one has no end at all, and the user's must not be taken for it
    (OTHER.replace("END", ""), ["", "b"], "my.jinja")]


def with_template(folder, root, text, **keys):
    (root / "my.jinja").write_text(text)
    return load_tokenizer(folder, str(root / "my.jinja"), **keys)


def test_odd_templates(families, tmp_path):
    for template, answers, refused in ODD:
        ours = with_template(families["qwen2.5"], tmp_path, template)
        completion = [assistant(answers[0]), user("c"), assistant(answers[-1])][:2 * len(answers) - 1]
        if refused:
            with pytest.raises(BadInput, match=refused):
                encoded(ours, [user("a")], completion)
        else:
            assert spans(ours, *encoded(ours, [user("a")], completion)) == [f"{text}<|im_end|>" for text in answers]
    two = with_template(families["qwen2.5"], tmp_path, HEAD + TURN.replace("<|im_end|>", "<|im_end|><|endoftext|>") + ASK)
    assert two.turn_ends == {two.specials["<|im_end|>"]}
    off = load_tokenizer(families["qwen3"], template_kwargs="enable_thinking=False")
    assert spans(off, *encoded(off, [user("a")], "b")) == ["b<|im_end|>"]  # the empty thoughts are the prompt's
    with pytest.raises(BadInput, match="qwen3"):
        encoded(off, [user("a")], [assistant("b"), user("c"), assistant("d")])


# ---------------------------------------------------------------------------------------------------------------------
# thoughts, and turns that must not be learned

HEADER, EMPTY = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
ANSWER = "m['content'].split('</think>')[-1]"
THINKING = {  # how a template writes an assistant's message
    "plain": "m['content']", "cuts": ANSWER, "cuts earlier": f"m['content'] if loop.last else {ANSWER}",
    "empty": f"'{EMPTY}' + m['content']", "glues": "(m['reasoning_content'] or '') + m['content']",
    "reads": "('<think>\n' + m['thinking'] + '\n</think>\n\n' if m['thinking'] else '') + m['content']",
    "untags": "m['content'] | replace('<think>', '') | replace('</think>', '')", "shortens": "m['content'][:7]",
    "squeezes": "m['content'].split() | join(' ')"}
BODY = "add  them:\n\n\t1+2\n</think>\n\ndef f():\n    return  3"
FULL, CODE = f"<think>\n{BODY}", "def f():\n    return  3"
APART = dict(reasoning="add  them:\n\n\t1+2")
ONE = {"plain": [assistant(CODE)], "thinks": [assistant(FULL)], "field": [assistant(CODE) | APART],
       "both": [assistant(FULL) | APART], "two": [assistant(FULL), user("?"), assistant(FULL)],
       "two plain": [assistant(CODE), user("?"), assistant(CODE)],
       "last of two": [assistant("old") | dict(weight=0), user("?"), assistant(FULL)]}
WRITTEN = dict.fromkeys(("thinks", "both", "last of two"), [FULL])  # as it is written behind the header
WANTED = {  # (how, the end of the generation prompt): {row: the texts that are learned}; no entry: refused
    ("plain", ""): WRITTEN | {"plain": [CODE], "two plain": [CODE] * 2, "two": [FULL] * 2},
    ("cuts", ""): WRITTEN | {"plain": [CODE], "two plain": [CODE] * 2},
    ("cuts", "<think>\n"): dict.fromkeys(("thinks", "field", "both", "last of two"), [BODY]),
    ("cuts", "<think>"): dict.fromkeys(("thinks", "both", "last of two"), ["\n" + BODY]) | {"field": [BODY]},
    ("cuts earlier", ""): WRITTEN | {"plain": [CODE], "two plain": [CODE] * 2},
    ("empty", ""): WRITTEN | {"plain": [EMPTY + CODE], "two plain": [EMPTY + CODE] * 2},
    ("empty", EMPTY): {"plain": [CODE], "two plain": [CODE] * 2},
    ("glues", ""): WRITTEN | {"plain": [CODE], "two plain": [CODE] * 2, "two": [FULL] * 2},
    ("reads", ""): WRITTEN | {"plain": [CODE], "two plain": [CODE] * 2, "two": [FULL] * 2, "field": [FULL]},
    ("untags", ""): WRITTEN | {"plain": [CODE], "two plain": [CODE] * 2},
    ("shortens", ""): {}, ("squeezes", ""): {}}


def thinking(families, root, how, opening):
    """Qwen3's tokenizer with a template that writes an assistant's message so, and opens a response with this text."""
    return with_template(families["qwen3"], root, (
        HEAD + "{% if m['role'] == 'assistant' %}{{ '" + HEADER + "' + (" + THINKING[how] + ") + '<|im_end|>\n' }}{% else %}"
        + TURN + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '" + HEADER + opening + "' }}{% endif %}"))


def is_learned(ours, completion, texts):
    """Of a completion these texts, by hand, and behind what the policy is given to answer; None: it is refused."""
    row = sft_row(dict(prompt=[user("use <think> and </think>")], completion=completion))
    if texts is None:
        with pytest.raises(BadInput, match="^f, row 1: .*my.jinja.*--chat_template=FILE"):
            encode_examples([row], "f", ours, 999)
        return
    ids, trained = encoded(ours, row["prompt"], row["completion"])
    assert spans(ours, ids, trained) == [text + "<|im_end|>" for text in texts], completion
    if len(completion) == 1:
        assert ids[:trained.index(True)] == opened(ours, row["prompt"]), completion


@pytest.mark.parametrize(("how", "opening"), WANTED)
def test_a_message_is_learned_as_it_is_written_or_refused(families, tmp_path, how, opening):
    ours = thinking(families, tmp_path, how, opening)
    for row, completion in ONE.items():
        if (how, row) != ("glues", "both"):  # the same thoughts once more in front of the content: this is not noticed
            is_learned(ours, completion, WANTED[how, opening].get(row))


TWICE = dict(thinking=APART["reasoning"])
EXACT = [  # how, the end of the generation prompt, the completion, the texts that are learned; None: refused
    ("cuts", "", [assistant(EMPTY + "3")], [EMPTY + "3"]),
    ("cuts earlier", "", [assistant(EMPTY + "3"), user("?"), assistant("4")], None),
    ("plain", "", [assistant(FULL) | dict(thinking="3")], None),  # this 3 is not in the content's thoughts
    ("reads", "", [assistant(FULL) | TWICE], [FULL]),
    ("reads", "", [assistant(FULL) | dict(thinking=" \n")], [FULL]),
    ("reads", "", [assistant(FULL) | dict(thinking="other")], None),
    ("twice", "", [assistant("3")], ["3"]),
    ("twice", "", [assistant("3"), user("?"), assistant("4")], None),
    ("channel", "", [assistant(CODE) | TWICE], [f"[thoughts] {TWICE['thinking']} [says] {CODE}"]),
    ("channel", "", [assistant(CODE), user("?"), assistant("4")], [f"[says] {CODE}", "[says] 4"]),
    ("channel", "", [assistant(FULL) | TWICE], [f"[says] {FULL}"]),
    ("empty", "<think>\n", [assistant("3")], ["\n</think>\n\n3"]),  # two line breaks, which are one token elsewhere
    ("empty", "<think>", [assistant("3")], ["\n\n</think>\n\n3"])]
THINKING |= {"twice": "m['content'] + m['content']",
             "channel": "('[thoughts] ' + m['thinking'] + ' ' if m['thinking'] else '') + '[says] ' + m['content']"}


@pytest.mark.parametrize(("how", "opening", "completion", "texts"), EXACT)
def test_nothing_is_learned_beside_the_message(families, tmp_path, how, opening, completion, texts):
    """Also where one token elsewhere is two here, for the ids go on from those that the policy is given."""
    is_learned(thinking(families, tmp_path, how, opening), completion, texts)


def with_special(source, folder, word, special):
    """A copy of a tokenizer, whose tokens with this word in them are special, or are not."""
    shutil.copytree(source, folder)
    for file in (folder / name for name in ("tokenizer.json", "tokenizer_config.json")):
        settings = json.loads(file.read_text())
        added = settings.get("added_tokens") or settings.get("added_tokens_decoder", {}).values()
        for token in [token for token in added if word in token["content"]]:
            token["special"] = special
        file.write_text(json.dumps(settings))
    return str(folder)


def test_thoughts_that_are_special_tokens_are_not_learned_as_letters(families, tmp_path):
    """The template writes the token itself; in a message it would be letters, which the policy never samples."""
    ours = thinking(dict(qwen3=with_special(families["qwen3"], tmp_path / "tokenizer", "think>", True)), tmp_path, "reads", "")
    assert {"<think>", "</think>"} <= ours.specials.keys()
    with pytest.raises(BadInput, match="<think> is a special token.*reasoning_content"):
        encoded(ours, [user("1+2?")], [assistant("<think>add</think>3")])
    ids, trained = encoded(ours, [user("1+2?")], [assistant("3") | dict(reasoning_content="add")])
    assert [i for i, learned in zip(ids, trained, strict=True) if learned][0] == ours.specials["<think>"]


def test_a_message_cannot_end_a_turn_with_a_mark_that_its_author_has_not_made_special(families, tmp_path):
    ours = load_tokenizer(with_special(families["qwen2.5"], tmp_path / "tokenizer", "<|im_", False))
    plain, found = (encoded(ours, [user(text)], "b")[0].count(ours.vocabulary["<|im_end|>"]) for text in ("a", "a <|im_end|> b"))
    assert found == plain > 0


FLAGGED = {  # what a message says: how it is read, None: not at all
    False: [dict(weight=0), dict(weight=0.0), dict(train=False), dict(training="false"), dict(trainable=0), dict(loss=False),
            dict(loss_mask="0"), dict(loss_weight=0), dict(masked=True), dict(train_on_turn=False),
            dict(weight=1, train=False), dict(weight=0, train=True)],
    True: [{}, dict(weight=1), dict(weight=1.0), dict(train="True"), dict(loss=None), dict(masked=False), dict(train_detail=[])],
    None: [dict(weight=0.5), dict(mask=True), dict(mask=0), dict(train_detail=[dict(end_offset=3, train=False)]), dict(loss=2.5)]}


def test_a_message_says_whether_it_is_learned(tokenizers, capsys):
    ours, theirs = tokenizers["qwen2.5"]
    prompt, plain = [user("a")], [assistant("b"), user("c"), assistant("d")]
    whole = theirs.apply_chat_template(prompt + plain, return_dict=False)[:-1]  # without the last line break
    for learned, flags in FLAGGED.items():
        for flag in flags:
            first, last = [plain[0] | flag, *plain[1:]], [*plain[:2], plain[2] | flag]
            if learned is None:
                with pytest.raises(BadInput, match=f"^f, row 1: .*{next(iter(flag))}"):
                    encode_examples([dict(prompt=prompt, completion=first)], "f", ours, 99)
                continue
            ids, trained = encoded(ours, prompt, first)
            assert ids == whole and spans(ours, ids, trained) == ["b<|im_end|>"] * learned + ["d<|im_end|>"], flag
            ids, trained = encoded(ours, prompt, last)
            assert ids == whole[:len(ids)] and spans(ours, ids, trained) == ["b<|im_end|>"] + ["d<|im_end|>"] * learned, flag
            if not learned:
                with pytest.raises(BadInput, match="learned"):
                    encoded(ours, prompt, [plain[0] | flag])
    capsys.readouterr()
    row = dict(prompt=[user("a") | dict(id=1)], completion=[plain[0] | dict(mood="x", weight=1, thinking="")])
    encode_examples([row] * 3, "f", ours, 99)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "mood" in said and not {"id", "weight", "thinking"} & set(re.findall(r"\w+", said))


BEGUN = {  # (how, the end of the generation prompt): {begun: what the policy goes on from, behind the header}; no entry: refused
    ("plain", ""): {"<think>\nOkay": "<think>\nOkay", "Sure! It": "Sure! It", FULL: FULL},
    ("cuts", "<think>\n"): {"<think>\nOkay": "<think>\nOkay", "Sure! It": "Sure! It"},
    ("empty", ""): {"<think>\nOkay": "<think>\nOkay", "Sure! It": EMPTY + "Sure! It", FULL: FULL},
    ("empty", "<think>\n"): {"<think>\nOkay": "<think>\nOkay", "Sure! It": EMPTY + "Sure! It", FULL: FULL},
    ("empty", EMPTY): {"Sure! It": EMPTY + "Sure! It"}}


@pytest.mark.parametrize(("how", "opening"), BEGUN)
def test_a_response_that_the_prompt_has_begun(families, tmp_path, how, opening):
    """The policy goes on from it, rules judge what it read, and SFT learns what stands behind it."""
    ours, asked = thinking(families, tmp_path, how, opening), [user("use <think> and </think>")]
    for begun in ("<think>\nOkay", "Sure! It", FULL):
        prompt, text = [*asked, assistant(begun)], BEGUN[how, opening].get(begun)
        if text is None:
            with pytest.raises(BadInput, match="my.jinja"):
                opened(ours, prompt)
            continue
        ids = opened(ours, prompt)
        before = "<|im_start|>user\nuse <think> and </think><|im_end|>\n" + HEADER
        assert ours.hf.decode(ids) == before + text
        batch = dict(rows=[dict(prompt=prompt)], prompts=[ours.decode(ids)], completions=[" is</think>3"])
        assert whole_responses(batch) == [text.removeprefix(EMPTY) + " is</think>3"]
        ids, trained = encoded(ours, prompt, " is 3.")
        assert spans(ours, ids, trained) == [" is 3.<|im_end|>"] and ours.hf.decode(ids).startswith(before + text)
        blank = [user(" \n"), assistant(begun)]
        batch |= dict(rows=[dict(prompt=blank)], prompts=[ours.decode(opened(ours, blank))])
        assert whole_responses(batch) == [text.removeprefix(EMPTY) + " is</think>3"]
    # thoughts in a field of their own, which a rule must see
    ours = thinking(families, tmp_path, "reads", "")
    prompt = [*asked, assistant("So") | dict(reasoning_content="Okay")]
    batch = dict(rows=[dict(prompt=prompt)], prompts=[ours.decode(opened(ours, prompt))], completions=[" 3"])
    assert whole_responses(batch) == ["<think>\nOkay\n</think>\n\nSo 3"]
    assert "<think>\nOkay\n</think>\n\nSo 3<|im_end|>" in ours.hf.decode(ours.encode_scored([prompt], [" 3"])[0])
    with pytest.raises(BadInput, match="my.jinja"):
        opened(thinking(families, tmp_path, "plain", ""), prompt)


@pytest.mark.parametrize(("form", "roles"), [
    ("$A", {}), ("<s> $A", {}), ("<s> $A", dict(bos_token="<s>")), ("<s> $A <eos>", dict(bos_token="<s>")), ("$A <eos>", {}),
    ("$A <eos>", dict(bos_token="<eos>")), ("<eos> $A <eos>", dict(bos_token="<eos>")), ("[gMASK] <sop> $A", {}),
    ("en $A <eos>", dict(bos_token="<s>")), ("<s> [gMASK] en $A <eos> en", dict(bos_token="<s>"))])
def test_what_stands_before_a_string(form, roles):
    """The ids that the tokenizer itself puts in front of a text, and none that it puts behind."""
    backend = Backend.from_str(tiny.byte_tokenizer().hf.backend_tokenizer.to_str())
    names = ["<s>", "<eos>", "[gMASK]", "<sop>", "en"]
    backend.add_special_tokens(names)
    ids = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(single=form, special_tokens=ids)
    ours = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", **roles))
    before = [backend.token_to_id(s) for s in form.partition("$A")[0].split()]
    assert opened(ours, "1+2") == [*before, *b"1+2"]
    assert encoded(ours, "1+", "2") == ([*before, *b"1+2", ours.eos_id], [False] * (len(before) + 2) + [True] * 2)
    assert ours.encode_scored(["1+"], ["2"]) == [[*before, *b"1+2", ours.eos_id]]


def test_several_named_templates(families, tmp_path):
    """None of them is called default: one line that names them, or a file."""
    folder = shutil.copytree(families["qwen2.5"], tmp_path / "named")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [dict(name=name, template=config["chat_template"]) for name in ("rag", "tool_use")]
    for more in ([], [dict(name="default", template=config["chat_template"])]):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | dict(chat_template=named + more)))
        if more:
            assert load_tokenizer(str(folder)).template == config["chat_template"]
            continue
        with pytest.raises(BadInput, match="named: .*rag, tool_use.*--chat_template=FILE"):
            load_tokenizer(str(folder))
        assert with_template(str(folder), tmp_path, config["chat_template"]).template == config["chat_template"]


def test_errors_name_file_and_row(tokenizers):
    ours = tokenizers["mistral"][0]
    rows = [dict(prompt=[user("a")], completion=[assistant("b")], chosen="b", rejected="c")] * 2
    rows += [dict(rows[0], prompt=[user("a"), user("b")])]
    calls = (lambda: encode_prompts(rows, "f", ours, 99, "all"), lambda: encode_examples(rows, "f", ours, 99),
             lambda: encode_scored(rows, "f", ours, ["chosen", "rejected"], 99))
    for call in calls:
        with pytest.raises(BadInput, match="^f, row 3: .*mistral"):
            call()


def test_a_template_of_the_runs_own(families, tmp_path):
    """The one of the docs is for base models: used, its end of turn counts, and the saved folder carries it."""
    docs = open(os.path.join(os.path.dirname(__file__), "..", "docs", "data.md"), encoding="utf-8").read()
    template = "\n".join(re.findall(r"^    (\{%.*)\n", docs, re.MULTILINE))
    ours, saved = with_template(families["pythia"], tmp_path, template), str(tmp_path / "saved")
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    ids, trained = encoded(ours, chat[:1], chat[1:])
    assert spans(ours, ids, trained) == ["b<|endoftext|>", "d<|endoftext|>"]
    shutil.copytree(families["pythia"], saved)
    ours.save(saved)
    theirs, again = AutoTokenizer.from_pretrained(saved), load_tokenizer(saved)
    assert theirs.apply_chat_template(chat, return_dict=False)[:len(ids)] == ids == encoded(again, chat[:1], chat[1:])[0]


def test_template_kwargs_and_system_prompt(families, tokenizers, capsys):
    off, theirs = load_tokenizer(families["qwen3"], template_kwargs="enable_thinking=False"), tokenizers["qwen3"][1]
    assert opened(off, [user("a")]) == theirs.apply_chat_template([user("a")], add_generation_prompt=True, enable_thinking=False,
                                                                  return_dict=False)
    llama = load_tokenizer(families["llama3.2"], template_kwargs="date_string='1 May, 1999'")
    assert "Today Date: 1 May, 1999\n" in llama.decode(opened(llama, [user("a")])) and "date" not in capsys.readouterr().out
    load_tokenizer(families["llama3.2"])
    assert "date" in capsys.readouterr().out
    for text in ("a=1)+f(b=2", "enable_thinkin=False"):
        with pytest.raises(BadInput, match="template_kwargs"):
            load_tokenizer(families["qwen3"], template_kwargs=text)
    # the system message of chats that have none
    ours, plain = load_tokenizer(families["qwen2.5"], system_prompt="Be brief."), tokenizers["qwen2.5"][0]
    whole = [system("Be brief."), user("a")]
    assert encoded(ours, [user("a")], "d") == encoded(plain, whole, "d")
    assert ours.encode_scored([[user("a")]], ["d"]) == plain.encode_scored([whole], ["d"])
    assert opened(ours, [system("x"), user("a")]) == opened(plain, [system("x"), user("a")])
    assert encoded(ours, "a", "b") == encoded(plain, "a", "b") and ours.fingerprint != plain.fingerprint


# ---------------------------------------------------------------------------------------------------------------------
# ends of responses


def test_all_ends_of_a_saved_policy(families, tmp_path):
    """Those of generation_config.json, config.json, the tokenizer and its template; the makers' settings stay."""
    from checkpoint import save_model
    from load import load_model

    qwen = ["<|endoftext|>", "<|im_end|>"]
    for name, ends in (("llama3.2", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]), ("qwen2.5", qwen), ("mistral", ["</s>"]),
                       ("gemma", ["<eos>", "<end_of_turn>"]), ("gpt2", qwen[:1])):
        ours, saved = load_tokenizer(families[name]), str(tmp_path / name)
        save_model(saved, load_model(families[name]), ours)
        theirs, again = AutoTokenizer.from_pretrained(saved), load_tokenizer(saved)
        wanted = sorted(theirs.convert_tokens_to_ids(ends))
        assert sorted(ours.eos_ids) == wanted and again.eos_ids == ours.eos_ids and again.fingerprint == ours.fingerprint
        source = json.load(open(f"{families[name]}/generation_config.json")) if world.FAMILIES[name]["generation"] else {}
        assert json.load(open(f"{saved}/generation_config.json")) == source | dict(eos_token_id=wanted, pad_token_id=ours.pad_id)
        assert GenerationConfig.from_pretrained(saved).eos_token_id == wanted
        text = "caf\u00e9 it's <b> \U0001f600 two  blanks \n"
        assert theirs(text)["input_ids"] == AutoTokenizer.from_pretrained(families[name])(text)["input_ids"]


@pytest.mark.parametrize("name", ["bytes", "mistral"])
def test_stop_strings(families, name):
    """Token by token, against the text of the whole response so far, for random tokens and for texts that have them."""
    strings = ["</a>", "\n\nQ:", "\u597d", " fox"]
    ours, rng = tiny.byte_tokenizer() if name == "bytes" else load_tokenizer(families[name]), random.Random(3)
    assert ours.has_stop is None
    ours.stop_strings, hits = strings, 0
    for text in ("ab</a>cd", "xyz\n\nQ: what", "a\u4f60\u597d!b", "The quick brown fox jumps", "</</a", *[""] * 60):
        ids = ours.encode_texts([text])[0] + [rng.randrange(5, ours.vocab_size) for _ in range(12)]
        ids = [i for i in ids if i not in ours.eos_ids and i != ours.pad_id]
        for n in range(1, len(ids) + 1):
            whole = ours.decode(ids[:n])
            assert ours.has_stop(ids[:n]) == any(s in whole for s in strings), (text, n)
            if ours.has_stop(ids[:n]):
                assert ours.decode_response(ids[:n]).endswith(tuple(strings))
                hits += 1
                break
    assert hits >= 4
    assert ours.decode_response(ours.encode_texts(["x</a>y fox z"])[0]).lstrip() == "x</a>"  # the first one of two


def test_a_tokenizer_that_has_more_tokens_than_the_model(families, tmp_path):
    """Gemma 3 1B's <image_soft_token> has the id 262144, and the model 262144 embeddings: no text becomes it."""
    theirs = AutoTokenizer.from_pretrained(families["pythia"])
    size = len(theirs)
    theirs.add_tokens(["<image>"], special_tokens=True)
    theirs.save_pretrained(shutil.copytree(families["pythia"], tmp_path / "more"))
    ours = load_tokenizer(str(tmp_path / "more"))
    with pytest.raises(BadInput, match="some/path"):
        check_tokenizer_fits(ours, SimpleNamespace(config=SimpleNamespace(vocab_size=size - 1)), "some/path")
    check_tokenizer_fits(ours, SimpleNamespace(config=SimpleNamespace(vocab_size=size)), "some/path")
    assert ours.vocab_size == size
