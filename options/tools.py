"""
Tools: the key tools, functions that the policy may call, as the environment of a run; docs/turns.md
has an example, and says how calls are answered. They are written as JSON, as most families do; in
tags, as Qwen3.5 (each on a line of its own); or as gpt-oss does:

    <tool_call>{"name": "multiply", "arguments": {"a": 37, "b": 46}}</tool_call>
    <tool_call><function=multiply><parameter=a>37</parameter> ... </function></tool_call>
    <|channel|>commentary to=functions.multiply <|constrain|>json<|message|>{"a": 37}<|call|>

The functions run in a process beside each rank, so one that hangs can be killed; and the policy's
calls are read as data, never as Python. Each call is made once, and its result stands in the
dialogue, which is saved with the batch. So a tool need not be pure, but where it answers by chance
a resumed run is not the same to the bit.
"""
import contextlib
import inspect
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from errors import BadInput, first_line, shorten
from grading.marks import THOUGHTS
from options.user_code import load_function

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
AT_ONCE = 16  # calls of a rank that are under way at a time
LONGEST = 10_000  # characters of a result, and of a call with the mark of its end in a value
# how others write the three values that JSON spells in its own way
WORDS = {"True": "true", "False": "false", "None": "null"}
FIRST, LAST = "|".join(THOUGHTS[::2]), "|".join(THOUGHTS[1::2])  # the marks around thoughts
PAIRS = zip(THOUGHTS[::2], THOUGHTS[1::2], strict=True)
MARKS = re.compile("(?=[<[◁H])(?:" + "".join(
    rf"(?:{first}).*?(?:{last}|\Z)|" for first, last in PAIRS) + rf"{LAST}|<tool_call>\s*)", re.S)
BEGUN = re.compile(rf"(?:{FIRST})\s*\Z")  # thoughts that the prompt has begun
NEXT = re.compile(r"<tool_call>\s*(?:<function=|\{)")
# {a type of JSON, as schemas name it: Python's}; True is of int, too
KINDS = dict(boolean=bool, integer=int, number=float, string=str, array=list, object=dict,
             null=type(None))


class Tools:
    """The tools of this rank. schemas: what the template is told of them. Raises BadInput."""

    def __init__(self, system, tokenizer):
        from transformers.utils import get_json_schema

        where = f"tools = {system.tools!r}"
        self.named = [name.strip() for name in system.tools.split(",")]
        self.schemas, self.types = [], {}  # and {tool: {parameter: its schema}}
        for named in self.named:
            function = load_function(named, where)
            try:
                self.schemas.append(get_json_schema(function))
                its = inspect.signature(function).parameters
            except Exception as e:  # transformers' own: no docstring, no types
                raise BadInput(f"{where}: {named} cannot be described to the policy: "
                               f"{first_line(e)}") from e
            types = self.types[function.__name__] = {}
            for key, schema in self.schemas[-1]["function"]["parameters"]["properties"].items():
                types[key] = {k: v for k, v in schema.items() if k != "description"}
                if its[key].default is None:  # it may be given, too
                    types[key]["nullable"] = True
        if not re.search(r"\btools\b", tokenizer.chats.template if tokenizer.chats else ""):
            raise BadInput(f"{where}: the template of {tokenizer.path} has no variable tools; type "
                           "one that has it, --chat_template=options/templates/chatml.jinja")
        self.harmony = "<|channel|>" in tokenizer.chats.template
        self.process = None
        self.seconds = system.reward_timeout / system.max_turns  # for the calls of one turn

    def answer(self, texts, begun):
        """
        The reply to each of these turns: [(message or None, 0.0, how many of its calls have
        failed), ...]. begun: the text before each turn, whose end may begin the turn's thoughts.
        """
        calls = []  # of each turn
        for before, text in zip(begun, texts, strict=True):
            mark = BEGUN.search(before)
            calls.append(self.calls_in(mark[0] + text if mark else text))
        outcomes = iter(self.run([call[:2] for its in calls for call in its if call[2] is None]))
        replies = []
        for its in calls:
            said = [next(outcomes) if error is None else (False, error) for _, _, error in its]
            content = "\n".join(text if good else f"error: {text}" for good, text in said)
            name = its[-1][0] if its else None  # gpt-oss reads who says something
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name):
                name = next(iter(self.types))
            message = dict(role="tool", name=name, content=content) if its else None
            replies.append((message, 0.0, sum(not good for good, _ in said)))
        return replies

    def calls_in(self, text):
        """The calls that a turn makes: (name, arguments, None), or (name, None, what is wrong)."""
        if self.harmony:  # a call is the last message of a turn
            header, _, arguments = text.rpartition("<|end|><|start|>")[2].partition("<|message|>")
            to = re.findall(r"\bto=([^\s<]+)", header)
            written = [(to[-1].removeprefix("functions."), arguments)] if to else []
        else:
            written = written_in(text)
        calls = []
        for call in written:
            name = None
            try:
                name, arguments = call if self.harmony else self.parsed(call)
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                if not isinstance(name, str) or name not in self.types:
                    raise ValueError(f"there is no tool {shorten(name)}, only "
                                     f"{', '.join(self.types)}")
                if not isinstance(arguments, dict):
                    raise ValueError("the arguments are no JSON object")
                for key, schema in self.types[name].items():  # for others Python has an error
                    if key in arguments and not fits(arguments[key], schema):
                        raise ValueError(f"{key} = {shorten(arguments[key])} does not fit {schema}")
                calls.append((name, arguments, None))
            except (ValueError, KeyError, TypeError, RecursionError) as e:
                calls.append((name, None, f"this call cannot be read: {first_line(e)[:200]}"))
        return calls

    def parsed(self, call):
        """(name, arguments) of a call, which stands as JSON or in tags. Raises ValueError."""
        head, begun, rest = call.strip().partition("<function=")
        if head or not begun:
            parts = json.loads(call)
            return parts["name"], parts.get("arguments", {})
        name, _, rest = rest.partition(">")
        types, arguments = self.types.get(name, {}), {}
        _, begun, rest = rest.partition("<parameter=")
        rest, ended, _ = rest.rpartition("</parameter>")
        if begun and not ended:
            raise ValueError("the last parameter has no </parameter>")
        # a value may have such tags in it, too: it ends where another parameter of the tool begins
        known = "|".join(map(re.escape, types))
        ends = re.compile(rf"</parameter>\s*<parameter=(?=(?:{known})>)")
        for part in ends.split(rest) if begun else ():
            key, _, value = part.partition(">")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(value, types.get(key, {}))
        return name, arguments

    def run(self, calls):
        """Make calls [(name, arguments)]: [(whether it went well, text), ...]."""
        if not calls:
            return []
        if self.process is None or self.process.poll() is not None:
            code = (f"import sys; sys.path.insert(0, {ROOT!r}); "
                    f"from options.tools import serve; serve({self.named!r})")
            self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE)
        fault = f"it has not answered within {self.seconds:.3g} s"
        end = time.monotonic() + self.seconds
        pipe, rest, results = self.process.stdout, b"", {}  # {number of a call: its result}
        try:
            for n, call in enumerate(calls):
                self.process.stdin.write(json.dumps([n, *call]).encode() + b"\n")
            self.process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(pipe, selectors.EVENT_READ)
                while len(results) < len(calls) and selector.select(max(end - time.monotonic(), 0)):
                    read = os.read(pipe.fileno(), 1 << 16)
                    if not read:
                        raise BrokenPipeError
                    *lines, rest = (rest + read).split(b"\n")
                    results |= {n: (good, text) for n, good, text in map(json.loads, lines)}
        except BrokenPipeError:  # a tool has ended the process
            fault = "its process has ended"
        if len(results) < len(calls):  # with the calls that hang
            self.process.kill()
            self.process.wait()
        return [results.get(n, (False, fault)) for n in range(len(calls))]


