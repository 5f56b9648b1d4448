"""
Data sets in other layouts -> our JSONL, once.

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
row these are kept: prompt, answer, tests, and the fields that --fields names.
With --val=0.05 about that share of the rows goes into a second file, train_val.jsonl for
train.jsonl; equal prompts go into the same file.
"""
import contextlib
import json
import os
import re
import sys

# Python looks for modules in this file's folder; ours are in the repository's, above it, too.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]

from files import parser_of, write_rows  # noqa: E402

from demonstrations import dialogue  # noqa: E402
from errors import BadInput, visible  # noqa: E402
from grading.forms import last_box  # noqa: E402
from options.chats import beside_its_content  # noqa: E402
from options.home import from_home  # noqa: E402
from options.sources import files_in, raw_rows, rename  # noqa: E402
from prompts import number_of, prompt_row  # noqa: E402
from tools.outputs import check_outputs, files_of  # noqa: E402

KEPT = "prompt", "answer", "tests"  # columns of a prompt's row

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
    if asked or not row.get("instruction"):
        return asked
    asked, given = row.pop("instruction"), row.pop("input", None)
    turns = []
    for turn in row.pop("history", None) or []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadInput("field 'history' must be a list of pairs: an instruction, its output")
        turns += [dict(role="user", content=turn[0]), dict(role="assistant", content=turn[1])]
    return [*turns, dict(role="user", content=f"{asked}\n\n{given}" if given else asked)]


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


def true_answer(answer):
    """
    GSM8K's "so 70 + 2\\n#### 1,072" -> "1072"; Skywork-OR1's '["72"]' -> "72". Raises BadInput
    for any other list of texts: no response equals it.
    """
    if not isinstance(answer, str):
        return answer
    if re.match(r"""\s*[\[(]+\s*["']""", answer):  # a list of texts: [1, 2] is an answer
        with contextlib.suppress(ValueError):
            (only,) = json.loads(answer)
            if isinstance(only, str):
                return only
        raise BadInput("the answer is a list, and one text is needed")
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
        for file in files_in(source):
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
                    place = number_of(json.dumps(row["prompt"]), size=8) / 2**64
                    name = names[place < args.val]
                except BadInput as e:
                    row = re.sub(r"\d+", "N", str(e))[:200]  # alike for rows that fail alike
                yield name, row


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--source", required=True, type=from_home, help="a file, hf:NAME:SPLIT, "
                        "hf:NAME:FOLDER:SPLIT (NAME may be a folder here), or several with commas")
    parser.add_argument("--out", required=True, type=from_home, help="the JSONL file to write")
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
