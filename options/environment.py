"""
Several turns: the keys environment, tools and max_turns. An environment answers the policy, and
the policy goes on from there, in one response:

    prompt      user:       What is 37 * 46?
    response    assistant:  calc(37*46)          sampled: response_mask is True
                user:       1702                 of the environment: response_mask is False
                assistant:  1702                 sampled

An environment is a function of the user's:

    env(messages, row) -> None                   the dialogue is over
                       -> message                the policy reads it: a string (of the role
                                                 user), or {"role": "user" or "tool", "content"}
                       -> (message or None, reward)   the reward of the turn before, too

The function is pure: it gives the same answer to the same dialogue. The ids of a dialogue are
exact: nothing that was sampled is encoded again. A template that drops or rewrites earlier turns
would show the policy another dialogue than the one that it has learned from: it is refused.
"""
import contextlib
import copy
import inspect
import itertools
import math
import re
import traceback

import torch

from batches import as_batch
from errors import BadInput, Stop, first_line, shorten
from options.blanks import encode_behind
from options.chats import joined
from options.failures import place_of
from options.time_limit import Late, in_time
from options.user_code import load_function
from ranks import this_rank
from rollout import response_seeds

made = {}  # {tokenizer: its Environment}


def environment_of(system, tokenizer):
    """
    The Environment of a run, made before the prompts are encoded, for tools stand in them, and on
    all ranks, for those that only score read dialogues, too. Raises BadInput.
    """
    if tokenizer not in made:
        if system.environment and system.tools:
            raise BadInput(f"environment = {system.environment!r} and tools are both given; leave "
                           "one out: your environment can call the functions itself")
        made[tokenizer] = Environment(system, tokenizer)
        tokenizer.messages_of = made[tokenizer].messages_of
    return made[tokenizer]


