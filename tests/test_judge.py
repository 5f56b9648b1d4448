"""
The reward "judge": its scores against transformers on the same text, its templates and what is wrong with them, and runs with it
on any number of ranks.
"""
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from options.judging import TEMPLATES, Judge, judged_by_reference
from tokenizer import load_tokenizer
from errors import BadInput
from rows import Rows
from model import freeze
from load import load_model
from rewards import score_sequences

import models_of_the_world
from tiny import assert_same_run, assistant, forked, one_run, user

rng = random.Random(1)
WORDS = ["Paris", "is", "1+2=3", "the fox", "dog,", "Sure!", "caf\u00e9", "\n", "{prompt}", "helpful", "user"]
PAIRS = [tuple(" ".join(rng.choices(WORDS, k=rng.randint(*n))) for n in ((1, 9), (0, 30))) for _ in range(8)]


def scores_of(judge, pairs, micro_batch_size):
    """What a judge says of each (prompt, response)."""
    questions = [judge.encode(dict(prompt=prompt), [response]) for prompt, response in pairs]
    return score_sequences(judge, questions, micro_batch_size, "cpu")


def judge_of(folder, template="yes_no", responses=("response",)):
    model, tokenizer = freeze(load_model(folder)), load_tokenizer(folder)
    return Judge(model, tokenizer, folder, str(template), responses)


