"""
Chats: messages become the very ids of transformers' apply_chat_template, for every kind of row, in the templates of
models_of_the_world.py; and of them SFT trains what the assistant says, ends of turn included.
"""
import filecmp
import json
import os
import random
import re
import shutil
import unicodedata
from datetime import date, datetime

import pytest
from transformers import AutoTokenizer, GenerationConfig

from data import say_system_prompt
from engine import encoded
from engine.tokenizers import load_tokenizer
from errors import BadInput
from formats import Rows
from rows import sft_row

import models_of_the_world as world
import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    return {name: world.make(root / name, name) for name in world.FAMILIES}


@pytest.fixture(scope="module")
def tokenizers(folders):
    """{name: (ours, transformers')}"""
    return {name: (load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)) for name, folder in folders.items()}


def user(text):
    return dict(role="user", content=text)


def assistant(text):
    return dict(role="assistant", content=text)


def system(text):
    return dict(role="system", content=text)


def spans(tokenizer, ids, trained):
    """The texts that are trained, each without a gap."""
    found = []
    for i, one, before in zip(ids, trained, [False, *trained], strict=False):
        if one:
            found += [] if before else [[]]
            found[-1].append(i)
    return [tokenizer.backend.decode(span) for span in found]


THOUGHT = "<think>\n1+2\nis 3\n</think>\n\n3"
ROWS = {  # name: (prompt, completion, which families take it)
    "one turn": ([user("What is 1+2?")], [assistant("It is 3.")], world.CHATS),
    "system": ([system("Be brief. "), user("What?")], [assistant("Paris")], ["llama3.2", "qwen2.5", "qwen3"]),
    "several prompts": ([user("a"), assistant("b"), user("c")], [assistant("d")], world.CHATS),
    "several answers": ([user("What is 1+2?")],
                        [assistant("3"), user("sure?"), assistant("Sure!"), user("why"), assistant("it is")], world.CHATS),
    "blanks": ([user("  two  spaces \n")], [assistant("\n\n  Sure!\n "), user("\t"), assistant(" user\n")], world.CHATS),
    "letters": ([user("user")], [assistant("assistant"), user("assistant"), assistant("user")], world.CHATS),
    "unicode": ([user("caf\u00e9 \u4f60\u597d")], [assistant("\U0001f600e\u0301 na\u00efve \ue000")], world.CHATS),
    "thoughts": ([user("1+2?")], [assistant(THOUGHT), user("and 3?"), assistant(THOUGHT.replace("3", "6"))], world.CHATS),
    "tools": ([user("weather?")], [assistant("call"), dict(role="tool", content="sun"), assistant("It is sun.")],
              ["llama3.2", "qwen2.5", "qwen3"]),
    "empty": ([user("a")], [assistant("")], world.CHATS),
    "<": ([user("a")], [assistant("<b>"), user("b"), assistant("<thing>")], world.CHATS),
}
CASES = [(row, name) for row, (_, _, names) in ROWS.items() for name in names]


def said(name, text, last=True):
    """What the model of a family says in a turn of this text, by hand, with its end of turn."""
    if name == "llama3.2":
        return text.strip() + "<|eot_id|>"
    if name == "mistral":
        return " " + text.strip() + "</s>"
    if name == "qwen3":
        answer = text.split("</think>")[-1].lstrip("\n") if "</think>" in text else text
        thoughts = text.split("</think>")[0].removeprefix("<think>").strip("\n") if "</think>" in text else ""
        text = f"<think>\n{thoughts}\n</think>\n\n" + answer.lstrip("\n") if last else answer
    return unicodedata.normalize("NFC", text) + "<|im_end|>"  # Qwen's tokenizers normalize


@pytest.mark.parametrize("row, name", CASES)
def test_rows_equal_apply_chat_template(tokenizers, row, name):
    (ours, theirs), (prompt, completion, _) = tokenizers[name], ROWS[row]
    ids, trained = ours.encode_example(prompt, completion)
    want = theirs.apply_chat_template(prompt + completion, return_dict=False)
    while want[-1] not in ours.eos_ids:  # such as the line break behind <|im_end|>
        want.pop()
    assert ids == want and len(trained) == len(ids)
    texts, roles = [m["content"] for m in completion if m["role"] == "assistant"], [m["role"] for m in completion]
    # Qwen3 keeps the thoughts behind the last question only, and writes empty ones in the last message only
    shown = [i == len(texts) - 1 or ("</think>" in text and "user" not in roles) for i, text in enumerate(texts)]
    want = [said(name, text, last) for text, last in zip(texts, shown, strict=True)]
    if row == "blanks" and name.startswith("qwen"):
        want[0] = "\n" + want[0]  # the header's line break and the text's are one token
    assert spans(ours, ids, trained) == want
    # the reward model reads the same, and RL's prompts are their beginning
    opened = ours.encode_prompt(prompt)
    assert opened == theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert ids[:len(opened)] == opened or row == "blanks"


