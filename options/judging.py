"""
A language model as a judge: its question about a prompt and a response, and the tokens of its
answers. The question is a template, a text with fields in braces: {prompt}, {response} and, if you
like, {answer}, the row's. Its first line may name the answers, best first; otherwise A and B:

    answers: A B C
    Question: {prompt}
    Answer: {response}
    Is it right? A: yes. B: in parts. C: no.

A judge of pairs (data/label.py) reads {first} and {second} in the place of {response}.
"""
import os
import re

import torch

from errors import BadInput, say, shorten
from grading.answers import answer_text
from load import autocast, load
from model import at_least_float32, no_grad_forwards
from options.chats import joined
from options.mistakes import file_of_key
from rewards import score_sequences

SHOWN = ("Below are a question and an answer to it.\n\n[Question]\n{prompt}\n\n"
         "[Answer]\n{response}\n\n")
REPLY = "Reply with one letter and nothing else.\nThe letter is:"
GRADES = ("perfect", "excellent", "very good", "good", "fair", "mediocre", "weak", "poor",
          "very poor", "useless")  # from 10 down to 1
TEMPLATES = dict(
    yes_no=SHOWN + "Is this a good answer to the question?\nA: yes\nB: no\n" + REPLY,
    # the grades have letters, because "10" is two tokens in many tokenizers
    rubric="answers: A B C D E F G H I J\n" + SHOWN + "Grade the answer from 10 down to 1.\n"
           + "".join(f"{letter}: {10 - i}, {GRADES[i]}\n" for i, letter in enumerate("ABCDEFGHIJ"))
           + REPLY,
    compare="Below are a question and two answers to it.\n\n[Question]\n{prompt}\n\n"
            "[First answer]\n{first}\n\n[Second answer]\n{second}\n\n"
            "Which answer is better?\nA: the first one\nB: the second one\n" + REPLY,
)
FIELD = re.compile(r"\{(\w+)\}")


class Judge:
    """
    A frozen language model that answers the question of a template with one of a few tokens. It is
    used like a reward model: its score, at the question's last token, is the log-odds of the
    answers. answers: the ids of their tokens, best first.
    """

    def __init__(self, model, tokenizer, path, judge_template="yes_no", responses=("response",)):
        """path: the model's. responses: the template's fields for judged texts. Raises BadInput."""
        self.model, self.config, self.parameters = model, model.config, model.parameters
        self.base, self.must_fetch = model.base, model.must_fetch
        self.tokenizer, self.path, self.responses = tokenizer, path, responses
        self.name = f"judge_template {judge_template!r}"
        self.chat = bool(tokenizer.chats)
        words, self.text = answers_and_question(template_text(judge_template))
        self.words, self.fields = words or ["A", "B"], {*FIELD.findall(self.text)}
        if len({*self.words}) < max(len(self.words), 2) or not words and not all(
                re.search(rf"\b{word}\b", self.text) for word in self.words):
            raise BadInput(f"{self.name}: name two different answers or more in its first line, as "
                           f"'answers: A B', best first; found {shorten(' '.join(self.words))}")
        if not {*responses} <= self.fields <= {"prompt", "answer", *responses}:
            needed = " and ".join(f"{{{name}}}" for name in responses)
            raise BadInput(f"{self.name} has the fields {sorted(self.fields)}; it needs {needed}, "
                           "and may have {prompt} and {answer}")
        self.opening = []  # ids behind each question
        self.find_answers()

    def scores(self, tokens, last):
        """Questions (b, W), padded on the right, with their last tokens at `last` (b,) -> (b,)."""
        states = self.model.states(tokens)[torch.arange(len(tokens)), last]  # (b, d)
        logits = at_least_float32(self.model.logits(states))  # (b, V)
        return log_odds(logits[:, self.answers])

    def in_words(self):
        """A line for the user: template and answers."""
        how = "in its own chat template" if self.chat else "as plain text"
        answers = ", ".join(f"{word} (token {i})"
                            for word, i in zip(self.words, self.answers, strict=True))
        return f"judge {self.path}: it reads {self.name} {how}; its answers: {answers}"

    def find_answers(self):
        """
        Set answers, and opening, the ids that a chat template writes before an answer, as Qwen3's
        empty thoughts. In plain text a blank is before it, if they are one token. Raises BadInput.
        """
        text = fill(self.text, dict.fromkeys(self.fields, "x"))
        ids = self.encode_text(text)
        for blank in ("",) if self.chat else (" ", ""):
            answered = [self.encode_answered(text, ids, blank + word) for word in self.words]
            same = len(os.path.commonprefix(answered))
            found = [more[same] if len(more) > same else None for more in answered]
            fit = [i is not None and self.tokenizer.decode([i]).strip() == word
                   for i, word in zip(found, self.words, strict=True)]
            if all(fit) and (same == len(ids) or self.chat and same > len(ids)):
                self.answers, self.opening = found, answered[0][len(ids):same]
                return
        word = self.words[fit.index(False) if False in fit else 0]
        raise BadInput(f"{self.name}: the answer {word!r} is not one token to the judge "
                       f"{self.path}; name others in the template's first line, as 'answers: A B'")

    def encode_answered(self, text, ids, word):
        """The ids of a question with an answer behind it. ids: of the question alone."""
        if not self.chat:
            return self.encode_text(text + word)
        more = self.tokenizer.chats.ids_of([dict(role="user", content=text),
                                            dict(role="assistant", content=word)])
        if more[:len(ids)] == ids:
            return more
        # the template writes a finished turn in another way
        return ids + self.tokenizer.encode_texts([word])[0]

    def encode_text(self, text):
        """Ids of a filled template, before the answer; in a chat it is a user's message."""
        prompt = [dict(role="user", content=text)] if self.chat else text
        return self.tokenizer.encode_prompts([prompt])[0] + self.opening

    def encode(self, row, responses):
        """
        The ids of the question about one response (or two) to a data row's prompt. Where they do
        not fit into the judge's context, the responses lose their ends: one long response must not
        stop a run. Raises BadInput where the rest does not fit.
        """
        ids = self.encode_whole(row, responses)
        limit = self.model.max_positions
        if len(ids) <= limit:
            return ids
        least = len(self.encode_whole(row, [""] * len(responses)))
        if least > limit:
            raise BadInput(f"without the response the question has {least} tokens, and the "
                           f"judge's context has {limit}; shorten the prompt or the template")
        while len(ids) > limit:
            share = (limit - least) / (len(ids) - least)
            responses = [text[:int(share * (len(text) - 1))] for text in responses]
            ids = self.encode_whole(row, responses)
        return ids

    def encode_whole(self, row, responses):
        """encode, without a limit of tokens. Raises BadInput."""
        if "answer" in self.fields and row.get("answer") is None:
            raise BadInput(f"{self.name} shows the answer, and the row with the prompt "
                           f"{shorten(row['prompt'])} has none")
        dialogues = [joined(row["prompt"], text) for text in responses]
        said = dict(zip(self.responses, (its[-1]["content"] for its in dialogues), strict=True))
        return self.encode_text(fill(self.text, said | dict(
            prompt=as_text(dialogues[0][:-1]), answer=answer_text(row.get("answer")))))