def theirs(folder, texts, letters, chat, **kwargs):
    """What transformers says of the next token, (texts, letters): the log-probs of these letters. It reads one text at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        if chat:
            text = tokenizer.apply_chat_template([user(text)], tokenize=False, add_generation_prompt=True, **kwargs)
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if chat and folder.endswith("mistral"):  # its template writes a blank in front of an answer, here a token
            ids.append(tokenizer.convert_tokens_to_ids("\u2581"))
        blank = " " if letters == ["is", "the"] else ""  # these tokenizers have few words, and no letter with a blank
        tokens = [tokenizer(blank + letter, add_special_tokens=False)["input_ids"] for letter in letters]
        assert {len(each) for each in tokens} == {1}
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        rows.append(logprobs[[i for i, in tokens]])
    return torch.stack(rows)


def answers_of(name, folder, template, count, tmp_path):
    """
    (template, answers): letters and the template; or words and a file, for the tiny Mistral, with few tokens of one letter, and
    in plain text, where an answer begins with a blank if it can.
    """
    if name != "mistral" and (name in models_of_the_world.CHATS or count > 2):
        return template, "ABCDEFGHIJ"[:count]
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    words = sorted(token[1:] for token in vocabulary if token[0] == "\u2581" and token[1:].isalpha())[:count] or ["is", "the"]
    (tmp_path / "words.txt").write_text(f"answers: {' '.join(words)}\n{TEMPLATES[template].removeprefix(LETTERS)}")
    return tmp_path / "words.txt", words


LETTERS = "answers: A B C D E F G H I J\n"


def filled(template, prompt, response):
    """A built-in template by hand: fields that stand in a response stay as they are."""
    head, _, tail = TEMPLATES[template].removeprefix(LETTERS).partition("{response}")
    return head.replace("{prompt}", prompt) + response + tail


# scores


@pytest.mark.parametrize("name", models_of_the_world.FAMILIES)
def test_scores_as_transformers(name, families, tmp_path):
    """In the chat template, or as plain text where there is none; rubric, whose ten answers make one number."""
    folder, has_chat = families[name], name in models_of_the_world.CHATS
    kwargs = dict(enable_thinking=False) if name == "qwen3" else {}
    for built_in, count in (("yes_no", 2), ("rubric", 10)):
        template, answers = answers_of(name, folder, built_in, count, tmp_path)
        logprobs = theirs(folder, [filled(built_in, *pair) for pair in PAIRS], answers, has_chat, **kwargs)
        grades = (logprobs.softmax(-1) * torch.arange(count, 0, -1)).sum(-1)  # expected, from 1 to 10
        want = logprobs[:, 0] - logprobs[:, 1] if count == 2 else ((grades - 1) / (10 - grades)).log()
        assert (scores_of(judge_of(folder, template), PAIRS, 3) - want).abs().max() < 1e-4 < 2e-3 < want.std()


def test_chats_become_text(families):
    judge = judge_of(families["gpt2"])
    turns = [user("Hi"), assistant("Yes?"), user("1+2")]
    begun = [*turns, assistant("<think>")]
    for prompt, response, as_text in (
            ([turns[0]], "b", ("Hi", "b")), (turns, "3", ("user: Hi\n\nassistant: Yes?\n\nuser: 1+2", "3")),
            (begun, "3", ("user: Hi\n\nassistant: Yes?\n\nuser: 1+2", "<think>3"))):
        assert judge.tokenizer.decode(judge.encode(dict(prompt=prompt), [response])) == filled("yes_no", *as_text)


def test_a_template_that_writes_the_question_in_another_way_when_it_is_answered(families, tmp_path):
    (tmp_path / "counts.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    folder = families["qwen2.5"]
    tokenizer = load_tokenizer(folder, chat_template=str(tmp_path / "counts.jinja"))
    judge = Judge(freeze(load_model(folder)), tokenizer, folder, "yes_no", ("response",))
    assert judge.chat and judge.answers == [ids[0] for ids in tokenizer.encode_texts(["A", "B"])]


def test_a_long_response_loses_its_end(families, tmp_path):
    """The question behind it stays; a prompt that leaves no room for a response is refused before."""
    folder = models_of_the_world.make(tmp_path / "gpt2", "gpt2", context=160)
    judge = judge_of(folder)
    rows = Rows([dict(prompt="a b")], [("rows.jsonl", None, 1)])
    judge.check_rows(rows, "rows.jsonl", 10)
    for n in (1, 50, 500, 5000):
        ids = judge.encode(rows[0], ["dog, " + "fox " * n])
        text = judge.tokenizer.decode(ids)
        assert len(ids) <= 160 and text.endswith("The letter is:") and "[Question]\na b\n" in text and "dog, fox" in text
        assert len(ids) > 150 or n == 1
    assert scores_of(judge, [("a b", "fox " * 500)] * 2, 1).isfinite().all()
    long = [dict(prompt="a"), dict(prompt="the quick brown fox " * 30), dict(prompt="b")]
    with pytest.raises(BadInput, match="rows.jsonl, row 2: "):
        judge.check_rows(Rows(long, [("rows.jsonl", None, 3)]), "rows.jsonl", 10)
    left = Rows(long, [("rows.jsonl", None, 3)])
    judge.check_rows(left, "rows.jsonl", 10, "drop")
    assert [row["prompt"] for row in left] == ["a", "b"]


def test_a_file_of_the_users(world, tmp_path):
    """Answers of its own, the row's answer, braces that are no field; every byte by hand."""
    file = tmp_path / "mine.txt"
    file.write_text('answers: y, n\n{"q": {prompt}} {{prompt}} \\frac{1}{answer} {response} ok?\n\n')
    with pytest.raises(BadInput, match=r"\{1\}"):
        judge_of(world.judge, file)
    file.write_text('answers: y, n\n{"q": {prompt}} {{prompt}} {answer} {response} ok?\n\n')
    judge = judge_of(world.judge, file)
    assert judge.answers == [ord("y"), ord("n")] and judge.chat is False
    ids = judge.encode(dict(prompt="1+2=", answer=3), ["{answer}<eos>"])
    assert bytes(ids).decode() == '{"q": 1+2=} {prompt} 3 {answer}<eos> ok?'
    rows = Rows([dict(prompt="1", answer="1"), dict(prompt="2")], [("rows.jsonl", None, 2)])
    with pytest.raises(BadInput, match="rows.jsonl, row 2: .*'answer'"):
        judge.check_rows(rows, "rows.jsonl", 1)


# what is wrong


REFUSED = {
    "": "{response}", "{prompt}{response} good?": "no A and B", "{prompt} {response} {question}": "{question}",
    "answers: A\n{response}": "'A'", "answers: A A\n{response}": "'A A'", "answers: yes no\n{response}": "'yes'",
    "answers: 10 9\n{prompt} {response}": "'10'"}


