"""
grading/answers.py: the text behind the thoughts. The marks of thoughts of the families, each
written as its chat template and its model write a response; what the rewards give for it is known
by hand.
"""
from types import SimpleNamespace

import pytest
from grading.answers import (accuracy, behind_thoughts, final_answer, say_unknown_marks, thinks,
                             whole_responses)
from grading.forms import format
from grading.programs import extract_code

HARMONY = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
# family: what opens the thoughts, what ends them and begins the answer, what ends the answer
FAMILIES = {
    "qwen3": ("<think>\n", "\n</think>\n\n", ""),
    "ernie": ("<think>\n", "\n</think>\n\n<response>\n", "\n</response>"),
    "hunyuan": ("<think>\n", "\n</think>\n<answer>\n", "\n</answer>"),
    "reka": ("<reasoning> ", " </reasoning>", ""),
    "seed-oss": ("<seed:think>", "</seed:think>", ""),
    "magistral": ("[THINK]", "[/THINK]", ""),
    "gpt-oss": (HARMONY, FINAL, ""),
    "gpt-oss with JSON": (HARMONY, FINAL.replace("l<|m", "l <|constrain|>json<|m"), ""),
    "gemma 4": ("<|channel>thought\n", "<channel|>", ""),
    "command a": ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "kimi-vl": ("◁think▷", "◁/think▷", ""),
    "kimi k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>",
                "<|close|>response<|sep|><|close|>message<|sep|>"),
    "solar open": ("<|think|>", "<|end|><|begin|>assistant<|content|>", "<|end|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", ""),
    "openpangu": ("[unused16]", "[unused17]", ""),
    "openthinker": ("<|begin_of_thought|>\n", "\n<|end_of_thought|>\n\n<|begin_of_solution|>\n",
                    "\n<|end_of_solution|>"),
    "granite 3.2": ("Here is my thought process: ", "\n\nHere is my response: ", ""),
    "apriel": ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n",
               "\n[END FINAL RESPONSE]"),
}
BEHIND = {  # text: the text behind the thoughts
    "5": "5", "": "", "a[/THINK]5": "5", "[THINK]a[/THINK]5[THINK]b[/THINK]6": "6",
    # the marks of another family are text in thoughts
    "<think>as in [THINK]</think>5": "5", "<think>a [THINK]b[/THINK] 7": None,
    # two kinds, one behind the other
    "<think>\n\n</think>\n\n<reasoning>7</reasoning>5": "5", "<think></think><reasoning>7": None,
    # gpt-oss: no thoughts; words before a call; a call alone; cut off in the header
    "<|channel|>final<|message|>5": "5", f"<|channel|>commentary<|message|>7{FINAL}5": "5",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}": None,
    f"{HARMONY}7<|end|><|start|>assistant<|channel|>fin": None, f"{HARMONY}7{FINAL[:-11]}": None,
    f"{HARMONY}a<|end|><|start|>assistant{HARMONY}b{FINAL}5": "5",
    # plain words in a text of another model
    "So here it is. Here is my thought process: 2+3. It is 5.":
    "So here it is. Here is my thought process: 2+3. It is 5.",
    "<THINK>5": "<THINK>5", "x[THINK2] <thinker>": "x[THINK2] <thinker>"}
DRAFT = "so \\boxed{7}\n#### 7\n```python\nx = 7\n```\n7"
PROGRAM = "```python\nx = 5\n```"


def batch_of(texts, prompts=None):
    return dict(completions=texts, rows=[dict(prompt="?", answer="5")] * len(texts),
                prompts=prompts or ["?"] * len(texts))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family):
    """A draft of 7 in the thoughts, and the answer 5."""
    first, last, end = FAMILIES[family]
    right = [f"{first}{DRAFT}{last}5{end}", f"{first}5{last}#### 5{end}", f"{first}{last}5{end}",
             f"{first}{DRAFT}{last}so it is \\boxed{{5}}.{end}"]
    wrong = [f"{first}5{last}7{end}", f"{first}{DRAFT}{last}{end}"]
    unended = [f"{first}5", f"{first}{DRAFT}", f"{first}{DRAFT}{last}5{end}\n{first}5"]
    if first[0] == "H":  # plain words are marks at the start alone
        unended.pop()
    # the template opens the thoughts, or the chat's message does
    opened = [f"[user] ?[assistant]\n{first}"] * 3
    texts = [right[0][len(first):], wrong[0][len(first):], "\\boxed{5}"]
    assert accuracy(batch_of(right)).tolist() == [1] * len(right)
    assert accuracy(batch_of(wrong + unended)).tolist() == [0] * len(wrong + unended)
    assert accuracy(batch_of(texts, opened)).tolist() == [1, 0, 0]
    assert thinks(batch_of(right + wrong + unended[:2])).tolist() == [1] * 6 + [0] * 2
    assert format(batch_of(right)).tolist() == [1] * len(right)
    odd = [wrong[1], f"well {right[0]}", right[0] + last + "6", f"{first}<answer>{last}5{end}",
           f"{first}<answer>5</answer>{last}<answer>5</answer>{end}", *unended]
    assert format(batch_of(odd)).tolist() == [0] * len(odd)
    assert format(batch_of(texts, opened)).tolist() == [1, 1, 0]
    assert extract_code(f"{first}{DRAFT}{last}so\n{PROGRAM}{end}") == "x = 5"
    assert extract_code(f"{first}{DRAFT}{last}x = 5{end}").strip() == "x = 5"
    assert extract_code(f"{first}{PROGRAM}") is None
    assert final_answer(f"{DRAFT}{last}5{end}") == "5"  # the prompt that opened them is not known


def test_the_text_behind_the_thoughts():
    assert {text: behind_thoughts(text) for text in BEHIND} == BEHIND


def test_what_a_message_of_the_assistant_has_begun():
    """It is the response's beginning. (What a prompt has begun: tests/test_rewards.py.)"""
    for first, last, _ in FAMILIES.values():
        for begun in (f"{first}a", f"well {first.strip()}"):
            row = dict(prompt=[dict(role="assistant", content=begun)])
            batch = dict(batch_of([f"{last}5"], [f"[user]?[assistant]{begun}"]), rows=[row])
            assert whole_responses(batch) == [f"{begun}{last}5"]


def test_unknown_marks_are_said_once(capsys):
    def said_of(*tokens):
        class tokenizer:
            path, hf = "my/model", SimpleNamespace(get_added_vocab=lambda: dict.fromkeys(tokens))

        say_unknown_marks(tokenizer), say_unknown_marks(tokenizer)
        return capsys.readouterr().out

    known = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|END_THINKING|>", "</seed:think>",
             "/nothink", "<|im_end|>", "<|channel|>", "◁think▷", "<|think|>", "<s>")
    assert said_of(*known) == ""
    said = said_of(*known, "<|begin_reasoning|>", "<Thought>")
    assert said.count("\n") == 1 and "my/model" in said
    assert "<|begin_reasoning|>" in said and "<Thought>" in said and "</think>" not in said