def template_text(template):
    """The text of a built-in template or of a file. Raises BadInput."""
    return TEMPLATES.get(template) or file_of_key(
        template, "judge_template", f"; there are {', '.join(TEMPLATES)}, or a file")


def answers_and_question(text):
    """Of "answers: yes no\nIs it so?" (["yes", "no"], "Is it so?"); [] without such a line."""
    first, _, rest = text.strip().partition("\n")
    named = re.fullmatch("answers:([^{]*)", first, re.IGNORECASE)
    if not named:
        return [], text.strip()
    return named[1].replace(",", " ").split(), rest.strip()


def log_odds(logits):
    """
    A judge's score in nats: logits (..., K) of K answers, best first -> (...). With two it is
    log p(A) - log p(B). With more, answer k of 0 .. K - 1 counts for the response with the weight
    1 - k / (K - 1), and against it with the rest:

        log(sum of weight p) - log(sum of (1 - weight) p)

    With the grades 10, 9 .. 1 it is logit((g - 1) / 9) of the expected grade g.
    """
    weights = torch.linspace(1, 0, logits.shape[-1], dtype=logits.dtype, device=logits.device)
    good, bad = (logits + w.log() for w in (weights, 1 - weights))  # (..., K); log 0 is -inf
    return good.logsumexp(-1) - bad.logsumexp(-1)


def fill(text, fields):
    """A template with {field: its text} in its braces."""
    return FIELD.sub(lambda found: fields[found[1]], text)


def as_text(messages):
    """A dialogue as the text of a prompt: one message as it is, several with their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)


judges = {}  # {path: its Judge}: loaded at the first rollout


def judge_scores(part, total, micro_batch_size, system, device):
    """The judge's scores of this rank's responses, of `total` responses of all ranks."""
    path = system.judge_path
    if path not in judges:
        model = load(path, "judge", system, device)
        judges[path] = Judge(model, model.tokenizer, path, system.judge_template)
        say(judges[path].in_words())
    judge = judges[path]
    texts = part["completions"]
    if "dialogues" in part:
        texts = [as_text(messages) for messages in part["dialogues"]]
    ids = [judge.encode(row, [text]) for row, text in zip(part["rows"], texts, strict=True)]
    with autocast(system, device), no_grad_forwards([judge.model], device):
        return score_sequences(judge, ids, micro_batch_size, device, total)
