"""
The reward of search, --reward_functions=data/search/reward.py:solved, and what else a policy does,
to be counted with a weight of 0, as in 0*data/search/reward.py:attempts. Rows have `numbers` and
`target`, as prepare.py writes them.
"""
import re


def solved(batch):
    """B numbers: 1.0 where the last attempt of a response is legal and hits, else 0.0."""
    return [float(values[-1:] == [row["target"]]) for row, _, values in responses(batch)]


def attempts(batch):
    """B numbers: how many attempts a response has."""
    return [float(len(texts)) for _, texts, _ in responses(batch)]


def repeats(batch):
    """B numbers: the share of a response's attempts that are in it before."""
    return [1 - len(set(texts)) / len(texts) if texts else 0.0 for _, texts, _ in responses(batch)]


def slips(batch):
    """B numbers: the share of a response's attempts that are not legal."""
    return [values.count(None) / len(values) if values else 0.0
            for _, _, values in responses(batch)]


def overlooked(batch):
    """B numbers: 1.0 where a response goes on behind a hit, as if it were a miss, else 0.0."""
    return [float(row["target"] in values[:-1]) for row, _, values in responses(batch)]


def responses(batch):
    """
    (row, texts of the attempts, their values) of each response. Of 2-6=-4-5=-9-4=-13?2+6=8-5=3
    the texts are what stands before the mark, and what stands behind it; the values are -13, None.
    """
    for row, response in zip(batch["rows"], batch["completions"], strict=True):
        texts, values = [text for text in re.split("[?!]", response) if text], ways(row["numbers"])
        yield row, texts, [values.get(text) for text in texts]


def ways(numbers):
    """
    {attempt: value} of all that are legal: all numbers in their order, and each running result. In
    their order, +, -: [2, 6] -> {"2+6=8": 8, "2-6=-4": -4}; of four numbers +++, ++-, ..., ---.
    """
    found = {str(numbers[0]): numbers[0]}
    for number in numbers[1:]:
        found = {f"{text}{sign}{abs(step)}={value + step}": value + step
                 for text, value in found.items() for sign, step in (("+", number), ("-", -number))}
    return found
