"""
TL;DR, the task of the published PPO-RLHF curves: summarise a Reddit post. Downloads OpenAI's
public data, checks it and writes our JSONL. Only transformers is needed, for its tokenizer.

    python data/tldr/prepare.py                     # lengths by Pythia's tokenizer
    python data/tldr/prepare.py --tokenizer=DIR     # by another model's
    python data/tldr/prepare.py --chat              # PPO's prompts as chat messages, for llama.py

Writes beside itself:
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
import os
import pathlib
import sys
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
# Python looks for modules in this file's folder; these are in the folder above it.
sys.path.insert(0, os.path.dirname(HERE))

from files import parser_of, write_rows  # noqa: E402

from errors import BadInput  # noqa: E402
from options.sources import raw_rows  # noqa: E402

SOURCE = "https://openaipublic.blob.core.windows.net/summarize-from-feedback"
POSTS = {"train": "train", "valid": "val"}  # their file: our part
SPLITS = {"train": "train", "valid1": "val", "valid2": "val"}  # of comparisons: the same
BATCHES = [f"batch{i}" for i in [*range(3, 21), 22]] + ["edit_b2_eval_test"]  # there is no batch21
QUERY, SFT, PREFS = 512, 53, 169  # the most tokens of a query, of a completion with its EOS
NAMES = [f"{kind}_{part}" for kind in ("sft", "prompts", "prefs") for part in ("train", "val")]


def query(said, count):
    """
    The prompt of a post {"subreddit", "title", "post"}, whose end is cut off until the prompt has
    at most QUERY tokens; None if it has more even without the post. count: text -> its number of
    tokens.
    """
    head = f"SUBREDDIT: r/{said['subreddit']}\n\nTITLE: {said['title']}\n\nPOST: "
    post = said["post"]
    while True:
        text = f"{head}{post}\n\nTL;DR:"
        if count(text) <= QUERY:
            return text
        if not post:
            return None
        # cut at the last newline; without one rfind is -1: one character goes, as in OpenAI's code
        post = post[:post.rfind("\n")]


def as_chat(prompt):
    """The prompt as a chat message: a sentence asks for the summary, in place of "TL;DR:"."""
    post = prompt.removesuffix("\n\nTL;DR:")
    asked = "Summarize this Reddit post in one or two sentences."
    return [{"role": "user", "content": f"{asked}\n\n{post}"}]


def checked(row, longest, count):
    """A row, whose texts beside the prompt get a space in front; or why it is dropped."""
    texts = {name: " " + row[name].removeprefix(" ") for name in row if name != "prompt"}
    if row["prompt"] is None:
        return f"query over {QUERY} tokens even without its post"
    if not all(text.strip() for text in texts.values()):
        return "empty completion"
    if max(map(count, texts.values())) + 1 > longest:  # + 1: the EOS
        return f"completion over {longest} tokens"
    return row | texts


def post_rows(row, part, count, chat):
    """(our file, row, or why it is dropped) of a post with its summary."""
    made = checked(dict(prompt=query(row, count), completion=row["summary"]), SFT, count)
    yield f"sft_{part}", made
    if isinstance(made, dict):
        yield f"prompts_{part}", dict(prompt=as_chat(made["prompt"]) if chat else made["prompt"])


def pair_rows(row, count):
    """The same of a comparison of two summaries; choice: the index of the better one."""
    better = int(row["choice"])
    yield f"prefs_{SPLITS[row['split']]}", checked(dict(
        prompt=query(row["info"], count), chosen=row["summaries"][better]["text"],
        rejected=row["summaries"][1 - better]["text"]), PREFS, count)


def fetch(source, name):
    """
    The path in raw/ of the file `name` of a source, which is a URL or a folder. It is downloaded,
    unless it is there. A file that is not complete has another name.
    """
    if os.path.isdir(source):
        source = pathlib.Path(source).resolve().as_uri()
    url, local = f"{source.rstrip('/')}/{name}", f"{HERE}/raw/{os.path.basename(name)}"
    if not os.path.exists(local):
        print(f"downloading {url}", flush=True)
        os.makedirs(f"{HERE}/raw", exist_ok=True)
        try:  # urlretrieve raises an error if the download is cut short
            urllib.request.urlretrieve(url, local + ".part")
        except (OSError, ValueError) as e:
            raise BadInput(f"{url}: cannot download: {e}") from e
        os.replace(local + ".part", local)
    return local


def all_rows(source, count, chat):
    """(our file, row, or why it is dropped) of everything. Raises BadInput."""
    files = {f"datasets/tldr_3_filtered/{file}.jsonl": part for file, part in POSTS.items()}
    files |= {f"dataset/comparisons/{batch}.json": None for batch in BATCHES}
    for file, part in files.items():
        path = fetch(source, file)
        for where, row in raw_rows(path):
            try:
                yield from post_rows(row, part, count, chat) if part else pair_rows(row, count)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as e:
                raise BadInput(f"{path}, {where}: not a row of OpenAI's layout ({e!r})") from e


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--source", default=SOURCE,
                        help="URL, or a folder of the same layout (default: OpenAI's)")
    parser.add_argument("--tokenizer", default="EleutherAI/pythia-1b",
                        help="hub name or folder (default: %(default)s)")
    parser.add_argument("--chat", action="store_true",
                        help="PPO's prompts as chat messages, for models with a chat template")
    args = parser.parse_args()
    from transformers import AutoTokenizer  # here: --help need not wait for it

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    tokenizer.model_max_length = sys.maxsize  # no warnings: lengths are checked

    def count(text):
        # as our trainers encode it: text that looks like a special token is text
        return len(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    write_rows(HERE, NAMES, all_rows(args.source, count, args.chat))
