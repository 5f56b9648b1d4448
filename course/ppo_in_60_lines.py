"""
PPO on the toy, in 60 lines between those that load the four models and those that print: ppo.py
without ranks, keys, batches and checks. A response goes through each model alone, in the tokens
that were sampled. It samples the texts of `python ppo.py config/arithmetic_ppo.py --dtype=float64`,
and has its figures (a test compares them). nano/ppo.py adds, in 350 lines that import nothing of
quartet, what a run on a machine of its own needs: batches, ranks, keys and checkpoints.

    bash runs/quickstart.sh           # once, for the SFT model and the reward model
    python course/ppo_in_60_lines.py [iterations]

mine.py calls `iteration` with a student's functions in the place of those that are its arguments.
"""
import copy
import json
import os
import sys
from types import SimpleNamespace as Row

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM as LM  # noqa: E402
from transformers import AutoModelForSequenceClassification as Scalar  # noqa: E402
from transformers import AutoTokenizer, logging  # noqa: E402

from prompts import permutation  # noqa: E402  a random order, by a seed
from rollout import choose, response_uniforms  # noqa: E402  the same noise as in ppo.py

SFT, RM = "out/arithmetic_sft/policy", "out/arithmetic_rm/reward_model"
B, MAX_NEW, KL_COEF, GAMMA, LAM, CLIP, SEED, ITERATIONS = 256, 48, 1.0, 1.0, 0.95, 0.2, 1, 20
RATES = 1e-4, 3e-4  # of the policy, of the value model

logging.disable_progress_bar()
# the four models, the prompts
policy, reward_model = (kind.from_pretrained(path, dtype=torch.float64).eval()
                        for kind, path in ((LM, SFT), (Scalar, RM)))
ref_policy, value_model = copy.deepcopy(policy), copy.deepcopy(reward_model)
tokenizer = AutoTokenizer.from_pretrained(SFT)
optimizers = [torch.optim.AdamW(model.parameters(), eps=1e-5, weight_decay=0.0)
              for model in (policy, value_model)]
with open("data/arithmetic/rl_train.jsonl", encoding="utf-8") as f:
    data = [json.loads(line) for line in f]
prompts = [tokenizer(row["prompt"]).input_ids for row in data]


def right(response, answer):  # only to look at: no loss knows the answers
    text = tokenizer.decode(response).removesuffix(tokenizer.eos_token)
    return torch.tensor(float(text.split("</think>")[-1] == answer))


# here the 60 lines begin
def scalars(model, tokens):  # a number at each token, through the head of a reward or value model
    states = model.base_model(tokens[None]).last_hidden_state[0]
    return model.score(states)[:, 0] + model.config.score_shift


def sample(prompt, uniforms):  # one token after the other, until the EOS
    tokens = torch.tensor(prompt)
    for u in uniforms:
        probs = policy(tokens[None]).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, choose(probs, u[None])])
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return tokens


def logprobs(model, tokens):  # of each token but the first: it is chosen by the state before it
    return model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def gae(rewards, values):
    advantages, advantage, next_value = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = rewards[t] + GAMMA * next_value - values[t]
        advantage = delta + GAMMA * LAM * advantage
        advantages[t], next_value = advantage, values[t]
    return advantages


def policy_loss(new, old, advantages):  # the mean over the tokens of a response
    ratio = (new - old).exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()


def iteration(it, B=B, logprobs=logprobs, k1=torch.sub, gae=gae, policy_loss=policy_loss):
    rows, losses, count = [], 0.0, 0  # a row for each response
    with torch.no_grad():
        numbers = permutation(len(prompts), SEED, "epoch", 0)[it * B:(it + 1) * B].tolist()
        noise = response_uniforms(SEED, "rollout", it, range(B), MAX_NEW)
        for number, uniforms in zip(numbers, noise, strict=True):
            tokens, n = sample(prompts[number], uniforms), len(prompts[number])
            ended = tokens[-1] == tokenizer.eos_token_id
            score = scalars(reward_model, tokens)[-1] if ended else torch.tensor(-1.0)
            values = scalars(value_model, tokens)[n - 1:-1]
            old, ref = (logprobs(model, tokens)[n - 1:] for model in (policy, ref_policy))
            rewards = -KL_COEF * k1(old, ref)
            rewards[-1] += score
            advantages = gae(rewards, values)
            rows.append(Row(tokens=tokens, n=n, score=score, old=old, kl=k1(old, ref),
                            values=values, advantages=advantages, returns=advantages + values,
                            accuracy=right(tokens[n:], data[number]["answer"])))
        a = torch.cat([row.advantages for row in rows])
    for epoch in range(2):
        for step in permutation(B, SEED, "minibatches", it, epoch).tensor_split(2):
            total = sum(len(rows[i].old) for i in step)
            for row in (rows[i] for i in step):
                new = logprobs(policy, row.tokens)[row.n - 1:]
                values = scalars(value_model, row.tokens)[row.n - 1:-1]
                white = (row.advantages - a.mean()) / (a.var(correction=0) + 1e-8).sqrt()
                kept = row.values + (values - row.values).clamp(-CLIP, CLIP)
                errors = torch.max((values - row.returns)**2, (kept - row.returns)**2)
                pair = torch.stack([policy_loss(new, row.old, white), 0.5 * errors.mean()])
                (pair.sum() * len(new) / total).backward()
                losses, count = losses + pair.detach() * len(new), count + len(new)
            for optimizer, lr in zip(optimizers, RATES, strict=True):
                optimizer.param_groups[0]["lr"] = lr * (1 - it / ITERATIONS)
                optimizer.step()
                optimizer.zero_grad()
    means = {name: sum(getattr(row, name).sum().item() for row in rows) / B
             for name in ("score", "old", "kl", "advantages", "accuracy")}  # of a response
    return means | dict(zip(("policy loss", "value loss"), (losses / count).tolist(), strict=True))


# here they end
if __name__ == "__main__":
    for it in range(int(sys.argv[1]) if len(sys.argv) > 1 else ITERATIONS):
        print(it, "  ".join(f"{x} {figure:.7f}" for x, figure in iteration(it).items()), flush=True)
