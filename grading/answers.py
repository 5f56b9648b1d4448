r"""
The whole text of a response, and the answer in it.

    a response      <think>3 + 2 = 5</think>So the length is $x = \tfrac52$ cm. I hope this helps!
    final_answer    $x = \tfrac52$ cm

same.py says whether the answer is right. This file reads text that a model wrote: nothing is
evaluated as code, every size is bounded, and no text raises an exception. docs/rewards.md has a
table of the forms.
"""
import re
from fractions import Fraction

from grading.same import DENIED, DOUBT, EXPRESSION, GROUP, LONGEST, plain, read_answer

LONGEST_TEXT = 20_000  # characters at the end of a completion in which final_answer looks


# --------------------------------------------------------------------------------------------------
# the text of a response


def whole_responses(batch):
    """The texts that the rules judge: opening_of and completion of each response."""
    rows, completions = batch["rows"], batch["completions"]
    prompts = batch.get("prompts") or [None] * len(rows)
    return [opening_of(row.get("prompt"), text) + completion
            for row, text, completion in zip(rows, prompts, completions, strict=True)]


def opening_of(prompt, text=None):
    """
    The part of the prompt that belongs to the response; "" for most. prompt: the data's, text or
    messages. text: the text that the policy read, if it is known. If the last message is the
    assistant's, it is that message, from its <think> on if it has one. Where the text ends with
    <think>, from the data or a chat template, it is "<think>".
    """
    last = prompt[-1] if isinstance(prompt, list) else dict(role="user", content=prompt or "")
    begun = last["content"] if last["role"] == "assistant" else ""
    if last["role"] == "assistant" and text is not None:
        asked = prompt[-2]["content"].strip()
        read = text.rpartition(asked)[2] if asked and asked in text else ""  # behind the question
        thoughts = re.search(r"<think>(?!\s*</think>)", read)  # and not empty ones
        at = thoughts.start() if thoughts else read.rfind(begun.strip())
        begun = read[at:] if at >= 0 else begun
    if "<think>" in begun:
        return begun[begun.index("<think>"):]
    read = last["content"] if text is None else text
    return "<think>" if read.rstrip().endswith("<think>") else begun


# --------------------------------------------------------------------------------------------------
# the place of the answer


def final_answer(completion):
    r"""
    The final answer of a completion, as `stated` finds it: in the last \boxed{} behind the
    thinking; without one in the last <answer>...</answer>, and there behind the last ####; without
    them in the whole text. "<think>3+6+0=09</think>so \boxed{579}" -> "579". If the thinking never
    ends, the completion is returned as it is: with its "<think>" it equals no answer.
    """
    text = after_thinking(completion)
    if "<think>" in text:
        return text
    text = text[-LONGEST_TEXT:].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return stated(boxed)
    for place in (TAGGED, HASHED):
        text = last_match(place, text, text)
    return stated(text)


def after_thinking(completion):
    """
    The text behind the last </think>, without blanks at its ends; all of it if there is none. Of
    gpt-oss the last message in the channel final; without one the thinking has not ended.
    """
    if "<|channel|>" in completion:
        _, ended, text = completion.rpartition("<|channel|>final<|message|>")
        return text.strip() if ended else f"<think>{completion}"
    return completion.rpartition("</think>")[2].strip()


# For last_boxed: \boxed{; \boxed without braces before a number, a command or a single letter, and
# all that follows without a blank; \{, which is no brace to count; a brace.
BOX = re.compile(rf"""\\(?:boxed|fbox)(?![a-zA-Z])\s*
    (?:\{{ | (?P<bare> (?=[-+.(0-9A-Z\\] | [a-z](?![a-z]))
                       (?:[^\s${{}}\\] | \\(?!boxed|fbox|[)\]])\S | {GROUP})+ (?<![.,;:])))
    | \\. | [{{}}]""", re.DOTALL | re.VERBOSE)


def last_boxed(text):
    r"""
    The contents of the last \boxed{...} or \fbox{...} (by its beginning); without braces, as in
    \boxed 5, up to a blank or a $. None if there is none. One pass over the text.
    """
    opened = []  # for each open brace: where its contents begin, and whether they are boxed
    begin, end = -1, -1  # of the contents found so far
    for match in BOX.finditer(text):
        if match["bare"]:
            begin, end = max((begin, end), match.span("bare"))
        elif match[0].endswith("{") and match[0] != r"\{":
            opened.append((match.end(), match[0] != "{"))
        elif match[0] == "}" and opened:
            start, boxed = opened.pop()
            if boxed and start > begin:
                begin, end = start, match.start()
    return text[begin:end] if begin >= 0 else None


