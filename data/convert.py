"""
Data sets in other layouts -> our JSONL, once; and functions that data/*/prepare.py share.

    python data/convert.py --source=hf:openai/gsm8k:main:train --out=train.jsonl
    python data/convert.py --source=theirs.parquet --out=train.jsonl --val=0.05 --chat
    python data/convert.py --source=rows.csv --fields="task>prompt,steps>answer" --out=train.jsonl

A row becomes one of three kinds (--kind; the first row decides if it is not given):

    sft           a demonstration: `messages` (Tulu); `conversations` of {"from", "value"}
                  (ShareGPT); `instruction`, `input`, `output` (Alpaca; `history`, pairs of an
                  instruction and its output, becomes the earlier turns); a question and its
                  `completion` or `response`
    preferences   `chosen` and `rejected`, whole dialogues (UltraFeedback; the prompt is their
                  common beginning), strings with "\\n\\nHuman:" and "\\n\\nAssistant:" (HH), or
                  two answers to a `prompt`
    prompts       `prompt`, `question` or `problem`, and an `answer` (behind "####": GSM8K), a
                  `final_answer` (DeepMath), a `solution` with a \\boxed{} (MATH), a `reward_model`
                  with its `ground_truth` (verl, DAPO); a list of several answers is none

A string `system` or `system_prompt` becomes the first message. A row that makes no sense is
dropped, and its fault is counted and printed; so are the columns that are left out. Of a prompt's
row these are kept: prompt, answer, numbers, target, tests, and the fields that --fields names.
With --val=0.05 about that share of the rows goes into a second file, train_val.jsonl for
train.jsonl; equal prompts go into the same file.
"""
import argparse
import ast
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import re
import sys
import urllib.request

# Python looks for modules in this file's folder; ours are in the repository's, above it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from errors import BadInput, visible  # noqa: E402
from grading.forms import last_box  # noqa: E402
from options.chats import beside_its_content  # noqa: E402
from options.home import from_home  # noqa: E402
from options.sources import hub_files, raw_rows, rename  # noqa: E402
from prompts import dialogue, prompt_row  # noqa: E402
from tools.outputs import check_outputs, files_of  # noqa: E402

KEPT = "prompt", "answer", "numbers", "target", "tests"  # columns of a prompt's row

# -------------------------------------------------------------------------------------------------
# for data/*/prepare.py, too

# a task as a base model is given it: the prompt opens the thinking
BASE = """A conversation between User and Assistant. The User asks a question and the Assistant \
answers it: the Assistant first works out the solution in its mind, and then tells the User the \
answer.
User: {task}
Assistant: I will work this out step by step.
<think>"""


def parser_of(doc):
    """An argparse parser that ends with one line. Its --help shows the script's docstring."""
    def error(said):
        raise BadInput(said)

    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = error
    parser.register("type", None, from_home)  # of arguments that are texts
    return parser


def fetch(source, name, folder):
    """
    The path in the folder of the file `name` of a source, which is a URL or a folder. It is
    downloaded, unless it is there. A file that is not complete has another name.
    """
    if os.path.isdir(source):
        source = pathlib.Path(source).resolve().as_uri()
    url, local = f"{source.rstrip('/')}/{name}", os.path.join(folder, os.path.basename(name))
    if not os.path.exists(local):
        print(f"downloading {url}", flush=True)
        os.makedirs(folder, exist_ok=True)
        try:  # urlretrieve raises an error if the download is cut short
            urllib.request.urlretrieve(url, local + ".part")
        except (OSError, ValueError) as e:
            raise BadInput(f"{url}: cannot download: {e}") from e
        os.replace(local + ".part", local)
    return local


def write_rows(out, names, rows, kept=None):
    """
    Write out/NAME.jsonl for each of the names, and print how many rows each has. All files get
    their names at the end, or none: an old file might share rows with a new one.

    rows: (name, row) one by one; a string in place of the row says why one is dropped. kept: a
    Counter, in which the caller sees how many rows each file has so far.
    """
    kept = collections.Counter() if kept is None else kept
    dropped = {name: collections.Counter() for name in names}
    paths = {name: os.path.join(out, f"{name}.jsonl") for name in names}
    os.makedirs(out or ".", exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(path + ".part", "w", encoding="utf-8"))
                 for name, path in paths.items()}
        for name, row in rows:
            if isinstance(row, str):
                dropped[name][row] += 1
            else:
                files[name].write(json.dumps(row, default=str) + "\n")
                kept[name] += 1
    for name, path in paths.items():
        if not kept[name]:
            reasons = [reason for reason, _ in dropped[name].most_common(1)]
            raise BadInput(": ".join([f"no row is left for {path}", *reasons]))
    for name, path in paths.items():
        os.replace(path + ".part", path)
        reasons = "".join(f"; dropped {n}: {reason}" for reason, n in sorted(dropped[name].items()))
        print(f"{name}.jsonl: {kept[name]} rows{reasons}")


