r"""
GSM8K: grade school word problems whose answer is one number (Cobbe et al., arXiv 2110.14168).
Downloads OpenAI's files with the standard library, checks them and writes our JSONL. To bring a
data set of your own that needs more than data/convert.py can do, copy this file.

    python data/gsm8k/prepare.py            # for base models: the prompt opens the thinking
    python data/gsm8k/prepare.py --chat     # for instruct models: the prompt is a chat message

Writes beside itself: rl_train.jsonl and rl_val.jsonl {"prompt", "answer"}, for the reward
`accuracy`. The downloads stay in raw/ and are used again: delete raw/ to start over, or to change
--source.

rl_train is OpenAI's train.jsonl, and rl_val is their test.jsonl, as usual: GSM8K has no third part.
So choose no settings by rl_val if you want to report it. The prompt for base models says what
TinyZero's says, in our words (thinking in <think>), and asks for the number in \boxed{}.

Not verified: this is tested on made-up files of the same layout; we have not run the full download
yet. There should be 7,473 and 1,319 problems, as the Hub says.
"""
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; these are in the folder above it.
sys.path.insert(0, os.path.dirname(HERE))

from convert import ours  # noqa: E402
from files import fetch, parser_of, write_rows  # noqa: E402

from prompts import read_rows  # noqa: E402

SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
FILES = {"rl_train": "train.jsonl", "rl_val": "test.jsonl"}  # our file -> theirs
TASK = (r"{question} Reason step by step between <think> and </think>, then give the final number "
        r"in \boxed{{}}, for example \boxed{{12}}.")
BASE = """A conversation between User and Assistant. The User asks a question and the Assistant \
answers it: the Assistant first works out the solution in its mind, and then tells the User the \
answer.
User: {task}
Assistant: I will work this out step by step.
<think>"""


def rows(source, chat):
    """(our file, row, or why it is dropped) of each problem."""
    for name, file in FILES.items():
        path = fetch(source, file, os.path.join(HERE, "raw"))
        for row in read_rows(path, lambda row: ours(row, "prompts")[0]):
            task = TASK.format(question=row["prompt"].strip())
            prompt = [{"role": "user", "content": task}] if chat else BASE.format(task=task)
            good = re.fullmatch(r"-?((0|[1-9]\d*)(\.\d+)?|\.\d+)", row.get("answer", ""))
            yield name, ({"prompt": prompt, "answer": row["answer"]} if good
                         else "answer is no number")


if __name__ == "__main__":
    args = parser_of(__doc__, SOURCE).parse_args()
    write_rows(HERE, FILES, rows(args.source, args.chat))
