r"""
GSM8K: grade school word problems whose answer is one number (Cobbe et al., arXiv 2110.14168).
Downloads OpenAI's files with the standard library, checks them and writes our JSONL. To bring a
data set of your own that needs more than data/convert.py can do, copy this file.

    python data/gsm8k/prepare.py            # for base models: the prompt opens the thinking
    python data/gsm8k/prepare.py --chat     # for instruct models: the prompt is a chat message

Writes beside itself, or into --out: rl_train.jsonl and rl_val.jsonl {"prompt", "answer"}, for the
reward `accuracy` of rewards.py. The downloads stay in raw/ and are used again: delete raw/ to start
over, or to change --source.

rl_train is OpenAI's train.jsonl, and rl_val is their test.jsonl, as usual: GSM8K has no third part.
So choose no settings by rl_val if you want to report it. The prompt for base models says what
TinyZero's says, in our words (thinking in <think>), and asks for the number in \boxed{}.

Not verified: this is tested on made-up files of the same layout; we have not run the full download
yet. There should be 7,473 and 1,319 problems, as the Hub says.
"""
import collections
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from convert import BASE, fetch, ours, parser_of, write_rows  # noqa: E402
from prompts import read_rows  # noqa: E402

SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
FILES = {"rl_train": "train.jsonl", "rl_val": "test.jsonl"}  # our file -> theirs
TASK = (r"{question} Reason step by step between <think> and </think>, then give the final number "
        r"in \boxed{{}}, for example \boxed{{12}}.")


def rows(args, kept):
    """(our file, row, or why it is dropped) of each problem."""
    for name, file in FILES.items():
        path = fetch(args.source, file, os.path.join(args.out, "raw"))
        for row in read_rows(path, lambda row: ours(row, "prompts")[0]):
            if args.limit and kept[name] >= args.limit:
                break
            task = TASK.format(question=row["prompt"].strip())
            prompt = [{"role": "user", "content": task}] if args.chat else BASE.format(task=task)
            good = re.fullmatch(r"-?((0|[1-9]\d*)(\.\d+)?|\.\d+)", row.get("answer", ""))
            yield name, ({"prompt": prompt, "answer": row["answer"]} if good
                         else "answer is no number")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--source", default=SOURCE, help="URL or folder (default: OpenAI's)")
    parser.add_argument("--out", default=HERE, help="folder to write into (default: this script's)")
    parser.add_argument("--chat", action="store_true", help="prompts as chat messages")
    parser.add_argument("--limit", type=int, default=0, help="rows a file, 0 = all (default: 0)")
    args, kept = parser.parse_args(), collections.Counter()
    write_rows(args.out, FILES, rows(args, kept), kept)