# -------------------------------------------------------------------------------------------------
# the layouts of others. A function takes the fields that it reads out of the row; the rest is
# left out. Dialogues (ShareGPT, Alpaca, HH) become messages; other strings do with --chat

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # ShareGPT's -> ours


def ours(row, kind, chat=False, named=()):
    """
    (a row of ours, the names of the columns that it leaves out). kind: of LAYOUTS. chat: make
    messages of all strings. named: columns that a prompt's row keeps. Raises BadInput.
    """
    row, (layout, *fields) = dict(row), LAYOUTS[kind]
    made = {name: value for name, value in layout(row).items() if value is not None}
    system = next((row[name] for name in ("system", "system_prompt")
                   if isinstance(row.get(name), str) and row[name]), "")
    texts = [name for name in ("prompt", *fields) if name in made]
    if chat or system or any(isinstance(made[name], list) for name in texts):
        for name in texts:
            if isinstance(made[name], str):
                role = "user" if name == "prompt" else "assistant"
                made[name] = [dict(role=role, content=made[name])]
    shaped = dialogue(row | made, *fields) if fields else prompt_row(row | made)
    if system and shaped["prompt"][0]["role"] != "system":
        shaped["prompt"] = [dict(role="system", content=system), *shaped["prompt"]]
    if kind == "prompts":
        shaped = {name: shaped[name] for name in shaped if name in (*KEPT, *named)}
    return shaped, row.keys() - (shaped.keys() - made.keys()) - {"system", "system_prompt"}


def demonstration(row):
    """A dialogue, of which the assistant's turns are learned; or a question and its answer."""
    messages = dialogue_of(row)
    if not messages:
        return {"prompt": question(row), "completion": pop(row, "completion", "output", "response")}
    first = before_answer(messages)
    return {"prompt": messages[:first] or None, "completion": messages[first:]}


def pair(row):
    """Two whole dialogues, whose common beginning is the prompt; or a question, two answers."""
    chosen, rejected = (messages_in(pop(row, name), name) for name in ("chosen", "rejected"))
    if not all(isinstance(said, list) and said and said[0]["role"] != "assistant"
               for said in (chosen, rejected)):
        return {"prompt": question(row), "chosen": chosen, "rejected": rejected}
    shared = 0  # how many messages are the same; the last one of each is never counted
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if {chosen[shared]["role"], rejected[shared]["role"]} != {"assistant"}:
        raise BadInput("chosen and rejected have different prompts")
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def prompt(row):
    """The question, or the messages before a dialogue's first answer; and the true answer."""
    asked = question(row)
    if not asked:
        messages = dialogue_of(row) or []
        asks = messages[-1:] and messages[-1]["role"] == "user"  # the last turn is to be answered
        asked = (messages if asks else messages[:before_answer(messages)]) or None
    answer = pop(row, "answer", "final_answer")  # final_answer: DeepMath
    if answer is None and isinstance(row.get("reward_model"), dict):  # verl, DAPO, Skywork-OR1
        answer = row.pop("reward_model").get("ground_truth")
    boxed = last_box(str(row.get("solution")))  # MATH
    if answer is None and boxed is not None:
        answer = boxed.strip()
        del row["solution"]
    return {"prompt": asked, "answer": true_answer(answer)}


LAYOUTS = {"sft": (demonstration, "completion"), "preferences": (pair, "chosen", "rejected"),
           "prompts": (prompt,)}  # kind: its function, the fields beside the prompt


def pop(row, *names):
    """The first of these columns that has a value, taken out of the row; None if none has."""
    return next((row.pop(name) for name in names if row.get(name) is not None), None)


def question(row):
    """
    The question: a string or messages. Alpaca's instruction may have an input beside it, and turns
    before it.
    """
    asked = messages_in(pop(row, "prompt", "question", "problem"), "prompt")
    if not asked and row.get("instruction"):
        asked, given = row.pop("instruction"), row.pop("input", None)
        asked = [{"role": "user", "content": f"{asked}\n\n{given}" if given else asked}]
    history = row.get("history")
    if isinstance(history, str):  # of a table
        history = list_in(history)
    if asked and isinstance(history, list):
        del row["history"]
        before = earlier_turns(history)
        if before:
            asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            first = asked[0]["role"] == "system"
            asked = [*asked[:first], *before, *asked[first:]]
    return asked


def earlier_turns(history):
    """Messages of Alpaca's [["asked", "said"], ...], or of messages. Raises BadInput."""
    if history and all(isinstance(turn, dict) for turn in history):
        return messages_in(history, "history")
    if not all(isinstance(turn, list) and len(turn) == 2 and all(
            isinstance(text, str) and text for text in turn) for turn in history):
        raise BadInput("field 'history' must be a list of pairs: an instruction, its output")
    return [dict(role=role, content=text) for turn in history
            for role, text in zip(("user", "assistant"), turn, strict=True)]


def dialogue_of(row):
    """The messages of a row that is one whole dialogue, else None."""
    messages = messages_in(pop(row, "messages", "conversations", "conversation"), "messages")
    if messages and not isinstance(messages, list):
        raise BadInput("field 'messages' must be a list of messages")
    return messages


