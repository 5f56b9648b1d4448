"""
What tools/prove.py does inside a small run: it changes one thing, and notes what is seen. The
functions of the rooms are wrapped before the script imports them, in whichever room they stand.

A note is a line of JSON in a file of the rank: "begin"; "state", the plain values that live when an
iteration begins; "gradient", of a step; "batch", three sums of each column; "look", a fault that
can be seen at once.
"""
import contextlib
import functools
import importlib
import json
import os
import random
import re
import sys
import time

import small_world
import torch
from small_world import rooms_of, wrap


def before(folder, how, root):
    """For small_world.Started: what happens in a rank's process before the script begins."""
    cwd = os.getcwd()

    def prepare(rank):
        os.chdir(cwd)  # files that a key names are found as in the run itself
        if root != small_world.ROOT:
            small_world.of_copy(root)(rank)
        rooms, number = rooms_of(root), 77 if "elsewhere" in how else 0
        random.seed(number), torch.manual_seed(number)
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy").random.seed(number)
        if "elsewhere" in how:  # another time of day; new memory is full of NaN
            now = time.time
            time.time = lambda: now() + 123456.7
            torch.utils.deterministic.fill_uninitialized_memory = True
            wrap(rooms, "choose_kernels", then=lambda *_: torch.use_deterministic_algorithms(
                True, warn_only=True))
        change_batches(rooms, how)
        see(rooms, f"{folder}/notes-{rank}", how, root)

    return prepare


# -------------------------------------------------------------------------------------------------
# what is changed of a batch

def change_batches(rooms, how):
    def other_rows(batch, *_):
        if "ids" in how:
            T = batch["tokens"].shape[1]
            padding = torch.arange(T) >= batch["lengths"][:, None]
            junk = 97 + torch.arange(padding.numel()).view_as(padding) * 7 % 26
            batch["tokens"] = torch.where(padding, junk, batch["tokens"])
        if "order" in how:
            order = shuffled(len(batch["tokens"]), how["order"])
            batch |= {name: x[order] for name, x in batch.items() if name != "index"}

    def more_columns(_, batch, *args):
        T = batch["tokens"].shape[1]
        for name, x in batch.items():
            if "wide" in how and x.shape[1:] == (T,):
                fill = 0 if name != "tokens" else next(
                    y.tokenizer.pad_id for y in args if hasattr(y, "tokenizer"))
                batch[name] = torch.nn.functional.pad(x, (0, how["wide"]), value=fill)

    def stir(batch, terms):
        """Rules that a random policy never fulfils teach nothing: then 0 or 1, by the text."""
        mask = batch["response_mask"]
        ids = (batch["tokens"] * mask * (torch.arange(mask.shape[1]) % 5 + 1)).sum(1)
        for name in [*(f"reward/{name}" for _, name, rule in terms if rule), "accuracy"]:
            x = batch.get(name)
            if x is not None and (x == x[0]).all():
                batch[name] = (ids * 7 % 11 < 5).to(x)
        if "bump" in how:  # one response's rewards, in one iteration
            if how["bump"]["wait"] == 0:
                how["bump"]["row"] = row = one_of(batch)
                for weight, name, _ in terms:
                    batch[f"reward/{name}"][row] += how["bump"]["by"] * (-1 if weight < 0 else 1)
            how["bump"]["wait"] -= 1

    def same_minibatches(order, n, *key):
        if "order" in how and "minibatches" in key:  # the same responses, at their new places
            return shuffled(n, how["order"]).argsort()[order]

    wrap(rooms, "sample_batch", then=other_rows)
    wrap(rooms, "score_batch", then=more_columns)
    wrap(rooms, "add_scores", first=stir)
    wrap(rooms, "permutation", then=same_minibatches)