def test_templates_that_are_refused(world, tmp_path):
    for text, named in REFUSED.items():
        (tmp_path / "t.txt").write_text(text)
        with pytest.raises(BadInput) as e:
            judge_of(world.judge, tmp_path / "t.txt")
        assert named in str(e.value) and "\n" not in str(e.value), text
    with pytest.raises(BadInput, match="nowhere.txt"):
        judge_of(world.judge, "nowhere.txt")


# runs

DUMP = """
import json, rewards
score = rewards.score_responses
def dumped(mine, *args):
    said = score(mine, *args)
    with open(f"scores-{RANK}.jsonl", "a") as f:
        for i, row in enumerate(mine["rows"]):
            print(json.dumps([row["prompt"], mine["completions"][i], said["reward/judge"][i].item()]), file=f)
    return said
rewards.score_responses = dumped
"""
@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    w = world
    with open(f"{w.root}/itself.txt", "w") as f:
        f.write("answers: A B\n{response}?")
    short = dict(dtype="float64", max_iters=2)
    judged = w.judged(**short) | dict(reward_functions=f"0.5*judge,{w.rule('letters')}",
                                      judge_template=f"{w.root}/other_question.txt")
    itself = dict(reward_functions="judge", judge_template=f"{w.root}/itself.txt", judge_path="ref_policy") | short
    split = dict(zero_stage="3", offload="judge=params", micro_batch_tokens=90)

    def run(ranks=1, **keys):
        return [one_run("grpo.py", *[(w.grpo("out", **keys), DUMP)] * ranks)]

    cases = dict(one=run(**judged), two=run(2, **judged | split), itself=run(**itself), lora=run(lora="2", kl_coef=0.0, **itself))
    return forked(tmp_path_factory.mktemp("runs"), cases).succeeded()


def test_a_split_judge_on_two_ranks(runs):
    assert_same_run(runs.out("one"), runs.out("two"), tolerance=1e-9)


@torch.no_grad()
def test_scores_of_runs_by_hand(runs, world):
    """Every response, one text at a time: by a judge with a tokenizer of its own; by the reference, of which there is no copy."""
    answers = {row["prompt"]: row["answer"] for path in (world.rl_train, world.rl_val) for row in map(json.loads, open(path))}
    for name, path, models in (
            ("one", world.judge, ["policy", "ref_policy", "judge"]), ("itself", world.policy, ["policy", "ref_policy"]),
            ("lora", world.policy, ["policy", "judge"])):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval(), load_tokenizer(path)
        result, = runs[name]
        assert [line.split()[0] for line in result["stdout"][0].splitlines() if "M parameters" in line] == models
        lines = [json.loads(line) for line in open(f"{runs.folder}/{name}/scores-0.jsonl")]
        assert len(lines) >= 30
        for prompt, response, score in lines:
            text = f"right: {response}, to {prompt} ({answers[prompt]})" if name == "one" else f"{response}?"
            p = model(torch.tensor([tokenizer.encode_texts([text])[0]])).logits[0, -1].softmax(-1)
            one, half, no = (p[ord(c)] for c in "123")
            odds = (one + half / 2) / (no + half / 2) if name == "one" else p[ord("A")] / p[ord("B")]
            assert odds.log().item() == pytest.approx(score, abs=1e-9)


def test_the_reference_by_another_path_is_the_reference(tmp_path, monkeypatch):
    """A dot, a slash, a link: the same folder, so no second copy of its weights. A hub name is compared as it is."""
    monkeypatch.chdir(tmp_path)
    for name in ("x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("x")
    for path in ("./x", "link", "other/../x"):
        assert judged_by_reference(path, "", "x") and judged_by_reference("x", path, "other"), path
        assert not judged_by_reference(path, "other", "x"), path
    assert judged_by_reference("Org/x", "", "Org/x") and not judged_by_reference("Org/x", "", "./Org/x")
