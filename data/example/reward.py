"""A reward of your own, the smallest: of two right answers the shorter one is better."""


def brevity(batch):
    """A number for each response; what else batch holds: docs/data.md."""
    return [1 / (1 + len(text)) for text in batch["completions"]]
