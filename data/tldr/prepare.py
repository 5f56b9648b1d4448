"""
TL;DR, the task of the published PPO-RLHF curves: summarise a Reddit post. Downloads OpenAI's
public data, checks it and writes our JSONL. Only transformers is needed, for its tokenizer.

    python data/tldr/prepare.py                     # all of it; lengths by Pythia's tokenizer
    python data/tldr/prepare.py --tokenizer=DIR     # lengths by another model's tokenizer
    python data/tldr/prepare.py --limit=1000        # at most 1000 rows a file
    python data/tldr/prepare.py --chat              # PPO's prompts as chat messages, for llama.py

Writes beside itself, or into --out:
    sft_train.jsonl, sft_val.jsonl           {"prompt", "completion"}, the filtered posts
    prompts_train.jsonl, prompts_val.jsonl   {"prompt"}, the prompts of the same rows, for PPO
    prefs_train.jsonl, prefs_val.jsonl       {"prompt", "chosen", "rejected"}, human comparisons;
                                             their valid1 and valid2 are our val
The downloads stay in raw/ and are used again: delete raw/ to start over, or to change --source.
OpenAI's test.jsonl is not used: it is there for a final comparison.

The details of the N+ paper (arXiv 2403.17031) that this file keeps, by their numbers:
     2  A query has at most 512 tokens; a longer one loses its post's end, back to a newline.
     3  A completion begins with a space. The trainer adds the EOS.
     4  A completion has at most 53 tokens with its EOS for SFT, 169 for preferences.
    21  PPO's prompts are those of SFT.
By Pythia's tokenizer nothing in the data is longer (the N+ code asserts it). Batches of news, not
Reddit (batch0_cnndm, cnndm0, cnndm2), are not used.

Not verified: this is tested on made-up files of the same layout; we have not run the full download
yet. The posts should be 116,722 and 6,447, as in N+'s published copy.
"""
import collections
import json
import math
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from convert import fetch, parser_of, write_rows  # noqa: E402
from errors import BadInput  # noqa: E402
from options.sources import raw_rows  # noqa: E402

SOURCE = "https://openaipublic.blob.core.windows.net/summarize-from-feedback"
POSTS = {"train": "train", "valid": "val"}  # their file: our part
SPLITS = {"train": "train", "valid1": "val", "valid2": "val"}  # of comparisons: the same
BATCHES = [f"batch{i}" for i in [*range(3, 21), 22]] + ["edit_b2_eval_test"]  # there is no batch21
QUERY, SFT, PREFS = 512, 53, 169  # the most tokens of a query, of a completion with its EOS
NAMES = [f"{kind}_{part}" for kind in ("sft", "prompts", "prefs") for part in ("train", "val")]


def rows_of(path):
    """(file and line, row) of each row of a file."""
    return ((f"{path}, {where}", row) for where, row in raw_rows(path))


def field(where, row, name, kind=str):
    """row["info"]["post"] for the name "info.post"; the value must be of this kind."""
    value = row
    try:
        for key in name.split("."):
            value = value[int(key) if key.isdigit() else key]
    except (KeyError, IndexError, TypeError):
        value = None
    if type(value) is not kind:
        raise BadInput(f"{where}: {name}: wanted {kind.__name__}, found "
                       f"{json.dumps(value)[:40]}")
    return value


def query(subreddit, title, post, count):
    """
    The prompt of a post, whose end is cut off until the prompt has at most QUERY tokens; None if it
    has more even without the post. count: text -> its number of tokens.
    """
    while True:
        text = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
        if count(text) <= QUERY:
            return text
        if not post:
            return None
        # cut at the last newline; without one rfind is -1: one character goes, as in OpenAI's code
        post = post[:post.rfind("\n")]


def spaced(text):
    """The text with a space in front, as only the summaries of the comparisons come with it."""
    return " " + text.removeprefix(" ")


def as_chat(prompt):
    """The prompt as a chat message: a sentence asks for the summary, in place of "TL;DR:"."""
    post = prompt.removesuffix("\n\nTL;DR:")
    asked = "Summarize this Reddit post in one or two sentences."
    return [{"role": "user", "content": f"{asked}\n\n{post}"}]


def fits(prompt, completions, longest, count):
    """"" if a row is good, else the reason why it is dropped."""
    if prompt is None:
        return f"query over {QUERY} tokens even without its post"
    if not all(text.strip() for text in completions):
        return "empty completion"
    if max(map(count, completions)) + 1 > longest:  # + 1: the EOS
        return f"completion over {longest} tokens"
    return ""


def all_rows(args, count, kept):
    """(our file, row, or why it is dropped) of everything."""
    raw, limit = os.path.join(args.out, "raw"), args.limit if args.limit > 0 else math.inf
    for file, part in POSTS.items():
        path = fetch(args.source, f"datasets/tldr_3_filtered/{file}.jsonl", raw)
        for where, row in rows_of(path):
            if kept[f"sft_{part}"] >= limit:
                break
            said = (field(where, row, name) for name in ("subreddit", "title", "post"))
            prompt, completion = query(*said, count), spaced(field(where, row, "summary"))
            reason = fits(prompt, [completion], SFT, count)
            yield f"sft_{part}", reason or {"prompt": prompt, "completion": completion}
            if not reason:
                yield f"prompts_{part}", {"prompt": as_chat(prompt) if args.chat else prompt}

    for batch in BATCHES:
        if min(kept["prefs_train"], kept["prefs_val"]) >= limit:
            break  # before the next download
        for where, row in rows_of(fetch(args.source, f"dataset/comparisons/{batch}.json", raw)):
            part = SPLITS.get(field(where, row, "split"))
            if part is None:
                raise BadInput(f"{where}: split: wanted one of {', '.join(SPLITS)}")
            if kept[f"prefs_{part}"] >= limit:
                continue
            said = (field(where, row, f"info.{name}") for name in ("subreddit", "title", "post"))
            prompt = query(*said, count)
            choice = field(where, row, "choice", int)  # the index of the better of two summaries
            chosen, rejected = (spaced(field(where, row, f"summaries.{i}.text"))
                                for i in (choice, 1 - choice))
            reason = fits(prompt, [chosen, rejected], PREFS, count)
            yield f"prefs_{part}", reason or {"prompt": prompt, "chosen": chosen,
                                              "rejected": rejected}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--source", default=SOURCE,
                        help="URL, or a folder of the same layout (default: OpenAI's)")
    parser.add_argument("--out", default=HERE,
                        help="folder to write into (default: this script's)")
    parser.add_argument("--tokenizer", default="EleutherAI/pythia-1b",
                        help="hub name or folder (default: %(default)s)")
    parser.add_argument("--chat", action="store_true",
                        help="prompts as chat messages, for models with a chat template")
    parser.add_argument("--limit", type=int, default=0,
                        help="at most so many rows a file, 0 = all (default: 0)")
    args, kept = parser.parse_args(), collections.Counter()
    from transformers import AutoTokenizer  # here: --help need not wait for it
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    tokenizer.model_max_length = sys.maxsize  # no warnings: lengths are checked

    def count(text):
        # as our trainers encode it: text that looks like a special token is text
        return len(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    write_rows(args.out, NAMES, all_rows(args, count, kept), kept)


if __name__ == "__main__":
    main()
