"""
Chats: messages become the very ids of transformers' apply_chat_template, for every kind of row, in the templates of
models_of_the_world.py; and of them SFT trains what the assistant says, ends of turn included.
"""
import unicodedata

import pytest
from transformers import AutoTokenizer

from engine.tokenizers import load_tokenizer

import models_of_the_world as world


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
    # the trained spans, by hand
    texts, spans = [m["content"] for m in completion if m["role"] == "assistant"], []
    roles = [m["role"] for m in completion]
    for i, (one, before) in enumerate(zip(trained, [False, *trained], strict=False)):
        if one and not before:
            spans.append([])
        if one:
            spans[-1].append(ids[i])
    # Qwen3 keeps the thoughts behind the last question only, and writes empty ones in the last message only
    shown = [i == len(texts) - 1 or ("</think>" in text and "user" not in roles) for i, text in enumerate(texts)]
    want = [said(name, text, last) for text, last in zip(texts, shown, strict=True)]
    if row == "blanks" and name.startswith("qwen"):
        want[0] = "\n" + want[0]  # the header's line break and the text's are one token
    assert [theirs.decode(span) for span in spans] == want
    # the reward model reads the same, and RL's prompts are their beginning
    opened = ours.encode_prompt(prompt)
    assert opened == theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert ids[:len(opened)] == opened or row == "blanks"