def shuffled(n, size):
    """An order of n rows in which the groups, and in each another way its rows, change places."""
    if n % size:
        return torch.arange(n)
    number = torch.arange(n // size)[:, None]
    return (number.flip(0) * size + (torch.arange(size) + number) % size).flatten()


def one_of(batch):
    """The row of a response that has ended, and is like no other; of these the longest."""
    lengths, finished = batch["lengths"].tolist(), batch["finished"].tolist()
    texts = [ids[:n] for ids, n in zip(batch["tokens"].tolist(), lengths, strict=True)]
    return max(range(len(texts)), key=lambda i: (
        texts.count(texts[i]) == 1, finished[i], int(batch["response_mask"][i].sum())))


# -------------------------------------------------------------------------------------------------
# what is seen

def see(rooms, path, how, root):
    from run import Run

    steps, kept, learned, zero, masks, said = 0, {}, {}, {}, [], set()

    def write(kind, **what):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(kind=kind) | what) + "\n")

    def look(what, name, **more):
        if (what, name) not in said:
            said.add((what, name))
            write("look", what=what, name=name, **more)

    def begun(_, run, *args):
        learned.update({name: [p for p in model.parameters() if p.requires_grad]
                        for name, model in run.trained.items()})
        kept["start"] = {name: [p.detach().clone() for p in ps] for name, ps in learned.items()}

    def iterations(run, numbers=Run.iterations):
        nonlocal steps
        for iteration in numbers(run):
            steps = 0
            if "state" in how:
                write("state", iteration=iteration,
                      names=states(sys._getframe(1).f_globals, root))
            if how.get("signal", [-1])[0] == iteration:
                os.kill(os.getpid(), how["signal"][1])
            yield iteration

    def logged(run, record, batch=None, *args):
        columns, own = {}, {}
        if batch:
            own = {name: x for name, x in sys._getframe(2).f_globals.items() if name not in batch
                   and isinstance(x, torch.Tensor) and x.is_floating_point()}
            columns = {name: sums_of(x, batch) for name, x in (batch | own).items()
                       if name not in ("index", "begins", "lengths")}
            if "drift" in how and "batch" not in kept or how.get("bump", {}).get("wait") == -1:
                kept["batch"] = {name: x.clone() for name, x in batch.items()}
        write("batch", iteration=run.iteration, own=[name for name in own if columns[name]],
              columns={name: x for name, x in columns.items() if x})

    def step(run, gradients, lrs, *args, make=Run.step):
        nonlocal steps
        old = {name: [(p, p.detach().clone(), p.grad.clone()) for p in learned[name]
                      if p.grad is not None] for name in lrs} if steps == 0 else {}
        norms = make(run, gradients, lrs, *args)
        for name, parts in old.items():
            if lrs[name] > 0 and name in norms:
                zero.setdefault(name, []).append(norms[name] == 0)
                with contextlib.suppress(Exception):  # of shards
                    if by_sign(parts):
                        look("sign", name)
        steps += 1
        return norms

    def over(run, *args):
        for name, parameters in learned.items():
            if any(zero.get(name, ())):  # in later steps of an iteration all may be clipped
                look("zero", name)
            elif all(map(torch.equal, kept["start"][name], parameters)):
                look("still", name)
        if batch := kept.get("batch"):
            from model import response_logprobs

            reference = next((name for name in run.models if name.startswith("ref")), "policy")
            with torch.no_grad():
                logprobs, ref = (response_logprobs(
                    run.models[name], batch, how["temperature"])[0] for name in (
                    "policy", reference if "drift" in how else "policy"))
            write("end", kl=(logprobs - ref).square().mean().item(),
                  score=logprobs[how.get("bump", {}).get("row", 0)].sum().item())

    def reduced(_, gradients, *args):
        for name, buffers in gradients.items():
            with contextlib.suppress(Exception):  # of shards
                flat = torch.cat([b.flatten() for b in buffers])
                way = torch.sin(torch.arange(len(flat), dtype=flat.dtype))
                write("gradient", step=steps, model=name, norm=flat.norm().item(),
                      sum=flat.dot(way).item())

    def note_masks(result, batch, *args):
        """Those of a batch, or of micro-batches that are made of it."""
        masks.extend(x["response_mask"] for x in [batch, *(result or [])])

    def check_masks(name, *args):
        for x in args:
            near = [m for m in masks if getattr(x, "dtype", 0) == torch.bool
                    and m.shape[1:] == x.shape[1:]]
            if near and (x[:, None] & ~torch.cat(near)).any(2).all(1).any():  # x: of some rows
                look("mask", name)
        if name == "compute_gae" and args[0].shape == args[2].shape:
            if count := int((args[0].masked_fill(args[2], 0) != 0).sum()):
                look("lost", "rewards", count=count)

    write("begin")
    Run.iterations, Run.step = iterations, step
    wrap([Run], "__init__", then=begun), wrap([Run], "log", logged), wrap([Run], "finish", over)
    wrap(rooms, "all_reduce_gradients", then=reduced)
    wrap(rooms, "score_batch", then=note_masks), wrap(rooms, "micro_batches", then=note_masks)
    for name in ("masked_sum", "masked_mean", "masked_whiten", "compute_gae", "add_up",
                 "token_weights"):
        wrap(rooms, name, functools.partial(check_masks, name))