# a family's turn in its template; the same in pieces: the header, what the assistant says with its end, what is behind it
GENERATED = {
    "llama3.2": ('{{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" + message["content"] | trim + "<|eot_id|>" }}',
                 '{{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" }}',
                 '{{- message["content"] | trim + "<|eot_id|>" }}', ''),
    "qwen2.5": ('{{- "<|im_start|>" + message["role"] + "\\n" + message["content"] + "<|im_end|>\\n" }}',
                '{{- "<|im_start|>" + message["role"] + "\\n" }}', '{{- message["content"] + "<|im_end|>" }}', '{{- "\\n" }}'),
    "mistral": ('{{- " " + message["content"] | trim + eos_token }}',
                '', '{{- " " + message["content"] | trim + eos_token }}', '')}
PIECES = ["a", "Sure!", " ", "\n", "\n\n", "<think>", "</think>", "<", "assistant", "user", " Paris", "caf\u00e9", "\U0001f600",
          "1+2=3", "  ", "<tool_response>", "<|im_start", "[INST", "\ue000", "\ue0001\ue000", "e\u0301", "\t", "It is", "."]


@pytest.mark.parametrize("name", GENERATED)
def test_what_is_trained_equals_the_mask_of_transformers(tokenizers, name):
    """Templates that mark {% generation %} tell transformers which tokens are the assistant's: nonsense of every kind."""
    (ours, theirs), rng = tokenizers[name], random.Random(5)
    turn, head, said, behind = GENERATED[name]
    marked = (head + "{%- if message['role'] == 'assistant' %}{%- generation -%}" + said + "{%- endgeneration -%}{%- else %}"
              + said + "{%- endif %}" + behind)
    assert turn in world.FAMILIES[name]["template"]
    marked = world.FAMILIES[name]["template"].replace(turn, marked)
    for _ in range(80):
        chat = [system("".join(rng.choices(PIECES, k=3)))] * (name != "mistral" and rng.random() < 0.3)
        for _ in range(rng.randint(1, 3)):
            chat += [dict(role=role, content="".join(rng.choices(PIECES, k=rng.randint(1, 7)))) for role in ("user", "assistant")]
        first = rng.choice([i for i, m in enumerate(chat) if m["role"] == "assistant"])
        ids, trained = ours.encode_example(chat[:first], chat[first:])
        want = theirs.apply_chat_template(chat, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True)
        assert ids == want["input_ids"][:len(ids)] == theirs.apply_chat_template(chat, return_dict=False)[:len(ids)], chat
        # without the turns of the prompt
        skip, turns = sum(m["role"] == "assistant" for m in chat[:first]), 0
        for one, before, mine in zip(want["assistant_masks"], [0, *want["assistant_masks"]], trained, strict=False):
            turns += one > before
            assert mine == (one == 1 and turns > skip), (chat, first)


@pytest.mark.parametrize("row, name", CASES)
def test_without_offsets(tokenizers, row, name, monkeypatch):
    """Slow tokenizers do not say which characters a token stands for. The same comes of it."""
    ours, (prompt, completion, _) = tokenizers[name][0], ROWS[row]
    want = ours.encode_example(prompt, completion)
    monkeypatch.setattr(ours, "fast", False)
    assert ours.encode_example(prompt, completion) == want


def test_strings_beside_messages(tokenizers):
    """A string is a message of the user's, or of the assistant's; two strings are no chat."""
    for name in world.CHATS:
        ours = tokenizers[name][0]
        want = ours.encode_example([user("a")], [assistant("b")])
        assert ours.encode_example("a", [assistant("b")]) == ours.encode_example([user("a")], "b") == want
        ids, more = [*ours.bos_ids, *ours.encode("a ")], [*ours.encode("b"), ours.eos_id]
        assert ours.encode_example("a ", "b") == (ids + more, [False] * len(ids) + [True] * len(more))
        with pytest.raises(BadInput, match="ends with a message of 'user'"):
            ours.encode_example([user("a")], [assistant("b"), user("c")])
    for name in ("pythia", "gpt2"):
        with pytest.raises(BadInput, match="no chat template"):
            tokenizers[name][0].encode_example("a", [assistant("b")])


