"""rewards.py: the rules on texts, the key reward_functions, and where a model's score is read."""
from types import SimpleNamespace

import pytest
import torch

from errors import BadInput, Stop
from grading import answers
from grading.answers import accuracy, thinks, whole_responses
from load import load
from prompts import Rows, prompt_row, read_rows
from rewards import (add_scores, same_score_for_same_text, check_rows, last_real,
                     reward_terms, score_batch, score_sequences)
from tiny import jsonl, keys_of_system, write

NAN = float("nan")


def batch_of(texts, answer=None, prompt="?"):
    return dict(completions=texts, rows=[dict(prompt=prompt, answer=answer)] * len(texts))


DEEP = r"\frac{\sqrt{\frac{a^{2}}{b_{1}}}}{c}"
MATRIX = "\\begin{pmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{pmatrix}"
OTHER = MATRIX.replace("3", "5")
RIGHT = [  # answer, responses that are right, others that are wrong
    ("72", ["72", "72.0", "so\n\\boxed{72}", "<think>a</think>72", "#### 72", "<answer>72</answer>",
            "$72", "72.", "144/2", " 72 \n"], ["", "73", "72 or 73", "<think>72", "72\n73", "7 2"]),
    ("#### 1,234", ["1234", "1,234.0"], ["1.234", "12,34"]),
    ("125", ["0125"], ["0,125", "1,25"]), ("1,2,3", ["1,2,3"], ["123"]), ("-1,234/2", ["-617"], []),
    ("\\boxed{\\frac{1}{2}}", ["\\boxed{\\frac{1}{2}}"], ["\\boxed{\\frac{1}{3}}"]),
    ("Paris", ["paris", "Paris."], ["Pari", ""]), ("-3/4", ["-0.75"], ["0.75", "-3/0"]),
    ("1e-05", ["0.00001", "1/100000", "1E-5"], ["1e5", "0.0001", "1e", "e-05"]),
    (DEEP, [rf"so \boxed{{{DEEP}}}.", rf"{{ \boxed{{{DEEP}}}",  # some braces are not closed
            rf"\boxed{{5}}, no: \fbox{{{DEEP}}} \boxed{{5"], [r"\boxed{5}"]),
    (r"\{1\}", [r"so \boxed{\{1\}}!", r"\boxed{ \boxed {\{1\}} }"], [r"\boxed{\{1\}",
                                                                    r"\boxed{}"]),
    ("0.5", [".5", "$.50", "so\n.5", r"\boxed{.5}", "50e-2", "+.5."], [
        "5", "50", "-.5", ".05", "..5"]),
    ("5", ["$5", "5.", "5 .", "+5"], [".5", "-5", "- 5"]),
    ("-0.50", ["-.5", "-$.50", "$-.5", "\u2212.5", "- 1/2"], [".5"]),
    ("7/2", ["3 1/2", "3.5", "3  1 / 2"], ["31/2", "3 1", "-3 1/2"]),
    ("-3 1/2", ["-3.5", "-7/2"], ["-5/2", "-2.5"]), ("31/2", ["15.5", "15 1/2"], ["3 1/2"]),
    # letters that look the same, and what nobody sees
    ("S\u00e3o Paulo", ["Sa\u0303o Paulo", "SA\u0303O\xa0PAULO.", "\u2060S\u00e3o Paulo"],
     ["Sao Paulo"]),
    ("42", ["42\u200b", "\ufeff42", "4\xad2", "\u200e42\u200f"], ["4\u200b 2"]),
    # blanks in a number, and punctuation of other scripts; on both sides
    ("1000", ["1\u202f000", "1\xa0000", "1000。", "1，000", "1，000.0。"],
     ["1\xa000", "1\xa0000\xa00", "1。000", "100。0", "1000!"]),
    ("1\u202f234\u202f567.5", ["1234567.5", "1,234,567.5", "1\xa0234\xa0567．5"], ["1234567"]),
    ("3.5", ["3．5"], ["35。"]), ("(1, 2)", ["(1、 2)", "（１， ２）"], ["(1 2)"]),
    ("-5%", ["–5%", "－５％"], ["5%", "_5%"]), ('"a"', ["“a”", "＂ａ＂"], ["a"]),
    ("it's", ["it’s", "it‘s", "itʼs"], ["its", "it”s"]), ("10²", ["10²"], ["102"]),
    ("巴黎", ["巴黎。"], ["巴"]),
    # several lines: all of a box, of a tag, of the row's answer; of bare text as many
    (MATRIX, [rf"so \boxed{{{MATRIX}}}", f"<answer>\n{MATRIX}\n</answer>", f"it is\n\n{MATRIX}",
              f"#### {MATRIX}", MATRIX.replace("\n", " ")], [
        rf"\boxed{{{OTHER}}}", f"<answer>{OTHER}</answer>", f"it is\n{OTHER}", f"#### {OTHER}",
        r"\boxed{\end{pmatrix}}", r"\end{pmatrix}", r"\begin{pmatrix}"]),
    (f"so\n#### {MATRIX}", [rf"\boxed{{{MATRIX}}}"], [rf"\boxed{{{OTHER}}}"]),
    ("1 2\n3 4", ["<answer>1 2\n3 4</answer>", "\\boxed{\n1 2\n3 4\n}", "grid:\n1 2\n\n3 4\n"], [
        "3 4", "<answer>3 4</answer>", "\\boxed{5 6\n3 4}", "3 4\n1 2"]),
    ("5", ["<answer>\n5\n</answer>", "\\boxed{\n5}", "#### \n5\nDone."], ["\\boxed{4\n5}",
                                                                    "<answer>4\n5</answer>"]),
    ("12345", [r"12,\!345", r"12{,}345", r"12\,345", r"\boxed{1.2345e4}"], [r"12\,34\,5"])]