class Environment:
    """It answers the policy: a function of the user's, or tools."""

    def __init__(self, system, tokenizer):
        """Raises BadInput where functions or template do not fit."""
        self.tokenizer, self.max_turns = tokenizer, system.max_turns
        self.timeout, self.tools = system.reward_timeout, None
        self.name = f"environment = {system.environment!r}"
        if system.tools:
            from options.tools import Tools

            self.tools = Tools(system, tokenizer)
            tokenizer.chats.kwargs["tools"] = self.tools.schemas  # for the template
        else:
            self.env = load_function(system.environment, self.name)
            self.seeded = "seed" in inspect.signature(self.env).parameters
        check_template(tokenizer, "tool" if self.tools else "user", self.tools)
        self.frames = frames(tokenizer)

    # ----------------------------------------------------------------------------------------------
    # sampling

    def converse(self, rows, prompts, uniforms, width, respond, noise, names):
        """
        The batch of B prompts and their responses of several turns, as batches.as_batch makes it,
        and turn_rewards (B, T): the environment's reward for a turn, on the turn's last token. With
        tools also failed_calls (B,), how many calls of a response were no good.

        rows: of the data, one for each prompt. uniforms: (B, R); token t of a response has the same
        one, whichever turn it is in. width: see as_batch. respond: the sampler of a turn, see
        rollout.sampling. noise, names: see rollout.sample_batch. Raises Stop.
        """
        (B, R), tokenizer = uniforms.shape, self.tokenizer
        said = [[] for _ in prompts]  # (id, whether it is sampled, log-prob, reward) of each token
        dialogues = [row["prompt"] for row in rows]  # the messages so far
        finished, failed, live = [False] * B, [0] * B, list(range(B))
        for turn in range(self.max_turns):
            contexts = [[*prompts[i], *(token[0] for token in said[i])] for i in live]
            used = torch.tensor([len(said[i]) for i in live]).long()
            budgets = (R - used).tolist()
            column = torch.arange(max(budgets, default=R)) + used[:, None]
            # a response ends before column R: it uses none from behind the %
            turns = respond(contexts, uniforms[live].gather(1, column % R), budgets=budgets)
            dtype, device = turns[1].dtype, turns[1].device  # of the log-probs
            asked, begun = [], []
            for i, context, ids, logprobs, count, ended in zip(
                    live, contexts, *(x.tolist() for x in turns), strict=True):
                said[i] += [(ids[t], True, logprobs[t], 0.0) for t in range(count)]
                if ended:  # else the turn is cut, and has no reply
                    text = self.text_of_turn(ids[:count], rows[i]["prompt"], turn)
                    dialogues[i] = joined(dialogues[i], text)
                    asked.append(i)
                    begun.append(tokenizer.text_of(context[-40:]))
            replies = self.ask(
                [dialogues[i] for i in asked], [rows[i] for i in asked],
                [(*noise, names[0][i], names[1][i], turn) for i in asked], begun)
            live = []
            for i, (message, reward, bad) in zip(asked, replies, strict=True):
                said[i][-1] = (*said[i][-1][:3], reward)
                failed[i] += bad
                finished[i] = message is None
                if message is None:
                    continue
                # a turn that a stop string has ended gets the template's end here
                extra = between(tokenizer, message, said[i][-1][0] in tokenizer.eos_ids)
                if turn + 1 < self.max_turns and len(said[i]) + len(extra) < R:
                    dialogues[i] = [*dialogues[i], message]
                    said[i] += [(token, False, 0.0, 0.0) for token in extra]
                    live.append(i)
            if not live or this_rank.stop:
                break

        def tensor(numbers, dtype):
            return torch.tensor(numbers, dtype=dtype, device=device)

        lengths = tensor([*map(len, said)], torch.int64)
        for tokens in said:
            tokens += [(tokenizer.pad_id, False, 0.0, 0.0)] * (R - len(tokens))
        ids, sampled, logprobs, rewards = (
            tensor([[token[n] for token in tokens] for tokens in said], its).view(B, R)
            for n, its in enumerate((torch.int64, torch.bool, dtype, dtype)))
        batch = as_batch(prompts, ids, logprobs, lengths, tensor(finished, torch.bool), width,
                         tokenizer.pad_id, sampled=sampled, turn_rewards=rewards)
        if self.tools:
            batch["failed_calls"] = tensor(failed, dtype)
        return batch

    def ask(self, dialogues, rows, names, begun):
        """
        [(message or None, reward, how many calls have failed), ...], the replies to dialogues.
        names: the parts of each one's seed. begun: the text before its last turn. Raises Stop.
        """
        if self.tools:
            return self.tools.answer([dialogue[-1]["content"] for dialogue in dialogues], begun)
        try:
            return in_time(self.timeout, self.ask_all, dialogues, rows, names)
        except Late as place:
            raise Stop(f"{self.name} has not answered for {self.timeout:g} s{place}; does it hang? "
                       "Raise reward_timeout if not") from place

    def ask_all(self, dialogues, rows, names):
        """Ask the user's function, the first dialogue twice: see whether it is pure."""
        asked = [*zip(dialogues, rows, names, strict=True)]
        replies = [self.ask_one(*each) for each in asked]
        if asked and self.ask_one(*asked[0]) != replies[0]:
            raise Stop(f"{self.name} gives two answers to the same dialogue, so no run could be "
                       "repeated; draw its random numbers from a third parameter, seed")
        return replies

    def ask_one(self, dialogue, row, name):
        """(message or None, reward, 0) of one dialogue. name: the parts of the reply's seed."""
        seed, purpose, iteration, slot, sample, turn = name
        purpose, more = f"{purpose} environment {turn}", {}
        if self.seeded:
            more["seed"] = response_seeds(seed, purpose, iteration, [slot], [sample])[0]
        try:
            reply = self.env(copy.deepcopy(dialogue), row, **more)
        except Exception as e:  # the user's code raises anything
            place = place_of(traceback.extract_tb(e.__traceback__))
            raise Stop(f"{self.name} failed{place}: {first_line(e)}") from e
        message, reward = reply if isinstance(reply, tuple) and len(reply) == 2 else (reply, 0.0)
        if isinstance(message, str):
            message = dict(role="user", content=message)
        good = message is None or (
            isinstance(message, dict) and message.keys() == {"role", "content"}
            and message["role"] in ("user", "tool") and isinstance(message["content"], str))
        if not good or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise Stop(f"{self.name} answered {shorten(reply)}: wanted None, a string, or {{role: "
                       "user or tool, content}; or one of these, and a reward, a finite number")
        return message, float(reward), 0

    # ----------------------------------------------------------------------------------------------
    # messages and ids

    def text_of_turn(self, ids, prompt, turn):
        """The text of a turn of the policy. Turn 0 continues the prompt; without a template all."""
        goes_on = turn == 0 or not self.tokenizer.chats
        return self.tokenizer.decode_response(ids, prompt if goes_on else None)

    def messages_of(self, ids, own, prompt=None):
        """
        The messages of a response, from its ids and which of them the policy sampled. The
        environment's words are the text between the template's marks. prompt: the data's.
        """
        messages = []
        for mine, part in itertools.groupby(zip(own, ids, strict=True), lambda pair: pair[0]):
            part = [token for _, token in part]
            if mine:
                text = self.text_of_turn(part, prompt, len(messages))
                messages.append(dict(role="assistant", content=text))
            elif self.tokenizer.chats:  # its marks are a part of the text
                messages.append(self.unframed(self.tokenizer.text_of(part)))
            else:
                messages.append(self.unframed(self.tokenizer.decode(part, continues=True)))
        return messages

    def unframed(self, text):
        """The message that the template has written as this text."""
        for role, pattern in self.frames:
            if match := re.fullmatch(pattern, text, re.DOTALL):
                return dict(role=role, **match.groupdict())
        return dict(role="user", content=text)


