"""
TL;DR, the task of the published PPO-RLHF curves: summarise a Reddit post. Downloads OpenAI's public data, standard
library only, checks it and writes our JSONL.

    python data/tldr/prepare.py                                # all of it, lengths counted with Pythia's tokenizer
    python data/tldr/prepare.py --limit=1000 --tokenizer=DIR   # at most 1000 rows a file, another model's tokenizer
    python data/tldr/prepare.py --chat                         # the prompts for PPO as chat messages, see config/llama.py

Writes beside itself, or into --out: sft_{train,val}.jsonl {"prompt", "completion"} from the filtered posts;
prompts_{train,val}.jsonl {"prompt"}, the prompts of those same rows, for PPO; prefs_{train,val}.jsonl {"prompt",
"chosen", "rejected"} from the human comparisons, whose valid1 and valid2 are our val. The downloads stay in raw/ and
are not fetched twice: delete it to start over or to change --source. OpenAI's test.jsonl is left alone, for a final
comparison.

The N+ details kept (arXiv 2403.17031): a query has at most 512 tokens, its post cut at the last newline that does (2);
a completion starts with a space, the EOS is the trainer's business (3) and counts in the longest completion, 53 tokens
for SFT and 169 for preferences (4); PPO reuses the SFT prompts (21). By Pythia's tokenizer nothing in the data is
longer (the N+ code asserts it), so nothing should be dropped for that; by another tokenizer something may be.

Sources: OpenAI's README and code (URLs, field names, splits), the Hub's openai/summarize_from_feedback (the list of
batches; its batch0_cnndm, cnndm0 and cnndm2 are news, not Reddit, and stay out), the N+ code (format, lengths, spaces).
Not verified: this is tested on made-up files of the same layout; we have not run the full download yet. So we cannot
say how many comparisons there are, nor that every real row passes the checks. The posts should be 116,722 and 6,447,
as in N+'s published copy.
"""
import argparse
import collections
import contextlib
import http.client
import json
import math
import os
import pathlib
import socket
import sys
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = "https://openaipublic.blob.core.windows.net/summarize-from-feedback"
POSTS = {"train": "train", "valid": "val"}  # their file -> our part
SPLITS = {"train": "train", "valid1": "val", "valid2": "val"}  # their split of a comparison -> our part
BATCHES = [f"batch{i}" for i in [*range(3, 21), 22]] + ["edit_b2_eval_test"]  # there is no batch21
QUERY, SFT, PREFS = 512, 53, 169  # the most tokens of a query; of a completion with its EOS
NAMES = [f"{kind}_{part}" for kind in ("sft", "prompts", "prefs") for part in ("train", "val")]


def stop(message):
    print(message, file=sys.stderr)
    sys.exit(2)


def fetch(url, folder):
    """The local copy of url, downloaded unless it is there already. Only a complete file gets its name."""
    local = os.path.join(folder, url.rsplit("/", 1)[1])
    if not os.path.exists(local):
        print(f"downloading {url}", flush=True)
        try:
            urllib.request.urlretrieve(url, local + ".part")  # unlike a plain read, it notices a download cut short
        except (OSError, http.client.HTTPException, ValueError) as e:
            stop(f"{url}: cannot download: {e}")
        os.replace(local + ".part", local)
    return local


def rows(path):
    """(where, row) for each line of a JSONL file, which the comparisons are too in spite of their name."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError) as e:
                stop(f"{path}:{number}: row: not JSON: {e}")


def field(where, row, name, allowed=()):
    """row["info"]["post"] for the name "info.post": one of `allowed`, or else any text. Anything else is an error."""
    value = row
    try:
        for key in name.split("."):
            value = value[int(key) if key.isdigit() else key]
    except (KeyError, IndexError, TypeError):
        stop(f"{where}: {name}: missing")
    if allowed and not any(type(value) is type(a) and value == a for a in allowed):  # True == 1, but it is no choice
        stop(f"{where}: {name}: wanted one of {', '.join(map(str, allowed))}, found {json.dumps(value)[:40]}")
    if not allowed and not isinstance(value, str):
        stop(f"{where}: {name}: wanted a string, found {json.dumps(value)[:40]}")
    if not allowed and any("\ud800" <= ch <= "\udfff" for ch in value):
        stop(f"{where}: {name}: holds half a surrogate pair, which is not text")
    return value


def query(subreddit, title, post, count):
    """The prompt, its post cut until there are at most QUERY tokens; None if they are too many even without a post."""
    while True:
        text = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
        if count(text) <= QUERY:
            return text
        if not post:
            return None
        post = post[:post.rfind("\n")]  # no newline: rfind is -1 and one character goes, as in OpenAI's code


def spaced(text):
    """text, to follow "TL;DR:". The comparisons' summaries come with the space, those of the posts without."""
    return text if text.startswith(" ") else " " + text


