"""
PPO with your functions: logprobs, kl_estimates, gae and clipped_loss, of exercises 1, 5, 3 and 4.
It makes one iteration with those of ppo_in_60_lines.py and one with yours, and compares.

    python course/mine.py      # after bash runs/quickstart.sh, and after the exercises; a minute
"""
import copy
import os
import sys
from types import SimpleNamespace

import torch
from check import Slow, check_lesson, limited, raised, tensor_of
from torch.nn.utils.rnn import pad_sequence

torch.set_num_threads(1)  # models this small gain nothing from more
HERE, B = os.path.dirname(os.path.abspath(__file__)), 32
LESSONS = dict(logprobs=1, kl_estimates=5, gae=3, clipped_loss=4)
with open(f"{HERE}/ppo_in_60_lines.py", encoding="utf-8") as f:  # its models, sample and scalars
    exec(f.read().partition("\nfor it in")[0].replace("__file__", repr(__file__)), theirs := {})
they = SimpleNamespace(**theirs)
BEGIN = copy.deepcopy((they.policy.state_dict(), they.value_model.state_dict()))


def gae(rewards, values, mask, gamma, lam):
    advantages, advantage, after = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        advantage = rewards[t] + gamma * after - values[t] + gamma * lam * advantage
        advantages[t], after = advantage, values[t]
    return advantages


def clipped_loss(new, old, advantages, mask, c):
    ratio = (new - old).exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - c, 1 + c))[mask].mean()


OWN = SimpleNamespace(
    logprobs=lambda logits, ids, temperature: (logits[:-1] / temperature).log_softmax(-1).gather(
        -1, ids[1:, None])[:, 0],
    kl_estimates=lambda p, q: (p - q)[None], gae=gae, clipped_loss=clipped_loss)


def said(f, model, row):  # log-probs of a response's tokens
    return f.logprobs(model(row.tokens[None]).logits[0], row.tokens, 1.0)[row.n - 1:]


def kl(f, row):
    return f.kl_estimates(said(f, they.policy, row), said(f, they.ref_policy, row))[0]


@torch.no_grad()
def rollout(it):
    rows, noise = [], they.response_uniforms(they.SEED, "rollout", it, range(B), they.MAX_NEW)
    order = they.permutation(len(they.prompts), they.SEED, "epoch", 0)[it * B:(it + 1) * B]
    for number, uniforms in zip(order.tolist(), noise, strict=True):
        tokens = they.sample(they.prompts[number], uniforms)
        ended = tokens[-1] == they.tokenizer.eos_token_id
        score = they.scalars(they.reward_model, tokens)[-1] if ended else torch.tensor(-1.0)
        rows.append(SimpleNamespace(tokens=tokens, n=len(they.prompts[number]), score=score.item()))
    return rows, sum(row.score for row in rows) / B


def figures(f):
    """{name: figure} of an iteration of PPO with four functions, and the score of the next one."""
    they.policy.load_state_dict(BEGIN[0])
    they.value_model.load_state_dict(BEGIN[1])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-5, weight_decay=0.0)
                  for model, lr in ((they.policy, 1e-4), (they.value_model, 3e-4))]
    rows, score = rollout(0)
    with torch.no_grad():
        for row in rows:
            row.old = said(f, they.policy, row)
            row.kl = kl(f, row)
            row.values = they.scalars(they.value_model, row.tokens)[row.n - 1:-1]
            rewards, mask = -they.KL_COEF * row.kl, torch.ones(len(row.old), dtype=torch.bool)
            rewards[-1] += row.score
            row.advantages = f.gae(rewards, row.values, mask, they.GAMMA, they.LAM)
            row.returns = row.advantages + row.values
        a = torch.cat([row.advantages for row in rows])
        for row in rows:
            row.white = (row.advantages - a.mean()) / (a.var(correction=0) + 1e-8).sqrt()
    found = {"score": score, "log-prob": sum(row.old.sum().item() for row in rows) / B,
             "KL": sum(row.kl.sum().item() for row in rows) / B, "advantage": a.mean().item()}
    sums = torch.zeros(3).double()
    for epoch in range(2):
        for step in they.permutation(B, they.SEED, "minibatches", 0, epoch).tensor_split(2):
            some = [rows[i] for i in step]
            new = pad_sequence([said(f, they.policy, row) for row in some], True)
            old, white, before, returns = (pad_sequence([getattr(row, x) for row in some], True)
                                           for x in ("old", "white", "values", "returns"))
            mask = pad_sequence([torch.ones_like(row.old) for row in some], True) > 0
            values = pad_sequence([they.scalars(they.value_model, row.tokens)[row.n - 1:-1]
                                   for row in some], True)
            kept = before + (values - before).clamp(-they.CLIP, they.CLIP)
            pg_loss = f.clipped_loss(new, old, white, mask, they.CLIP)
            vf_loss = 0.5 * torch.max((values - returns)**2, (kept - returns)**2)[mask].mean()
            (pg_loss + vf_loss).backward()
            losses = torch.stack([pg_loss, vf_loss, torch.ones_like(vf_loss)]).detach()
            sums += losses * mask.sum()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found |= {"policy loss": (sums[0] / sums[2]).item(), "value loss": (sums[1] / sums[2]).item()}
    rows, found["score of iteration 1"] = rollout(1)
    with torch.no_grad():
        found["KL of iteration 1"] = sum(kl(f, row).sum().item() for row in rows) / B
    return found


HINTS = {"log-prob": "logprobs", "KL": "kl_estimates: row 0 is k1", "advantage": "gae",
         "policy loss": "clipped_loss, or its gradient",
         "value loss": "gae, if it changes its arguments",
         "score of iteration 1": "the gradient of clipped_loss, or of logprobs",
         "KL of iteration 1": "kl_estimates: row 0 is k1"}


def yours():
    """The student's four functions, with results as tensors; and how exact these are."""
    exact, found = [1e-6], SimpleNamespace()
    for name, number in LESSONS.items():
        words = check_lesson(number)[name]
        print(f"lesson {number}, {name}: {words or 'right'}", flush=True)
        if "is empty" in words or not hasattr(sys.modules.get(f"exercise{number}"), name):
            sys.exit("mine.py: it needs this function")

        def call(*arguments, name=name, module=sys.modules[f"exercise{number}"]):
            result = limited(getattr(module, name), *arguments)
            if "float32" in str(getattr(result, "dtype", "")):
                exact[0] = 1e-3
            return tensor_of(result)

        setattr(found, name, call)
    return found, exact


if __name__ == "__main__":
    functions, exact = yours()
    try:
        ours, mine = figures(OWN), figures(functions)
    except (Exception, Slow) as error:
        sys.exit(f"mine.py: a function of yours {raised(error)}")
    for name, x in ours.items():
        if not abs(mine[name] - x) <= exact[0] * max(1, abs(x)):
            sys.exit(f"{name}: ppo_in_60_lines.py has {x:.7f}, yours {mine[name]:.7f}. Look at "
                     f"{HINTS.get(name, 'all')}")
        print(f"{name:20} {x:12.7f}  {mine[name]:12.7f}")
    print("your PPO is ppo.py's")
