"""A rule beside `accuracy`: does a solution end as it was asked to?"""
import re


def form(batch):
    """A number for each response: 1.0 where its last line is #### and a number, else 0.0."""
    return [float(bool(re.search(r"(^|\n)#### -?[\d,.]+\s*$", text)))
            for text in batch["completions"]]