# the contents of <answer>...</answer>, the innermost
TAGGED = re.compile("<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
HASHED = re.compile(r"####(?!#)\s*((?:[^#\n]|#(?!###))*)")  # the end of GSM8K's solutions


def last_match(pattern, text, otherwise=None):
    """The group of the pattern's last match; `otherwise` if there is none."""
    return [otherwise, *pattern.findall(text)][-1]


# a line of its own, with the answer behind it or below it: Answer: 72, - **Final answer**: 72
LABEL = re.compile(r"""[\W_]* (?:\d{1,2}[.)][\W_]*)? (?:(?:the|my|our|your)\ )?
    (?:final\ result | (?:(?:final|correct|numerical)\ )*(?:answer|ans\b))
    [ \t*_]* (?:->|=>|[:：=→]|(?<=ans)\.|$) (?:__)? (?P<answer>.*)""", re.IGNORECASE | re.VERBOSE)
# a paragraph that may follow an answer below its label
BEHIND = re.compile(r"[\W_]*(?:explanation|reason|check|verification|note|steps)", re.IGNORECASE)
ANSWER_IS = re.compile(r"""(?P<before>.*)\b(?:answer|(?:correct|right|best)\ (?:option|choice))\b
    (?P<between>[^.:;=?!]{0,60}?) \b(?:is|was|equals|(?:must|should|would|will|has\ to)\ be)\b
    (?:\ (?:equal\ to|therefore|thus|then|hence|simply)\b)* [ ,:]* (?P<stated>.*)""",
                       re.IGNORECASE | re.VERBOSE)
IS_THE_ANSWER = re.compile(r"(\S+) is (?:the|my|our) (?:final |correct )?answer")
# the beginning of a sentence that concludes; its usual nouns; its verb
SO = re.compile(r"""(?: (?:so|thus|therefore|hence|then|finally|consequently|altogether|and|that|it
    \ follows|in\ (?:conclusion|total|all)|we\ (?:get|have|find|obtain|conclude)) \b[ ,:]*
    | (?:∴|→|⇒|=>|\\therefore\b|\\implies\b|\\Rightarrow\b)\ * )+""", re.IGNORECASE | re.VERBOSE)
NOUN = re.compile(r"\b(?:answer|result|solution|total|sum|value)\b", re.IGNORECASE)
VERB = re.compile(r"\b(?:is equal to|is|are|equals?|has|have|gets?)\b|(?<![<>!:])=", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?])[*_\"”)$]*\s+|\n+")
# a sentence behind the answer that does not belong to it: I hope this helps!
REMARK = re.compile(r"""[\s*_✅✓✔☑∎■□😊🙂👍🎉-]*$ | [^\d$\\=]*\b(?:hope|let\ me\ know|feel\ free|bye
    |hesitate|questions?|help(?:s|ful)?|thanks?|welcome|luck|cheers|glad|happy|enjoy|done|qed
    |have\ a\ (?:great|good|nice))\b[^\d$\\=]*$""", re.IGNORECASE | re.VERBOSE)


def stated(text):
    r"""
    The answer that a text states, or else the text, without polite remarks at its end. It is the
    text behind "answer is" in the last line; or behind or below the last label such as Answer:; or
    the conclusion of the last sentence ("Thus x + y = 5." -> "x + y = 5"), or its bold end.
    """
    text = re.sub(r"\\text[a-z]* *\{([^{}]*\b[aA]ns(?:wer)?\b[^{}]*)\}", r"\1 ", text).strip()
    ends, end = [match.end() for match in SENTENCE_END.finditer(text)], len(text)
    while (ends and end - ends[-1] < 300 and REMARK.match(last := text[ends[-1]:end])
           and not DENIED.search(last)):
        end = ends.pop()
    lines = text[:end].rstrip().split("\n")
    found = answer_is(lines[-1]) or labelled(lines) or concluded(lines[-1])
    if found is None:
        return text[:end].strip(" \n✅✓✔") or text
    return re.split(r",? (?:because|since)\b", found)[0].strip(" \t\n\r*✅✓✔")


def answer_is(line):
    """The text behind a line's last "answer is"; None if there is none, or the line doubts it."""
    if not (match := ANSWER_IS.match(line)):
        return None
    clause = re.split(r"[.!?;:] |, (?:so|but|hence|thus|therefore|then|the|my|our)\b",
                      match["before"])[-1]
    doubted = ANSWER_IS.match(clause) or DOUBT.search(clause + match["between"])
    return None if doubted else match["stated"].strip(" *.!")


def labelled(lines):
    """The text behind the last label, or the paragraph below it; None if there is none."""
    for i in reversed(range(len(lines))):
        match = LABEL.match(lines[i])
        answer = match["answer"].strip(" \t*") if match else ""
        if not answer.strip("_-") and (match or answer_is(lines[i]) == ""):
            text = "\n".join(lines[i + 1:]).strip()
            answer, *more = re.split(r"\n[ \t]*\n", text, maxsplit=1)
            answer = "" if more and not BEHIND.match(more[0]) else answer
        if answer.strip("_-"):
            last = answer.rpartition("\n")[2]
            return answer_is(last) or concluded(last, label=True) or answer
    return None


def concluded(line, label=False):
    """
    The conclusion of a line's last sentence, or its bold end; None if it has neither. In a sentence
    with a verb (So the total is 5.) only a formula is read. label: a label is before it.
    """
    sentence = SENTENCE_END.split(line)[-1]
    if bold := re.search(r"(?<!\*\* and )(?<!\*\*, )\*\*([^*]+)\*\*[.!]?$", line):
        before = sentence.removesuffix(bold[0])
        return None if DOUBT.search(before) else bold[1].strip(" *.!")
    so = SO.match(sentence)
    sentence = sentence[so.end() if so else 0:].strip(" *!").removesuffix(".")
    if match := IS_THE_ANSWER.fullmatch(sentence):
        return match[1]
    if len(sentence) > LONGEST or "?" in sentence or not (so or VERB.search(sentence)):
        return None
    name, value, _ = read_answer(plain(sentence), loose=True)
    if name or isinstance(value, Fraction):
        return sentence if so else None
    subject, *rest = VERB.split(sentence, maxsplit=1)
    value = plain(" ".join(rest))
    formula = isinstance(read_answer(value, loose=True)[1], Fraction) or EXPRESSION.fullmatch(value)
    letters = EXPRESSION.fullmatch(plain(subject.replace("$", "")))  # x + y is 5
    clear = so or label or letters or NOUN.search(subject)
    if not clear or DOUBT.search(subject) or not formula:
        return None
    return (f"{subject.strip()} = " if letters else "") + rest[0].strip()
