"""options/ahead.py: whose text a batch is, and how far the policy has moved since, by hand."""
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import by_hand
from errors import BadInput
from options.ahead import Ahead
from tiny import keys_of, keys_of_system, read_log, well


def keep_batches(rank):
    """For `before`: each batch that is logged goes into a file."""
    import run

    log = run.Run.log

    def kept(self, record, batch=None, **more):
        if batch:
            names = ("tokens", "begins", "response_mask", "sampler_logprobs")
            save_file({name: batch[name].contiguous() for name in names},
                      f"batch-{self.iteration}.safetensors")
        return log(self, record, batch, **more)

    run.Run.log = kept


@pytest.mark.parametrize("script, staleness, cap", [
    ("ppo.py", 1, 0.0), ("grpo.py", 2, 0.0), ("ppo.py", 2, 2.0), ("grpo.py", 1, 2.0)])
def test_off_policy_kl(world, tmp_path, script, staleness, cap):
    """
    Of the tokens of iteration k, sampled by the weights after iteration k - 1 - staleness, p by
    these weights and q by those of now: the mean of q/p - 1 - log(q/p).
    """
    keys = keys_of(world, script, staleness=staleness, importance_cap=cap, checkpoint_interval=1,
                   keep_checkpoints=9, max_iters=5, num_minibatches=1, eval_path="",
                   reward_timeout=30)
    out = well(script, tmp_path, keys, before=keep_batches)
    for record in read_log(out)[:-1]:
        k = record["iteration"]
        version = max(k - staleness, 0)
        batch = load_file(f"{tmp_path}/batch-{k}.safetensors")
        now, then = (by_hand.language_model(
            f"{out}/checkpoint-{i:06d}/policy" if i else world.policy) for i in (k, version))
        moved = []
        for tokens, begin, said, seen in zip(batch["tokens"], batch["begins"],
                                             batch["response_mask"], batch["sampler_logprobs"],
                                             strict=True):
            prompt, response = tokens[:begin].tolist(), tokens[said].tolist()
            with torch.no_grad():
                p, q = (torch.stack(by_hand.logprobs_of(
                    model, prompt, response, keys["temperature"])[0]).tolist()
                        for model in (then, now))
            assert p == pytest.approx(seen[said].tolist(), abs=1e-10)
            moved += [math.exp(b - a) - 1 - (b - a) for a, b in zip(p, q, strict=True)]
        assert record.get("policy/staleness", 0) == k - version
        if k == version:
            assert "policy/off_policy_kl" not in record
        else:
            mean = sum(moved) / len(moved)
            assert mean > 1e-6 and record["policy/off_policy_kl"] == pytest.approx(mean, rel=1e-7)


def test_batches_with_other_columns_are_refused(tmp_path):
    """Of a run that was begun when prompts were padded on the left."""
    batch = dict(tokens=torch.ones(2, 5), attention_mask=torch.ones(2, 5),
                 response_mask=torch.ones(2, 3))
    save_file({f"3.2.{name}": t for name, t in batch.items()}, tmp_path / "batches.safetensors")
    run = SimpleNamespace(folder=str(tmp_path), device=torch.device("cpu"), kept={})
    with pytest.raises(BadInput, match="other columns"):
        Ahead(None, run, keys_of_system(staleness=1), [], None, 0.0)
