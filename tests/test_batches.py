"""batches.py: the table of columns against the batches of real runs; micro-batches."""
import itertools
import json
import re
import shutil

import pytest
import torch

import batches
import parallel
from batches import MAX_PADDING, deal_rows, micro_batches
from formulas import masked_sum
from tiny import EOS, jsonl, keys_of, well, write

LINE = r"    (\S+) +\((B,|B, T)\) +(int64|bool|float) "  # of the table
TABLE = {name: (dims, dtype) for name, dims, dtype in re.findall(LINE, batches.__doc__)}
CHAT = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}
{{ m.role + m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>
{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"""
TOOL = """
def clock() -> int:
    \"\"\"The hour.\"\"\"
    return 7
"""


def columns_of(script, folder, keys):
    """{column: (dims, dtype)} of the batch that a run logs last; its B and T are not equal."""
    def before(rank):
        from run import Run

        def log(self, record, batch=None, *rest, _log=Run.log, **more):
            if batch:
                dims = {tuple(batch["scores"].shape): "B,", tuple(batch["tokens"].shape): "B, T"}
                with open("columns.json", "w", encoding="utf-8") as f:
                    json.dump({name: [dims[tuple(x.shape)], str(x.dtype)]
                               for name, x in batch.items()}, f)
            return _log(self, record, batch, *rest, **more)

        Run.log = log

    well(script, folder, keys, before=before)
    with open(f"{folder}/columns.json", encoding="utf-8") as f:
        return json.load(f)


def test_the_table_of_columns_is_that_of_real_batches(world, tmp_path):
    """Each column of a run is in the table, with its dims and dtype, and each line in some run."""
    shutil.copytree(world.policy, tmp_path / "policy")
    write(tmp_path / "policy" / "generation_config.json", json.dumps(dict(eos_token_id=EOS)))
    tools = dict(
        policy_path=tmp_path / "policy", max_new_tokens=20,
        tools=f"{write(tmp_path / 'tools.py', TOOL)}:clock",
        chat_template=write(tmp_path / "chat.jinja", CHAT), prompts_path=jsonl(
            tmp_path / "chats.jsonl", [dict(prompt=[dict(role="user", content="a")])]))
    letters, seen = f"{world.rules}:letters", set()
    for number, (script, dtype, changed) in enumerate([
            ("ppo.py", "float64", {}),
            ("ppo.py", "float32", dict(
                environment=f"{world.rules}:talks", reward_functions=f"environment,{letters}",
                max_new_tokens=20, reward_path="", value_init="policy", staleness=1)),
            ("grpo.py", "float64", dict(max_refills=1, truncated="mask", kl_coef=0)),
            ("grpo.py", "bfloat16", tools)]):
        keys = keys_of(world, script, max_iters=2, eval_path="", dtype=dtype, **changed)
        for name, (dims, kind) in columns_of(script, tmp_path / str(number), keys).items():
            name = re.sub("^reward/.+", "reward/NAME", name)
            wide = "float64" if dtype == "float64" else "float32"
            wanted = TABLE[name][1].replace("float", wide)
            assert (dims, kind) == (TABLE[name][0], f"torch.{wanted}"), (script, number, name)
            seen.add(name)
    assert seen == TABLE.keys()


@pytest.mark.parametrize("ranks, size, most",
                         [*itertools.product((1, 2, 7, 100), (1, 5, 64), (0, 150))])
def test_rows_are_dealt_like_cards(monkeypatch, ranks, size, most):
    """Each row once; within the limits; as many parts on each rank; about equally many tokens."""
    lengths = torch.randint(1, 100, (61,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(parallel, "rank_and_size", lambda rank=rank: (rank, ranks))
        parts.append(deal_rows(lengths, size, most))
    assert sorted(i for mine in parts for part in mine for i in part) == list(range(61))
    assert len({len(mine) for mine in parts}) == 1
    for part in itertools.chain(*parts):
        held = [lengths[i] for i in part]
        tokens = len(part) * max(held, default=0)
        assert tokens - sum(held) <= MAX_PADDING
        assert len(part) <= size if most == 0 else len(part) <= 1 or tokens <= most
    of_rank = [sum(lengths[i] for part in mine for i in part) for mine in parts]
    assert max(of_rank) - min(of_rank) <= max(lengths)


def test_micro_batches_have_each_row_as_it_was():
    """Of random rows with gaps in the response: the columns that the longest one of them uses."""
    T, B, drawn = 12, 23, torch.Generator().manual_seed(0)
    lengths = torch.randint(2, T + 1, (B,), generator=drawn)
    mask = torch.rand(B, T, generator=drawn) < 0.8
    batch = dict(tokens=torch.randint(0, 9, (B, T), generator=drawn), index=torch.arange(B),
                 response_mask=mask & (torch.arange(T) < lengths[:, None]), lengths=lengths,
                 logprobs=torch.randn(B, T, generator=drawn), two=torch.randn(B, 2))
    seen, wanted = [], torch.tensor([4, 22, 0, *range(7, 20)])
    for mb in micro_batches(batch, wanted, 4):
        rows, W = mb["index"], lengths[mb["index"]].max()
        for name, x in mb.items():
            of_row = batch[name][rows]
            assert torch.equal(x, of_row[:, :W] if of_row.shape[1:] == (T,) else of_row), name
        assert mb["response_mask"].sum() == batch["response_mask"][rows].sum()
        seen += rows.tolist()
    assert sorted(seen) == sorted(wanted.tolist())


def test_a_micro_batch_without_rows_adds_nothing(monkeypatch):
    """A forward reads one text all the same; what is computed with it is 0, and in no row."""
    batch = dict(tokens=torch.ones(1, 5, dtype=torch.int64), lengths=torch.tensor([5]),
                 response_mask=torch.ones(1, 5).bool(), index=torch.arange(1),
                 advantages=torch.ones(1, 5))
    parts = []
    for rank in range(2):
        monkeypatch.setattr(parallel, "rank_and_size", lambda rank=rank: (rank, 2))
        parts += micro_batches(batch, batch["index"], 4)
    first, empty = parts
    assert first["tokens"].shape == (1, 5) and empty["tokens"].shape == (1, 2)
    logprobs = torch.ones(empty["tokens"].shape, requires_grad=True)
    loss = masked_sum(-empty["advantages"] * logprobs, empty["response_mask"])
    loss.backward()
    assert loss == 0 and not logprobs.grad.any() and len(empty["index"]) == 0