def written_in(text):
    """The texts of the calls in a turn, but for those in its thoughts."""
    calls, at = [], 0
    while mark := MARKS.search(text, at):
        at = mark.end()
        if not mark[0].startswith("<tool_call>"):
            if not re.match(FIRST, mark[0]):  # what stands before were thoughts
                calls.clear()
            continue
        # values may have the mark of the call's end in them; JSON has an end of its own
        if text.startswith("<function=", at):
            end = text.find("</tool_call>", at)
            other = NEXT.search(text, end) if end >= 0 else None
            end = text.rfind("</tool_call>", at, other.start() if other else None)
        else:
            try:  # an error costs time by the text's length
                length = json.JSONDecoder().raw_decode(text[at:at + LONGEST])[1]
                end = text.find("</tool_call>", at + length)
            except (ValueError, RecursionError):
                end = re.compile(rf"</tool_call>|{LAST}|\Z").search(text, at).start()
        end = end if end >= 0 else len(text)
        calls.append(text[at:end])
        at = end
    return calls


def typed(text, schema):
    """The value of a parameter in tags: JSON where its schema has that, else the text."""
    if schema.get("type") != "string":
        with contextlib.suppress(ValueError):
            value = json.loads(WORDS.get(text, text))
            if fits(value, schema):
                return value
    return text


def fits(value, schema):
    """Whether a value, as JSON has it, fits a schema, as transformers writes it for a type."""
    if value is None and "nullable" in schema:
        return True
    kind = next(kind for kind, its in KINDS.items() if isinstance(value, its))
    kinds = schema.get("type", kind)  # one or a list
    parts = list(value.values()) if kind == "object" else value if kind == "array" else []
    each = [schema.get("items", schema.get("additionalProperties", {}))] * len(parts)
    each = schema.get("prefixItems", each)  # a tuple's
    return ((kind in kinds or kind == "integer" and "number" in kinds)
            and value in schema.get("enum", [value])
            and ("anyOf" not in schema or any(fits(value, one) for one in schema["anyOf"]))
            and len(parts) == len(each) and all(map(fits, parts, each)))


def example(schema):
    """A value that fits a schema, or None."""
    values = [each for one in ('a "b"', 21, 0.5, True) for each in (one, [one], dict(c=one))]
    return next((value for value in [*schema.get("enum", []), *values, [], {}]
                 if fits(value, schema)), None)


# --------------------------------------------------------------------------------------------------
# in the process of the tools


def serve(named):
    """Make the calls that come, [number, name, arguments] a line, until the rank has ended."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:  # the rank decides when to stop
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # a tool's prints go to the errors, not between the answers
    functions = [load_function(name, "tools") for name in named]
    functions = {function.__name__: function for function in functions}
    lock = threading.Lock()

    def call(n, name, arguments):
        try:
            result = functions[name](**arguments)
            good, text = True, result if isinstance(result, str) else json.dumps(
                result, default=str, ensure_ascii=False)
        except BaseException as e:  # of the user's code: anything; the policy reads what it says
            good, text = False, first_line(e)
        text = text[:LONGEST].encode(errors="replace").decode()  # a lone surrogate is no text
        with lock:  # two long lines would mix in the pipe
            answers.write(json.dumps([n, good, text]).encode() + b"\n")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in sys.stdin.buffer:
            pool.submit(call, *json.loads(line))
        os._exit(0)  # the rank has ended; a call that hangs would keep this process