@pytest.mark.parametrize("name", world.CHATS)
def test_a_completion_goes_on_with_the_prompts_last_message(tokenizers, name):
    """As a response of RL does: they are one message, and only what is new is trained."""
    ours, theirs = tokenizers[name]
    prompt, whole = [user("1+2?"), assistant("Sure! It")], [user("1+2?"), assistant("Sure! It is 3.")]
    for completion in (" is 3.", [assistant(" is 3.")]):
        ids, trained = ours.encode_example(prompt, completion)
        want = theirs.apply_chat_template(whole, return_dict=False)
        assert ids == want[:len(ids)] and ids[-1] in ours.eos_ids
        end = "</s>" if name == "mistral" else "<|eot_id|>" if name == "llama3.2" else "<|im_end|>"
        # transformers drops a blank at the beginning of a text, if the tokenizer is in SentencePiece's manner
        assert spans(ours, ids, trained) == ["is 3." + end if name == "mistral" else " is 3." + end]
        if name != "qwen3":  # which writes no empty thoughts in a message that goes on
            assert ids[:trained.index(True)] == ours.encode_prompt(prompt)
    # what spells special tokens is letters in both halves
    special = "<s>" if name == "mistral" else "<|im_start|>" if "qwen" in name else "<|eot_id|>"
    ids, trained = ours.encode_example([user("a"), assistant(f"Sure {special}")], f" {special}3")
    assert [span.replace("  ", " ") for span in spans(ours, ids, trained)] == [f" {special}3{end}"]
    assert [i for i in ids if i in ours.special_ids] == \
        [i for i in ours.encode_example([user("a")], "Sure")[0] if i in ours.special_ids]


@pytest.mark.parametrize("name", world.CHATS)
def test_special_tokens_in_messages_stay_letters(tokenizers, name):
    """In the user's and in the assistant's: the only special tokens are the template's; the text is all there."""
    ours = tokenizers[name][0]
    plain = [i for i in ours.encode_example([user("a")], "b")[0] if i in ours.special_ids]
    for text in ours.special_texts:
        ids, trained = ours.encode_example([user(f"a {text} b ")], [assistant(f"{text}\n{text}")])
        assert [i for i in ids if i in ours.special_ids] == plain
        assert f"{text}\n{text}" in spans(ours, ids, trained)[0]
        with pytest.raises(BadInput, match="in another field than its content"):
            ours.encode_example([dict(role="user", content="a", name=text)], "b")
        with pytest.raises(BadInput, match="in another field|refuses"):
            ours.encode_prompt([dict(role=f"user{text}", content="a")])
    with pytest.raises(BadInput, match="content of a message must be a string, found \\["):
        ours.encode_example([dict(role="user", content=[dict(type="text", text="a")])], "b")


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_tokens_of_a_template_that_are_not_marked_as_special(folders, tmp_path, name):
    """Some authors forget it. The template's tokens are special all the same; its marks in texts, such as <think>, are not."""
    folder = shutil.copytree(folders[name], tmp_path / name)
    for file, items in (("tokenizer.json", lambda v: v["added_tokens"]),
                        ("tokenizer_config.json", lambda v: v["added_tokens_decoder"].values())):
        value = json.loads((folder / file).read_text())
        for token in items(value):
            token["special"] = False
        (folder / file).write_text(json.dumps(value))
    ours, plain, theirs = load_tokenizer(str(folder)), load_tokenizer(folders[name]), AutoTokenizer.from_pretrained(folder)
    for text in ("<think>\n\n</think>b", "a<|im_end|>", "<|im_start|>"):
        assert ours.encode_example([user(text)], [assistant(text)]) == plain.encode_example([user(text)], [assistant(text)])
    chat = [user("a"), assistant("<think>b</think>c")]
    ids = ours.encode_example(chat[:1], chat[1:])[0]
    assert ids == theirs.apply_chat_template(chat, return_dict=False)[:len(ids)]
    assert ours.eos_ids == plain.eos_ids and sorted(ours.special_texts) == sorted(plain.special_texts)


