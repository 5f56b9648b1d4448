"""
Tools: the key tools, functions that the policy may call, as the environment of a run; docs/turns.md
has an example. Their names, types and docstrings go into the prompt by the chat template (its
variable `tools`). The policy calls one as the template's family writes calls. Most write JSON,
Qwen3.5 and Qwen3-Coder tags, and gpt-oss a message to the function:

    <tool_call>
    {"name": "multiply", "arguments": {"a": 37, "b": 46}}
    </tool_call>

    <tool_call>
    <function=multiply>
    <parameter=a>
    37
    </parameter>
    ...
    </function>
    </tool_call>

    <|channel|>commentary to=functions.multiply <|constrain|>json<|message|>{"a": 37}<|call|>

For another way of writing, read the calls in an environment of your own.

A function's result is said as a message of the role tool, its text or as JSON; an error too,
such as that a call cannot be read. A turn without a call ends the dialogue. Several calls in a turn
have their results in one message.

The functions run in a process beside each rank, so one that hangs can be killed; and the
policy's calls are read as data, never as Python. Each call is made once: a search may cost, a clock
may move. Its result stands in the dialogue, which is saved with the batch. So a tool need not
be pure, but where it answers by chance a resumed run is not the same to the bit.
"""
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
from options.user_code import load_function

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
AT_ONCE = 16  # calls of a rank that are under way at a time
LONGEST = 10_000  # characters of a result
# how others write the three values that JSON spells in its own way
WORDS = {"True": "true", "False": "false", "None": "null"}