@pytest.mark.parametrize("answer, right, wrong", RIGHT)
def test_accuracy(answer, right, wrong):
    assert accuracy(batch_of(right, answer)).tolist() == [1] * len(right)
    assert accuracy(batch_of(wrong, answer)).tolist() == [0] * len(wrong)
    assert accuracy(batch_of(right, None)).isnan().all()  # no answer, no accuracy


FORMATS = {
    1: ["<think>a</think>b", " \n<think>\n</think>\n\nb\n", "<think>a</think>\n<answer>b</answer>"],
    0: ["", "b", "<think>a</think> \n", "<think>a", "well <think>a</think>b", "</think>a<think>b",
        "<think>a</think>b</think>c", "<think>a</think><answer> </answer>",
        "<think>a</think><answer>c</answer>d", "<answer>b</answer><think>a</think>"]}


def test_an_answer_that_is_a_number(tmp_path):
    """FILE.py:f gets the row's value, as with TRL; accuracy and math read its text."""
    answers = [72, 72.0, -0.5, True, 10**20, 0]
    path = jsonl(tmp_path / "rows.jsonl", [dict(prompt="?", answer=x) for x in [*answers, "072"]])
    rows = read_rows(path, prompt_row)
    assert [(type(row["answer"]), row["answer"]) for row in rows] == [
        (type(x), x) for x in [*answers, "072"]]
    texts = ["so\n72", "72", "-1/2", "true", "1e20", "0.0", "72"]
    write(tmp_path / "mine.py", "def same(completions, answer, **more):\n    return [float("
                                "text == str(x)) for text, x in zip(completions, answer)]\n")
    batch = dict(rows=rows, completions=texts)
    for spec, scores in (("accuracy", [1] * 7), ("math", [1] * 7), (f"{tmp_path}/mine.py:same",
                                                                    [0] * 7)):
        (_, _, rule), = reward_terms(spec)
        assert list(rule(batch)) == scores, spec
    (_, _, rule), = reward_terms(f"{tmp_path}/mine.py:same")
    assert rule(batch | dict(completions=["72", "72.0", "-0.5", "True", "1" + "0" * 20, "0", "072"])
                ) == [1] * 7


def test_format_and_thinks():
    from grading.forms import format

    for score, texts in FORMATS.items():
        assert format(batch_of(texts)).tolist() == [score] * len(texts)
    assert thinks(batch_of(["<think></think>", "</think><think>", "<think>"])).tolist() == [1, 0, 0]
    begun = batch_of(["a</think>b", "<think>a</think>b"], prompt="go: <think>")
    assert format(begun).tolist() == [1, 0] and thinks(begun).tolist() == [1, 1]


def test_the_key_reward_functions(tmp_path):
    from grading.forms import length

    path = write(tmp_path / "mine.py", "def brevity(batch):\n    return [-len(c) for c in "
                                       "batch['completions']]\ndef format(batch): pass\n")
    terms = reward_terms(f" 2 * length , -0.5*thinks,{path}:brevity,0*reward_model")
    assert terms[:2] == [(2.0, "length", length), (-0.5, "thinks", thinks)]
    assert [(w, n) for w, n, _ in terms[2:]] == [(1.0, "brevity"), (0.0, "reward_model")]
    assert list(terms[2][2](batch_of(["abc", ""]))) == [-3, 0] and terms[3][2] is None
    for wrong in ("", "2*", "acuracy", "nan*length", "length,2*length", "nowhere.py:f",
                  f"{path}:brevity,2*{path}:brevity",
                  f"{path}:brevty", f"{path}:format"):
        with pytest.raises(BadInput) as e:
            reward_terms(wrong)
        assert "\n" not in str(e.value), wrong
    with pytest.raises(BadInput, match="f.jsonl, row 2: .*'answer'"):
        check_rows(reward_terms("accuracy"), Rows([dict(answer="a"), dict(prompt="b")], "f.jsonl"))


