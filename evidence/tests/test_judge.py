"""
options/judging.py: the judge's scores against transformers on the same text; its templates; runs.
"""
import math

import pretend
import pytest
import torch
from errors import BadInput
from load import load
from options.judging import TEMPLATES, Judge
from rewards import score_sequences
from tiny import (assert_same_run, keys_of, keys_of_system, read_log, save_random, well, write)
from tokenizer import load_tokenizer
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with room for questions, whose tokens are bytes."""
    folder = str(tmp_path_factory.mktemp("judge") / "judge")
    save_random(folder, seed=3)
    hf = AutoModelForCausalLM.from_pretrained(folder, n_positions=700, ignore_mismatched_sizes=True)
    with torch.no_grad():
        hf.transformer.wpe.weight.normal_(0, 0.2)
    hf.save_pretrained(folder)
    return folder


def judge_of(folder, template="yes_no", chat="", responses=("response",)):
    file = write(f"{folder}/chat.jinja", chat) if chat else ""
    system = keys_of_system(chat_template=file, dtype="float64")
    model = load(folder, "judge", system, torch.device("cpu"))
    return Judge(model, load_tokenizer(folder, system), folder, str(template), responses)


def filled(template, prompt, response):
    """A built-in template by hand: fields that stand in a response stay as they are."""
    text = TEMPLATES[template].removeprefix("answers: A B C D E F G H I J\n")
    head, _, tail = text.partition("{response}")
    return head.replace("{prompt}", prompt) + response + tail


WORDS = ["Paris", "1+2=3", "caf\u00e9", "\n", "{prompt}", "<eos>"]


@pytest.mark.parametrize("template, count", [("yes_no", 2), ("rubric", 10)])
def test_scores_as_transformers(folder, template, count):
    judge, model = judge_of(folder, template), AutoModelForCausalLM.from_pretrained(folder).double()
    texts = [" ".join(WORDS[:n]) for n in (0, 1, 4, 6)]
    questions = [judge.encode(dict(prompt="a?"), [text]) for text in texts]
    for text, score in zip(texts, score_sequences(judge, questions, 3, "cpu").tolist(),
                           strict=True):
        ids = list(filled(template, "a?", text).encode())
        with torch.no_grad():
            p = model(torch.tensor([ids])).logits[0, -1].softmax(-1)[ord("A"):ord("A") + count]
        grade = (p / p.sum() * torch.arange(count, 0, -1)).sum().item()  # expected, from 1 to 10
        want = (p[0] / p[1]).log().item() if count == 2 else math.log((grade - 1) / (10 - grade))
        assert score == pytest.approx(want, abs=1e-9)


CHATML = """{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# an answer opens with empty thoughts: in the prompt, or only before an answer
THINKS = CHATML.replace("[assistant]{%", "[assistant]<think></think>{%").replace(
    "]{{ m.content", "]{{ '<think></think>' if m.role == 'assistant' else '' }}{{ m.content")
WRITES = THINKS.replace("[assistant]<think></think>{%", "[assistant]{%")
COUNTS = "{{ messages | length }}" + CHATML
ASKED = f"[user]{filled('yes_no', 'a', 'b')}<eos>[assistant]"
TURNS = [dict(role=role, content=text) for role, text in (
    ("user", "Hi"), ("assistant", "Yes?"), ("user", "1+2"), ("assistant", "<think>"))]
DIALOGUE = "user: Hi\n\nassistant: Yes?\n\nuser: 1+2"


@pytest.mark.parametrize("chat, prompt, want", [
    (CHATML, "a", ASKED), (THINKS, "a", f"{ASKED}<think></think>"),
    (WRITES, "a", f"{ASKED}<think></think>"), (COUNTS, "a", f"1{ASKED}"),
    ("", TURNS[:1], filled("yes_no", "Hi", "b")), ("", TURNS[:3], filled("yes_no", DIALOGUE, "b")),
    ("", TURNS, filled("yes_no", DIALOGUE, "<think>b"))])
def test_questions_of_chats(folder, chat, prompt, want):
    """In the judge's chat template, whose opening of an answer it reads; dialogues become text."""
    judge = judge_of(folder, chat=chat)
    assert judge.tokenizer.text_of(judge.encode(dict(prompt=prompt), ["b"])) == want
    assert judge.answers == [ord("A"), ord("B")]


def test_a_long_response_loses_its_end(folder):
    """The question behind it stays; a prompt that leaves no room is refused."""
    judge = judge_of(folder)
    for n in (1, 200):
        ids = judge.encode(dict(prompt="a b"), ["dog, " + "fox " * n])
        text = judge.tokenizer.decode(ids)
        assert len(ids) <= 700 and text.endswith("The letter is:") and "\na b\n" in text
        assert "dog, fox" in text and (len(ids) > 690 or n == 1)
    with pytest.raises(BadInput, match="context has 700"):
        judge.encode(dict(prompt="fox " * 200), ["a"])


REFUSED = {  # a template, and a part of the line
    "": "", "{response}": "A B", "{prompt} A B": "{response}",
    "{prompt} {response} {question} A B": "question", "answers: A A\n{response}": "'A A'",
    "answers: 10 9\n{prompt} {response}": "'10'"}


def test_a_file_of_the_users(folder, tmp_path):
    """Answers of its own, the row's answer, braces that are no field; every byte by hand."""
    file = write(tmp_path / "mine.txt", 'answers: y, n\n{"q": {prompt}} { } {answer} '
                 '{response} ok?\n\n')
    judge = judge_of(folder, file)
    assert judge.answers == [ord("y"), ord("n")] and judge.chat is False
    ids = judge.encode(dict(prompt="1+2=", answer=3), ["{answer}<eos>"])
    assert bytes(ids).decode() == '{"q": 1+2=} { } 3 {answer}<eos> ok?'
    with pytest.raises(BadInput, match="'2\\+2='"):  # not the word None
        judge.encode(dict(prompt="2+2=", answer=None), ["4"])
    pairs = judge_of(folder, "compare", responses=("first", "second"))
    assert "[First answer]\nx\n" in bytes(pairs.encode(dict(prompt="?"), ["x", "y"])).decode()
    for text, part in REFUSED.items():
        with pytest.raises(BadInput) as e:
            judge_of(folder, write(file, text))
        assert part in str(e.value) and "\n" not in str(e.value), text


def test_scores_of_a_run(world, tmp_path):
    """The same run on two ranks, where the judge is split, and reads by micro-batches of tokens."""
    template = write(tmp_path / "t.txt", "answers: 1 2 3\n{response}, to {prompt} ({answer})")
    keys = keys_of(
        world, "grpo.py", judge_path=world.older, judge_template=template, eval_path="",
        reward_functions="0.5*judge,0*length", reward_timeout=40, max_iters=1)
    out = well("grpo.py", tmp_path / "one", keys)
    more = dict(zero_stage="3", offload="judge=params", micro_batch_tokens=90)
    two = well("grpo.py", tmp_path / "two", keys | more, ranks=2, before=pretend.begin)
    assert_same_run(out, two, tolerance=1e-9)
    first = read_log(out)[0]
    assert first["objective/scores"] == pytest.approx(first["objective/reward/judge"] / 2) != 0
