"""
PPO on the toy, in 60 lines behind those that load the four models: ppo.py without ranks, keys,
batches and checks. A response goes through each model alone, in the tokens that were sampled.
It samples the texts of `python ppo.py config/arithmetic_ppo.py --dtype=float64`, and has its
figures (a test compares them). nano/ppo.py adds, in 350 lines that import nothing of quartet, what
a run on a machine of its own needs: batches, ranks, keys and checkpoints.

    bash runs/quickstart.sh           # once, for the SFT model and the reward model
    python course/ppo_in_60_lines.py [iterations]
"""
import copy
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM as LM  # noqa: E402
from transformers import AutoModelForSequenceClassification as Scalar  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from prompts import permutation  # noqa: E402  a random order, by a seed
from rollout import choose, response_uniforms  # noqa: E402  the same noise as in ppo.py

SFT, RM = "out/arithmetic_sft/policy", "out/arithmetic_rm/reward_model"
B, MAX_NEW, KL_COEF, GAMMA, LAM, CLIP, SEED, ITERATIONS = 256, 48, 1.0, 1.0, 0.95, 0.2, 1, 20

# the four models, the prompts
policy, reward_model = (kind.from_pretrained(path, dtype=torch.float64).eval()
                        for kind, path in ((LM, SFT), (Scalar, RM)))
ref_policy, value_model = copy.deepcopy(policy), copy.deepcopy(reward_model)
tokenizer = AutoTokenizer.from_pretrained(SFT)
optimizers = [torch.optim.AdamW(model.parameters(), eps=1e-5, weight_decay=0.0)
              for model in (policy, value_model)]
with open("data/arithmetic/rl_train.jsonl", encoding="utf-8") as f:
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in f]


# here the 60 lines begin
def logprobs(model, tokens, begin):  # of the response's tokens: each is chosen by the state before
    logits = model(tokens[None]).logits[0, begin - 1:-1]
    return logits.log_softmax(-1).gather(-1, tokens[begin:, None])[:, 0]


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


for it in range(int(sys.argv[1]) if len(sys.argv) > 1 else ITERATIONS):
    rows = []  # one for each response
    with torch.no_grad():
        numbers = permutation(len(prompts), SEED, "epoch", 0)[it * B:(it + 1) * B].tolist()
        noise = response_uniforms(SEED, "rollout", it, range(B), MAX_NEW)
        for prompt, uniforms in zip([prompts[n] for n in numbers], noise, strict=True):
            tokens, n = sample(prompt, uniforms), len(prompt)
            ended = tokens[-1] == tokenizer.eos_token_id
            score = scalars(reward_model, tokens)[-1] if ended else torch.tensor(-1.0)
            old, values = logprobs(policy, tokens, n), scalars(value_model, tokens)[n - 1:-1]
            kl = old - logprobs(ref_policy, tokens, n)  # k1
            rewards = -KL_COEF * kl
            rewards[-1] += score
            advantages, advantage, next_value = torch.zeros_like(values), 0.0, 0.0
            for t in reversed(range(len(values))):  # GAE
                delta = rewards[t] + GAMMA * next_value - values[t]
                advantage = delta + GAMMA * LAM * advantage
                advantages[t], next_value = advantage, values[t]
            rows.append(dict(tokens=tokens, n=n, old=old, values=values, kl=kl, score=score,
                             advantages=advantages, returns=advantages + values))
        a = torch.cat([row["advantages"] for row in rows])  # whitened over all tokens
        for row in rows:
            row["advantages"] = (row["advantages"] - a.mean()) / (a.var(correction=0) + 1e-8).sqrt()
    pg_sum = vf_sum = count = 0.0
    for epoch in range(2):
        order = permutation(B, SEED, "minibatches", it, epoch)
        for step in order.tensor_split(2):
            count += (tokens := sum(len(rows[i]["old"]) for i in step))
            for i in step:
                row = rows[i]
                ratio = (logprobs(policy, row["tokens"], row["n"]) - row["old"]).exp()
                pg_loss = torch.max(-row["advantages"] * ratio,
                                    -row["advantages"] * ratio.clamp(1 - CLIP, 1 + CLIP)).sum()
                values = scalars(value_model, row["tokens"])[row["n"] - 1:-1]
                kept = row["values"] + (values - row["values"]).clamp(-CLIP, CLIP)
                vf_loss = 0.5 * torch.max((values - row["returns"])**2,
                                          (kept - row["returns"])**2).sum()
                ((pg_loss + vf_loss) / tokens).backward()
                pg_sum, vf_sum = pg_sum + pg_loss.item(), vf_sum + vf_loss.item()
            for optimizer, lr in zip(optimizers, (1e-4, 3e-4), strict=True):
                optimizer.param_groups[0]["lr"] = lr * (1 - it / ITERATIONS)
                optimizer.step()
                optimizer.zero_grad()
    score, kl = (sum(row[x].sum().item() for row in rows) / B for x in ("score", "kl"))
    print(f"iteration {it}  score {score:.7f}  kl {kl:.7f}  policy loss {pg_sum / count:.7f}  "
          f"value loss {vf_sum / count:.7f}", flush=True)