@pytest.mark.parametrize("answer", ["", " \n", "so\n####", "#### \n", r"\boxed{}", "<think>5", ".",
                                    "<answer> </answer>", "$$", "\u200b"])
@pytest.mark.parametrize("reward", ["accuracy", "0.5*math"])
def test_an_answer_that_nothing_can_equal(answer, reward, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # math-verify
    with pytest.raises(BadInput, match="f.jsonl, row 2: .*could equal"):
        check_rows(reward_terms(reward), Rows([dict(answer="a"), dict(answer=answer)], "f.jsonl"))
    check_rows(reward_terms(reward), Rows(dict(answer=x) for x in ("-", "0", "?", "nan")))
    check_rows(reward_terms("format"), Rows([dict(answer=answer)]))  # nobody asks for it


def test_the_sum_of_rewards():
    """What does not apply adds nothing; where nothing of a weight applies there is no score."""
    terms = [(2.0, "a", len), (-1.0, "b", len), (0.0, "c", len)]
    batch = {"reward/a": torch.tensor([1, NAN, NAN]), "reward/b": torch.tensor([5, 3, NAN]),
             "reward/c": torch.tensor([9.0, 9, 9])}
    add_scores(batch, terms)
    assert batch["scores"][:2].tolist() == [-3, -3] and batch["scores"][2].isnan()


def test_equal_texts_have_equal_scores():
    """Only of one slot: equal prompts may have other answers. The length decides, not the ids."""
    tokens = torch.tensor([[1, 2], [1, 2], [1, 3], [1, 2], [1, 2]])
    batch = dict(tokens=tokens, slot=torch.tensor([0, 0, 0, 1, 0]),
                 lengths=torch.tensor([2, 2, 2, 2, 1]))
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    assert torch.equal(same_score_for_same_text(scores, batch), scores[[0, 0, 2, 3, 4]])


def test_where_a_score_is_read(world):
    assert last_real(torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]])).tolist() == [2, 0]
    system, device = keys_of_system(dtype="float64"), torch.device("cpu")
    model = load(world.reward, "reward", system, device, head="scalar")
    texts = [[97], [97, 98, 99, 258], [99] * 9, [120, 258]]
    want = [model.hf(torch.tensor([ids])).logits.item() + 0.25 for ids in texts]
    for size in (1, 3, 10):
        got = score_sequences(model, texts, size, device).tolist()
        assert got == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("prompt, found", [
    ("?\n<think>\n", "<think>5"), ("[THINK]", "[THINK]5"), ("write <think> first", "5"),
    ("<think>a</think>", "5"), ("</think>", "5"), ("?", "5")])
def test_thoughts_that_the_prompt_has_begun(prompt, found):
    """Only at its end: they are the response's beginning."""
    assert whole_responses(batch_of(["5"]) | dict(prompts=[prompt])) == [found]


def test_accuracy_is_computed_once_and_fails_as_a_reward(monkeypatch):
    """Whether it is a reward or only logged: with the rules, so that a failure is all ranks'."""
    asked, same_answer = [], answers.same_answer
    monkeypatch.setattr(answers, "same_answer", lambda *pair: asked.append(1) or same_answer(*pair))
    monkeypatch.setattr("rewards.texts_of", lambda *_: batch_of(["5", "<think></think>6"], "5"))
    zeros = torch.zeros(2, 3)
    sampled = dict(tokens=zeros, begins=torch.tensor([1, 1]), sampler_logprobs=zeros)
    rows, policy = [dict(answer="5")], SimpleNamespace(tokenizer=None)
    for spec in "accuracy", "thinks", "-2*thinks,accuracy":
        batch = dict(sampled)
        score_batch(batch, rows, reward_terms(spec), policy, None, 1, keys_of_system(), "cpu")
        assert batch["accuracy"].tolist() == [1, 0] and batch["thinks"].tolist() == [0, 1]
        assert spec == "thinks" or batch["reward/accuracy"].tolist() == [1, 0]
    assert len(asked) == 3 * 2
    monkeypatch.setattr(answers, "same_answer", lambda *_: 1 / 0)
    for spec in "accuracy", "thinks":
        with pytest.raises(Stop, match="'accuracy' failed .*ZeroDivision"):
            score_batch(dict(sampled), rows, reward_terms(spec), policy, None, 1, keys_of_system(),
                        "cpu")