# --------------------------------------------------------------------------------------------------
# chat templates


def frames(tokenizer):
    """
    The text that the template makes of a message between two turns: [(role, pattern), ...]. A
    pattern has the group content, and name where the template names the tool. The longest comes
    first: many templates write a tool's answer within a turn of the user.
    """
    frames = []
    for head in (dict(role="user"), dict(role="tool"), dict(role="tool", name="NAME")):
        with contextlib.suppress(BadInput):  # it has no such role, or wants a name
            for ended in (True, False):
                ids = between(tokenizer, dict(head, content="CONTENT"), ended)
                pattern = re.escape(tokenizer.text_of(ids))
                pattern = pattern.replace("NAME", r"(?P<name>\S+)", 1)
                frames.append((head["role"], pattern.replace("CONTENT", "(?P<content>.*)", 1)))
    return sorted(frames, key=lambda frame: -len(frame[1]))


ASKED = [dict(role="user", content="a"), dict(role="assistant", content="b")]


def between(tokenizer, message, ended=True):
    """
    The ids that a chat template writes behind an assistant's turn, up to where the next one begins;
    without a template the content's. ended: else a stop string has ended it, and it gets its end.
    """
    if not tokenizer.chats:
        ids = encode_behind(tokenizer, [message["content"]])[0]
        return [tokenizer.eos_id] * (not ended) + ids
    before = tokenizer.chats.ids_of(ASKED)
    ends = [n for n, i in enumerate(before) if i in tokenizer.chats.turn_ends]
    if not ends:
        raise BadInput(f"{tokenizer.path} writes no end behind an assistant's message, so turns "
                       "cannot be told apart; give one with --chat_template=FILE")
    ids = tokenizer.chats.ids_of([*ASKED, message], add_generation_prompt=True)
    if ids[:ends[-1] + 1] != before[:ends[-1] + 1]:
        raise BadInput(f"{tokenizer.path} writes an assistant's message in another way when "
                       f"another one follows; {advice(tokenizer)}")
    return ids[ends[-1] + ended:]


def advice(tokenizer):
    """For error lines: the key to type where a template does not keep earlier turns."""
    ours = {"<|channel|>": "harmony.jinja", "<function=": "qwen3.5.jinja",
            "": "chatml.jinja for a model of the Qwen family"}
    file = next(file for mark, file in ours.items() if mark in tokenizer.chats.template)
    return (f"type --chat_template=options/templates/{file}, or give a FILE that keeps earlier "
            "turns as they were written")