class Tools:
    """The tools of this rank. They become known to the template. Raises BadInput."""

    def __init__(self, system, tokenizer):
        from transformers.utils import get_json_schema

        where = f"tools = {system.tools!r}"
        self.named = [name.strip() for name in system.tools.split(",")]
        self.schemas = []
        for named in self.named:
            function = load_function(named, ".", where)
            try:
                self.schemas.append(get_json_schema(function))
            except Exception as e:  # transformers' own: no docstring, no types
                raise BadInput(f"{where}: {named} cannot be described to the policy: "
                               f"{first_line(e)}") from e
        if not re.search(r"\btools\b", tokenizer.template or ""):
            raise BadInput(f"{where}: {tokenizer.path} has no variable tools, so the policy would "
                           "not read what tools there are; give a template that has it, such as "
                           "--chat_template=options/templates/chatml.jinja")
        tokenizer.kwargs["tools"] = self.schemas
        self.types = {schema["function"]["name"]: schema["function"]["parameters"]["properties"]
                      for schema in self.schemas}  # {tool: {parameter: its schema}}
        self.harmony = "<|channel|>" in tokenizer.template
        self.process = None
        self.seconds = system.reward_timeout / system.max_turns  # for the calls of one turn

    def answer(self, texts, failed, numbers):
        """
        The reply to each of these turns, [(message or None, 0.0), ...]. failed: how many calls
        of a response have failed, by its number, counted up here; numbers: of these responses.
        """
        calls = [(n, *call) for n, text in enumerate(texts) for call in self.calls_in(text)]
        wanted = [call[1:3] for call in calls if call[3] is None]
        found = iter(self.run(wanted))
        results = {}
        for n, _, _, error in calls:
            good, text = (False, error) if error is not None else next(found)
            failed[numbers[n]] += not good
            results.setdefault(n, []).append(text if good else f"error: {text}")
        # of the last call of a turn, for gpt-oss, which reads who says something
        names = {n: name if isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name)
                 else next(iter(self.types)) for n, name, *_ in calls}
        return [(dict(role="tool", name=names[n], content="\n".join(results[n]))
                 if n in results else None, 0.0) for n in range(len(texts))]

    def calls_in(self, text):
        """The calls that a turn makes: (name, arguments, None), or (name, None, what is wrong)."""
        if self.harmony:  # a call is the last message of a turn
            header, _, arguments = text.rpartition("<|start|>")[2].partition("<|message|>")
            to = re.search(r"\bto=([^\s<]+)", header)
            written = [(to[1].removeprefix("functions."), arguments)] if to else []
        else:
            written = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)
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
                calls.append((name, arguments, None))
            except (ValueError, KeyError, TypeError, RecursionError) as e:
                calls.append((name, None, f"this call cannot be read: {first_line(e)[:200]}"))
        return calls

    def parsed(self, call):
        """(name, arguments) of a call, which stands as JSON or in tags. Raises ValueError."""
        head, begun, rest = call.strip().partition("<function=")
        if head or not begun:
            found = json.loads(call)
            return found["name"], found.get("arguments", {})
        name, _, rest = rest.partition(">")
        arguments = {}
        while "<parameter=" in rest:
            key, _, rest = rest.partition("<parameter=")[2].partition(">")
            value, ended, rest = rest.partition("</parameter>")
            if not ended:
                raise ValueError(f"the parameter {shorten(key)} has no </parameter>")
            value = value.removeprefix("\n").removesuffix("\n")
            schema = self.types.get(name, {}).get(key, {})
            arguments[key] = typed(value, schema.get("type", ["string"]))
        return name, arguments

    def run(self, calls):
        """Make calls [(name, arguments)]: [(whether it went well, text), ...]."""
        if not calls:
            return []
        if self.process is None or self.process.poll() is not None:
            self.start()
        late = False, f"it has not answered within {self.seconds:.3g} s"
        results, end = [late] * len(calls), time.monotonic() + self.seconds
        pipe, self.counted = self.process.stdout, self.counted + len(calls)
        first = self.counted - len(calls)  # calls have numbers, so no answer comes to another
        waiting, rest = set(range(first, self.counted)), b""
        try:
            for n, call in enumerate(calls, first):
                self.process.stdin.write(json.dumps([n, *call]).encode() + b"\n")
            self.process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(pipe, selectors.EVENT_READ)
                while waiting and selector.select(max(end - time.monotonic(), 0)):
                    read = os.read(pipe.fileno(), 1 << 16)
                    if not read:
                        raise BrokenPipeError
                    *lines, rest = (rest + read).split(b"\n")
                    for n, good, text in map(json.loads, lines):
                        results[n - first] = good, text
                        waiting.discard(n)
        except BrokenPipeError:  # a tool has ended the process
            for n in waiting:
                results[n - first] = False, "its process has ended"
        if waiting:
            self.process.kill()
            self.process.wait()
        return results

    def start(self):
        """Start the process of the tools."""
        code = (f"import sys; sys.path.insert(0, {ROOT!r}); "
                f"from options.tools import serve; serve({self.named!r})")
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        self.counted = 0


def typed(text, types):
    """A parameter in tags, by the types of its schema, one or a list. Raises ValueError."""
    if types == "string":
        return text
    try:
        return json.loads(WORDS.get(text, text))
    except ValueError:
        if "string" in types:
            return text
        raise ValueError(f"{shorten(text)} is no {types}") from None


# --------------------------------------------------------------------------------------------------
# in the process of the tools


def serve(named):
    """Make the calls that come, [number, name, arguments] a line, until the rank has ended."""
    for number in signal.SIGINT, signal.SIGTERM:  # the rank decides when to stop
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # a tool's prints go to the errors, not between the answers
    functions = [load_function(name, ".", "tools") for name in named]
    functions = {function.__name__: function for function in functions}
    lock = threading.Lock()

    def call(n, name, arguments):
        try:
            result = functions[name](**arguments)
            text = result if isinstance(result, str) else json.dumps(result, default=str)
            answer = n, True, text[:LONGEST]
        except BaseException as e:  # of the user's code: anything; the policy reads what it says
            answer = n, False, first_line(e)[:LONGEST]
        with lock:  # two long lines would mix in the pipe
            answers.write(json.dumps(answer).encode() + b"\n")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in sys.stdin.buffer:
            pool.submit(call, *json.loads(line))
        os._exit(0)  # the rank has ended; a call that hangs would keep this process
