"""
GSM8K: grade school word problems whose answer is one number (Cobbe et al., arXiv 2110.14168).
Downloads OpenAI's files with the standard library, checks them and writes our JSONL.

    python data/gsm8k/prepare.py            # for base models: the prompt opens the thinking
    python data/gsm8k/prepare.py --chat     # for instruct models: the prompt is a chat message

Writes beside itself, or into --out: rl_train.jsonl and rl_val.jsonl {"prompt", "answer"}, for the
reward `accuracy` of rewards.py. The answer is the number after "####", without commas. The
downloads stay in raw/ and are used again: delete raw/ to start over, or to change --source.

rl_train is OpenAI's train.jsonl, and rl_val is their test.jsonl, as usual: GSM8K has no third
part. So choose no settings by rl_val if you want to report it. The source is OpenAI's repository
(github.com/openai/grade-school-math), whose files are JSONL; the Hub's openai/gsm8k has the same
as parquet, which takes another package to read. The prompt for base models says what TinyZero's
says, in our words (thinking in <think>), and asks for the number in \\boxed{}.

Not verified: this is tested on made-up files of the same layout; we have not run the full
download yet. There should be 7,473 and 1,319 problems, as the Hub says. A row whose answer is no
number is dropped, and counted.
"""
import argparse
import http.client
import json
import math
import os
import pathlib
import re
import socket
import sys
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
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


def stop(message):
    print(f"prepare.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def fetch(url, folder):
    """
    The path of url's file in the folder, downloaded unless it is there. A file that is not complete
    has another name.
    """
    local = os.path.join(folder, url.rsplit("/", 1)[1])
    if not os.path.exists(local):
        print(f"downloading {url}", flush=True)
        try:
            # urlretrieve raises an error if the download is cut short; urlopen(url).read() does not
            urllib.request.urlretrieve(url, local + ".part")
        except (OSError, http.client.HTTPException, ValueError) as e:
            stop(f"{url}: cannot download: {e}")
        os.replace(local + ".part", local)
    return local


def rows(path):
    """(question, solution) of each line of one of OpenAI's files."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                stop(f"{where}: row: not JSON: {e}")
            for field in ("question", "answer"):
                value = row.get(field) if isinstance(row, dict) else None
                if not isinstance(value, str) or not value.strip():
                    stop(f"{where}: {field}: wanted text, found {json.dumps(value)[:40]}")
                if any("\ud800" <= ch <= "\udfff" for ch in value):
                    stop(f"{where}: {field}: holds half a surrogate pair, which is not text")
            yield row["question"].strip(), row["answer"]


def number(solution):
    """
    The number after the #### of a worked solution, without commas: "... #### 1,234" -> "1234"; None
    if there is none.
    """
    text = solution.rpartition("####")[2].strip().replace(",", "") if "####" in solution else ""
    return text if re.fullmatch(r"-?((0|[1-9][0-9]*)(\.[0-9]+)?|\.[0-9]+)", text) else None


def prompt(question, chat):
    """A question's prompt: text for a base model, a chat message for an instruct model."""
    task = TASK.format(question=question)
    return [{"role": "user", "content": task}] if chat else BASE.format(task=task)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = stop
    parser.add_argument("--source", default=SOURCE,
                        help="URL, or a folder with the two files (default: OpenAI's repository)")
    parser.add_argument("--out", default=HERE,
                        help="folder to write into (default: this script's)")
    parser.add_argument("--chat", action="store_true",
                        help="prompts as chat messages, for models with a chat template")
    parser.add_argument("--limit", type=int, default=0,
                        help="at most so many rows a file, 0 = all (default: 0)")
    args = parser.parse_args()
    if args.limit < 0:
        stop(f"--limit={args.limit} is out of range: [>= 0]")
    limit = args.limit or math.inf
    if os.path.isdir(args.source):
        source = pathlib.Path(args.source).resolve().as_uri()
    else:
        source = args.source.rstrip("/")
    raw = os.path.join(args.out, "raw")
    socket.setdefaulttimeout(60)  # without it, a dead connection would be waited for without end
    report = []
    try:
        os.makedirs(raw, exist_ok=True)
        for name, file in FILES.items():
            kept, dropped = 0, 0
            with open(os.path.join(raw, f"{name}.part"), "w", encoding="utf-8") as f:
                for question, solution in rows(fetch(f"{source}/{file}", raw)):
                    if kept >= limit:
                        break
                    answer = number(solution)
                    if answer is None:
                        dropped += 1
                        continue
                    row = {"prompt": prompt(question, args.chat), "answer": answer}
                    f.write(json.dumps(row) + "\n")
                    kept += 1
            if not kept:
                stop(f"{source}/{file}: no problem with a number after ####; is this GSM8K?")
            reason = f"; dropped {dropped}: answer is no number" if dropped else ""
            report.append(f"{name}.jsonl: {kept} rows{reason}")
        for name in FILES:  # both files get their names at the end, or none
            os.replace(os.path.join(raw, f"{name}.part"), os.path.join(args.out, f"{name}.jsonl"))
    except OSError as e:
        stop(f"--out={args.out}: {e.strerror}")
    print("\n".join(report))


if __name__ == "__main__":
    main()