def check_template(tokenizer, role, tools=None):
    """
    Raise BadInput unless the ids of a dialogue, put together turn by turn, are the whole's, also of
    turns with thoughts and of calls; and unless tools, the run's, read a call as the template has
    written it. role: who answers the policy, user or tool.
    """
    if not tokenizer.chats:
        return
    asked, reply = dict(role="user", content="a"), dict(role=role, content="c")
    if role == "tool":
        reply["name"] = "f"
    prompt = tokenizer.chats.ids_of([asked], add_generation_prompt=True)
    extra = between(tokenizer, reply)
    for answer in answers(tokenizer.text_of(prompt).rstrip(), role, tools):
        one = tokenizer.chats.ids_of([asked, answer])
        if "reasoning_content" in answer and "why" not in tokenizer.text_of(one):
            continue  # it does not know this field
        tail, whole = one[len(prompt):], tokenizer.chats.ids_of([asked, answer, reply, answer])
        ends = [n for n, i in enumerate(tail) if i in tokenizer.eos_ids]
        # the turn's end, or that of a call
        last = [n for n in ends if tail[n] in tokenizer.chats.turn_ends] or ends
        own = tail[:max(last, default=-1) + 1]  # the answer as the policy would sample it
        if one[:len(prompt)] == prompt and (not own or tokenizer.eos_ids.intersection(own[:-1])):
            raise BadInput(f"{tokenizer.path} writes a turn as {tokenizer.text_of(tail)!r}, and "
                           "sampling stops elsewhere; mend eos_token_id in generation_config.json")
        ours = [*prompt, *own, *extra, *own]
        forgets = "why" in str(answer) and tokenizer.text_of(whole).count("why") < 2
        if forgets or one[:len(prompt)] != prompt or whole[:len(ours)] != ours:
            does = ("drops the thoughts of earlier turns" if forgets else
                    "writes earlier turns otherwise than they were sampled")
            raise BadInput(f"{tokenizer.path} {does}, so the policy would learn from dialogues "
                           f"that it never sees later; {advice(tokenizer)}")
        if tools and "tool_calls" in answer:
            call, text = answer["tool_calls"][0]["function"], tokenizer.decode_response(own)
            if tools.calls_in(text) != [(call["name"], call["arguments"], None)]:
                raise BadInput(
                    f"{tokenizer.path} writes a call of {call['name']} as {shorten(text)}, which "
                    "is not read as one: type --chat_template=options/templates/chatml.jinja, if "
                    "the policy shall learn its calls, or read them in an environment")


def answers(prompt, role, tools):
    """Messages of the assistant to try a template with. prompt: the text of one, without blanks."""
    from options.tools import example

    texts = ["first", "<think>\nwhy\n</think>\n\nfirst"]
    if prompt.endswith(("<think>", "</think>")):  # it begins to think, or has ended it
        texts = texts[1:] if prompt.endswith("<think>") else texts[:1]
    messages = [dict(role="assistant", content=text) for text in texts]
    if not prompt.endswith("</think>"):
        messages.append(dict(role="assistant", content="first", reasoning_content="why"))
    if role == "tool":
        for name, schemas in tools.types.items() if tools else [("f", dict(a={}))]:
            values = {key: example(schema) for key, schema in schemas.items()}
            values = {key: value for key, value in values.items() if value is not None}
            call = dict(type="function", function=dict(name=name, arguments=values))
            messages.append(dict(messages[0], tool_calls=[call]))
    return messages


def reward_of_turns(batch):
    """The reward `environment`, (B, T): that of each turn, at the turn's last token."""
    return batch["turn_rewards"]


def figures_of_turns(batch):
    """The figures of a batch with several turns, for metrics.summarize."""
    mask = batch["response_mask"]  # (B, T)
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    tokens, own = batch["lengths"] - batch["begins"], mask.sum(1)  # (B,): of the response
    figures = dict(
        turns=(mask & ~before).sum(1).double().mean(),
        environment_share=((tokens - own).double() / tokens).mean())
    if "failed_calls" in batch:
        figures["failed_calls"] = batch["failed_calls"].double().mean()
    return figures
