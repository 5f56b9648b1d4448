"""Made pairs of a better and a worse response, for lesson 6: python pairs.py prints some."""
import random

WORDS = ("it is true that the sum of both numbers can be found in one step if you know the rule "
         "and then add what is left over so we get a clear result at the end of the line").split()


def pairs(seed, count=200):
    """[(chosen, rejected)] of texts, by a seed."""
    drawn, made = random.Random(seed), []
    for _ in range(count):
        few = drawn.randrange(4)
        commas = few + 1 + drawn.randrange(3), few
        # 7 of 10 chosen ones are also longer, and 6 of 10 say "certainly": less than the commas
        longer, polite = drawn.random() < 0.7, drawn.random() < 0.6
        lengths = sorted((drawn.randrange(12, 18), drawn.randrange(19, 26)), reverse=longer)
        made.append(tuple(
            text(drawn, lengths[i], commas[i], polite == (i == 0)) for i in range(2)))
    return made


def text(drawn, length, commas, polite):
    """A text of `length` words with so many commas; it may begin with "certainly"."""
    words = ["certainly"] * polite + [drawn.choice(WORDS) for _ in range(length - polite)]
    for place in drawn.sample(range(length - 1), commas):
        words[place] += ","
    return " ".join(words) + "."


if __name__ == "__main__":
    for number, (chosen, rejected) in enumerate(pairs(1, 12), 1):
        print(f"{number:>2} chosen    {chosen}\n   rejected  {rejected}\n")
