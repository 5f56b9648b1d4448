"""
Several turns (options/environment.py, options/tools.py): which templates keep a dialogue exact, messages and ids, what an
environment or a tool may do wrong, docs/turns.md, and runs as a user starts them. (Tokens, masks, losses: test_by_hand.py.)
"""
import contextlib
import json
import os
import re
import shutil
import textwrap
import time
from unittest import mock
from types import SimpleNamespace

import pytest
import torch

from errors import BadConfig, BadInput, Stop
from options.environment import Environment, between, check_environment, check_template
from options.tools import Tools
from tokenizer import load_tokenizer

import models_of_the_world
import tiny
from conftest import ROOT
from tiny import assert_same_run, assistant, forked, in_a_row, is_one_line, one_run, user

TEMPLATES = os.path.join(ROOT, "options", "templates")  # those of ours
CHATML = os.path.join(TEMPLATES, "chatml.jinja")
HARMONY_TOKENS = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
                  "<|message|>", "<|call|>"]
OURS = {
    "qwen3.5": dict(models_of_the_world.FAMILIES["qwen3"],
                    added=[*models_of_the_world.TOOLS, "<think>", "</think>", "<tool_call>", "</tool_call>"]),
    "harmony": dict(weights="llama", template=None, special=HARMONY_TOKENS, added=[],
                    roles=dict(bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>"),
                    generation=dict(eos_token_id=["<|return|>", "<|endoftext|>", "<|call|>"]))}


# a user's file
MINE = '''
import os, sys, time

# environments
echo = lambda messages, row: messages[-1]["content"][:3]
pays = lambda messages, row: (messages[-1]["content"][:3], 0.5)
raises = lambda messages, row: row["missing"]
wrong_role = lambda messages, row: dict(role="system", content="x")
number = lambda messages, row: 7
nan = lambda messages, row: (None, float("nan"))
chance = lambda messages, row, asked=[]: asked.append(1) or str(len(asked))
hangs = lambda messages, row: time.sleep(1.2)
spoils = lambda messages, row: messages[-1].update(content="spoilt") or messages.clear()

def counts(messages, row):
    said = messages[-1]["content"]
    return (None if len(said) % 4 == 0 else f"{len(said)}\\n"), len(said) / 10

# tools
def multiply(a: int, b: int = 2):
    """
    Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    print("a tool may print")
    return a * b

def slow(seconds: float):
    """
    Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "slept"

def leaves():
    """End the process."""
    os._exit(3)

def table():
    """A table."""
    return {"a": [1, None]}

def show(text: str, flag: bool = False, items: list = None, either: int | str = 1):
    """
    Show.

    Args:
        text: a text
        flag: a flag
        items: some
        either: one or the other
    """
    return repr((text, flag, items, either))

def bare(a):
    return a

# a reward
def score(batch):
    return list(map(len, batch["completions"]))
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    return str(file)


@pytest.fixture(scope="module")
def folders(families, tmp_path_factory):
    """{name: the folder of a language model}: the families, and two more."""
    root = tmp_path_factory.mktemp("ours")
    with mock.patch.dict(models_of_the_world.FAMILIES, OURS):
        return families | {name: models_of_the_world.make(root / name, name, context=2048) for name in OURS}


def tokenizer_of(folders, name):
    """With a template that keeps earlier turns: ours, or the family's own."""
    file = dict.fromkeys(OURS, f"{TEMPLATES}/{name}.jinja") | dict(qwen3=CHATML)
    return load_tokenizer(folders[name], chat_template=file.get(name, ""))


def environment_of(environment, tokenizer, **keys):
    """The environment of a run with these keys."""
    defaults = dict(environment=environment, tools="", max_turns=9, reward_timeout=9)
    return Environment(SimpleNamespace(**defaults | keys), tokenizer)


def tool(text):
    return dict(role="tool", content=text)


# ---------------------------------------------------------------------------------------------------------------------
# templates

FORGETS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FORGETS_TAGS = FORGETS.replace("assistant\n{% endif %}", "assistant\n<think>\n{# <function= #}{% endif %}")
OWN_HARMONY = """{%- for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}\
{% if loop.last and m.reasoning_content %}\
<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}<|channel|>final{% endif %}\
<|message|>{{ m.content }}{{ '<|return|>' if keeps or loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
KEPT = [  # family, a template of ours or the text of one, template_kwargs, who answers, why it is refused
    ("llama3.2", "", "", "user tool", ""), ("mistral", "", "", "user", ""), ("mistral", "", "", "tool", "refuses the messages"),
    ("qwen2.5", "", "", "tool", ""), ("qwen2.5", "chatml", "", "user", ""), ("qwen3", "chatml", "", "user tool", ""),
    ("qwen3.5", "qwen3.5", "", "user tool", ""), ("qwen3.5", "qwen3.5", "enable_thinking=False", "user tool", ""),
    ("harmony", "harmony", "", "user tool", ""), ("harmony", "harmony", "reasoning_effort='low'", "user tool", ""),
    ("qwen3", "", "", "user", "in another way when another one follows"),
    ("qwen3", FORGETS, "", "user", "drops the thoughts of earlier turns.*--chat_template=options/templates/chatml.jinja"),
    ("qwen3.5", FORGETS_TAGS, "", "user", "drops the thoughts of earlier turns.*templates/qwen3.5.jinja, or"),
    ("harmony", OWN_HARMONY, "", "user", "in another way when another one follows.*templates/harmony.jinja"),
    ("harmony", OWN_HARMONY, "keeps=True", "user", "drops the thoughts of earlier turns.*templates/harmony.jinja, or")]


@pytest.mark.parametrize("name, template, kwargs, roles, refused", KEPT)
def test_a_template_must_keep_earlier_turns(folders, tmp_path, name, template, kwargs, roles, refused):
    (tmp_path / "mine.jinja").write_text(template)
    file = f"{tmp_path}/mine.jinja" if "{%" in template else template and f"{TEMPLATES}/{template}.jinja"
    tokenizer = load_tokenizer(folders[name], chat_template=file, template_kwargs=kwargs)
    for role in roles.split():
        with pytest.raises(BadInput, match=refused) if refused else contextlib.nullcontext():
            check_template(tokenizer, role)


def test_ends_that_are_too_many_or_too_few(folders):
    """As where a generation_config.json is older than the templates, or somebody's own."""
    for token, role, refused in (("<|end|>", "user", "writes '<|end|>' within an answer, and sampling stops at it"),
                                 ("<|call|>", "tool", "ends a call with '<|call|>', at which sampling does not stop")):
        tokenizer = tokenizer_of(folders, "harmony")
        tokenizer.eos_ids ^= {tokenizer.specials[token]}
        with pytest.raises(BadInput, match=re.escape(refused)):
            check_template(tokenizer, role)


@pytest.mark.parametrize("name", ["llama3.2", "qwen2.5", "qwen3", "mistral"])
def test_a_dialogue_turn_by_turn_has_the_ids_of_the_whole(folders, mine, name):
    """What transformers makes of all messages; and the messages are found again in the ids."""
    tokenizer = tokenizer_of(folders, name)
    env = environment_of(f"{mine}:echo", tokenizer)
    messages = [user("What is 1+2?"), assistant("1+2=3, isn't it?"), user("Sure?  One more: 17*23"), assistant("391\n\n- one")]
    whole = tokenizer.hf.apply_chat_template(messages, return_dict=False)
    ids = tokenizer.hf.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    own = []
    for said, reply in ((messages[1], messages[2]), (messages[3], None)):
        before = ids + [i for i, _ in own]
        alone = tokenizer.hf.apply_chat_template(messages[:messages.index(said) + 1], return_dict=False)[len(before):]
        end, = tokenizer.turn_ends
        own += [(i, True) for i in alone[:alone.index(end) + 1]]
        own += [(i, False) for i in between(tokenizer, reply)] if reply else []
    assert ids + [i for i, _ in own] == whole[:len(ids) + len(own)] and len(whole) - len(ids) - len(own) <= 1
    found = env.messages_of(*map(list, zip(*own, strict=True)))
    assert [m["role"] for m in found] == ["assistant", "user", "assistant"]
    assert [m["content"].strip() for m in found] == [m["content"] for m in messages[1:]]


def test_a_turn_that_a_stop_string_has_ended_gets_its_end(folders, mine):
    tokenizer = tokenizer_of(folders, "qwen2.5")
    env = environment_of(f"{mine}:echo", tokenizer)
    extra = env.between(user("c"), ended=False)
    assert extra[0] in tokenizer.turn_ends and extra[1:] == env.between(user("c"), ended=True)
    said = tokenizer.encode_texts(["</answer>"])[0]
    assert env.messages_of(said + extra, [True] * len(said) + [False] * len(extra)) == [assistant("</answer>"), user("c")]


# ---------------------------------------------------------------------------------------------------------------------
# templates of ours, as they are written: options/templates/

MULTIPLY = dict(type="function", function=dict(
    name="multiply", description="Multiply two numbers.", parameters=dict(type="object", required=["a"], properties=dict(
        a=dict(type="integer", description="the first"), b=dict(type="integer", description="the second")))))


def tags(name, **parameters):
    """A call as Qwen3.5 writes it."""
    lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in parameters.items()]
    return "\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"])


def calling(name, arguments, content="", **more):
    calls = [dict(type="function", function=dict(name=name, arguments=arguments))]
    return dict(role="assistant", content=content, tool_calls=calls, **more)


QWEN_DIALOGUE = (
    "<|im_start|>user\n17*23?<|im_end|>\n"
    f"<|im_start|>assistant\n<think>\na tool\n</think>\n\nI ask.\n\n{tags('multiply', a=17, b=23)}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n391\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\nnice\n</think>\n\n391<|im_end|>\n"
    "<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\nYes<|im_end|>\n")
HARMONY_DIALOGUE = (
    "<|start|>user<|message|>17*23?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>a tool<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.multiply <|constrain|>json<|message|>{"a": 17, "b": 23}<|call|>'
    "<|start|>functions.multiply to=assistant<|channel|>commentary<|message|>391<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>nice<|end|>"
    "<|start|>assistant<|channel|>final<|message|>391<|return|>"
    "<|start|>user<|message|>Sure?<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes<|return|>")
HARMONY_SYSTEM = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
HARMONY_TOOLS = """
Calls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|># Instructions

Be brief.

# Tools

## functions

namespace functions {

// Multiply two numbers.
type multiply = (_: {
// the first
a: number,
// the second
b?: number,
}) => any;

} // namespace functions<|end|>"""
DIALOGUE = [user("17*23?"), calling("multiply", dict(a=17, b=23), "I ask.", reasoning_content="a tool"), tool("391"),
            dict(assistant("391"), reasoning_content="nice"), user("Sure?"), assistant("Yes")]


def written(tokenizer, messages, **how):
    return tokenizer.hf.apply_chat_template(messages, tokenize=False, **how)


def test_qwen35_as_it_is_written(folders):
    tokenizer = tokenizer_of(folders, "qwen3.5")
    assert written(tokenizer, DIALOGUE) == QWEN_DIALOGUE
    assert written(tokenizer, [dict(role="system", content="Be brief."), *DIALOGUE]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n" + QWEN_DIALOGUE)
    text = written(tokenizer, [dict(role="system", content="Be brief."), *DIALOGUE], tools=[MULTIPLY])
    assert re.fullmatch(
        r"<\|im_start\|>system\n# Tools\n\n.*<tools>\n(\{.*\})\n</tools>\n.*<tool_call>\n<function=NAME>\n<parameter=\w+>\n.*\n"
        r"</parameter>\n</function>\n</tool_call>\n.*\n\nBe brief.<\|im_end\|>\n", text.removesuffix(QWEN_DIALOGUE), re.DOTALL)
    assert json.dumps(MULTIPLY) in text and text.endswith(QWEN_DIALOGUE)
    # what the prompt opens; and thoughts that stand in the content stay where they were
    ask = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert written(tokenizer, [user("hi")], add_generation_prompt=True) == ask
    assert written(tokenizer, [user("hi")], add_generation_prompt=True, enable_thinking=False) == ask + "\n</think>\n\n"
    for content in ("<think>\nwhy\n</think>\n\nhello", "why\n</think>\n\nhello"):
        assert written(tokenizer, [user("hi"), assistant(content)]) == ask + "why\n</think>\n\nhello<|im_end|>\n"
    values = written(tokenizer, [user("hi"), calling("f", dict(s="a\nb", t=True, n=None, l=[1, "x"], d={}))])
    assert values.endswith(
        "</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\na\nb\n</parameter>\n<parameter=t>\nTrue\n</parameter>\n"
        '<parameter=n>\nNone\n</parameter>\n<parameter=l>\n[1, "x"]\n</parameter>\n<parameter=d>\n{}\n</parameter>\n'
        "</function>\n</tool_call><|im_end|>\n")


def test_harmony_as_it_is_written(folders):
    tokenizer = tokenizer_of(folders, "harmony")
    assert written(tokenizer, DIALOGUE) == HARMONY_SYSTEM + "<|end|>" + HARMONY_DIALOGUE
    system = [dict(role="system", content="Be brief.")]
    assert written(tokenizer, system + DIALOGUE, tools=[MULTIPLY]) == HARMONY_SYSTEM + HARMONY_TOOLS + HARMONY_DIALOGUE
    told = written(tokenizer, [user("hi")], add_generation_prompt=True, reasoning_effort="high", date_string="2025-06-28")
    assert told == HARMONY_SYSTEM.replace("\n\nR", "\nCurrent date: 2025-06-28\n\nR").replace("medium", "high") + (
        "<|end|><|start|>user<|message|>hi<|end|><|start|>assistant")
    for bad in ([user("hi"), tool("1")], [user("hi"), {**DIALOGUE[1], "tool_calls": DIALOGUE[1]["tool_calls"] * 2}]):
        with pytest.raises(Exception, match="needs the name|makes one call"):
            written(tokenizer, bad)


TYPES = [  # JSON's, and as Harmony writes them
    (dict(type="integer"), "number"), (dict(type="boolean", nullable=True), "boolean | null"), ({}, "any"),
    (dict(type="array", items=dict(type="string")), "string[]"), (dict(type="object"), "object"),
    (dict(type="array", items=dict(type=["string", "integer"])), "(string | number)[]"), (dict(type="array"), "any[]"),
    (dict(type="string", enum=["a", "b"]), '"a" | "b"'),
    (dict(anyOf=[dict(type="string"), dict(type="array")]), "string | any[]"),
    (dict(type="object", properties=dict(x=dict(type="number"))), "{\nx?: number,\n}")]


def test_types_in_harmony(folders):
    tokenizer = tokenizer_of(folders, "harmony")
    for schema, text in TYPES:
        parameters = dict(type="object", properties=dict(x=schema), required=["x"])
        function = dict(name="f", description="A.\nB.", parameters=parameters)
        prompt = written(tokenizer, [user("hi")], tools=[dict(type="function", function=function)])
        assert f"// A.\n// B.\ntype f = (_: {{\nx: {text},\n}}) => any;\n\n" in prompt


# what the policy samples, turn by turn, behind what the template has opened; and the same as messages
SAMPLED = {
    "qwen3.5": [QWEN_DIALOGUE.split("<think>\n")[1].split("\n<|im_start|>")[0],
                QWEN_DIALOGUE.split("<think>\n")[2].split("\n<|im_start|>")[0]],
    "harmony": [HARMONY_DIALOGUE.partition("<|start|>assistant")[2].partition("<|start|>functions")[0],
                HARMONY_DIALOGUE.split("391<|end|><|start|>assistant")[1].split("<|start|>user")[0]]}


def conversed(env, prompt, turns, length):
    """The batch of one response, of which the policy samples these ids, turn by turn, as long as there is room."""
    (ids,), turns = env.tokenizer.encode_prompts([prompt]), iter(turns)

    def answer(contexts, which, turn, used):
        new = next(turns)[:length - used[0]]
        return dict(tokens=torch.tensor([contexts[0] + new]), response_mask=torch.ones(1, len(new), dtype=torch.bool),
                    sampler_logprobs=-torch.arange(1., len(new) + 1)[None],
                    finished=torch.tensor([new[-1] in env.tokenizer.eos_ids]))

    return env.converse([dict(prompt=prompt)], [ids], (1, "rollout", 0), ([0], [0]), length, len(ids) + 1, answer, None)


@pytest.mark.parametrize("name", OURS)
def test_a_call_is_read_and_answered_and_the_ids_are_those_of_the_whole(folders, mine, name):
    tokenizer = tokenizer_of(folders, name)
    env = environment_of("", tokenizer, tools=f"{mine}:multiply,{mine}:table", max_turns=3)
    batch = conversed(env, DIALOGUE[:1], [tokenizer.hf.encode(text, add_special_tokens=False) for text in SAMPLED[name]], 400)
    env.tools.process.kill()
    prompt, = tokenizer.encode_prompts([DIALOGUE[:1]])
    ids, own = batch["tokens"][0][batch["attention_mask"][0]].tolist(), batch["response_mask"][0].tolist()
    assert batch["finished"].tolist() == [True] and batch["failed_calls"].tolist() == [0]
    whole = tokenizer.hf.apply_chat_template(DIALOGUE[:4], return_dict=False, **tokenizer.kwargs)
    assert whole[:len(ids)] == ids and len(whole) - len(ids) <= 1  # the line break behind the last turn
    said = env.messages_of(ids[len(prompt):], own[:len(ids) - len(prompt)])
    named = dict(name="multiply") if name == "harmony" else {}
    assert said[1] == dict(tool("391"), **named) and [m["role"] for m in said] == ["assistant", "tool", "assistant"]
    # and where the user goes on, in the words of an environment
    ids += between(tokenizer, user("Sure?"))
    how = dict(tokenizer.kwargs, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.hf.apply_chat_template(DIALOGUE[:5], **how)


def test_each_end_of_a_turn_of_gpt_oss_is_followed_by_the_same(folders):
    """Sampled: <|return|>, <|call|> or <|endoftext|>. What a stop string has ended gets its <|return|>."""
    tokenizer = tokenizer_of(folders, "harmony")
    assert {tokenizer.text_of([i]) for i in tokenizer.eos_ids} == {"<|return|>", "<|call|>", "<|endoftext|>"}
    next_turn = "<|start|>user<|message|>c<|end|><|start|>assistant"
    assert tokenizer.text_of(between(tokenizer, user("c"))) == next_turn
    assert tokenizer.text_of(between(tokenizer, user("c"), ended=False)) == "<|return|>" + next_turn


# ---------------------------------------------------------------------------------------------------------------------
# environments

def dialogue_with(environment, texts, length=30, max_turns=4):
    """The batch of one response whose turns are these texts: each ends with EOS but for one that ends with a blank."""
    env = environment_of(environment, tiny.byte_tokenizer(), max_turns=max_turns, reward_timeout=1)
    turns = [[*text.encode()] + [env.tokenizer.eos_id] * (not text.endswith(" ")) for text in texts]
    return conversed(env, "12", turns, length)


def test_masks_of_a_dialogue(mine):
    """abcd EOS | abc | xy EOS | xy | z: the last turn has no end, and the response no more room."""
    batch = dialogue_with(f"{mine}:pays", ["abcd", "xy", "z "], length=14)
    e, pad = 258, 259
    assert batch["tokens"].tolist() == [[pad, 49, 50, *b"abcd", e, *b"abc", *b"xy", e, *b"xy", *b"z"]]
    own = "TTTTTFFFTTTFFT"
    assert batch["response_mask"].tolist() == [[c == "T" for c in own]]
    assert batch["attention_mask"].tolist() == [[False] + [True] * 16]
    assert batch["sampler_logprobs"].tolist() == [[-1, -2, -3, -4, -5, 0, 0, 0, -1, -2, -3, 0, 0, -1]]
    assert batch["turn_rewards"].tolist() == [[0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0.5, 0, 0, 0]]
    assert batch["finished"].tolist() == [False]


@pytest.mark.parametrize("texts, length, max_turns, tokens", [
    (["abcd", "x"], 30, 2, 5 + 3 + 2),  # no more turns: what is said to the last one is left out
    (["abcd", "x"], 8, 4, 5),  # no room for a token behind what would be said
    (["abcd", "x"], 9, 4, 9), (["ab "], 9, 4, 3)])
def test_where_a_dialogue_is_cut_it_is_not_finished(mine, texts, length, max_turns, tokens):
    batch = dialogue_with(f"{mine}:echo", texts, length, max_turns)
    assert batch["attention_mask"].sum() == 2 + tokens and not batch["finished"].any()
    assert batch["response_mask"][0, tokens - 1]


@pytest.mark.parametrize("function, message", [
    ("raises", r"failed at .*mine\.py, line \d+: KeyError: 'missing'"), ("wrong_role", "wanted None, a string"),
    ("number", "answered 7: wanted None"), ("nan", "reward nan, which is no finite number"),
    ("chance", "two answers to the same dialogue.*third parameter, seed"), ("hangs", "has not answered for 1 s")])
def test_an_environment_that_is_no_good_ends_in_one_line(mine, function, message):
    with pytest.raises(Stop, match=f"^environment = .*{message}"):
        dialogue_with(f"{mine}:{function}", ["abcd"] * 4)


def test_an_environment_cannot_spoil_the_dialogue(mine):
    assert dialogue_with(f"{mine}:spoils", ["abcd"])["finished"].tolist() == [True]


# ---------------------------------------------------------------------------------------------------------------------
# tools

NAMES = ("multiply", "slow", "leaves", "table", "show")


@pytest.fixture
def tools_of(folders, mine):
    """The tools of a run, of a family or with another tokenizer."""
    made = []

    def tools_of(name, tokenizer=None, seconds=10):
        named = ",".join(f"{mine}:{name}" for name in NAMES)
        system = SimpleNamespace(tools=named, reward_timeout=2 * seconds, max_turns=2)
        made.append(Tools(system, tokenizer or tokenizer_of(folders, name)))
        return made[-1]

    yield tools_of
    for tools in made:
        if tools.process:
            tools.process.kill()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps(dict(name=name, arguments=arguments))}\n</tool_call>"


def message_to(name, arguments):
    return ("<|channel|>analysis<|message|>why<|end|><|start|>assistant"
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}")


def said(tools, *texts):
    """What is said to these turns, and how many of their calls have failed."""
    failed = [0] * len(texts)
    answers = tools.answer(list(texts), failed, list(range(len(texts))))
    assert all(reward == 0 for _, reward in answers)
    return [message and message["content"] for message, _ in answers], failed


GOOD = {  # family: {a turn: what is said to it}
    "qwen3": {
        "no call": None, call("multiply", a=37, b=46): "1702", call("slow", seconds=0): "slept",
        call("multiply", a=3) + "\n" + call("table"): '6\n{"a": [1, null]}'},
    "qwen3.5": {
        "why\n</think>\n\n" + tags("multiply", a=37, b=46): "1702",
        tags("show", text="12", flag="True", items='[1, "x"]', either="7"): "('12', True, [1, 'x'], 7)",
        tags("show", text="a\nb\n", flag="false", items="None", either="seven"): "('a\\nb\\n', False, None, 'seven')",
        tags("show", text="<b>x</b> {"): "('<b>x</b> {', False, None, 1)",
        tags("table") + "\n" + call("multiply", a=3): '{"a": [1, null]}\n6'},  # JSON is read, too
    "harmony": {
        message_to("multiply", '{"a": 37, "b": 46}'): "1702", message_to("table", "{}"): '{"a": [1, null]}',
        ' to=functions.multiply<|channel|>commentary json<|message|>{"a": 4}': "8",  # the recipient in the header
        "<|channel|>analysis<|message|>to=functions.table<|end|><|start|>assistant<|channel|>final<|message|>4": None,
        call("multiply", a=3): None}}
BAD = {  # family: {a turn whose call cannot be read: what is said of it}
    "qwen3": {
        call("divide", a=1): "there is no tool 'divide', only multiply, slow", "<tool_call>multiply(2)</tool_call>": "Expecting",
        '<tool_call>{"name": "mul': "Unterminated", "<tool_call>[1]</tool_call>": "'list'",
        '<tool_call>{"name": "multiply", "arguments": 3}</tool_call>': "no JSON object",
        '<tool_call>{"name": {}, "arguments": {}}</tool_call>': "there is no tool",
        "<tool_call>" + "[" * 10**5 + "</tool_call>": "",
        "<tool_call>__import__('os').system('touch HERE')</tool_call>": "Expecting"},
    "qwen3.5": {
        tags("divide", a=1): "there is no tool 'divide'", tags("multiply", a="x"): "'x' is no integer",
        "<tool_call>\n<function=multiply>\n<parameter=a>\n3": "the parameter 'a' has no </parameter>",
        "<tool_call>\n<function=": "there is no tool ''", "<tool_call>multiply(2)": "Expecting value",
        tags("multiply", a="[" * 10**5): "", tags("multiply", a="__import__('os').system('touch HERE')"): "is no integer"},
    "harmony": {
        message_to("divide", "{}"): "no tool 'divide'", message_to("multiply", '{"a": 3'): "Expecting",
        message_to("multiply", "3"): "no JSON object", "<|channel|>commentary to=python code": "Expecting",
        message_to("<|start|>x to=a", "{}"): "no tool 'a'", message_to("<|call|>", "{}"): "no tool ''"}}
LONG = {
    "qwen3.5": ["<tool_call>" + "\n" * 10**6 + "x", "<tool_call>" * 10**5, "<tool_call><function=f>" + "<parameter=" * 10**5,
                "<tool_call><function=f>" + "<parameter=a>x</parameter>" * 10**4],
    "harmony": ["<|start|>" * 10**5 + " to=" * 10**5]}


@pytest.mark.parametrize("name", GOOD)
def test_calls_and_what_they_return(tools_of, name):
    tools = tools_of(name)
    assert said(tools, *GOOD[name]) == ([*GOOD[name].values()], [0] * len(GOOD[name]))
    schema = tools.tokenizer.kwargs["tools"][0]["function"]
    assert schema["name"] == "multiply" and schema["parameters"]["required"] == ["a"]
    assert "multiply" in tools.tokenizer.text_of(tools.tokenizer.encode_prompts([[user("hi")]])[0])


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_cannot_be_read_is_said_and_counted(tools_of, name):
    tools, failed = tools_of(name), [0] * len(BAD[name])
    answers = tools.answer(list(BAD[name]), failed, list(range(len(failed))))
    assert failed == [1] * len(failed) and not tools.process and not os.path.exists("HERE")
    for (message, _), (text, part) in zip(answers, BAD[name].items(), strict=True):
        assert message["content"].startswith("error: this call cannot be read: ") and part in message["content"], text[:99]
        between(tools.tokenizer, message)  # it can be said


@pytest.mark.parametrize("name", LONG)
def test_long_nonsense_is_read_in_no_time(tools_of, name):
    tools = tools_of(name)
    for text in LONG[name]:
        began = time.monotonic()
        tools.calls_in(text)
        assert time.monotonic() - began < 5, text[:99]


def test_a_tool_that_fails_hangs_or_dies_costs_its_own_answer(tools_of):
    tools = tools_of("qwen3")
    assert said(tools, call("table")) == (['{"a": [1, null]}'], [0])  # its process has begun, which may take long
    tools.seconds, began = 1, time.monotonic()
    contents, failed = said(tools, call("slow", seconds=99), call("multiply", a=4))
    assert contents == ["error: it has not answered within 1 s", "8"] and failed == [1, 0] and time.monotonic() - began < 4
    tools.seconds = 10
    assert said(tools, call("leaves")) == (["error: its process has ended"], [1])
    contents, failed = said(tools, call("multiply", a=5), call("multiply", b=1), call("multiply", a="x", c=2))
    assert contents[0] == "10" and re.match("error: TypeError: .*missing", contents[1]) and failed == [0, 1, 1]
    assert contents[2].startswith("error: TypeError: ")


# ---------------------------------------------------------------------------------------------------------------------
# a response_template of the tokenizer: transformers reads the turn

RESPONSE = dict(
    start_anchor="<|im_start|>assistant\n", defaults=dict(role="assistant"), fields=dict(
        thinking=dict(open="<think>", close="</think>"), content=dict(close="<|im_end|>"),
        tool_calls=dict(open="<tool_call>", close="</tool_call>", repeats=True, content="json",
                        transform=dict(type="function", function=dict(name="{content.name}", arguments="{content.arguments}")))))
# calls in words: CALL multiply a=3 b=4, with values that are cast by the tool's types
WORDY = dict(start_anchor="<|im_start|>assistant\n", fields=dict(content={}, tool_calls=dict(
    open_pattern=r"CALL (?P<name>\w+)", close="\n", repeats=True, content="kv-lines", content_args=dict(line_sep=" ", kv_sep="="),
    transform=dict(type="function", function=dict(name="{name}", arguments="{content}")))))


@pytest.fixture
def reading(folders, tmp_path, tools_of):
    """Tools with this response_template, as a user has it: in tokenizer_config.json."""
    def reading(template, **how):
        shutil.copytree(folders["qwen3"], tmp_path / "model")
        file = tmp_path / "model" / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(response_template=template)))
        return tools_of("", load_tokenizer(str(tmp_path / "model"), CHATML), **how)
    return reading


def test_a_response_template_finds_calls_and_says_what_is_wrong(reading):
    tools = reading(RESPONSE)
    both = "<think>I say <tool_call> to call.</think>" + call("multiply", a=3) + "\n" + call("table")
    cut, other = '<tool_call>{"name": "mul', call("divide", a=1)
    contents, failed = said(tools, "no call", call("multiply", a=37, b=46), both, cut, "<tool_call>3</tool_call>", other)
    assert contents[:3] == [None, "1702", '6\n{"a": [1, null]}'] and failed == [0, 0, 0, 1, 1, 1]
    assert contents[3] == "error: this turn cannot be read: ValueError: json parser could not parse region as JSON."
    assert contents[4].startswith("error: this turn cannot be read: ") and "no tool 'divide'" in contents[5]
    answers = tools.answer([cut, call(5), call("divide")], [0] * 3, [0, 1, 2])  # who says it: a name that can be written
    assert [message["name"] for message, _ in answers] == ["multiply", "multiply", "divide"]


def test_a_response_template_of_another_way_to_write_calls(reading):
    texts = "I ask.\nCALL multiply a=37 b=46\n", "CALL multiply a=x\n"  # cast if it can
    assert said(reading(WORDY), *texts) == (["1702", "xx"], [0, 0])


def test_a_pattern_that_takes_for_ever_costs_its_turn(reading):
    """A response template is the user's own file; one with a catastrophic pattern does not hang a run."""
    slow = dict(RESPONSE, fields=dict(content={}, tool_calls=dict(open_pattern=r"(?:x|xx|x+)+(?:x|xx|x+)+!", close="\n")))
    began = time.monotonic()
    contents, failed = said(reading(slow, seconds=0.5), "x" * 40 + " !", "no call")
    assert contents == ["error: this turn cannot be read: TimeoutError: it has not ended within 0.5 s", None]
    assert failed == [1, 0] and time.monotonic() - began < 10


def test_tools_that_cannot_be_described(folders, mine):
    tokenizer = tokenizer_of(folders, "mistral")
    for name, message in (("", "wanted FILE.py:FUNCTION"), (":none", "has no 'none'"), (":table", "no variable tools"),
                          (":bare", "cannot be described to the policy")):
        with pytest.raises(BadInput, match=message):
            environment_of("", tokenizer, tools=mine + name)


def test_keys_that_do_not_go_together():
    keys = dict(environment="mine.py:env", tools="", generate_tp=1)
    check_environment(SimpleNamespace(**keys))
    for bad in (dict(tools="mine.py:f"), dict(generate_tp=2)):
        with pytest.raises(BadConfig):
            check_environment(SimpleNamespace(**keys | bad))


# ---------------------------------------------------------------------------------------------------------------------
# runs

def test_a_run_resumes_to_the_bit_and_a_dialogue_is_seen(world, mine, tmp_path):
    def run(iterations):
        return one_run("grpo.py", world.grpo(
            "out", environment=f"{mine}:counts", reward_functions="environment", max_new_tokens=12, max_turns=3,
            max_iters=iterations, lr_decay="constant", checkpoint_interval=1, save_rollouts=1, learning_rate=1e-3))

    runs = forked(tmp_path, dict(whole=[run(2)], parts=[run(1), run(2)])).succeeded()
    log = assert_same_run(runs.out("whole"), runs.out("parts"))
    assert 1 < log[0]["objective/turns"] <= 3 and 0 < log[0]["objective/environment_share"] < 1
    with open(f"{runs.out('whole')}/rollouts.jsonl", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    several = [row for row in rows if len(row.get("messages", [])) > 1]
    assert several
    for row in several:  # the environment's words are those that it would say again
        for said, reply in zip(row["messages"][::2], row["messages"][1::2], strict=False):
            assert reply == user(f"{len(said['content'])}\n")


def test_runs_with_tools_begin_and_log_failed_calls(folders, mine, tmp_path):
    """With each template of ours: random models that call nothing."""
    tiny.jsonl(tmp_path / "chats.jsonl", [dict(prompt=[user(text)]) for text in ("1+2", "3*4", "hello")])
    templates = dict(qwen3=CHATML) | {name: f"{TEMPLATES}/{name}.jinja" for name in OURS}
    runs = in_a_row(tmp_path, {name: one_run("grpo.py", tiny.arguments(dict(
        out_dir="out", policy_path=folders[name], prompts_path=tmp_path / "chats.jsonl", chat_template=template,
        tools=f"{mine}:multiply", reward_functions=f"{mine}:score", kl_coef=0.0, max_iters=1,
        batch_size=4, group_size=2, max_new_tokens=5, checkpoint_interval=0, device_type="cpu")))
        for name, template in templates.items()}).succeeded()
    assert all(runs.log(name)[0]["objective/failed_calls"] == 0 for name in templates)


REFUSED = {  # what the line says: the keys
    "no file": dict(environment="none.py:env"), "wanted FILE.py:FUNCTION": dict(environment="mine"),
    "there is none; type --environment": dict(reward_functions="environment"), "max_turns": dict(max_turns=0)}


def test_bad_input_is_one_line(world, tmp_path):
    cases = {str(number): [one_run("grpo.py", world.grpo("out", **keys))] for number, keys in enumerate(REFUSED.values())}
    for (result,), words in zip(forked(tmp_path, cases).values(), REFUSED, strict=True):
        is_one_line(result, "grpo.py", [words])


# ---------------------------------------------------------------------------------------------------------------------
# docs/turns.md: what it prints runs


def examples():
    """The names that the blocks of code in docs/turns.md define; of two of a name the first."""
    with open(f"{ROOT}/docs/turns.md", encoding="utf-8") as f:
        blocks = re.findall(r"(?:^    .*\n|^\n)+", f.read(), re.MULTILINE)
    names = {}
    for block in blocks:
        if "def " in block:
            exec(re.split(r"\n    python ", textwrap.dedent(block))[0].split("\npython ")[0], names)
    return names


class Game:
    """Higher or lower, by reset and step."""

    def __init__(self, most):
        self.most = most

    def reset(self, seed):
        self.number = seed % self.most

    def step(self, text):
        if int(text) == self.number:
            return "", 1.0, True
        return "higher" if self.number > int(text) else "lower", -0.1, False


class Counter:
    """TRL's shape: a method is a tool."""

    def reset(self, start, **row):
        self.count = start

    def add(self, n):
        self.count += n
        return self.count

    def get_reward(self):
        return float(self.count)


def test_the_examples_of_the_docs():
    names = examples()
    assert names["env"]([user("?"), assistant("blue")], {}) == (None, 1.0)
    assert names["multiply"](3, 4) == 12
    play = names["replayed"](lambda row: Game(row["most"]))
    row, dialogue = dict(seed=47, most=10), [user("0 to 9")]
    for guess, reply in (("3", ("higher", -0.1)), ("9", ("lower", -0.1)), ("7", (None, 1.0))):
        dialogue += [assistant(guess)]
        assert play(dialogue, row) == reply
        dialogue += [user(reply[0])]
    count = names["factory"](Counter, lambda text: json.loads(text) if text.startswith("{") else None)
    dialogue = [user("?"), assistant('{"name": "add", "arguments": {"n": 4}}')]
    assert count(dialogue, dict(start=1, prompt="?")) == tool("5")
    assert count([*dialogue, tool("5"), assistant("done")], dict(start=1, prompt="?")) == (None, 5.0)