def before_answer(messages):
    """How many messages come before the first one of the assistant."""
    return next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))


def messages_in(value, field):
    """
    Messages of a value that stands for some: ShareGPT's [{"from": "human", "value": "x"}, ...], and
    HH's "\\n\\nHuman: x\\n\\nAssistant: y". Any other value is returned as it is. Raises BadInput.
    """
    if isinstance(value, str) and value.startswith("\n\nHuman:"):
        parts = re.split(r"\n\n(Human|Assistant):", value)  # "", "Human", " x", "Assistant", ...
        value = [{"role": "user" if who == "Human" else "assistant", "content": said.strip()}
                 for who, said in zip(parts[1::2], parts[2::2], strict=True)]
        if field == "prompt" and value[-1]["content"] == "":
            value.pop()  # the turn that the completion is
    if not isinstance(value, list):
        return value
    messages = []
    for given in value:
        if not isinstance(given, dict):
            raise BadInput(f"field {field!r} must be a list of messages")
        role = str(given.get("role", given.get("from")))
        made = {"role": ROLES.get(role, role), "content": given.get("content", given.get("value"))}
        # dialogue refuses one that is not to be learned, and one that is more than its content
        made |= {key: given[key] for key in ("tool_calls", "function_call") if given.get(key)}
        messages.append(made | beside_its_content(given | made))
    return messages


def list_in(text):
    """The list that a text is, as JSON or as Python prints it; else the text."""
    if text.strip()[:1] + text.strip()[-1:] in ("[]", "()"):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                found = read(text.strip())
                return list(found) if isinstance(found, (list, tuple)) else text
    return text


def true_answer(answer):
    """
    GSM8K's "so 70 + 2\\n#### 1,072" -> "1072"; Skywork-OR1's '["72"]' -> "72". Raises BadInput
    where such a list has several answers: no response equals it.
    """
    if not isinstance(answer, str):
        return answer
    listed = list_in(answer)
    if isinstance(listed, list) and re.search("[\"']", answer):  # of texts: [1, 2] is an answer
        while isinstance(listed, list) and len(listed) == 1:
            (listed,) = listed
        if not isinstance(listed, str):
            raise BadInput("the answer is a list of several, and one is needed")
        return listed
    if "####" not in answer:
        return answer
    text = answer.rpartition("####")[2].strip()
    thousands = re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?", text)  # not 0,5 or 1,2,3
    return text.replace(",", "") if thousands else text


# -------------------------------------------------------------------------------------------------
# the command


def converted(args, names, left):
    """(name, row or its fault), one by one. left: a set, to which columns are added."""
    kind, named = args.kind, [part.rpartition(">")[2].strip() for part in args.fields.split(",")]
    for source in args.source.split(","):
        for file in hub_files(source) if source.startswith("hf:") else [source]:
            for _, row in raw_rows(file):
                name = names[0]
                try:
                    row = rename(row, args.fields)
                    if not kind:  # the first row decides
                        told = {"completion", "output", "response", "messages", "conversations"}
                        kind = "sft" if told & row.keys() else "prompts"
                        kind = "preferences" if "chosen" in row else kind
                    row, columns = ours(row, kind, args.chat, named)
                    if kind == "preferences" and row["chosen"] == row["rejected"]:
                        raise BadInput("chosen and rejected are the same")
                    left.update(columns)
                    # a number from 0 to 1 that is a function of the prompt
                    digest = hashlib.blake2b(json.dumps(row["prompt"]).encode(), digest_size=8)
                    name = names[int.from_bytes(digest.digest(), "little") / 2**64 < args.val]
                except BadInput as e:
                    row = re.sub(r"\d+", "N", str(e))[:200]  # alike for rows that fail alike
                yield name, row


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--source", required=True, help="a file, hf:NAME:SPLIT, hf:NAME:FOLDER:"
                        "SPLIT (NAME may be a folder here), or several with commas")
    parser.add_argument("--out", required=True, help="the JSONL file to write")
    parser.add_argument("--kind", choices=LAYOUTS, help="of the rows (default: as they look)")
    parser.add_argument("--fields", default="", help="their names for ours: question>prompt,a.b>c")
    parser.add_argument("--chat", action="store_true", help="strings become chat messages")
    parser.add_argument("--val", type=float, default=0.0, help="share of held-out rows, 0 = none")
    args = parser.parse_args()
    folder, file = os.path.split(args.out)
    if not file.endswith(".jsonl"):
        raise BadInput(f"--out={args.out} must end with .jsonl")
    name, left = file.removesuffix(".jsonl"), set()
    names = [name, f"{name}_val"] if args.val else [name, name]
    paths = [os.path.join(folder, f"{each}.jsonl") for each in dict.fromkeys(names)]
    check_outputs("--out", paths, files_of(args.source))
    write_rows(folder, list(dict.fromkeys(names)), converted(args, names, left))
    if left:
        print(visible(f"left out: the columns {', '.join(sorted(left))}"))


if __name__ == "__main__":
    main()