def test_tokens_of_a_template_between_other_bars(folders, tmp_path):
    """DeepSeek writes <\uff5cUser\uff5c>, and has not marked it as special."""
    folder = shutil.copytree(folders["qwen2.5"], tmp_path / "other")
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.add_tokens([f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant", "end\u2581of\u2581it")])
    theirs.chat_template = HEAD + "{% if m['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + m['content'] }}{% else %}" \
        "{{ '<\uff5cAssistant\uff5c>' + m['content'] + '<\uff5cend\u2581of\u2581it\uff5c>' }}{% endif %}{% endfor %}" \
        "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}"
    theirs.save_pretrained(folder)
    ours, new = load_tokenizer(str(folder)), set(theirs.added_tokens_decoder) - set(load_tokenizer(folders["qwen2.5"]).specials)
    for text in ("a", "<\uff5cUser\uff5c>b", "b<\uff5cend\u2581of\u2581it\uff5c><\uff5cAssistant\uff5c>c"):
        ids, trained = ours.encode_example([user(text)], [assistant(text)])
        assert [i for i in ids if i in new] == [min(new), min(new) + 1, min(new) + 2] and ids[-1] in ours.eos_ids
        assert spans(ours, ids, trained) == [text + "<\uff5cend\u2581of\u2581it\uff5c>"]
        assert ours.encode_prompt([user(text)]) == ids[:trained.index(True)]


HEAD = "{% for m in messages %}"
TEMPLATES = {
    "no end": HEAD + "{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
                     "{% if add_generation_prompt %}assistant: {% endif %}",
    "one end": HEAD + "{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if not add_generation_prompt %}"
                      "{{ eos_token }}{% else %}assistant: {% endif %}",
    "drops": HEAD + "{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] }}{% endif %}{% endfor %}"
                    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
    "drops all": HEAD + "{% if m['role'] == 'user' %}{{ '<|im_start|>' + m['content'] }}{% endif %}{% endfor %}",
    "opens": HEAD + "{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}<|im_start|>",
    "thinks": HEAD + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
                     "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
    "alone": HEAD + "{% if loop.first and loop.last %}{{ raise_exception('no answer') }}{% endif %}"
                    "{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}",
}


def with_template(folder, root, text, **keys):
    (root / "my.jinja").write_text(text)
    return load_tokenizer(folder, dict(chat_template=str(root / "my.jinja"), **keys))


def test_templates_without_an_end_of_turn(folders, tmp_path, capsys):
    ours = with_template(folders["qwen2.5"], tmp_path, TEMPLATES["no end"])
    eos = ours.eos_id
    ids, trained = ours.encode_example([user("a")], "is")
    assert ids == [*ours.encode("user: a\nassistant: is\n"), eos]
    assert spans(ours, ids, trained) == [" is\n<|endoftext|>"]  # the prompt's last blank is in the answer's first token
    ours.encode_example([user("a")], "b")
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "my.jinja writes no end of turn behind the assistant's message; EOS is put there\n" in said
    for name in ("no end", "one end"):
        ours = with_template(folders["qwen2.5"], tmp_path, TEMPLATES[name])
        with pytest.raises(BadInput, match="my.jinja writes no end of turn .* so several of them cannot be told apart"):
            ours.encode_example([user("a")], [assistant("b"), user("c"), assistant("d")])
    ids, trained = ours.encode_example([user("a"), assistant("b"), user("c")], "is")
    assert ids == [*ours.encode("user: a\nassistant: b\nuser: c\nassistant: is\n"), eos]
    assert spans(ours, ids, trained) == [" is\n<|endoftext|>"] and ours.eos_ids == {eos}


def test_odd_templates(folders, tmp_path):
    for name in ("drops", "drops all"):
        with pytest.raises(BadInput, match="my.jinja drops the assistant's message, so there is nothing to learn"):
            with_template(folders["qwen2.5"], tmp_path, TEMPLATES[name]).encode_example([user("a")], "b")
    ours = with_template(folders["qwen2.5"], tmp_path, TEMPLATES["opens"])  # the next turn, always
    ids, trained = ours.encode_example([user("a")], [assistant("b"), user("c"), assistant("d")])
    assert spans(ours, ids, trained) == ["b<|im_end|>", "d<|im_end|>"] and ours.eos_ids == {400, 402}
    # a generation prompt that the turn does not keep; "<th" is what they have in common by chance
    ours = with_template(folders["qwen2.5"], tmp_path, TEMPLATES["thinks"])
    for text in ("Sure", "<thing>", "<think>\nWell</think>Sure"):
        begin = "\nWell</think>Sure"
        ids, trained = ours.encode_example([user("a")], text)
        assert spans(ours, ids, trained) in ([text + "<|im_end|>"], [begin + "<|im_end|>"], [begin[1:] + "<|im_end|>"])
    # the question alone is refused: then the turn begins with its text
    ours = with_template(folders["qwen2.5"], tmp_path, TEMPLATES["alone"])
    assert spans(ours, *ours.encode_example([user("a")], "b")) == ["b<|im_end|>"]
    with pytest.raises(BadInput, match="refuses the messages: .*no answer"):
        ours.encode_prompt([user("a")])


def test_a_header_that_takes_in_blanks_is_not_trained(folders, tmp_path, monkeypatch):
    """As Phi-3's <|assistant|>, which is said to strip what is behind it; and an end that does so is trained as ever."""
    folder = shutil.copytree(folders["qwen2.5"], tmp_path / "strips")
    for file, items in (("tokenizer.json", lambda v: v["added_tokens"]),
                        ("tokenizer_config.json", lambda v: v["added_tokens_decoder"].values())):
        value = json.loads((folder / file).read_text())
        for token in items(value):
            token["rstrip"] = True
        (folder / file).write_text(json.dumps(value))
    template = HEAD + "{{ ('<|im_start|>\n' if m['role'] == 'assistant' else 'user') + m['content'] + '<|im_end|>\n' }}" \
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>\n' }}{% endif %}"
    ours = with_template(str(folder), tmp_path, template)
    for fast in (True, False):
        monkeypatch.setattr(ours, "fast", fast)
        for text in ("is", " \n is", "", " ", "\n"):
            ids, trained = ours.encode_example([user("a")], [assistant(text), user(" b "), assistant(text)])
            assert spans(ours, ids, trained) == [text.strip() + "<|im_end|>"] * 2
            assert ids[:trained.index(True)] == ours.encode_prompt([user("a")])


def test_what_a_template_leaves_out_is_said(folders, tmp_path, capsys):
    """Once for each role: the thoughts of earlier turns, of any turn, and the system message of some chats."""
    said = "warning: the chat template {} does not write all of each message of the role {!r}; what it leaves out, the " \
        "model does not see\n"
    ours = load_tokenizer(folders["qwen3"])
    ours.encode_example([user("1+2? ")], [assistant(f" {THOUGHT} ")])  # its blanks may change
    ours.encode_example([user("a <|im_end|>")], [assistant("<think>b</think>\n<|im_end|>")])
    assert capsys.readouterr().out == ""
    for _ in range(2):
        ours.encode_example([user("1+2?")], [assistant(THOUGHT), user("sure?"), assistant("yes")])
    assert capsys.readouterr().out == said.format(f"of {folders['qwen3']}", "assistant")
    text = HEAD + "{% if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'].split('</think>')[-1]" \
        " + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ours = with_template(folders["qwen2.5"], tmp_path, text)
    ids, trained = ours.encode_example([system("Be brief"), user("1+2?")], [assistant(THOUGHT)])
    assert [span.strip() for span in spans(ours, ids, trained)] == ["3<|im_end|>"]
    assert capsys.readouterr().out == "".join(said.format(f"{tmp_path}/my.jinja", role) for role in ("system", "assistant"))
    # thoughts in a field of their own, for which this template has no place
    thought = {**assistant("3"), "reasoning_content": "1 and 2", "thinking": None}
    for _ in range(2):
        with_template(folders["qwen2.5"], tmp_path, text).encode_example([user("1+2?")], [thought])
    assert capsys.readouterr().out == 2 * (f"warning: the chat template {tmp_path}/my.jinja does not write the field "
                                           "'reasoning_content' of each message; what it leaves out, the model does not see\n")
    writes = text.replace("m['content'].split", "(m['reasoning_content'] or '') + m['content'].split")
    with_template(folders["qwen2.5"], tmp_path, writes).encode_example([{**user("1+2?"), "reasoning_content": ""}], [thought])
    assert capsys.readouterr().out == ""
    ours = with_template(folders["qwen2.5"], tmp_path, text)  # of a prompt, too
    ours.encode_prompt([system("Be brief"), user("1+2?")])
    assert capsys.readouterr().out == said.format(f"{tmp_path}/my.jinja", "system")
    with pytest.raises(BadInput, match="my.jinja is empty; leave the key out"):
        with_template(folders["qwen2.5"], tmp_path, " \n")


def test_two_messages_of_the_assistant_in_a_row(tokenizers):
    """Qwen3 writes the first one in another way when it is the last one."""
    ours, theirs = tokenizers["qwen3"]
    completion = [assistant("b"), assistant("c")]
    ids, trained = ours.encode_example([user("a")], completion)
    assert theirs.apply_chat_template([user("a"), *completion], return_dict=False)[:len(ids)] == ids
    assert spans(ours, ids, trained) == ["b<|im_end|>", "<think>\n\n</think>\n\nc<|im_end|>"]


def test_roles_that_a_template_refuses(tokenizers):
    ours = tokenizers["mistral"][0]
    for prompt in ([system("Be brief"), user("a")], [user("a"), user("b")]):
        with pytest.raises(BadInput, match="^the chat template of .*mistral refuses the messages: .*roles must alternate"):
            ours.encode_example(prompt, "b")


# ---------------------------------------------------------------------------------------------------------------------
# the keys


def test_the_template_of_the_docs(folders, tmp_path):
    """For base models: each turn has a header, and ends with EOS."""
    docs = open(os.path.join(os.path.dirname(__file__), "..", "docs", "rewards.md"), encoding="utf-8").read()
    lines = re.findall(r"^    (\{%.*)\n", docs, re.MULTILINE)
    for name in ("pythia", "gpt2"):
        ours = with_template(folders[name], tmp_path, "\n".join(lines))
        ids, trained = ours.encode_example([user("a")], [assistant("b"), user("c"), assistant("d")])
        assert ours.backend.decode(ids) == "".join(f"### {role}\n{text}<|endoftext|>\n" for role, text in (
            ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")))[:-1]
        assert spans(ours, ids, trained) == ["b<|endoftext|>", "d<|endoftext|>"]
        assert ids[:trained.index(True)] == ours.encode_prompt([user("a")])


def test_a_message_may_have_a_date_beside_it(tokenizers, tmp_path, monkeypatch):
    """WildChat's have a timestamp, which parquet gives as a datetime."""
    row = sft_row({"messages": [user("u") | dict(timestamp=datetime(2023, 4, 9)), assistant("a")]})
    tokenizer = tokenizers["qwen2.5"][0]
    (wanted,) = encoded.encode_all(Rows([sft_row({"messages": [user("u"), assistant("a")]})]), "x", tokenizer, "completion", "")
    for large in (encoded.LARGE, 0):
        monkeypatch.setattr(encoded, "LARGE", large)
        (found,) = encoded.encode_all(Rows([row]), "x", tokenizer, "completion", str(tmp_path))
        assert list(map(list, found)) == list(map(list, wanted))


def test_ids_on_disk_are_of_these_keys(folders):
    """Also where all but one of the rows become the same ids: name_of tries only some of them."""
    from engine.encoded import name_of

    rows = [dict(prompt=[system("s"), user(f"{i}")], completion=[assistant("b")]) for i in range(201)]
    rows[1]["prompt"].pop(0)
    keys = [{}, dict(system_prompt="Be brief"), dict(system_prompt="Be kind")]
    assert len({name_of(rows, "", load_tokenizer(folders["llama3.2"], dict(key, chat_date="2026-01-31")), "completion")
                for key in keys}) == 3


def text_of(tokenizer, prompt):
    return tokenizer.backend.decode(tokenizer.encode_prompt(prompt))


def test_a_template_of_the_runs_own(folders, tmp_path):
    """It is used, its end of turn counts, and the saved folder carries it, for us and for transformers."""
    for name in ("pythia", "gpt2", "llama3.2"):
        end = "<|endoftext|>" if name != "llama3.2" else "<|eom_id|>"
        template = HEAD + "{{ '[' + m['role'] + ']' + m['content'] + '" + end + "' }}{% endfor %}" \
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        ours = with_template(folders[name], tmp_path, template)
        assert ours.backend.convert_tokens_to_ids(end) in ours.eos_ids
        chat = [user("a"), assistant("b")]
        ids, trained = ours.encode_example(chat[:1], chat[1:])
        assert spans(ours, ids, trained) == ["b" + end]
        saved = world.make(tmp_path / name, name)
        ours.save(saved)
        theirs, again = AutoTokenizer.from_pretrained(saved), load_tokenizer(saved)
        assert theirs.apply_chat_template(chat, return_dict=False) == ids == again.encode_example(chat[:1], chat[1:])[0]
        assert again.eos_ids == ours.eos_ids
    for text, said in (("{% if %}", "my.jinja is not written in Jinja: TemplateSyntaxError"), ("\udc80", "utf-8")):
        with pytest.raises(BadInput, match=said) as caught:
            (tmp_path / "my.jinja").write_bytes(text.encode("utf-8", "surrogateescape"))
            load_tokenizer(folders["qwen3"], dict(chat_template=str(tmp_path / "my.jinja")))
        assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="nowhere.jinja: No such file"):
        load_tokenizer(folders["qwen3"], dict(chat_template="nowhere.jinja"))


def test_template_kwargs(folders):
    asked, answered = [user("1+2?")], [assistant("3")]
    off = load_tokenizer(folders["qwen3"], dict(template_kwargs="enable_thinking=False"))
    theirs = AutoTokenizer.from_pretrained(folders["qwen3"])
    assert off.encode_prompt(asked) == theirs.apply_chat_template(asked, add_generation_prompt=True, enable_thinking=False,
                                                                  return_dict=False)
    assert text_of(off, asked).endswith("assistant\n<think>\n\n</think>\n\n")
    # the prompt has the empty thoughts, so the answer has not; of earlier turns the template keeps none
    assert spans(off, *off.encode_example(asked, answered)) == ["3<|im_end|>"]
    long = [*answered, user("sure?"), assistant("<b>")]
    ids, trained = off.encode_example(asked, long)
    assert spans(off, ids, trained) == ["3<|im_end|>", "<b><|im_end|>"]
    assert theirs.apply_chat_template(asked + long, enable_thinking=False, return_dict=False)[:len(ids)] == ids
    llama = load_tokenizer(folders["llama3.2"], dict(template_kwargs="date_string='1 May, 1999'", chat_date="2001-02-03"))
    assert "Today Date: 1 May, 1999\n" in text_of(llama, asked)
    for text in ("enable_thinking", "enable_thinking=off", "1", "a=1)+f(b=2", "=", "**{'a': 1}", "a=[", "a=1,a=2", "(" * 500,
                 "tokenize=True", "messages=[]"):
        with pytest.raises(BadInput, match="^template_kwargs = ") as caught:
            load_tokenizer(folders["qwen3"], dict(template_kwargs=text))
        assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="qwen3 has no variable 'enable_thinkin'"):
        load_tokenizer(folders["qwen3"], dict(template_kwargs="enable_thinkin=False"))


def test_system_prompt(folders):
    """It is the system message of chats that have none; strings stay as they are."""
    for name in ("llama3.2", "qwen2.5", "qwen3"):
        ours, plain = load_tokenizer(folders[name], dict(system_prompt="Be brief.")), load_tokenizer(folders[name])
        for prompt in ([user("a")], [user("a"), assistant("Sure")], [user("a"), assistant("b"), user("c")]):
            whole = [system("Be brief."), *prompt]
            assert ours.encode_prompt(prompt) == plain.encode_prompt(whole)
            assert ours.encode_prompt(whole) == plain.encode_prompt(whole)
            assert ours.encode_example(prompt, "d") == plain.encode_example(whole, "d")
        assert ours.encode_prompt([system("x"), user("a")]) == plain.encode_prompt([system("x"), user("a")])
        assert ours.encode_example("a", "b") == plain.encode_example("a", "b")
        assert ours.fingerprint == plain.fingerprint and ours.whole_fingerprint != plain.whole_fingerprint
    with pytest.raises(BadInput, match="refuses the messages: .*roles must alternate"):
        load_tokenizer(folders["mistral"], dict(system_prompt="Be brief.")).encode_prompt([user("a")])
    for key in ("system_prompt", "template_kwargs"):
        with pytest.raises(BadInput, match=f"^{key} is given, but the tokenizer of .*pythia has no chat template; give one"):
            load_tokenizer(folders["pythia"], {key: "a=1"})


def test_where_the_system_prompt_is_not_used_is_said(folders, capsys):
    """In strings, but for plain text, whose prompt is empty; and in chats with another one of their own."""
    rows = [dict(prompt=p) for p in ("a", "", [user("a")], [system("Be brief."), user("a")], [system("x"), user("a")],
                                     [system(""), user("a")], [assistant("a"), user("b")])]
    ours = load_tokenizer(folders["llama3.2"], dict(system_prompt="Be brief."))
    capsys.readouterr()
    say_system_prompt(rows, ours, "f.jsonl")
    assert capsys.readouterr().out == ("warning: f.jsonl: system_prompt is not used in 3 of 7 rows: 1 are strings, 2 have a "
                                       "system message of their own\n")
    for given, tokenizer in ((rows[1:4], ours), (rows, load_tokenizer(folders["llama3.2"])),
                             (rows, load_tokenizer(folders["pythia"])), ([], ours)):
        capsys.readouterr()
        say_system_prompt(given, tokenizer, "f.jsonl")
        assert capsys.readouterr().out == ""


def test_the_date_is_fixed(folders):
    today = date.today().strftime("%d %b %Y")
    assert f"Today Date: {today}\n" in text_of(load_tokenizer(folders["llama3.2"]), [user("a")])
    ours = load_tokenizer(folders["llama3.2"], dict(chat_date="2001-02-03"))
    assert "Today Date: 03 Feb 2001\n" in text_of(ours, [user("a")])
    assert "Today Date: 03 Feb 2001\n" in ours.backend.decode(ours.encode_example([user("a")], "b")[0])
    for text in ("tomorrow", "2001-13-01", "01.02.2003"):
        with pytest.raises(BadInput, match="^chat_date = .* is no date such as 2026-01-31"):
            load_tokenizer(folders["llama3.2"], dict(chat_date=text))


# ---------------------------------------------------------------------------------------------------------------------
# what is saved


def test_ends_and_generation_config_of_a_saved_policy(folders, tmp_path):
    """The makers' settings stay; the template's end of turn joins the ends. The tokenizer's files are the source's."""
    from engine.checkpoint import save_model
    from model import load_model

    qwen = ["<|endoftext|>", "<|im_end|>"]
    for name, ends in (("llama3.2", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]), ("qwen2.5", qwen), ("qwen3", qwen),
                       ("mistral", ["</s>"]), ("pythia", ["<|endoftext|>"]), ("gpt2", ["<|endoftext|>"])):
        ours, saved = load_tokenizer(folders[name]), str(tmp_path / name)
        save_model(saved, load_model(folders[name]), ours)
        theirs = AutoTokenizer.from_pretrained(saved)
        wanted = sorted(theirs.convert_tokens_to_ids(ends))
        assert sorted(ours.eos_ids) == wanted and load_tokenizer(saved).eos_ids == ours.eos_ids
        source = {}
        if world.FAMILIES[name]["generation"]:
            source = json.load(open(f"{folders[name]}/generation_config.json"))
        assert json.load(open(f"{saved}/generation_config.json")) == source | dict(eos_token_id=wanted, pad_token_id=ours.pad_id)
        for file in os.listdir(folders[name]):
            if file not in ("config.json", "model.safetensors", "generation_config.json"):
                assert filecmp.cmp(f"{folders[name]}/{file}", f"{saved}/{file}", shallow=False), file
        assert GenerationConfig.from_pretrained(saved).eos_token_id == wanted


# ---------------------------------------------------------------------------------------------------------------------
# whole runs


DAY = "import engine.run_folder\nengine.run_folder.today = lambda: '2026-03-0{}'"  # of March, as a run's start sees it
RL = dict(prompts_path="rl", eval_path="rl", policy_path="llama3.2", max_new_tokens=4, micro_batch_size=4)
SCRIPTS = {  # script: (what it trains, the keys of a short run, what may not change when it goes on)
    "sft.py": ("policy", dict(train_path="sft", val_path="sft", init_from="llama3.2"), dict(system_prompt="Be brief.")),
    "rm.py": ("reward_model", dict(train_path="pairs", val_path="pairs", demonstrations_path="sft", init_from="llama3.2"),
              dict(chat_date="2026-03-02")),
    "ppo.py": ("policy", dict(RL, reward_path="reward", value_init="policy"), dict(chat_date="2026-03-02")),
    "grpo.py": ("policy", dict(RL, reward_functions="mine.py:letters", group_size=2), dict(system_prompt="Be brief."))}
ALL = dict(batch_size=4, eval_size=2, learning_rate=1e-2, lr_decay="constant", timeout=60, device_type="cpu")


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    """(folder, {script and case: [result of each run]})"""
    root = tmp_path_factory.mktemp("chats")
    world.make(root / "reward", "llama3.2", head="scalar", seed=1)
    shutil.copytree(folders["llama3.2"], root / "llama3.2")
    completion = [assistant("It is 3."), user("sure?"), assistant("Sure!")]
    asked = [dict(prompt=[user(f"What is {i} + 1?")], completion=completion, chosen=completion, rejected=[assistant("no")])
             for i in range(6)]
    for name, fields in (("sft", ["completion"]), ("pairs", ["chosen", "rejected"]), ("rl", [])):
        tiny.jsonl(root / f"{name}.jsonl", [{field: row[field] for field in ("prompt", *fields)} for row in asked])
    (root / "mine.py").write_text("def letters(batch):\n    return [sum(map(str.isascii, c)) for c in batch['completions']]\n")
    files = dict(sft="sft.jsonl", pairs="pairs.jsonl", rl="rl.jsonl")
    files |= {name: name for name in ("reward", "llama3.2", "mine.py:letters")}

    def run(script, *days, **keys):
        keys = ALL | SCRIPTS[script][1] | dict(out_dir="out") | keys
        keys = {key: f"{root}/{files[value]}" if value in files else value for key, value in keys.items()}
        return tiny.one_run(script, *((tiny.arguments(keys), DAY.format(day)) for day in days))

    cases = {"sft.py ranks": [run("sft.py", 1, 2, max_iters=2)]}  # it is midnight between two ranks
    for script, (_, _, other) in SCRIPTS.items():
        cases[f"{script} whole"] = [run(script, 1, max_iters=2)]
        cases[f"{script} resumed"] = [run(script, 1, max_iters=1), run(script, 2, max_iters=2),
                                      run(script, 2, max_iters=3, **other)]
    return root, tiny.forked(str(root), cases)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_goes_on_tomorrow_reads_the_same_prompts(runs, script):
    root, results = runs
    model = SCRIPTS[script][0]
    first, second, third = results[f"{script} resumed"]
    assert [first["codes"], second["codes"], third["codes"]] == [[0], [0], [2]], results[f"{script} resumed"]
    assert tiny.distance(f"{root}/{script} resumed/out/{model}", f"{root}/{script} whole/out/{model}") == 0
    config = json.load(open(f"{root}/{script} resumed/out/config.json"))
    assert config["chat_date"] == "2026-03-01" and len(config["sha256"]["token_ids"]) == 64
    for result in (first, second):
        said = [line for line in result["stdout"][0].splitlines() if "prints a date: here always 2026-03-01" in line]
        assert len(said) == (2 if script == "ppo.py" else 1), result  # the reward model has a template as well
    assert re.fullmatch(rf"{script}: error: out holds a run whose data became other token ids than they become now: [^\n]*\n",
                        third["stderr"][0]), third


def test_two_ranks_over_midnight(runs):
    root, results = runs
    assert results["sft.py ranks"][0]["codes"] == [0, 0], results["sft.py ranks"]
    assert tiny.distance(f"{root}/sft.py ranks/out/policy", f"{root}/sft.py whole/out/policy") < 1e-4


def test_a_policy_that_was_taught_by_a_chat_ends_with_its_end(runs):
    saved = f"{runs[0]}/sft.py whole/out/policy"
    ends = json.load(open(f"{saved}/generation_config.json"))["eos_token_id"]
    assert ends == [401, 404, 405] == sorted(load_tokenizer(saved).eos_ids)


def test_sample_has_the_keys(folders, tmp_path):
    """As a user runs it: a system prompt and a template of the user's own."""
    (tmp_path / "my.jinja").write_text("{% if messages[0]['role'] != 'system' or think %}{{ raise_exception('so') }}{% endif %}"
                                       + TEMPLATES["thinks"])
    result = tiny.run("tools/sample.py", f"--policy_path={folders['pythia']}", "--prompt=a", "--max_new_tokens=2",
                      f"--chat_template={tmp_path / 'my.jinja'}", "--template_kwargs=think=False", "--system_prompt=Be brief.")
    assert result.returncode == 0 and "> a\n" in result.stdout, result