def by_sign(parts):
    """Whether numbers whose gradient is rounding move as far as others. parts: see step."""
    moved = torch.cat([(p.detach() - old).abs().flatten() for p, old, _ in parts])
    size = torch.cat([grad.abs().flatten() for _, _, grad in parts])
    small = (size > 0) & (size < 1e-12 * size.max())
    return bool((moved[small] > 1e-4 * moved.max()).any())


def sums_of(x, batch):
    """Three sums of a column (B,) or (B, T), which do not depend on padding or the rows' order."""
    mask, x = batch["response_mask"], x.detach()
    B, T = mask.shape
    if x.shape not in ((B,), (B, T)):
        return None
    ids = batch["tokens"].double() % 89 + torch.arange(T) % 7  # a number for each token
    x = x.double().nan_to_num(17.0)
    x, name = (x[mask], ids[mask]) if x.dim() == 2 else (x, torch.where(mask, ids, 0).sum(1))
    return [x.sum().item(), (x * x).sum().item(), (x * name).sum().item()]


def states(names, root):
    """{name: a short text} of all plain values that live in the script, and in the rooms."""
    found = {name: x for name, x in names.items()
             if name not in ("run", "config", "system", "out_dir")}
    for name, module in [*sys.modules.items()]:
        file = str(getattr(module, "__file__", "")).partition(f"{root}/")[2]
        if re.match(r"\w+\.py|(options|grading)/", file) and name not in ("errors", "ranks"):
            found |= {f"{name}.{key}": x for key, x in vars(module).items()}
    known = {}
    for name, x in found.items():
        with contextlib.suppress(Exception):
            if "__" not in name and (text := shown(x)) is not None:
                known[name] = text
    return known


def shown(x, depth=0):
    """A short text of a plain value, tensor, container or small object; None: of anything else."""
    home = type(x).__module__.partition(".")[0]
    if x is None or isinstance(x, (bool, int, float, str)):
        return repr(x)[:60]
    if home == "numpy":  # a generator; or an array, whose repr leaves out what is in the middle
        x = x.bit_generator.state if hasattr(x, "bit_generator") else torch.as_tensor(x)
    if isinstance(x, torch.Tensor):
        return f"{tuple(x.shape)} {x.detach().double().nan_to_num().sum().item()!r}"
    if type(x).__name__ in ("Generator", "Random"):
        return str(hash(str(x.get_state().tolist() if hasattr(x, "get_state") else x.getstate())))
    if isinstance(x, (list, tuple, set, frozenset)) or type(x).__name__ == "deque":
        many = sorted(x, key=str) if isinstance(x, (set, frozenset)) else x
        return f"[{', '.join(str(shown(y, depth + 1)) for y in many)}]" if depth < 4 else None
    if type(x).__module__ == "torch.optim.lr_scheduler":
        x = x.state_dict()
    if getattr(x, "__module__", "") == "__main__":  # what hangs on a class or function
        if hasattr(x, "cache_info"):
            return str(x.cache_info())
        held = [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
        held = enumerate([*(getattr(x, "__defaults__", None) or ()), *held])
        x = {key: y for key, y in [*vars(x).items(), *held]
             if "__" not in str(key) and not callable(y)}
    elif not isinstance(x, dict) and not callable(x) and home not in (
            "torch", "transformers", "tokenizers", "functools", "builtins"):
        x = vars(x)
    if isinstance(x, dict) and depth < 4:
        return str({str(key): shown(y, depth + 1) for key, y in x.items()}).replace("'", "")
    return None