def as_chat(prompt):
    """The prompt as a message: an instruct model is asked in words for what "TL;DR:" asks of a base model."""
    post = prompt.removesuffix("\n\nTL;DR:")
    return [{"role": "user", "content": f"Summarize this Reddit post in one or two sentences.\n\n{post}"}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE, help="URL, or a folder of the same layout (default: OpenAI's)")
    parser.add_argument("--out", default=HERE, help="folder to write into (default: this script's)")
    parser.add_argument("--tokenizer", default="EleutherAI/pythia-1b", help="hub name or folder (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="prompts as chat messages, for models with a chat template")
    parser.add_argument("--limit", type=int, default=0, help="at most so many rows a file, 0 = all (default: 0)")
    args = parser.parse_args()
    limit = args.limit if args.limit > 0 else math.inf
    source = pathlib.Path(args.source).resolve().as_uri() if os.path.isdir(args.source) else args.source.rstrip("/")
    raw = os.path.join(args.out, "raw")
    os.makedirs(raw, exist_ok=True)
    socket.setdefaulttimeout(60)  # or a dead connection is waited for without end

    try:
        from transformers import AutoTokenizer  # here: --help should not wait for it
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    except (ImportError, OSError, ValueError) as e:
        stop(f"--tokenizer={args.tokenizer}: {str(e).strip().splitlines()[0]}")
    tokenizer.model_max_length = sys.maxsize  # what is too long is our business; no need to be warned of it

    def count(text):  # as our trainers encode: text that looks like a special token is text
        return len(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    kept, dropped = collections.Counter(), collections.defaultdict(collections.Counter)
    unfinished = {name: os.path.join(raw, f"{name}.part") for name in NAMES}  # renamed at the end: all or nothing
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(unfinished[name], "w", encoding="utf-8")) for name in NAMES}

        def write(name, **row):
            files[name].write(json.dumps(row) + "\n")
            kept[name] += 1

        def fits(name, longest, prompt, *completions):
            """Whether the row is good; counts it as dropped if not."""
            if prompt is None:
                reason = f"query over {QUERY} tokens even without its post"
            elif not all(text.strip() for text in completions):
                reason = "empty completion"
            elif max(map(count, completions)) + 1 > longest:  # + 1: the EOS
                reason = f"completion over {longest} tokens"
            else:
                return True
            dropped[name][reason] += 1
            return False

        for file, part in POSTS.items():
            for where, row in rows(fetch(f"{source}/datasets/tldr_3_filtered/{file}.jsonl", raw)):
                if kept[f"sft_{part}"] >= limit:
                    break
                prompt = query(*(field(where, row, name) for name in ("subreddit", "title", "post")), count)
                completion = spaced(field(where, row, "summary"))
                if fits(f"sft_{part}", SFT, prompt, completion):
                    write(f"sft_{part}", prompt=prompt, completion=completion)
                    write(f"prompts_{part}", prompt=as_chat(prompt) if args.chat else prompt)

        for batch in BATCHES:
            if min(kept["prefs_train"], kept["prefs_val"]) >= limit:
                break  # before the next download
            for where, row in rows(fetch(f"{source}/dataset/comparisons/{batch}.json", raw)):
                part = SPLITS[field(where, row, "split", allowed=list(SPLITS))]
                if kept[f"prefs_{part}"] >= limit:
                    continue
                prompt = query(*(field(where, row, f"info.{name}") for name in ("subreddit", "title", "post")), count)
                choice = field(where, row, "choice", allowed=[0, 1])  # the index of the better of two summaries
                chosen, rejected = (spaced(field(where, row, f"summaries.{i}.text")) for i in (choice, 1 - choice))
                if fits(f"prefs_{part}", PREFS, prompt, chosen, rejected):
                    write(f"prefs_{part}", prompt=prompt, chosen=chosen, rejected=rejected)

    for name in NAMES:
        os.replace(unfinished[name], os.path.join(args.out, f"{name}.jsonl"))
        reasons = "".join(f"; dropped {n}: {reason}" for reason, n in sorted(dropped[name].items()))
        print(f"{name}.jsonl: {kept[name]} rows{reasons}")

if __name__ == "__main__":
    main()
