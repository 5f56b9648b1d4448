"""
Several turns (options/environment.py, options/tools.py): which templates keep a dialogue exact,
messages and ids, errors of an environment or a tool, and runs. The tokenizers are of bytes, with
the special tokens of a family.
"""
import contextlib
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from byte_tokenizer import write_byte_tokenizer
from errors import BadInput, Stop
from options import environment
from options.environment import Environment, between, check_template
from options.tools import Tools
from tokenizer import load_tokenizer

import tiny
from test_batches import CHAT
from test_tokenizer import CHATML, assistant, turn, user
from tiny import EOS, ROOT

QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
        "</tool_call>"]
HARMONY = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>", "<|channel|>",
           "<|constrain|>"]
FAMILIES = {  # {a template of ours: its special tokens, those that end a response}
    "chatml": (QWEN, ["<|endoftext|>"]), "qwen3.5": (QWEN, ["<|endoftext|>"]),
    "harmony": (HARMONY, ["<|return|>", "<|call|>"])}
# before transformers 5.19 the schema of a plain list says that it is an object
knows_lists = pytest.mark.skipif(transformers.__version__ < "5.19", reason="of transformers 5.19")

MINE = '''
import inspect, os, re, time
from typing import Any, Literal, Optional

# environments
echo = lambda messages, row: messages[-1]["content"][:3]
raises = lambda messages, row: row["missing"]
wrong_role = lambda messages, row: dict(role="system", content="x")
number = lambda messages, row: 7
nan = lambda messages, row: (None, float("nan"))
chance = lambda messages, row, asked=[]: asked.append(1) or str(len(asked))
hangs = lambda messages, row: re.fullmatch("(a+)+b", "a" * 60)  # years
spoils = lambda messages, row: messages[-1].update(content="spoilt") or messages.clear()

# tools
def multiply(a: int, b: int = 2):
    print("a tool may print")
    return a * b

def slow(seconds: float):
    time.sleep(seconds)
    return "slept"

def leaves():
    os._exit(3)

def table(n: int = 0):
    return ({"Z\u00fcrich": [1, None]}, "\u00e9!", None, chr(0xd800), "x" * 20_000)[n]

def typed(i: int = 0, f: float = 0.0, s: str = "", b: bool = False, o: dict[str, int] = None,
          l: list[int] = None, p: tuple[int, str] = (), m: Optional[int] = 0,
          e: Literal["x", "y"] = "x", n: list[int] | dict = None, a: Any = 0,
          q: list = None, t: int | str = 1):
    return repr((s, b, q, t))

for f in multiply, slow, leaves, table, typed:
    f.__doc__ = f"Call {f.__name__}.\\n\\nArgs:\\n" + "".join(
        f"    {name}: _\\n" for name in inspect.signature(f).parameters)

def bare(a):
    return a
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("mine") / "mine.py", MINE)


@pytest.fixture
def tokenizer_of(tmp_path):
    """The tokenizer of a family, with a template of ours, or with this text of one."""
    def tokenizer_of(family, template="", **keys):
        special, ends = FAMILIES[family]
        write_byte_tokenizer(tmp_path / family, special)
        file = f"{ROOT}/options/templates/{family}.jinja"
        if template:
            file = tiny.write(tmp_path / "mine.jinja", template)
        system = tiny.keys_of_system(chat_template=file, **keys)
        tokenizer = load_tokenizer(str(tmp_path / family), system)
        tokenizer.eos_ids |= {tokenizer.vocabulary[text] for text in ends}  # as fit would
        return tokenizer

    return tokenizer_of


def environment_of(function, tokenizer, **keys):
    """The environment of a run with these keys."""
    system = dict(environment=function, tools="", max_turns=9, reward_timeout=900)
    return Environment(SimpleNamespace(**system | keys), tokenizer)


# templates

TEXT = 'message["content"]'  # in CHATML
FORGETS = CHATML.replace(TEXT, f"({TEXT}.split('</think>')[-1].lstrip() if message.role == "
                         f"'assistant' and not loop.last else {TEXT})")
NO_TOOL = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tool') }}" \
    "{% endfor %}" + CHATML
ENDLESS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" \
    "{% if add_generation_prompt %}[assistant]{% endif %}"
REWRITES = CHATML.replace(TEXT, f"{TEXT} + ('' if loop.last else ' ')")
KEPT = [("chatml", ""), ("qwen3.5", ""), ("qwen3.5", "enable_thinking=False"), ("harmony", "")]
REFUSED = [  # a template, who answers, why it is refused
    (NO_TOOL, "tool", "refuses the messages"),
    (ENDLESS, "user", "no end behind an assistant's message"),
    (FORGETS, "user", "drops the thoughts of earlier turns.*templates/chatml.jinja"),
    (REWRITES, "user", "in another way when another")]


def test_a_template_must_keep_earlier_turns(tokenizer_of):
    for family, kwargs in KEPT:
        for role in ["user", "tool"][:1 if kwargs else 2]:
            check_template(tokenizer_of(family, template_kwargs=kwargs), role)
    for template, role, why in REFUSED:
        with pytest.raises(BadInput, match=why):
            check_template(tokenizer_of("chatml", template), role)
    # ends that are too many or too few: a generation_config.json may be older than the templates
    for token, role in ("<|end|>", "user"), ("<|call|>", "tool"):
        tokenizer = tokenizer_of("harmony")
        tokenizer.eos_ids ^= {tokenizer.specials[token]}
        with pytest.raises(BadInput, match="eos_token_id in generation_config.json"):
            check_template(tokenizer, role)


def test_a_turn_that_a_stop_string_has_ended_gets_its_end(tokenizer_of, mine):
    tokenizer = tokenizer_of("chatml")
    env = environment_of(f"{mine}:echo", tokenizer)
    extra = between(tokenizer, user("c"), ended=False)
    assert extra == [tokenizer.specials["<|im_end|>"]] + between(tokenizer, user("c"))
    said = tokenizer.encode_texts(["</answer>"])[0]
    own = [True] * len(said) + [False] * len(extra)
    assert env.messages_of(said + extra, own) == [assistant("</answer>"), user("c")]


# dialogues with tools, as templates of ours write them


def tags(name, **parameters):
    """A call as Qwen3.5 writes it."""
    lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in parameters.items()]
    return "\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"])


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps(dict(name=name, arguments=arguments))}\n</tool_call>"


WRITE = {"chatml": call, "qwen3.5": tags}


def message_to(name, arguments):
    return ("<|channel|>analysis<|message|>why<|end|><|start|>assistant"
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}")


CALLS = dict(  # what is sampled, what stands before and between; all without the list of tools
    chatml=("<|im_start|>user\n17*23?<|im_end|>\n<|im_start|>assistant\n",
            call("multiply", a=17, b=23) + "<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n391\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n", "391<|im_end|>"),
    harmony=("<|start|>user<|message|>17*23?<|end|><|start|>assistant",
             message_to("multiply", '{"a": 17, "b": 23}') + "<|call|>",
             "<|start|>functions.multiply to=assistant<|channel|>commentary<|message|>391<|end|>"
             "<|start|>assistant", "<|channel|>final<|message|>391<|return|>"))
CALLS["qwen3.5"] = (
    CALLS["chatml"][0] + "<think>\n",
    f"a tool\n</think>\n\n{tags('multiply', a=17, b=23)}<|im_end|>",
    CALLS["chatml"][2] + "<think>\n", "nice\n</think>\n\n391<|im_end|>")


def conversed(env, prompt, turns, length):
    """The batch of one response, of which the policy samples these ids, turn by turn."""
    (ids,), turns = env.tokenizer.encode_prompts([prompt]), iter(turns)

    def respond(contexts, uniforms, budgets):
        new = next(turns)[:budgets[0]]
        return (torch.tensor([new]), -torch.arange(1.0, len(new) + 1)[None],
                torch.tensor([len(new)]),
                torch.tensor([new[-1] in env.tokenizer.eos_ids]))

    return env.converse([dict(prompt=prompt)], [ids], torch.zeros(1, length), len(ids) + 1,
                        respond, (1, "rollout", 0), ([0], [0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_with_a_call_has_the_ids_of_the_whole(tokenizer_of, mine, family):
    """Character for character; what the policy says is trained, and the messages come back."""
    tokenizer, (before, *texts) = tokenizer_of(family), CALLS[family]
    env = environment_of("", tokenizer, tools=f"{mine}:multiply,{mine}:table", max_turns=3)
    turns = [tokenizer.hf.encode(text, add_special_tokens=False) for text in texts[::2]]
    batch = conversed(env, [user("17*23?")], turns, 800)
    begin, end = batch["begins"][0], batch["lengths"][0]
    ids, own = batch["tokens"][0, :end], batch["response_mask"][0, begin:end]
    text, response = tokenizer.text_of(ids.tolist()), ids[begin:].tolist()
    assert text.endswith(before + "".join(texts)) and "Call multiply." in text
    assert batch["finished"].tolist() == [True] and batch["failed_calls"].tolist() == [0]
    assert [ids[:begin].tolist()] == tokenizer.encode_prompts([[user("17*23?")]])
    assert ids[begin:][own].tolist() == turns[0] + turns[1]
    said = env.messages_of(response, own.tolist())
    name = dict(name="multiply") if family == "harmony" else {}
    assert said[1] == turn("tool", "391") | name
    assert [m["role"] for m in said] == ["assistant", "tool", "assistant"]
    assert family != "harmony" or (
        text.startswith("<|start|>system<|message|>You are ChatGPT") and "a: number" in text)


# environments


NO_GOOD = {  # an environment: a part of its line
    "raises": r"failed at .*mine\.py, line \d+: KeyError: 'missing'", "number": "answered 7",
    "wrong_role": r"a string, or \{role: user or tool, content\}; or", "nan": "a finite number",
    "chance": "two answers to the same dialogue", "hangs": r"not answered for 1 s at .*mine\.py"}


def test_an_environment_that_is_no_good_ends_in_one_line(world, mine):
    """It gets a copy of the dialogue, which it may spoil."""
    tokenizer = load_tokenizer(world.chatty, tiny.keys_of_system())

    def dialogue_with(function):
        env = environment_of(f"{mine}:{function}", tokenizer, max_turns=4, reward_timeout=1)
        return conversed(env, "12", [[*b"abcd", EOS]] * 4, 30)

    assert dialogue_with("spoils")["finished"].tolist() == [True]
    for function, part in NO_GOOD.items():
        with pytest.raises(Stop, match=f"^environment = .*{part}") as e:
            dialogue_with(function)
        assert "\n" not in str(e.value)


# tools


@pytest.fixture
def tools_of(tokenizer_of, mine):
    named = ",".join(f"{mine}:{name}" for name in "multiply slow leaves table typed".split())
    system = SimpleNamespace(tools=named, reward_timeout=120, max_turns=2)
    return lambda family: Tools(system, tokenizer_of(family))


def said(tools, *texts):
    """The answers to these turns, and how many of their calls have failed."""
    answers = tools.answer(texts, [""] * len(texts))
    assert all(reward == 0 and (message is None or re.fullmatch(r"[\w.-]+", message["name"]))
               for message, reward, _ in answers)  # gpt-oss' template writes the name
    return [message and message["content"] for message, *_ in answers], [n for *_, n in answers]


ERROR = "error: "
ANSWERS = {  # family: {a turn: the answer; of a call that cannot be read ERROR and a part of it}
    "chatml": {
        "no call": None, call("multiply", a=37, b=46): "1702",
        call("multiply", a=3) + "\n" + call("table"): '6\n{"Z\u00fcrich": [1, null]}',
        call("table", n=1): "\u00e9!", call("table", n=2): "null", call("table", n=3): "?",
        call("table", n=4): "x" * 10_000, call("divide", a=1): ERROR + "no tool 'divide', only mul",
        '<tool_call>{"name": "mul': ERROR, '<tool_call>{"arguments": {}}</tool_call>': ERROR,
        '<tool_call>{"name": "multiply", "arguments": 3}</tool_call>': ERROR + "no JSON object",
        call("multiply", a=1, c=2): ERROR + "TypeError", call("multiply", a="21"): ERROR + "a = "},
    "qwen3.5": {
        "why\n</think>\n\n" + tags("multiply", a=37, b=46): "1702",
        tags("typed", s="a\nb\n", b="false", q='[1, "x"]', t="seven"):
            "('a\\nb\\n', False, [1, 'x'], 'seven')",
        tags("table", n=1) + "\n" + call("multiply", a=3): "\u00e9!\n6",  # JSON is read, too
        "<tool_call>\n<function=multiply>\n<parameter=a>\n3": ERROR + "has no </parameter>",
        tags("multiply", a="[" * 10**5): ERROR,
        tags("multiply", a="__import__('os').system('touch HERE')"): ERROR + "integer"},
    "harmony": {
        message_to("multiply", '{"a": 37, "b": 46}'): "1702",
        ' to=functions.multiply<|channel|>commentary json<|message|>{"a": 4}': "8",
        "<|channel|>analysis<|message|>to=functions.table<|end|><|start|>assistant"
        "<|channel|>final<|message|>4": None, call("multiply", a=3): None,
        message_to("multiply", '{"a": 3'): ERROR, "<|channel|>commentary to=python code": ERROR}}


@knows_lists
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_answered_or_their_faults_said(tools_of, family):
    contents, failed = said(tools_of(family), *ANSWERS[family])
    for content, bad, (text, want) in zip(contents, failed, ANSWERS[family].items(), strict=True):
        assert bad == (want or "").startswith(ERROR), text[:99]
        assert content == want or bad and content.startswith(ERROR) and want[7:] in content, content
    assert not os.path.exists("HERE")


def test_a_tool_that_hangs_or_dies_costs_its_own_answer(tools_of):
    tools = tools_of("chatml")
    assert said(tools, call("table"))[1] == [0]  # its process has begun, which may take long
    tools.seconds = 2
    contents, failed = said(tools, call("slow", seconds=99), call("multiply", a=4))
    assert contents == ["error: it has not answered within 2 s", "8"] and failed == [1, 0]
    assert tools.process.poll() is not None  # with the call that hangs
    tools.seconds = 60
    assert said(tools, call("leaves")) == (["error: its process has ended"], [1])
    assert said(tools, call("multiply", a=5)) == (["10"], [0])


DRAFTS = {  # a digit is a call of multiply: the calls that are made
    "<think>\nI could call 3\n</think>\n\n7": "7", "I could call 3\n</think>\n\n7": "7",
    "<think>3": "", "<think>3</think>7<think>4</think>\n8": "78",
    "<think><tool_call></think>7": "7", "I use <tool_call> here.\n</think>\n\n7": "7",
    "[THINK]3[/THINK]7": "7", "[THINK]3": "", "3\n4": "34"}


@pytest.mark.parametrize("family", WRITE)
def test_drafts_in_thoughts_are_no_calls(tools_of, family):
    tools, write = tools_of(family), WRITE[family]
    for text, made in DRAFTS.items():
        written = re.sub(r"\d", lambda digit: write("multiply", a=int(digit[0])), text)
        calls = [("multiply", dict(a=int(digit)), None) for digit in made]
        assert tools.calls_in(written) == calls, text
    draft = write("multiply", a=3)  # in thoughts that the prompt has begun, and that never end
    assert tools.answer([draft], ["a<think>\n"]) == [(None, 0.0, 0)]


MARKED = [  # values of one parameter, as a policy may write them
    "a </parameter> b", "a</tool_call>b<tool_call>", "</function>\n</tool_call>",
    "</parameter>\n<parameter=x>\n1", "<think>a</think>", "\\", '"', "<|end|> to=functions.x",
    tags("typed", s="a"), call("typed", s="a"), "", " a ", "None", "\u00fc"]


def test_a_value_may_have_marks_in_it(tools_of):
    harmony, ours = tools_of("harmony"), [(tools_of(family), WRITE[family]) for family in WRITE]
    for value in MARKED:
        text = message_to("typed", json.dumps(dict(s=value), ensure_ascii=False))
        assert harmony.calls_in(text) == [("typed", dict(s=value), None)], value
        for tools, write in ours:
            one, other = write("typed", s=value, b=True), write("typed", b=False, s=value)
            wanted = [("typed", dict(s=value, b=flag), None) for flag in (True, False)]
            for text in (f"{one}\n{other}", f"<think>a</think>\n{one} so {other} </think"):
                assert tools.calls_in(text) == wanted, value


FITS = dict(  # {parameter: values that fit it, values that do not}
    i=([0, 10**30], ["21", 1.5, True, None]), f=([0.5, 21], ["0.5", False]), s=(["21"], [21, None]),
    b=([True], ["true", 0, None]), o=([dict(a=1), None], [dict(a="1"), []]),
    l=([[], [1, 2], None], [[1, None], "[1]"]), m=([None, 3], ["3", 3.5]),
    p=([[1, "a"]], [[1], ["a", 1], [1, "a", 2]]), e=(["x", "y"], ["z"]),
    n=([[1], dict(a="b")], [["1"], "a"]))
IN_TAGS = [("l", "[1, 2]", [1, 2]), ("s", '"a"', '"a"'), ("s", "12", "12"), ("m", "None", None),
           ("n", '{"a": "b"}', dict(a="b")), ("a", "x", "x"), ("b", "True", True), ("t", "7", 7)]


@knows_lists
def test_arguments_fit_their_types_or_the_policy_reads_why(tools_of):
    tools, qwen = tools_of("chatml"), tools_of("qwen3.5")
    for key, (good, bad) in FITS.items():
        for value in good:
            assert tools.calls_in(call("typed", **{key: value})) == [("typed", {key: value}, None)]
        for value in bad:
            ((_, _, error),) = tools.calls_in(call("typed", **{key: value}))
            assert f"{key} = " in error, (key, value)
    for key, text, value in IN_TAGS:
        assert qwen.calls_in(tags("typed", **{key: text})) == [("typed", {key: value}, None)]


TAGGED = "<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}" \
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n" \
    "{% endfor %}</function>"
READ = ["<tool_call>{{ c | tojson }}</tool_call>", f"<tool_call>\n{TAGGED}</tool_call>"]
NOT_READ = [
    "", '<tool_call>{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}</tool_call>',
    f"<think>{READ[0]}</think>", "[TOOL_CALLS][{{ c | tojson }}]"]


def test_the_templates_own_call_must_be_read(tokenizer_of, mine):
    for way in READ + NOT_READ:
        calls = "{% for c in message.tool_calls or [] %}{% set c = c.function %}" + way
        template = CHATML.replace(f'{TEXT} + "', f'{TEXT} }}}}{calls}{{% endfor %}}{{{{ "')
        tokenizer = tokenizer_of("chatml", template + "{# tools #}")
        refused = pytest.raises(BadInput, match="call of .*is not read|sampled|drops")
        with contextlib.nullcontext() if way in READ else refused as e:
            environment_of("", tokenizer, tools=f"{mine}:multiply,{mine}:typed")
        assert way in READ or "\n" not in str(e.value)


def test_tools_that_cannot_be_described(tokenizer_of, mine):
    tokenizer = tokenizer_of("chatml", CHATML)
    for name, part in (("", "FILE.py:FUNCTION"), (":none", "'none'"),
                       (":table", "no variable tools"), (":bare", "cannot be described")):
        with pytest.raises(BadInput, match=part):
            environment_of("", tokenizer, tools=mine + name)
    with pytest.raises(BadInput, match="both given"):
        environment.environment_of(SimpleNamespace(environment="a.py:b", tools="a.py:c"), tokenizer)


# runs


def test_a_run_with_tools_on_two_ranks(world, mine, tmp_path):
    """A random model that calls nothing. The tool stands in each prompt that it reads."""
    rule = "named = lambda batch: ['multiply' in text for text in batch['prompts']]\n"
    keys = tiny.keys_of(
        world, "grpo.py", policy_path=world.chatty, tools=f"{mine}:multiply", eval_path="",
        prompts_path=tiny.jsonl(tmp_path / "chats.jsonl", [dict(prompt=[user("1+2")])] * 3),
        chat_template=tiny.write(tmp_path / "t.jinja", CHAT), max_iters=1, reward_timeout=40,
        reward_functions=tiny.write(tmp_path / "rule.py", rule) + ":named")
    first = tiny.read_log(tiny.well("grpo.py", tmp_path, keys, ranks=2))[0]
    assert first["objective/failed_calls"] == 0
    assert first["objective/turns"] == first["objective/scores"] == 1
